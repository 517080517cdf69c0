"""What configs, checks and plans need to know of a method, without importing torch.

A method's own keys are in the section METHOD; sections that it declares stand beside it. `Method`
(kscl/methods/base.py) adds the network to `MethodKeys`, so a method of one file declares all of it
in its class. KSCL's are here, since the leaderboard and `--print-config` load without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from fvcore.common.config import CfgNode

from kscl.config import Broken, Key, Schema, Section, key
from kscl.registry import DICTIONARIES, METHODS, SIMILARITIES
from kscl.views.batch import SmallViews, Views
from kscl.views.recipes import RANDOM_CROP, check_scale
from kscl.views.sizes import as_schedule, check_sizes, last_size

FLOAT_BYTES, HALF_BYTES = 4, 2


class Passes(NamedTuple):
    """Encoder passes per image; a view of the last INPUT.SIZE is one."""

    trained: float  # with a gradient
    untrained: float = 0.0  # without


class Extras(NamedTuple):
    """What a step costs beside the encoder's passes; what is stored is on every GPU."""

    copies: int = 0  # of the encoder, in memory
    flops: float = 0.0  # per image
    sent: int = 0  # full-size views per image that another GPU encodes
    stored: int = 0  # bytes, e.g. of a queue
    stored_per_image: int = 0  # bytes for each image of the set, e.g. of a memory bank
    host_per_image: int = 0  # the same in the host memory of every process


class MethodKeys:
    """The declaration of a method; the defaults are those of two views and one encoder."""

    figures: ClassVar[Sequence[str]] = ()  # of its forward pass, shown in log lines and records

    @classmethod
    def check(cls, cfg: CfgNode) -> Iterator[Broken]:
        """Yield every rule between keys that is broken."""
        return iter(())

    @classmethod
    def check_part(cls, cfg: CfgNode, images: int) -> Iterator[Broken]:
        """Yield what is wrong with forward passes of so many images each."""
        return iter(())

    @classmethod
    def views(cls, cfg: CfgNode) -> Views:
        """Return the views that it wants of each image."""
        return Views(2, cfg.AUGMENT, recipe_of_others(cfg))

    @classmethod
    def passes(cls, cfg: CfgNode, size: float = 1.0) -> Passes:
        """Return the passes with full-size views of `size` times the last size's pixels."""
        return Passes(view_pixels(cfg, cls.views(cfg), size))

    @classmethod
    def extras(cls, cfg: CfgNode) -> Extras:
        """Return what else a step costs; only plans call this, and it may import torch."""
        return Extras()

    @classmethod
    def facts(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return what to say of the method in the metadata of a backbone."""
        return {}

    @classmethod
    def summary(cls, cfg: CfgNode) -> str:
        """Return the views of an image in words."""
        return f"{cls.views(cfg).count} views"

    @classmethod
    def notes(cls, cfg: CfgNode) -> list[str]:
        """Return what follows from the settings, to log before a run."""
        return []


def recipe_of_others(cfg: CfgNode) -> Any:
    """Return the augmentations of all views but the first ones."""
    return cfg.AUGMENT if cfg.AUGMENT_KEYS is None else cfg.AUGMENT_KEYS


def view_pixels(cfg: CfgNode, views: Views, size: float = 1.0) -> float:
    """Return how many views of the last size have the pixels of all views of an image."""
    return size * views.count + small_pixels(cfg, views)


def small_pixels(cfg: CfgNode, views: Views) -> float:
    """Return the same of the small views."""
    if views.small is None:
        return 0
    return views.small.count * (views.small.size / last_size(cfg.INPUT.SIZE)) ** 2


class Kscl(MethodKeys):
    """The keys of K-shot contrastive learning; MoCo and SimCLR are settings of them (K = 1)."""

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
        (cosine), the mean of the keys (mean_cosine, a control), or their main direction with the
        sign of the mean (main_cosine).""",
        choices=SIMILARITIES,
    )
    REMEMBER = key(
        0,
        """Epochs whose keys of an image count beside those of the step: more shots without
        another pass of the encoder. A step has K keys, or K + 1 if symmetric; remembering R
        epochs of them takes R x 2 x PROJECTOR.DIM bytes per key and image on every process.""",
        at_least=0,
    )
    REMEMBER_DECAY = key(
        1.0,
        "Weight of a remembered key relative to one that is an epoch younger.",
        above=0,
        at_most=1,
    )
    REMEMBER_IN = key(
        "device",
        "Where remembered keys are: the memory of the training device, or host memory.",
        choices=("device", "host"),
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
            choices=DICTIONARIES,
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

    figures = ("instance_top1", "mean_rank")

    @classmethod
    def check(cls, cfg: CfgNode) -> Iterator[Broken]:
        """Yield every rule between keys that is broken."""
        method, key_encoder, solver = cfg.METHOD, cfg.KEY_ENCODER, cfg.SOLVER
        kind, length = cfg.DICTIONARY.TYPE, cfg.DICTIONARY.QUEUE_LENGTH
        in_batch, shared = kind == "minibatch", key_encoder.TYPE == "shared"
        crops = [op for op in cfg.AUGMENT if isinstance(op, dict) and op.get("op") == RANDOM_CROP]
        rules: list[tuple[bool, str, str]] = [
            (
                kind == "queue" and length < solver.BATCH_SIZE,
                "DICTIONARY.QUEUE_LENGTH SOLVER.BATCH_SIZE",
                "the queue must hold at least one batch: lengthen it or make the batch smaller",
            ),
            (
                in_batch and solver.BATCH_SIZE < 2,
                "DICTIONARY.TYPE SOLVER.BATCH_SIZE",
                "a batch of one image has no other instance to tell it from: make the batch larger",
            ),
            (
                method.SIMILARITY == "cosine" and method.NUM_SHOTS != 1,
                "METHOD.SIMILARITY METHOD.NUM_SHOTS",
                "cosine compares two vectors: set NUM_SHOTS 1, or SIMILARITY projection or "
                "mean_cosine",
            ),
            (
                method.SIMILARITY == "cosine" and method.REMEMBER > 0,
                "METHOD.SIMILARITY METHOD.REMEMBER",
                "cosine compares two vectors, and remembered keys are further ones: set SIMILARITY "
                "mean_cosine, main_cosine or projection, or REMEMBER 0",
            ),
            (
                method.SYMMETRIC and method.NUM_QUERIES != 1,
                "METHOD.NUM_QUERIES METHOD.SYMMETRIC",
                "in the symmetric loss each view is a query already: set NUM_QUERIES 1, or add "
                "small queries by VIEWS.SMALL",
            ),
            (
                method.GRAD_THROUGH_KEYS and not in_batch,
                "METHOD.GRAD_THROUGH_KEYS DICTIONARY.TYPE",
                "only keys of this batch carry gradients: set DICTIONARY.TYPE minibatch",
            ),
            (
                method.GRAD_THROUGH_KEYS and not shared,
                "METHOD.GRAD_THROUGH_KEYS KEY_ENCODER.TYPE",
                "a momentum encoder is not trained by gradients: set KEY_ENCODER.TYPE shared",
            ),
            (
                shared and not in_batch,
                "KEY_ENCODER.TYPE DICTIONARY.TYPE",
                "a stored key outlives the weights that made it, so it needs the slow momentum "
                "encoder: set KEY_ENCODER.TYPE momentum, or DICTIONARY.TYPE minibatch",
            ),
            (
                shared and key_encoder.BATCH_NORM == "eval",
                "KEY_ENCODER.BATCH_NORM KEY_ENCODER.TYPE",
                "a shared encoder has no statistics of its own for the keys: set BATCH_NORM train",
            ),
            (
                shared and key_encoder.BATCH_NORM_GROUPS > 1,
                "KEY_ENCODER.BATCH_NORM_GROUPS KEY_ENCODER.TYPE",
                "keys of a shared encoder are not shuffled: set BATCH_NORM_GROUPS 1",
            ),
            (
                method.SYMMETRIC and not (in_batch and shared),
                "METHOD.SYMMETRIC DICTIONARY.TYPE KEY_ENCODER.TYPE",
                "each view is query and key only within a minibatch and with a shared encoder: set "
                "DICTIONARY.TYPE minibatch and KEY_ENCODER.TYPE shared",
            ),
            (
                in_batch and solver.GRAD_ACCUM_STEPS > 1,
                "SOLVER.GRAD_ACCUM_STEPS DICTIONARY.TYPE",
                "each part would have its own few negatives, which is another loss: set "
                "GRAD_ACCUM_STEPS 1 and a smaller BATCH_SIZE",
            ),
            (
                cfg.VIEWS.SMALL.COUNT > 0 and not crops,
                "VIEWS.SMALL.COUNT",
                f"a small crop is AUGMENT's {RANDOM_CROP} at another scale: add that op to "
                "AUGMENT, or set COUNT 0",
            ),
        ]
        if cfg.VIEWS.SMALL.COUNT and not check_sizes(cfg.INPUT.SIZE, solver.EPOCHS):
            smallest = min(size for _, size in as_schedule(cfg.INPUT.SIZE))
            rules.append(
                (
                    smallest < cfg.VIEWS.SMALL.SIZE,
                    "VIEWS.SMALL.SIZE INPUT.SIZE",
                    "a small crop cannot be larger than the other views: set it to at most "
                    f"{smallest}",
                )
            )
        yield from ((tuple(keys.split()), text) for broken, keys, text in rules if broken)

    @classmethod
    def check_part(cls, cfg: CfgNode, images: int) -> Iterator[Broken]:
        """Yield what is wrong with forward passes of so many images each."""
        groups = cfg.KEY_ENCODER.BATCH_NORM_GROUPS
        if groups > 1 and (images % groups or images < 2 * groups):
            yield (
                ("KEY_ENCODER.BATCH_NORM_GROUPS", "SOLVER.BATCH_SIZE", "SOLVER.GRAD_ACCUM_STEPS"),
                f"the {images} images of a forward pass do not form {groups} equal groups of 2 or "
                "more: choose a smaller divisor, e.g. 1 with several processes, which shuffle keys "
                "among them too",
            )

    @classmethod
    def views(cls, cfg: CfgNode) -> Views:
        """Return the queries, then the keys; small crops are queries too."""
        method, small = cfg.METHOD, cfg.VIEWS.SMALL
        low, high = small.SCALE
        return Views(
            count=method.NUM_QUERIES + method.NUM_SHOTS,
            recipe=cfg.AUGMENT,
            others=recipe_of_others(cfg),
            first=method.NUM_QUERIES,
            small=SmallViews(small.COUNT, small.SIZE, (low, high)) if small.COUNT else None,
        )

    @classmethod
    def passes(cls, cfg: CfgNode, size: float = 1.0) -> Passes:
        """Return the passes: queries are trained, keys only end to end."""
        method, small = cfg.METHOD, small_pixels(cfg, cls.views(cfg))
        if method.GRAD_THROUGH_KEYS or method.SYMMETRIC:
            return Passes(size * (method.NUM_QUERIES + method.NUM_SHOTS) + small)
        return Passes(size * method.NUM_QUERIES + small, size * method.NUM_SHOTS)

    @classmethod
    def extras(cls, cfg: CfgNode) -> Extras:
        """Return the costs of the momentum encoder, of shuffled keys and of the dictionary."""
        method, key_encoder, dim = cfg.METHOD, cfg.KEY_ENCODER, cfg.PROJECTOR.DIM
        in_batch, shared = cfg.DICTIONARY.TYPE == "minibatch", key_encoder.TYPE == "shared"
        in_bank, on_host = cfg.DICTIONARY.TYPE == "memory_bank", method.REMEMBER_IN == "host"
        # A memory bank computes like a queue: how many images there are is not known here.
        length = cfg.SOLVER.BATCH_SIZE if in_batch else cfg.DICTIONARY.QUEUE_LENGTH
        values = length * stored_vectors(cfg) * dim
        bank = stored_vectors(cfg) * dim * FLOAT_BYTES if in_bank else 0
        remembered = method.REMEMBER * keys_per_step(cfg) * dim * HALF_BYTES
        queries = method.NUM_QUERIES + cfg.VIEWS.SMALL.COUNT
        return Extras(
            copies=0 if shared else 1,
            flops=2 * 2 * queries * values,  # per query and vector a product and its gradient
            sent=0 if shared or key_encoder.BATCH_NORM == "eval" else method.NUM_SHOTS,
            stored=0 if in_batch or in_bank else values * FLOAT_BYTES,
            stored_per_image=bank + (0 if on_host else remembered),
            host_per_image=remembered if on_host else 0,
        )

    @classmethod
    def facts(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the settings by which rows of the leaderboard are told apart."""
        method = cfg.METHOD
        return {
            "similarity": method.SIMILARITY,
            "num_shots": method.NUM_SHOTS,
            "rho": method.RHO,
            **({"remember": method.REMEMBER} if method.REMEMBER else {}),
        }

    @classmethod
    def summary(cls, cfg: CfgNode) -> str:
        """Return the numbers of keys and queries, those that differ from the paper's one query."""
        small, queries = cfg.VIEWS.SMALL, cfg.METHOD.NUM_QUERIES
        words = [f"K = {cfg.METHOD.NUM_SHOTS}"]
        words += [f"keys of {cfg.METHOD.REMEMBER} epochs"] if cfg.METHOD.REMEMBER else []
        words += [f"{queries} queries"] if queries > 1 else []
        words += [f"{small.COUNT} small ones of {small.SIZE} pixels"] if small.COUNT else []
        return ", ".join(words)

    @classmethod
    def notes(cls, cfg: CfgNode) -> list[str]:
        """Return the size of the queue."""
        if cfg.DICTIONARY.TYPE != "queue":
            return []
        shape = f"{cfg.DICTIONARY.QUEUE_LENGTH:,} subspaces x {stored_vectors(cfg)}"
        stored = cls.extras(cfg).stored / 2**20
        return [f"queue of {shape} x {cfg.PROJECTOR.DIM} → {stored:.1f} MiB"]


def stored_vectors(cfg: CfgNode) -> int:
    """Return how many vectors a dictionary stores of an image at most."""
    method = cfg.METHOD
    shots = method.NUM_SHOTS + method.REMEMBER * keys_per_step(cfg)
    return SIMILARITIES[method.SIMILARITY].max_rank(shots, method.RHO)


def keys_per_step(cfg: CfgNode) -> int:
    """Return how many keys of an image a step makes: the symmetric loss has one in every view."""
    return cfg.METHOD.NUM_SHOTS + cfg.METHOD.SYMMETRIC


def method_keys(name: str) -> type[MethodKeys]:
    """Return the declaration of a method."""
    return Kscl if name == "kscl" else METHODS[name]  # kscl/methods/kscl.py imports torch


def method_of(cfg: CfgNode) -> type[MethodKeys]:
    """Return the declaration of a config's method."""
    return method_keys(cfg.METHOD.get("NAME", "kscl"))  # records may be older than the key


def declared_keys(method: type[MethodKeys]) -> dict[str, Key]:
    """Return the keys of a method by full name: its own in METHOD, its sections beside it."""
    return {
        name if "." in name else f"METHOD.{name}": declared
        for name, declared in Schema.of(method).keys.items()
    }
