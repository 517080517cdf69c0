"""Pretrainings of equal time: steps that follow from measured step times.

Step times are measured on this machine once, all contenders alternately in one process, and the
steps that follow from them are kept in the suite file: whoever runs it again trains equally.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from fvcore.common.config import CfgNode

from kscl.benchmark.suite.spec import Suite, override_words
from kscl.data.loader import build_train_loader, steps_per_epoch
from kscl.data.open import open_source
from kscl.data.source import ImageSource
from kscl.engine.loop import build_state, take_step
from kscl.errors import KsclError
from kscl.keys import load_config

MARK = "# Equal time, as kscl equal-time measured it; everything below is written by it."
WARM_UP, PER_TURN = 3, 4  # steps before anything is measured, and steps of a contender's turn


@dataclass(frozen=True)
class StepTimes:
    """What a step of each contender takes, and its steps of an epoch."""

    milliseconds: dict[str, float]
    per_epoch: dict[str, int]

    def equal_steps(self, reference: str, epochs: float) -> dict[str, int]:
        """Return the steps that take as long as so many epochs of the reference."""
        if reference not in self.milliseconds:
            raise KsclError(
                f"There is no pretraining '{reference}' to compare with: choose one of "
                f"{', '.join(self.milliseconds)}."
            )
        budget = epochs * self.per_epoch[reference] * self.milliseconds[reference]
        return {name: max(1, round(budget / ms)) for name, ms in self.milliseconds.items()}


def measure_steps(suite: Suite, turns: int) -> StepTimes:
    """Train every contender for a few steps, taking turns, on one core each as in a suite."""
    torch.set_num_threads(1)
    pretrained = [contender for contender in suite.contenders if contender.pretrain]
    if not pretrained:
        raise KsclError("The suite has no pretraining whose steps could be measured.")
    configs, sources = {}, {}
    for contender in pretrained:
        overrides = {**suite.pretrain_overrides, **contender.overrides}
        overrides |= {"SOLVER.MAX_STEPS": 10**6, "DATA.NUM_WORKERS": 0}
        cfg = load_config(contender.pretrain, override_words(overrides))
        configs[contender.name] = cfg
        sources[contender.name] = open_source(cfg.DATA.TRAIN, cfg.DATA.CACHE_DIR, cfg.DATA.CACHE_GB)
    counts = sorted({len(source) for source in sources.values()})
    if len(counts) != 1:
        raise KsclError(
            "Equal time needs equal data: the contenders have sets of "
            f"{', '.join(map(str, counts))} images. Give all the same (DATA.TRAIN)."
        )
    epochs = {it: steps_per_epoch(counts[0], cfg.SOLVER.BATCH_SIZE) for it, cfg in configs.items()}
    trained = [_turns(configs[it], sources[it], epochs[it], turns) for it in epochs]
    rounds = zip(*trained, strict=True)
    next(rounds)  # warms up
    medians = [1000 * statistics.median(seconds) for seconds in zip(*rounds, strict=True)]
    return StepTimes(dict(zip(epochs, medians, strict=True)), epochs)


def _turns(cfg: CfgNode, source: ImageSource, per_epoch: int, turns: int) -> Iterator[float]:
    """Load and train; yield the seconds of CPU time per step, of a warm-up and of every turn.

    On one thread and without workers this is the time on an idle machine, whatever else runs.
    """
    state = build_state(cfg, len(source), per_epoch, torch.device("cpu"))
    loader = build_train_loader(cfg, source, last_step=WARM_UP + turns * PER_TURN)
    for index in range(len(source)):  # pictures that are kept are decoded in the first epoch only
        loader.dataset.read_picture(0, index)
        if not loader.dataset.kept.pictures:
            break
    batches = iter(loader)
    for steps in [WARM_UP, *[PER_TURN] * turns]:
        began = time.process_time()
        for _ in range(steps):
            take_step(state, next(batches))
        yield (time.process_time() - began) / steps


def refuse_own_steps(path: Path) -> None:
    """Raise if a suite file has steps that someone wrote by hand, which would be there twice."""
    text = path.read_text(encoding="utf-8").partition(MARK)[0]
    if re.search("^steps *:", text, re.MULTILINE):
        raise KsclError(
            f"{path} already has `steps`. Remove them to measure again, or see new ones with "
            "--dry-run."
        )


def write_steps(path: Path, times: StepTimes, steps: Mapping[str, int]) -> None:
    """Write the steps to the end of the suite file, in place of those of an earlier measurement."""
    text = path.read_text(encoding="utf-8").partition(MARK)[0].rstrip("\n")
    lines = [MARK, "steps:"]
    lines += [
        f"  {name}: {count}  # {times.milliseconds[name]:.1f} ms each"
        for name, count in steps.items()
    ]
    path.write_text("\n".join([text, *lines, ""]), encoding="utf-8")
