"""The report of a prepared set says what is in it, and is kept beside it."""

from __future__ import annotations

from collections import Counter

from kscl.data.annotated.voc import read_voc
from tests.helpers.data.sets import annotation_xml
from tests.kscl.datasets.test_own import SIZE, prepare, write_photos, write_xml


def test_the_report_counts_classes_boxes_and_files_that_are_not_used(tmp_path, capsys):
    names = write_photos(tmp_path / "photos", 6)
    write_xml(tmp_path / "labels", names)
    (tmp_path / "photos/notes.docx").write_bytes(b"x")
    (tmp_path / "labels/readme.txt").write_text("drawn by hand\n")
    assert prepare(tmp_path) == 0
    told = capsys.readouterr().out
    assert "6 images, 6 annotation files in the format voc." in told
    rows = {line.split()[0]: line.split()[1:] for line in told.splitlines() if line.strip()}
    assert rows["class"] == ["images", "objects", "to", "train", "on", "to", "test", "on"]
    for name in ("cat", "dog"):
        images = sum(name in classes for classes in names.values())
        sides = [
            Counter(thing.name for image in part.images for thing in image.objects)[name]
            for part in (read_voc(tmp_path / "mine", split) for split in ("trainval", "test"))
        ]
        assert rows[name] == [str(n) for n in (images, sum(sides), *sides)]
    # Four cats of 40 x 40 and four dogs of 60 x 65 pixels, in images of 100 x 75.
    assert (
        "Boxes: 8; side (root of the area) 51 pixels, 80 % within 40 to 62; relative to the image "
        "59%, 46% to 72%." in told
    )
    assert "Not used: notes.docx, readme.txt." in told
    assert (tmp_path / "mine/report.txt").read_text() in told


def test_classes_of_which_there_are_few_objects_are_named_with_their_number(tmp_path, capsys):
    names = write_photos(tmp_path / "photos", 8)
    many = [("cat", (1 + 9 * i, 1, 9 + 9 * i, 40), 0) for i in range(10)]
    for number, name in enumerate(names):
        rare = [("dog", (5, 5, 50, 50), 0)] if number < 4 else []
        rare += [("bird", (5, 5, 60, 60), 0)] if number == 5 else []
        path = tmp_path / "labels" / f"{name}.xml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(annotation_xml([*many, *rare], SIZE))
    assert prepare(tmp_path) == 0
    told = capsys.readouterr().out
    counts = {
        split: read_voc(tmp_path / "mine", split, ("bird", "cat", "dog")).counts()
        for split in ("trainval", "test")
    }
    assert min(found["cat"] for found in counts.values()) >= 10
    (absent,) = [purpose for purpose, found in counts.items() if not found["bird"]]
    for split, purpose in (("trainval", "train"), ("test", "test")):
        birds, dogs = counts[split]["bird"], counts[split]["dog"]
        rare = f"bird ({birds}), dog ({dogs})" if birds else f"dog ({dogs})"
        assert f"Few objects to {purpose} on: {rare}. Their AP is mostly chance." in told
        line = f"No object to {purpose} on: bird. Annotate more of them."
        assert (line in told) == (split == absent)


def test_enough_objects_of_every_class_are_not_remarked_upon(tmp_path, capsys):
    write_photos(tmp_path / "photos", 4)
    (tmp_path / "labels").mkdir()
    many = [("cat", (1 + 9 * i, 1, 9 + 9 * i, 40), 0) for i in range(10)]
    for number in range(4):
        (tmp_path / f"labels/p{number}.xml").write_text(annotation_xml(many, SIZE))
    assert prepare(tmp_path) == 0
    told = capsys.readouterr().out
    assert "Few objects" not in told
    assert "No object" not in told
