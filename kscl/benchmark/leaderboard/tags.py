"""A few words that distinguish rows which look the same in the table's columns."""

from __future__ import annotations

from collections.abc import Sequence

from kscl.benchmark.leaderboard.linking import SAME_FOR_ALL_SEEDS, Entry, processes
from kscl.benchmark.leaderboard.reading import RecordFile
from kscl.config import leaves_without

MAX_SETTINGS = 2
# METHOD.NAME is what LABEL was called in older records.
IN_COLUMNS = (
    *("LABEL", "METHOD.NAME", "METHOD.NUM_SHOTS", "METHOD.RHO"),
    *("BACKBONE.NAME", "BACKBONE.KWARGS.channels", "SOLVER.EPOCHS"),
)


def tags(rows: Sequence[tuple[Entry, Sequence[RecordFile]]]) -> list[str]:
    """Return for each row the settings in which it differs from rows like it, or a short hash."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, (entry, _) in enumerate(rows):
        alike.setdefault(entry.shown, []).append(i)
    found = [""] * len(rows)
    for indices in alike.values():
        if len(indices) > 1:
            words = _distinguishing([rows[i] for i in indices])
            for i, word in zip(indices, words, strict=True):
                found[i] = word
    return found


def _distinguishing(rows: Sequence[tuple[Entry, Sequence[RecordFile]]]) -> list[str]:
    settings = [
        {
            **leaves_without(files[0].record.config.values, SAME_FOR_ALL_SEEDS),
            "PROCESSES": processes(files[0].record),
        }
        if files
        else {}
        for _, files in rows
    ]
    keys = sorted({key for values in settings for key in values}.difference(IN_COLUMNS))
    differing = [key for key in keys if len({repr(values.get(key)) for values in settings}) > 1]
    short = {key: key.rpartition(".")[2].lower().replace("_", " ") for key in differing}
    words = [
        ", ".join(f"{short[key]} {values[key]}" for key in differing if key in values)
        for values in settings
    ]
    if len(differing) > MAX_SETTINGS or max(map(len, words)) > 60:
        words = [f"settings {entry.config[:6]}" for entry, _ in rows]
    if len(set(words)) < len(rows):
        words = [
            ", ".join(filter(None, (word, f"data {entry.data[:6]}" if entry.data else "")))
            for word, (entry, _) in zip(words, rows, strict=True)
        ]
    if len(set(words)) < len(rows):  # several files about which nothing is known
        words = [f"settings {entry.config[:6]}" for entry, _ in rows]
    return words
