"""The log of a run: metrics.jsonl, TensorBoard, and a progress bar or, when piped, lines.

Only rank 0 logs. A resumed run removes what was logged after its checkpoint, so that every step
is logged once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kscl.errors import KsclError
from kscl.runtime.files import write_atomically
from kscl.runtime.logs import clock

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
MOST_POINTS = 200  # per curve in a record

Row = dict[str, Any]


class RunLog:
    """The log of a run from `first_step` on; `folder` is None on ranks that do not log."""

    def __init__(
        self,
        folder: Path | None,
        first_step: int,
        total_steps: int,
        steps_per_epoch: int,
        num_views: int,
        figures: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.step = first_step
        self.total_steps = total_steps
        self.steps_per_epoch = steps_per_epoch
        self.num_views = num_views
        self.figures = figures  # shown in log lines, beside the loss
        self.bar: Any = None
        self._begin_window(waited=0.0)
        if folder is None:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        remove_rows_after(folder, first_step)
        self.lines = (folder / METRICS_FILE).open("a", encoding="utf-8")
        self.board = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=first_step + 1)
        if sys.stderr.isatty():
            self.bar = tqdm(
                total=total_steps, initial=first_step, desc="pretrain", dynamic_ncols=True
            )

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.folder is None:
            return
        # After an error, a disk that is too full to close the files must not hide it.
        with contextlib.suppress(OSError) if kind is not None else contextlib.nullcontext():
            self.lines.close()
            self.board.close()
        if self.bar is not None:
            self.bar.close()

    def add_step(self, images: int, seconds: float) -> None:
        """Count a step of this many images."""
        self.step += 1
        self.images += images
        self.seconds += seconds
        if self.bar is not None:
            self.bar.update()

    def report(self, metrics: Mapping[str, float], waited: float) -> None:
        """Write the metrics of the steps since the last report.

        `waited` is the seconds that the whole run has waited for data so far.
        """
        if self.folder is None:
            return
        seconds = max(self.seconds, 1e-9)
        rate = self.images / seconds
        row = {
            "epoch": round(self.step / self.steps_per_epoch, 4),
            **metrics,
            "images_per_second": round(rate, 2),
            "views_per_second": round(rate * self.num_views, 2),
            "fraction_waiting_for_data": round((waited - self.waited) / seconds, 4),
        }
        self.write(self.step, row)
        self._show(row, seconds * (self.total_steps - self.step) / max(1, self.window_steps))
        self._begin_window(waited)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line of metrics.jsonl, and one TensorBoard point per metric."""
        if self.folder is None:
            return
        row = {"step": step, "time": round(time.time(), 3), **metrics}
        try:
            self.lines.write(json.dumps(row) + "\n")
            self.lines.flush()
            for name, value in metrics.items():
                self.board.add_scalar(name, value, step)
        except OSError as error:
            raise KsclError(
                f"{self.folder / METRICS_FILE} cannot be written: {error.strerror or error}. "
                "Make room or fix the folder; --resume continues from the last checkpoint."
            ) from error

    @property
    def window_steps(self) -> int:
        """Return the number of steps since the last report."""
        return self.step - self.first_of_window

    def _begin_window(self, waited: float) -> None:
        self.first_of_window = self.step
        self.images = 0
        self.seconds = 0.0
        self.waited = waited

    def _show(self, row: Row, seconds_left: float) -> None:
        rates = f"{row['images_per_second']:,.0f} images/s, {row['views_per_second']:,.0f} views/s"
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {row['loss']:.3f}, {rates}")
            return
        shown = "".join(f", {name} {row[name]:.4g}" for name in self.figures)
        log.info(
            "epoch %.2f, step %s of %s: loss %.4f%s, learning rate %.2g; %s, %s left",
            row["epoch"],
            f"{self.step:,}",
            f"{self.total_steps:,}",
            row["loss"],
            shown,
            row["learning_rate"],
            rates,
            clock(seconds_left),
        )


def read_metrics(folder: Path) -> list[Row]:
    """Return every row that is whole; a killed process may have left half of one at the end."""
    return _read(folder / METRICS_FILE)[0]


def remove_rows_after(folder: Path, step: int) -> None:
    """Remove what a run logged beyond the step that it resumes from, and what is damaged."""
    file = folder / METRICS_FILE
    rows, damaged = _read(file)
    if damaged:
        log.warning(
            "%s: %d damaged lines are removed. The record is made from the %d others.",
            file,
            damaged,
            len(rows),
        )
    if file.exists():
        kept = "".join(f"{json.dumps(row)}\n" for row in rows if row["step"] <= step)
        write_atomically(file, kept.encode())


def _read(file: Path) -> tuple[list[Row], int]:
    """Return the whole rows, and how many other lines there are, half a last line not counted."""
    try:
        text = file.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return [], 0
    *lines, rest = text.split("\n")  # not splitlines(), which splits at other characters too
    parsed = [_parse(line) for line in lines]
    rows = [row for row in (*parsed, _parse(rest)) if row is not None]
    return rows, parsed.count(None)


def _parse(line: str) -> Row | None:
    """Return a row: a step, and numbers by their names."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    if not all(isinstance(value, int | float) for value in row.values()):
        return None
    whole_report = "epoch" in row and row.get("steps", 0) > 0
    return row if whole_report or "loss" not in row else None


def means_of_last_epoch(rows: list[Row]) -> dict[str, float]:
    """Return the means of the method's figures over the last epoch, weighted by steps."""
    reports = [row for row in rows if "loss" in row]
    if not reports:
        return {}
    last = [row for row in reports if row["epoch"] > reports[-1]["epoch"] - 1]
    steps = sum(row["steps"] for row in last)
    skipped = ("step", "time", "epoch", "steps", "learning_rate")
    return {
        name: sum(row[name] * row["steps"] for row in last) / steps
        for name in last[-1]
        if name not in skipped
    }


def thinned_curves(rows: list[Row], most: int = MOST_POINTS) -> dict[str, list[float]]:
    """Return the reports as columns of at most `most` points, the last one included."""
    reports = [row for row in rows if "loss" in row]
    stride = max(1, -(-len(reports) // most))
    chosen = reports[::-1][::stride][::-1]
    names = [name for name in (chosen or [{}])[-1] if name not in ("time", "steps")]
    return {name: [round(float(row[name]), 6) for row in chosen] for name in names}
