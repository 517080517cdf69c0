"""Stages that only make a folder, and what their scripts ask of Slurm."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kscl.benchmark.suite.stages import Stage


@dataclass(frozen=True)
class Command(Stage):
    """A stage that runs any program."""

    words: tuple[str, ...] = ()

    @property
    def program(self) -> list[str]:
        return [self.words[0]]

    runner = program

    @property
    def arguments(self) -> list[str]:
        return [*self.inputs, *self.words[1:]]


def stage(folder: Path, name: str, *needs: Stage, kind: str = "pretrain", **more: Any) -> Stage:
    place = f"{folder}/{name}"
    key = hashlib.sha256(name.encode()).hexdigest()
    given = {"key": key, "words": ("mkdir", "-p", place)} | more
    return Command(f"a/{name}", kind, "", place, needs, **given)


def option(script: Path, name: str) -> str:
    lines = script.read_text().splitlines()
    found = [line.split("=", 1)[1] for line in lines if line.startswith(f"#SBATCH --{name}=")]
    return found[0] if found else ""
