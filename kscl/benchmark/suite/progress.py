"""Stages as text: how far they are, as commands for other engines, and the time they took."""

from __future__ import annotations

import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tabulate import tabulate

from kscl.benchmark.suite.execute import DONE, FAILED, RUNNING, State, note_path
from kscl.benchmark.suite.stages import Stage
from kscl.records.record import RECORD_FILE, read_record
from kscl.runtime.logs import clock

WIDTH = 80  # columns that every terminal has
LINE_SECONDS = 60.0  # between two lines into a pipe
GAP = 2  # columns between those of the table
TOLERATED = 0.15  # fraction by which the slowest pretraining may take longer than the fastest
FORMATS = ("list", "sh")

SH_HEAD = """\
#!/bin/sh
# All stages in order; one is skipped if a stage that it needs has failed. Run it again to continue.
stage() { # NOTE KEY KIND COMMAND…
    note=$1 key=$2 kind=$3 begun=$(date +%s)
    shift 3
    if [ -s "$note" ]; then return 0; fi
    "$@" || return 1
    printf '{"key": "%s", "kind": "%s", "seconds": %d.0}\\n' \\
        "$key" "$kind" "$(($(date +%s) - begun))" >"$note"
}
"""


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
    known = [seconds for seconds in map(_left, left) if seconds is not None]
    unknown = len(left) - len(known)
    done = f"{len(states) - len(left)} of {len(states)} stages done"
    if not left:
        return done
    if unknown > len(known):  # the sum of a few would mislead
        return f"Time to go not known yet; {done}"
    more = f" plus {unknown} of unknown time" if unknown else ""
    seconds = max(sum(known) / jobs, _longest_chain(left))
    return f"About {clock(seconds)} to go{more}; {done}"


class Line:
    """One line on stderr: a terminal updates it, a pipe gets it once per minute."""

    def __init__(self) -> None:
        self.is_live, self.last = sys.stderr.isatty(), -LINE_SECONDS

    def __call__(self, text: str, is_last: bool) -> None:
        """Show the text if it is due; the last one is always shown."""
        if self.is_live:
            room = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\033[2K{text[:room]}" + "\n" * is_last)
        elif is_last or time.monotonic() - self.last >= LINE_SECONDS:
            self.last = time.monotonic()
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


class Progress:
    """Show how far a suite is: percent, time to go, and what runs now."""

    def __init__(self, jobs: int) -> None:
        self.jobs, self.line = jobs, Line()

    def __call__(self, states: Sequence[State]) -> None:
        """Show the states."""
        names = [state.stage.name for state in states if state.status == RUNNING]
        now = f"; now {', '.join(names)}" if names else ""
        self.line(f"{_done(states):.0%}: {to_go(states, self.jobs)}{now}", not names)


class CheckProgress:
    """Show how many stages were checked before the first one starts."""

    def __init__(self) -> None:
        self.line = Line()

    def __call__(self, done: int, total: int, name: str) -> None:
        """Show that `name` was checked; it is empty before the first."""
        last = f": {name}" if name else ", most import PyTorch first …"
        self.line(f"Checking the stages: {done} of {total} checks done{last}", done == total)


def tail(path: Path, lines: int = 15) -> str:
    """Return the last lines of a log; empty if it cannot be read."""
    try:
        text = path.read_text(errors="replace")[-20_000:]
    except OSError:
        return ""
    return "\n".join(text.replace("\r", "\n").rstrip().splitlines()[-lines:])


def _done(states: Sequence[State]) -> float:
    """Return the fraction that is done: of the time, or of the stages if a time is not known."""
    left = [_left(state) for state in states if state.status != DONE]
    if None in left:
        return sum(state.status == DONE for state in states) / len(states)
    spent = sum(state.seconds or 0.0 for state in states if state.status in (DONE, RUNNING))
    rest = sum(it for it in left if it is not None)
    return spent / (spent + rest) if rest else 1.0


def _longest_chain(left: Sequence[State]) -> float:
    """Return the seconds of the stages that must run one after another; needs come first."""
    until_end: dict[int, float] = {}  # by identity of the stage
    for state in left:
        before = max((until_end.get(id(need), 0.0) for need in state.stage.needs), default=0.0)
        until_end[id(state.stage)] = before + (_left(state) or 0.0)
    return max(until_end.values())


def _left(state: State) -> float | None:
    """Return the seconds to go; None if they are not known, as for a stage past its estimate."""
    spent = state.seconds or 0.0 if state.status == RUNNING else 0.0
    if state.expected is None or (spent and spent >= state.expected):
        return None
    return state.expected - spent


def _time(state: State) -> str:
    if state.status in (DONE, RUNNING, FAILED) and state.seconds is not None:
        note = clock(state.seconds)
        if state.status == RUNNING and state.expected:
            note += f" of about {clock(state.expected)}"
        return note
    return f"about {clock(state.expected)}" if state.expected else ""


def _cut(name: str, room: int) -> str:
    """Return a name that fits; its end says more than its start."""
    return name if len(name) <= room else f"…{name[-(room - 1) :]}"


# Commands for other engines


def commands_text(stages: Sequence[Stage], state_dir: Path, form: str) -> str:
    """Return the commands of all stages in one of the formats."""
    if form == "list":
        return "".join(f"{shlex.join(stage.command)}\n" for stage in stages)
    *others, board = stages
    number = {id(stage): place for place, stage in enumerate(others, 1)}
    lines = [SH_HEAD + f"mkdir -p {shlex.quote(str(state_dir))}", "failed=0"]
    for stage in others:
        own = f"done{number[id(stage)]}"
        needs = "".join(f'[ -n "$done{number[id(need)]}" ] && ' for need in stage.needs)
        words = ["stage", str(note_path(state_dir, stage)), stage.key, stage.kind, *stage.command]
        lines += [f"# {stage.name}", f"{own}=", f"{needs}{shlex.join(words)} && {own}=1"]
        lines.append(f'[ -n "${own}" ] || failed=1')
    lines += [f"# {board.name}", f"{board_command(board, board.program)} || failed=1"]
    return "\n".join([*lines, 'exit "$failed"', ""])


def board_command(stage: Stage, program: Sequence[str]) -> str:
    """Return shell text that makes the leaderboard from what there is: a stage may have failed."""
    options = replace(stage, inputs=()).arguments
    return (
        f"set --; for folder in {' '.join(map(shlex.quote, stage.inputs))}; do "
        'if [ -e "$folder" ]; then set -- "$@" "$folder"; fi; done; '
        '[ "$#" -gt 0 ] || set -- "$folder"; '  # or it would read those of other suites
        f'{shlex.join(program)} "$@" {shlex.join(options)}'
    )


# Pretrainings that should take equally long


def seconds_of(stages: Sequence[Stage]) -> dict[str, float]:
    """Return the mean seconds of each contender's finished pretrainings, per unit of length."""
    found: dict[str, list[float]] = {}
    for stage in stages:
        record = Path(stage.folder) / RECORD_FILE
        if stage.kind == "pretrain" and record.is_file():
            name = stage.name.split("/")[0]
            found.setdefault(name, []).append(read_record(record).seconds / stage.length)
    return {name: statistics.fmean(seconds) for name, seconds in found.items()}


def report_seconds(seconds: Mapping[str, float]) -> str:
    """Return the least and the most seconds, and a warning if they differ too much."""
    if not seconds:
        return ""
    fastest, slowest = min(seconds, key=seconds.__getitem__), max(seconds, key=seconds.__getitem__)
    over = seconds[slowest] / seconds[fastest] - 1
    text = (
        f"Seconds of pretraining per length: {seconds[fastest]:.1f} ({fastest}) to "
        f"{seconds[slowest]:.1f} ({slowest}, {over:+.0%})."
    )
    if over > TOLERATED:
        text += "\nWarning: unequal. Unless other work ran beside it, run kscl equal-time again."
    return text
