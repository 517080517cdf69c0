"""A probe is not evaluated on the images it was trained on, unless one insists."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from linear_eval.commands.linear_eval import main
from linear_eval.config import load_linear_eval_config
from linear_eval.data.overlap import refuse_overlap
from linear_eval.errors import LinearEvalError
from tests.helpers.data.digits import overrides, write_digits
from tests.helpers.data.sets import write_image


def folders(root: Path, count: int = 6) -> Path:
    for side, start in (("train", 0), ("val", 100)):
        for number in range(count):
            write_image(root / side / f"class{number % 2}" / f"{number}.png", start + number)
    return root


def check(train: Path, val: Path, cache: Path) -> None:
    words = ["DATA.TRAIN", str(train), "DATA.VAL", str(val), "DATA.CACHE_DIR", str(cache)]
    refuse_overlap(load_linear_eval_config(None, words))


def test_different_images_are_accepted(tmp_path):
    root = folders(tmp_path / "data")
    check(root / "train", root / "val", tmp_path / "cache")


def test_the_same_folder_and_a_link_to_it_are_refused(tmp_path):
    root = folders(tmp_path / "data")
    (root / "again").symlink_to(root / "train")
    for val in (root / "train", root / "again"):
        with pytest.raises(LinearEvalError, match="--allow-overlap"):
            check(root / "train", val, tmp_path / "cache")


def test_copies_under_other_names_are_refused(tmp_path):
    root = folders(tmp_path / "data")
    shutil.copy(root / "train/class0/0.png", root / "val/class1/copy.png")
    with pytest.raises(LinearEvalError, match=r"copy\.png"):
        check(root / "train", root / "val", tmp_path / "cache")


def test_the_tool_evaluates_on_training_images_only_if_one_insists(tmp_path, capsys):
    digits = write_digits(tmp_path / "digits")
    probe = ("PROBE", "cached", "SOLVER.SCHEDULE", "cosine", "DATA.VAL", digits / "train")
    words = overrides(digits, tmp_path / "run", *probe)
    assert main(words) == 2
    assert "--allow-overlap" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["--allow-overlap", *words]) == 0
