"""The folder of the drawn data set: finished, interrupted, damaged, or of something else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from kscl.commands.make_shapes import main
from kscl.datasets.shapes import (
    CLASS_NAMES,
    ShapesSettings,
    draw_contact_sheet,
    find_shapes,
    make_shapes,
    verify_shapes,
)
from kscl.datasets.shapes.writing.writer import Written
from kscl.errors import KsclError
from kscl.runtime import folder_lock
from tests.helpers.data.shapes import SMALL, bytes_of


def test_a_folder_from_before_the_coco_files_gets_them(small: Path, tmp_path: Path) -> None:
    make_shapes(tmp_path, SMALL)
    shutil.rmtree(tmp_path / "coco")
    manifest = json.loads((tmp_path / "shapes.json").read_text())
    del manifest["coco_sha256"]
    (tmp_path / "shapes.json").write_text(json.dumps(manifest))
    make_shapes(tmp_path, SMALL)
    assert bytes_of(tmp_path) == bytes_of(small)


def test_a_finished_folder_is_left_alone(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in small.rglob("*")}
    assert main([*arguments_for(SMALL), "--output-dir", str(small)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in small.rglob("*")} == before


def arguments_for(settings: ShapesSettings) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in vars(settings).items()] + [
        "--workers=1"
    ]


def test_an_interrupted_run_is_made_good(small: Path, tmp_path: Path) -> None:
    def pull_the_plug(results: Iterator[Written], total: int) -> Iterable[Written]:
        for count, written in enumerate(results):
            if count == total // 2:
                raise KeyboardInterrupt
            yield written

    with pytest.raises(KeyboardInterrupt):
        make_shapes(tmp_path, SMALL, watch=pull_the_plug)
    assert not (tmp_path / "shapes.json").exists()
    assert find_shapes(tmp_path, SMALL) is None
    half = next((tmp_path / "unlabeled").iterdir())
    half.write_bytes(half.read_bytes()[:100])
    with pytest.raises(KsclError, match="seed is 7, but 8 is"):
        make_shapes(tmp_path, replace(SMALL, seed=8))
    make_shapes(tmp_path, SMALL)
    assert bytes_of(tmp_path) == bytes_of(small)


def test_a_folder_that_another_process_fills_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "LOCK_PATIENCE", 0.1)
    code = f"""
import fcntl, sys
lock = open({str(tmp_path / folder_lock.LOCK_FILE)!r}, "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(KsclError, match=f"{tmp_path} .*--output-dir"):
            make_shapes(tmp_path, SMALL)
        assert [path.name for path in tmp_path.iterdir()] == [folder_lock.LOCK_FILE]
        other.communicate()


def test_lost_and_damaged_files_are_noticed(small: Path, tmp_path: Path) -> None:
    make_shapes(tmp_path, SMALL)
    verify_shapes(tmp_path)
    victim = tmp_path / "unlabeled/000003.jpg"
    victim.write_bytes(b"not a picture")
    with pytest.raises(KsclError, match="damaged"):
        verify_shapes(tmp_path)
    victim.unlink()
    assert find_shapes(tmp_path, SMALL) is None
    make_shapes(tmp_path, SMALL)
    assert bytes_of(tmp_path) == bytes_of(small)


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(KsclError, match="already holds something"):
        make_shapes(tmp_path, SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_another_set_in_the_folder_is_refused_by_name(small: Path) -> None:
    with pytest.raises(KsclError, match="image_size is 48, but 64 is"):
        make_shapes(small, replace(SMALL, image_size=64))
    verify_shapes(small)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"unlabeled": 0}, "unlabeled is 0"),
        ({"val": -1}, "val is -1"),
        ({"num_classes": 21}, "num_classes is 21; it can be 1 to 20"),
        ({"num_classes": 0}, "num_classes is 0"),
        ({"image_size": 8}, "image_size is 8; it can be 32"),
        ({"detection_size": 20}, "detection_size is 20; it can be 64"),
        ({"seed": -1}, "seed is -1"),
        ({"min_objects": 6, "max_objects": 5}, "max_objects is 5; it can be 6"),
        ({"train": 19}, "train shows 19 objects for 20 classes"),
        ({"detection_test": 3}, "detection_test shows 15 objects for 20 classes"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    changes: dict[str, int], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = replace(SMALL, **changes)
    assert main([*arguments_for(settings), "--output-dir", str(tmp_path / "new")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert complaint in message
    assert not (tmp_path / "new").exists()


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(KsclError) as caught:
        make_shapes(tmp_path, replace(SMALL, train=0, image_size=1))
    assert "train is 0" in str(caught.value)
    assert "image_size is 1" in str(caught.value)


def test_an_output_that_cannot_be_written_is_an_error_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "shapes"
    assert main([*arguments_for(SMALL), "--output-dir", str(output)]) == 2
    assert "Not a directory" in capsys.readouterr().err
    with pytest.raises(KsclError, match="workers is 0"):
        make_shapes(tmp_path / "new", SMALL, workers=0)


def test_the_command_draws_a_contact_sheet_and_verifies(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = tmp_path / "sheet.png"
    extra = ["--output-dir", str(small), "--contact-sheet", str(sheet), "--verify"]
    assert main([*arguments_for(SMALL), *extra]) == 0
    assert "Every file is as the manifest says" in capsys.readouterr().out
    with Image.open(sheet) as picture:
        assert picture.format == "PNG"
        assert picture.width > 600
    with pytest.raises(KsclError, match="holds no finished data set"):
        draw_contact_sheet(tmp_path, sheet)


def test_help_has_examples_and_all_classes() -> None:
    tool = Path(__file__).parents[3] / "tools" / "make_shapes.py"
    shown = subprocess.run(
        [sys.executable, str(tool), "--help"], check=True, capture_output=True, text=True
    ).stdout
    assert "examples:" in shown
    assert all(name in shown for name in CLASS_NAMES)
