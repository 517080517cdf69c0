"""What a finished pretraining shows that makes its backbone doubtful; the board repeats it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fvcore.common.config import CfgNode

NEAR_CHANCE = 3.0  # times the chance to name the right instance
FALLEN = 0.7  # of the best quarter's top-1: below, the last quarter has fallen
FEWEST_REPORTS = 8  # of the log; fewer have no quarters


def doubts(cfg: CfgNode, num_images: int, curves: Mapping[str, Sequence[float]]) -> list[str]:
    """Return one sentence per reason to doubt; none for a run without a fault."""
    found = []
    in_queue = cfg.DICTIONARY.TYPE == "queue"
    length = {
        "queue": cfg.DICTIONARY.QUEUE_LENGTH,
        "minibatch": cfg.SOLVER.BATCH_SIZE - 1,
        "memory_bank": num_images - 1,
    }[cfg.DICTIONARY.TYPE]
    if in_queue and length >= num_images:
        found.append(
            f"The queue of {length} is as long as the data ({num_images} images), so it holds the "
            "query's own image as a negative. Set DICTIONARY.QUEUE_LENGTH lower."
        )
    top1 = curves.get("instance_top1", ())
    if top1 and top1[-1] < NEAR_CHANCE / (length + 1):
        found.append(
            f"The instance top-1 ended at {top1[-1]:.2%}, near chance ({1 / (length + 1):.2%}): "
            "nothing was learned. Train longer, or with another learning rate."
        )
    if len(top1) >= FEWEST_REPORTS:
        size = len(top1) // 4
        quarters = [sum(top1[i * size : (i + 1) * size]) / size for i in range(4)]
        if quarters[-1] < FALLEN * max(quarters):
            found.append(
                f"The instance top-1 fell from {max(quarters):.1%} to {quarters[-1]:.1%}: the "
                "embeddings drift or collapse. Lower the learning rate or KEY_ENCODER.MOMENTUM."
            )
    return found
