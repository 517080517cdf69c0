"""What is told of a run: metrics.jsonl, TensorBoard, and a bar or, when piped, lines.

On ranks other than 0 nothing is told. A run that is taken up again forgets what was logged after
its checkpoint, so that every step stands there once.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kscl.runtime.files import write_atomically
from kscl.runtime.logs import clock

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
MOST_POINTS = 200  # of a curve in a record

Row = dict[str, Any]


class RunLog:
    """The log of a run from `first_step` on; `folder` is None on ranks that are silent."""

    def __init__(
        self,
        folder: Path | None,
        first_step: int,
        total_steps: int,
        steps_per_epoch: int,
        num_views: int,
    ) -> None:
        self.folder = folder
        self.step = first_step
        self.total_steps = total_steps
        self.steps_per_epoch = steps_per_epoch
        self.num_views = num_views
        self.bar: Any = None
        self._begin_window(waited=0.0)
        if folder is None:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        forget_after(folder, first_step)
        self.lines = (folder / METRICS_FILE).open("a", encoding="utf-8")
        self.board = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=first_step + 1)
        if sys.stderr.isatty():
            self.bar = tqdm(
                total=total_steps, initial=first_step, desc="pretrain", dynamic_ncols=True
            )

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self.folder is None:
            return
        self.lines.close()
        self.board.close()
        if self.bar is not None:
            self.bar.close()

    def add_step(self, images: int, seconds: float) -> None:
        self.step += 1
        self.images += images
        self.seconds += seconds
        if self.bar is not None:
            self.bar.update()

    def report(self, figures: Mapping[str, float], waited: float) -> None:
        """Write figures of the steps since the last report; `waited` seconds for data so far."""
        if self.folder is None:
            return
        seconds = max(self.seconds, 1e-9)
        rate = self.images / seconds
        row = {
            "epoch": round(self.step / self.steps_per_epoch, 4),
            **figures,
            "images_per_second": round(rate, 2),
            "views_per_second": round(rate * self.num_views, 2),
            "share_waiting_for_data": round((waited - self.waited) / seconds, 4),
        }
        self.write(self.step, row)
        self._tell(row, seconds * (self.total_steps - self.step) / max(1, self.window_steps))
        self._begin_window(waited)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """One line of metrics.jsonl, and a TensorBoard point a figure."""
        if self.folder is None or not figures:
            return
        self.lines.write(
            json.dumps({"step": step, "time": round(time.time(), 3), **figures}) + "\n"
        )
        self.lines.flush()
        for name, value in figures.items():
            self.board.add_scalar(name, value, step)

    @property
    def window_steps(self) -> int:
        return self.step - self.first_of_window

    def _begin_window(self, waited: float) -> None:
        self.first_of_window = self.step
        self.images = 0
        self.seconds = 0.0
        self.waited = waited

    def _tell(self, row: Row, seconds_left: float) -> None:
        rates = f"{row['images_per_second']:,.0f} images/s, {row['views_per_second']:,.0f} views/s"
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {row['loss']:.3f}, {rates}")
            return
        log.info(
            "epoch %.2f, step %s of %s: loss %.4f, top-1 %.1f %%, rate %.2g; %s, %s to go",
            row["epoch"],
            f"{self.step:,}",
            f"{self.total_steps:,}",
            row["loss"],
            100 * row["instance_top1"],
            row["learning_rate"],
            rates,
            clock(seconds_left),
        )


def read_metrics(folder: Path) -> list[Row]:
    """Every whole line; a killed process may have left half of one at the end."""
    rows = []
    try:
        text = (folder / METRICS_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def forget_after(folder: Path, step: int) -> None:
    """Remove what a run logged beyond the step that it goes on from."""
    rows = read_metrics(folder)
    kept = [row for row in rows if row["step"] <= step]
    text = "".join(f"{json.dumps(row)}\n" for row in kept)
    if (folder / METRICS_FILE).exists():
        write_atomically(folder / METRICS_FILE, text.encode())


def means_of_last_epoch(rows: list[Row]) -> dict[str, float]:
    """Figures of the learner over the last epoch, each report weighted by its steps."""
    reports = [row for row in rows if "loss" in row]
    if not reports:
        return {}
    last = [row for row in reports if row["epoch"] > reports[-1]["epoch"] - 1]
    steps = sum(row["steps"] for row in last)
    skipped = ("step", "time", "epoch", "steps", "learning_rate")
    return {
        name: sum(row[name] * row["steps"] for row in last) / steps
        for name in _in_all(last)
        if name not in skipped
    }


def thinned_curves(rows: list[Row], most: int = MOST_POINTS) -> dict[str, list[float]]:
    """The reports as columns, of at most so many points, the last one among them."""
    reports = [row for row in rows if "loss" in row]
    stride = max(1, -(-len(reports) // most))
    chosen = reports[::-1][::stride][::-1]
    names = [name for name in _in_all(chosen) if name not in ("time", "steps")]
    return {name: [round(float(row[name]), 6) for row in chosen] for name in names}


def _in_all(rows: list[Row]) -> list[str]:
    """The columns that every row has: an older release, where a run began, told of fewer."""
    return [name for name in (rows[-1] if rows else ()) if all(name in row for row in rows)]
