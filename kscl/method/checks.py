"""What can be wrong with a learner's settings, its input and its numbers, and how to mend it."""

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
    dictionary, similarity = learner.dictionary, learner.similarity
    for name, value, choices in (
        ("similarity", similarity, ("projection", "cosine", "mean_cosine")),
        ("key encoder", key_encoder, ("momentum", "shared")),
        ("BatchNorm of the keys", key_batch_norm, ("train", "eval")),
    ):
        if value not in choices:
            raise KsclError(f"{name} '{value}' is not one of {', '.join(choices)}")
    if similarity == "cosine" and learner.num_shots != 1:
        raise KsclError(
            f"cosine compares with one key, and there are {learner.num_shots}: take projection or "
            "mean_cosine"
        )
    if learner.temperature <= 0:
        raise KsclError(f"the temperature is {learner.temperature}, but it is a positive number")
    if not 0 <= learner.momentum <= 1:
        raise KsclError(f"the key encoder's momentum is {learner.momentum}, but it lies in [0, 1]")
    end_to_end = learner.grad_through_keys or learner.symmetric
    if end_to_end and not (isinstance(dictionary, Minibatch) and key_encoder == "shared"):
        raise KsclError(
            "gradients through the keys, and the symmetric loss, need the minibatch dictionary and "
            "a shared encoder"
        )
    if key_encoder == "shared" and key_batch_norm == "eval":
        raise KsclError(
            "a shared encoder has no other BatchNorm statistics for its keys than for its queries: "
            "use train mode, or the momentum encoder"
        )
    if dictionary.signed == (similarity == "projection"):
        raise KsclError(f"the dictionary is not made for the similarity '{similarity}'")
    if not isinstance(dictionary, Minibatch) and len(dictionary.slots) != learner.max_rank:
        raise KsclError(
            f"the dictionary stores {len(dictionary.slots)} basis vectors an instance, and these "
            f"settings keep up to {learner.max_rank}"
        )


def check_input(learner: Learner, views: Tensor, indices: Tensor | None) -> None:
    expected = learner.num_shots + 1
    if views.ndim != 5 or views.shape[1] != expected or views.shape[2] != 3 or not len(views):
        raise KsclError(
            f"views must be (B, {expected}, 3, H, W), one query and {learner.num_shots} keys an "
            f"image, not {tuple(views.shape)}: METHOD.NUM_SHOTS and the data must agree"
        )
    if not views.is_floating_point():
        raise KsclError(f"views must be normalised floating point images, not {views.dtype}")
    if not isinstance(learner.dictionary, MemoryBank):
        return
    if indices is None or indices.shape != views.shape[:1]:
        raise KsclError("the memory bank has a slot an image: give the indices (B,) of the images")
    first, last = int(indices.min()), int(indices.max())
    if first < 0 or last >= len(learner.dictionary):
        raise KsclError(
            f"indices from {first} to {last} do not fit a memory bank of {len(learner.dictionary)} "
            "images: it was built for another data set"
        )


def check_finite(step: Tensor, views: Tensor, **results: Tensor) -> None:
    """One sum over the small `results`; only if that fails, a search for where it began."""
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
        "look at the images and at how they are normalised"
        if where == "views"
        else "lower the learning rate, lengthen the warm-up, or switch mixed precision off"
    )
    raise KsclError(f"NaN or infinity on rank {rank()} at step {int(step)} in the {what}: {fix}")
