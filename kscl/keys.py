"""Every key of a pretraining config; the defaults are the paper's setting (K = 5, rho = 40%)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from fvcore.common.config import CfgNode

from kscl.config import Broken, Schema, Section, file_values, key
from kscl.errors import ConfigError
from kscl.methods.keys import declared_keys, method_keys, method_of
from kscl.registry import METHODS
from kscl.views.recipes import MOCO_V2, RECIPES, check_recipe
from kscl.views.sizes import check_sizes

where = partial(key, effect=False)  # a key that says where or how, and changes no result


class WeightsFile(Section):
    """Where in a file of weights the backbone is."""

    CONTAINER = key(
        "",
        """Where in the file the tensors are, for a file with several networks or an unknown
        layout: the keys that lead to them, joined by dots. "" goes by the table of layouts
        (docs/checkpoints.md).""",
    )
    PREFIX = key(
        "",
        """Key prefix of the backbone in the file, e.g. module.encoder_q.; "" goes by the table
        of layouts.""",
    )


class Pretrain(Section):
    """Keys of `kscl pretrain`."""

    OUTPUT_DIR = where("output/pretrain", "The folder for checkpoints, logs, backbone and record.")
    SEED = key(
        0, "Seeds weights, order of images and views; equal seeds give equal runs.", at_least=0
    )
    LABEL = where("kscl", "The name of the row on the leaderboard; it changes no result.")

    class DATA(Section):
        TRAIN = where(  # the fingerprint of the data stands for it
            "", "The images: a folder, a .txt list of files, tar shards, or voc:FOLDER:SPLIT."
        )
        NUM_WORKERS = where(
            4, "Loader processes per rank; 0 loads in the training process.", at_least=0
        )
        BAD_IMAGES = key(
            "skip",
            """What to do with an unreadable image: skip replaces it by another one, error stops
            the run.""",
            choices=("skip", "error"),
        )
        MAX_BAD_FRACTION = key(
            0.01, "A larger fraction of unreadable images stops the run.", at_least=0, at_most=1
        )
        MAX_PIXELS = key(
            178_956_970,
            "A larger image is not decoded, but counted as unreadable.",
            at_least=1,
            at_most=178_956_970,  # Pillow's limit
        )
        CACHE_DIR = where(
            "", 'The folder for the index of image files; "" is the user\'s cache folder.'
        )
        CACHE_GB = where(
            0.0,
            "Gigabytes of remote tar shards to keep in the cache folder at most; 0 keeps all.",
            at_least=0,
        )
        REDUCED_DECODE = key(
            False,
            """Decode a large JPEG at 1/2, 1/4 or 1/8 of its size, if every sampled crop still has
            at least the pixels that it is resized to; faster, and pixels differ a little.""",
        )
        KEEP_MEGABYTES = where(
            512,
            """Megabytes of memory per rank for decoded images, shared among its workers: a set
            that fits is decoded once, not in every epoch. 0 keeps none.""",
            at_least=0,
        )
        NORMALIZE_ON_DEVICE = key(
            True, "Send views from the workers as bytes and normalize them on the training device."
        )

    class VIEWS(Section):
        DEVICE = key(
            False,
            """Let the workers decode, crop and resize only, and the training device change colors,
            blur and flip: a little more than half of the work per view is left to the workers.
            Pixels differ by rounding.""",
        )

    class INPUT(Section):
        SIZE = key(
            224,
            """Width and height of a full-size view, in pixels; or a schedule over epochs, a list
            of [first epoch, size] such as [[0, 160], [100, 224]].""",
            or_list=True,
        )
        MEAN = key(
            [0.485, 0.456, 0.406], "Subtracted from red, green and blue in [0, 1].", length=3
        )
        STD = key(
            [0.229, 0.224, 0.225], "Red, green and blue are divided by it.", length=3, above=0
        )

    AUGMENT = key(
        [dict(op) for op in MOCO_V2],
        """The augmentations in their order: a list of ops, or the name of a recipe (moco_v1,
        moco_v2 or simclr).""",
        named=RECIPES,
    )
    AUGMENT_KEYS = key(
        None,
        """The augmentations of all views but the first, if they are not those of AUGMENT: a list
        or a recipe's name. In KSCL these are the keys.""",
        optional=True,
        named=RECIPES,
    )

    class BACKBONE(WeightsFile):
        NAME = key("resnet50", "Any timm model that returns pooled features.")
        KWARGS = key({}, "Arguments for timm.create_model: the architecture.", any_key=True)
        WEIGHTS = key(
            "",
            """Weights to continue from: a file, timm:NAME, hf-hub:OWNER/NAME,
            torchvision:ENUM.MEMBER or an http(s) address (docs/checkpoints.md); "" or random draws
            them by SEED.""",
        )

    class PROJECTOR(Section):
        """The layers between backbone and embeddings; dropped after training."""

        TYPE = key(
            "mlp",
            """Two layers (mlp), with BatchNorm after the first (mlp_bn) or both (simclr); three,
            with BatchNorm after the first two (mlp3_bn); or one (linear).""",
            choices=("mlp", "mlp_bn", "mlp3_bn", "simclr", "linear"),
        )
        HIDDEN_DIM = key(
            0, "Width of a hidden layer; 0 is the backbone's feature dimension.", at_least=0
        )
        DIM = key(128, "Dimension of the embeddings (the paper's D).", at_least=1)

    class METHOD(Section):
        """The pretraining method, and the keys that it declares."""

        NAME = key("kscl", "The pretraining method.", choices=METHODS)

    class SOLVER(Section):
        EPOCHS = key(200, "Passes over the images.", at_least=1)
        MAX_STEPS = key(
            0,
            """Steps to train for instead of EPOCHS, the last epoch cut short; 0 goes by EPOCHS.
            The learning rate falls over these steps.""",
            at_least=0,
        )
        BATCH_SIZE = key(256, "Images per step, over all ranks and accumulation steps.", at_least=1)
        OPTIMIZER = key("sgd", "The optimizer.", choices=("sgd", "adamw", "lars"))
        BASE_LR = key(0.03, "Learning rate at REFERENCE_BATCH_SIZE.", above=0)
        SCALE_LR = key(
            True, "Scale the learning rate in proportion to BATCH_SIZE / REFERENCE_BATCH_SIZE."
        )
        REFERENCE_BATCH_SIZE = key(256, "The batch size that BASE_LR is meant for.", at_least=1)
        MOMENTUM = key(0.9, "Momentum of SGD and LARS.", at_least=0, below=1)
        WEIGHT_DECAY = key(1e-4, "Weight decay.", at_least=0)
        SCHEDULE = key(
            "cosine",
            "How the learning rate falls: along a cosine, or in steps.",
            choices=("cosine", "step"),
        )
        LR_UPDATE = key(
            "epoch",
            "Change the learning rate every epoch or every iteration.",
            choices=("epoch", "iter"),
        )
        MILESTONES = key([120, 160], "Epochs after which the step schedule lowers it.")
        GAMMA = key(0.1, "Factor of the step schedule at each milestone.", above=0)
        WARMUP_EPOCHS = key(
            0.0,
            "Epochs in which the learning rate rises from 0; fractions are allowed.",
            at_least=0,
        )
        FREEZE_BACKBONE_EPOCHS = key(
            1.0,
            """With BACKBONE.WEIGHTS: epochs at the start in which the backbone stays as it is, and
            the projector alone is trained, with the whole learning rate.""",
            at_least=0,
        )
        CONTINUED_LR_FACTOR = key(
            0.1,
            """With BACKBONE.WEIGHTS: after FREEZE_BACKBONE_EPOCHS, everything is trained with the
            learning rate times this factor.""",
            above=0,
        )
        GRAD_ACCUM_STEPS = key(
            1, "Parts in which a rank computes its images of a batch, to save memory.", at_least=1
        )
        CLIP_GRAD_NORM = key(0.0, "Largest norm of the gradient; 0 clips nothing.", at_least=0)
        SYNC_BATCH_NORM = key(
            False,
            """Compute BatchNorm's statistics over the images of all processes (SyncBN), not of
            each one.""",
        )
        AMP = key("off", "Mixed precision.", choices=("off", "bf16", "fp16"))
        CHANNELS_LAST = key(False, "Memory layout that is often faster for convolutions.")
        COMPILE = key(
            "off",
            """Compile both encoders before the first step, by inductor, which needs a C++
            compiler, or by aot_eager, which only shows that they can be.""",
            choices=("off", "inductor", "aot_eager"),
        )
        TF32 = key(False, "Let GPUs multiply float32 numbers rounded to 10 bits: TF32, faster.")
        CUDNN_BENCHMARK = where(
            False,
            """Let cuDNN time its convolutions and take the fastest; its choice can change from run
            to run.""",
        )
        DETERMINISTIC = key(
            False, "Use only GPU kernels that repeat their results to the bit; slower."
        )

    class CHECKPOINT(Section):
        PERIOD_EPOCHS = where(1, "Epochs between two checkpoints.", at_least=1)
        PERIOD_STEPS = where(
            0, "Steps between two checkpoints within an epoch; 0 is never.", at_least=0
        )
        KEEP = where(2, "Number of newest checkpoints to keep.", at_least=1)

    class EVAL(Section):
        """A nearest-neighbor check during training; it changes no weights."""

        KNN_PERIOD = where(0, "Epochs between two checks; 0 is never.", at_least=0)
        KNN_TRAIN = where("", "Class folders with the labeled neighbors.")
        KNN_VAL = where("", "Class folders with the images to classify.")
        KNN_K = where(20, "Number of neighbors.", at_least=1)
        KNN_TEMPERATURE = where(
            0.07, "Neighbors vote with weight exp(cosine / temperature).", above=0
        )

    class LOG(Section):
        PERIOD = where(50, "Steps between two log lines.", at_least=1)


def continues(cfg: CfgNode) -> bool:
    """Return whether a pretraining continues from weights, and not from random ones."""
    return cfg.BACKBONE.WEIGHTS not in ("", "random")


def _check_input(cfg: CfgNode) -> Iterator[Broken]:
    if problem := check_sizes(cfg.INPUT.SIZE, cfg.SOLVER.EPOCHS):
        yield ("INPUT.SIZE", "SOLVER.EPOCHS"), problem
    if cfg.SOLVER.MAX_STEPS and not isinstance(cfg.INPUT.SIZE, int):
        yield (
            ("INPUT.SIZE", "SOLVER.MAX_STEPS"),
            "a schedule over epochs needs their number: set EPOCHS, and MAX_STEPS 0. In a suite "
            "of equal time, which sets MAX_STEPS, give one size",
        )
    for name in ("AUGMENT", "AUGMENT_KEYS"):
        problems = check_recipe(cfg[name], name) if cfg[name] is not None else []
        for problem in problems:
            yield (), problem
        if cfg.VIEWS.DEVICE and cfg[name] and not problems:
            from kscl.views.augment import AUGMENTATIONS

            last = cfg[name][-1]["op"]
            if not AUGMENTATIONS[last].on_device:
                yield (
                    ("VIEWS.DEVICE", name),
                    f"{last} has no device form and comes last, so nothing is left to the device: "
                    "move it before the others, or set VIEWS.DEVICE False",
                )


def _check_schedule(cfg: CfgNode) -> Iterator[Broken]:
    solver = cfg.SOLVER
    by_steps = solver.MAX_STEPS > 0  # how many epochs these are, only the number of images tells
    if not by_steps and solver.WARMUP_EPOCHS >= solver.EPOCHS:
        yield (
            ("SOLVER.WARMUP_EPOCHS", "SOLVER.EPOCHS"),
            "the warm-up must end before the training does: shorten it",
        )
    freezes = continues(cfg) and not by_steps
    if freezes and solver.FREEZE_BACKBONE_EPOCHS >= solver.EPOCHS:
        yield (
            ("SOLVER.FREEZE_BACKBONE_EPOCHS", "SOLVER.EPOCHS"),
            "the backbone would never be trained: shorten the one or lengthen the other",
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
    parts = solver.GRAD_ACCUM_STEPS
    if parts >= 1 and solver.BATCH_SIZE % parts:
        yield (
            ("SOLVER.GRAD_ACCUM_STEPS", "SOLVER.BATCH_SIZE"),
            "the batch is cut into equal parts: choose a divisor of BATCH_SIZE",
        )
    if cfg.EVAL.KNN_PERIOD and not (cfg.EVAL.KNN_TRAIN and cfg.EVAL.KNN_VAL):
        yield (
            ("EVAL.KNN_PERIOD", "EVAL.KNN_TRAIN", "EVAL.KNN_VAL"),
            "the check needs two sets of class folders: name both, or set KNN_PERIOD 0",
        )
    if cfg.METHOD.NAME in METHODS:
        method = method_of(cfg)
        yield from method.check(cfg)
        if parts >= 1 and not solver.BATCH_SIZE % parts:
            yield from method.check_part(cfg, solver.BATCH_SIZE // parts)


RULES = (_check_input, _check_schedule, _check_parts)
METHOD_NAME = "METHOD.NAME"


@functools.cache
def schema_of(name: str) -> Schema:
    """Return the schema of a method: the keys of every pretraining, and its own."""
    method = method_keys(name)
    common = Schema.of(Pretrain, rules=RULES)
    keys = {**common.keys, **declared_keys(method)}
    keys["LABEL"] = dataclasses.replace(keys["LABEL"], default=name)
    # KSCL's configs were hashed before there were other methods.
    keys[METHOD_NAME] = dataclasses.replace(keys[METHOD_NAME], default=name, effect=name != "kscl")
    return dataclasses.replace(common, keys=keys, docs={**common.docs, **Schema.of(method).docs})


PRETRAIN = schema_of("kscl")


def load_config(config_file: str | Path | None = None, overrides: Sequence[str] = ()) -> CfgNode:
    """Return a pretraining config: defaults, file and overrides, checked as a whole and frozen."""
    name = dict(zip(overrides[::2], overrides[1::2], strict=False)).get(METHOD_NAME)
    if name is None and config_file is not None:
        with contextlib.suppress(ConfigError):  # `load` reports it, together with all others
            name = file_values(config_file).get(METHOD_NAME)
    schema = schema_of(name) if isinstance(name, str) and name in METHODS else PRETRAIN
    return schema.load(config_file, overrides)


def print_config(cfg: CfgNode) -> str:
    """Return a config as YAML that can be fed back, with its documentation."""
    return schema_of(cfg.METHOD.NAME).print(cfg)
