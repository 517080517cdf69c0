"""A machine that fails under a probe: one line that names the thing and the fix."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from linear_eval.commands.linear_eval import main
from tests.helpers.commands import ROOT
from tests.helpers.data.digits import overrides
from tests.helpers.runs import children, wait_until


def assert_one_line(text, *words):
    assert "Traceback" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    for word in words:
        assert word in line


def test_a_cache_that_cannot_be_written(digits, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("not a folder")
    words = overrides(digits, tmp_path / "run", "PROBE", "knn", "DATA.CACHE_DIR", file / "cache")
    assert main(words) == 2
    assert_one_line(capsys.readouterr().err, str(file), "DATA.CACHE_DIR")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_a_loader_worker_that_is_killed(digits, tmp_path):
    changes = ("PROBE", "online", "SOLVER.EPOCHS", 1000, "DATA.NUM_WORKERS", 2)
    words = overrides(digits, tmp_path / "run", *changes, "SOLVER.MILESTONES", "[999]")
    command = [sys.executable, "-W", "ignore", ROOT / "tools" / "linear_eval.py", *words]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(list(map(str, command)), stderr=file, stdout=file, cwd=ROOT)
    try:
        wait_until(lambda: len(children(process.pid)) >= 2, 120)
        os.kill(children(process.pid)[0], signal.SIGKILL)
        assert process.wait(120) == 2, log.read_text()
    finally:
        process.kill()
    assert_one_line(log.read_text(), "Loader worker", "DATA.NUM_WORKERS")
