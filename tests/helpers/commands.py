"""Running the tools as a user does: as processes, from the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(
    *command: str | Path,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def tool(name: str, *arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    script = ROOT / "tools" / f"{name}.py"
    return run(sys.executable, "-W", "ignore", script, *arguments, **options)  # type: ignore[arg-type]
