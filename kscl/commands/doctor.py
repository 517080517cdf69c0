"""Show what is installed here, what is missing and how to fix it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from kscl import cli
from kscl.records.health import Finding, examine

EXAMPLES = """  kscl doctor          a table to read
  kscl doctor --json   the same for a script; exit code 1 if something needed is missing
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Examine the installation and return 1 if something needed is missing."""
    parser = cli.parser(__doc__ or "", EXAMPLES)
    cli.add_flag(parser, "--json", "print JSON instead of a table")
    given = parser.parse_args(argv)
    findings = examine()
    healthy = not any(finding.fix and finding.needed for finding in findings)
    if given.json:
        rows = [asdict(finding) | {"mark": finding.mark} for finding in findings]
        print(json.dumps({"healthy": healthy, "findings": rows}, indent=2))
    else:
        print(table(findings))
        print("Everything needed is here." if healthy else "Something needed is missing: PROBLEM.")
    return 0 if healthy else 1


def table(findings: Sequence[Finding]) -> str:
    """Return one row per finding, and one more for its fix."""
    rows = []
    for finding in findings:
        rows.append([finding.mark, finding.what, finding.value])
        if finding.fix:
            rows.append(["", "", f"→ {finding.fix}"])
    try:
        from tabulate import tabulate
    except ImportError:  # it may be what is missing
        return "\n".join("  ".join(row) for row in rows)
    return tabulate(rows, tablefmt="plain", colalign=("right", "left", "left"))
