"""The keys that all probes share; the defaults are exactly MoCo's ImageNet probe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from fvcore.common.config import CfgNode

from kscl.config import Broken, Section, key
from kscl.data import labeled
from kscl.keys import WeightsFile

CENTER, FLIP = "center", "flip"
WHOLE = "whole"  # the whole picture, resized to a square; for maps, not for pooled features
SUBSET_KEYS = ("DATA.IMAGES_PER_CLASS", "DATA.FRACTION", "DATA.SUBSET")

where = partial(key, effect=False)  # a key that changes no result


def _numbers_or_none(values: Sequence[float]) -> str | None:
    if values and (len(values) != 3 or not all(isinstance(v, int | float) for v in values)):
        return "must have three numbers (red, green, blue) or none"
    return None


def _interval(most: float, value: Sequence[float]) -> str | None:
    if len(value) != 2 or not 0 < value[0] <= value[1] <= most:
        return f"must be [low, high] with 0 < low <= high <= {most:g}"
    return None


class LinearEval(Section):
    """Keys of `kscl probe`."""

    OUTPUT_DIR = where("output/linear_eval", "The folder for log, classifier and record.")
    LABEL = where("", 'Name of the leaderboard row; "" is the method named in the weights file.')
    SEED = key(0, "Seeds classifier, image order, random crops and random weights.", at_least=0)
    PROBE = key("online", "How the backbone is evaluated.")  # see linear_eval.probe.schema

    class BACKBONE(WeightsFile):
        WEIGHTS = where(  # the hash of the file stands for it
            "",
            """A file of weights, of this project or another one, timm:NAME, hf-hub:OWNER/NAME,
            torchvision:ENUM.MEMBER, an http(s) address (docs/checkpoints.md), or random.""",
        )
        NAME = key("", "The timm model, if the file does not name it.")
        KWARGS = key({}, "Arguments for timm.create_model; any key is allowed.", any_key=True)
        BATCH_NORM = key(
            "auto",
            """BatchNorm statistics: keep those of the weights, or calibrate them on training
            images. auto calibrates random weights only, which would be an unfair baseline without
            statistics.""",
            choices=("auto", "keep", "calibrate"),
        )
        CALIBRATION_IMAGES = key(1024, "Training images for the calibration.", at_least=1)

    class DATA(Section):
        TRAIN = where(  # fingerprints of the data are recorded instead of these two
            "",
            """Training images: a folder with one folder per class. For svm and low_shot, an
            annotated set: voc:FOLDER:SPLIT, coco:FILE.json:IMAGES or a name such as
            voc_2007_trainval. For segmentation, a set in VOC's layout, or a folder with images/
            and masks/.""",
        )
        VAL = where("", "Images to evaluate on, in the same form and with the same classes.")
        IMAGES_PER_CLASS = key(
            0, "Training images drawn from each class (low-shot); 0 uses all.", at_least=0
        )
        FRACTION = labeled.FRACTION
        DRAW = labeled.DRAW
        SUBSET = key(
            "",
            """A list of the training images to use, by file name or path below DATA.TRAIN: a file,
            or simclr_1percent or simclr_10percent, SimCLR's lists for ImageNet, which are
            downloaded.""",
        )
        NUM_WORKERS = where(
            4, "Loader processes per rank; 0 loads in the main process.", at_least=0
        )
        MAX_PIXELS = where(
            178_956_970,
            "An image with more pixels is an error.",
            at_least=1,
            at_most=178_956_970,  # Pillow's limit
        )
        CACHE_DIR = where(
            "",
            'The folder for the image index and for features; "" is the user\'s cache folder.',
        )

    class INPUT(Section):
        SIZE = key(224, "Width and height of the input, in pixels.", at_least=8)
        RESIZE = key(256, "Length of the short side before the center crop, in pixels.")
        INTERPOLATION = key("bilinear", "How images are resized.", choices=("bilinear", "bicubic"))
        MEAN = key(
            [],
            "Mean of red, green and blue; [] is that of the weights file, or of its project.",
            check=_numbers_or_none,
        )
        STD = key(
            [],
            "Standard deviation of red, green and blue; [] as for MEAN.",
            check=_numbers_or_none,
            above=0,
        )
        AUGMENT = key(
            "random_resized_crop",
            "Training view of the online probe: a random crop and flip, or the center crop.",
            choices=("random_resized_crop", CENTER),
        )
        SCALE = key(
            [0.08, 1.0],
            "Smallest and largest area of a random crop, as a fraction of the image.",
            check=partial(_interval, 1.0),
        )
        RATIO = key(
            [3 / 4, 4 / 3],
            "Smallest and largest aspect ratio (width / height) of a random crop.",
            check=partial(_interval, 100.0),
        )
        FLIP = key(0.5, "Probability of a horizontal flip.", at_least=0, at_most=1)

    class SOLVER(Section):
        EPOCHS = key(100, "Passes over the training images or features.", at_least=1)
        LONGER = key(
            1.0,
            """Train so many times as long as the protocol says (EPOCHS and MILESTONES), to spend a
            pretraining's time on the probe instead. The protocol stays the same; the row of the
            leaderboard says how much longer it was trained.""",
            at_least=1,
        )
        BATCH_SIZE = key(256, "Images per step, over all ranks.", at_least=1)
        BASE_LR = key(
            30.0,
            "Learning rate of the online probe, never scaled; the cached probe has CACHED.LRS.",
            above=0,
        )
        MOMENTUM = key(0.9, "Momentum of SGD.", at_least=0, below=1)
        WEIGHT_DECAY = key(
            0.0, "Weight decay of the online and the segmentation probe.", at_least=0
        )
        SCHEDULE = key(
            "step",
            "How the learning rate decays, once per epoch: in steps, or along a cosine.",
            choices=("step", "cosine"),
        )
        MILESTONES = key([60, 80], "Epochs after which the step schedule lowers the rate.")
        GAMMA = key(0.1, "Factor of the step schedule at each milestone.", above=0)
        INIT_STD = key(
            0.01, "Standard deviation of the initial weights; biases start at 0.", at_least=0
        )
        AMP = key(
            "off",
            "Mixed precision of the backbone; the classifier stays in full precision.",
            choices=("off", "bf16", "fp16"),
        )
        TF32 = key(False, "Let GPUs multiply in TF32 (10-bit mantissa); part of the protocol.")

    class CHECKPOINT(Section):
        SECONDS = where(60.0, "Seconds between two checkpoints.", at_least=0)


def rules(cfg: CfgNode) -> Iterator[Broken]:
    """Yield every broken rule between these keys."""
    data, given, solver = cfg.DATA, cfg.INPUT, cfg.SOLVER
    if given.RESIZE < given.SIZE:
        yield ("INPUT.RESIZE", "INPUT.SIZE"), "RESIZE must be at least SIZE, the center crop"
    if bool(given.MEAN) != bool(given.STD):
        yield ("INPUT.MEAN", "INPUT.STD"), "set both or neither"
    epochs = list(solver.MILESTONES)
    inside = all(0 < epoch < solver.EPOCHS for epoch in epochs)
    if solver.SCHEDULE == "step" and not (inside and sorted(set(epochs)) == epochs):
        yield ("SOLVER.MILESTONES", "SOLVER.EPOCHS"), "must be increasing and below EPOCHS"
    if (data.IMAGES_PER_CLASS > 0) + (data.FRACTION < 1) + bool(data.SUBSET) > 1:
        yield SUBSET_KEYS, "each chooses training images: set only one"
