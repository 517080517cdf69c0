"""Annotations that cannot be read are told: no image becomes unlabeled in silence."""

from __future__ import annotations

import pytest

from tests.kscl.datasets.test_own import prepare, write_coco, write_photos, write_xml, write_yolo


@pytest.mark.parametrize("line", ["0 0.5 0.5", "dog .5 .5 .1 .1", "0,.5,.5,.1,.1"])
def test_a_bad_first_line_of_yolo_labels_is_told_with_the_others(tmp_path, capsys, line):
    write_yolo(tmp_path / "labels", write_photos(tmp_path / "photos", 4))
    (tmp_path / "labels/p2.txt").write_text(f"{line}\n")
    (tmp_path / "labels/p3.txt").write_text("0 .5 .5 .2 .2\nnonsense\n")
    assert prepare(tmp_path) == 2
    told = capsys.readouterr().err
    assert "p2.txt" in told
    assert "line 1" in told
    assert "p3.txt" in told
    assert "line 2" in told


def test_yolo_labels_that_are_not_text_are_told(tmp_path, capsys):
    write_yolo(tmp_path / "labels", write_photos(tmp_path / "photos", 4))
    (tmp_path / "labels/p2.txt").write_bytes(b"\xff\xfe0 .5")
    assert prepare(tmp_path) == 2
    assert "p2.txt is not text" in capsys.readouterr().err


def test_captions_beside_other_annotations_are_not_taken_for_labels(tmp_path, capsys):
    write_xml(tmp_path / "labels", write_photos(tmp_path / "photos", 6))
    (tmp_path / "labels/p2.txt").write_text("a cat on a mat\n")
    assert prepare(tmp_path) == 0
    assert "Not used: p2.txt" in capsys.readouterr().out


def test_labels_that_are_all_damaged_say_how(tmp_path, capsys):
    write_photos(tmp_path / "photos", 1)
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/p0.txt").write_text("dog\n")
    assert prepare(tmp_path) == 2
    assert "p0.txt does not begin with a class number" in capsys.readouterr().err
    assert prepare(tmp_path, "--format", "yolo", "--classes", "dog") == 2
    assert "line 1" in capsys.readouterr().err


def test_a_damaged_coco_file_says_why_it_cannot_be_read(tmp_path, capsys):
    write_coco(tmp_path / "labels", write_photos(tmp_path / "photos", 6))
    whole = (tmp_path / "labels/all.json").read_text()
    (tmp_path / "labels/all.json").write_text(whole[:-20])
    assert prepare(tmp_path) == 2
    assert "all.json is not JSON" in capsys.readouterr().err
    (tmp_path / "labels/good.json").write_text(whole)  # a second file does not hide the first
    assert prepare(tmp_path) == 2
    told = capsys.readouterr().err
    assert "all.json" in told
    assert "is not JSON" in told


def test_json_of_another_kind_is_not_used(tmp_path, capsys):
    write_coco(tmp_path / "labels", write_photos(tmp_path / "photos", 6))
    (tmp_path / "labels/captions.json").write_text('{"images": [], "annotations": []}')
    assert prepare(tmp_path) == 0
    assert "Not used: captions.json" in capsys.readouterr().out
