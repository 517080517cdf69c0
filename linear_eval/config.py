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
SET_METRICS = TOP1, MEAN_PER_CLASS, VOC_MAP = "top1", "mean_per_class", "voc07_map"

CHOICES: dict[str, tuple[str, ...]] = {
    "PROBE": ("online", "cached", "knn", "svm", "low_shot", "linear_suite", "finetune"),
    "BACKBONE.BATCH_NORM": ("auto", "keep", "calibrate"),
    "INPUT.AUGMENT": ("random_resized_crop", CENTER),
    "INPUT.INTERPOLATION": ("bilinear", "bicubic"),
    "SOLVER.SCHEDULE": ("step", "cosine"),
    "SOLVER.AMP": ("off", "bf16", "fp16"),
    "CACHED.METHOD": ("sgd", "lbfgs"),
    "SVM.SOLVER": ("liblinear", "exact"),
}

RANGES: dict[str, Range] = {
    "SEED": AT_LEAST_0,
    "BACKBONE.CALIBRATION_IMAGES": AT_LEAST_1,
    "DATA.IMAGES_PER_CLASS": AT_LEAST_0,
    "DATA.FRACTION": (lambda v: 0 < v <= 1, "a fraction of at most 1"),
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
    "KNN.TEMPERATURE": POSITIVE,
    "SVM.POSITIVE_WEIGHT": POSITIVE,
    "SVM.FOLDS": (lambda v: v >= 2, "at least 2"),
    "SVM.TOLERANCE": POSITIVE,
    "SVM.ITERATIONS": AT_LEAST_1,
    "LINEAR_SUITE.HOLD_OUT": (lambda v: 0 < v < 1, "a fraction between 0 and 1"),
    "LINEAR_SUITE.ITERATIONS": AT_LEAST_1,
    "LOW_SHOT.SAMPLES": AT_LEAST_1,
    "LOW_SHOT.COST_OF_ONE": POSITIVE,
    "FINETUNE.TRUNK_LR": AT_LEAST_0,
    "FINETUNE.HEAD_LR": POSITIVE,
    "CHECKPOINT.SECONDS": AT_LEAST_0,
}


def linear_eval_defaults() -> CfgNode:
    """Return a new tree with every key of a linear evaluation."""
    cfg = CfgNode()
    cfg.OUTPUT_DIR = "output/linear_eval"  # The folder for log, classifier and record.
    # The name of the row on the leaderboard; "" is the method that the file of weights names.
    cfg.LABEL = ""
    cfg.SEED = 0  # Seeds the classifier, the order of images, random crops and random weights.
    # A linear classifier trained on augmented images (online) or on stored features (cached),
    # nearest neighbors without training (knn), SVMs on images with several classes each, trained on
    # all of them (svm) or on k of each class (low_shot), logistic regression on many sets
    # (linear_suite), or the whole network trained further (finetune).
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
    # To train on: a folder with one folder per class. For svm and low_shot an annotated set:
    # voc:FOLDER:SPLIT, coco:FILE.json:IMAGES or a name such as voc_2007_trainval.
    cfg.DATA.TRAIN = ""
    cfg.DATA.VAL = ""  # To evaluate on: the same with the same classes.
    # Training images per class; 0 is all of them, n draws n of each class (low-shot).
    cfg.DATA.IMAGES_PER_CLASS = 0
    # Fraction of the training images of each class, drawn by SEED (at least one image of each).
    cfg.DATA.FRACTION = 1.0
    # A list of the training images to use, by file name or by path below DATA.TRAIN: a file, or
    # SimCLR's lists for ImageNet, simclr_1percent and simclr_10percent, which are downloaded.
    cfg.DATA.SUBSET = ""
    cfg.DATA.NUM_WORKERS = 4  # Loader processes per rank; 0 loads in the main process.
    cfg.DATA.MAX_PIXELS = 178_956_970  # A larger image is not decoded, which is an error here.
    # The folder for the index of image files and for features; "" is the user's cache folder.
    cfg.DATA.CACHE_DIR = ""

    cfg.INPUT = CfgNode()
    cfg.INPUT.SIZE = 224  # Width and height of the input, in pixels.
    cfg.INPUT.RESIZE = 256  # Length of the short side before the center crop, in pixels.
    cfg.INPUT.INTERPOLATION = "bilinear"  # How images are resized.
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
    # Fixed views whose features are stored. Other probes on stored features store all of them too,
    # in one pass, so that no image is decoded twice for two probes of one backbone.
    cfg.CACHED.VIEWS = [CENTER, FLIP]
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
    cfg.KNN.K = [20, 200]  # Numbers of neighbors; each has a record.
    cfg.KNN.TEMPERATURE = 0.07  # Neighbors vote with weight exp(cosine / temperature).

    cfg.SVM = CfgNode()  # One linear SVM per class, on features of length 1.
    cfg.SVM.COSTS = [0.01, 0.1, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 50.0, 100.0, 1000.0]  # The grid.
    cfg.SVM.FOLDS = 3  # Parts of the training images, by which each class chooses its cost.
    cfg.SVM.POSITIVE_WEIGHT = 2.0  # Weight of an image with the class beside one without it.
    # The LinearSVC of scikit-learn, or the exact minimum of its objective, which is faster if
    # there are few images.
    cfg.SVM.SOLVER = "liblinear"
    cfg.SVM.TOLERANCE = 1e-4  # Of liblinear: where it stops.
    cfg.SVM.ITERATIONS = 2000  # Of liblinear: where it stops at the latest.

    cfg.LOW_SHOT = CfgNode()
    cfg.LOW_SHOT.K = [1, 2, 4, 8, 16, 32, 64, 96]  # Images with a class that its SVM is trained on.
    cfg.LOW_SHOT.SAMPLES = 5  # Independent draws of these images; each has a record.
    cfg.LOW_SHOT.COST_OF_ONE = 1.0  # Cost where k is 1, which cannot be parted.

    cfg.FINETUNE = CfgNode()  # Its epochs, batches and schedule are SOLVER's.
    cfg.FINETUNE.TRUNK_LR = 0.02  # Learning rate of the backbone.
    cfg.FINETUNE.HEAD_LR = 5.0  # Learning rate of the new linear layer.

    cfg.LINEAR_SUITE = CfgNode()
    # The grid of weight decays: 45 from 1e-6 to 1e5, the ratio of neighbors being equal.
    cfg.LINEAR_SUITE.WEIGHT_DECAYS = [10 ** (-6 + n / 4) for n in range(45)]
    cfg.LINEAR_SUITE.HOLD_OUT = 0.2  # Fraction of train to choose on if a set has no val.
    cfg.LINEAR_SUITE.ITERATIONS = 1000  # Largest number of iterations of L-BFGS.
    # The sets of the linear suite by name; any name is allowed. Each has train, test, perhaps val
    # (folders with one folder per class, or annotated sets) and metric: top1, mean_per_class, or
    # voc07_map for annotated sets. {} leaves out a set of the config file.
    cfg.SETS = CfgNode(new_allowed=True)

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
    yield from _check_lists(cfg)
    yield from _check_sets(cfg)


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


def _check_lists(cfg: CfgNode) -> Iterator[Broken]:
    limits = (cfg.DATA.IMAGES_PER_CLASS > 0, cfg.DATA.FRACTION < 1, bool(cfg.DATA.SUBSET))
    if sum(limits) > 1:
        yield (
            ("DATA.IMAGES_PER_CLASS", "DATA.FRACTION", "DATA.SUBSET"),
            "each chooses training images: set one of them",
        )
    if any(limits) and cfg.PROBE in ("svm", "low_shot", "linear_suite"):
        yield (
            ("PROBE", "DATA.IMAGES_PER_CLASS", "DATA.FRACTION", "DATA.SUBSET"),
            "this probe takes all images of its sets, or LOW_SHOT.K of them",
        )
    for key in ("KNN.K", "LOW_SHOT.K"):
        values = cfg[key.split(".")[0]].K
        if not values or len(set(values)) != len(values) or not all(k >= 1 for k in values):
            yield (key,), "must be one or more different whole numbers, each at least 1"
    costs = cfg.SVM.COSTS
    if not costs or sorted(set(costs)) != list(costs) or costs[0] <= 0:
        yield ("SVM.COSTS",), "must be one or more rising numbers, each greater than 0"
    decays = cfg.LINEAR_SUITE.WEIGHT_DECAYS
    if not decays or len(set(decays)) != len(decays) or min(decays) <= 0:
        yield (
            ("LINEAR_SUITE.WEIGHT_DECAYS",),
            "must be one or more different numbers, each greater than 0",
        )


def _check_sets(cfg: CfgNode) -> Iterator[Broken]:
    if cfg.PROBE == "linear_suite" and not any(cfg.SETS.values()):
        yield ("SETS",), "names no set: give each a train and a test folder"
    for name, given in cfg.SETS.items():
        key = f"SETS.{name}"
        if not isinstance(given, dict) or not all(isinstance(v, str) for v in given.values()):
            yield (key,), "must be a mapping of train, val, test and metric to text"
        elif given:
            if not {"train", "test"} <= set(given) <= {"train", "val", "test", "metric"}:
                yield (key,), "must have train and test, may have val and metric, and no other key"
            if given.get("metric", SET_METRICS[0]) not in SET_METRICS:
                yield (key,), f"has the metric {given['metric']}, not {', '.join(SET_METRICS)}"
        if "/" in name or name == "mean":
            yield (key,), "must have another name: it is that of a column beside the mean"
