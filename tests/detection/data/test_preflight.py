"""Preflight tells every problem of every set at once, before anything is trained."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from detectron2.data.detection_utils import read_image
from PIL import Image

from detection.commands.preflight import main
from detection.data.preflight import preflight
from kscl.data.annotations import Source, image_size
from kscl.data.source import equal_files
from kscl.errors import KsclError
from tests.helpers.data.sets import annotation_xml, small_coco, small_voc, write_image, write_voc


@pytest.fixture
def voc(tmp_path):
    return small_voc(tmp_path / "voc")


def check(root, **options):
    return preflight([f"voc:{root}:train"], [f"voc:{root}:test"], **options)


def kinds(report, fatal=True):
    return sorted(p.kind for p in (report.fatal if fatal else report.notes))


def test_a_good_set_passes_and_is_described(voc):
    source = Source("my pets", "voc", voc, split="train")
    report = preflight([source], [f"voc:{voc}:test"], num_classes=2).checked()
    assert [row["name"] for row in report.sets] == ["my pets", f"voc:{voc}:test"]
    assert report.class_names == ("cat", "dog")
    assert [row["images"] for row in report.sets] == [2, 2]
    assert report.sets[0]["per_class"] == {"cat": 2, "dog": 1}
    assert report.sets[0]["difficult"] == 1
    assert "No problem found" in str(report)


def test_all_problems_of_all_sets_are_told_at_once_each_with_file_and_fix(voc):
    (voc / "Annotations/a.xml").write_text(annotation_xml([("cat", (20, 1, 10, 20), 0)]))
    (voc / "JPEGImages/b.jpg").write_bytes(b"not an image")
    (voc / "Annotations/c.xml").write_text(annotation_xml([("horse", (1, 1, 20, 20), 0)]))
    (voc / "JPEGImages/d.jpg").unlink()
    report = check(voc, class_names=["cat", "dog"], num_classes=3)
    assert kinds(report) == [
        *("class count", "degenerate box", "missing image", "unknown class", "unreadable image"),
    ]
    with pytest.raises(KsclError) as error:
        report.checked()
    for name in ("a.xml", "b.jpg", "c.xml", "JPEGImages/d"):
        assert name in str(error.value)
    assert all(problem.fix for problem in report.problems)


@pytest.mark.parametrize(("count", "why"), [(1, "trained as background"), (3, "wasted")])
def test_the_models_class_count_must_be_that_of_the_list(voc, count, why):
    (problem,) = check(voc, num_classes=count).fatal
    assert problem.where == "MODEL.ROI_HEADS.NUM_CLASSES"
    assert why in problem.fix
    assert "set it to 2" in problem.fix


def test_a_class_absent_from_test_is_a_note_and_named_for_the_mean(voc):
    report = check(voc, class_names=["cat", "dog", "unicorn"]).checked()
    assert report.absent_from_test == ("unicorn",)
    assert kinds(report, fatal=False) == ["absent class", "absent class"]  # nor is it in train
    assert any("not counted as 0" in note.fix for note in report.notes)


def test_classes_of_the_data_that_differ_in_case_are_refused(voc):
    path = voc / "Annotations/a.xml"
    path.write_text(path.read_text().replace("<name>cat", "<name>Cat"))
    report = preflight([f"voc:{voc}:train"], [f"voc:{voc}:test"])
    (problem,) = report.fatal
    assert "differ only in upper and lower case" in str(problem)
    assert f"'Cat' in {path} of voc:{voc}:train" in str(problem)
    assert f"'cat' in {voc}/Annotations/" in str(problem)
    path.write_text(path.read_text().replace("<name>Cat", "<name>cat"))
    (voc / "classes.txt").write_text("cat\ndog\nDog\n")  # of which there is no object
    (problem,) = check(voc).fatal
    assert f"'Dog' in the class list of voc:{voc}:train" in str(problem)


def test_the_test_set_is_held_to_the_class_list_of_the_training_set(tmp_path):
    cat, dog = ("cat", (1, 1, 20, 20), 0), ("dog", (1, 1, 20, 20), 0)
    train = write_voc(tmp_path / "one", {"train": ["a"]}, {"a": [cat]})
    things = {"x": [cat], "y": [dog, dog], "z": [dog]}
    test = write_voc(tmp_path / "two", {"test": list(things)}, things, suffix=".png")
    report = preflight([f"voc:{train}:train"], [f"voc:{test}:test"])
    (problem,) = report.fatal  # not one per object
    assert problem.kind == "unknown class"
    assert problem.where.endswith("y.xml")
    assert problem.what == "the class 'dog' is not in the list (3 objects)"


def test_training_sets_found_in_xml_share_the_union_of_their_classes(tmp_path):
    one = write_voc(tmp_path / "one", {"train": ["a"]}, {"a": [("dog", (1, 1, 9, 9), 0)]})
    two = write_voc(tmp_path / "two", {"train": ["a"]}, {"a": [("cat", (1, 1, 9, 9), 0)]})
    assert preflight([f"voc:{one}:train", f"voc:{two}:train"], []).class_names == ("cat", "dog")
    (one / "classes.txt").write_text("dog\n")
    report = preflight([f"voc:{one}:train", f"voc:{two}:train"], [])
    assert "different class lists" in report.fatal[0].what


def test_an_image_of_another_size_than_its_annotation_says_is_told(voc):
    write_image(voc / "JPEGImages/a.jpg", 1, (48, 64))
    (problem,) = check(voc).fatal
    assert problem.kind == "image size"
    assert "is 48 x 64 pixels" in problem.what
    assert "a.xml says 64 x 48" in problem.what


def test_the_turn_in_an_exif_tag_counts_as_detectron2_makes_it(tmp_path):
    for suffix in (".jpg", ".png"):
        for orientation in (1, 3, 6, 8):
            path = tmp_path / f"{orientation}{suffix}"
            exif = Image.Exif()
            exif[0x0112] = orientation
            Image.new("RGB", (40, 30)).save(path, exif=exif)
            assert image_size(path) == read_image(str(path), "RGB").shape[1::-1]


def test_sixteen_bits_a_pixel_are_refused_because_they_would_turn_white(voc):
    deep = Image.fromarray(np.full((48, 64), 4000, np.uint16))
    (voc / "JPEGImages/a.jpg").unlink()
    deep.save(voc / "JPEGImages/a.png")
    (problem,) = check(voc).fatal
    assert "more than 8 bits" in problem.what
    assert "8-bit RGB" in problem.fix


def test_a_truncated_image_is_found_in_the_sample_or_with_full(tmp_path):
    ids = [f"{number:03d}" for number in range(30)]
    root = write_voc(
        tmp_path,
        {"train": ids[:2], "test": ids[2:]},
        {image_id: [("cat", (1, 1, 9, 9), 0)] for image_id in ids},
    )
    path = root / "JPEGImages" / "017.jpg"
    path.write_bytes(path.read_bytes()[:-400])
    assert check(root, sample=0).fatal == []
    report = check(root, full=True)
    assert [row["decoded"] for row in report.sets] == [2, 28]
    for found in (report, check(root, sample=28)):
        (problem,) = found.fatal
        assert problem.where == str(path)
        assert "truncated" in problem.what
        assert "download it again" in problem.fix
        assert "8-bit" not in problem.fix
    sampled = check(root, sample=5)
    assert sampled.sets[1]["decoded"] == 5
    assert "a sample of 5 decoded" in str(sampled)
    assert str(report).count("all decoded") == 2


def test_few_bad_training_images_are_skipped_and_a_bad_test_image_is_not(tmp_path):
    ids = [f"{number:03d}" for number in range(12)]
    objects = {image_id: [("cat", (1, 1, 9, 9), 0)] for image_id in ids}
    root = write_voc(tmp_path, {"train": ids[:10], "test": ids[10:]}, objects)
    path = root / "JPEGImages" / "003.jpg"
    path.write_bytes(path.read_bytes()[:-400])
    assert [problem.where for problem in check(root).fatal] == [str(path)]
    report = check(root, max_bad_fraction=0.1)
    assert report.fatal == []
    assert "9 images" in str(report)
    assert str(report).count("all decoded") == 2
    assert list(report.skipped) == [str(path)]
    assert [problem.where for problem in report.notes] == [str(path)]
    ((_, train),) = report.annotated["train"]
    assert [image.id for image in train.images] == [i for i in ids[:10] if i != "003"]
    path = root / "JPEGImages" / "011.jpg"
    path.write_bytes(path.read_bytes()[:-400])
    assert [p.where for p in check(root, max_bad_fraction=0.5).fatal] == [str(path)]


def test_an_image_in_both_splits_and_a_copy_under_another_name_are_told(voc):
    (voc / "ImageSets/Main/test.txt").write_text("a\nc\nd\n")
    shutil.copy(voc / "JPEGImages/b.jpg", voc / "JPEGImages/c.jpg")
    same, copied = check(voc).fatal
    assert same.kind == copied.kind == "overlap"
    assert same.where.endswith("a.jpg")
    assert copied.where.endswith("c.jpg")
    assert "b.jpg" in copied.what


def test_equal_files_are_found_whatever_differs_in_between(tmp_path):
    start, end = b"s" * 9000, b"e" * 9000
    contents = {"a": start + b"1" + end, "b": start + b"2" + end, "c": start + b"1" + end, "d": b""}
    paths = {name: tmp_path / name for name in contents}
    for name, content in contents.items():
        paths[name].write_bytes(content)
    assert equal_files([paths["a"]], [paths["b"], paths["c"], paths["d"]]) == [
        (paths["a"], paths["c"])
    ]


def test_a_benchmarks_own_twins_and_odd_boxes_are_notes(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    things = {
        "a": [("cat", (1, 1, 20, 20), 0)],
        "b": [("dog", (1, 1, 20, 20), 0), ("cat", (5, 5, 90, 20), 0)],
    }
    root = write_voc(tmp_path / "VOC2007", {"trainval": ["a"], "test": ["b"]}, things)
    shutil.copy(root / "JPEGImages/a.jpg", root / "JPEGImages/b.jpg")
    report = preflight(["voc_2007_trainval"], ["voc_2007_test"], num_classes=20).checked()
    assert len(report.class_names) == 20
    assert {"overlap", "box outside"} <= set(kinds(report, fatal=False))
    assert len(report.absent_from_test) == 18


@pytest.mark.parametrize("folder", ["elsewhere", ""])
def test_a_missing_voc_says_how_to_get_it_and_where_it_is_looked_for(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DETECTRON2_DATASETS", folder)
    if not folder:
        monkeypatch.delenv("DETECTRON2_DATASETS")
    looked = folder or "datasets"
    report = preflight(["voc_2007_trainval", "voc_2012_trainval"], ["voc_2007_test"])
    for year, problem in zip((2007, 2012, 2007), report.fatal, strict=True):
        assert problem.where == f"{looked}/VOC{year}"
        assert f"kscl prepare voc --root {looked} " in problem.fix
        assert f"DETECTRON2_DATASETS to the folder that holds VOC{year}" in problem.fix
    (own,) = [p for p in preflight(["voc:nowhere:x"], []).fatal if p.where == "nowhere"]
    assert "prepare_data" not in own.fix


def test_empty_and_missing_sets_are_told_together(voc):
    (voc / "ImageSets/Main/train.txt").write_text("")
    report = preflight([f"voc:{voc}:train"], [f"voc:{voc}:tset", "voc_2077_test", "voc:nowhere:x"])
    assert kinds(report) == ["data set", "empty split", "layout", "layout"]
    text = str(report)
    assert "the nearest is 'test'" in text
    assert "Did you mean voc_2007_test" in text


def test_a_train_folder_that_is_not_there_does_not_hide_what_is_wrong_with_the_test(voc):
    (voc / "JPEGImages/d.jpg").write_bytes(b"")
    report = preflight(["voc:nowhere:train"], [f"voc:{voc}:test"])
    assert kinds(report) == ["layout", "unreadable image"]


def test_images_without_objects_are_noted_and_a_set_of_only_such_is_refused(voc):
    (voc / "Annotations/a.xml").write_text(annotation_xml([]))
    assert "without objects" in kinds(check(voc), fatal=False)
    (voc / "Annotations/b.xml").write_text(annotation_xml([]))
    assert kinds(check(voc)) == ["no objects"]


def test_coco_files_are_checked_alike(tmp_path):
    train, images = small_coco(tmp_path / "train")
    test, others = small_coco(tmp_path / "test")
    write_image(others / "one.jpg", 77)
    report = preflight([f"coco:{train}:{images}"], [f"coco:{test}:{others}"], num_classes=2)
    (problem,) = report.fatal  # two.png has the same pixels in both
    assert problem.kind == "overlap"
    assert problem.where.endswith("two.png")
    (others / "two.png").unlink()
    report = preflight([f"coco:{train}:{images}"], [f"coco:{test}:{others}"], num_classes=2)
    assert kinds(report) == ["missing image"]


def test_many_problems_of_a_kind_are_counted_on_screen_and_kept_whole(tmp_path):
    ids = [f"{number}" for number in range(50)]
    things = {image_id: [("cat", (30, 1, 9, 9), 0)] for image_id in ids}
    root = write_voc(tmp_path, {"train": ids, "test": ids[:1]}, things)
    report = check(root)
    assert len(report.fatal) > 50
    assert "and 31 more like these" in str(report)  # 50 in train, 1 in test, 20 of them shown


def test_the_tool_exits_with_one_and_prints_json_when_asked(voc, capsys):
    sets = ("--train", f"voc:{voc}:train", "--test", f"voc:{voc}:test")
    assert main([*sets, "--full"]) == 0
    assert "No problem found" in capsys.readouterr().out
    (voc / "JPEGImages/a.jpg").unlink()
    assert main([*sets, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["good"] is False
    assert report["problems"][0]["kind"] == "missing image"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, None),
        ({"segmentation": []}, "missing mask"),
        ({"segmentation": [[1, 2, 10, 7]]}, "degenerate mask"),
        ({"segmentation": {"size": [48, 64], "counts": [50, 5, 3017]}}, "mask format"),
        ({"segmentation": [], "iscrowd": 1}, "missing mask"),
    ],
)
def test_masks_that_are_missing_or_cannot_be_trained_on_are_told_before_the_run(
    tmp_path, change, kind
):
    thing = {"id": 1, "image_id": 7, "category_id": 3, "bbox": [1, 2, 9, 5], "area": 45}
    thing |= {"segmentation": [[1, 2, 10, 2, 10, 7, 1, 7]]}
    things = [thing | change, thing | {"id": 2, "category_id": 18}]
    train, images = small_coco(tmp_path / "train", annotations=things)
    test, others = small_coco(tmp_path / "test", annotations=things)
    for picture in others.iterdir():  # the test has pictures of its own
        write_image(picture, 99 + len(picture.name))
    names = [f"coco:{train}:{images}"], [f"coco:{test}:{others}"]
    assert preflight(*names).checked()
    report = preflight(*names, mask_format="polygon")
    assert set(kinds(report)) == ({kind} if kind else set())
    if kind == "mask format":
        assert preflight(*names, mask_format="bitmask").checked()


def test_a_voc_folder_has_no_masks_and_is_refused_for_a_mask_head(voc, capsys):
    sets = ["--train", f"voc:{voc}:train", "--test", f"voc:{voc}:test"]
    assert main(sets) == 0
    assert main([*sets, "--masks", "polygon"]) == 1
    assert capsys.readouterr().out.count("[missing mask]") == 2
