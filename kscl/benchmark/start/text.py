"""The suite file: every choice with a comment that says why."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kscl.benchmark.start.choose import (
    OBJECT_PIXELS,
    Plan,
    Sizes,
    choose_sizes,
    detection_overrides,
    kscl_overrides,
    pretrain_overrides,
    probe_overrides,
)
from kscl.benchmark.start.facts import Facts
from kscl.benchmark.start.measure import DETECTION, KNN, LINEAR, PRETRAIN
from kscl.config.tree import one_line
from kscl.runtime.logs import clock


def cpu_suite(facts: Facts, sizes: Sizes, plan: Plan, minutes: float, output_dir: Path) -> str:
    """Return the suite of a machine without GPUs."""
    reasons = _reasons(facts, sizes)
    lines = [
        f"# Made by tools/start.py for {facts.root} and {minutes:g} minutes; change what you like.",
        f"# Estimated: {clock(plan.total)} in all, {estimate(plan)}.",
        *_head(facts, output_dir),
        "# Several seeds, so that a difference can be told from noise."
        if plan.seeds > 1
        else "# One seed tells no difference from noise. [0, 1, 2] adds two and keeps the first.",
        f"seeds: {list(range(plan.seeds))}",
        f"jobs: {plan.jobs}  # stages at the same time, one core each",
        "baseline: [random]  # the question is what pretraining adds to random weights",
        f"basis_image: {one_line(facts.first_image)}",
        "contenders:",
        "  random:",
        "    arch: resnet50",
        "    # 8 to 64 channels instead of 256 to 2048: half a million weights train on a CPU.",
        "    kwargs: {channels: [8, 16, 32, 64], zero_init_last: true}",
        "  moco_v2:",
        f"    pretrain: {PRETRAIN}",
        *_overrides(pretrain_overrides(facts, sizes, plan.moco_epochs), reasons, 4),
        "  kscl:  # the same images and as many seconds as moco_v2; an epoch costs it more",
        f"    pretrain: {PRETRAIN}",
        *_overrides(
            {
                **pretrain_overrides(facts, sizes, plan.kscl_epochs),
                **kscl_overrides(plan.kscl_epochs),
            },
            {},
            4,
        ),
        "evaluations:",
    ]
    if facts.classes is not None:
        for kind, config in (("linear", LINEAR), ("knn", KNN)):
            lines += [f"  {kind}:", f"    config: {config}"]
            lines += _overrides(probe_overrides(facts), {}, 4)
    if facts.boxes is not None:
        lines += ["  detection:", f"    config: {DETECTION}"]
        lines += _overrides(detection_overrides(facts, sizes, plan.iterations), reasons, 4)
    return "\n".join(lines) + "\n"


def gpu_suite(facts: Facts, num_gpus: int, output_dir: Path) -> str:
    """Return the suite with the paper's recipes, for GPUs."""
    queue = min(65536, 2 ** int(math.log2(facts.num_photos - 1)))
    lines = [
        f"# Made by tools/start.py for {facts.root}: the paper's recipes, on {num_gpus} GPUs.",
        "# They take hours to days; tools/plan.py estimates a pretraining. For a quick answer, run",
        "# tools/start.py with --cpu.",
        *_head(facts, output_dir),
        "seeds: [0, 1, 2]  # three seeds, so that a difference can be told from noise",
        f"num_gpus: {num_gpus}",
        "baseline: [random]",
        "pretrain_overrides:",
        f"  DATA.TRAIN: {one_line(facts.photos)}",
        f"  DICTIONARY.QUEUE_LENGTH: {queue}  # shorter than the {facts.num_photos} images",
        f"  SOLVER.BATCH_SIZE: {min(256, queue)}  # the learning rate follows",
        "contenders:",
        "  random: {arch: resnet50}",
        "  moco_v2: {pretrain: pretrain/moco_v2_r50_200ep.yaml}",
        "  kscl: {pretrain: pretrain/kscl_k5_rho40_r50_200ep.yaml}",
        "evaluations:",
    ]
    if facts.classes is not None:
        lines += ["  linear:", "    config: linear_eval/linear_cached.yaml"]
        paths = {"DATA.TRAIN": f"{facts.classes}/train", "DATA.VAL": f"{facts.classes}/val"}
        lines += _overrides(paths, {}, 4)
    if facts.boxes is not None:
        keys = ("DATASETS.TRAIN", "DATASETS.TEST", "MODEL.ROI_HEADS.NUM_CLASSES")
        small = detection_overrides(facts, choose_sizes(facts), 1)
        chosen = {key: small[key] for key in keys}
        chosen["KSCL.PROTOCOL"] = f"{facts.root.name}-c4-24k"
        lines += ["  detection:", "    config: detection/voc0712_c4_24k_moco.yaml"]
        lines += _overrides(chosen, {}, 4)
    return "\n".join(lines) + "\n"


def _head(facts: Facts, output_dir: Path) -> list[str]:
    title = f"{facts.root.name}, does pretraining help?"
    return [f"name: {one_line(title)}", f"output_dir: {one_line(str(output_dir))}"]


def estimate(plan: Plan) -> str:
    """Return the seconds of one stage of each kind, in words."""
    return ", ".join(f"{kind} {clock(seconds)}" for kind, seconds in plan.seconds.items())


def _reasons(facts: Facts, sizes: Sizes) -> dict[str, str]:
    what = "tiles" if facts.has_tiles else "images"
    cut = f" of {facts.num_photos} images: crops of a whole one would show different objects"
    reasons = {
        "DATA.TRAIN": f"{facts.num_pretrain} {what}{cut if facts.has_tiles else ''}; none like a "
        "test image",
        "INPUT.SIZE": "small views: on a CPU, more epochs help more than more pixels",
        "SOLVER.BATCH_SIZE": f"at most half of the {what}",
        "DICTIONARY.QUEUE_LENGTH": f"shorter than the {facts.num_pretrain} {what}: a longer queue "
        "would hold the query's own one",
        "SOLVER.EPOCHS": "what fits into the minutes",
        "AUGMENT": "large crops, so that two of them share an object",
    }
    if facts.boxes is not None:
        reasons |= {
            "MODEL.ROI_HEADS.NUM_CLASSES": ", ".join(facts.boxes.class_names[:8]),
            "MODEL.ANCHOR_GENERATOR.SIZES": "k-means over the boxes at this input size",
            "INPUT.MIN_SIZE_TRAIN": f"an object of median size then has {OBJECT_PIXELS} pixels, "
            "within 128 to 320 for the whole side",
            "SOLVER.MAX_ITER": "what fits into the minutes",
        }
    return reasons


def _overrides(values: dict[str, Any], reasons: dict[str, str], indent: int) -> list[str]:
    space = " " * indent
    lines = [f"{space}overrides:"]
    for key, value in values.items():
        if key in reasons:
            lines.append(f"{space}  # {reasons[key]}")
        lines.append(f"{space}  {key}: {one_line(value)}")
    return lines
