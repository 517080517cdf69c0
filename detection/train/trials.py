"""From one command to its runs: adapt the config, check it, expand trials and learning rates.

Every run has its own config, seed and folder; `detection.train.detect` does it.

A learning rate may be chosen per backbone, on a part of the training images and never on the test
set. Such a search is a separate protocol: its name and its grid say so, and the record has the
score of every rate.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer

from detection.backbones import C4
from detection.config import GRID_KEY, NORM_KEYS, WEIGHTS_KEY
from detection.convert.certificate import verify_start
from detection.data.preflight import Part
from detection.data.sets import RunSets, check_sets, draw_parts, read_run_sets
from detection.scoring.result import MASK_PREFIX
from detection.train.detect import run_trial, score_detector
from detection.train.detector import (
    CHECKPOINTS,
    build_on_meta,
    check_room_for,
    find_detector,
    inference_folder,
    refuse_other_use,
    refuse_run_folder,
)
from detection.train.optimizer import build_optimizer
from detection.train.protocol import schedule
from kscl.cli import is_later
from kscl.config import CONFIG_FILE, value_at
from kscl.data.annotations import AnnotatedImage, Problem
from kscl.engine.cost import GPUS, Gpu, Needs, costs_of
from kscl.errors import KsclError
from kscl.methods.encoder import build_backbone
from kscl.methods.keys import FLOAT_BYTES
from kscl.records.provenance import loaded_code
from kscl.records.record import RECORD_FILE, read_record
from kscl.records.spread import mean_and_std
from kscl.run.engine import Flags, find_start, seed_configs
from kscl.run.task import Task
from kscl.runtime.files import only_run_in
from kscl.runtime.launch import launch

STARTS = Flags()
HEADLINE = ("AP50", "AP", "AP75")
SEARCH_FOLDER = "lr_search"
TRIAL = "-lr-trial"  # ends the protocol's name while one learning rate is tried
HELD_OUT = 5  # one in five training images is held out to choose on
METRIC = "AP"
# Seconds of an iteration of 16 images and of a test image on 8 V100, and GB of each: Detectron2's
# MODEL_ZOO.md for ResNet-50, 1x.
PUBLISHED = {
    "C4": (0.551, 0.102, 4.8),
    "FPN": (0.210, 0.038, 3.0),
    "mask": (0.261, 0.043, 3.4),
    "RetinaNet": (0.200, 0.055, 3.9),
}
TEST_IMAGES = 5000  # about as many as VOC and COCO test on
COMPARED_SIZE = 224  # pixels at which networks' operations are compared
MASK_HEADLINE = tuple(f"{MASK_PREFIX}{name}" for name in HEADLINE)


def adapt(cfg: CfgNode, num_gpus: int) -> tuple[CfgNode, int, str]:
    """Return the config to run, the number of processes it was scaled from (or 0), a notice."""
    cfg = cfg.clone()
    processes = int(os.environ.get("WORLD_SIZE", max(1, num_gpus)))
    if cfg.SEED < 0:  # Detectron2's "random"
        cfg.SEED = 0
    if not torch.cuda.is_available():
        cfg.MODEL.DEVICE = "cpu"
        if cfg.SOLVER.AMP.ENABLED:
            raise KsclError("SOLVER.AMP.ENABLED needs a GPU, but there is none. Set it to False.")
        needing_gpus = [key for key in NORM_KEYS if value_at(cfg, key) in ("SyncBN", "nnSyncBN")]
        if processes > 1 and needing_gpus:
            raise KsclError(
                f"{' and '.join(needing_gpus)} {value_at(cfg, needing_gpus[0])} needs GPUs, but "
                "there is none. Use naiveSyncBN, which computes the same on any device."
            )
    if len(cfg.DATASETS.TEST) != 1:
        raise KsclError(
            f"DATASETS.TEST must name one set, as a record has one result, got "
            f"{tuple(cfg.DATASETS.TEST)}."
        )
    return _scale(cfg, processes)


def _scale(cfg: CfgNode, processes: int) -> tuple[CfgNode, int, str]:
    """Scale batch, learning rate and schedule to the number of processes if the config says so.

    No shipped protocol does: with fewer GPUs, each gets more of the same batch.
    """
    reference = cfg.SOLVER.REFERENCE_WORLD_SIZE
    if reference in (0, processes):
        return cfg, 0, ""
    if cfg.SOLVER.IMS_PER_BATCH % reference:
        raise KsclError(
            f"SOLVER.IMS_PER_BATCH must be a multiple of SOLVER.REFERENCE_WORLD_SIZE {reference} "
            f"to be scaled, got {cfg.SOLVER.IMS_PER_BATCH}. SOLVER.REFERENCE_WORLD_SIZE 0 uses "
            "batch, learning rate and iterations as they are."
        )
    scaled = DefaultTrainer.auto_scale_workers(cfg, processes)
    factor = processes / reference
    scaled.defrost()
    scaled.KSCL.LR_GRID = [rate * factor for rate in cfg.KSCL.LR_GRID]
    # Detectron2 scales these too, but an iteration takes as long as before.
    scaled.SOLVER.CHECKPOINT_PERIOD = cfg.SOLVER.CHECKPOINT_PERIOD
    scaled.TEST.EVAL_PERIOD = cfg.TEST.EVAL_PERIOD
    notice = (
        f"Written for {reference} processes, running on {processes}: batch "
        f"{cfg.SOLVER.IMS_PER_BATCH} → {scaled.SOLVER.IMS_PER_BATCH}, learning rate "
        f"{cfg.SOLVER.BASE_LR:g} → {scaled.SOLVER.BASE_LR:g}, iterations "
        f"{cfg.SOLVER.MAX_ITER} → {scaled.SOLVER.MAX_ITER}, steps {scaled.SOLVER.STEPS}, "
        f"warm-up {scaled.SOLVER.WARMUP_ITERS}. This is another protocol, since BatchNorm sees "
        f"{'fewer' if processes < reference else 'more'} images at once. "
        "SOLVER.REFERENCE_WORLD_SIZE 0 uses the numbers as they are.\n"
    )
    return scaled, reference, notice


def check_trials(cfg: CfgNode, later: Sequence[str]) -> list[Problem]:
    """Return what would stop a run (data, weights, detector, disk); write nothing."""
    problems: list[Problem] = []

    @contextlib.contextmanager
    def checking(kind: str, where: str) -> Iterator[None]:
        try:
            yield
        except KsclError as error:
            problems.append(Problem(kind, where, str(error), ""))

    with checking("data", "DATASETS"):
        if not any(is_later(name, later) for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)):
            report = check_sets(cfg)
            problems += report.problems
            draw_parts(report.annotated["train"], cfg)
            if cfg.KSCL.LR_GRID and report.annotated["train"]:
                images_to_divide(report.annotated["train"])
    with checking("weights", WEIGHTS_KEY):
        if not is_later(WEIGHTS_KEY, later):
            verify_start(cfg)
    with checking("detector", "MODEL"):
        model = build_on_meta(cfg)
        if not is_later(WEIGHTS_KEY, later):  # they determine the network
            build_optimizer(cfg, model)
        with checking("disk", "OUTPUT_DIR"):
            check_room_for(cfg, model)
    return problems


def trial_needs(cfg: CfgNode, gpu: Gpu, count: int, arch: str, kwargs: Mapping[str, Any]) -> Needs:
    """Return what one trial takes, by the published times of ResNet-50 in Detectron2's zoo.

    Time and memory are in proportion to the network's operations, the pixels and the batch.
    """
    kind = "C4" if cfg.MODEL.BACKBONE.NAME == C4 else "mask" if cfg.MODEL.MASK_ON else "FPN"
    kind = "RetinaNet" if cfg.MODEL.META_ARCHITECTURE == "RetinaNet" else kind
    iteration, inference, gigabytes = PUBLISHED[kind]
    resnet50 = costs_of(build_backbone("resnet50"), COMPARED_SIZE).forward_flops
    size = costs_of(build_backbone(arch, kwargs), COMPARED_SIZE).forward_flops / resnet50
    size *= (cfg.INPUT.MIN_SIZE_TEST / 800) ** 2
    batch = cfg.SOLVER.IMS_PER_BATCH / 16
    speed = count / 8 * gpu.teraflops / GPUS["V100"].teraflops
    seconds = schedule(cfg).MAX_ITER * iteration * batch + TEST_IMAGES * inference / 8
    detector = FLOAT_BYTES * sum(it.numel() for it in build_on_meta(cfg).parameters())
    memory = 1e9 * gigabytes * size * batch * 8 / count
    disk = (2 * CHECKPOINTS + 1) * detector  # checkpoints hold the momentum too
    return Needs(seconds * size / speed / 3600, memory / 2**30, disk / 1e9)


def run_trials(
    cfg: CfgNode,
    num_gpus: int,
    num_trials: int = 0,
    flags: Flags = STARTS,
    scaled_from: int = 0,
) -> int:
    """Check data, weights and detector, run every unfinished trial, and return the exit code."""
    loaded_code()  # edits from here on do not change these numbers
    if cfg.KSCL.LR_GRID:
        num_trials = max(1, num_trials)  # beside the folder of the search
    configs = seed_configs(cfg, num_trials)
    folders = [Path(trial_cfg.OUTPUT_DIR) for trial_cfg in configs]
    if flags.auto_resume:
        begun = [Path(cfg.OUTPUT_DIR) / SEARCH_FOLDER, *(path / CONFIG_FILE for path in folders)]
        if not any(path.exists() for path in begun):
            print(f"No run to resume in {cfg.OUTPUT_DIR}: starting one.", flush=True)
    else:
        for trial_cfg, folder in zip(configs, folders, strict=True):
            if folder.is_dir():  # fail before data and weights are read
                with only_run_in(folder):
                    find_start(Task(trial_cfg), flags)
    sets, report = read_run_sets(cfg)
    print(report, flush=True)
    draw_parts(sets.train, cfg)  # fail before any process starts
    shared: dict[str, Any] = {"certificate": verify_start(cfg), "scaled_from": scaled_from}
    build_optimizer(cfg, build_on_meta(cfg))
    if cfg.KSCL.LR_GRID:

        def try_rate(trial_cfg: CfgNode, parts: RunSets) -> int:
            return launch(run_trial, (trial_cfg, {**shared, "sets": parts}, flags), num_gpus)

        code, found = search(cfg, sets, try_rate)
        if code:
            return code
        shared["lr_search"] = found
        cfg.SOLVER.BASE_LR = found["chosen"]
        configs = seed_configs(cfg, num_trials)
    for trial_cfg in configs:
        if code := launch(run_trial, (trial_cfg, {**shared, "sets": sets}, flags), num_gpus):
            return code
    if int(os.environ.get("RANK", 0)) == 0:
        print(summary(folders), flush=True)
    return 0


def run_evaluation(cfg: CfgNode, num_gpus: int, weights_are_named: bool) -> int:
    """Score a trained detector and write detections and record into OUTPUT_DIR.

    If OUTPUT_DIR is the detector's run, they go into a subfolder.
    """
    loaded_code()
    cfg = cfg.clone()
    cfg.defrost()
    path, training = find_detector(cfg, weights_are_named)
    folder = Path(cfg.OUTPUT_DIR)
    if training is not None and folder.resolve() == training.run.resolve():
        cfg.OUTPUT_DIR = str(inference_folder(folder))
    refuse_run_folder(Path(cfg.OUTPUT_DIR))
    sets, report = read_run_sets(cfg)
    print(report, flush=True)
    if training is not None:
        refuse_other_use(cfg, sets.class_names, path, training)
    cfg.freeze()
    code = launch(score_detector, (cfg, sets, path, training), num_gpus)
    if code == 0 and training is not None and int(os.environ.get("RANK", 0)) == 0:
        print(f"{path}: {summary([Path(cfg.OUTPUT_DIR)])}", flush=True)
    return code


def summary(folders: list[Path]) -> str:
    """Return mean ± standard deviation over the trials, and their warnings."""
    records = [read_record(folder / RECORD_FILE) for folder in folders]
    parts = []
    for name in (*HEADLINE, *MASK_HEADLINE):
        values = [record["metrics"][name] for record in records if name in record["metrics"]]
        if values:
            parts.append(f"{name.replace('/', ' ')} {mean_and_std(values)}")
    count = "1 trial" if len(records) == 1 else f"{len(records)} trials"
    warned = [f"Warning: {text}" for it in records for text in it["details"].get("warnings", [])]
    line = f"{', '.join(parts)} ({count}, {records[0]['details']['scorer']})"
    return "\n".join(dict.fromkeys([line, *warned]))


def images_to_divide(train: Sequence[Part]) -> list[AnnotatedImage]:
    """Return all training images; raise an error if they are too few to hold one out."""
    images = [image for _, annotated in train for image in annotated.images]
    if len(images) < HELD_OUT:
        raise KsclError(
            f"{GRID_KEY} needs at least {HELD_OUT} training images to hold one out for the choice, "
            f"got {len(images)}."
        )
    return images


def search_sets(sets: RunSets) -> RunSets:
    """Return the training sets in two parts: to train on, and to choose the learning rate on."""
    images = images_to_divide(sets.train)
    order = sorted(images, key=lambda image: (zlib.crc32(str(image.id).encode()), str(image.id)))
    held_out = {id(image) for image in order[: len(order) // HELD_OUT]}
    train = [
        (source, replace(annotated, images=[i for i in annotated.images if id(i) not in held_out]))
        for source, annotated in sets.train
    ]
    source, first = sets.train[0]
    chosen_on = [image for image in images if id(image) in held_out]
    if len({image.id for image in chosen_on}) < len(chosen_on):  # two sets may use the same ids
        chosen_on = [replace(image, id=str(number)) for number, image in enumerate(chosen_on)]
    known = sets.fingerprints["train"]
    names = {role: f"{SEARCH_FOLDER} {known['hash']} {role}" for role in sets.fingerprints}
    hashes = {role: hashlib.sha256(text.encode()).hexdigest()[:16] for role, text in names.items()}
    return RunSets(
        sets.class_names,
        train,
        (source, replace(first, images=chosen_on)),
        {role: {**known, "hash": hash_} for role, hash_ in hashes.items()},
    )


def search(
    cfg: CfgNode, sets: RunSets, run: Callable[[CfgNode, RunSets], int]
) -> tuple[int, dict[str, Any]]:
    """Try every learning rate of the grid; return the exit code, and the result if it is 0."""
    parts = search_sets(sets)
    scores: dict[str, float] = {}
    for rate in cfg.KSCL.LR_GRID:
        trial = cfg.clone()
        trial.SOLVER.BASE_LR = rate
        trial.KSCL.LR_GRID = []
        trial.KSCL.PROTOCOL = f"{cfg.KSCL.PROTOCOL or 'unnamed'}{TRIAL}"
        trial.OUTPUT_DIR = str(Path(cfg.OUTPUT_DIR) / SEARCH_FOLDER / f"lr{rate:g}")
        trial.freeze()
        if code := run(trial, parts):
            return code, {}
        scores[f"{rate:g}"] = read_record(Path(trial.OUTPUT_DIR) / RECORD_FILE)["metrics"][METRIC]
    best = max(cfg.KSCL.LR_GRID, key=lambda rate: (scores[f"{rate:g}"], -rate))
    chosen_on = len(parts.test[1].images)
    tried = ", ".join(f"{rate} gives {score:.2f}" for rate, score in scores.items())
    print(
        f"Learning rate {best:g} by {METRIC} on {chosen_on} held-out training images: {tried}.",
        flush=True,
    )
    return 0, {
        "chosen": best,
        "grid": list(cfg.KSCL.LR_GRID),
        METRIC: scores,
        "scorer": cfg.KSCL.SCORER,
        "trained_on": sum(len(annotated.images) for _, annotated in parts.train),
        "chosen_on": chosen_on,
        "chosen_on_what": "images of the training sets, held out from the trials",
    }
