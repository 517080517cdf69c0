"""Images in one folder per class become a split set for a probe."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from kscl.commands.prepare_data import main
from tests.helpers.data.photos import jpeg, photo
from tests.kscl.datasets.test_own import SIZE

COUNTS = {"red": 8, "blue": 8}


def write_folders(root: Path, counts: dict[str, int]) -> list[str]:
    """Write photos by class; return the command that prepares them."""
    start = 0
    for name, count in counts.items():
        (root / "photos" / name).mkdir(parents=True)
        for number in range(count):
            file = root / "photos" / name / f"{number}.jpg"
            file.write_bytes(jpeg(photo(start + number, *SIZE[::-1])))
        start += count
    return ["own", "--images", str(root / "photos"), "--output-dir", str(root / "mine")]


def classes_of(root: Path) -> dict[str, int]:
    folders = (root / "mine/classes/train").iterdir()
    return {folder.name: len(list(folder.iterdir())) for folder in folders}


def test_class_folders_are_split_for_a_probe(tmp_path, capsys):
    command = write_folders(tmp_path, COUNTS)
    assert main(command) == 0
    for side, count in (("train", 6), ("val", 2)):
        for name in COUNTS:
            assert len(list((tmp_path / "mine/classes" / side / name).iterdir())) == count
    (tmp_path / "photos/loose.jpg").write_bytes(jpeg(photo(99)))
    assert main(command) == 2
    assert "--annotations" in capsys.readouterr().err


def test_class_folders_whose_names_differ_by_case_are_for_the_user_to_decide(tmp_path, capsys):
    command = write_folders(tmp_path, {"cat": 8, "Cat": 4, "dog": 8})
    assert main(command) == 2
    told = capsys.readouterr().err
    assert re.search(r"'cat' \(8 images, first in .*\) and 'Cat' \(4 images, first in .*\)", told)
    assert "--merge-case" in told
    assert "--skip-bad" not in told
    assert main([*command, "--merge-case"]) == 0
    assert classes_of(tmp_path) == {"cat": 9, "dog": 6}


def test_class_folders_whose_names_differ_by_case_may_stay_apart(tmp_path):
    command = write_folders(tmp_path, {"cat": 8, "Cat": 4, "dog": 8})
    assert main([*command, "--keep-case"]) == 0
    assert classes_of(tmp_path) == {"cat": 6, "Cat": 3, "dog": 6}


def test_near_duplicates_of_a_class_are_never_on_both_sides(tmp_path):
    command = write_folders(tmp_path, COUNTS)
    for number in range(4):  # saved again, and lighter
        picture = photo(number, *SIZE[::-1])
        light = np.clip(picture * 1.1 + 8, 0, 255).astype(np.uint8)
        for kind, changed in (("again", picture), ("light", light)):
            (tmp_path / f"photos/red/{number}_{kind}.jpg").write_bytes(jpeg(changed, 40))
    assert main([*command, "--split", "50/50"]) == 0
    sides = {
        path.resolve().stem: path.parts[-3]
        for path in (tmp_path / "mine/classes").glob("*/red/*.jpg")
    }
    assert len(sides) == COUNTS["red"] + 2 * 4
    assert set(sides.values()) == {"train", "val"}
    for number in range(4):
        assert len({sides[f"{number}{kind}"] for kind in ("", "_again", "_light")}) == 1


def test_the_users_folders_are_not_touched_and_a_second_start_changes_nothing(tmp_path, capsys):
    command = write_folders(tmp_path, COUNTS)

    def state(folder: str) -> dict[Path, tuple[int, bytes]]:
        files = [path for path in (tmp_path / folder).rglob("*") if path.is_file()]
        return {path: (path.lstat().st_mtime_ns, path.read_bytes()) for path in files}

    before = state("photos")
    assert main(command) == 0
    made = state("mine")
    assert main(command) == 0
    assert "is there already" in capsys.readouterr().out
    assert state("photos") == before
    assert state("mine") == made


def test_a_class_of_one_picture_saved_many_times_is_too_few_to_split(tmp_path, capsys):
    command = write_folders(tmp_path, {**COUNTS, "one": 1, "same": 1})
    for quality in (30, 50, 70):
        picture = photo(17, *SIZE[::-1])  # as the one that is there
        (tmp_path / f"photos/same/{quality}.jpg").write_bytes(jpeg(picture, quality))
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "too few different images for both sides of the split: one, same." in told
    assert not (tmp_path / "mine").exists()


def test_a_set_among_the_class_folders_is_refused(tmp_path, capsys):
    command = write_folders(tmp_path, COUNTS)
    assert main([*command[:-1], str(tmp_path / "photos/mine")]) == 2
    assert "Choose a folder beside it" in capsys.readouterr().err


def test_an_image_that_cannot_be_read_is_refused_or_left_out(tmp_path, capsys):
    command = write_folders(tmp_path, {"red": 9, "blue": 8})
    (tmp_path / "photos/red/8.jpg").write_bytes(b"no image")
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "1 problem found; nothing was written" in told
    assert "--skip-bad" in told
    assert main([*command, "--skip-bad"]) == 0
    assert "red/8.jpg" in capsys.readouterr().out
    assert classes_of(tmp_path) == {"red": 6, "blue": 6}
