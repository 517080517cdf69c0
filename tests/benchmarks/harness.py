"""How a benchmark figure is declared, and how two things are timed fairly."""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.helpers.commands import ROOT

FIGURES: dict[str, Figure] = {}


class SkippedError(Exception):
    """Raised by a figure that cannot be measured here; it says what the figure needs."""


@dataclass(frozen=True)
class Figure:
    """One line of the benchmark table: a measured value and the bound it must keep."""

    name: str
    what: str
    measure: Callable[[], float]
    at_least: float | None
    at_most: float | None
    unit: str

    @property
    def bound(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:g}{self.unit}"
        if self.at_most is not None:
            return f"<= {self.at_most:g}{self.unit}"
        return "reported"

    def holds(self, value: float) -> bool:
        if self.at_least is not None:
            return value >= self.at_least
        if self.at_most is not None:
            return value <= self.at_most
        return True


def figure(
    name: str,
    what: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    unit: str = "x",
    alone: bool = False,
) -> Callable[[Callable[[], float]], Callable[[], float]]:
    """Register a function that measures one figure; a figure without a bound is only reported.

    `alone` measures it in a process of its own: threads and allocator belong to a process.
    """
    if at_least is not None and at_most is not None:
        raise ValueError(f"{name}: a figure has one bound")

    def register(measure: Callable[[], float]) -> Callable[[], float]:
        if name in FIGURES:
            raise ValueError(f"two benchmark figures are called {name}")
        run = partial(in_own_process, measure.__module__, measure.__name__) if alone else measure
        FIGURES[name] = Figure(name, what, run, at_least, at_most, unit)
        return measure

    return register


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def time_ratio(
    numerator: Callable[[], object],
    denominator: Callable[[], object],
    *,
    rounds: int = 9,
    warmup: int = 1,
) -> float:
    """Median over rounds of time(numerator) / time(denominator), the two run alternately.

    A neighbor's load hits both halves of a round alike, so the ratio holds where seconds do not.
    """
    for _ in range(warmup):
        numerator()
        denominator()
    gc.collect()
    ratios = []
    for turn in range(rounds):
        if turn % 2:
            bottom, top = seconds(denominator), seconds(numerator)
        else:
            top, bottom = seconds(numerator), seconds(denominator)
        ratios.append(top / bottom)
    return statistics.median(ratios)


def in_own_process(module: str, name: str, *words: str) -> float:
    """Return what a function of a module returns in a new process."""
    code = f"import sys, {module} as m; print(m.{name}(*sys.argv[1:]))"
    command = [sys.executable, "-W", "ignore", "-c", code, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise RuntimeError(f"{name} ended with exit code {done.returncode}: {last}")
    return float(done.stdout)
