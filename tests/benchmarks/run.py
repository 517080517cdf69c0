"""Measure every registered figure, print the table, write bench.json.

A figure stands alone: one that fails or cannot be measured here does not lose the others. The
file is written anew after each of them, so that an interruption keeps what was measured.
"""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tests.benchmarks
from kscl import cli
from kscl.benchmark.leaderboard.tables import insert, table, text
from kscl.errors import KsclError
from kscl.records.provenance import code_version, library_versions
from kscl.runtime.files import write_atomically
from kscl.runtime.logs import clock
from kscl.runtime.machine import hardware
from tests.benchmarks import harness
from tests.benchmarks.harness import FIGURES, Figure, SkippedError

EXAMPLES = """  python tools/benchmark.py                    all; exit code 1 if one misses or fails
  python tools/benchmark.py --only views       those whose name contains "views"
  python tools/benchmark.py --list             names and bounds, nothing measured
"""
Row = dict[str, Any]


def load_figures() -> None:
    for module in pkgutil.iter_modules(tests.benchmarks.__path__):
        if module.name in ("harness", "run"):
            continue
        try:
            importlib.import_module(f"tests.benchmarks.{module.name}")
        except ImportError as error:
            what = f"all figures of tests/benchmarks/{module.name}.py"
            harness.figure(f"{module.name} (module)", what)(_raises(error))


def _raises(error: ImportError) -> Callable[[], float]:
    def measure() -> float:
        raise error

    return measure


def measure(figures: Sequence[Figure], write: Callable[[Sequence[Row]], None]) -> list[Row]:
    """Measure one figure after another; hand all rows to `write` at first and after each."""
    rows: list[Row] = [
        {"name": figure.name, "what": figure.what, "unit": figure.unit, "bound": figure.bound}
        | {"status": "not measured"}
        for figure in figures
    ]
    width = max(len(figure.name) for figure in figures)
    write(rows)
    for row, figure in zip(rows, figures, strict=True):
        row |= measured(figure)
        write(rows)
        value = f"{row['value']:>9.3g}{figure.unit:<4}" if "value" in row else f"{'-':>9}    "
        status = row["status"] if row["status"] == "holds" else row["status"].upper()
        print(
            f"{figure.name:<{width}}  {value} {figure.bound:<12} {status:<7}"
            f" {row['seconds']:5.0f} s  {row.get('reason', figure.what)}",
            flush=True,
        )
    return rows


def measured(figure: Figure) -> Row:
    """Return value and status of a figure, or why there is none."""
    begun = time.perf_counter()
    try:
        value = float(figure.measure())  # numpy's own numbers cannot be written as JSON
        if not math.isfinite(value):
            raise ValueError(f"{value} was measured")  # JSON has no such number
        found: Row = {"value": value, "status": "holds" if figure.holds(value) else "missed"}
    except SkippedError as needs:
        found = {"status": "skipped", "reason": str(needs)}
    except Exception as error:  # whatever it is: the other figures do not depend on it
        found = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    return {**found, "seconds": round(time.perf_counter() - begun, 1)}


def as_document(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """Return all figures as a Markdown table, with the machine and the commit below it."""
    lines = [
        [
            f"`{row['name']}`",
            text(row["what"]),
            f"{row['value']:.3g}{row['unit']}" if "value" in row else "",
            text(row["bound"]),
            row["status"],
        ]
        for row in rows
    ]
    machine, code = about["hardware"], about["code"]
    changed = " with changes" if code["dirty"] else ""
    return (
        f"{table(['figure', 'what', 'value', 'bound', 'status'], lines)}\n\n"
        f"Measured on {machine['cores']} cores of {text(machine['cpu'])} with torch "
        f"{about['libraries']['torch']}, code {(code['commit'] or '')[:9]}{changed}, in "
        f"{clock(sum(row['seconds'] for row in rows))}."
    )


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__ or "", EXAMPLES)
    parser.add_argument("--only", default="", metavar="NAME", help="figures with this in the name")
    parser.add_argument("--list", action="store_true", help="show the figures, measure nothing")
    parser.add_argument(
        "--output", type=Path, default=Path("bench.json"), help="default: %(default)s"
    )
    cli.add_insert(parser)
    arguments = parser.parse_args(argv)
    load_figures()
    chosen = [figure for name, figure in sorted(FIGURES.items()) if arguments.only in name]
    if not chosen:
        names = "\n  ".join(sorted(FIGURES))
        raise KsclError(f"no figure has '{arguments.only}' in its name; there are:\n  {names}")
    if arguments.list:
        for figure in chosen:
            print(f"{figure.name}  {figure.bound}  {figure.what}")
        return 0
    about = {"code": code_version(), "hardware": hardware(), "libraries": library_versions()}

    def write(rows: Sequence[Row]) -> None:
        report = {"figures": rows, **about}
        write_atomically(arguments.output, (json.dumps(report, indent=2) + "\n").encode())

    rows = measure(chosen, write)
    count = Counter(row["status"] for row in rows)
    print(", ".join(f"{number} {status}" for status, number in count.items()), end="; ")
    print(f"written to {arguments.output}")
    if arguments.insert:
        path, mark = arguments.insert
        insert(Path(path), mark, as_document(rows, about))
    return 1 if count["missed"] or count["failed"] else 0
