"""Stages that only make a folder, and what their scripts ask of Slurm."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from kscl.benchmark.suite.stages import Stage


def stage(folder: Path, name: str, *needs: Stage, kind: str = "pretrain", **more: object) -> Stage:
    key = hashlib.sha256(name.encode()).hexdigest()
    place = f"{folder}/{name}"
    return replace(Stage(f"a/{name}", kind, "mkdir", ("-p", place), needs, key, place), **more)


def option(script: Path, name: str) -> str:
    lines = script.read_text().splitlines()
    found = [line.split("=", 1)[1] for line in lines if line.startswith(f"#SBATCH --{name}=")]
    return found[0] if found else ""
