"""Break a file or kill a tool, run it again, and name how the attempt ended."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from tabulate import tabulate

from tests.attack.chain import (
    PATIENCE,
    TWO_RANKS,
    Chain,
    finish_program,
    finish_tool,
    metrics,
    start_program,
)
from tests.helpers.chain import smoke_suite

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


ODD = (None, -1, 1e308, float("nan"), "x" * 5000, [], {}, True, "\r=1+1", "../../etc", 10**30)


def truncate(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(max(1, len(content)))]


def flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content or b"\0")
    for _ in range(chance.choice((1, 8, 41))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def blank(content: bytes, chance: random.Random) -> bytes:
    start_at = chance.randrange(max(1, len(content)))
    return content[:start_at] + bytes(512) + content[start_at + 512 :]


def noise(content: bytes, chance: random.Random) -> bytes:
    return chance.randbytes(chance.choice((0, 1, 100, 5000)))


def odd_value(content: bytes, chance: random.Random) -> bytes:
    """Replace one value of a JSON or YAML file by one that has no business there."""
    try:
        tree = yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError):
        return flip(content, chance)
    node = tree
    while isinstance(node, dict | list) and node:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = chance.choice(keys)
        if not isinstance(node[key], dict | list) or not node[key] or chance.random() < 0.3:
            node[key] = chance.choice(ODD)
            break
        node = node[key]
    return json.dumps(tree).encode()


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    truncate, flip, blank, noise, odd_value,
)  # fmt: skip


@dataclass(frozen=True)
class Victim:
    """A file to break, the job that reads it, and whether only the same numbers will do."""

    job: str
    copied: str  # the job whose output is copied and broken, or a folder of the chain
    pattern: str
    derived: bool = False  # made by our tools, with a checksum: other numbers are a failure


VICTIMS = {
    "pretraining checkpoint": Victim("pretrain", "pretrain", "checkpoints/*.pt", True),
    "pretraining config": Victim("pretrain", "pretrain", "config.yaml", True),
    "backbone file": Victim("convert", "pretrain", "backbone.safetensors", True),
    "converted weights": Victim("detection", "convert", "*.p*", True),
    "certificate": Victim("detection", "convert", "certificate.json", True),
    "detection checkpoint": Victim("detection", "detection", "**/checkpoint*.pt", True),
    "saved detections": Victim("score", "detection", "**/detections.npz"),
    "ground truth": Victim("score", "detection", "**/ground_truth.npz"),
    "metrics log": Victim("curves", "pretrain", "metrics.jsonl"),
    "record": Victim("board", "detection", "**/record.json"),
    "config file": Victim("print config", "pretrain", "config.yaml"),
    "suite file": Victim("dry run", ".", "suite.yaml"),
    "cached features": Victim("knn", "cache", "features/**/*", True),
    "annotation": Victim("detection", "shapes", "VOCdevkit/**/Annotations/*.xml"),
    "split": Victim("detection", "shapes", "VOCdevkit/**/Main/*.txt"),
    "COCO file": Victim("preflight", "more", "coco/*.json"),
    "image": Victim("pretrain", "shapes", "unlabeled/*.jpg"),
    "labeled image": Victim("knn", "shapes", "classes/val/*/*.*"),
    "list of images": Victim("list", "more", "listed/list.txt"),
    "tar shard": Victim("shard", "more", "shard.tar"),
}


def damage(chain: Chain, name: str, chance: random.Random, place: Path) -> tuple[str, str]:
    """Return the outcome, and what to look at if it is a failure."""
    victim, log = VICTIMS[name], place / "log"
    job = chain.jobs[victim.job]
    inside = victim.copied in chain.jobs
    source = chain.jobs[victim.copied].output if inside else chain.folder / victim.copied
    copy = place / "copy"
    if victim.copied == ".":
        copy.mkdir()
        shutil.copy(chain.folder / victim.pattern, copy)
    else:
        shutil.copytree(source, copy, symlinks=True)
    resumes = victim.copied == victim.job
    if resumes:  # an unfinished run, which has its checkpoints but no record yet
        for record in copy.rglob("record.json"):
            record.unlink()
    files = sorted(path for path in copy.glob(victim.pattern) if path.is_file())
    if not files:
        return FAILED, f"no {victim.pattern} in {source}"
    file, mutate = chance.choice(files), chance.choice(MUTATIONS)
    file.write_bytes(mutate(file.read_bytes(), chance))
    target = copy if resumes else place / "run"
    job = job.into(target) if resumes else job.into(target).with_path(source, copy)
    code = finish_tool(job.tool, job.words, log)
    same = None
    if victim.derived and code == 0:
        same = metrics(target) == metrics(chain.jobs[victim.job].output)
    told = log.read_text(errors="replace")[-1500:]
    about = f"{mutate.__name__} of {file.relative_to(copy)}, exit {code}: {told}"
    return judge(code, log, same), about


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
MOST_KILLS = 4
KILLED = (
    *("pretrain", f"pretrain{TWO_RANKS}", "detection", f"detection{TWO_RANKS}"),
    *("knn", "suite"),
)


def kill(chain: Chain, kind: str, chance: random.Random, place: Path) -> tuple[str, str]:
    """Return the outcome, and what to look at if it is a failure."""
    log = place / "log"
    if kind == "suite":  # which draws its data itself
        target = place / "output"
        suite = smoke_suite(place)
        job = chain.jobs["suite"].with_path(chain.folder / "suite.yaml", suite)
    else:
        target = place / "run"
        job = chain.jobs[kind].into(target)
    for _ in range(chance.randint(1, MOST_KILLS)):
        process = start_program(job.program, log)
        try:
            process.wait(chance.uniform(0, 1.2 * chain.seconds[kind]))
            break
        except subprocess.TimeoutExpired:
            which = chance.choice(SIGNALS)
            os.killpg(process.pid, which) if chance.random() < 0.5 else process.send_signal(which)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return FAILED, f"did not end after {which.name}"
    code, _ = finish_program(job.program, log)
    outcome = judge(code, log, metrics(target) == metrics(chain.jobs[kind].output))
    return (FAILED if outcome == REFUSED else outcome), log.read_text()[-1500:]
