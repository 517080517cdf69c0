"""Tiny pretraining runs in real processes that can really be killed.

The processes are forked from a server that has imported everything, so that one starts in a
fraction of a second and a test can afford to kill many.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from kscl.run.checkpoint import CHECKPOINT_FOLDER, load_newest

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["kscl.commands.pretrain", "torch.utils.tensorboard", "tests.helpers.runs"]
)

ANY_METHOD = """
DATA: {NUM_WORKERS: 0}
INPUT: {SIZE: 32}
BACKBONE: {NAME: test_resnet, KWARGS: {drop_path_rate: 0.2}}
PROJECTOR: {DIM: 16}
SOLVER: {EPOCHS: 3, BATCH_SIZE: 16, LR_UPDATE: iter}
CHECKPOINT: {PERIOD_STEPS: 2}
LOG: {PERIOD: 3}
"""
TINY = f"""{ANY_METHOD}
METHOD: {{NUM_SHOTS: 2, RHO: 0.9}}
DICTIONARY: {{QUEUE_LENGTH: 64}}
KEY_ENCODER: {{MOMENTUM: 0.9}}
"""


def draw_images(folder: Path, count: int = 96, side: int = 40) -> Path:
    """Pictures of coarse noise in two class folders, told apart by their color."""
    random = np.random.default_rng(0)
    for number in range(count):
        picture = random.integers(0, 255, (6, 6, 3), dtype=np.uint8)
        picture[..., number % 2] = 250
        file = folder / f"class{number % 2}" / f"{number:04d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(file), cv2.resize(picture, (side, side)))
    return folder


class Run:
    """One output folder, and the command that fills it."""

    def __init__(self, folder: Path, images: Path, *overrides: object, ranks: int = 1) -> None:
        self.folder = folder
        self.ranks = ranks
        self.config = folder.with_suffix(".yaml")
        self.config.parent.mkdir(parents=True, exist_ok=True)
        self.config.write_text(ANY_METHOD if "METHOD.NAME" in overrides else TINY)
        self.log = folder.with_suffix(".log")
        self.words = ["OUTPUT_DIR", folder, "DATA.TRAIN", images, *overrides]

    def command(self, *flags: str, more: Sequence[object] = ()) -> list[str]:
        return [*flags, "--config-file", str(self.config), *map(str, [*self.words, *more])]

    def start(
        self,
        *flags: str,
        more: Sequence[object] = (),
        before: Callable[[], None] | None = None,
    ) -> list[BaseProcess]:
        """Start one process per rank, as torchrun would."""
        port = free_port()
        processes: list[BaseProcess] = []
        for rank in range(self.ranks):
            place = (rank, self.ranks, port)
            command = self.command(*flags, more=more)
            process = context.Process(target=_live, args=(place, command, self.log, before))
            process.start()
            processes.append(process)
        return processes

    def finish(self, *flags: str, more: Sequence[object] = ()) -> None:
        processes = self.start(*flags, more=more)
        for process in processes:
            process.join(180)
        codes = [process.exitcode for process in processes]
        end_all(processes)
        assert codes == [0] * self.ranks, f"{codes}\n{self.log.read_text()[-1500:]}"

    def state(self) -> dict[str, Any]:
        """Return what the newest checkpoint holds."""
        newest = load_newest(self.folder / CHECKPOINT_FOLDER)
        assert newest is not None
        return newest[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end_all(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()


def is_finished(processes: Sequence[BaseProcess]) -> bool:
    return all(process.exitcode is not None for process in processes)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "It did not happen in time."
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """Return the descendants of a process."""
    try:
        own = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except FileNotFoundError:  # it has ended meanwhile
        own = []
    return [*own, *(below for child in own for below in children(child))]


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended may wait for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def same_bits(one: Any, other: Any) -> bool:
    """Return whether nested dicts, lists and tensors are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        same_kind = one.dtype == other.dtype and one.shape == other.shape
        return same_kind and one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return one == other


def _live(
    place: tuple[int, int, int], command: list[str], log: Path, before: Callable[[], None] | None
) -> None:
    from kscl.commands.pretrain import main

    rank, ranks, port = place
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if before is not None:
        before()
    sys.exit(main(command))
