"""Which results are good enough to be ranked and called best."""

from __future__ import annotations

from kscl.benchmark.leaderboard.board import ProtocolKey, Row, Section
from kscl.records.record import LEAST_AP50


def is_ranked(row: Row, protocol: ProtocolKey) -> bool:
    """Return whether nothing speaks against comparing a row's result with others."""
    return not row.doubts and not too_low(row, protocol)


def too_low(row: Row, protocol: ProtocolKey) -> bool:
    """Return whether a detector is so poor that to be better or worse says nothing of it."""
    lowest = lowest_ap50(row, protocol)
    return lowest is not None and lowest < LEAST_AP50


def lowest_ap50(row: Row, protocol: ProtocolKey) -> float | None:
    """Return the AP50 of the worst run of a detector, whose record warns; None of other kinds."""
    if protocol.kind != "detection":
        return None
    metrics = (file.record.metrics for file in row.results[protocol].records)
    return min((found["AP50"] for found in metrics if "AP50" in found), default=None)


def best_ap50(section: Section) -> float | None:
    """Return the highest mean AP50 of a protocol's detectors; None for other kinds."""
    if section.protocol.kind != "detection":
        return None
    measures = (row.results[section.protocol].measures for row in section.rows)
    return max((found["AP50"].mean for found in measures if "AP50" in found), default=None)
