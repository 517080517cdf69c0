"""What can be wrong with a learner's settings, its input and its numbers, and how to fix it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kscl.errors import KsclError
from kscl.methods.dictionary import MemoryBank, Minibatch
from kscl.runtime.distributed import rank

if TYPE_CHECKING:
    from kscl.methods.learner import Learner


def check_settings(learner: Learner, key_encoder: str, key_batch_norm: str) -> None:
    """Raise an error that names the settings that contradict each other."""
    dictionary, similarity = learner.dictionary, learner.similarity
    for name, value, choices in (
        ("The key encoder", key_encoder, ("momentum", "shared")),
        ("The BatchNorm mode of the keys", key_batch_norm, ("train", "eval")),
        ("The reduction of the losses", learner.reduction, ("mean", "sum")),
    ):
        if value not in choices:
            raise KsclError(f"{name} '{value}' is not one of {', '.join(choices)}.")
    if similarity.one_key and learner.num_shots != 1:
        raise KsclError(
            f"The cosine compares with one key, and there are {learner.num_shots}: take projection "
            "or mean_cosine."
        )
    if learner.num_queries < 1 or learner.num_small < 0:
        raise KsclError(
            f"There are {learner.num_queries} queries and {learner.num_small} small ones, but an "
            "image has at least one query."
        )
    if learner.symmetric and learner.num_queries != 1:
        raise KsclError(
            "In the symmetric loss each view is a query already: give one query, or small ones."
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
    if learner.groups > 1 and key_encoder == "shared":
        raise KsclError(
            f"BatchNorm in {learner.groups} groups is for shuffled keys, and those of a shared "
            "encoder are not shuffled: use one group, or the momentum encoder."
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


def check_input(
    learner: Learner, views: Tensor, indices: Tensor | None, small: Tensor | None = None
) -> None:
    """Raise an error that names what is wrong with views, small views or indices."""
    queries = "one query" if learner.num_queries == 1 else f"{learner.num_queries} queries"
    _check_views(
        learner,
        views,
        learner.num_queries + learner.num_shots,
        f"{queries} and {learner.num_shots} keys per image",
        "METHOD.NUM_SHOTS, METHOD.NUM_QUERIES",
    )
    groups = learner.groups if learner.training else 1
    if groups > 1 and (len(views) % groups or len(views) < 2 * groups):
        raise KsclError(
            f"A batch of {len(views)} images does not form {groups} equal groups of 2 or more: "
            "change KEY_ENCODER.BATCH_NORM_GROUPS."
        )
    if (small is None) != (learner.num_small == 0):
        raise KsclError(
            f"The learner has {learner.num_small} small queries per image, and "
            f"{'none were' if small is None else 'some were'} given: VIEWS.SMALL.COUNT and the "
            "data must agree."
        )
    if small is not None:
        meaning = f"{learner.num_small} small queries per image"
        _check_views(learner, small, learner.num_small, meaning, "VIEWS.SMALL.COUNT")
        if len(small) != len(views):
            raise KsclError(
                f"Small queries of {len(small)} images do not belong to views of {len(views)}: "
                "give both of the same images."
            )
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


def _check_views(learner: Learner, views: Tensor, expected: int, meaning: str, keys: str) -> None:
    if views.ndim != 5 or views.shape[1] != expected or views.shape[2] != 3 or not len(views):
        raise KsclError(
            f"Views must be (B, {expected}, 3, H, W), {meaning}, not {tuple(views.shape)}: {keys} "
            "and the data must agree."
        )
    if not views.is_floating_point() and not (
        views.dtype == torch.uint8 and learner.normalize is not None
    ):
        raise KsclError(f"Views must be normalized floating point images, not {views.dtype}.")


class FiniteCheck:
    """Looks for NaN and infinity in every step.

    At once on a CPU. On a GPU one step later, when the numbers have arrived without anyone waiting
    for them; `finish` looks at those that are still on their way.
    """

    def __init__(self) -> None:
        self._late: list[tuple[int, tuple[str, ...], Tensor, torch.cuda.Event]] = []

    def __call__(self, step: int, views: Tensor, **results: Tensor) -> None:
        """Raise an error that names the first tensor with NaN or infinity."""
        if views.device.type == "cpu":
            check_finite(step, views, **results)
            return
        if self._late and self._late[0][0] < step:
            self.finish()
        suspects = {"views": views, **results}
        sums = torch.stack([_sum(suspect) for suspect in suspects.values()])
        on_host = torch.empty(sums.shape, pin_memory=True).copy_(sums, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._late.append((step, tuple(suspects), on_host, arrived))

    def finish(self) -> None:
        """Raise an error if a step before had NaN or infinity."""
        late, self._late = self._late, []
        for step, names, sums, arrived in late:
            arrived.synchronize()
            bad = [name for name, value in zip(names, sums.tolist(), strict=True) if value != value]
            if bad:
                raise _not_finite(step, bad[0], bad[0].replace("_", " "))


def _sum(suspect: Tensor) -> Tensor:
    """Return 0, or NaN if there is NaN or infinity; views that are bytes have none."""
    return suspect.detach().sum(dtype=torch.float32) * 0


def check_finite(step: int, views: Tensor, **results: Tensor) -> None:
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
    raise _not_finite(step, where, what)


def _not_finite(step: int, where: str, what: str) -> KsclError:
    fix = (
        "look at the images and at how they are normalized"
        if where == "views"
        else "lower the learning rate, lengthen the warm-up, or switch mixed precision off"
    )
    return KsclError(f"NaN or infinity on rank {rank()} at step {step} in the {what}: {fix}.")
