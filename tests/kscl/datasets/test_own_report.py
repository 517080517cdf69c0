"""The report of a prepared set says what is in it, and is kept beside it."""

from __future__ import annotations

from collections import Counter

from kscl.data.annotated.voc import read_voc
from tests.kscl.datasets.test_own import prepare, write_photos, write_xml


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
