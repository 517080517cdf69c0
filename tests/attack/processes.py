"""Processes of the tools that can be killed, or must end by themselves."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.commands import ROOT

PATIENCE = 400.0  # seconds; an undisturbed run takes a few

# A process forked from a server that has imported everything starts in a fraction of a second.
context = multiprocessing.get_context("forkserver")
MODULES = {
    "pretrain": "kscl.commands.pretrain",
    "leaderboard": "kscl.commands.leaderboard",
    "run_suite": "kscl.commands.run_suite",
    "visualize_training": "kscl.commands.visualize_training",
    "linear_eval": "linear_eval.commands.linear_eval",
    "convert": "detection.commands.convert",
    "train_net": "detection.commands.train_net",
    "score": "detection.commands.score",
    "preflight": "detection.commands.preflight",
}


def start_program(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command as a user does, in a process group of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("ab") as out:
        return subprocess.Popen(words, stdout=out, stderr=out, env=env, start_new_session=True)


def finish_program(words: Sequence[str], log: Path) -> tuple[int | None, float]:
    """Run a command to its end; return the exit code, None for a hang, and the seconds."""
    begun, process = time.monotonic(), start_program(words, log)
    try:
        code = process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        code = None
    return code, time.monotonic() - begun


def finish_tool(tool: str, words: Sequence[str], log: Path) -> int | None:
    """Run a tool's main in a forked process to its end; return the exit code, None for a hang."""
    context.set_forkserver_preload([*MODULES.values(), "torch.utils.tensorboard"])
    process = context.Process(target=_live, args=(MODULES[tool], list(words), log))
    process.start()
    process.join(PATIENCE)
    if process.exitcode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        return None
    return process.exitcode


def _live(module: str, words: list[str], log: Path) -> None:
    import importlib

    import torch

    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    multiprocessing.set_start_method("fork", force=True)  # as in a process of its own
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    torch.set_num_threads(1)
    sys.exit(importlib.import_module(module).main(words))
