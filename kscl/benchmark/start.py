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

    @property
    def relative_area(self) -> float:
        """The median area of a box as a fraction of a square of its image's short side."""
        return float(np.median((self.sides / self.shorts) ** 2))

    def anchors(self, short_side: int) -> list[int]:
        """Return sizes at this input size: centers of k-means over the logarithm of the sides."""
        logs = np.log(np.maximum(self.sides / self.shorts * short_side, 4.0))
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


# Sizes and lengths


@dataclass(frozen=True)
class Sizes:
    """What the data alone decides."""

    batch: int
    queue: int
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
    probe_fit: float = 0.0  # of it, the training of the linear classifier
    slowdown: float = 1.0  # by other programs while it was measured; not in the seconds above


def fastest_costs(facts: Facts) -> Costs:
    """Return costs that a fast machine still has: what they do not allow need not be measured."""
    steps = epoch_steps(facts)
    return Costs(
        moco_start=3.0,
        moco_epoch=0.05 * steps,
        kscl_epoch=0.1 * steps,
        convert=3.0,
        detection_start=8.0,
        iteration=0.1,
        probe=3.0,
        probe_fit=0.5,
    )


@dataclass(frozen=True)
class Plan:
    """What the minutes decide."""

    contenders: tuple[str, ...]
    seeds: int
    jobs: int
    moco_epochs: int
    kscl_epochs: int
    iterations: int
    seconds: dict[str, float]  # of one stage, by kind
    longer: dict[str, float]  # times that random_longer is trained as long, by evaluation
    longer_seconds: dict[str, float]  # of its stages
    total: float  # seconds of the whole suite, from its check to its last stage


def choose_sizes(facts: Facts) -> Sizes:
    """Choose batch, queue, crops, input size and anchors."""
    images = facts.num_pretrain
    refuse_few(images)
    batch = min(MOST_BATCH, 2 ** int(math.log2(images // 2)))
    queue = min(MOST_QUEUE, max(batch, (images - 1) // batch * batch))
    if facts.boxes is None:
        return Sizes(batch, queue)
    area = min(1.0, facts.boxes.relative_area)
    wanted = OBJECT_PIXELS / math.sqrt(area)
    short = int(8 * round(min(max(wanted, SHORT_SIDES[0]), SHORT_SIDES[1]) / 8))
    return Sizes(batch, queue, short, tuple(facts.boxes.anchors(short)))


def batch_norm_groups(batch: int) -> int:
    """Return the BatchNorm groups of one process: several of 4 images rather than one."""
    return max(1, min(MOST_GROUPS, batch // GROUP), min(2, batch // 4))


def epoch_steps(facts: Facts) -> int:
    """Return the number of batches that the images to pretrain on fill."""
    return facts.num_pretrain // choose_sizes(facts).batch


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
    for count in [seeds] if seeds else [SEEDS, 1]:
        for chosen in fewer_and_fewer(contenders):
            plan = longest_plan(facts, costs, minutes, jobs, count, chosen)
            if _trains(facts, plan, GOOD_STEPS, GOOD_ITERATIONS):
                return plan
    if not _trains(facts, plan, FEWEST_STEPS, FEWEST_ITERATIONS):
        fewest = (FEWEST_STEPS, FEWEST_ITERATIONS)
        least = _least_minutes(facts, costs, jobs, plan.seeds, plan.contenders, *fewest)
        what = "comparison" if plan.seeds == 1 else f"comparison with {plan.seeds} seeds"
        raise KsclError(
            f"{minutes:g} minutes are too few: the shortest useful {what} takes about {least:.0f} "
            f"here. Write --minutes {math.ceil(least)}."
        )
    return plan


def fewer_and_fewer(contenders: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return all contenders, then without the last, down to the fewest that answer anything."""
    fewest = len([it for it in contenders if it in FEWEST_CONTENDERS])
    return [contenders[:count] for count in range(len(contenders), fewest - 1, -1)]


def minutes_for_three(facts: Facts, costs: Costs, plan: Plan) -> int:
    """Return the minutes in which the contenders of a plan train well with three seeds."""
    good = (GOOD_STEPS, GOOD_ITERATIONS)
    return math.ceil(_least_minutes(facts, costs, plan.jobs, SEEDS, plan.contenders, *good))


def longest_plan(
    facts: Facts,
    costs: Costs,
    minutes: float,
    jobs: int,
    seeds: int,
    contenders: tuple[str, ...] = CONTENDERS,
) -> Plan:
    """Return the plan that trains longest and, with its reserve, ends within the minutes."""
    budget = minutes * 60 * RESERVE
    low, high = 0.0, budget * jobs  # seconds of training per seed
    while high - low > 1:
        middle = (low + high) / 2
        fits = plan_of(facts, costs, middle, jobs, seeds, contenders).total <= budget
        low, high = (middle, high) if fits else (low, middle)
    return plan_of(facts, costs, low, jobs, seeds, contenders)


def plan_of(
    facts: Facts,
    costs: Costs,
    training: float,
    jobs: int,
    seeds: int,
    contenders: tuple[str, ...] = CONTENDERS,
) -> Plan:
    """Return the plan that trains so many seconds per seed, all contenders together.

    What the shortest useful pretrainings leave goes to the detectors until they have enough
    iterations: a difference between detectors that find nothing says nothing. A random start gets
    the seconds of a pretraining for each evaluation that trains something.
    """
    detectors, iterations = len(contenders), 0
    trained = (facts.boxes is not None) + (facts.classes is not None)
    pretrainings = len([it for it in contenders if it in PRETRAINED])
    pretrainings += trained if LONGER in contenders else 0
    if facts.boxes is not None:
        shortest = math.ceil(FEWEST_STEPS / epoch_steps(facts)) * costs.kscl_epoch
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
    total = before + _makespan(contenders, seconds, of_longer, evaluations, jobs, seeds)
    lengths = (moco, kscl, iterations)
    return Plan(contenders, seeds, jobs, *lengths, seconds, longer, of_longer, total)


def _times(more: float, seconds: float) -> float:
    """Return how many times as long something takes with so many seconds more, in three digits."""
    return float(f"{1 + more / max(seconds, 0.01):.3g}")


def _makespan(
    contenders: Sequence[str],
    seconds: dict[str, float],
    of_longer: dict[str, float],
    evaluations: list[list[str]],
    jobs: int,
    seeds: int,
) -> float:
    """Return when the last stage ends if a free place takes the first stage that can run."""
    stages: list[tuple[float, int]] = []  # (seconds, number of the stage it waits for, or -1)
    for contender in contenders:
        times = seconds | of_longer if contender == LONGER else seconds
        for _ in range(seeds):
            start = -1
            if contender in PRETRAINED:
                start = len(stages)
                stages += [(times["pretrain"], -1), (times["basis"], start)]
            for chain in evaluations:
                if contender == LONGER and chain[-1] not in of_longer:
                    continue
                first = len(stages)
                stages += [
                    (times[kind], start if not i else first + i - 1) for i, kind in enumerate(chain)
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
            free[place] = ends[ready[0]] = now + stages[ready[0]][0]
        else:  # wait for a stage that is running
            free[place] = min(end for end in ends.values() if end > now)
    return max(ends.values())


def _trains(facts: Facts, plan: Plan, steps: int, iterations: int) -> bool:
    """Return whether each pretraining has so many steps, and each detector so many iterations."""
    fine_tuned = facts.boxes is None or plan.iterations >= iterations
    return fine_tuned and plan.kscl_epochs * epoch_steps(facts) >= steps


def _least_minutes(
    facts: Facts,
    costs: Costs,
    jobs: int,
    seeds: int,
    contenders: tuple[str, ...],
    steps: int,
    iterations: int,
) -> float:
    minutes = 1.0
    while not _trains(
        facts, longest_plan(facts, costs, minutes, jobs, seeds, contenders), steps, iterations
    ):
        minutes *= 1.1
    return minutes


# Settings and their reasons


def pretrain_settings(facts: Facts, sizes: Sizes, network: Network, epochs: int) -> Settings:
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
        "SOLVER.BATCH_SIZE": (sizes.batch, f"at most half of the {what}"),
        "KEY_ENCODER.BATCH_NORM_GROUPS": (batch_norm_groups(sizes.batch), GROUPS),
        "DICTIONARY.QUEUE_LENGTH": (sizes.queue, queue),
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


def detection_settings(facts: Facts, sizes: Sizes, network: Network, iterations: int) -> Settings:
    """Return the settings of the fine-tuning, on top of the network's config."""
    assert facts.boxes is not None
    names, short, longest = facts.boxes.class_names, sizes.short_side, int(1.5 * sizes.short_side)
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
            [list(sizes.anchors)],
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


def measure(facts: Facts, sizes: Sizes, network: Network, cores: int) -> Costs:
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
        moco = _values(pretrain_settings(facts, sizes, network, 1)) | steps
        kscl = moco | _values(kscl_settings(1)) | steps
        of_detection = threads.submit(_detection, folder, facts, sizes, network)
        of_moco = threads.submit(_pretraining, folder / "moco", moco)
        of_kscl = threads.submit(_pretraining, folder / "kscl", kscl)
        of_probe = threads.submit(_probe, folder, facts, network)
        start, moco_step, slowdown = of_moco.result()
        kscl_step = max(moco_step, of_kscl.result()[1])  # more views per image never cost less
        epoch = epoch_steps(facts)
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


def _detection(
    folder: Path, facts: Facts, sizes: Sizes, network: Network
) -> tuple[float, float, float]:
    """Return the seconds of a conversion, of all of a fine-tuning but its steps, and of a step."""
    if facts.boxes is None:
        return 0.0, 0.0, 0.0
    converted = str(folder / "converted")
    built = (("arch", network.arch), ("arch_kwargs", network.kwargs))
    options = (*built, ("protocol", network.detection), ("output_dir", converted))
    tool = commands()["detection"].prepared_by
    convert = Stage("convert", "convert", tool, converted, inputs=("random",), options=options)
    seconds = run_measured(convert).work
    overrides = _values(detection_settings(facts, sizes, network, MEASURED_ITERATIONS))
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
    marks: list[tuple[int, float]] = []  # a step that the tool tells of, and its processor time
    with tempfile.NamedTemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            [*stage.runner, *stage.arguments],
            stdout=said,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
        )
        try:
            ended, status, usage = 0, 0, None
            while not ended:  # unlike wait(), wait4() tells the processor's time
                ended, status, usage = os.wait4(process.pid, os.WNOHANG)
                if not ended:
                    marks += _new_mark(Path(said.name), marks, process.pid)
                    time.sleep(PERIOD)
        except BaseException:
            process.kill()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            tail = "\n".join(Path(said.name).read_text(errors="replace").strip().splitlines()[-15:])
            failed = " ".join(stage.program)
            raise KsclError(f"A trial of {failed} failed, so nothing was written:\n{tail}")
    assert usage is not None
    clock, work = time.monotonic() - began, usage.ru_utime + usage.ru_stime
    if len(marks) < 2:
        return Spent(work, clock, 0.0)
    (first, before), (last, after) = marks[0], marks[-1]
    return Spent(work, clock, (after - before) / (last - first))


def _new_mark(log: Path, marks: Sequence[tuple[int, float]], pid: int) -> list[tuple[int, float]]:
    """Return the last step that the log tells of with the time so far, if it is a new one."""
    told = STEP.findall(log.read_text(errors="replace"))
    if not told or (marks and int(told[-1]) == marks[-1][0]):
        return []
    return [(int(told[-1]), processor_seconds(pid))]


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process; seconds on the clock where the system hides it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# The suite file


def cpu_suite(
    facts: Facts, sizes: Sizes, network: Network, plan: Plan, minutes: float, output_dir: Path
) -> str:
    """Return the suite of a machine without GPUs."""
    lines = [
        f"# Made by kscl start for {facts.root} and {minutes:g} minutes; change what you like.",
        f"# Estimated: {clock(plan.total)} in all, {estimate(plan)}.",
        *(f"# {line}" for line in left_out(network, plan)),
        *_head(facts, output_dir),
        "# Several seeds, so that a difference can be told from noise."
        if plan.seeds > 1
        else "# One seed cannot answer: how much seeds differ is not measured. [0, 1, 2] does.",
        f"seeds: {list(range(plan.seeds))}",
        f"jobs: {plan.jobs}  # stages at the same time, one core each",
        "# Seconds of one stage as measured; those of finished stages replace them.",
        f"estimates: {_rounded(plan.seconds)}",
        "# The question is what pretraining adds, also if its time goes into training instead.",
        f"baseline: [{RANDOM}, {LONGER}]",
        "# The page shows what each pretraining makes of this image.",
        f"basis_image: {one_line(facts.first_image)}",
        "contenders:  # what is compared; all of them have the same network",
    ]
    moco = pretrain_settings(facts, sizes, network, plan.moco_epochs)
    kscl = pretrain_settings(facts, sizes, network, plan.kscl_epochs)
    kscl |= kscl_settings(plan.kscl_epochs)
    explained: set[str] = set()
    for contender in (it for it in ABOUT if it in plan.contenders):
        if contender in (RANDOM, LONGER):
            lines += _random(contender, network, plan.longer)
            if contender == LONGER:
                lines += ["    # seconds of one stage"]
                lines += [f"    estimates: {_rounded(plan.longer_seconds)}"]
        elif contender == IMAGENET:
            lines += _imagenet(network)
        else:
            settings = dict(moco if contender == MOCO else kscl)
            if contender == CONTINUED:
                settings["BACKBONE.WEIGHTS"] = (network.weights, WHERE_IT_CONTINUES)
            title = "" if explained else DIFFERS
            lines += [f"  {contender}:  # {ABOUT[contender]}"]
            lines += [f"    pretrain: {PRETRAIN}{'' if explained else f'  # {FROM_FILE}'}"]
            lines += _overrides(settings, explained=explained, title=title)
            explained |= set(settings)
    lines += ["evaluations:  # of every contender"]
    if facts.classes is not None:
        lines += ["  linear:  # a linear classifier on features that stay as they are"]
        lines += [f"    config: {LINEAR}  # {FROM_FILE}"]
        lines += _overrides(probe_settings(facts))
        lines += ["  knn:  # the classes of the nearest features, without any training"]
        probe = probe_settings(facts)
        lines += [f"    config: {KNN}", *_overrides(probe, explained=probe)]
    if facts.boxes is not None:
        lines += [f"  # {STARTS_OF_TRAINING}"]
        lines += ["  detection:  # a Faster R-CNN, fine-tuned from the backbone"]
        note = "" if facts.classes is not None else f"  # {FROM_FILE}"  # said once
        lines += [f"    config: {network.detection}{note}"]
        lines += _overrides(detection_settings(facts, sizes, network, plan.iterations))
    return "\n".join(lines) + "\n"


def left_out(network: Network, plan: Plan | None = None) -> list[str]:
    """Return which contenders are left out and why, a line each."""
    lines = []
    if not network.weights:
        lines.append(f"Left out: {' and '.join(OF_IMAGENET)}. {network.left_out}")
    few = [it for it in network.contenders if plan is not None and it not in plan.contenders]
    if few:
        lines.append(f"Left out: {' and '.join(few)}. The minutes are too few for them.")
    return [" ".join(line.split()) for line in lines]


def _random(contender: str, network: Network, longer: dict[str, float]) -> list[str]:
    about = [f"    arch: {network.arch}  # the network of all contenders"]
    if network.kwargs:
        about += [f"    kwargs: {one_line(network.kwargs)}  # its width"]
    if contender == LONGER:
        about += ["    # so many times as long as the others, which takes a pretraining's seconds"]
        about += [f"    longer: {one_line(longer)}"]
    return [f"  {contender}:  # {ABOUT[contender]}", *about]


def _imagenet(network: Network) -> list[str]:
    return [f"  {IMAGENET}:  # {ABOUT[IMAGENET]}", f"    file: {network.weights}  # by name"]


def _rounded(seconds: dict[str, float]) -> str:
    return one_line({kind: round(value) for kind, value in seconds.items()})


def gpu_suite(
    facts: Facts, network: Network, num_gpus: int, output_dir: Path, num_seeds: int = 3
) -> str:
    """Return the suite with the paper's recipes, for GPUs."""
    refuse_few(facts.num_photos)
    queue = min(65536, 2 ** int(math.log2(facts.num_photos - 1)))
    num_gpus = min(num_gpus, queue)
    batch = min(256, queue) // num_gpus * num_gpus
    groups = batch_norm_groups(batch)
    alone = [f"  # {GROUPS}", f"  KEY_ENCODER.BATCH_NORM_GROUPS: {groups}"]
    spent = GPU_EPOCHS * facts.num_photos * GPU_IMAGE_SECONDS
    longer = {"detection": _times(spent, GPU_DETECTION_SECONDS)} if facts.boxes else {}
    longer = {kind: times for kind, times in longer.items() if times > 1}
    quick = f"Left out: {LONGER}. Pretraining takes less than 1% of the evaluations' time."
    lines = [
        f"# Made by kscl start for {facts.root}: the paper's recipes, on {num_gpus} GPUs.",
        "# They take hours to days; kscl plan estimates them. For a quick answer, run kscl start",
        "# with --cpu.",
        *(f"# {line}" for line in [*left_out(network), *([] if longer else [quick])]),
        *_head(facts, output_dir),
        "# Several seeds: with one, seed-to-seed variation is not measured.",
        f"seeds: {list(range(num_seeds))}",
        f"num_gpus: {num_gpus}  # of every stage; batches are shared out among them",
        "# The question is what pretraining adds, also if its time goes into training instead.",
        f"baseline: [{', '.join([RANDOM, *([LONGER] if longer else [])])}]",
        "pretrain_overrides:  # of all pretrainings",
        "  # all images that are not to test on, at full size",
        f"  DATA.TRAIN: {one_line(facts.photos)}",
        f"  # shorter than the {facts.num_photos} images; the paper's, for a million, is 65536",
        f"  DICTIONARY.QUEUE_LENGTH: {queue}",
        "  # the paper's 256, or less where the queue is shorter or GPUs cannot share it evenly;",
        "  # the learning rate follows",
        f"  SOLVER.BATCH_SIZE: {batch}",
        *_lines(network.inputs, "  "),
        *(alone if num_gpus == 1 else []),
        "contenders:  # what is compared; all of them have the same network",
        *_random(RANDOM, network, {}),
        *(_random(LONGER, network, longer) if longer else []),
        *(_imagenet(network) if network.weights else []),
        "  # the method that KSCL extends, with one key per image, for 200 epochs",
        "  moco_v2: {pretrain: pretrain/moco_v2_r50_200ep.yaml}",
        "  # the paper's K = 5 and rho = 40%, also for 200 epochs, each of which costs it more",
        f"  kscl: {{pretrain: {PAPERS}}}",
    ]
    if network.weights:
        lines += [f"  {CONTINUED}:  # {ABOUT[CONTINUED]}", f"    pretrain: {PAPERS}"]
        lines += _overrides({"BACKBONE.WEIGHTS": (network.weights, WHERE_IT_CONTINUES)})
    lines += ["evaluations:  # of every contender"]
    if facts.classes is not None:
        lines += ["  linear:  # a linear classifier on features that stay as they are"]
        lines += [f"    config: linear_eval/linear_cached.yaml  # {FROM_FILE}"]
        probe = probe_settings(facts)
        paths = {key: probe[key] for key in ("DATA.TRAIN", "DATA.VAL")}
        lines += _overrides(paths, title=DIFFERS)
    if facts.boxes is not None:
        small = detection_settings(facts, choose_sizes(facts), network, 1)
        keys = ("DATASETS.TRAIN", "DATASETS.TEST", "MODEL.ROI_HEADS.NUM_CLASSES")
        chosen = {key: small[key] for key in keys}
        chosen["KSCL.PROTOCOL"] = (f"{facts.name}-c4-24k", small["KSCL.PROTOCOL"][1])
        lines += ["  detection:  # MoCo's Faster R-CNN C4, fine-tuned for 24,000 iterations"]
        lines += [f"    config: detection/voc0712_c4_24k_moco.yaml  # {FROM_FILE}"]
        lines += _overrides(chosen, title=DIFFERS)
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


def _overrides(settings: Settings, *, explained: Container[str] = (), title: str = "") -> list[str]:
    """Return the lines of overrides, each after its reason unless it is explained elsewhere."""
    return [f"    overrides:{title and f'  # {title}'}", *_lines(settings, "      ", explained)]


def _lines(settings: Settings, indent: str, explained: Container[str] = ()) -> list[str]:
    lines = []
    for key, (value, reason) in settings.items():
        lines += [] if key in explained else [f"{indent}# {reason}"]
        lines.append(f"{indent}{key}: {one_line(value)}")
    return lines
