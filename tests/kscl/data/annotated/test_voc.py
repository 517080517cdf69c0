"""Reading VOC folders as people really write them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kscl.data.annotated.voc import VOC_CLASSES, found_class_names, parse_xml, read_voc
from kscl.data.annotations import AnnotatedObject
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


SPARSE = """<annotation>{size}<object><name>cat</name>
<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>
<bndbox><xmin>1.25</xmin><ymin>1</ymin><xmax>20.5</xmax><ymax>20</ymax></bndbox></object></annotation>"""


@pytest.mark.parametrize("size", ["", "<size><width>0</width><height>0</height></size>"])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-16"])
def test_what_many_tools_leave_out_has_the_documented_defaults(voc, size, encoding):
    text = f'<?xml version="1.0" encoding="{encoding}"?>{SPARSE.format(size=size)}'
    (voc / "Annotations/c.xml").write_bytes(text.replace("cat", "chât").encode(encoding))
    (voc / "Annotations/d.xml").write_text(annotation_xml([]))
    first, empty = read_voc(voc, "test", ["chât", "dog"]).checked().images
    assert (first.width, first.height) == SIZE  # of the image
    assert first.objects == (AnnotatedObject("chât", (0.25, 0, 20.5, 20)),)  # parts do not count
    assert (first.objects[0].pose, first.objects[0].truncated) == ("Unspecified", False)
    assert empty.objects == ()


def test_images_and_lists_may_be_written_on_any_system(tmp_path):
    for suffix in (".png", ".JPG", ".bmp"):
        root = small_voc(tmp_path / suffix, suffix=suffix)
        (root / "ImageSets/Main/odd.txt").write_bytes(b"\xef\xbb\xbfa \r\n\r\n  b")
        found = read_voc(root, "odd").checked()
        assert [image.path.name for image in found.images] == [f"a{suffix}", f"b{suffix}"]


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


def _rename_split(root, name):
    (root / "ImageSets/Main/test.txt").rename(root / f"ImageSets/Main/{name}.txt")


@pytest.mark.parametrize(
    ("old", "new", "kind", "says"),
    [
        ("<name>cat</name>", "<name>Cat</name>", "case of a class", "'Cat'"),
        ("<name>cat</name>", "<name>cats</name>", "unknown class", "'cats'"),
        ("<bndbox>", "<polygon/><box>", "unreadable annotation", "mismatched"),
        ("bndbox>", "box>", "bad tag", "<bndbox> is missing"),
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
    assert kind != "unknown class" or "Did you mean 'cat'" in problem.fix
    with pytest.raises(KsclError, match="cannot be used"):
        read_voc(voc, "test", ["cat", "dog"]).checked()


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


@pytest.mark.parametrize("change", ["suffix", "ids", "images"])
def test_ids_that_are_not_quite_the_names_of_their_files_are_one_problem(voc, change):
    if change == "images":
        for name in "cd":
            (voc / f"JPEGImages/{name}.jpg").rename(voc / f"JPEGImages/{name.upper()}.jpg")
    else:
        ids = "c.jpg\nd.jpg\n" if change == "suffix" else "C\nD\n"
        (voc / "ImageSets/Main/test.txt").write_text(ids)
    (problem,) = read_voc(voc, "test").problems
    assert (problem.kind, problem.where) == ("odd ids", str(voc / "ImageSets/Main/test.txt"))
    assert "2 of 2" in problem.what


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda root: (root / "ImageSets/Main/test.txt").unlink(), "no split 'test'"),
        (lambda root: (root / "ImageSets/Main/test.txt").write_text("\n \n"), "lists no image"),
        (lambda root: (root / "ImageSets/Main/test.txt").write_bytes(b"\xff\xfe\x80"), "UTF-8"),
        (lambda root: (root / "JPEGImages").rename(root / "images"), "no folder JPEGImages"),
        (lambda root: (root / "Annotations").rename(root / "labels"), "no folder Annotations"),
        (lambda root: root.rename(root.parent / "elsewhere"), "no such folder"),
        (lambda root: _rename_split(root, "trainval"), "separate archive"),
    ],
)
def test_a_folder_that_is_not_in_the_layout_is_one_problem_and_not_thousands(voc, broken, says):
    broken(voc)
    assert says in str(only_problem(read_voc(voc, "test")))


def test_the_folder_above_is_recognized(voc):
    assert f"Perhaps you mean {voc}" in read_voc(voc.parent, "test").problems[0].fix


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
@settings(max_examples=100, deadline=None)
def test_no_bytes_make_the_parser_raise_anything_but_our_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.xml"
    path.write_bytes(content)
    with contextlib.suppress(KsclError):
        parse_xml(path)
