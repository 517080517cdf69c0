"""Choices from facts: sizes by the objects, lengths by the measured seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kscl.benchmark.start.facts import Facts, refuse_few
from kscl.errors import KsclError

OBJECT_PIXELS = 40  # side that the median object shall have in the detector's input
SHORT_SIDES = (128, 320)  # of the detector's input, on a CPU
VIEW = 48  # side of a view, in pixels
MOST_BATCH, MOST_QUEUE = 64, 256
MOST_GROUPS, GROUP = 8, 8  # BatchNorm groups, as many as MoCo has GPUs, and images in one
DETECTOR_BATCH = 4
MOST_ITERATIONS, ENOUGH_ITERATIONS, FEWEST_ITERATIONS = 900, 300, 100
MOST_EPOCHS = 800
FEWEST_STEPS = 80  # of a pretraining; with fewer the top-1 among the batch hardly rises
DETECTION_PART = 0.4  # of the time for training, once the detector has enough iterations
SEEDS = 3
GOOD_ITERATIONS, GOOD_STEPS = 200, 150  # with fewer per seed, one seed gets all of the time
RESERVE = 0.85  # fraction of the minutes to plan with: estimates are estimates
SHOTS_OF_KSCL = 5


@dataclass(frozen=True)
class Sizes:
    """What the data alone decides."""

    batch: int
    queue: int
    crop: tuple[float, float]  # smallest and largest fraction of the area in a view
    short_side: int = 0
    anchors: tuple[int, ...] = ()


@dataclass(frozen=True)
class Costs:
    """Seconds of processor time, measured here; 0 where there is nothing to measure."""

    moco_start: float
    moco_epoch: float
    kscl_epoch: float
    convert: float = 0.0
    detection_start: float = 0.0  # and the pass over the test images
    iteration: float = 0.0
    probe: float = 0.0
    slowdown: float = 1.0  # by other programs while it was measured; not in the seconds above


@dataclass(frozen=True)
class Plan:
    """What the minutes decide."""

    seeds: int
    jobs: int
    moco_epochs: int
    kscl_epochs: int
    iterations: int
    seconds: dict[str, float]  # of one stage, by kind
    total: float  # seconds of the whole suite, from its check to its last stage


def choose_sizes(facts: Facts) -> Sizes:
    """Choose batch, queue, crops, input size and anchors."""
    images = facts.num_pretrain
    refuse_few(images)
    batch = min(MOST_BATCH, 2 ** int(math.log2(images // 2)))
    queue = min(MOST_QUEUE, max(batch, (images - 1) // batch * batch))
    crop = (0.3, 1.0)  # of a tile, or of a photo in which an object is large
    if facts.boxes is None:
        return Sizes(batch, queue, crop)
    area = min(1.0, facts.boxes.relative_area)
    wanted = OBJECT_PIXELS / math.sqrt(area)
    short = int(8 * round(min(max(wanted, SHORT_SIDES[0]), SHORT_SIDES[1]) / 8))
    return Sizes(batch, queue, crop, short, tuple(facts.boxes.anchors(short)))


def batch_norm_groups(batch: int) -> int:
    """Return the BatchNorm groups of one process: several of 4 images rather than one."""
    return max(1, min(MOST_GROUPS, batch // GROUP), min(2, batch // 4))


def epoch_steps(facts: Facts) -> int:
    """Return the number of batches that the images to pretrain on fill."""
    return facts.num_pretrain // choose_sizes(facts).batch


def choose_lengths(
    facts: Facts, costs: Costs, minutes: float, cores: int, seeds: int | None = None
) -> Plan:
    """Fit epochs and iterations into the minutes; three seeds if each still learns something."""
    jobs = max(1, min(cores, 3))
    chosen = longest_plan(facts, costs, minutes, jobs, seeds or SEEDS)
    if seeds is None and not _trains(facts, chosen, GOOD_STEPS, GOOD_ITERATIONS):
        chosen = longest_plan(facts, costs, minutes, jobs, 1)
    if not _trains(facts, chosen, FEWEST_STEPS, FEWEST_ITERATIONS):
        least = _least_minutes(facts, costs, jobs, chosen.seeds)
        what = "comparison" if chosen.seeds == 1 else f"comparison with {chosen.seeds} seeds"
        raise KsclError(
            f"{minutes:g} minutes are too few on this machine: the shortest useful {what} "
            f"takes about {least:.0f}. Write --minutes {math.ceil(least)}."
        )
    return chosen


def longest_plan(facts: Facts, costs: Costs, minutes: float, jobs: int, seeds: int) -> Plan:
    """Return the plan that trains longest and, with its reserve, ends within the minutes."""
    budget = minutes * 60 * RESERVE
    low, high = 0.0, budget * jobs  # seconds of training per seed
    while high - low > 1:
        middle = (low + high) / 2
        fits = plan_of(facts, costs, middle, jobs, seeds).total <= budget
        low, high = (middle, high) if fits else (low, middle)
    return plan_of(facts, costs, low, jobs, seeds)


def plan_of(facts: Facts, costs: Costs, training: float, jobs: int, seeds: int) -> Plan:
    """Return the plan that trains so many seconds per seed, all contenders together.

    What the shortest useful pretrainings leave goes to the detectors until they have enough
    iterations: a difference between detectors that find nothing says nothing.
    """
    iterations = 0
    if facts.boxes is not None:
        shortest = math.ceil(FEWEST_STEPS / epoch_steps(facts)) * costs.kscl_epoch
        first = min(ENOUGH_ITERATIONS, (training - 2 * shortest) / 3 / costs.iteration)
        fair = min(MOST_ITERATIONS, training * DETECTION_PART / 3 / costs.iteration)
        iterations = max(0, int(max(first, fair)))
    pretraining = max(0.0, training - 3 * iterations * costs.iteration) / 2
    moco = min(MOST_EPOCHS, int(pretraining / costs.moco_epoch))
    kscl = min(MOST_EPOCHS, int(moco * costs.moco_epoch / costs.kscl_epoch))
    seconds = {"pretrain": costs.moco_start + moco * costs.moco_epoch, "basis": costs.moco_start}
    evaluations: list[list[str]] = []
    if facts.boxes is not None:
        seconds["convert"] = costs.convert
        seconds["detection"] = costs.detection_start + iterations * costs.iteration
        evaluations.append(["convert", "detection"])
    if facts.classes is not None:
        seconds |= {"linear": costs.probe, "knn": costs.probe}
        evaluations += [["linear"], ["knn"]]
    before = costs.moco_start + costs.convert  # the suite checks every stage before the first
    total = before + _makespan(seconds, evaluations, jobs, seeds)
    return Plan(seeds, jobs, moco, kscl, iterations, seconds, total)


def _makespan(
    seconds: dict[str, float], evaluations: list[list[str]], jobs: int, seeds: int
) -> float:
    """Return when the last stage ends if a free place takes the first stage that can run."""
    stages: list[tuple[str, int]] = []  # (kind, number of the stage it waits for, or -1)
    for contender in ("random", "moco_v2", "kscl"):
        for _ in range(seeds):
            start = -1
            if contender != "random":
                start = len(stages)
                stages += [("pretrain", -1), ("basis", start)]
            for chain in evaluations:
                stages += [
                    (k, start if not i else len(stages) + i - 1) for i, k in enumerate(chain)
                ]
    ends: dict[int, float] = {}  # of stages that are done or running
    free = [0.0] * jobs
    while len(ends) < len(stages):
        now = min(free)
        ready = [
            i
            for i, (_, need) in enumerate(stages)
            if i not in ends and (need < 0 or ends.get(need, math.inf) <= now)
        ]
        place = free.index(now)
        if ready:
            free[place] = ends[ready[0]] = now + seconds[stages[ready[0]][0]]
        else:  # wait for a stage that is running
            free[place] = min(end for end in ends.values() if end > now)
    return max(ends.values())


def _trains(facts: Facts, plan: Plan, steps: int, iterations: int) -> bool:
    """Return whether each pretraining has so many steps, and each detector so many iterations."""
    fine_tuned = facts.boxes is None or plan.iterations >= iterations
    return fine_tuned and plan.kscl_epochs * epoch_steps(facts) >= steps


def _least_minutes(facts: Facts, costs: Costs, jobs: int, seeds: int) -> float:
    minutes = 1.0
    while not _trains(
        facts,
        longest_plan(facts, costs, minutes, jobs, seeds),
        FEWEST_STEPS,
        FEWEST_ITERATIONS,
    ):
        minutes *= 1.1
    return minutes


def pretrain_overrides(facts: Facts, sizes: Sizes, epochs: int) -> dict[str, Any]:
    """Return the settings of a pretraining by key, on top of pretrain/bccd_moco.yaml."""
    return {
        "DATA.TRAIN": facts.pretrain,
        "INPUT.SIZE": VIEW,
        "SOLVER.BATCH_SIZE": sizes.batch,
        "KEY_ENCODER.BATCH_NORM_GROUPS": batch_norm_groups(sizes.batch),
        "DICTIONARY.QUEUE_LENGTH": sizes.queue,
        "SOLVER.EPOCHS": epochs,
        "SOLVER.WARMUP_EPOCHS": round(epochs / 10, 1),
        "CHECKPOINT.PERIOD_EPOCHS": max(1, epochs // 10),
        "AUGMENT": [
            {"op": "random_resized_crop", "scale": list(sizes.crop)},
            {"op": "color_jitter", "brightness": 0.4, "contrast": 0.4, "saturation": 0.4,
             "hue": 0.1, "p": 0.8},
            {"op": "grayscale", "p": 0.2},
            {"op": "horizontal_flip", "p": 0.5},
        ],
    }  # fmt: skip


def kscl_overrides(epochs: int) -> dict[str, Any]:
    """Return what makes the same pretraining KSCL."""
    return {
        "METHOD.SIMILARITY": "projection",
        "METHOD.NUM_SHOTS": SHOTS_OF_KSCL,
        "METHOD.RHO": 0.4,
        "SOLVER.EPOCHS": epochs,
        "SOLVER.WARMUP_EPOCHS": round(epochs / 10, 1),
        "CHECKPOINT.PERIOD_EPOCHS": max(1, epochs // 10),
    }


def detection_overrides(facts: Facts, sizes: Sizes, iterations: int) -> dict[str, Any]:
    """Return the settings of the fine-tuning by key, on top of detection/bccd_tiny_c4.yaml."""
    assert facts.boxes is not None
    longest = int(1.5 * sizes.short_side)
    return {
        "DATASETS.TRAIN": [f"voc:{facts.root}:trainval"],
        "DATASETS.TEST": [f"voc:{facts.root}:test"],
        "MODEL.ROI_HEADS.NUM_CLASSES": len(facts.boxes.class_names),
        "MODEL.ANCHOR_GENERATOR.SIZES": [list(sizes.anchors)],
        "INPUT.MIN_SIZE_TRAIN": [sizes.short_side],
        "INPUT.MAX_SIZE_TRAIN": longest,
        "INPUT.MIN_SIZE_TEST": sizes.short_side,
        "INPUT.MAX_SIZE_TEST": longest,
        "SOLVER.IMS_PER_BATCH": DETECTOR_BATCH,
        "SOLVER.MAX_ITER": iterations,
        "SOLVER.STEPS": [int(0.8 * iterations)],
        "SOLVER.WARMUP_ITERS": max(1, iterations // 6),
        "KSCL.PROTOCOL": f"{facts.name}-tiny-c4",
    }


def probe_overrides(facts: Facts) -> dict[str, Any]:
    """Return the settings of both probes by key."""
    return {
        "DATA.TRAIN": f"{facts.classes}/train",
        "DATA.VAL": f"{facts.classes}/val",
        "INPUT.SIZE": VIEW,
        "INPUT.RESIZE": VIEW,
    }
