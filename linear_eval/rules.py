"""What the values of a linear evaluation's config must satisfy, alone and together."""

from __future__ import annotations

from collections.abc import Iterator

from fvcore.common.config import CfgNode

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


def check_linear_eval(cfg: CfgNode) -> Iterator[Broken]:
    """Yield every broken rule, not only the first."""
    yield from check_values(cfg, CHOICES, RANGES)
    for check in (_check_input, _check_schedule, _check_grid, _check_lists, _check_sets):
        yield from check(cfg)
    if cfg.PROBE == "finetune" and cfg.SOLVER.AMP == "fp16":
        yield (
            ("PROBE", "SOLVER.AMP"),
            "small gradients vanish in fp16, and fine-tuning does not scale its loss: set bf16 or "
            "off",
        )


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
