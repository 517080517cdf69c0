"""What a run tells while it goes on: a bar on a terminal, lines in a pipe, rows in a file."""

from __future__ import annotations

import io
import json
import sys

import pytest

from kscl.engine.metrics_log import METRICS_FILE, RunLog, forget_after, read_metrics
from kscl.runtime.logs import set_up_logging

FIGURES = {"steps": 10, "learning_rate": 0.03, "loss": 6.5, "instance_top1": 0.25}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def report_ten_steps(run_log):
    set_up_logging()
    for _ in range(10):
        run_log.add_step(images=64, seconds=0.5)
    run_log.report(FIGURES, waited=1.0)


def test_a_pipe_gets_lines_with_rates_and_the_time_that_remains(tmp_path, capsys):
    with RunLog(tmp_path, 0, total_steps=100, steps_per_epoch=20, num_views=6) as run_log:
        report_ten_steps(run_log)
    text = capsys.readouterr().err
    assert "epoch 0.50, step 10 of 100: loss 6.5000, top-1 25.0 %" in text
    assert "128 images/s, 768 views/s, 0:45 to go" in text


def test_a_terminal_gets_a_bar_with_the_same(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with RunLog(tmp_path, 40, total_steps=100, steps_per_epoch=20, num_views=6) as run_log:
        report_ten_steps(run_log)
    last = terminal.getvalue().rstrip().rsplit("\r", 1)[-1]
    assert "50/100" in last
    assert "loss 6.500, 128 images/s, 768 views/s" in last


def test_rows_hold_the_figures_the_rates_and_the_share_of_waiting(tmp_path):
    with RunLog(tmp_path, 0, total_steps=100, steps_per_epoch=20, num_views=6) as run_log:
        report_ten_steps(run_log)
        run_log.write(10, {"knn_top1": 40.0})
    first, second = read_metrics(tmp_path)
    assert (first["step"], first["epoch"], first["loss"]) == (10, 0.5, 6.5)
    assert (first["images_per_second"], first["views_per_second"]) == (128, 768)
    assert first["share_waiting_for_data"] == pytest.approx(0.2)
    assert (second["step"], second["knn_top1"]) == (10, 40.0)


def test_a_resumed_run_forgets_what_came_after_its_checkpoint_and_half_a_line(tmp_path):
    file = tmp_path / METRICS_FILE
    rows = [{"step": step, "loss": 1.0} for step in (2, 4, 6, 8)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"step": 10, "lo')
    forget_after(tmp_path, 4)
    assert [json.loads(line)["step"] for line in file.open()] == [2, 4]


def test_other_ranks_are_silent(tmp_path, capsys):
    with RunLog(None, 0, total_steps=100, steps_per_epoch=20, num_views=6) as run_log:
        report_ten_steps(run_log)
        run_log.write(10, {"knn_top1": 40.0})
    assert capsys.readouterr().err == ""
    assert not list(tmp_path.iterdir())
