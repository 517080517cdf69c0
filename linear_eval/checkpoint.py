"""What a run keeps on disk to go on from: saved now and then, and when it is asked to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kscl.engine.checkpoint import CHECKPOINT_FOLDER, load_newest, save_checkpoint
from kscl.runtime.distributed import rank
from kscl.runtime.signals import StopRequest
from linear_eval.errors import LinearEvalError

Content = Mapping[str, Any]
KEPT = 2


class Stopped(Exception):
    """The run was asked to stop; what it had is on disk."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("stopped on request; --resume goes on from here")
        self.exit_code = exit_code


def leave_if_asked(stop: StopRequest) -> None:
    if stop:
        raise Stopped(stop.exit_code)


@dataclass
class Saver:
    """Writes checkpoints of one run; all ranks hold the same state, so rank 0 writes it."""

    folder: Path
    about: Content  # config, backbone and data, which must be the same to go on
    every: float  # seconds between two checkpoints
    stop: StopRequest
    spent: Callable[[], float]  # seconds of work so far, over all restarts
    last: float = field(default_factory=time.monotonic)

    def offer(
        self, step: int, content: Callable[[], Content], stopping: bool | None = None
    ) -> None:
        """Save where it is time to; save and leave where a stop was asked for."""
        stopping = bool(self.stop) if stopping is None else stopping
        if stopping or time.monotonic() - self.last >= self.every:
            if rank() == 0:
                whole = {**self.about, "seconds": self.spent(), **content()}
                save_checkpoint(self.folder / CHECKPOINT_FOLDER, step, whole, KEPT)
            self.last = time.monotonic()
        if stopping:
            raise Stopped(self.stop.exit_code)


def saved_state(folder: Path, about: Content) -> dict[str, Any] | None:
    """The newest checkpoint; an error if backbone or data are not those it was made with."""
    newest = load_newest(folder / CHECKPOINT_FOLDER)
    if newest is None:
        return None
    path, content = newest
    for what in ("backbone", "data"):
        if content[what] != about[what]:
            raise LinearEvalError(
                f"{path} was made with another {what} ({content[what]}, now {about[what]}), so it "
                "cannot be gone on with: choose another OUTPUT_DIR"
            )
    return content
