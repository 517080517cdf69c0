"""The suite file: every choice with a comment that says why."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kscl.benchmark.start import reasons
from kscl.benchmark.start.choose import (
    Plan,
    Sizes,
    batch_norm_groups,
    choose_sizes,
    detection_overrides,
    kscl_overrides,
    pretrain_overrides,
    probe_overrides,
)
from kscl.benchmark.start.facts import Facts, refuse_few
from kscl.benchmark.start.measure import DETECTION, KNN, LINEAR, PRETRAIN
from kscl.config import one_line
from kscl.runtime.logs import clock

DIFFERS = "what differs from that file"
STARTS_OF_TRAINING = "A few minutes on a CPU compare starts of training, not finished detectors."


def cpu_suite(facts: Facts, sizes: Sizes, plan: Plan, minutes: float, output_dir: Path) -> str:
    """Return the suite of a machine without GPUs."""
    lines = [
        f"# Made by tools/start.py for {facts.root} and {minutes:g} minutes; change what you like.",
        f"# Estimated: {clock(plan.total)} in all, {estimate(plan)}.",
        *_head(facts, output_dir),
        "# Several seeds, so that a difference can be told from noise."
        if plan.seeds > 1
        else "# One seed: seed-to-seed variation is not measured. [0, 1, 2] adds two seeds.",
        f"seeds: {list(range(plan.seeds))}",
        f"jobs: {plan.jobs}  # stages at the same time, one core each",
        "# Seconds of one stage as measured; those of finished stages replace them.",
        f"estimates: {one_line({kind: round(value) for kind, value in plan.seconds.items()})}",
        "baseline: [random]  # the question is what pretraining adds to random weights",
        "# The page shows what each pretraining makes of this image.",
        f"basis_image: {one_line(facts.first_image)}",
        "contenders:  # what is compared; all of them have the same network",
        "  random:  # no pretraining",
        "    arch: resnet50  # the paper's, but narrow",
        "    # 8 to 64 channels instead of 256 to 2048: half a million weights train on a CPU.",
        "    kwargs: {channels: [8, 16, 32, 64], zero_init_last: true}",
        "  moco_v2:  # the method that KSCL extends: one key per image",
        f"    pretrain: {PRETRAIN}  # {reasons.CONFIG}",
        *_overrides(
            pretrain_overrides(facts, sizes, plan.moco_epochs),
            reasons.of_pretraining(facts, plan),
            4,
            DIFFERS,
        ),
        "  kscl:  # the same images and as many seconds as moco_v2; an epoch costs it more",
        f"    pretrain: {PRETRAIN}",
        *_overrides(
            {
                **pretrain_overrides(facts, sizes, plan.kscl_epochs),
                **kscl_overrides(plan.kscl_epochs),
            },
            reasons.OF_KSCL,
            4,
        ),
        "evaluations:  # of every contender",
    ]
    if facts.classes is not None:
        lines += ["  linear:  # a linear classifier on features that stay as they are"]
        lines += [f"    config: {LINEAR}  # {reasons.CONFIG}"]
        lines += _overrides(probe_overrides(facts), reasons.OF_PROBES, 4)
        lines += ["  knn:  # the classes of the nearest features, without any training"]
        lines += [f"    config: {KNN}", *_overrides(probe_overrides(facts), {}, 4)]
    if facts.boxes is not None:
        lines += [f"  # {STARTS_OF_TRAINING}"]
        lines += ["  detection:  # a Faster R-CNN, fine-tuned from the backbone"]
        note = "" if facts.classes is not None else f"  # {reasons.CONFIG}"  # said once
        lines += [f"    config: {DETECTION}{note}"]
        settings = detection_overrides(facts, sizes, plan.iterations)
        lines += _overrides(settings, reasons.of_detection(facts, plan), 4)
    return "\n".join(lines) + "\n"


def gpu_suite(facts: Facts, num_gpus: int, output_dir: Path, num_seeds: int = 3) -> str:
    """Return the suite with the paper's recipes, for GPUs."""
    refuse_few(facts.num_photos)
    queue = min(65536, 2 ** int(math.log2(facts.num_photos - 1)))
    num_gpus = min(num_gpus, queue)
    batch = min(256, queue) // num_gpus * num_gpus
    groups = batch_norm_groups(batch)
    alone = [f"  # {reasons.GROUPS}", f"  KEY_ENCODER.BATCH_NORM_GROUPS: {groups}"]
    lines = [
        f"# Made by tools/start.py for {facts.root}: the paper's recipes, on {num_gpus} GPUs.",
        "# They take hours to days; tools/plan.py estimates a pretraining. For a quick answer, run",
        "# tools/start.py with --cpu.",
        *_head(facts, output_dir),
        "# Several seeds: with one, seed-to-seed variation is not measured.",
        f"seeds: {list(range(num_seeds))}",
        f"num_gpus: {num_gpus}  # of every stage; batches are shared out among them",
        "baseline: [random]  # the question is what pretraining adds to random weights",
        "pretrain_overrides:  # of both pretrainings",
        "  # all images that are not to test on, at full size",
        f"  DATA.TRAIN: {one_line(facts.photos)}",
        f"  # shorter than the {facts.num_photos} images; the paper's, for a million, is 65536",
        f"  DICTIONARY.QUEUE_LENGTH: {queue}",
        "  # the paper's 256, or less where the queue is shorter or GPUs cannot share it evenly;",
        "  # the learning rate follows",
        f"  SOLVER.BATCH_SIZE: {batch}",
        *(alone if num_gpus == 1 else []),
        "contenders:  # what is compared; all of them have the same network",
        "  random: {arch: resnet50}  # no pretraining",
        "  # the method that KSCL extends, with one key per image, for 200 epochs",
        "  moco_v2: {pretrain: pretrain/moco_v2_r50_200ep.yaml}",
        "  # the paper's K = 5 and rho = 40 %, also for 200 epochs, each of which costs it more",
        "  kscl: {pretrain: pretrain/kscl_k5_rho40_r50_200ep.yaml}",
        "evaluations:  # of every contender",
    ]
    if facts.classes is not None:
        lines += ["  linear:  # a linear classifier on features that stay as they are"]
        lines += [f"    config: linear_eval/linear_cached.yaml  # {reasons.CONFIG}"]
        paths = {"DATA.TRAIN": f"{facts.classes}/train", "DATA.VAL": f"{facts.classes}/val"}
        lines += _overrides(paths, reasons.OF_PROBES, 4, DIFFERS)
    if facts.boxes is not None:
        keys = ("DATASETS.TRAIN", "DATASETS.TEST", "MODEL.ROI_HEADS.NUM_CLASSES")
        small = detection_overrides(facts, choose_sizes(facts), 1)
        chosen = {key: small[key] for key in keys}
        chosen["KSCL.PROTOCOL"] = f"{facts.name}-c4-24k"
        lines += ["  detection:  # MoCo's Faster R-CNN C4, fine-tuned for 24,000 iterations"]
        lines += [f"    config: detection/voc0712_c4_24k_moco.yaml  # {reasons.CONFIG}"]
        lines += _overrides(chosen, reasons.of_boxes(facts.boxes), 4, DIFFERS)
    return "\n".join(lines) + "\n"


def _head(facts: Facts, output_dir: Path) -> list[str]:
    title = f"{facts.name}, does pretraining help?"
    return [
        f"name: {one_line(title)}  # of the board",
        f"output_dir: {one_line(str(output_dir))}  # for all runs and the board",
    ]


def estimate(plan: Plan) -> str:
    """Return the seconds of one stage of each kind in words, without the picture of a basis."""
    told = {kind: seconds for kind, seconds in plan.seconds.items() if kind != "basis"}
    return ", ".join(f"{kind} {clock(seconds)}" for kind, seconds in told.items())


def _overrides(
    values: dict[str, Any], why: dict[str, str], indent: int, title: str = ""
) -> list[str]:
    space = " " * indent
    lines = [f"{space}overrides:{title and f'  # {title}'}"]
    for key, value in values.items():
        if key in why:
            lines.append(f"{space}  # {why[key]}")
        lines.append(f"{space}  {key}: {one_line(value)}")
    return lines
