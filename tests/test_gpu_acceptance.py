"""The first report of a GPU, on a fake one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import gpu_acceptance
from tests.gpu_acceptance import FULL_SIZE, PARTS, Trial, accept
from tests.helpers.gpu.training import PRETENDED, REAL, gpu

SMALL = ["BACKBONE.NAME", "test_resnet", "INPUT.SIZE", "32", "DATA.NUM_WORKERS", "0"]
SMALL += ["SOLVER.BATCH_SIZE", "8", "DICTIONARY.QUEUE_LENGTH", "64", *FULL_SIZE[2:]]


@PRETENDED
@pytest.mark.full
def test_a_report_has_every_method_in_every_precision_and_goes_on_after_a_failure(tmp_path: Path):
    def broken(trial):
        yield "begun"
        raise RuntimeError("this part is broken")

    trial = Trial(tmp_path, SMALL, steps=1)
    parts = {"Broken": broken, **{name: PARTS[name] for name in ("Machine", "Steps", "Two ranks")}}
    with gpu():
        report, failed = accept(trial, parts)
    assert failed == 1, report
    assert "this part is broken" in report
    steps = report.partition("## Steps")[2]
    for method in gpu_acceptance.METHODS:
        assert sum(line.startswith(f"| {method}") for line in steps.splitlines()) == 3
    assert "there is one GPU" in report


@pytest.mark.full
def test_the_detector_of_the_report_trains(tmp_path: Path):
    trial = Trial(tmp_path, SMALL, iterations=1, device="cpu")
    report, failed = accept(trial, {"Detector": PARTS["Detector"]})
    assert not failed, report
    assert (tmp_path / "detector/run/record.json").is_file()


@pytest.mark.skipif(REAL, reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_well(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["gpu_acceptance", "--report", str(tmp_path / "report.md")])
    assert gpu_acceptance.main() == 0
    assert "no GPU" in capsys.readouterr().out
    assert not (tmp_path / "report.md").exists()
