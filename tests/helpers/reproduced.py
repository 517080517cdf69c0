"""Make three submitted numbers again, on this CPU and with an old CPU's instructions.

    python -m tests.helpers.reproduced

The table goes into docs/results/method.md. The exit code is 1 if a number is outside its interval.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kscl.benchmark.leaderboard.reading import machine
from kscl.benchmark.leaderboard.tables import insert, table, text
from kscl.main import python_words
from kscl.records.record import RECORDS_FILE, Record, find_records
from tests.helpers.commands import ROOT

# submission, name and kind of an evaluation, of seed 0; a detector's name is that of its folder
CHOSEN = (
    ("cifar10_epochs", "kscl", "linear"),
    ("cifar10_time", "moco_v2", "linear"),
    ("shapes", "seed0", "detection"),
)
CPUS = {"this CPU": {}, "ATEN_CPU_CAPABILITY=default": {"ATEN_CPU_CAPABILITY": "default"}}


def place_of(submission: str, label: str, kind: str) -> tuple[Path, Record]:
    """Return FILE:LINE of the first record that fits, and the record."""
    found = find_records(Path("results", f"{submission}{RECORDS_FILE}")).records
    wanted = (label, kind, 0)
    return next(it for it in found.items() if (it[1].name, it[1].kind, it[1].seed) == wanted)


def main() -> int:
    rows, outside = [], 0
    for submission, label, kind in CHOSEN:
        place, record = place_of(submission, label, kind)
        for number, (cpu, variables) in enumerate(CPUS.items()):
            folder = f"output/reproduced/{submission}-{number}"
            command = python_words("reproduce", str(place), "--output-dir", folder)
            done = subprocess.run(
                command, env={**os.environ, **variables}, capture_output=True, text=True
            )
            said = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
            print(f"{place}, {cpu}: {said}", flush=True)
            rows.append([f"`{place}`", f"{label}, {kind}", cpu, text(said)])
            outside += done.returncode != 0
    drawn = table(["record", "what", "on", "verdict"], rows)
    content = f"{drawn}\n\nRecorded on {machine(record)}."
    insert(ROOT / "docs/results/method.md", "reproduced", content)
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
