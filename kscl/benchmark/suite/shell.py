"""Stages as text for other engines: a list of commands, or a shell script.

The script leaves the same notes as the suite itself: either continues what the other began.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from kscl.benchmark.suite.execute import note_path
from kscl.benchmark.suite.stages import Stage

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


def commands_text(stages: Sequence[Stage], state_dir: Path, form: str) -> str:
    """Return the commands of all stages in one of the formats."""
    if form == "sh":
        return _sh(stages, state_dir)
    return "".join(f"{shlex.join(stage.command)}\n" for stage in stages)


def board_command(stage: Stage, program: str) -> str:
    """Return shell text that makes the leaderboard from what there is: a stage may have failed."""
    shown = [need.folder for need in stage.needs if need.folder in stage.arguments]
    rest = [word for word in stage.arguments if word not in shown]
    return (
        f"set --; for folder in {' '.join(map(shlex.quote, shown))}; do "
        'if [ -e "$folder" ]; then set -- "$@" "$folder"; fi; done; '
        f'{shlex.quote(program)} "$@" {shlex.join(rest)}'
    )


def _sh(stages: Sequence[Stage], state_dir: Path) -> str:
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
