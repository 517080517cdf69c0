"""What a run saves to resume from: at intervals, and when it is asked to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kscl.engine.checkpoint import CHECKPOINT_FOLDER, load_newest, save_checkpoint
from kscl.runtime.processes.distributed import rank
from kscl.runtime.processes.ranks import any_rank, on_first_rank
from kscl.runtime.processes.signals import StopRequest
from linear_eval.errors import LinearEvalError

Content = Mapping[str, Any]
KEPT = 2
SUBSET = "DATA.SUBSET"


class Stopped(Exception):
    """The run was asked to stop; its state is on disk."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("Stopped on request. --resume continues from here.")
        self.exit_code = exit_code


def leave_if_asked(stop: StopRequest) -> None:
    """Raise `Stopped` if a stop was requested."""
    if stop:
        raise Stopped(stop.exit_code)


def leave_together(stop: StopRequest) -> None:
    """Raise `Stopped` on every rank if a stop was requested of any; all ranks meet here."""
    if any_rank(bool(stop)):
        raise Stopped(stop.exit_code)


def on_first_rank_unless_stopped(work: Callable[[], object]) -> None:
    """Run `work` on rank 0 while the others wait; if it is stopped, raise `Stopped` on every rank.

    A rank that left alone would wait at the end of the run for those that wait here.
    """

    def exit_code() -> int:
        try:
            work()
        except Stopped as stopped:
            return stopped.exit_code
        return 0

    if code := on_first_rank(exit_code):
        raise Stopped(code)


@dataclass
class Saver:
    """Save checkpoints of one run; all ranks have the same state, so rank 0 writes it."""

    folder: Path
    about: Content  # config, backbone and data, which must be the same on resume
    every: float  # seconds between two checkpoints
    stop: StopRequest
    spent: Callable[[], float]  # seconds of work so far, over all restarts
    last: float = field(default_factory=time.monotonic)

    def offer(
        self, step: int, content: Callable[[], Content], stopping: bool | None = None
    ) -> None:
        """Save if it is time to; save and leave if a stop was requested."""
        stopping = bool(self.stop) if stopping is None else stopping
        if stopping or time.monotonic() - self.last >= self.every:
            if rank() == 0:
                whole = {**self.about, "seconds": self.spent(), **content()}
                save_checkpoint(self.folder / CHECKPOINT_FOLDER, step, whole, KEPT)
            self.last = time.monotonic()
        if stopping:
            raise Stopped(self.stop.exit_code)


def saved_state(folder: Path, about: Content) -> dict[str, Any] | None:
    """Return the newest checkpoint; raise an error if it is of another backbone or other data."""
    newest = load_newest(folder / CHECKPOINT_FOLDER)
    if newest is None:
        return None
    path, content = newest
    for what in ("backbone", "data", SUBSET):
        before, now = (it.get(what, about.get(what)) for it in (content, about))
        if before != now:  # a checkpoint of an earlier release lacks the list
            raise LinearEvalError(
                f"{path} was made with another {what} ({before}, now {now}), so it cannot be "
                "resumed. Choose another OUTPUT_DIR."
            )
    return content
