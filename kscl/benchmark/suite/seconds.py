"""What pretrainings that should take equally long have taken."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from kscl.benchmark.suite.spec import Suite
from kscl.benchmark.suite.stages import Stage
from kscl.records.record import RECORD_FILE, read_record

TOLERATED = 0.15  # fraction by which the slowest may take longer than the fastest


def seconds_of(suite: Suite, stages: Sequence[Stage]) -> dict[str, float]:
    """Return the mean seconds of each contender's finished pretrainings, per unit of length."""
    length = {contender.name: contender.lengths[0] for contender in suite.contenders}
    found: dict[str, list[float]] = {}
    for stage in stages:
        record = Path(stage.folder) / RECORD_FILE
        if stage.kind == "pretrain" and record.is_file():
            name = stage.name.split("/")[0]
            found.setdefault(name, []).append(read_record(record).seconds / length[name])
    return {name: statistics.fmean(seconds) for name, seconds in found.items()}


def report_seconds(seconds: Mapping[str, float]) -> str:
    """Return a table of the seconds, and a warning if they differ by more than is tolerated."""
    if not seconds:
        return ""
    fastest, slowest = min(seconds, key=seconds.__getitem__), max(seconds, key=seconds.__getitem__)
    over = {name: value / seconds[fastest] - 1 for name, value in seconds.items()}
    rows = [(name, f"{value:.1f}", f"{over[name]:+.0%}") for name, value in seconds.items()]
    text = tabulate(
        rows, ["pretraining", "seconds per length", "to the fastest"], disable_numparse=True
    )
    if over[slowest] > TOLERATED:
        text += (
            f"\nWarning: the time is not equal. {slowest} took {over[slowest]:.0%} longer than "
            f"{fastest}. If other work ran beside some of them, the steps may still be right; if "
            "not, measure again with tools/equal_time.py and run the suite again."
        )
    return text
