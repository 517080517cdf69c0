"""What one rank meets or looks up holds for all of them: they continue or stop together."""

from __future__ import annotations

import shutil

import pytest

from kscl.records.record import read_record
from tests.helpers.runs import Run, end_all

pytestmark = pytest.mark.full


def codes_of(run, *flags, more=()):
    processes = run.start(*flags, more=more)
    for process in processes:
        process.join(120)
    codes = [process.exitcode for process in processes]
    end_all(processes)
    return codes


def test_unreadable_images_of_all_ranks_count_together_and_stop_all_with_one_error(
    tmp_path, with_broken
):
    # Of 96 images one may be unreadable. Each of the two ranks meets one, in the third step.
    run = Run(tmp_path / "run", with_broken(32, 40), "DATA.MAX_BAD_FRACTION", 0.015, ranks=2)
    assert codes_of(run) == [2, 2]
    told = run.log.read_text()
    assert told.count("cannot be read and is skipped") == 2  # rank 0 names those of all
    (error,) = {line for line in told.splitlines() if "DATA.MAX_BAD_FRACTION" in line}
    assert "2 of the 96 images" in error
    assert run.state()["step"] == 2
    run.finish("--resume", more=["DATA.MAX_BAD_FRACTION", 0.03])
    assert read_record(run.folder / "record.json")["metrics"]["bad_images"] == 2


def test_a_finished_run_has_ended_on_all_ranks_though_its_images_are_gone(tmp_path, images):
    gone = shutil.copytree(images, tmp_path / "images")
    run = Run(tmp_path / "run", gone, "SOLVER.EPOCHS", 1, ranks=2)
    run.finish()
    shutil.rmtree(gone)
    run.finish("--resume")
    assert "This run has ended" in run.log.read_text()
    assert codes_of(run, "--resume", more=["DATA.TRAIN", tmp_path / "nowhere"]) == [2, 2]
    told = run.log.read_text()
    assert "nowhere" in told
    assert "Traceback" not in told
