"""Where the time of a step goes on this machine, and how often the host waits for the GPU."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode

from kscl.data.loader import Batch, Budget, build_train_loader, measure_budget, steps_per_epoch
from kscl.data.open import open_source
from kscl.engine import loop
from kscl.engine.loop import TrainState, build_state
from kscl.runtime.distributed import device, first_rank_first, rank, world_size

WARM_UP = 3  # steps before anything is measured
REST = "backward pass"
LOADER = "loader"
ENCODERS = ("query pass", "key passes")  # of the trained encoder and of its copy
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "all_to_all_single")


@dataclass(frozen=True)
class StepProfile:
    """The time of one step on this rank, whose part of the batch is `images`."""

    images: int
    milliseconds: float  # undisturbed; phases, measured one by one, add up to more
    phases: dict[str, float]  # milliseconds each
    syncs: float | None  # host synchronizations; None on a CPU, which has none
    collectives: float  # beside those of DistributedDataParallel
    budget: Budget  # of the loader

    @property
    def loader_milliseconds(self) -> float:
        """Return how long the workers take for this rank's part of a batch."""
        return 1000 * self.images / self.budget.load

    @property
    def held_back_by(self) -> str:
        """Return the slowest: the loader, or the longest phase of the step."""
        if self.loader_milliseconds > self.milliseconds:
            return LOADER
        return max(self.phases, key=lambda phase: self.phases[phase])


class _Clock:
    """Milliseconds by phase; a phase within another one is not counted in it."""

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.spent: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.open: list[str] = []
        self.since = 0.0

    def _turn(self) -> None:
        if self.where.type == "cuda":
            torch.cuda.synchronize(self.where)
        now = time.perf_counter()
        if self.open:
            self.spent[self.open[-1]] += 1000 * (now - self.since)
        self.since = now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._turn()
        self.calls[name] += 1
        self.open.append(name)
        try:
            yield
        finally:
            self._turn()
            self.open.pop()

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **options: Any) -> Any:
            with self.phase(name):
                done = work(*args, **options)
                if isinstance(done, dist.Work):
                    done.wait()  # here, as its time would be counted as that of another phase
                return done

        return measured


def profile_step(cfg: CfgNode, steps: int) -> StepProfile:
    """Take steps on the images of the config, and return what one of them takes on this rank."""
    source = first_rank_first(
        lambda: open_source(cfg.DATA.TRAIN, cfg.DATA.CACHE_DIR, cfg.DATA.CACHE_GB)
    )
    per_epoch = steps_per_epoch(len(source), cfg.SOLVER.BATCH_SIZE)
    state = build_state(cfg, len(source), per_epoch, device())
    loader = build_train_loader(
        cfg, source, last_step=WARM_UP + 1, rank=rank(), world_size=world_size()
    )
    batch = next(iter(loader))
    for _ in range(WARM_UP):
        loop.take_step(state, batch)
    whole, clock = _Clock(state.device), _Clock(state.device)
    with whole.phase(REST):
        for _ in range(steps):
            loop.take_step(state, batch)
    syncs = _count_syncs(state, batch) if state.device.type == "cuda" else None
    with _instrumented(state, clock):
        for _ in range(steps):
            with clock.phase(REST):
                loop.take_step(state, batch)
    return StepProfile(
        images=len(batch.views),
        milliseconds=whole.spent[REST] / steps,
        phases={name: spent / steps for name, spent in clock.spent.items()},
        syncs=syncs,
        collectives=clock.calls["collectives"] / steps,
        budget=measure_budget(loader.dataset, cfg.DATA.NUM_WORKERS),
    )


def _count_syncs(state: TrainState, batch: Batch) -> float:
    """Count torch's own warnings of operations that wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            loop.take_step(state, batch)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return float(sum("synchronizing" in str(warning.message) for warning in caught))


@contextlib.contextmanager
def _instrumented(state: TrainState, clock: _Clock) -> Iterator[None]:
    """Measure the parts of a step; whatever is not named belongs to the backward pass."""
    encoders = zip(state.method.encoders(), ENCODERS, strict=False)
    places: list[tuple[Any, str, str]] = [
        (loop, "to_device", "host to device"),
        (loop, "forward", "loss head"),  # but for the encoders within it
        *((encoder, "forward", phase) for encoder, phase in encoders),
        (state.optimizer, "step", "optimizer"),
        (state.method, "after_step", "dictionary, momentum"),
        *((dist, name, "collectives") for name in COLLECTIVES),
    ]
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in places]
    for owner, name, phase in places:
        setattr(owner, name, clock.timed(phase, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, own in before:
            delattr(owner, name) if own is None else setattr(owner, name, own)
