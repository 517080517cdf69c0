"""Figures of the learner: the subspace, the dictionary, a whole step."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kscl.keys import load_config
from kscl.methods.dictionary import Queue
from kscl.methods.encoder import build_encoder
from kscl.methods.kernels import all_lengths
from kscl.methods.kscl import KSCL
from kscl.methods.subspace import Subspaces, fit_subspaces, own_projection_length
from kscl.runtime.machine import keep_freed_memory
from kscl.views.batch import Batch
from tests.benchmarks.harness import SkippedError, figure, in_own_process, time_ratio

QUERIES, LENGTH, SHOTS, DIM, TAU = 256, 65_536, 5, 128, 0.2
RANK = 2  # ceil(0.4 * 5)


def two_threads() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)


def unit(*shape: int) -> Tensor:
    return F.normalize(torch.randn(*shape), dim=-1)


@figure("learner-gram-route", "subspaces by Gram matrix vs D x D eigendecomposition", at_least=80)
def gram_route() -> float:
    two_threads()
    keys = unit(QUERIES, SHOTS, DIM)
    by_covariance = lambda: torch.linalg.eigh(keys.mT @ keys)  # noqa: E731
    # Several a round: one call is over before the clock is warm.
    by_gram = lambda: [fit_subspaces(keys, 0.4) for _ in range(20)]  # noqa: E731
    return 20 * time_ratio(by_covariance, by_gram, rounds=5)


def filled_queue(share_of_rank_2: float, length: int = LENGTH) -> Queue:
    queue = Queue(length, RANK, DIM)
    basis = unit(length, RANK, DIM)
    rank = 1 + (torch.rand(length) < share_of_rank_2).long()
    basis[rank == 1, 1] = 0
    queue.store(Subspaces(basis, rank, torch.ones(length, 1)), torch.arange(length))
    return queue


def lengths_and_einsum(queue: Queue) -> tuple[Callable[[], object], Callable[[], object]]:
    """Lengths and the gradient of the queries: ours, and the formula over K padded vectors."""
    query, grad = unit(QUERIES, DIM).requires_grad_(), torch.rand(QUERIES, LENGTH)
    padded = torch.zeros(LENGTH, SHOTS, DIM)
    padded[:, :RANK] = queue.slots.transpose(0, 1)

    def ours() -> None:
        torch.autograd.grad(all_lengths(query, *queue.filled()), query, grad)

    def einsum() -> None:
        squares = torch.einsum("md,nkd->mnk", query, padded).square().sum(2)
        torch.autograd.grad(squares.clamp_min(1e-12).sqrt(), query, grad)

    return ours, einsum


@figure(
    "learner-lengths-rank-2", "65,536 lengths, all of rank 2, vs einsum", at_least=2.5, alone=True
)
def speed_at_rank_2() -> float:
    two_threads()
    keep_freed_memory()
    ours, einsum = lengths_and_einsum(filled_queue(1.0))
    return time_ratio(einsum, ours, rounds=5)


@figure(
    "learner-lengths-rank-1", "65,536 lengths, 99 % of rank 1, vs einsum", at_least=4, alone=True
)
def speed_at_rank_1() -> float:
    two_threads()
    keep_freed_memory()
    ours, einsum = lengths_and_einsum(filled_queue(0.01))
    return time_ratio(einsum, ours, rounds=5)


@figure("learner-lengths-memory", "peak memory of lengths vs einsum", at_most=40, unit=" %")
def lengths_memory() -> float:
    if not Path("/proc/self/clear_refs").exists():
        raise SkippedError("the high-water mark of memory is read from Linux's /proc")
    return in_own_process(__name__, "memory_share")


def memory_share() -> float:
    two_threads()
    ours, einsum = lengths_and_einsum(filled_queue(1.0))
    ours()
    return 100 * peak_memory(ours) / peak_memory(einsum)


def peak_memory(work: Callable[[], object]) -> float:
    """Bytes of this process beyond what it has now (Linux keeps the high-water mark)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def resident(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return 1024 * float(line.split()[1])
    raise RuntimeError(f"no {key} in /proc/self/status")


@figure(
    "learner-loss-vs-moco", "logits and cross-entropy at rank 1 vs MoCo's", at_most=1.25, alone=True
)
def loss_time_over_moco() -> float:
    two_threads()
    keep_freed_memory()
    queue = filled_queue(0.0)
    query, key = unit(QUERIES, DIM).requires_grad_(), unit(QUERIES, 1, DIM)
    columns, target = queue.slots[0].T.contiguous(), torch.zeros(QUERIES, dtype=torch.long)

    def ours() -> None:
        positive = own_projection_length(query, key) / TAU
        negatives = queue.negatives(query, target, key, target, TAU)
        torch.autograd.grad(F.softplus(negatives.log_sum - positive).mean(), query)

    def moco() -> None:
        positive = (query * key[:, 0]).sum(1, keepdim=True)
        logits = torch.cat([positive, query @ columns], 1)
        logits /= TAU  # in place, as MoCo does
        torch.autograd.grad(F.cross_entropy(logits, target), query)

    return time_ratio(ours, moco)


def training_step(num_shots: int, norm: str) -> tuple[KSCL, Callable[[], float]]:
    """A learner on a narrow ResNet-50 at 64 px, and a step of it that says what backward took.

    Channels last and with freed memory kept, as one trains on a CPU.
    """
    encoder = build_encoder("resnet50", {"channels": [16, 32, 64, 128]}, dim=DIM, input_size=64)
    encoder = encoder.to(memory_format=torch.channels_last)
    words = ["METHOD.NUM_SHOTS", num_shots, "KEY_ENCODER.BATCH_NORM", norm, "PROJECTOR.DIM", DIM]
    cfg = load_config(None, [str(word) for word in [*words, "DICTIONARY.QUEUE_LENGTH", 4096]])
    learner = KSCL(cfg, None, encoder)
    queue = learner.dictionary
    views = torch.randn(num_shots + 1, 32, 64, 64, 3).permute(1, 0, 4, 2, 3)
    alike = F.normalize(unit(4096, 1, DIM) + 0.6 * unit(4096, num_shots, DIM), dim=2)  # cosine 0.7
    queue.store(fit_subspaces(alike, 0.4), torch.arange(4096))
    parameters = list(encoder.parameters())

    def step() -> float:
        for parameter in parameters:  # as optimizers do it
            parameter.grad = None
        loss = learner(Batch(views, torch.arange(len(views))))["loss"]
        start = time.perf_counter()
        loss.backward()
        took = time.perf_counter() - start
        learner.after_step()
        return took

    return learner, step


@figure(
    "learner-overhead",
    "a K=5 step beyond encoders and backward (the optimizer's part is in engine-overhead)",
    at_most=3,
    unit=" %",
    alone=True,
)
def overhead_share() -> float:
    two_threads()
    keep_freed_memory()
    learner, step = training_step(SHOTS, "train")
    spent = 0.0

    def enter(*_: object) -> None:
        nonlocal spent
        spent -= time.perf_counter()

    def leave(*_: object) -> None:
        nonlocal spent
        spent += time.perf_counter()

    for encoder in (learner.encoder, learner.key_encoder):
        assert isinstance(encoder, nn.Module)
        encoder.register_forward_pre_hook(enter)
        encoder.register_forward_hook(leave)
    shares = []
    for _ in range(6):
        spent = 0.0
        start = time.perf_counter()
        backward = step()
        total = time.perf_counter() - start
        shares.append(100 * (total - backward - spent) / total)
    return statistics.median(shares[1:])


@figure("learner-k5-eval-norm", "a step of K=5 : K=1, keys in eval mode", at_most=2.0, alone=True)
def step_ratio_eval() -> float:
    two_threads()
    keep_freed_memory()
    return time_ratio(training_step(SHOTS, "eval")[1], training_step(1, "eval")[1])


@figure("learner-k5-train-norm", "a step of K=5 : K=1, keys in train mode", at_most=2.1, alone=True)
def step_ratio_train() -> float:
    two_threads()
    keep_freed_memory()
    return time_ratio(training_step(SHOTS, "train")[1], training_step(1, "train")[1])
