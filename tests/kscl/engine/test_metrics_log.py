"""The log of a run: a bar on a terminal, lines in a pipe, rows in a file."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from kscl.engine.metrics_log import (
    METRICS_FILE,
    RunLog,
    means_of_last_epoch,
    read_metrics,
    remove_rows_after,
)
from kscl.errors import KsclError
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
    with RunLog(
        tmp_path, 0, total_steps=100, steps_per_epoch=20, num_views=6, figures=["instance_top1"]
    ) as run_log:
        report_ten_steps(run_log)
    text = capsys.readouterr().err
    assert "epoch 0.50, step 10 of 100: loss 6.5000, instance_top1 0.25," in text
    assert "128 images/s, 768 views/s, 0:45 left" in text


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
    assert first["fraction_waiting_for_data"] == pytest.approx(0.2)
    assert (second["step"], second["knn_top1"]) == (10, 40.0)


def test_a_resumed_run_forgets_what_came_after_its_checkpoint_and_half_a_line(tmp_path):
    file = tmp_path / METRICS_FILE
    rows = [row(step) for step in (2, 4, 6, 8)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"step": 10, "lo')
    remove_rows_after(tmp_path, 4)
    assert [json.loads(line)["step"] for line in file.open()] == [2, 4]


def row(step):
    return {"step": step, "epoch": step / 4, "steps": 2, "loss": 1.0}


DAMAGED = [
    b"\x00\x00\x00\x00\n",
    b"\xff\xfe not text\n",
    b"5\n",
    b"[1, 2]\n",
    b"null\n",
    b"{}\n",
    b'{"loss": 1.0}\n',
    b'{"step": "3", "loss": 1.0}\n',
    b'{"step": 3, "loss": "low", "epoch": 1, "steps": 2}\n',
    b'{"step": 3, "loss": 1.0}\n',
    b'{"step": 3, "loss": 1.0, "epoch": 1, "steps": 0}\n',
    b"[" * 100_000 + b"\n",
]


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: repr(line[:40]))
def test_a_damaged_line_is_removed_and_counted_and_the_others_stay(tmp_path, line, caplog):
    file = tmp_path / METRICS_FILE
    whole = [f"{json.dumps(row(step))}\n".encode() for step in (2, 4)]
    file.write_bytes(whole[0] + line + whole[1])
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [2, 4]
    remove_rows_after(tmp_path, 4)
    assert file.read_bytes() == b"".join(whole)
    assert f"{file}: 1 damaged" in caplog.text
    assert means_of_last_epoch(read_metrics(tmp_path)) == {"loss": 1.0}


def test_a_full_disk_is_one_error_that_names_the_file(tmp_path):
    run_log = RunLog(tmp_path, 0, total_steps=100, steps_per_epoch=20, num_views=6)
    run_log.lines.close()
    full = Path("/dev/full")
    with (
        full.open("a") as run_log.lines,
        pytest.raises(KsclError, match="No space") as error,
        run_log,
    ):
        report_ten_steps(run_log)
    assert str(tmp_path / METRICS_FILE) in str(error.value)


def test_other_ranks_are_silent(tmp_path, capsys):
    with RunLog(None, 0, total_steps=100, steps_per_epoch=20, num_views=6) as run_log:
        report_ten_steps(run_log)
        run_log.write(10, {"knn_top1": 40.0})
    assert capsys.readouterr().err == ""
    assert not list(tmp_path.iterdir())
