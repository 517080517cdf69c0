"""Messages of libraries that are not the user's concern reach nobody; all others do."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.helpers.commands import ROOT

# A spawned rank knows only what it imports itself.
PROGRAM = """
import multiprocessing

def provoke():
    import logging, warnings
    import kscl
    from torch.utils.data import DataLoader
    DataLoader([0], num_workers=4000)
    logger = logging.getLogger("torch.fx._symbolic_trace")
    try:
        from torch.fx._symbolic_trace import is_fx_tracing
    except ImportError:
        pass
    else:
        is_fx_tracing()
    logger.warning("another message of the tracer")
    warnings.warn("another warning")

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=provoke)
    process.start()
    process.join()
    provoke()
"""


def test_worker_counts_and_tracing_are_not_told_in_any_process_and_the_rest_is(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default::UserWarning"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "worker processes" not in done.stderr
    assert "is_fx_tracing" not in done.stderr
    assert done.stderr.count("another message of the tracer") == 2
    assert done.stderr.count("UserWarning: another warning") == 2
