"""Reading VOC folders as people really write them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kscl.data.annotated.voc import VOC_CLASSES, found_class_names, parse_xml, read_voc
from kscl.errors import KsclError
from tests.helpers.data.sets import (
    SIZE,
    annotation_xml,
    only_problem,
    small_voc,
    write_image,
    write_voc,
)


@pytest.fixture
def voc(tmp_path):
    return small_voc(tmp_path / "voc")


def change(root, image_id, *replacements):
    """Edit one annotation; every text must be there, so that no test changes nothing."""
    path = root / "Annotations" / f"{image_id}.xml"
    text = path.read_text()
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


def test_a_good_folder_is_read_whole_with_boxes_from_zero(voc):
    found = read_voc(voc, "train").checked()
    assert found.class_names == ("cat", "dog")
    assert [image.id for image in found.images] == ["a", "b"]
    first, second = found.images[0].objects
    assert first.box == (0, 0, 20, 20)  # (1, 1, 20, 20) in the file
    assert second.box == (29, 9, 60, 40)
    assert (found.images[0].width, found.images[0].height) == SIZE
    assert [o.difficult for o in found.images[1].objects] == [True, False]
    assert found.counts() == {"cat": 2, "dog": 1}
    assert not found.problems


def test_missing_pose_truncated_and_difficult_have_the_documented_defaults(voc):
    tags = [("<pose>Left</pose>", ""), ("<truncated>0</truncated>", "")]
    change(voc, "a", *tags, ("<difficult>0</difficult>", ""))
    thing = read_voc(voc, "train").checked().images[0].objects[0]
    assert (thing.pose, thing.truncated, thing.difficult) == ("Unspecified", False, False)


def test_fractions_are_coordinates_too(voc):
    change(
        voc, "a", ("<xmax>20</xmax>", "<xmax>20.5</xmax>"), ("<xmin>1</xmin>", "<xmin>1.25</xmin>")
    )
    assert read_voc(voc, "train").checked().images[0].objects[0].box == (0.25, 0, 20.5, 20)


@pytest.mark.parametrize("size", ["", "<size><width>0</width><height>0</height></size>"])
def test_a_missing_or_zero_size_is_taken_from_the_image(voc, size):
    change(voc, "a", ("<size><width>64</width><height>48</height><depth>3</depth></size>", size))
    image = read_voc(voc, "train").checked().images[0]
    assert (image.width, image.height) == SIZE


@pytest.mark.parametrize("suffix", [".png", ".JPG", ".jpeg", ".bmp"])
def test_images_need_not_be_called_jpg(tmp_path, suffix):
    found = read_voc(small_voc(tmp_path, suffix=suffix), "test").checked()
    assert [image.path.suffix for image in found.images] == [suffix, suffix]


def test_a_split_of_one_image_works(voc):
    (voc / "ImageSets/Main/one.txt").write_text("a")  # no line end either
    assert [image.id for image in read_voc(voc, "one").checked().images] == ["a"]


def test_blank_lines_byte_order_marks_and_windows_line_ends_do_not_matter(voc):
    (voc / "ImageSets/Main/odd.txt").write_bytes(b"\xef\xbb\xbfa \r\n\r\n  b\r\n")
    assert [image.id for image in read_voc(voc, "odd").checked().images] == ["a", "b"]


def test_a_per_class_split_gives_the_images_that_hold_the_class(voc):
    (voc / "ImageSets/Main/dog_train.txt").write_text("a  1\nb  0\nc -1\n")
    found = read_voc(voc, "dog_train").checked()
    assert [image.id for image in found.images] == ["a", "b"]
    assert "list for one class: 2 of its 3" in found.problems[0].what


def test_ids_may_hold_spaces_and_folders(tmp_path):
    box = [("cat", (1, 1, 20, 20), 0)]
    ids = ["img 1", "img 2", "deep/er"]
    for image_id in ids:
        for folder in ("Annotations", "JPEGImages"):
            (tmp_path / folder / image_id).parent.mkdir(parents=True, exist_ok=True)
    root = write_voc(tmp_path, {"train": ids, "two": ids[:2]}, dict.fromkeys(ids, box))
    assert [image.id for image in read_voc(root, "train").checked().images] == ids
    assert [image.id for image in read_voc(root, "two").checked().images] == ids[:2]


def test_an_image_without_objects_is_part_of_the_set(voc):
    (voc / "Annotations/a.xml").write_text(annotation_xml([]))
    assert read_voc(voc, "train").checked().images[0].objects == ()


def test_parts_of_a_person_are_not_objects(voc):
    part = "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>"
    change(voc, "a", ("<name>cat</name>", f"<name>cat</name>{part}"))
    assert [o.name for o in read_voc(voc, "train").checked().images[0].objects] == ["cat", "dog"]


def test_classes_are_given_or_listed_or_found_in_this_order(voc):
    assert read_voc(voc, "test").class_names == ("cat", "dog")
    (voc / "classes.txt").write_text("dog\ncat\n\n")
    assert read_voc(voc, "test").class_names == ("dog", "cat")
    assert read_voc(voc, "test", ["cat", "bird", "dog"]).class_names == ("cat", "bird", "dog")
    with pytest.raises(KsclError, match="twice"):
        read_voc(voc, "test", ["cat", "dog", "cat"])
    (voc / "classes.txt").write_bytes("chât".encode("latin-1"))
    with pytest.raises(KsclError, match="UTF-8"):
        read_voc(voc, "test")


def test_the_found_order_of_pascal_vocs_own_classes_is_its_own(tmp_path):
    things = {"x": [(name, (1, 1, 9, 9), 0) for name in reversed(VOC_CLASSES)]}
    assert found_class_names(write_voc(tmp_path, {}, things)) == VOC_CLASSES


BOX = "<xmax>20</xmax>"


@pytest.mark.parametrize(
    ("old", "new", "kind", "says"),
    [
        ("<name>cat</name>", "<name>Cat</name>", "case of a class", "'Cat'"),
        ("<name>cat</name>", "<name>car</name>", "unknown class", "'car'"),
        ("<name>cat</name>", "", "bad tag", "<name> is missing"),
        (BOX, "<xmax>0</xmax>", "degenerate box", "xmin 1, ymin 1, xmax 0"),
        (BOX, "<xmax>wide</xmax>", "bad tag", "<xmax> is 'wide'"),
        (BOX, "<xmax>nan</xmax>", "bad tag", "not a number"),
        (BOX, "<xmax>inf</xmax>", "bad tag", "not a number"),
        (BOX, "", "bad tag", "<xmax> is ''"),
        (BOX, "<xmax>99</xmax>", "box outside", "35 pixels outside its 64 x 48"),
        ("<difficult>0</difficult>", "<difficult>maybe</difficult>", "bad tag", "'maybe'"),
        ("<width>64</width>", "<width>big</width>", "size", "'big'"),
        ("<width>64</width>", "", "size", "not two numbers"),
        ("</annotation>", "", "unreadable annotation", "well-formed"),
    ],
)
def test_what_is_wrong_in_an_annotation_is_told_with_its_file(voc, old, new, kind, says):
    path = voc / "Annotations" / "d.xml"
    path.write_text(annotation_xml([("cat", (1, 1, 20, 20), 0)]).replace(old, new))
    problem = only_problem(read_voc(voc, "test", ["cat", "dog"]))
    assert problem.kind == kind
    assert problem.where == str(path)
    assert says in problem.what
    with pytest.raises(KsclError, match="cannot be used"):
        read_voc(voc, "test", ["cat", "dog"]).checked()


def test_the_nearest_class_is_offered(voc):
    change(voc, "c", ("<name>cat</name>", "<name>cats</name>"))
    assert "Did you mean 'cat'" in only_problem(read_voc(voc, "test", ["cat", "dog"])).fix


def test_an_object_without_a_box_is_told(voc):
    text = "<annotation><object><name>cat</name><polygon/></object></annotation>"
    (voc / "Annotations/c.xml").write_text(text)
    assert "<bndbox> is missing" in only_problem(read_voc(voc, "test", ["cat", "dog"])).what


@pytest.mark.parametrize(
    ("box", "kind"), [((0, 0, 20, 20), "box at the border"), ((7, 7, 7, 9), "tiny box")]
)
def test_boxes_that_are_odd_but_usable_are_noted_and_used(voc, box, kind):
    (voc / "Annotations/c.xml").write_text(annotation_xml([("cat", box, 0)]))
    found = read_voc(voc, "test", ["cat", "dog"]).checked()
    assert [problem.kind for problem in found.problems] == [kind]
    assert found.counts()["cat"] == 1


def test_files_that_are_missing_are_named_all_at_once(voc):
    (voc / "ImageSets/Main/test.txt").write_text("c\nc\nd\nnowhere\nb.jpg\n../a\n")
    (voc / "JPEGImages/c.jpg").unlink()
    write_image(voc / "JPEGImages/d.png", 1)
    kinds = [problem.kind for problem in read_voc(voc, "test").problems]
    assert sorted(kinds) == [
        *("ambiguous image", "duplicate id", "missing annotation"),
        *("missing image", "missing image", "odd ids", "split"),
    ]


def test_ids_with_a_suffix_are_one_problem(voc):
    (voc / "ImageSets/Main/test.txt").write_text("c.jpg\nd.jpg\n")
    (problem,) = read_voc(voc, "test").problems
    assert "2 of 2" in problem.what
    assert "c.jpg" in problem.what
    assert problem.where.endswith("test.txt")


@pytest.mark.parametrize("change", ["ids", "images"])
def test_ids_in_another_case_than_their_files_are_one_problem(voc, change):
    if change == "ids":
        (voc / "ImageSets/Main/test.txt").write_text("C\nD\n")
    else:
        for name in "cd":
            (voc / f"JPEGImages/{name}.jpg").rename(voc / f"JPEGImages/{name.upper()}.jpg")
    (problem,) = read_voc(voc, "test").problems
    assert "2 of 2" in problem.what


def test_a_class_in_another_case_is_one_problem_however_many_objects_have_it(voc):
    for path in (voc / "Annotations").glob("*.xml"):
        path.write_text(path.read_text().replace("<name>cat", "<name>Cat"))
    (problem,) = read_voc(voc, "train", ["cat", "dog"]).problems
    assert "'Cat'" in problem.what
    assert "'cat'" in problem.what
    assert "2 objects" in problem.what


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda root: (root / "ImageSets/Main/test.txt").unlink(), "no split 'test'"),
        (lambda root: (root / "ImageSets/Main/test.txt").write_text("\n \n"), "lists no image"),
        (lambda root: (root / "ImageSets/Main/test.txt").write_bytes(b"\xff\xfe\x80"), "UTF-8"),
        (lambda root: (root / "JPEGImages").rename(root / "images"), "no folder JPEGImages"),
        (lambda root: (root / "Annotations").rename(root / "labels"), "no folder Annotations"),
        (lambda root: root.rename(root.parent / "elsewhere"), "no such folder"),
    ],
)
def test_a_folder_that_is_not_in_the_layout_is_one_problem_and_not_thousands(voc, broken, says):
    broken(voc)
    assert says in str(only_problem(read_voc(voc, "test")))


def test_the_folder_above_and_the_unmerged_test_set_are_recognized(voc):
    above = only_problem_of_layout(voc.parent)
    assert f"Perhaps you mean {voc}" in above
    (voc / "ImageSets/Main/test.txt").rename(voc / "ImageSets/Main/trainval.txt")
    assert "separate archive" in str(only_problem(read_voc(voc, "test")))


def only_problem_of_layout(root):
    return " ".join(str(problem) for problem in read_voc(root, "test").problems)


BOMB = """<?xml version="1.0"?><!DOCTYPE a [<!ENTITY x "ha"><!ENTITY y "&x;&x;&x;&x;&x;&x;">]>
<annotation><object><name>&y;</name></object></annotation>"""

THIEF = """<?xml version="1.0"?><!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/hostname">]>
<annotation><object><name>&x;</name></object></annotation>"""

PARAMETER = """<?xml version="1.0"?><!DOCTYPE a [<!ENTITY % x SYSTEM "http://localhost/x"> %x;]>
<annotation/>"""


@pytest.mark.parametrize("text", [BOMB, THIEF, PARAMETER], ids=["bomb", "thief", "parameter"])
def test_entities_are_refused_and_nothing_is_expanded(voc, text):
    (voc / "Annotations/c.xml").write_text(text)
    problem = only_problem(read_voc(voc, "test", ["cat", "dog"]))
    assert problem.kind == "unreadable annotation"
    assert "document type" in problem.what


@given(
    st.binary(max_size=200) | st.text(alphabet="<>/&;!abENTITY\"'[] =", max_size=80).map(str.encode)
)
@settings(max_examples=300, deadline=None)
def test_no_bytes_make_the_parser_raise_anything_but_our_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.xml"
    path.write_bytes(content)
    with contextlib.suppress(KsclError):
        parse_xml(path)


def test_other_encodings_are_read(voc):
    text = annotation_xml([("chât", (1, 1, 20, 20), 0)])
    for encoding in ("utf-8", "latin-1", "utf-16"):
        header = f'<?xml version="1.0" encoding="{encoding}"?>'
        (voc / "Annotations/c.xml").write_bytes((header + text).encode(encoding))
        assert read_voc(voc, "test", ["chât", "dog"]).checked().images[0].objects[0].name == "chât"
