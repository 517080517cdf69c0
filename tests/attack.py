"""Kill the tools and feed them broken files, with a fresh random seed each time (`make attack`).

    python -m tests.attack [--minutes 20] [--seed N] [--only NAME ...]

Every attempt ends in one of four ways: `equal` (the numbers of an undisturbed run), `refused` (an
error that a person can read, and nothing else), `accepted` (the file was changed into other valid
input), or `failed`: a traceback, a hang, a death, or a finished run with other numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from tabulate import tabulate

from tests.helpers.commands import ROOT
from tests.kscl.benchmark.test_suite import smoke_suite

EQUAL, REFUSED, ACCEPTED, FAILED = "equal", "refused", "accepted", "failed"
USER_ERRORS = (1, 2)
PATIENCE = 300.0  # seconds; an undisturbed run takes a few
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
MOST_KILLS = 6


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
        return tabulate(rows, header)


# --- running the tools


def command(tool: str, *words: object) -> list[str]:
    script = ROOT / "tools" / f"{tool}.py"
    return [sys.executable, "-W", "ignore", str(script), *map(str, words)]


def start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("ab") as out:
        return subprocess.Popen(words, stdout=out, stderr=out, env=env, start_new_session=True)


def finish(words: list[str], log: Path) -> int | None:
    """Run to the end and return the exit code, None for a hang."""
    process = start(words, log)
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def judge(code: int | None, log: Path, same: bool | None) -> str:
    """Name the outcome of a run; `same` is None where other numbers are legitimate."""
    text = log.read_text(errors="replace")
    if code is None or code < 0 or "Traceback (most recent call last)" in text:
        return FAILED
    if code == 0:
        return ACCEPTED if same is None else (EQUAL if same else FAILED)
    return REFUSED if code in USER_ERRORS else FAILED


def metrics(folder: Path) -> dict[str, dict[str, float]]:
    """The numbers of every record below a folder, without those that depend on the clock."""
    clock = ("minutes_per_epoch", "images_per_second", "views_per_second", "seconds")
    found = {}
    for path in sorted(folder.rglob("record.json")):
        record = json.loads(path.read_text())
        numbers = {k: v for k, v in record["metrics"].items() if k not in clock}
        found[path.parent.relative_to(folder).as_posix()] = numbers
    return found


# --- the undisturbed chain that every attack starts from


@dataclass(frozen=True)
class Chain:
    """A finished suite of the smallest size, with the command of each of its stages."""

    folder: Path
    stages: dict[str, list[str]]  # kind: the words of its tool
    outputs: dict[str, Path]

    @property
    def data(self) -> Path:
        return self.folder / "shapes"


TOOLS = {
    "kscl-pretrain": "pretrain",
    "kscl-linear-eval": "linear_eval",
    "kscl-convert": "convert",
    "kscl-train-net": "train_net",
    "kscl-leaderboard": "leaderboard",
}


def build_chain(folder: Path) -> Chain:
    from kscl.benchmark.suite.spec import read_suite
    from kscl.benchmark.suite.stages import plan

    suite = smoke_suite(folder)
    code = finish(command("run_suite", suite), folder / "chain.log")
    if code != 0:
        raise SystemExit((folder / "chain.log").read_text()[-3000:])
    stages, outputs = {}, {}
    for stage in plan(read_suite(suite)):
        if stage.program in TOOLS and not stage.name.startswith("random/"):
            stages[stage.kind] = command(TOOLS[stage.program], *stage.arguments)
            outputs[stage.kind] = Path(stage.folder)
    return Chain(folder, stages, outputs)


def redirected(chain: Chain, kind: str, target: Path) -> list[str]:
    """The stage's command with another output folder."""
    old = str(chain.outputs[kind])
    return [str(target) if word == old else word for word in chain.stages[kind]]


# --- attack 1: kills


def kill(chain: Chain, kind: str, chance: random.Random, place: Path) -> tuple[str, str]:
    """Kill a stage at random moments, resume it each time, and compare the end."""
    target, log = place / "run", place / "log"
    words = redirected(chain, kind, target)
    for _ in range(chance.randint(1, MOST_KILLS)):
        process = start(words, log)
        try:
            process.wait(chance.uniform(2.0, 12.0))
            break
        except subprocess.TimeoutExpired:
            which = chance.choice(SIGNALS)
            os.killpg(process.pid, which) if chance.random() < 0.5 else process.send_signal(which)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return FAILED, f"did not end after {which.name}"
    code = finish(words, log)
    outcome = judge(code, log, metrics(target) == metrics(chain.outputs[kind]))
    return (FAILED if outcome == REFUSED else outcome), log.read_text()[-600:]


# --- attack 2: broken files


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
    odd = (None, -1, 1e308, float("nan"), "x" * 5000, [], {}, True, "\r=1+1", "../../etc", 10**30)
    try:
        tree = yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError):
        return noise(content, chance)
    node = tree
    while isinstance(node, dict | list) and node:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = chance.choice(keys)
        if not isinstance(node[key], dict | list) or not node[key] or chance.random() < 0.3:
            node[key] = chance.choice(odd)
            break
        node = node[key]
    return json.dumps(tree).encode()


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    truncate, flip, blank, noise, odd_value,
)  # fmt: skip


@dataclass(frozen=True)
class Victim:
    """A file to break, the stage that reads it, and whether only the same numbers will do."""

    kind: str  # the stage to run afterwards
    copy: str  # which stage's output is copied and broken, or "data"
    pattern: str
    derived: bool  # made by our tools, with checksums: other numbers are a failure


VICTIMS = {
    "pretraining checkpoint": Victim("pretrain", "pretrain", "checkpoints/*.pt", True),
    "pretraining config": Victim("pretrain", "pretrain", "config.yaml", True),
    "backbone file": Victim("convert", "pretrain", "backbone.safetensors", False),
    "converted weights": Victim("detection", "convert", "*.p*", True),
    "certificate": Victim("detection", "convert", "certificate.json", True),
    "detection checkpoint": Victim("detection", "detection", "**/checkpoint*.pt", True),
    "record": Victim("board", "detection", "**/record.json", False),
    "annotation": Victim("detection", "data", "VOCdevkit/**/Annotations/*.xml", False),
    "image": Victim("pretrain", "data", "unlabelled/*.jpg", False),
    "labeled image": Victim("knn", "data", "classes/val/*/*.*", False),
}


def damage(chain: Chain, name: str, chance: random.Random, place: Path) -> tuple[str, str]:
    """Break one file of a copy, run the stage that reads it, and name what it did."""
    victim, log = VICTIMS[name], place / "log"
    source = chain.data if victim.copy == "data" else chain.outputs[victim.copy]
    copy = place / "copy"
    shutil.copytree(source, copy, symlinks=True)
    resumes = victim.copy == victim.kind
    if resumes:  # an unfinished run, which has its checkpoints but no record yet
        for record in copy.rglob("record.json"):
            record.unlink()
    files = sorted(path for path in copy.glob(victim.pattern) if path.is_file())
    if not files:
        return FAILED, f"no {victim.pattern} in {source}"
    file, mutate = chance.choice(files), chance.choice(MUTATIONS)
    file.write_bytes(mutate(file.read_bytes(), chance))
    target = copy if resumes else place / "run"
    words = redirected(chain, victim.kind, target)
    words = [word.replace(str(source), str(copy)) for word in words]
    code = finish(words, log)
    same = None
    if victim.derived and code == 0:
        same = metrics(target) == metrics(chain.outputs[victim.kind])
    about = f"{mutate.__name__} of {file.relative_to(copy)}, exit {code}: {log.read_text()[-600:]}"
    return judge(code, log, same), about


KILLED = ("pretrain", "knn", "detection")


def attacks() -> dict[str, Callable[[Chain, random.Random, Path], tuple[str, str]]]:
    found: dict[str, Callable[[Chain, random.Random, Path], tuple[str, str]]] = {}
    for kind in KILLED:
        found[f"kill {kind}"] = lambda chain, chance, place, k=kind: kill(chain, k, chance, place)
    for name in VICTIMS:
        found[f"broken {name}"] = lambda chain, chance, place, n=name: damage(
            chain, n, chance, place
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--only", nargs="+", choices=sorted(attacks()), metavar="NAME")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    tally, chosen = Tally(), given.only or list(attacks())
    with tempfile.TemporaryDirectory(prefix="kscl-attack-") as name:
        begun = time.monotonic()
        chain = build_chain(Path(name))
        print(f"built the chain in {time.monotonic() - begun:.0f} s", flush=True)

        def attempt(number: int) -> None:
            if time.monotonic() - begun > 60 * given.minutes:
                return
            which, place = chosen[number % len(chosen)], Path(name) / f"attempt{number}"
            place.mkdir()
            outcome, about = attacks()[which](chain, random.Random(f"{given.seed}/{number}"), place)
            tally.add(which, outcome, f"attempt {number}: {about}")
            print(f"{number:4d} {which}: {outcome}", flush=True)
            shutil.rmtree(place)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(attempt, range(10_000)))
    print(f"\n{tally.table()}\n")
    for failure in tally.failures:
        print(f"FAILED {failure}\n")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
