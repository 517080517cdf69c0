"""Which results are good enough to be ranked and called best."""

from __future__ import annotations

from kscl.benchmark.leaderboard.board import ProtocolKey, Row, Section
from kscl.records.record import Metric


def is_ranked(row: Row, protocol: ProtocolKey) -> bool:
    """Return whether nothing speaks against comparing a row's result with others."""
    return not row.doubts and not too_low(row, protocol)


def too_low(row: Row, protocol: ProtocolKey) -> bool:
    """Return whether a run is so poor that to be better or worse says nothing of it."""
    return bool(_too_low(row, protocol))


def lowest(row: Row, protocol: ProtocolKey) -> str:
    """Return the number that is too low in words, such as `lowest AP50 1.2`."""
    metric, value = _too_low(row, protocol)[0]
    return f"lowest {metric.label} {value:.1f}"


def _too_low(row: Row, protocol: ProtocolKey) -> list[tuple[Metric, float]]:
    """Return the metrics of its worst run that are below their bounds."""
    found = []
    for file in row.results[protocol].records:
        for metric in file.record.task.metrics:
            value = file.record.metrics.get(metric.name)
            bound = metric.unranked_below
            if bound is not None and value is not None and value < bound:
                found.append((metric, value))
    return sorted(found, key=lambda pair: pair[1])


def not_working(section: Section) -> list[tuple[Metric, float]]:
    """Return the best value of metrics in which no row reaches what a working network does."""
    found = []
    for metric in section.about.values():
        measures = (row.results[section.protocol].measures for row in section.rows)
        values = [found[metric.name].mean for found in measures if metric.name in found]
        if metric.working_from is not None and values and max(values) < metric.working_from:
            found.append((metric, max(values)))
    return found
