"""A machine that fails: one line that names the thing and the fix, and never a traceback."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kscl.engine.metrics_log import METRICS_FILE
from kscl.run.checkpoint import CHECKPOINT_FOLDER, find_checkpoints
from tests.helpers.commands import ROOT
from tests.helpers.runs import Run, children, wait_until

pytestmark = pytest.mark.full

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
LONG = ["SOLVER.EPOCHS", 1000]
SMALL_DISK = """
mount -t tmpfs -o size=$1 tmpfs "$2" || exit 77
shift 2
exec "$@"
"""


def assert_one_line(text, *words):
    assert "Traceback" not in text
    # PyTorch ends its own line about a bus error with a NUL.
    (line,) = [line for line in text.replace("\0", "").splitlines() if line.startswith("error: ")]
    for word in words:
        assert word in line


def command_of(run: Run, *words: object) -> list[str]:
    tool = [sys.executable, "-W", "ignore", ROOT / "tools" / "pretrain.py"]
    return list(map(str, [*tool, *run.command(more=words)]))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, ("Loader worker", "DATA.NUM_WORKERS")),
        # What a worker gets that writes to shared memory which is full.
        (signal.SIGBUS, ("/dev/shm", "--shm-size", "DATA.NUM_WORKERS")),
    ],
)
def test_a_loader_worker_that_is_ended(tmp_path, images, number, words):
    run = Run(tmp_path / "run", images, *LONG, "DATA.NUM_WORKERS", 1)
    with run.log.open("w") as log:
        process = subprocess.Popen(command_of(run), stderr=log, cwd=ROOT, env=ENVIRONMENT)
    try:
        wait_until(lambda: bool(find_checkpoints(run.folder / CHECKPOINT_FOLDER)), 200)
        os.kill(children(process.pid)[0], number)
        assert process.wait(120) == 2, run.log.read_text()
    finally:
        process.kill()
    assert_one_line(run.log.read_text(), *words)


def files_of_at_most_6_kb():
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))


def test_a_disk_that_becomes_full_before_the_first_checkpoint(tmp_path, images):
    words = [*LONG, "LOG.PERIOD", 1, "CHECKPOINT.PERIOD_STEPS", 0, "CHECKPOINT.PERIOD_EPOCHS", 999]
    run = Run(tmp_path / "run", images, *words)
    (process,) = run.start(before=files_of_at_most_6_kb)
    process.join(180)
    process.kill()
    assert process.exitcode == 2
    assert_one_line(run.log.read_text(), METRICS_FILE, "--resume")


def with_disk(size: str, where: Path, run: Run, *words: object) -> subprocess.CompletedProcess[str]:
    """Run the tool where a file system of this size is mounted."""
    script = ["unshare", "--map-root-user", "--mount", "sh", "-c", SMALL_DISK, "sh", size]
    done = subprocess.run(
        [*script, str(where), *command_of(run, *words)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip("no file system can be mounted here")
    return done


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts in a namespace of its own")
def test_a_disk_that_is_full_from_the_start_is_refused_before_anything_is_written(tmp_path, images):
    run = Run(tmp_path / "run", images)
    (tmp_path / "disk").mkdir()
    done = with_disk("64k", tmp_path / "disk", run, "OUTPUT_DIR", tmp_path / "disk" / "run")
    assert done.returncode == 2, done.stderr
    assert_one_line(done.stderr, "OUTPUT_DIR", str(tmp_path / "disk" / "run"), "MiB")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts in a namespace of its own")
def test_shared_memory_that_is_too_small(tmp_path, images):
    run = Run(tmp_path / "run", images, "DATA.NUM_WORKERS", 1)
    done = with_disk("64k", Path("/dev/shm"), run)
    assert done.returncode == 2, done.stderr
    assert_one_line(done.stderr, "/dev/shm", "--shm-size", "DATA.NUM_WORKERS")


def test_an_index_that_cannot_be_cached_costs_one_line(tmp_path, images):
    (tmp_path / "file").write_text("not a folder")
    run = Run(tmp_path / "run", images, "SOLVER.EPOCHS", 1)
    run.finish(more=["DATA.CACHE_DIR", tmp_path / "file"])
    text = run.log.read_text()
    assert "Traceback" not in text
    assert len([line for line in text.splitlines() if str(tmp_path / "file") in line]) == 1
