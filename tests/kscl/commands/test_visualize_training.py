"""Curves of several runs in one picture."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from kscl.commands.visualize_training import curves, main
from kscl.engine.metrics_log import METRICS_FILE


@pytest.fixture
def runs(tmp_path):
    for name, fraction in (("a", 0.6), ("b", 0.9)):
        folder = tmp_path / name
        folder.mkdir()
        fractions = {"eigenvalue_1": fraction, "eigenvalue_2": 1 - fraction}
        others = {"mean_rank": 1 + fraction, "loss": 5 * fraction}
        lines = [{"step": 9 * e, "epoch": e, "steps": 9, **fractions, **others} for e in (1, 2)]
        lines.append({"step": 18, "knn_top1": 3.0})
        (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in lines))
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_each_run_has_its_color_in_each_panel(runs, tmp_path):
    output = tmp_path / "new" / "training.png"
    assert main([*runs, "--names", "K=3", "K=5", "--output", str(output)]) == 0
    picture = np.asarray(Image.open(output).convert("RGB")).astype(int)
    for panel in np.array_split(picture, 3, axis=1):
        for color in ((31, 119, 180), (255, 127, 14)):  # the first two that matplotlib gives
            assert (np.abs(panel.reshape(-1, 3) - color).max(1) < 3).sum() > 200


def test_eigenvalues_are_in_the_order_of_their_size(tmp_path):
    rows = [
        {"epoch": 1, "eigenvalue_mass": 1.0, **{f"eigenvalue_{i}": 1 / i for i in range(1, 13)}}
    ]
    assert curves("eigenvalue_fractions", rows) == [f"eigenvalue_{i}" for i in range(1, 13)]
    assert curves("eigenvalue_fractions", [{"epoch": 1, "loss": 1.0}]) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [(["--names", "one"], "1 names for 2 runs"), (["nowhere"], "nowhere")],
)
def test_what_does_not_fit_is_told(runs, change, message, capsys):
    assert main([*runs, *change]) == 2
    assert message in capsys.readouterr().err
