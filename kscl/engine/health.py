"""Signs that a pretraining went wrong, as warnings in its log and record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fvcore.common.config import CfgNode

from kscl.methods.batch_norm import batch_norms
from kscl.methods.learner import Learner
from kscl.runtime.distributed import world_size

NEAR_CHANCE = 3.0  # times the chance to name the right instance
FALLEN = 0.7  # of the best quarter's top-1: below, the last quarter has fallen
FEWEST_REPORTS = 8  # of the log; fewer have no quarters
FEWEST_IMAGES = 16  # to find the own one among; with fewer, chance is too good


def health_warnings(
    cfg: CfgNode, num_images: int, curves: Mapping[str, Sequence[float]]
) -> list[str]:
    """Return one sentence per sign that a finished run learned little."""
    found = queue_warnings(cfg, num_images)
    # Not the top-1 among the queue: that is high while the queue fills, and while the encoder
    # moves fast, since the queue's older entries are then easy to tell from the present ones.
    in_batch = cfg.DICTIONARY.TYPE == "minibatch"
    curve = curves.get("instance_top1" if in_batch else "batch_top1", ())
    parts = 1 if in_batch else cfg.SOLVER.GRAD_ACCUM_STEPS * world_size()
    images = cfg.SOLVER.BATCH_SIZE / parts
    top1 = _quarters(curve) if images >= FEWEST_IMAGES else []
    if top1 and top1[-1] < NEAR_CHANCE / images:
        found.append(
            f"The batch top-1 ended at {top1[-1]:.1%}, near chance ({1 / images:.1%}): nothing was "
            "learned. Train longer, or with crops or tiles that two views of an image share."
        )
    elif top1 and top1[-1] < FALLEN * max(top1):
        found.append(
            f"The batch top-1 fell from {max(top1):.1%} to {top1[-1]:.1%}: the embeddings "
            "collapse. Lower the learning rate."
        )
    return found


def queue_warnings(cfg: CfgNode, num_images: int) -> list[str]:
    """Return the sentence about a queue as long as the data, which is known before a training."""
    length = cfg.DICTIONARY.QUEUE_LENGTH
    if cfg.DICTIONARY.TYPE != "queue" or length < num_images:
        return []
    return [
        f"The queue of {length} is as long as the data ({num_images} images), so it holds the "
        "query's own image as a negative. Set DICTIONARY.QUEUE_LENGTH lower."
    ]


def batch_norm_warnings(cfg: CfgNode, learner: Learner, processes: int) -> list[str]:
    """Return the sentence about keys that BatchNorm does not shuffle, known before a training."""
    keys = cfg.KEY_ENCODER
    apart = keys.TYPE == "shared" or keys.BATCH_NORM == "eval" or not batch_norms(learner.encoder)
    if apart or (processes * keys.BATCH_NORM_GROUPS > 1 and not cfg.SOLVER.SYNC_BATCH_NORM):
        return []
    if cfg.SOLVER.SYNC_BATCH_NORM:
        return [
            "With SOLVER.SYNC_BATCH_NORM a query and its keys are normalized with the same images, "
            "those of all processes, by which they can recognize each other. Set it to False."
        ]
    return [
        "One process with one BatchNorm group shuffles no keys: a query and its keys are "
        "normalized with the same other images, by which they can recognize each other. Set "
        "KEY_ENCODER.BATCH_NORM_GROUPS to 8, or to fewer groups of about 8 images."
    ]


def _quarters(curve: Sequence[float]) -> list[float]:
    """Return the means of the four quarters of a curve; of a short one, its last value alone."""
    if len(curve) < FEWEST_REPORTS:
        return list(curve[-1:])
    size = len(curve) // 4
    last = curve[-4 * size :]
    return [sum(last[i * size : (i + 1) * size]) / size for i in range(4)]
