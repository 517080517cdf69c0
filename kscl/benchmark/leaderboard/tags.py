"""A few words that tell apart rows which look the same in the table's columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kscl.benchmark.leaderboard.linking import SAME_FOR_ALL_SEEDS, Contender
from kscl.benchmark.leaderboard.reading import Loaded

MAX_SETTINGS = 2
IN_COLUMNS = ("LABEL", "METHOD.NUM_SHOTS", "METHOD.RHO", "BACKBONE.NAME", "SOLVER.EPOCHS")


def tags(rows: Sequence[tuple[Contender, Sequence[Loaded]]]) -> list[str]:
    """For each row the settings in which it differs from its likes, or a short hash, or nothing."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, (contender, _) in enumerate(rows):
        alike.setdefault(contender.shown, []).append(i)
    found = [""] * len(rows)
    for places in alike.values():
        if len(places) > 1:
            words = _distinguishing([rows[i] for i in places])
            for i, word in zip(places, words, strict=True):
                found[i] = word
    return found


def _distinguishing(rows: Sequence[tuple[Contender, Sequence[Loaded]]]) -> list[str]:
    settings = [dict(_settings(loaded[0])) if loaded else {} for _, loaded in rows]
    keys = sorted({key for values in settings for key in values}.difference(IN_COLUMNS))
    differing = [key for key in keys if len({repr(values.get(key)) for values in settings}) > 1]
    short = {key: key.rpartition(".")[2].lower().replace("_", " ") for key in differing}
    words = [
        ", ".join(f"{short[key]} {values[key]}" for key in differing if key in values)
        for values in settings
    ]
    if len(differing) > MAX_SETTINGS or max(map(len, words)) > 60:
        words = [f"settings {contender.config[:6]}" for contender, _ in rows]
    if len(set(words)) < len(rows):
        words = [
            ", ".join(filter(None, (word, f"data {contender.data[:6]}" if contender.data else "")))
            for word, (contender, _) in zip(words, rows, strict=True)
        ]
    if len(set(words)) < len(rows):  # several files of which nothing is known
        words = [f"settings {contender.config[:6]}" for contender, _ in rows]
    return words


def _settings(loaded: Loaded) -> Iterator[tuple[str, object]]:
    """Every setting that takes part in the contender's hash, under its full name."""
    waiting = [("", loaded.record["config"]["values"])]
    while waiting:
        prefix, node = waiting.pop()
        if isinstance(node, dict) and node:
            waiting += [(f"{prefix}.{key}" if prefix else key, node[key]) for key in node]
        elif not any(prefix == k or prefix.startswith(f"{k}.") for k in SAME_FOR_ALL_SEEDS):
            yield prefix, node
