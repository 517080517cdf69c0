"""From a prepared data set and a number of minutes to a suite file with every choice explained.

The images and boxes decide sizes; the seconds that a few steps take here decide lengths.
"""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
import tempfile
import time
import warnings
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.cluster.vq import kmeans2

from kscl.benchmark.suite.stages import Stage
from kscl.config import one_line
from kscl.data.annotated.voc import read_voc
from kscl.data.open import open_source
from kscl.errors import KsclError
from kscl.run.task import commands
from kscl.runtime.logs import clock

PRETRAIN_SPLIT, TRAIN_SPLIT, TEST_SPLIT = "pretrain", "trainval", "test"
TILES = "tiles"  # folder of crops to pretrain on, made by kscl prepare where objects are small
FEWEST_IMAGES = 8  # to pretrain on
OBJECT_PIXELS = 40  # side that the median object shall have in the detector's input
SHORT_SIDES = (128, 320)  # of the detector's input, on a CPU
CROP = [0.3, 1.0]  # of a tile, or of a photo in which an object is large: fractions of its area
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
MEASURED_STEPS = 24
MEASURED_ITERATIONS = 16
MEASURED_LONGER = 21.0  # times the epochs of the probe's second measurement
STEP = re.compile(r"\b(?:iter:|step) (\d+)\b")  # in the log of a fine-tuning or a pretraining
PERIOD = 0.05  # seconds between two looks at it
PRECISE_BN_ITERATIONS = 20  # forward passes at the end of a fine-tuning, a third of the work each
PRETRAIN = "pretrain/small_moco.yaml"
C4, FPN = "detection/bccd_tiny_c4.yaml", "detection/shapes_tiny_fpn.yaml"
LINEAR, KNN = "linear_eval/shapes.yaml", "linear_eval/shapes_knn.yaml"
# ImageNet weights to compare with: of half a million weights on a CPU, and the usual ones on GPUs.
CPU_WEIGHTS, GPU_WEIGHTS = "timm:test_resnet.r160_in1k", "timm:resnet50.tv_in1k"
NO_WEIGHTS = "none"
# Contenders, the most telling first; the last ones are left out first if the minutes are few.
RANDOM, LONGER, IMAGENET = "random", "random_longer", "imagenet"
MOCO, KSCL, CONTINUED = "moco_v2", "kscl", "kscl_from_imagenet"
CONTENDERS = (RANDOM, LONGER, IMAGENET, KSCL, MOCO, CONTINUED)
FEWEST_CONTENDERS = (RANDOM, LONGER, IMAGENET, KSCL)
OF_IMAGENET = (IMAGENET, CONTINUED)
PRETRAINED = (MOCO, KSCL, CONTINUED)
# Seconds of one GPU of the paper's: an image of an epoch at K = 1 (16 minutes on 8 V100), and a
# fine-tuning (24,000 iterations of 0.55 s on 8, Detectron2's published time).
GPU_IMAGE_SECONDS, GPU_DETECTION_SECONDS, GPU_EPOCHS = 8 * 16 * 60 / 1_281_167, 8 * 13_200, 200
FROM_FILE = "what is not said below is in this file of configs/"
DIFFERS = "what differs from that file"
GROUPS = "keys are shuffled among so many parts of the batch, as among MoCo's eight GPUs"
WHERE_IT_CONTINUES = "the start; the projector alone learns in the first epoch"
PAPERS = "pretrain/kscl_k5_rho40_r50_200ep.yaml"
ABOUT = {
    RANDOM: "no pretraining",
    LONGER: "no pretraining: its time is spent on the evaluation's training",
    IMAGENET: "what you can download: trained on a million labeled photos",
    MOCO: "the method that KSCL extends: one key per image",
    KSCL: "several keys per image; each pretraining takes as many seconds",
    CONTINUED: "KSCL on your images, from the downloaded weights on",
}
ABOUT_LINEAR = "a linear classifier on features that stay as they are"
STARTS_OF_TRAINING = "A few minutes on a CPU compare starts of training, not finished detectors."

Settings = dict[str, tuple[Any, str]]  # value and reason by key


# The network that all contenders share


@dataclass(frozen=True)
class Network:
    """A timm network, and its ImageNet weights if there are any."""

    arch: str
    kwargs: dict[str, Any]
    weights: str = ""
    colors: tuple[list[float], ...] = ()  # mean and std of their input
    left_out: str = ""  # why there are none

    @property
    def detection(self) -> str:
        """Return the config of a detector that takes it: Detectron2's C4 has ResNets of its own."""
        return FPN if self.weights else C4

    @property
    def inputs(self) -> Settings:
        """Return the settings of a pretraining that these weights ask for."""
        why = "as the ImageNet weights expect it"
        keys = ("INPUT.MEAN", "INPUT.STD")
        return {key: (color, why) for key, color in zip(keys, self.colors, strict=False)}

    @property
    def contenders(self) -> tuple[str, ...]:
        """Return all contenders that this network allows."""
        return tuple(it for it in CONTENDERS if self.weights or it not in OF_IMAGENET)


# The paper's ResNet-50 with 8 to 64 channels: half a million weights train on a CPU.
NARROW = Network("resnet50", {"channels": [8, 16, 32, 64], "zero_init_last": True})


def find_network(weights: str, otherwise: Network) -> Network:
    """Return the network of named weights, in a cache or fetched; another one if there are none."""
    from kscl.backbone_file import checked_hash, find_weights  # slow to import

    if weights == NO_WEIGHTS:
        return replace(otherwise, left_out="--weights none")
    try:
        found = find_weights(weights)
        assert found is not None  # it may be downloaded
        if found.description is None:
            raise KsclError(f"{weights} does not name its network; use timm:NAME or hf-hub:NAME.")
        checked_hash(found, weights)
    except KsclError as error:
        return replace(otherwise, left_out=str(error))
    known = found.description
    return Network(known.arch, known.kwargs, weights, (list(known.mean), list(known.std)))


# Facts: the images and boxes of a prepared set


@dataclass(frozen=True)
class Boxes:
    """The annotated images to train a detector on."""

    class_names: tuple[str, ...]
    sides: np.ndarray  # root of each box's area, in pixels
    shorts: np.ndarray  # short side of the image of each box
    num_train: int
    num_test: int

    @cached_property
    def short_side(self) -> int:
        """Return the short side of the detector's input: the median object is then well visible."""
        area = min(1.0, float(np.median((self.sides / self.shorts) ** 2)))
        wanted = OBJECT_PIXELS / math.sqrt(area)
        return int(8 * round(min(max(wanted, SHORT_SIDES[0]), SHORT_SIDES[1]) / 8))

    @cached_property
    def anchors(self) -> list[int]:
        """Return sizes at this input size: centers of k-means over the logarithm of the sides."""
        logs = np.log(np.maximum(self.sides / self.shorts * self.short_side, 4.0))
        starts = np.quantile(logs, [0.1, 0.5, 0.9])[:, None]
        with warnings.catch_warnings():  # boxes of one size leave clusters empty, at their starts
            warnings.filterwarnings("ignore", "One of the clusters is empty")
            centers, _ = kmeans2(logs[:, None], starts, minit="matrix", missing="warn")
        return sorted({round(float(np.exp(center))) for center in centers[:, 0]})


@dataclass(frozen=True)
class Facts:
    """What is known about a prepared set."""

    root: Path
    photos: str  # the images that are not to test on, as DATA.TRAIN takes them
    num_photos: int
    pretrain: str  # the same, or their tiles if there are any
    num_pretrain: int
    boxes: Boxes | None
    classes: Path | None  # the folder with train/ and val/ for a probe
    first_image: str

    @property
    def name(self) -> str:
        """Return the name of the folder, also if it was given as a dot."""
        return self.root.resolve().name

    @property
    def has_tiles(self) -> bool:
        """Return whether photos are pretrained on in tiles."""
        return self.pretrain != self.photos

    @property
    def batch(self) -> int:
        """Return the batch of a pretraining on a CPU."""
        refuse_few(self.num_pretrain)
        return min(MOST_BATCH, 2 ** int(math.log2(self.num_pretrain // 2)))

    @property
    def queue(self) -> int:
        """Return the length of its queue, less than the number of images."""
        return min(MOST_QUEUE, max(self.batch, (self.num_pretrain - 1) // self.batch * self.batch))

    @property
    def epoch_steps(self) -> int:
        """Return the number of batches that the images to pretrain on fill."""
        return self.num_pretrain // self.batch


def refuse_few(images: int) -> None:
    """Raise KsclError if there are too few images for a batch and a queue."""
    if images < FEWEST_IMAGES:
        what = f"{images} image{' is' if images == 1 else 's are'}"
        raise KsclError(f"{what} too few to pretrain on. Bring at least {FEWEST_IMAGES}.")


def look_at(root: Path) -> Facts:
    """Return the facts about a folder of kscl prepare own."""
    classes = root / "classes"
    has_boxes = (root / "ImageSets/Main" / f"{TRAIN_SPLIT}.txt").is_file()
    has_classes = (classes / "train").is_dir() and (classes / "val").is_dir()
    if not has_boxes and not has_classes:
        raise KsclError(
            f"{root} is not a prepared data set. Make one: kscl prepare own "
            "--images DIR --annotations DIR --output-dir data/mine."
        )
    photos = f"voc:{root}:{PRETRAIN_SPLIT}" if has_boxes else str(classes / "train")
    tiles = root / TILES if has_boxes else None
    pretrain = str(tiles) if tiles is not None and tiles.is_dir() else photos
    logging.getLogger("kscl").setLevel(logging.WARNING)
    source = open_source(pretrain)
    return Facts(
        *(root, photos, len(open_source(photos)), pretrain, len(source)),
        boxes=_boxes(root) if has_boxes else None,
        classes=classes if has_classes else None,
        first_image=source.name(0),
    )


def _boxes(root: Path) -> Boxes:
    train = read_voc(root, TRAIN_SPLIT).checked()
    test = read_voc(root, TEST_SPLIT).checked()
    found = [(image, thing.box) for image in train.images for thing in image.objects]
    corners = np.array([box for _, box in found])
    areas = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
    shorts = np.array([min(image.width, image.height) for image, _ in found], float)
    return Boxes(train.class_names, np.sqrt(areas), shorts, len(train.images), len(test.images))


# Lengths


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
    probe_fit: float = 0.0  # of it, the training of the linear classifier
    slowdown: float = 1.0  # by other programs while it was measured; not in the seconds above


def fastest_costs(facts: Facts) -> Costs:
    """Return costs that a fast machine still has: what they do not allow need not be measured."""
    return Costs(
        moco_start=3.0,
        moco_epoch=0.05 * facts.epoch_steps,
        kscl_epoch=0.1 * facts.epoch_steps,
        convert=3.0,
        detection_start=8.0,
        iteration=0.1,
        probe=3.0,
        probe_fit=0.5,
    )


@dataclass(frozen=True)
class Plan:
    """What the minutes decide."""

    comparison: Comparison
    moco_epochs: int
    kscl_epochs: int
    iterations: int
    seconds: dict[str, float]  # of one stage, by kind
    longer: dict[str, float]  # times that random_longer is trained as long, by evaluation
    longer_seconds: dict[str, float]  # of its stages
    total: float  # seconds of the whole suite, from its check to its last stage

    def trains(self, steps: int, iterations: int) -> bool:
        """Return whether each pretraining has so many steps, each detector so many iterations."""
        facts = self.comparison.facts
        fine_tuned = facts.boxes is None or self.iterations >= iterations
        return fine_tuned and self.kscl_epochs * facts.epoch_steps >= steps


@dataclass(frozen=True)
class Comparison:
    """What is compared on which data, by so many stages at a time."""

    facts: Facts
    costs: Costs
    jobs: int
    seeds: int
    contenders: tuple[str, ...] = CONTENDERS

    def longest_plan(self, minutes: float) -> Plan:
        """Return the plan that trains longest and, with its reserve, ends within the minutes."""
        budget = minutes * 60 * RESERVE
        low, high = 0.0, budget * self.jobs  # seconds of training per seed
        while high - low > 1:
            middle = (low + high) / 2
            fits = self.plan(middle).total <= budget
            low, high = (middle, high) if fits else (low, middle)
        return self.plan(low)

    def least_minutes(self, steps: int, iterations: int) -> float:
        """Return the minutes in which all train for so many steps and iterations."""
        minutes = 1.0
        while not self.longest_plan(minutes).trains(steps, iterations):
            minutes *= 1.1
        return minutes

    def plan(self, training: float) -> Plan:
        """Return the plan that trains so many seconds per seed, all contenders together.

        What the shortest useful pretrainings leave goes to the detectors until they have enough
        iterations: a difference between detectors that find nothing says nothing. A random start
        gets the seconds of a pretraining for each evaluation that trains something.
        """
        facts, costs, contenders = self.facts, self.costs, self.contenders
        detectors, iterations = len(contenders), 0
        trained = (facts.boxes is not None) + (facts.classes is not None)
        pretrainings = len([it for it in contenders if it in PRETRAINED])
        pretrainings += trained if LONGER in contenders else 0
        if facts.boxes is not None:
            shortest = math.ceil(FEWEST_STEPS / facts.epoch_steps) * costs.kscl_epoch
            left = training - pretrainings * shortest
            first = min(ENOUGH_ITERATIONS, left / detectors / costs.iteration)
            fair = min(MOST_ITERATIONS, training * DETECTION_PART / detectors / costs.iteration)
            iterations = max(0, int(max(first, fair)))
        pretraining = max(0.0, training - detectors * iterations * costs.iteration) / pretrainings
        moco = min(MOST_EPOCHS, int(pretraining / costs.moco_epoch))
        kscl = min(MOST_EPOCHS, int(moco * costs.moco_epoch / costs.kscl_epoch))
        spent = moco * costs.moco_epoch
        seconds = {"pretrain": costs.moco_start + spent, "basis": costs.moco_start}
        evaluations: list[list[str]] = []
        longer: dict[str, float] = {}
        if facts.boxes is not None:
            seconds["convert"] = costs.convert
            seconds["detection"] = costs.detection_start + iterations * costs.iteration
            longer["detection"] = _times(spent, iterations * costs.iteration)
            evaluations.append(["convert", "detection"])
        if facts.classes is not None:
            seconds |= {"linear": costs.probe, "knn": costs.probe}
            longer["linear"] = _times(spent, costs.probe_fit)
            evaluations += [["linear"], ["knn"]]
        of_longer = {kind: seconds[kind] + spent for kind in longer}
        before = costs.moco_start + costs.convert  # the suite checks every stage before the first
        total = before + self.makespan(seconds, of_longer, evaluations)
        return Plan(self, moco, kscl, iterations, seconds, longer, of_longer, total)

    def makespan(
        self,
        seconds: dict[str, float],
        of_longer: dict[str, float],
        evaluations: list[list[str]],
    ) -> float:
        """Return when the last stage ends if a free place takes the first stage that can run."""
        stages: list[tuple[float, int]] = []  # (seconds, number of the stage it waits for, or -1)
        for contender in self.contenders:
            times = seconds | of_longer if contender == LONGER else seconds
            for _ in range(self.seeds):
                start = -1
                if contender in PRETRAINED:
                    start = len(stages)
                    stages += [(times["pretrain"], -1), (times["basis"], start)]
                for chain in evaluations:
                    need = start
                    for kind in chain if contender != LONGER or chain[-1] in of_longer else []:
                        stages.append((times[kind], need))
                        need = len(stages) - 1
        ends: dict[int, float] = {-1: 0.0}  # of stages that are done or running
        free = [0.0] * self.jobs
        while len(ends) <= len(stages):
            now = min(free)
            place = free.index(now)
            for number, (taken, need) in enumerate(stages):
                if number not in ends and ends.get(need, math.inf) <= now:
                    free[place] = ends[number] = now + taken
                    break
            else:  # wait for a stage that is running
                free[place] = min(end for end in ends.values() if end > now)
        return max(ends.values())


def choose_lengths(
    facts: Facts,
    costs: Costs,
    minutes: float,
    cores: int,
    seeds: int | None = None,
    contenders: tuple[str, ...] = CONTENDERS,
) -> Plan:
    """Fit contenders, epochs and iterations into the minutes.

    As many contenders as train well with three seeds, and one seed if not even the fewest do.
    """
    jobs = max(1, min(cores, 3))
    fewest = len([it for it in contenders if it in FEWEST_CONTENDERS])
    for count in [seeds] if seeds else [SEEDS, 1]:
        for number in range(len(contenders), fewest - 1, -1):  # the last one is left out first
            comparison = Comparison(facts, costs, jobs, count, contenders[:number])
            plan = comparison.longest_plan(minutes)
            if plan.trains(GOOD_STEPS, GOOD_ITERATIONS):
                return plan
    if not plan.trains(FEWEST_STEPS, FEWEST_ITERATIONS):
        least = comparison.least_minutes(FEWEST_STEPS, FEWEST_ITERATIONS)
        what = "comparison" if count == 1 else f"comparison with {count} seeds"
        raise KsclError(
            f"{minutes:g} minutes are too few: the shortest useful {what} takes about {least:.0f} "
            f"here. Write --minutes {math.ceil(least)}."
        )
    return plan


def minutes_for_three(comparison: Comparison) -> int:
    """Return the minutes in which the same contenders train well with three seeds."""
    three = replace(comparison, seeds=SEEDS)
    return math.ceil(three.least_minutes(GOOD_STEPS, GOOD_ITERATIONS))


def _times(more: float, seconds: float) -> float:
    """Return how many times as long something takes with so many seconds more, in three digits."""
    return float(f"{1 + more / max(seconds, 0.01):.3g}")


# Settings and their reasons


def batch_norm_groups(batch: int) -> int:
    """Return the BatchNorm groups of one process: several of 4 images rather than one."""
    return max(1, min(MOST_GROUPS, batch // GROUP), min(2, batch // 4))


def pretrain_settings(facts: Facts, network: Network, epochs: int) -> Settings:
    """Return the settings of a pretraining, on top of pretrain/small_moco.yaml."""
    what = "tiles" if facts.has_tiles else "images"
    cut = f" of {facts.num_photos} images: crops of a whole one would show different objects"
    source = f"{facts.num_pretrain} {what}{cut if facts.has_tiles else ''}; none like a test image"
    jitter = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1, "p": 0.8}
    augment = [
        {"op": "random_resized_crop", "scale": CROP},
        {"op": "color_jitter", **jitter},
        {"op": "grayscale", "p": 0.2},
        {"op": "horizontal_flip", "p": 0.5},
    ]
    queue = (
        f"shorter than the {facts.num_pretrain} {what}: a longer queue would hold the query's own "
        "one"
    )
    arguments = {"BACKBONE.KWARGS": (network.kwargs, "its width, as of all contenders")}
    return {
        "DATA.TRAIN": (facts.pretrain, source),
        "BACKBONE.NAME": (network.arch, "the network of all contenders"),
        **(arguments if network.kwargs else {}),
        **network.inputs,
        "INPUT.SIZE": (VIEW, "small views: on a CPU, more epochs help more than more pixels"),
        "SOLVER.BATCH_SIZE": (facts.batch, f"at most half of the {what}"),
        "KEY_ENCODER.BATCH_NORM_GROUPS": (batch_norm_groups(facts.batch), GROUPS),
        "DICTIONARY.QUEUE_LENGTH": (facts.queue, queue),
        **_epochs(epochs),
        "AUGMENT": (augment, "large crops, so that two of them share an object"),
    }


def kscl_settings(epochs: int) -> Settings:
    """Return what makes the same pretraining KSCL."""
    similarity = "a query is compared with the subspace of several keys, not with one"
    return {
        "METHOD.SIMILARITY": ("projection", similarity),
        "METHOD.NUM_SHOTS": (SHOTS_OF_KSCL, "K, the number of keys of each image"),
        "METHOD.RHO": (0.4, "fraction of the eigenvalues' sum that a subspace keeps"),
        **_epochs(epochs),
    }


def _epochs(epochs: int) -> Settings:
    warmup = "a tenth of the epochs, in which the learning rate rises"
    return {
        "SOLVER.EPOCHS": (epochs, _length(epochs, MOST_EPOCHS)),
        "SOLVER.WARMUP_EPOCHS": (round(epochs / 10, 1), warmup),
        "CHECKPOINT.PERIOD_EPOCHS": (
            max(1, epochs // 10),
            "about ten checkpoints in all, to resume from",
        ),
    }


def detection_settings(facts: Facts, network: Network, iterations: int) -> Settings:
    """Return the settings of the fine-tuning, on top of the network's config."""
    assert facts.boxes is not None
    names, short = facts.boxes.class_names, facts.boxes.short_side
    longest = int(1.5 * short)
    object_size = (
        f"an object of median size then has {OBJECT_PIXELS} pixels, within 128 to 320 for the "
        "whole side"
    )
    falls = "after 80% of the iterations the learning rate falls to a tenth"
    rises = "a sixth of the iterations, in which the learning rate rises"
    few = "few images at a time, for more iterations in the same minutes"
    test = "images to test on; nothing is trained or chosen on them"
    board_name = "the name of this data and schedule on the board"
    return {
        "DATASETS.TRAIN": ([f"voc:{facts.root}:trainval"], "annotated images to fine-tune on"),
        "DATASETS.TEST": ([f"voc:{facts.root}:test"], test),
        "MODEL.ROI_HEADS.NUM_CLASSES": (len(names), ", ".join(names[:8])),
        "MODEL.ANCHOR_GENERATOR.SIZES": (
            [facts.boxes.anchors],
            "k-means over the boxes at this input size",
        ),
        "INPUT.MIN_SIZE_TRAIN": ([short], object_size),
        "INPUT.MAX_SIZE_TRAIN": (longest, "of the longer side: 1.5 times the shorter one"),
        "INPUT.MIN_SIZE_TEST": (short, "tested at the size of training"),
        "INPUT.MAX_SIZE_TEST": (longest, "of the longer side, as in training"),
        "SOLVER.IMS_PER_BATCH": (DETECTOR_BATCH, few),
        "SOLVER.MAX_ITER": (iterations, _length(iterations, MOST_ITERATIONS)),
        "SOLVER.STEPS": ([int(0.8 * iterations)], falls),
        "SOLVER.WARMUP_ITERS": (max(1, iterations // 6), rises),
        "KSCL.PROTOCOL": (
            f"{facts.name}-tiny-{'fpn' if network.detection == FPN else 'c4'}",
            board_name,
        ),
    }


def probe_settings(facts: Facts) -> Settings:
    """Return the settings of both probes."""
    train = "one folder per class, to train the classifier on"
    resize = "the shorter side before the crop: nothing of it is cut off"
    return {
        "DATA.TRAIN": (f"{facts.classes}/train", train),
        "DATA.VAL": (f"{facts.classes}/val", "and to test it on"),
        "INPUT.SIZE": (VIEW, "as large as the views of pretraining"),
        "INPUT.RESIZE": (VIEW, resize),
    }


def _length(chosen: int, most: int) -> str:
    enough = f"no more than {most}, whatever the minutes"
    return "what fits into the minutes" if chosen < most else enough


def _values(settings: Settings) -> dict[str, Any]:
    return {key: value for key, (value, _) in settings.items()}


# Measured costs


def measure(facts: Facts, network: Network, cores: int) -> Costs:
    """Run every kind of stage for a moment; return the seconds of their parts.

    They run side by side as the stages of the suite will, so they slow each other down as those
    do. The seconds are processor time, which another program that is busy just now does not change.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kscl-start-") as name,
        ThreadPoolExecutor(max(1, min(cores, 2))) as threads,
    ):
        folder = Path(name)
        steps = {"SOLVER.MAX_STEPS": MEASURED_STEPS, "SOLVER.WARMUP_EPOCHS": 0}
        steps |= {"LOG.PERIOD": 4, "DATA.NUM_WORKERS": 0}  # all work is in one process
        moco = _values(pretrain_settings(facts, network, 1)) | steps
        kscl = moco | _values(kscl_settings(1)) | steps
        of_detection = threads.submit(_detection, folder, facts, network)
        of_moco = threads.submit(_pretraining, folder / "moco", moco)
        of_kscl = threads.submit(_pretraining, folder / "kscl", kscl)
        of_probe = threads.submit(_probe, folder, facts, network)
        start, moco_step, slowdown = of_moco.result()
        kscl_step = max(moco_step, of_kscl.result()[1])  # more views per image never cost less
        epoch = facts.epoch_steps
        return Costs(
            start,
            epoch * moco_step,
            epoch * kscl_step,
            *of_detection.result(),
            *of_probe.result(),
            slowdown=slowdown,
        )


def _probe(folder: Path, facts: Facts, network: Network) -> tuple[float, float]:
    """Return the seconds of a linear probe, and of its training alone."""
    if facts.classes is None:
        return 0.0, 0.0
    overrides = _values(probe_settings(facts)) | {"BACKBONE.WEIGHTS": RANDOM}
    overrides |= {"BACKBONE.NAME": network.arch, "BACKBONE.KWARGS": network.kwargs}
    seconds = []
    for times in (1.0, MEASURED_LONGER):
        place = folder / f"probe{times:g}"  # with a cache of its own: features are computed twice
        more = {"SOLVER.LONGER": times, "DATA.CACHE_DIR": str(place / "cache")}
        seconds.append(_run_task("linear", place / "run", LINEAR, overrides | more).work)
    return seconds[0], max(0.0, seconds[1] - seconds[0]) / (MEASURED_LONGER - 1)


def _pretraining(folder: Path, overrides: dict[str, Any]) -> tuple[float, float, float]:
    """Return the seconds of all of a pretraining but its steps, of a step, and the slowdown."""
    spent = _run_task("pretrain", folder, PRETRAIN, overrides)
    start = max(0.0, spent.work - MEASURED_STEPS * spent.step)
    return start, spent.step, spent.clock / spent.work


def _detection(folder: Path, facts: Facts, network: Network) -> tuple[float, float, float]:
    """Return the seconds of a conversion, of all of a fine-tuning but its steps, and of a step."""
    if facts.boxes is None:
        return 0.0, 0.0, 0.0
    converted = str(folder / "converted")
    built = (("arch", network.arch), ("arch_kwargs", network.kwargs))
    options = (*built, ("protocol", network.detection), ("output_dir", converted))
    tool = commands()["detection"].prepared_by
    convert = Stage("convert", "convert", tool, converted, inputs=("random",), options=options)
    seconds = run_measured(convert).work
    overrides = _values(detection_settings(facts, network, MEASURED_ITERATIONS))
    overrides |= {"TEST.PRECISE_BN.NUM_ITER": 1}
    spent = _run_task("detection", folder / "run", f"{converted}/config.yaml", overrides)
    more = PRECISE_BN_ITERATIONS / 3 - MEASURED_ITERATIONS
    return seconds, max(0.0, spent.work + more * spent.step), spent.step


def _run_task(kind: str, folder: Path, config: str, overrides: dict[str, Any]) -> Spent:
    overrides = overrides | {"OUTPUT_DIR": str(folder)}
    tool = commands()[kind].module
    return run_measured(Stage(kind, kind, tool, str(folder), config=config, overrides=overrides))


@dataclass(frozen=True)
class Spent:
    """What a program took: seconds of the processor, and seconds on the clock."""

    work: float
    clock: float
    step: float  # processor seconds of a step, without the first ones; 0 if it told of no steps


def run_measured(stage: Stage) -> Spent:
    """Run a stage on one thread; return what it took, with all processes that it started."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    began = time.monotonic()
    marks: dict[int, float] = {}  # processor time by the step that the tool has last told of
    with tempfile.NamedTemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            [*stage.runner, *stage.arguments],
            stdout=said,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
        )
        try:
            # Unlike wait(), wait4() tells the processor's time.
            while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
                for step in STEP.findall(Path(said.name).read_text(errors="replace"))[-1:]:
                    if int(step) not in marks:
                        marks[int(step)] = processor_seconds(process.pid)
                time.sleep(PERIOD)
        except BaseException:
            process.kill()
            raise
        _, status, usage = ended
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            tail = "\n".join(Path(said.name).read_text(errors="replace").strip().splitlines()[-15:])
            failed = " ".join(stage.program)
            raise KsclError(f"A trial of {failed} failed, so nothing was written:\n{tail}")
    clock, work = time.monotonic() - began, usage.ru_utime + usage.ru_stime
    if len(marks) < 2:
        return Spent(work, clock, 0.0)
    (first, before), *_, (last, after) = marks.items()
    return Spent(work, clock, (after - before) / (last - first))


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process; seconds on the clock where the system hides it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# The suite file


def cpu_suite(plan: Plan, network: Network, minutes: float, output_dir: Path) -> str:
    """Return the suite of a machine without GPUs."""
    comparison = plan.comparison
    facts = comparison.facts
    lines = [
        f"# Made by kscl start for {facts.root} and {minutes:g} minutes; change what you like.",
        f"# Estimated: {clock(plan.total)} in all, {estimate(plan)}.",
        *_head(facts, left_out(network, plan), output_dir, comparison.seeds, plan.longer),
        f"jobs: {comparison.jobs}  # stages at the same time, one core each",
        "# Seconds of one stage as measured; those of finished stages replace them.",
        f"estimates: {_rounded(plan.seconds)}",
        "# The page shows what each pretraining makes of this image.",
        f"basis_image: {one_line(facts.first_image)}",
        *_contenders(network, plan.longer, plan.longer_seconds),
    ]
    explained: set[str] = set()
    for contender in (it for it in (MOCO, KSCL, CONTINUED) if it in comparison.contenders):
        epochs = plan.moco_epochs if contender == MOCO else plan.kscl_epochs
        settings = pretrain_settings(facts, network, epochs)
        if contender != MOCO:
            settings |= kscl_settings(epochs)
        if contender == CONTINUED:
            settings["BACKBONE.WEIGHTS"] = (network.weights, WHERE_IT_CONTINUES)
        about, first = ABOUT[contender], not explained
        lines += _entry(contender, about, "pretrain", PRETRAIN, settings, first, explained)
        explained |= set(settings)
    lines += ["evaluations:  # of every contender"]
    if facts.classes is not None:
        probe = probe_settings(facts)
        about = "the classes of the nearest features, without any training"
        lines += _entry("linear", ABOUT_LINEAR, "config", LINEAR, probe, True)
        lines += _entry("knn", about, "config", KNN, probe, explained=probe)
    if facts.boxes is not None:
        lines += [f"  # {STARTS_OF_TRAINING}"]
        about, first = "a Faster R-CNN, fine-tuned from the backbone", facts.classes is None
        settings = detection_settings(facts, network, plan.iterations)
        lines += _entry("detection", about, "config", network.detection, settings, first)
    return "\n".join(lines) + "\n"


def gpu_suite(
    facts: Facts, network: Network, num_gpus: int, output_dir: Path, num_seeds: int = SEEDS
) -> str:
    """Return the suite with the paper's recipes, for GPUs."""
    refuse_few(facts.num_photos)
    queue = min(65536, 2 ** int(math.log2(facts.num_photos - 1)))
    num_gpus = min(num_gpus, queue)
    batch = min(256, queue) // num_gpus * num_gpus
    photos = "all images that are not to test on, at full size"
    shorter = f"shorter than the {facts.num_photos} images; the paper's, for a million, is 65536"
    fewer = "the paper's 256, or what the queue and the GPUs allow; the learning rate follows"
    shared: Settings = {
        "DATA.TRAIN": (facts.photos, photos),
        "DICTIONARY.QUEUE_LENGTH": (queue, shorter),
        "SOLVER.BATCH_SIZE": (batch, fewer),
        **network.inputs,
    }
    if num_gpus == 1:
        shared["KEY_ENCODER.BATCH_NORM_GROUPS"] = (batch_norm_groups(batch), GROUPS)
    spent = GPU_EPOCHS * facts.num_photos * GPU_IMAGE_SECONDS
    times = _times(spent, GPU_DETECTION_SECONDS)
    longer = {"detection": times} if facts.boxes is not None and times > 1 else {}
    missing = left_out(network)
    if not longer:
        missing += [f"Left out: {LONGER}. Pretraining takes less than 1% of the evaluations' time."]
    lines = [
        f"# Made by kscl start for {facts.root}: the paper's recipes, on {num_gpus} GPUs.",
        "# They take hours to days; kscl plan estimates them. For a quick answer, run kscl start",
        "# with --cpu.",
        *_head(facts, missing, output_dir, num_seeds, longer),
        f"num_gpus: {num_gpus}  # of every stage; batches are shared out among them",
        "pretrain_overrides:  # of all pretrainings",
        *_lines(shared, "  "),
        *_contenders(network, longer),
        "  # the method that KSCL extends, with one key per image, for 200 epochs",
        "  moco_v2: {pretrain: pretrain/moco_v2_r50_200ep.yaml}",
        "  # the paper's K = 5 and rho = 40%, also for 200 epochs, each of which costs it more",
        f"  kscl: {{pretrain: {PAPERS}}}",
    ]
    if network.weights:
        start: Settings = {"BACKBONE.WEIGHTS": (network.weights, WHERE_IT_CONTINUES)}
        lines += _entry(CONTINUED, ABOUT[CONTINUED], "pretrain", PAPERS, start)
    lines += ["evaluations:  # of every contender"]
    if facts.classes is not None:
        probe = probe_settings(facts)
        paths = {key: probe[key] for key in ("DATA.TRAIN", "DATA.VAL")}
        config = "linear_eval/linear_cached.yaml"
        lines += _entry("linear", ABOUT_LINEAR, "config", config, paths, True)
    if facts.boxes is not None:
        small = detection_settings(facts, network, 1)
        keys = ("DATASETS.TRAIN", "DATASETS.TEST", "MODEL.ROI_HEADS.NUM_CLASSES")
        chosen = {key: small[key] for key in keys}
        chosen["KSCL.PROTOCOL"] = (f"{facts.name}-c4-24k", small["KSCL.PROTOCOL"][1])
        about = "MoCo's Faster R-CNN C4, fine-tuned for 24,000 iterations"
        config = "detection/voc0712_c4_24k_moco.yaml"
        lines += _entry("detection", about, "config", config, chosen, True)
    return "\n".join(lines) + "\n"


def left_out(network: Network, plan: Plan | None = None) -> list[str]:
    """Return which contenders are left out and why, a line each."""
    lines = []
    if not network.weights:
        lines.append(f"Left out: {' and '.join(OF_IMAGENET)}. {network.left_out}")
    chosen = network.contenders if plan is None else plan.comparison.contenders
    if few := [it for it in network.contenders if it not in chosen]:
        lines.append(f"Left out: {' and '.join(few)}. The minutes are too few for them.")
    return [" ".join(line.split()) for line in lines]


def estimate(plan: Plan) -> str:
    """Return the seconds of one stage of each kind in words, without the picture of a basis."""
    told = {kind: seconds for kind, seconds in plan.seconds.items() if kind != "basis"}
    return ", ".join(f"{kind} {clock(seconds)}" for kind, seconds in told.items())


def _head(
    facts: Facts,
    missing: Sequence[str],
    output_dir: Path,
    seeds: int,
    longer: dict[str, float],
) -> list[str]:
    """Return what every suite begins with; `missing` are lines about contenders left out."""
    title = f"{facts.name}, does pretraining help?"
    return [
        *(f"# {line}" for line in missing),
        f"name: {one_line(title)}  # of the board",
        f"output_dir: {one_line(str(output_dir))}  # for all runs and the board",
        "# Several seeds, so that a difference can be told from noise."
        if seeds > 1
        else "# One seed cannot answer: how much seeds differ is not measured. [0, 1, 2] does.",
        f"seeds: {list(range(seeds))}",
        "# The question is what pretraining adds, also if its time goes into training instead.",
        f"baseline: {one_line([RANDOM, LONGER] if longer else [RANDOM])}",
    ]


def _contenders(
    network: Network, longer: dict[str, float], seconds: dict[str, float] | None = None
) -> list[str]:
    """Return the start of the contenders: those without a pretraining."""
    lines = ["contenders:  # what is compared; all of them have the same network"]
    for name in (RANDOM, LONGER) if longer else (RANDOM,):
        lines += [f"  {name}:  # {ABOUT[name]}"]
        lines += [f"    arch: {network.arch}  # the network of all contenders"]
        if network.kwargs:
            lines += [f"    kwargs: {one_line(network.kwargs)}  # its width"]
    if longer:
        lines += ["    # so many times as long as the others, which takes a pretraining's seconds"]
        lines += [f"    longer: {one_line(longer)}"]
    if seconds:
        lines += ["    # seconds of one stage", f"    estimates: {_rounded(seconds)}"]
    if network.weights:
        lines += [f"  {IMAGENET}:  # {ABOUT[IMAGENET]}", f"    file: {network.weights}  # by name"]
    return lines


def _rounded(seconds: dict[str, float]) -> str:
    return one_line({kind: round(value) for kind, value in seconds.items()})


def _entry(
    name: str,
    about: str,
    key: str,
    file: str,
    settings: Settings,
    is_first: bool = False,
    explained: Container[str] = (),
) -> list[str]:
    """Return a contender or an evaluation with its config and overrides.

    The first one says how the two belong together.
    """
    return [
        f"  {name}:  # {about}",
        f"    {key}: {file}" + f"  # {FROM_FILE}" * is_first,
        "    overrides:" + f"  # {DIFFERS}" * is_first,
        *_lines(settings, "      ", explained),
    ]


def _lines(settings: Settings, indent: str, explained: Container[str] = ()) -> list[str]:
    """Return settings, each after its reason unless it is explained elsewhere."""
    lines = []
    for key, (value, reason) in settings.items():
        lines += [] if key in explained else [f"{indent}# {reason}"]
        lines.append(f"{indent}{key}: {one_line(value)}")
    return lines
