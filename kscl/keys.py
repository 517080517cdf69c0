"""Every key of a pretraining config; the defaults are the paper's setting (K = 5, rho = 40%)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from fvcore.common.config import CfgNode

from kscl.config import Broken, Schema, Section, key
from kscl.registry import SIMILARITIES
from kscl.views.recipes import MOCO_V2, RANDOM_CROP, RECIPES, check_recipe, check_scale
from kscl.views.sizes import as_schedule, check_sizes

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
    """Keys of `tools/pretrain.py`."""

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
        """The augmentations of the keys, if they are not those of AUGMENT: a list or a recipe's
        name. With METHOD.SYMMETRIC they are those of all views but the first.""",
        optional=True,
        named=RECIPES,
    )

    class VIEWS(Section):
        class SMALL(Section):
            """Small crops of each image (multi-crop), which are queries like the full-size ones."""

            COUNT = key(0, "Small crops per image.", at_least=0)
            SIZE = key(96, "Width and height of a small crop, in pixels.", at_least=8)
            SCALE = key(
                [0.05, 0.14],
                """Fraction of the image's area that a small crop shows; it replaces the scale of
                AUGMENT's crop.""",
                check=lambda value: check_scale(list(value)),
            )

    class BACKBONE(WeightsFile):
        NAME = key("resnet50", "Any timm model that returns pooled features.")
        KWARGS = key({}, "Arguments for timm.create_model: the architecture.", any_key=True)
        WEIGHTS = key(
            "", 'Weights to start from: a file or an http(s) address; "" draws random ones by SEED.'
        )

    class PROJECTOR(Section):
        """The layers between backbone and embeddings; dropped after training."""

        TYPE = key(
            "mlp",
            """Two layers (mlp), with BatchNorm after the first (mlp_bn) or both (simclr), or one
            (linear).""",
            choices=("mlp", "mlp_bn", "simclr", "linear"),
        )
        HIDDEN_DIM = key(
            0, "Width of the hidden layer; 0 is the backbone's feature dimension.", at_least=0
        )
        DIM = key(128, "Dimension of the embeddings (the paper's D).", at_least=1)

    class METHOD(Section):
        NUM_SHOTS = key(5, "Key views per image (the paper's K).", at_least=1)
        NUM_QUERIES = key(
            1,
            "Full-size query views per image, all compared with the one subspace of its keys.",
            at_least=1,
        )
        RHO = key(
            0.4,
            "Fraction of the eigenvalue mass that an instance subspace keeps.",
            above=0,
            at_most=1,
        )
        SIMILARITY = key(
            "projection",
            """Compare a query with the subspace of the keys (projection), the one key of K = 1
            (cosine), or the mean of the keys (mean_cosine, a control).""",
            choices=SIMILARITIES,
        )
        TEMPERATURE = key(0.2, "Divides the logits.", above=0)
        GRAD_THROUGH_KEYS = key(
            False, "Let gradients flow through the keys; only with the minibatch dictionary."
        )
        SYMMETRIC = key(
            False,
            """Use each view in turn as the query, as SimCLR does; minibatch dictionary only. All
            views of a batch pass through the encoder, and through its BatchNorm, together.""",
        )
        REDUCTION = key(
            "mean",
            """Take the mean of the losses of all queries; or add up those of each image's queries
            and take the mean over images (sum), as SimCLR does with its two views.""",
            choices=("mean", "sum"),
        )

    class KEY_ENCODER(Section):
        TYPE = key(
            "momentum",
            "A momentum encoder, or the query encoder itself (shared).",
            choices=("momentum", "shared"),
        )
        MOMENTUM = key(
            0.999,
            "Fraction of the old weights that the momentum encoder keeps per step.",
            at_least=0,
            at_most=1,
        )
        BATCH_NORM = key(
            "train",
            """BatchNorm of the keys: train uses the statistics of the batch, eval the running
            statistics of the query encoder.""",
            choices=("train", "eval"),
        )
        BATCH_NORM_GROUPS = key(
            1,
            """Equal parts of each process's batch that BatchNorm normalizes on their own. Keys are
            shuffled over the parts of all processes (MoCo's shuffled BatchNorm), so one process
            with 8 parts computes what 8 processes do. One process with 1 part shuffles nothing,
            and a query and its keys can recognize each other by the images they were normalized
            with.""",
            at_least=1,
        )

    class DICTIONARY(Section):
        TYPE = key(
            "queue",
            """Where the negatives come from: a queue, the other images of the minibatch, or a
            memory_bank with one slot per image.""",
            choices=("queue", "minibatch", "memory_bank"),
        )
        QUEUE_LENGTH = key(
            65536,
            """Instances in the queue. It starts empty, and entries that were never filled do not
            count; MoCo's starts with random vectors, which count as negatives until keys replace
            them.""",
            at_least=1,
        )
        BANK_MOMENTUM = key(
            0.0,
            "Fraction of the old embeddings that a slot of the memory bank keeps; 0 replaces them.",
            at_least=0,
            below=1,
        )

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
    for name in ("AUGMENT", "AUGMENT_KEYS"):
        for problem in check_recipe(cfg[name], name) if cfg[name] is not None else ():
            yield (), problem
    yield from _check_small(cfg)


def _check_small(cfg: CfgNode) -> Iterator[Broken]:
    small = cfg.VIEWS.SMALL
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
    if key_encoder.TYPE == "shared" and key_encoder.BATCH_NORM_GROUPS > 1:
        yield (
            ("KEY_ENCODER.BATCH_NORM_GROUPS", "KEY_ENCODER.TYPE"),
            "keys of a shared encoder are not shuffled: set BATCH_NORM_GROUPS 1",
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
    groups = cfg.KEY_ENCODER.BATCH_NORM_GROUPS
    if groups > 1 and solver.GRAD_ACCUM_STEPS >= 1:
        images = solver.BATCH_SIZE // solver.GRAD_ACCUM_STEPS
        if images % groups or images < 2 * groups:
            yield (
                ("KEY_ENCODER.BATCH_NORM_GROUPS", "SOLVER.BATCH_SIZE", "SOLVER.GRAD_ACCUM_STEPS"),
                f"the {images} images of a forward pass do not form {groups} equal groups of 2 or "
                "more: choose a smaller divisor",
            )
    if solver.GRAD_ACCUM_STEPS > 1 and cfg.DICTIONARY.TYPE == "minibatch":
        yield (
            ("SOLVER.GRAD_ACCUM_STEPS", "DICTIONARY.TYPE"),
            "each part would have its own few negatives, which is another loss: set "
            "GRAD_ACCUM_STEPS 1 and a smaller BATCH_SIZE",
        )


def _check_neighbors(cfg: CfgNode) -> Iterator[Broken]:
    if cfg.EVAL.KNN_PERIOD and not (cfg.EVAL.KNN_TRAIN and cfg.EVAL.KNN_VAL):
        yield (
            ("EVAL.KNN_PERIOD", "EVAL.KNN_TRAIN", "EVAL.KNN_VAL"),
            "the check needs two sets of class folders: name both, or set KNN_PERIOD 0",
        )


RULES = (_check_input, _check_method, _check_schedule, _check_parts, _check_neighbors)
PRETRAIN = Schema.of(Pretrain, rules=RULES)


def load_config(config_file: str | Path | None = None, overrides: Sequence[str] = ()) -> CfgNode:
    """Return a pretraining config: defaults, file and overrides, checked as a whole and frozen."""
    return PRETRAIN.load(config_file, overrides)
