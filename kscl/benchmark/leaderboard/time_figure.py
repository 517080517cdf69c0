"""Draw accuracy against the time of pretraining: what a method earns for what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kscl.benchmark.leaderboard.columns import costs
from kscl.benchmark.leaderboard.rows import OVER_SEEDS, Board, Measure, Row, Section
from kscl.benchmark.leaderboard.tables import percent
from kscl.errors import KsclError

Point = tuple[float, Measure]  # minutes of pretraining, and the headline metric


def draw_time(board: Board, output: Path, title: str) -> None:
    """Draw one panel per protocol: a line per method over its lengths of training."""
    panels = [(section, lines_of(section)) for section in board.sections]
    panels = [(section, lines) for section, lines in panels if lines]
    if not panels:
        raise KsclError(
            "--figure needs rows with a pretraining, and these records have none. Name a folder "
            "that has the record of a pretraining and those of its evaluations."
        )
    from matplotlib.figure import Figure  # slow to import

    canvas = Figure(figsize=(7.4 * len(panels), 3.9), layout="constrained")
    canvas.suptitle(title)
    axes = canvas.subplots(1, len(panels), squeeze=False)[0]
    for panel, (section, lines) in zip(axes, panels, strict=True):
        for number, (name, points) in enumerate(sorted(lines.items())):
            _draw_line(panel, name, sorted(points, key=lambda point: point[0]), number)
        for row in section.rows:
            if not row.pretrainings:
                _draw_reference(panel, row.entry.method, section.headline(row).mean)
        panel.set_title(section.name, fontsize=8, color="0.4")
        panel.set_ylabel(section.headline_label)
        panel.set_xscale("log", base=2)  # lengths of training are often twice each other
        panel.set_xlabel("minutes of pretraining")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.3, which="both")
        panel.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))  # hides no point
    output.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(output, dpi=140)


def _draw_reference(panel: Any, name: str, mean: float) -> None:
    """Draw a row without pretraining as a line; far from the others, only its legend tells it."""
    low, high = panel.get_ylim()
    away = max(low - mean, mean - high)
    if away < (high - low) / 2:
        panel.axhline(mean, color="0.5", linestyle=":", label=name)
    else:
        panel.plot([], [], " ", label=f"{name}: {mean:.1f}, not drawn")


def lines_of(section: Section) -> dict[str, list[Point]]:
    """Return the points of every pretrained method of a protocol, by what the legend calls it."""
    found: dict[str, list[Point]] = {}
    for row in section.rows:
        if row.pretrainings:
            minutes = costs(row)["pretrain_minutes"]
            found.setdefault(_name(row), []).append((minutes, section.headline(row)))
    return found


def _name(row: Row) -> str:
    entry = row.entry
    shots = f"K={entry.shots}" if entry.shots else ""
    rho = f"ρ={percent(entry.rho)}" if entry.rho is not None else ""
    return " ".join(filter(None, (entry.method, shots, rho)))


def _draw_line(panel: Any, name: str, points: list[Point], number: int) -> None:
    minutes = [time for time, _ in points]
    means = [measure.mean for _, measure in points]
    panel.plot(minutes, means, marker="o", markersize=4, color=f"C{number}", label=name)
    for time, measure in points:
        if measure.interval is not None and measure.interval_is == OVER_SEEDS:
            panel.vlines(time, *measure.interval, color=f"C{number}", alpha=0.6)
