"""How far a suite is: a table on a terminal, lines elsewhere; the time to go comes first."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from kscl.benchmark.suite.execute import DONE, FAILED, RUNNING, State
from kscl.runtime.logs import clock

WIDTH = 80  # columns that every terminal has
LINE_SECONDS = 60.0  # between two lines where there is no terminal
GAP = 2  # columns between those of the table


def table(states: Sequence[State], jobs: int = 1, width: int = WIDTH) -> str:
    """Return how long the rest may take, then one line per stage, none wider than `width`."""
    cells = [(state.status, _time(state)) for state in states]
    others = sum(max(map(len, column)) + GAP for column in zip(*cells, strict=True))
    room = max(12, width - others)
    rows = [
        (_cut(state.stage.name, room), *cell) for state, cell in zip(states, cells, strict=True)
    ]
    lines = tabulate(rows, tablefmt="plain", disable_numparse=True).splitlines()
    return "\n".join(line.rstrip()[:width] for line in [to_go(states, jobs), *lines])


def to_go(states: Sequence[State], jobs: int = 1) -> str:
    """Return how long the rest may take, as far as earlier stages tell, and how many are done.

    `jobs` stages at a time share the work, but a stage waits for those it needs.
    """
    left = [state for state in states if state.status != DONE]
    known = [_left(state) for state in left if state.expected is not None]
    unknown = len(left) - len(known)
    done = f"{len(states) - len(left)} of {len(states)} stages done"
    if not left:
        return done
    if not known:
        return f"Time to go not known yet; {done}"
    more = f" and {unknown} of unknown time" if unknown else ""
    seconds = max(sum(known) / jobs, _longest_chain(left))
    return f"About {clock(seconds)} to go{more}; {done}"


class LiveTable:
    """Draw the table on a terminal, over the one before."""

    def __init__(self, jobs: int) -> None:
        self.jobs, self.height = jobs, 0

    def __call__(self, states: list[State]) -> None:
        """Show the states."""
        width = min(WIDTH, shutil.get_terminal_size().columns)
        running = [_last_line(state, width) for state in states if state.status == RUNNING]
        lines = table(states, self.jobs, width).splitlines() + running
        sys.stderr.write(f"\033[{self.height}F" if self.height else "")
        sys.stderr.write("".join(f"\033[2K{line}\n" for line in lines) + "\033[J")
        sys.stderr.flush()
        self.height = len(lines)


def show_checks(done: int, total: int, name: str) -> None:
    """Show how many checks are done, on stderr: one line that grows on a terminal, else many."""
    last = f": {name}" if name else ", most import PyTorch first …"
    line = f"Checking the stages before the first one starts: {done} of {total} checks done{last}"
    if sys.stderr.isatty():
        room = min(WIDTH, shutil.get_terminal_size().columns) - 1
        sys.stderr.write(f"\r\033[2K{line[:room]}" + ("\n" if done == total else ""))
    else:
        sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class Lines:
    """Print a line whenever a stage begins or ends, and one per minute; without a terminal."""

    def __init__(self, states: list[State], jobs: int) -> None:
        self.shown = {state.stage.name: state.status for state in states}
        self.jobs, self.last = jobs, time.monotonic()

    def __call__(self, states: list[State]) -> None:
        """Print what has changed, or how far the suite is if nothing was said for a minute."""
        for state in states:
            if state.status != self.shown[state.stage.name]:
                self.shown[state.stage.name] = state.status
                print(f"{state.stage.name}: {state.status} {_time(state)}".rstrip(), flush=True)
        running = [state for state in states if state.status == RUNNING]
        if running and time.monotonic() - self.last >= LINE_SECONDS:
            self.last = time.monotonic()
            words = [f"{state.stage.name} {_time(state)}".rstrip() for state in running]
            print(f"{to_go(states, self.jobs)}; {', '.join(words)}", flush=True)


def tail(path: Path, lines: int = 15) -> str:
    """Return the last lines of a log; empty if it cannot be read."""
    try:
        text = path.read_text(errors="replace")[-20_000:]
    except OSError:
        return ""
    return "\n".join(text.replace("\r", "\n").rstrip().splitlines()[-lines:])


def _longest_chain(left: Sequence[State]) -> float:
    """Return the seconds of the stages that must run one after another; needs come first."""
    until_end: dict[int, float] = {}  # by identity of the stage
    for state in left:
        before = max((until_end.get(id(need), 0.0) for need in state.stage.needs), default=0.0)
        until_end[id(state.stage)] = before + _left(state)
    return max(until_end.values())


def _left(state: State) -> float:
    spent = state.seconds or 0.0 if state.status == RUNNING else 0.0
    return max(0.0, (state.expected or 0.0) - spent)


def _time(state: State) -> str:
    if state.status in (DONE, RUNNING, FAILED) and state.seconds is not None:
        note = clock(state.seconds)
        if state.status == RUNNING and state.expected:
            note += f" of about {clock(state.expected)}"
        return note
    return f"about {clock(state.expected)}" if state.expected else ""


def _last_line(state: State, width: int) -> str:
    said = tail(state.log, 1) if state.log else ""
    return f"{state.stage.name}: {said}"[: width - 1]


def _cut(name: str, room: int) -> str:
    """Return a name that fits; its end says more than its start."""
    return name if len(name) <= room else f"…{name[-(room - 1) :]}"
