"""Images in one folder per class become a split set for a probe."""

from __future__ import annotations

import re
from pathlib import Path

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
