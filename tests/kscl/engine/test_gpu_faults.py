"""Faults that only a GPU would show are noticed by the tests of one, pretended or real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kscl.engine import loop
from kscl.methods import dictionary, kernels
from kscl.methods.kscl import KSCL
from kscl.views.batch import Batch
from tests.helpers.gpu.tensor import CUDA, PretendCudaError
from tests.helpers.gpu.training import CPU, K5, PRETENDED, RANKS, TOLERANCE, gpu, train

pytestmark = pytest.mark.full
embed_batch, embed_keys = KSCL.embed_batch, KSCL.embed_keys


def at_once(state: Any, views: Tensor, figures: dict[str, Tensor]) -> None:
    """Look for NaN as on a CPU."""
    loop.check_sums(state, state.step, tuple(figures), [float(one) for one in figures.values()])


def on_the_cpu(learner: Any, batch: Batch) -> Tensor:
    return torch.arange(len(batch.views))


def with_views_left(learner: KSCL, batch: Batch) -> Any:
    return embed_batch(learner, batch._replace(views=batch.views.cpu()))


def as_int16(local: Tensor) -> Tensor:
    everyone = local.new_empty(RANKS * len(local), *local.shape[1:], dtype=torch.int16)
    dist.all_gather_into_tensor(everyone, local.to(torch.int16))
    return everyone.to(local.dtype)


def with_cpu_generator(seed: int, step: int) -> None:
    torch.rand(1, device=CUDA, generator=torch.Generator().manual_seed(step))


FAULTS: dict[str, tuple[Any, str, Any, int]] = {
    "views stay on the CPU": (KSCL, "embed_batch", with_views_left, 1),
    "instances stay on the CPU": (KSCL, "instances", on_the_cpu, 1),
    "a CPU generator draws for the GPU": (loop, "seed_step", with_cpu_generator, 1),
    "a type that NCCL does not know": (dictionary, "gather", as_int16, RANKS),
}


@PRETENDED
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_devices_is_noticed(fault, tmp_path):
    owner, name, faulty, ranks = FAULTS[fault]
    with gpu(ranks) as device, patch.object(owner, name, faulty), pytest.raises(PretendCudaError):
        train(["DICTIONARY.TYPE", "minibatch"], tmp_path, device, ranks)


@PRETENDED
def test_a_step_that_waits_is_noticed(tmp_path):
    with gpu() as device, patch.object(loop, "check_finite", at_once):
        _, loader, _ = train(K5, tmp_path, device)
    assert sum(loader.syncs.values()) > 1  # the most that is allowed
    assert any("kscl/engine/loop.py" in line for _, line in loader.syncs)


@PRETENDED
def test_a_collective_too_many_is_noticed(tmp_path):
    def voted_twice(self: Any, *args: Any) -> None:
        after_step(self, *args)
        dist.all_reduce(torch.zeros(1, device=CUDA))

    after_step = KSCL.after_step
    with gpu(RANKS) as device, patch.object(KSCL, "after_step", voted_twice):
        _, loader, _ = train(K5, tmp_path, device, RANKS)
    assert sum(loader.collectives.values()) > 5, loader.told  # the most that is allowed


BANK = ["DICTIONARY.TYPE", "memory_bank"]
without, prefetched = kernels._without, loop.prefetched


def in_another_order(learner: KSCL, *args: Any) -> Tensor:
    return embed_keys(learner, *args).flip(0)


def with_empty_entries(similarity: Tensor, start: int, empty: Tensor, own: Any) -> Tensor:
    return without(similarity, start, torch.zeros_like(empty), own)


def with_its_own(similarity: Tensor, start: int, empty: Tensor, own: Any) -> Tensor:
    return without(similarity, start, empty, None)


def not_at_all(*_: Any) -> None:
    pass


def one_step_late(batches: Any, *where: Any) -> Iterator[Any]:
    before = None
    for batch in prefetched(batches, *where):
        yield batch if before is None else before
        before = batch


WRONG: dict[str, tuple[Any, str, Callable[..., Any], list[Any]]] = {
    "keys of other images": (KSCL, "embed_keys", in_another_order, K5),
    "empty entries of a bank": (kernels, "_without", with_empty_entries, [*K5, *BANK]),
    "an image as its own negative": (kernels, "_without", with_its_own, [*K5, *BANK]),
    "a momentum encoder that stands still": (KSCL, "follow", not_at_all, K5),
    "the batch before": (loop, "prefetched", one_step_late, K5),
}


@PRETENDED
@pytest.mark.parametrize("fault", WRONG)
def test_wrong_numbers_differ_by_more_than_the_tolerance(fault, tmp_path):
    owner, name, faulty, words = WRONG[fault]
    expected = train(words, tmp_path / "cpu", CPU)[2]
    with gpu() as device, patch.object(owner, name, faulty):
        metrics = train(words, tmp_path / "gpu", device)[2]
    assert abs(metrics["loss"] / expected["loss"] - 1) > TOLERANCE
