"""What the ranks of one run decide together: rank 0 goes first, one vote counts for all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from kscl.cli import EXIT_USER_ERROR
from kscl.runtime.processes.distributed import host_group, rank, world_size

LOCAL_SIZE_VARIABLE = "LOCAL_WORLD_SIZE"

Result = TypeVar("Result")


def device() -> torch.device:
    """Return the device of this rank."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def on_first_rank(work: Callable[[], Result]) -> Result:
    """Run `work` on rank 0 and return its result on all ranks; if it fails, every rank ends."""
    if world_size() == 1:
        return work()
    outcome: list[Any] = [None, False]
    failure: Exception | None = None
    if rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            failure, outcome[1] = error, True
    # Not on the GPU: a collective there spins, and gives up after PATIENCE.
    dist.broadcast_object_list(outcome, src=0, group=host_group())
    if failure is not None:
        raise failure
    if outcome[1]:
        raise SystemExit(EXIT_USER_ERROR)  # rank 0 says why
    return outcome[0]


def first_rank_first(work: Callable[[], Result]) -> Result:
    """Run `work` on every rank, on rank 0 before the others, which find what it has cached."""
    results: list[Result] = []
    on_first_rank(lambda: results.append(work()))
    return results[0] if results else work()


def any_rank(flag: bool) -> bool:
    """Return whether the flag is set on any rank."""
    if world_size() == 1:
        return flag
    votes = torch.tensor(float(flag))
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=host_group())
    return bool(votes)


def wait_for_all() -> None:
    """Wait until every rank is here, however long it takes and without using a GPU."""
    if world_size() > 1:
        dist.barrier(group=host_group())


def local_world_size() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get(LOCAL_SIZE_VARIABLE, world_size()))
