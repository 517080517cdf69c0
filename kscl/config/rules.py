"""The rules for values of a pretraining config, alone and together; each one says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from fvcore.common.config import CfgNode

from kscl.config.tree import value_at
from kscl.views.recipes import OPS, RANDOM_CROP, check_recipe
from kscl.views.sizes import as_schedule, check_sizes

# A broken rule: the keys it concerns, what is wrong with their values, and how to fix it.
Broken = tuple[tuple[str, ...], str]

CHOICES: dict[str, tuple[str, ...]] = {
    "DATA.BAD_IMAGES": ("skip", "error"),
    "PROJECTOR.TYPE": ("mlp", "mlp_bn", "linear"),
    "METHOD.SIMILARITY": ("projection", "cosine", "mean_cosine"),
    "METHOD.EIGH": ("eigh", "jacobi"),
    "KEY_ENCODER.TYPE": ("momentum", "shared"),
    "KEY_ENCODER.BATCH_NORM": ("train", "eval"),
    "DICTIONARY.TYPE": ("queue", "minibatch", "memory_bank"),
    "SOLVER.OPTIMIZER": ("sgd", "adamw", "lars"),
    "SOLVER.SCHEDULE": ("cosine", "step"),
    "SOLVER.LR_UPDATE": ("epoch", "iter"),
    "SOLVER.AMP": ("off", "bf16", "fp16"),
    "SOLVER.COMPILE": ("off", "inductor", "aot_eager"),
}

Range = tuple[Callable[[float], bool], str]
AT_LEAST_0: Range = (lambda v: v >= 0, "at least 0")
AT_LEAST_1: Range = (lambda v: v >= 1, "at least 1")
POSITIVE: Range = (lambda v: v > 0, "greater than 0")

RANGES: dict[str, Range] = {
    "SEED": AT_LEAST_0,
    "DATA.NUM_WORKERS": AT_LEAST_0,
    "DATA.KEEP_MEGABYTES": AT_LEAST_0,
    "DATA.MAX_BAD_FRACTION": (lambda v: 0 <= v <= 1, "a fraction between 0 and 1"),
    "DATA.MAX_PIXELS": (lambda v: 1 <= v <= 178_956_970, "from 1 to 178956970, Pillow's limit"),
    "VIEWS.SMALL.COUNT": AT_LEAST_0,
    "VIEWS.SMALL.SIZE": (lambda v: v >= 8, "at least 8 pixels"),
    "PROJECTOR.HIDDEN_DIM": AT_LEAST_0,
    "PROJECTOR.DIM": AT_LEAST_1,
    "METHOD.NUM_SHOTS": (lambda v: v >= 1, "at least 1: it is K, the number of key views"),
    "METHOD.NUM_QUERIES": AT_LEAST_1,
    "METHOD.RHO": (
        lambda v: 0 < v <= 1,
        "in (0, 1]: it is the fraction of the eigenvalue mass to keep",
    ),
    "METHOD.TEMPERATURE": POSITIVE,
    "KEY_ENCODER.MOMENTUM": (lambda v: 0 <= v <= 1, "between 0 and 1"),
    "DICTIONARY.QUEUE_LENGTH": AT_LEAST_1,
    "DICTIONARY.BANK_MOMENTUM": (lambda v: 0 <= v < 1, "in [0, 1); 0 replaces the slot"),
    "SOLVER.EPOCHS": AT_LEAST_1,
    "SOLVER.MAX_STEPS": AT_LEAST_0,
    "SOLVER.BATCH_SIZE": AT_LEAST_1,
    "SOLVER.BASE_LR": POSITIVE,
    "SOLVER.REFERENCE_BATCH_SIZE": AT_LEAST_1,
    "SOLVER.MOMENTUM": (lambda v: 0 <= v < 1, "in [0, 1)"),
    "SOLVER.WEIGHT_DECAY": AT_LEAST_0,
    "SOLVER.GAMMA": POSITIVE,
    "SOLVER.WARMUP_EPOCHS": AT_LEAST_0,
    "SOLVER.GRAD_ACCUM_STEPS": AT_LEAST_1,
    "SOLVER.CLIP_GRAD_NORM": AT_LEAST_0,
    "CHECKPOINT.PERIOD_EPOCHS": AT_LEAST_1,
    "CHECKPOINT.PERIOD_STEPS": AT_LEAST_0,
    "CHECKPOINT.KEEP": AT_LEAST_1,
    "EVAL.KNN_PERIOD": AT_LEAST_0,
    "EVAL.KNN_K": AT_LEAST_1,
    "EVAL.KNN_TEMPERATURE": POSITIVE,
    "LOG.PERIOD": AT_LEAST_1,
}


def check_values(
    cfg: CfgNode, choices: Mapping[str, tuple[str, ...]], ranges: Mapping[str, Range]
) -> Iterator[Broken]:
    """Yield the broken rules that concern one key each."""
    for key, names in choices.items():
        if value_at(cfg, key) not in names:
            yield (key,), f"must be one of {', '.join(names)}"
    for key, (allowed, text) in ranges.items():
        value = value_at(cfg, key)
        if not isinstance(value, int | float) or not allowed(value):  # NaN is in no range
            yield (key,), f"must be {text}"


def check_pretrain(cfg: CfgNode) -> Iterator[Broken]:
    """Yield every broken rule, not only the first."""
    yield from check_values(cfg, CHOICES, RANGES)
    for check in (_check_input, _check_method, _check_schedule, _check_parts):
        yield from check(cfg)
    if cfg.EVAL.KNN_PERIOD and not (cfg.EVAL.KNN_TRAIN and cfg.EVAL.KNN_VAL):
        yield (
            ("EVAL.KNN_PERIOD", "EVAL.KNN_TRAIN", "EVAL.KNN_VAL"),
            "the check needs two sets of class folders: name both, or set KNN_PERIOD 0",
        )


def _check_input(cfg: CfgNode) -> Iterator[Broken]:
    if problem := check_sizes(cfg.INPUT.SIZE, cfg.SOLVER.EPOCHS):
        yield ("INPUT.SIZE", "SOLVER.EPOCHS"), problem
    elif cfg.VIEWS.SMALL.COUNT:
        smallest = min(size for _, size in as_schedule(cfg.INPUT.SIZE))
        if smallest < cfg.VIEWS.SMALL.SIZE:
            yield (
                ("VIEWS.SMALL.SIZE", "INPUT.SIZE"),
                f"a small crop cannot be larger than the other views: set it to at most {smallest}",
            )
    if cfg.SOLVER.MAX_STEPS and not isinstance(cfg.INPUT.SIZE, int):
        yield (
            ("INPUT.SIZE", "SOLVER.MAX_STEPS"),
            "a schedule over epochs needs their number: set EPOCHS, and MAX_STEPS 0. In a suite "
            "of equal time, which sets MAX_STEPS, give one size",
        )
    for key in ("MEAN", "STD"):
        if len(cfg.INPUT[key]) != 3:
            yield (f"INPUT.{key}",), "must have three numbers: red, green, blue"
    if not all(std > 0 for std in cfg.INPUT.STD):
        yield ("INPUT.STD",), "must be greater than 0: images are divided by it"
    for key in ("AUGMENT", "AUGMENT_KEYS"):
        for problem in check_recipe(cfg[key], key) if cfg[key] is not None else ():
            yield (), problem
    yield from _check_small(cfg)


def _check_small(cfg: CfgNode) -> Iterator[Broken]:
    small = cfg.VIEWS.SMALL
    if problem := OPS[RANDOM_CROP]["scale"].problem(list(small.SCALE)):
        yield ("VIEWS.SMALL.SCALE",), problem
    crops = [op for op in cfg.AUGMENT if isinstance(op, dict) and op.get("op") == RANDOM_CROP]
    if small.COUNT and not crops:
        yield (
            ("VIEWS.SMALL.COUNT",),
            f"a small crop is AUGMENT's {RANDOM_CROP} at another scale: add that op to AUGMENT, or "
            "set COUNT 0",
        )


def _check_method(cfg: CfgNode) -> Iterator[Broken]:
    method, dictionary, key_encoder = cfg.METHOD, cfg.DICTIONARY, cfg.KEY_ENCODER
    in_batch = dictionary.TYPE == "minibatch"
    if dictionary.TYPE == "queue" and dictionary.QUEUE_LENGTH < cfg.SOLVER.BATCH_SIZE:
        yield (
            ("DICTIONARY.QUEUE_LENGTH", "SOLVER.BATCH_SIZE"),
            "the queue must hold at least one batch: lengthen it or make the batch smaller",
        )
    if in_batch and cfg.SOLVER.BATCH_SIZE < 2:
        yield (
            ("DICTIONARY.TYPE", "SOLVER.BATCH_SIZE"),
            "a batch of one image has no other instance to tell it from: make the batch larger",
        )
    if method.SIMILARITY == "cosine" and method.NUM_SHOTS != 1:
        yield (
            ("METHOD.SIMILARITY", "METHOD.NUM_SHOTS"),
            "cosine compares two vectors: set NUM_SHOTS 1, or SIMILARITY projection or mean_cosine",
        )
    if method.EIGH == "jacobi" and method.NUM_SHOTS > 8:
        yield (
            ("METHOD.EIGH", "METHOD.NUM_SHOTS"),
            "jacobi is for up to 8 shots: set EIGH eigh",
        )
    if method.SYMMETRIC and method.NUM_QUERIES != 1:
        yield (
            ("METHOD.NUM_QUERIES", "METHOD.SYMMETRIC"),
            "in the symmetric loss each view is a query already: set NUM_QUERIES 1, or add small "
            "queries by VIEWS.SMALL",
        )
    if method.GRAD_THROUGH_KEYS and not in_batch:
        yield (
            ("METHOD.GRAD_THROUGH_KEYS", "DICTIONARY.TYPE"),
            "only keys of this batch carry gradients: set DICTIONARY.TYPE minibatch",
        )
    if method.GRAD_THROUGH_KEYS and key_encoder.TYPE != "shared":
        yield (
            ("METHOD.GRAD_THROUGH_KEYS", "KEY_ENCODER.TYPE"),
            "a momentum encoder is not trained by gradients: set KEY_ENCODER.TYPE shared",
        )
    if key_encoder.TYPE == "shared" and not in_batch:
        yield (
            ("KEY_ENCODER.TYPE", "DICTIONARY.TYPE"),
            "a stored key outlives the weights that made it, so it needs the slow momentum "
            "encoder: set KEY_ENCODER.TYPE momentum, or DICTIONARY.TYPE minibatch",
        )
    if key_encoder.TYPE == "shared" and key_encoder.BATCH_NORM == "eval":
        yield (
            ("KEY_ENCODER.BATCH_NORM", "KEY_ENCODER.TYPE"),
            "a shared encoder has no statistics of its own for the keys: set BATCH_NORM train",
        )
    if method.SYMMETRIC and not (in_batch and key_encoder.TYPE == "shared"):
        yield (
            ("METHOD.SYMMETRIC", "DICTIONARY.TYPE", "KEY_ENCODER.TYPE"),
            "each view is query and key only within a minibatch and with a shared encoder: set "
            "DICTIONARY.TYPE minibatch and KEY_ENCODER.TYPE shared",
        )


def _check_schedule(cfg: CfgNode) -> Iterator[Broken]:
    solver = cfg.SOLVER
    by_steps = solver.MAX_STEPS > 0  # how many epochs these are, only the number of images tells
    if not by_steps and solver.WARMUP_EPOCHS >= solver.EPOCHS:
        yield (
            ("SOLVER.WARMUP_EPOCHS", "SOLVER.EPOCHS"),
            "the warm-up must end before the training does: shorten it",
        )
    if solver.SCHEDULE == "step":
        epochs = solver.MILESTONES
        inside = all(epoch > 0 and (by_steps or epoch < solver.EPOCHS) for epoch in epochs)
        if sorted(set(epochs)) != list(epochs) or not inside:
            yield (
                ("SOLVER.MILESTONES", "SOLVER.EPOCHS"),
                "must be rising epochs inside the training",
            )


def _check_parts(cfg: CfgNode) -> Iterator[Broken]:
    solver = cfg.SOLVER
    if solver.DETERMINISTIC and solver.CUDNN_BENCHMARK:
        yield (
            ("SOLVER.DETERMINISTIC", "SOLVER.CUDNN_BENCHMARK"),
            "the fastest convolution may be another one in every run: set one of them False",
        )
    if solver.OPTIMIZER == "lars" and solver.WEIGHT_DECAY == 0:
        yield (
            ("SOLVER.OPTIMIZER", "SOLVER.WEIGHT_DECAY"),
            "lars adapts the learning rate of weights that decay, so without decay it is plain "
            "SGD: set WEIGHT_DECAY above 0, or OPTIMIZER sgd",
        )
    if solver.GRAD_ACCUM_STEPS >= 1 and solver.BATCH_SIZE % solver.GRAD_ACCUM_STEPS:
        yield (
            ("SOLVER.GRAD_ACCUM_STEPS", "SOLVER.BATCH_SIZE"),
            "the batch is cut into equal parts: choose a divisor of BATCH_SIZE",
        )
    if solver.GRAD_ACCUM_STEPS > 1 and cfg.DICTIONARY.TYPE == "minibatch":
        yield (
            ("SOLVER.GRAD_ACCUM_STEPS", "DICTIONARY.TYPE"),
            "each part would have its own few negatives, which is another loss: set "
            "GRAD_ACCUM_STEPS 1 and a smaller BATCH_SIZE",
        )
