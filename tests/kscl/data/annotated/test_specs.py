"""An annotation format is one class; whatever reads annotated sets then knows it."""

from __future__ import annotations

import sys

import pytest

from detection.commands.score import find_ground_truth
from detection.data.preflight import preflight
from detection.data.sets import detectron2_dicts
from kscl.data.annotated.voc import read_voc
from kscl.data.annotations import (
    ANNOTATION_FORMATS,
    AnnotationFormat,
    annotation_format,
    forms,
    is_set_name,
    parse_source,
    read_source,
    shared_class_names,
)
from kscl.errors import KsclError
from kscl.registry import IMPORT_VARIABLE, import_modules
from tests.helpers.data.own_folders import BOXES, prepare, write_photos, write_yolo
from tests.test_extending import FILES


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """The name of a set in the format of docs/extending.md, registered by a module outside."""
    monkeypatch.setattr(ANNOTATION_FORMATS, "data", dict(ANNOTATION_FORMATS))
    (tmp_path / "csv_boxes.py").write_text(FILES["csv_boxes"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "csv_boxes", raising=False)
    monkeypatch.setenv(IMPORT_VARIABLE, "")
    names = write_photos(tmp_path / "photos", 8, nested=True)
    (tmp_path / "labels").mkdir()
    for name, classes in names.items():
        lines = [",".join(map(str, (*BOXES[c], c))) for c in classes]
        (tmp_path / "labels" / f"{name.split('/')[1]}.csv").write_text("\n".join(lines))
    return f"csv:{tmp_path / 'labels'}:{tmp_path / 'photos'}"


def test_a_format_of_ones_own_can_be_prepared(tables, tmp_path, capsys):
    assert prepare(tmp_path, "--import", "csv_boxes", "--format", "csv") == 0
    assert "8 images, 8 annotation files in the format csv." in capsys.readouterr().out
    for image in read_voc(tmp_path / "mine", "trainval").checked().images:
        assert all(thing.box == BOXES[thing.name] for thing in image.objects)


def test_a_format_of_ones_own_can_be_checked_trained_on_and_scored(tables, tmp_path):
    import_modules(["csv_boxes"])
    report = preflight([tables], []).checked()
    assert report.class_names == ("cat", "dog")
    assert report.sets[0]["per_class"] == {"cat": 5, "dog": 5}
    (_, annotated), *_ = report.annotated["train"]
    dicts = detectron2_dicts(annotated)
    assert dicts[0]["file_name"] == str(tmp_path / "photos/part0/p0.jpg")
    assert [o["category_id"] for o in dicts[0]["annotations"]] == [1]
    truth = find_ground_truth(tables, ("cat", "dog"))
    assert truth.image_ids[0] == "part0/p0.jpg"
    assert len(truth.boxes) == 10
    assert parse_source(tables).image_folder == tmp_path / "photos"
    assert is_set_name(tables)
    assert "csv:ANNOTATIONS:IMAGES" in forms()


def test_a_set_of_a_format_of_ones_own_has_the_problems_of_any_other(tables, tmp_path):
    import_modules(["csv_boxes"])
    (problem,) = read_source(parse_source(tables), ["cat", "bird"]).problems
    assert "'dog' is not in the list (5 objects)" in problem.what
    (tmp_path / "labels/gone.csv").write_text("")
    (problem,) = read_source(parse_source(tables)).problems
    assert (problem.kind, problem.where) == ("missing image", str(tmp_path / "labels/gone.csv"))
    empty = read_source(parse_source(f"csv:{tmp_path / 'photos'}:{tmp_path / 'photos'}"))
    assert [problem.kind for problem in empty.problems] == ["empty split"]
    gone = read_source(parse_source(f"csv:{tmp_path / 'nowhere'}:{tmp_path}"), ["cat"])
    assert "nowhere" in str(gone.problems[0])


def test_two_formats_of_one_name_are_refused(tables):
    class Other(AnnotationFormat):
        name, files, suffix = "voc", "others", ".other"

    with pytest.raises(KsclError, match="'voc'"):
        annotation_format(Other)


def test_yolo_labels_can_be_named_as_they_are(tmp_path):
    names = write_photos(tmp_path / "photos", 6)
    write_yolo(tmp_path / "labels", names)
    source = parse_source(f"yolo:{tmp_path / 'labels'}:{tmp_path / 'photos'}")
    assert shared_class_names([source]) == ("dog", "cat")
    found = read_source(source).checked()
    assert [image.id for image in found.images] == [f"{name}.jpg" for name in names]
    for image, wanted in zip(found.images, names.values(), strict=True):
        assert [thing.name for thing in image.objects] == wanted
        for thing in image.objects:
            assert thing.box == pytest.approx(BOXES[thing.name], abs=0.01)
