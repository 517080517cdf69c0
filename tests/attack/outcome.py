"""How an attempt ends, and the table of all of them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tabulate import tabulate

EQUAL, REFUSED, ACCEPTED, FAILED = "equal", "refused", "accepted", "failed"
USER_ERROR, PROBLEM_FOUND = 2, 1  # exit codes; the second is preflight's
TRACEBACK = "Traceback (most recent call last)"


@dataclass
class Tally:
    """Outcomes per attack, and what to look at where one failed."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, name: str, outcome: str, about: str) -> None:
        self.counts.setdefault(name, Counter())[outcome] += 1
        if outcome == FAILED:
            self.failures.append(f"{name}: {about}")

    def table(self) -> str:
        header = ["attack", "attempts", EQUAL, REFUSED, ACCEPTED, FAILED]
        rows = [
            [name, sum(found.values()), *(found[end] for end in header[2:])]
            for name, found in sorted(self.counts.items())
        ]
        total = sum(self.counts.values(), Counter())
        rows.append(["all", sum(total.values()), *(total[end] for end in header[2:])])
        return tabulate(rows, header)


def judge(code: int | None, log: Path, same: bool | None) -> str:
    """Name the outcome of a run; `same` is None where other numbers are legitimate."""
    text = log.read_text(errors="replace")
    if code is None or TRACEBACK in text:
        return FAILED
    if code == 0:
        return ACCEPTED if same is None else (EQUAL if same else FAILED)
    told = re.search(r"^(\S+: )?error: \S|^Problems \(", text, re.MULTILINE)
    return REFUSED if code in (USER_ERROR, PROBLEM_FOUND) and told else FAILED
