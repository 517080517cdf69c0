"""The photos of a COCO file are found by path or by name, however nested they are."""

from __future__ import annotations

import shutil
from pathlib import Path

from kscl.commands.prepare_data import main
from tests.helpers.data.photos import jpeg, photo
from tests.kscl.datasets.test_own import SIZE, bare, prepare, split_ids, write_coco, write_photos


def all_ids(root: Path) -> list[str]:
    return sorted(split_ids(root, "trainval") + split_ids(root, "test"))


def linked(root: Path) -> set[Path]:
    return {path.resolve() for path in (root / "mine/JPEGImages").iterdir()}


def test_a_bare_name_that_fits_two_photos_is_named(tmp_path, capsys):
    names = write_photos(tmp_path / "photos", 8, nested=True)
    write_coco(tmp_path / "labels", names, bare)
    (tmp_path / "photos/part0/p1.jpg").write_bytes(jpeg(photo(50, *SIZE[::-1])))
    assert prepare(tmp_path) == 2
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "[" in line]
    assert told.startswith(f"  [ambiguous image] {tmp_path}/photos/p1.jpg: ")
    for folder in ("part0", "part1"):
        assert f"{tmp_path}/photos/{folder}/p1.jpg" in told
    assert prepare(tmp_path, "--skip-bad") == 0
    assert "p1" not in " ".join(all_ids(tmp_path))
    assert len(all_ids(tmp_path)) == 7


def test_a_photo_that_no_folder_has_is_named(tmp_path, capsys):
    names = write_photos(tmp_path / "photos", 6, nested=True)
    write_coco(tmp_path / "labels", names | {"part0/gone": ["cat"]}, bare)
    assert prepare(tmp_path) == 2
    told = capsys.readouterr().err
    assert f"[missing image] {tmp_path}/photos/gone.jpg" in told
    assert "1 problem found" in told


def test_paths_may_begin_below_the_folder_of_images(tmp_path):
    names = write_photos(tmp_path / "photos/2024/camera", 6, nested=True)
    other = tmp_path / "photos/2024/other/p0.jpg"  # of the same name, in a folder of another
    other.parent.mkdir()
    other.write_bytes(jpeg(photo(50, *SIZE[::-1])))
    write_coco(tmp_path / "labels", names, "{}.jpg".format)
    assert prepare(tmp_path) == 0
    assert len(all_ids(tmp_path)) == 6
    assert "2024_other_p0_jpg" not in all_ids(tmp_path)


def test_a_path_that_is_exact_is_taken_before_a_name(tmp_path):
    names = write_photos(tmp_path / "photos", 6)
    (tmp_path / "photos/more").mkdir()
    (tmp_path / "photos/more/p0.jpg").write_bytes(jpeg(photo(50, *SIZE[::-1])))
    shutil.copy(tmp_path / "photos/p1.jpg", tmp_path / "p1.jpg")  # beside the folder of images
    write_coco(tmp_path / "labels", names, bare)
    assert prepare(tmp_path) == 0
    assert (tmp_path / "mine/JPEGImages/p0_jpg.jpg").resolve() == tmp_path / "photos/p0.jpg"
    assert "p0_jpg" in all_ids(tmp_path)
    assert tmp_path / "p1.jpg" not in linked(tmp_path)


def test_every_folder_of_photos_may_have_a_file_of_its_own(tmp_path):
    for number, folder in enumerate(("train", "valid")):
        names = write_photos(tmp_path / "photos" / folder, 6)
        for name in names:  # the same names, of other photos
            file = tmp_path / "photos" / folder / f"{name}.jpg"
            file.write_bytes(jpeg(photo(100 * number + int(name[1:]), *SIZE[::-1])))
        write_coco(tmp_path / "photos" / folder, names, bare)
    where = ["--images", tmp_path / "photos", "--annotations", tmp_path / "photos"]
    assert main(["own", *map(str, where), "--output-dir", str(tmp_path / "mine")]) == 0
    assert len(all_ids(tmp_path)) == 12
    assert len(linked(tmp_path)) == 12
