"""The undisturbed chain that every attack starts from, its commands, and their processes."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.helpers.chain import smoke_suite
from tests.helpers.commands import ROOT
from tests.helpers.data.sets import small_coco

PATIENCE = 400.0  # seconds; an undisturbed run takes a few

# A process forked from a server that has imported everything starts in a fraction of a second.
context = multiprocessing.get_context("forkserver")


def start_program(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command as a user does, in a process group of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("ab") as out:
        return subprocess.Popen(words, stdout=out, stderr=out, env=env, start_new_session=True)


def finish_program(words: Sequence[str], log: Path) -> tuple[int | None, float]:
    """Run a command to its end; return the exit code, None for a hang, and the seconds."""
    begun, process = time.monotonic(), start_program(words, log)
    try:
        code = process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        code = None
    return code, time.monotonic() - begun


def finish_tool(module: str, words: Sequence[str], log: Path) -> int | None:
    """Run a tool's main in a forked process to its end; return the exit code, None for a hang."""
    context.set_forkserver_preload(["detection.commands.train_net", "torch.utils.tensorboard"])
    process = context.Process(target=_live, args=(module, list(words), log))
    process.start()
    process.join(PATIENCE)
    if process.exitcode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        return None
    return process.exitcode


def _live(module: str, words: list[str], log: Path) -> None:
    import importlib

    import torch

    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    multiprocessing.set_start_method("fork", force=True)  # as in a process of its own
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    torch.set_num_threads(1)
    sys.exit(importlib.import_module(module).main(words))


ATTACKED = ("pretrain", "convert", "detection", "knn", "board")  # kinds of stages
TWO_RANKS = " on two ranks"
OF_THE_CLOCK = ("minutes_per_epoch", "images_per_second", "views_per_second", "seconds")


@dataclass(frozen=True)
class Job:
    """One tool, its words, and the folder it fills."""

    tool: str  # the module of its command
    words: tuple[str, ...]
    output: Path

    @property
    def program(self) -> list[str]:
        """The command as a user types it."""
        script = ROOT / "tools" / f"{self.tool.rpartition('.')[2]}.py"
        return [sys.executable, "-W", "ignore", str(script), *self.words]

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
    jobs = {"suite": Job("kscl.commands.run_suite", (str(suite),), output)}
    seconds = {"suite": _run(jobs["suite"], log)}
    notes = [json.loads(path.read_text()) for path in (output / ".stages").glob("*.json")]
    for stage in plan(read_suite(suite)):
        if stage.kind not in ATTACKED or stage.name.startswith("random/"):
            continue
        place = Path(stage.folder)
        jobs[stage.kind] = Job(stage.tool, tuple(stage.arguments), place)
        took = [note["seconds"] for note in notes if note["key"] == stage.key]
        seconds[stage.kind] = took[0] if took else 0.0
        if stage.kind in ("pretrain", "detection"):
            kind, overrides = stage.kind + TWO_RANKS, dict(stage.overrides)
            if stage.kind == "pretrain":
                overrides["KEY_ENCODER.BATCH_NORM_GROUPS"] = 1  # keys are shuffled among ranks
            words = tuple(replace(stage, num_gpus=2, overrides=overrides).arguments)
            jobs[kind] = Job(stage.tool, words, place).into(folder / "two" / stage.kind)
            seconds[kind] = _run(jobs[kind], log)
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
        "dry run": job("kscl.commands.run_suite", suite, "--dry-run"),
        "score": job(
            "detection.commands.score",
            *("--detections", detected / "detections.npz"),
            *("--annotations", detected / "ground_truth.npz"),
        ),
        "curves": job(
            "kscl.commands.visualize_training", pretrained, "--output", made / "curves.png"
        ),
        "preflight": job("detection.commands.preflight", "--test", f"coco:{file}:{images}"),
        "print config": job(
            "kscl.commands.pretrain",
            *("--print-config", "--config-file", pretrained / "config.yaml"),
        ),
        "list": pretrain_on(data / "listed" / "list.txt"),
        "shard": pretrain_on(data / "shard.tar"),
    }


def metrics(folder: Path) -> dict[str, dict[str, float]]:
    """The numbers of every record below a folder, without those that depend on the clock.

    The keys of a suite's stages are left out: they change with the folders that stages read.
    """
    found = {}
    for path in sorted(folder.rglob("record.json")):
        record = json.loads(path.read_text())
        numbers = {k: v for k, v in record["metrics"].items() if k not in OF_THE_CLOCK}
        parts = path.parent.relative_to(folder).parts
        found["/".join(re.sub(r"-[0-9a-f]{6,}$", "", part) for part in parts)] = numbers
    return found
