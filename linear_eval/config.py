"""Every key of a linear evaluation, with its default: MoCo's ImageNet probe, to the letter."""

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
    "CACHED.HOLD_OUT": (lambda v: 0 < v < 1, "a share between 0 and 1"),
    "CACHED.LBFGS_ITERATIONS": AT_LEAST_1,
    "KNN.K": AT_LEAST_1,
    "KNN.TEMPERATURE": POSITIVE,
    "CHECKPOINT.SECONDS": AT_LEAST_0,
}


def linear_eval_defaults() -> CfgNode:
    cfg = CfgNode()
    cfg.OUTPUT_DIR = "output/linear_eval"
    cfg.LABEL = ""  # of the record; "" is the method that the backbone's file names
    cfg.SEED = 0
    cfg.PROBE = "online"  # "cached" or "knn"

    cfg.BACKBONE = CfgNode()
    cfg.BACKBONE.WEIGHTS = ""  # a file, ours or another project's, or "random"
    cfg.BACKBONE.NAME = ""  # the timm model, where the file does not say
    cfg.BACKBONE.KWARGS = CfgNode(new_allowed=True)  # goes to timm.create_model
    # Random weights have no statistics of their own (mean 0, variance 1 is where counting starts),
    # and without any a deep network is no baseline: "auto" calibrates those and keeps all others.
    cfg.BACKBONE.BATCH_NORM = "auto"  # "keep", or "calibrate" on train images
    cfg.BACKBONE.CALIBRATION_IMAGES = 1024

    cfg.DATA = CfgNode()
    cfg.DATA.TRAIN = ""  # a folder with one folder a class
    cfg.DATA.VAL = ""
    cfg.DATA.IMAGES_PER_CLASS = 0  # of train; 0 is all, n draws n of each class (low-shot)
    cfg.DATA.NUM_WORKERS = 4  # a rank
    cfg.DATA.MAX_PIXELS = 178_956_970  # a larger image is not decoded, which is an error here
    cfg.DATA.CACHE_DIR = ""  # index of files, and features; "" is the user's cache folder

    cfg.INPUT = CfgNode()
    cfg.INPUT.SIZE = 224
    cfg.INPUT.RESIZE = 256  # the short side, before the centre crop
    cfg.INPUT.MEAN = []  # three numbers; [] is what the backbone's file says, or ImageNet's
    cfg.INPUT.STD = []
    cfg.INPUT.AUGMENT = "random_resized_crop"  # of the online probe; "center" is none
    cfg.INPUT.SCALE = [0.08, 1.0]  # share of the area that a random crop takes
    cfg.INPUT.RATIO = [3 / 4, 4 / 3]  # width over height
    cfg.INPUT.FLIP = 0.5

    cfg.SOLVER = CfgNode()
    cfg.SOLVER.EPOCHS = 100
    cfg.SOLVER.BATCH_SIZE = 256  # over all ranks
    cfg.SOLVER.BASE_LR = 30.0  # never scaled; the cached probe has a grid instead
    cfg.SOLVER.MOMENTUM = 0.9
    cfg.SOLVER.WEIGHT_DECAY = 0.0
    cfg.SOLVER.SCHEDULE = "step"  # or "cosine"; the rate moves once an epoch
    cfg.SOLVER.MILESTONES = [60, 80]
    cfg.SOLVER.GAMMA = 0.1
    cfg.SOLVER.INIT_STD = 0.01  # of the weights; biases start at 0
    cfg.SOLVER.AMP = "off"  # "bf16" or "fp16", of the backbone only

    cfg.CACHED = CfgNode()
    cfg.CACHED.VIEWS = [CENTER, FLIP]  # fixed augmentations whose features are kept
    cfg.CACHED.RANDOM_CROPS = 0  # so many fixed random crops beside them
    cfg.CACHED.STANDARDIZE = True  # every feature to mean 0 and variance 1 over the training rows
    cfg.CACHED.METHOD = "sgd"  # or "lbfgs": full-batch logistic regression
    cfg.CACHED.LRS = [0.001, 0.01, 0.1, 1.0]
    cfg.CACHED.WEIGHT_DECAYS = [0.0, 0.0001, 0.001, 0.01]
    cfg.CACHED.L2 = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]  # of lbfgs: mean loss + L2/2 |W|²
    cfg.CACHED.LBFGS_ITERATIONS = 1000  # at most
    cfg.CACHED.HOLD_OUT = 0.1  # of train, on which the point of the grid is chosen

    cfg.KNN = CfgNode()
    cfg.KNN.K = 20
    cfg.KNN.TEMPERATURE = 0.07

    cfg.CHECKPOINT = CfgNode()
    cfg.CHECKPOINT.SECONDS = 60.0  # between two
    return cfg


# Keys that say where or how, not what: two runs that differ only here give the same numbers.
WITHOUT_EFFECT_ON_RESULTS = (
    "OUTPUT_DIR",
    "LABEL",
    "BACKBONE.WEIGHTS",  # the file's hash stands for it
    "DATA.TRAIN",  # the fingerprints stand for them
    "DATA.VAL",
    "DATA.NUM_WORKERS",
    "DATA.CACHE_DIR",
    "DATA.MAX_PIXELS",  # a larger image is an error
    "CHECKPOINT",
)


def load_linear_eval_config(
    config_file: str | Path | None = None, overrides: Sequence[str] = ()
) -> CfgNode:
    return load_config(config_file, overrides, linear_eval_defaults, check_linear_eval)


def check_linear_eval(cfg: CfgNode) -> Iterator[Broken]:
    """Every broken rule, not only the first."""
    yield from check_values(cfg, CHOICES, RANGES)
    yield from _check_input(cfg)
    yield from _check_schedule(cfg)
    yield from _check_grid(cfg)


def _check_input(cfg: CfgNode) -> Iterator[Broken]:
    if cfg.INPUT.RESIZE < cfg.INPUT.SIZE:
        yield (
            ("INPUT.RESIZE", "INPUT.SIZE"),
            "the centre crop must fit into the resized picture",
        )
    for key in ("MEAN", "STD"):
        values = cfg.INPUT[key]
        if values and (len(values) != 3 or not all(isinstance(v, int | float) for v in values)):
            yield (f"INPUT.{key}",), "must have three numbers (red, green, blue), or none"
    if bool(cfg.INPUT.MEAN) != bool(cfg.INPUT.STD):
        yield ("INPUT.MEAN", "INPUT.STD"), "give both, or neither"
    if not all(std > 0 for std in cfg.INPUT.STD if isinstance(std, int | float)):
        yield ("INPUT.STD",), "must be greater than 0: images are divided by it"
    for key, most in (("SCALE", 1.0), ("RATIO", 100.0)):
        ends = cfg.INPUT[key]
        if len(ends) != 2 or not 0 < ends[0] <= ends[1] <= most:
            yield (f"INPUT.{key}",), f"must be [low, high] with 0 < low <= high <= {most:g}"
    if not 0 <= cfg.INPUT.FLIP <= 1:
        yield ("INPUT.FLIP",), "must be a chance between 0 and 1"


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
        yield ("CACHED.VIEWS", "CACHED.RANDOM_CROPS"), "leave no view to train on"
    for key, allowed, text in (
        ("LRS", POSITIVE[0], "greater than 0"),
        ("WEIGHT_DECAYS", AT_LEAST_0[0], "at least 0"),
        ("L2", AT_LEAST_0[0], "at least 0"),
    ):
        values = cfg.CACHED[key]
        if not values or len(set(values)) != len(values) or not all(map(allowed, values)):
            yield (f"CACHED.{key}",), f"must be one or more different numbers, each {text}"
