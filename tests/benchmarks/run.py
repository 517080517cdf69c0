"""Measure every registered figure, print the table, write bench.json."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Sequence
from pathlib import Path

import tests.benchmarks
from kscl import cli
from kscl.errors import KsclError
from kscl.records.provenance import code_version, library_versions
from kscl.runtime.files import write_atomically
from kscl.runtime.machine import hardware
from tests.benchmarks.harness import FIGURES, Figure, seconds

EXAMPLES = """  python tools/benchmark.py                    all; exit code 1 if one is missed
  python tools/benchmark.py --only views       those whose name contains "views"
  python tools/benchmark.py --list             names and bounds, nothing measured
"""


def load_figures() -> None:
    for module in pkgutil.iter_modules(tests.benchmarks.__path__):
        if module.name not in ("harness", "run"):
            importlib.import_module(f"tests.benchmarks.{module.name}")


def measure(figures: Sequence[Figure]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    width = max(len(figure.name) for figure in figures)
    for figure in figures:
        values: list[float] = []
        took = seconds(lambda figure=figure, values=values: values.append(figure.measure()))
        value = float(values[0])  # numpy's own numbers cannot be written as JSON
        holds = figure.holds(value)
        mark = "holds" if holds else "MISSED"
        print(
            f"{figure.name:<{width}}  {value:>9.3g}{figure.unit:<4} {figure.bound:<12} {mark:<7}"
            f" {took:5.0f} s  {figure.what}",
            flush=True,
        )
        rows.append(
            {"name": figure.name, "what": figure.what, "value": value, "unit": figure.unit}
            | {"bound": figure.bound, "holds": holds, "seconds": round(took, 1)}
        )
    return rows


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__ or "", EXAMPLES)
    parser.add_argument("--only", default="", metavar="NAME", help="figures with this in the name")
    parser.add_argument("--list", action="store_true", help="show the figures, measure nothing")
    parser.add_argument(
        "--output", type=Path, default=Path("bench.json"), help="default: %(default)s"
    )
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
    rows = measure(chosen)
    report = {"figures": rows, "code": code_version(), "hardware": hardware()}
    report["libraries"] = library_versions()
    write_atomically(arguments.output, (json.dumps(report, indent=2) + "\n").encode())
    missed = [str(row["name"]) for row in rows if not row["holds"]]
    print(f"{len(rows) - len(missed)} of {len(rows)} figures hold; written to {arguments.output}")
    return 1 if missed else 0
