"""Every key of a linear evaluation, with its default: exactly MoCo's ImageNet probe.

The comment of a key is its documentation: `--print-config` and docs/config.md show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fvcore.common.config import CfgNode

from kscl.config.merge import load_config
from kscl.config.rules import AT_LEAST_0, AT_LEAST_1, POSITIVE, Broken, Range, check_values

CENTER, FLIP = "center", "flip"

CHOICES: dict[str, tuple[str, ...]] = {
    "PROBE": ("online", "cached", "knn"),
    "BACKBONE.BATCH_NORM": ("auto", "keep", "calibrate"),
    "INPUT.AUGMENT": ("random_resized_crop", CENTER),
    "SOLVER.SCHEDULE": ("step", "cosine"),
    "SOLVER.AMP": ("off", "bf16", "fp16"),
    "CACHED.METHOD": ("sgd", "lbfgs"),
}

RANGES: dict[str, Range] = {
    "SEED": AT_LEAST_0,
    "BACKBONE.CALIBRATION_IMAGES": AT_LEAST_1,
    "DATA.IMAGES_PER_CLASS": AT_LEAST_0,
    "DATA.NUM_WORKERS": AT_LEAST_0,
    "DATA.MAX_PIXELS": (lambda v: 1 <= v <= 178_956_970, "from 1 to 178956970, Pillow's limit"),
    "INPUT.SIZE": (lambda v: v >= 8, "at least 8 pixels"),
    "SOLVER.EPOCHS": AT_LEAST_1,
    "SOLVER.BATCH_SIZE": AT_LEAST_1,
    "SOLVER.BASE_LR": POSITIVE,
    "SOLVER.MOMENTUM": (lambda v: 0 <= v < 1, "in [0, 1)"),
    "SOLVER.WEIGHT_DECAY": AT_LEAST_0,
    "SOLVER.GAMMA": POSITIVE,
    "SOLVER.INIT_STD": AT_LEAST_0,
    "CACHED.RANDOM_CROPS": AT_LEAST_0,
    "CACHED.HOLD_OUT": (lambda v: 0 < v < 1, "a fraction between 0 and 1"),
    "CACHED.LBFGS_ITERATIONS": AT_LEAST_1,
    "KNN.K": AT_LEAST_1,
    "KNN.TEMPERATURE": POSITIVE,
    "CHECKPOINT.SECONDS": AT_LEAST_0,
}


def linear_eval_defaults() -> CfgNode:
    """Return a new tree with every key of a linear evaluation."""
    cfg = CfgNode()
    cfg.OUTPUT_DIR = "output/linear_eval"  # The folder for log, classifier and record.
    # The name of the row on the leaderboard; "" is the method that the file of weights names.
    cfg.LABEL = ""
    cfg.SEED = 0  # Seeds the classifier, the order of images, random crops and random weights.
    # A linear classifier trained on augmented images (online) or on stored features (cached), or
    # nearest neighbors without training (knn).
    cfg.PROBE = "online"

    cfg.BACKBONE = CfgNode()
    # A file of weights, of this project or another one, or random.
    cfg.BACKBONE.WEIGHTS = ""
    # Where in the file the tensors are, for a file with several networks or an unknown layout: the
    # keys that lead to them, joined by dots. "" goes by the table of layouts (docs/checkpoints.md).
    cfg.BACKBONE.CONTAINER = ""
    # What stands before the network's names there, letter by letter; "" as for CONTAINER.
    cfg.BACKBONE.PREFIX = ""
    cfg.BACKBONE.NAME = ""  # The timm model, if the file does not name it.
    # Arguments for timm.create_model; any key is allowed.
    cfg.BACKBONE.KWARGS = CfgNode(new_allowed=True)
    # BatchNorm statistics: keep those of the weights, or calibrate them on training images. Random
    # weights have none and are no baseline without them: auto calibrates these and keeps others.
    cfg.BACKBONE.BATCH_NORM = "auto"
    cfg.BACKBONE.CALIBRATION_IMAGES = 1024  # Training images for the calibration.

    cfg.DATA = CfgNode()
    cfg.DATA.TRAIN = ""  # A folder with one folder per class, to train on.
    cfg.DATA.VAL = ""  # A folder with the same classes, to evaluate on.
    # Training images per class; 0 is all of them, n draws n of each class (low-shot).
    cfg.DATA.IMAGES_PER_CLASS = 0
    cfg.DATA.NUM_WORKERS = 4  # Loader processes per rank; 0 loads in the main process.
    cfg.DATA.MAX_PIXELS = 178_956_970  # A larger image is not decoded, which is an error here.
    # The folder for the index of image files and for features; "" is the user's cache folder.
    cfg.DATA.CACHE_DIR = ""

    cfg.INPUT = CfgNode()
    cfg.INPUT.SIZE = 224  # Width and height of the input, in pixels.
    cfg.INPUT.RESIZE = 256  # Length of the short side before the center crop, in pixels.
    # Mean of red, green and blue; [] is what the file of weights says, or that of its project.
    cfg.INPUT.MEAN = []
    # Standard deviation of red, green and blue; [] as for MEAN.
    cfg.INPUT.STD = []
    # Training view of the online probe: a random crop with a flip, or the center crop.
    cfg.INPUT.AUGMENT = "random_resized_crop"
    cfg.INPUT.SCALE = [0.08, 1.0]  # Smallest and largest fraction of the area of a random crop.
    cfg.INPUT.RATIO = [3 / 4, 4 / 3]  # Smallest and largest width over height of a random crop.
    cfg.INPUT.FLIP = 0.5  # Probability of a horizontal flip.

    cfg.SOLVER = CfgNode()
    cfg.SOLVER.EPOCHS = 100  # Passes over the training images or features.
    cfg.SOLVER.BATCH_SIZE = 256  # Images per step, over all ranks.
    # Learning rate of the online probe, never scaled; the cached probe searches CACHED.LRS.
    cfg.SOLVER.BASE_LR = 30.0
    cfg.SOLVER.MOMENTUM = 0.9  # Momentum of SGD.
    cfg.SOLVER.WEIGHT_DECAY = 0.0  # Weight decay of the online probe.
    # How the learning rate falls, once per epoch: in steps, or along a cosine.
    cfg.SOLVER.SCHEDULE = "step"
    cfg.SOLVER.MILESTONES = [60, 80]  # Epochs after which the step schedule lowers it.
    cfg.SOLVER.GAMMA = 0.1  # Factor of the step schedule at each milestone.
    cfg.SOLVER.INIT_STD = 0.01  # Standard deviation of the initial weights; biases start at 0.
    cfg.SOLVER.AMP = "off"  # Mixed precision of the backbone; the classifier has full precision.
    # Let GPUs multiply float32 numbers rounded to 10 bits (TF32), which is another precision.
    cfg.SOLVER.TF32 = False

    cfg.CACHED = CfgNode()  # The cached probe.
    cfg.CACHED.VIEWS = [CENTER, FLIP]  # Fixed views whose features are stored.
    cfg.CACHED.RANDOM_CROPS = 0  # Number of fixed random crops per image in addition.
    # Scale every feature to mean 0 and variance 1 over the training features.
    cfg.CACHED.STANDARDIZE = True
    cfg.CACHED.METHOD = "sgd"  # SGD, or full-batch logistic regression (lbfgs).
    cfg.CACHED.LRS = [0.001, 0.01, 0.1, 1.0]  # Learning rates of the grid of sgd.
    cfg.CACHED.WEIGHT_DECAYS = [0.0, 0.0001, 0.001, 0.01]  # Weight decays of the grid of sgd.
    # The grid of lbfgs, which minimizes the mean loss plus L2 / 2 times the squared weights.
    cfg.CACHED.L2 = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]
    cfg.CACHED.LBFGS_ITERATIONS = 1000  # Largest number of iterations of lbfgs.
    # Fraction of the training images that chooses the point of the grid.
    cfg.CACHED.HOLD_OUT = 0.1

    cfg.KNN = CfgNode()  # The nearest-neighbor probe.
    cfg.KNN.K = 20  # Number of neighbors.
    cfg.KNN.TEMPERATURE = 0.07  # Neighbors vote with weight exp(cosine / temperature).

    cfg.CHECKPOINT = CfgNode()
    cfg.CHECKPOINT.SECONDS = 60.0  # Seconds between two checkpoints.
    return cfg


# Keys that say where or how, not what: two runs that differ only here give the same numbers.
WITHOUT_EFFECT_ON_RESULTS = (
    "OUTPUT_DIR",
    "LABEL",
    "BACKBONE.WEIGHTS",  # the hash of the file replaces it
    "DATA.TRAIN",  # the fingerprints of the data replace them
    "DATA.VAL",
    "DATA.NUM_WORKERS",
    "DATA.CACHE_DIR",
    "DATA.MAX_PIXELS",  # a larger image is an error
    "CHECKPOINT",
)


def load_linear_eval_config(
    config_file: str | Path | None = None, overrides: Sequence[str] = ()
) -> CfgNode:
    """Return the merge of defaults, file and overrides, checked as a whole and frozen."""
    return load_config(config_file, overrides, linear_eval_defaults, check_linear_eval)


def check_linear_eval(cfg: CfgNode) -> Iterator[Broken]:
    """Yield every broken rule, not only the first."""
    yield from check_values(cfg, CHOICES, RANGES)
    yield from _check_input(cfg)
    yield from _check_schedule(cfg)
    yield from _check_grid(cfg)


def _check_input(cfg: CfgNode) -> Iterator[Broken]:
    if cfg.INPUT.RESIZE < cfg.INPUT.SIZE:
        yield (
            ("INPUT.RESIZE", "INPUT.SIZE"),
            "the center crop must fit into the resized image: make RESIZE at least SIZE",
        )
    for key in ("MEAN", "STD"):
        values = cfg.INPUT[key]
        if values and (len(values) != 3 or not all(isinstance(v, int | float) for v in values)):
            yield (f"INPUT.{key}",), "must have three numbers (red, green, blue) or none"
    if bool(cfg.INPUT.MEAN) != bool(cfg.INPUT.STD):
        yield ("INPUT.MEAN", "INPUT.STD"), "set both or neither"
    if not all(std > 0 for std in cfg.INPUT.STD if isinstance(std, int | float)):
        yield ("INPUT.STD",), "must be greater than 0: images are divided by it"
    for key, most in (("SCALE", 1.0), ("RATIO", 100.0)):
        ends = cfg.INPUT[key]
        if len(ends) != 2 or not 0 < ends[0] <= ends[1] <= most:
            yield (f"INPUT.{key}",), f"must be [low, high] with 0 < low <= high <= {most:g}"
    if not 0 <= cfg.INPUT.FLIP <= 1:
        yield ("INPUT.FLIP",), "must be a probability between 0 and 1"


def _check_schedule(cfg: CfgNode) -> Iterator[Broken]:
    epochs = cfg.SOLVER.MILESTONES
    rising = sorted(set(epochs)) == list(epochs)
    if cfg.SOLVER.SCHEDULE == "step" and not (
        rising and all(0 < epoch < cfg.SOLVER.EPOCHS for epoch in epochs)
    ):
        yield (
            ("SOLVER.MILESTONES", "SOLVER.EPOCHS"),
            "must be rising epochs inside the training",
        )


def _check_grid(cfg: CfgNode) -> Iterator[Broken]:
    views = cfg.CACHED.VIEWS
    if not set(views) <= {CENTER, FLIP} or len(set(views)) != len(views):
        yield ("CACHED.VIEWS",), f"must be some of {CENTER}, {FLIP}, each once"
    if not views and not cfg.CACHED.RANDOM_CROPS:
        yield ("CACHED.VIEWS", "CACHED.RANDOM_CROPS"), "no view to train on is left: name one"
    for key, allowed, text in (
        ("LRS", POSITIVE[0], "greater than 0"),
        ("WEIGHT_DECAYS", AT_LEAST_0[0], "at least 0"),
        ("L2", AT_LEAST_0[0], "at least 0"),
    ):
        values = cfg.CACHED[key]
        if not values or len(set(values)) != len(values) or not all(map(allowed, values)):
            yield (f"CACHED.{key}",), f"must be one or more different numbers, each {text}"
