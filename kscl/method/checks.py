"""What can be wrong with a learner's settings, its input and its numbers, and how to fix it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kscl.errors import KsclError
from kscl.method.dictionary import MemoryBank, Minibatch
from kscl.runtime.distributed import rank

if TYPE_CHECKING:
    from kscl.method.learner import Learner


def check_settings(learner: Learner, key_encoder: str, key_batch_norm: str) -> None:
    """Raise an error that names the settings that contradict each other."""
    dictionary, similarity = learner.dictionary, learner.similarity
    for name, value, choices in (
        ("The key encoder", key_encoder, ("momentum", "shared")),
        ("The BatchNorm mode of the keys", key_batch_norm, ("train", "eval")),
    ):
        if value not in choices:
            raise KsclError(f"{name} '{value}' is not one of {', '.join(choices)}.")
    if similarity.one_key and learner.num_shots != 1:
        raise KsclError(
            f"The cosine compares with one key, and there are {learner.num_shots}: take projection "
            "or mean_cosine."
        )
    if learner.temperature <= 0:
        raise KsclError(f"The temperature is {learner.temperature}, but it is a positive number.")
    if not 0 <= learner.momentum <= 1:
        raise KsclError(f"The key encoder's momentum is {learner.momentum}, but it lies in [0, 1].")
    end_to_end = learner.grad_through_keys or learner.symmetric
    if end_to_end and not (isinstance(dictionary, Minibatch) and key_encoder == "shared"):
        raise KsclError(
            "Gradients through the keys, and the symmetric loss, need the minibatch dictionary and "
            "a shared encoder."
        )
    if key_encoder == "shared" and key_batch_norm == "eval":
        raise KsclError(
            "A shared encoder has no other BatchNorm statistics for its keys than for its queries: "
            "use train mode, or the momentum encoder."
        )
    if dictionary.similarity is not similarity:
        raise KsclError(
            "The dictionary is not made for the learner's similarity: give both the same one."
        )
    if not isinstance(dictionary, Minibatch) and len(dictionary.slots) != learner.max_rank:
        raise KsclError(
            f"The dictionary stores {len(dictionary.slots)} basis vectors per instance, but these "
            f"settings keep up to {learner.max_rank}: build it for {learner.max_rank}."
        )


def check_input(learner: Learner, views: Tensor, indices: Tensor | None) -> None:
    """Raise an error that names what is wrong with views or indices."""
    expected = learner.num_shots + 1
    if views.ndim != 5 or views.shape[1] != expected or views.shape[2] != 3 or not len(views):
        raise KsclError(
            f"Views must be (B, {expected}, 3, H, W), one query and {learner.num_shots} keys per "
            f"image, not {tuple(views.shape)}: METHOD.NUM_SHOTS and the data must agree."
        )
    if not views.is_floating_point():
        raise KsclError(f"Views must be normalized floating point images, not {views.dtype}.")
    if not isinstance(learner.dictionary, MemoryBank):
        return
    if indices is None or indices.shape != views.shape[:1]:
        raise KsclError("A memory bank has a slot per image: give the indices (B,) of the images.")
    first, last = int(indices.min()), int(indices.max())
    if first < 0 or last >= len(learner.dictionary):
        raise KsclError(
            f"Indices from {first} to {last} do not fit a memory bank of {len(learner.dictionary)} "
            "images: build it for this data set."
        )


def check_finite(step: Tensor, views: Tensor, **results: Tensor) -> None:
    """Raise an error that names the first tensor with NaN or infinity.

    One sum over the small `results` tells whether there is any; only then is each one searched.
    """
    if torch.isfinite(torch.stack([result.detach().sum() for result in results.values()]).sum()):
        return
    suspects = {"views": views, **results}
    where = next(name for name, x in suspects.items() if not torch.isfinite(x.detach()).all())
    what = where.replace("_", " ")
    if suspects[where].ndim:
        bad = (~torch.isfinite(suspects[where].detach())).flatten(1).any(1)  # (B,)
        what += (
            f" of {int(bad.sum())} of {len(bad)} (the first is number {int(bad.int().argmax())})"
        )
    fix = (
        "look at the images and at how they are normalized"
        if where == "views"
        else "lower the learning rate, lengthen the warm-up, or switch mixed precision off"
    )
    raise KsclError(f"NaN or infinity on rank {rank()} at step {int(step)} in the {what}: {fix}.")
