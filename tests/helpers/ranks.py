"""Two ranks in real processes, as a scheduler starts them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from kscl.cli import command
from kscl.runtime.launch import launch
from tests.helpers.runs import context, end_all, free_port

PATIENCE = 120  # seconds


def joined(
    worker: Callable[[object], int], folder: Path, **environment: str
) -> list[tuple[int | None, str]]:
    """Run a worker on two ranks that a scheduler starts; return exit code and messages of each."""
    port = free_port()
    files = [folder / f"{number}.txt" for number in range(2)]
    ranks = [
        context.Process(target=_live, args=(worker, number, port, file, environment))
        for number, file in enumerate(files)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(PATIENCE)
    codes = [process.exitcode for process in ranks]
    end_all(ranks)
    return [(code, file.read_text()) for code, file in zip(codes, files, strict=True)]


def _live(
    worker: Callable[[object], int], number: int, port: int, file: Path, more: dict[str, str]
) -> None:
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    os.environ.update(more)
    with file.open("w") as messages:
        os.dup2(messages.fileno(), 2)
    sys.exit(command(lambda _: launch(worker, None, 1))(None))
