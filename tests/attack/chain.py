"""The undisturbed chain that every attack starts from, and the commands that made it."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.attack.processes import finish_program
from tests.helpers.chain import smoke_suite
from tests.helpers.commands import ROOT
from tests.helpers.data.sets import small_coco

PROGRAMS = {
    "kscl-pretrain": "pretrain",
    "kscl-linear-eval": "linear_eval",
    "kscl-convert": "convert",
    "kscl-train-net": "train_net",
    "kscl-leaderboard": "leaderboard",
}
TWO_RANKS = " on two ranks"
OF_THE_CLOCK = ("minutes_per_epoch", "images_per_second", "views_per_second", "seconds")


@dataclass(frozen=True)
class Job:
    """One tool, its words, and the folder it fills."""

    tool: str
    words: tuple[str, ...]
    output: Path

    @property
    def program(self) -> list[str]:
        """The command as a user types it."""
        return [
            sys.executable,
            "-W",
            "ignore",
            str(ROOT / "tools" / f"{self.tool}.py"),
            *self.words,
        ]

    def into(self, target: Path) -> Job:
        """The same with another output folder."""
        return self.with_path(self.output, target)

    def with_path(self, old: Path, new: Path) -> Job:
        """The same with another path wherever it stands."""
        whole = re.compile(rf"{re.escape(str(old))}(?=$|[/:'\]])")
        words = [whole.sub(lambda _: str(new), word) for word in (*self.words, str(self.output))]
        return Job(self.tool, tuple(words[:-1]), Path(words[-1]))


@dataclass(frozen=True)
class Chain:
    """A finished suite of the smallest size in a folder, and its jobs by kind."""

    folder: Path
    jobs: dict[str, Job]
    seconds: dict[str, float]  # that an undisturbed job takes

    @property
    def data(self) -> Path:
        return self.folder / "shapes"


def build_chain(folder: Path) -> Chain:
    """Run the suite, and what further attacks need."""
    from kscl.benchmark.suite.spec import read_suite
    from kscl.benchmark.suite.stages import plan

    suite, log = smoke_suite(folder), folder / "chain.log"
    output = folder / "output"
    jobs = {"suite": Job("run_suite", (str(suite),), output)}
    seconds = {"suite": _run(jobs["suite"], log)}
    notes = [json.loads(path.read_text()) for path in (output / ".stages").glob("*.json")]
    for stage in plan(read_suite(suite)):
        if stage.program in PROGRAMS and not stage.name.startswith("random/"):
            place = Path(stage.folder)
            jobs[stage.kind] = Job(PROGRAMS[stage.program], stage.arguments, place)
            took = [note["seconds"] for note in notes if note["key"] == stage.key]
            seconds[stage.kind] = took[0] if took else 0.0
    for kind in ("pretrain", "detection"):
        one = jobs[kind]
        both = Job(one.tool, ("--num-gpus", "2", *one.words), one.output)
        jobs[kind + TWO_RANKS] = both.into(folder / "two" / kind)
        seconds[kind + TWO_RANKS] = _run(jobs[kind + TWO_RANKS], log)
    chain = Chain(folder, jobs, seconds)
    jobs.update(_smaller_jobs(chain))
    return chain


def _run(job: Job, log: Path) -> float:
    code, seconds = finish_program(job.program, log)
    if code != 0:
        raise SystemExit(log.read_text()[-3000:])
    return seconds


def _smaller_jobs(chain: Chain) -> dict[str, Job]:
    """Return jobs that look at what the chain has made, and at data in other layouts."""
    pretrained = chain.jobs["pretrain"].output
    detected = next(chain.jobs["detection"].output.rglob("detections.npz")).parent
    suite, data, made = chain.folder / "suite.yaml", chain.folder / "more", chain.folder / "made"
    file, images = small_coco(data / "coco")
    shutil.copytree(chain.data / "unlabeled", data / "listed")
    pictures = sorted(path.name for path in (data / "listed").iterdir())
    (data / "listed" / "list.txt").write_text("\n".join(pictures))
    with tarfile.open(data / "shard.tar", "w") as tar:
        for name in pictures:
            tar.add(data / "listed" / name, name)

    def job(tool: str, *words: object) -> Job:
        return Job(tool, tuple(map(str, words)), made)

    def pretrain_on(where: Path) -> Job:
        return chain.jobs["pretrain"].with_path(chain.data / "unlabeled", where)

    return {
        "dry run": job("run_suite", suite, "--dry-run"),
        "score": job(
            "score",
            *("--detections", detected / "detections.npz"),
            *("--annotations", detected / "ground_truth.npz"),
        ),
        "curves": job("visualize_training", pretrained, "--output", made / "curves.png"),
        "preflight": job("preflight", "--test", f"coco:{file}:{images}"),
        "print config": job(
            "pretrain", "--print-config", "--config-file", pretrained / "config.yaml"
        ),
        "list": pretrain_on(data / "listed" / "list.txt"),
        "shard": pretrain_on(data / "shard.tar"),
    }


def metrics(folder: Path) -> dict[str, dict[str, float]]:
    """The numbers of every record below a folder, without those that depend on the clock."""
    found = {}
    for path in sorted(folder.rglob("record.json")):
        record = json.loads(path.read_text())
        numbers = {k: v for k, v in record["metrics"].items() if k not in OF_THE_CLOCK}
        found[without_keys(path.parent.relative_to(folder).parts)] = numbers
    return found


def without_keys(parts: Sequence[str]) -> str:
    """A path without the keys of a suite's stages, which change with the folders they read."""
    return "/".join(re.sub(r"-[0-9a-f]{6,}$", "", part) for part in parts)
