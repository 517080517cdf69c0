"""One rank's part of a pretraining run: prepare() → Run, Run.train(), Run.finish().

Each thing is opened once, in `prepare`, and handed on.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fvcore.common.config import CfgNode

from kscl.backbone_file import read_plain
from kscl.config.defaults import WITHOUT_EFFECT_ON_RESULTS
from kscl.config.tree import save_config
from kscl.data.loader import TrainLoader, build_train_loader, steps_per_epoch
from kscl.data.throughput import measure_budget
from kscl.engine.checkpoint import CHECKPOINT_FOLDER
from kscl.engine.export import export
from kscl.engine.knn import KnnCheck
from kscl.engine.loop import settle, train
from kscl.engine.metrics_log import RunLog
from kscl.engine.preview.announce import announce
from kscl.engine.run_dir import find_start
from kscl.engine.start import start_from_weights
from kscl.engine.state import TrainState, build_state, check_room, restore
from kscl.engine.training_images import open_images, refuse_other_data, refuse_other_ending
from kscl.engine.world_size import HINTS, required, world_sizes
from kscl.method.cost import num_views
from kscl.records.record import RECORD_FILE
from kscl.runtime.cpu import keep_freed_memory
from kscl.runtime.folder_lock import only_run_in
from kscl.runtime.logs import set_up_logging
from kscl.runtime.processes.distributed import rank, world_size
from kscl.runtime.processes.ranks import device, on_first_rank
from kscl.runtime.processes.signals import StopRequest, stop_requests

log = logging.getLogger(__name__)

# A run that too many unreadable images have stopped resumes when more of them are allowed.
MAY_CHANGE = (*WITHOUT_EFFECT_ON_RESULTS, "DATA.BAD_IMAGES", "DATA.MAX_BAD_FRACTION")


class Checkpoint(NamedTuple):
    """A checkpoint file and what it holds."""

    path: Path
    content: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What the command asks of every rank."""

    cfg: CfgNode
    resume: bool
    auto_resume: bool
    allow_world_size_change: bool = False


@dataclass(frozen=True)
class Run:
    """What a rank holds from `prepare` to `finish`."""

    folder: Path
    state: TrainState
    loader: TrainLoader
    knn: KnnCheck | None
    data: dict[str, Any]  # fingerprint of the images

    def train(self, stop: StopRequest) -> bool:
        """Train to the last step; return False if a signal asked to stop before it."""
        state, cfg = self.state, self.state.cfg
        if state.step == state.total_steps:
            return True
        budget = measure_budget(self.loader.dataset, cfg.DATA.NUM_WORKERS)
        log.info("Each process: %s", budget.with_encode(settle(state)))
        with RunLog(
            self.folder if rank() == 0 else None,
            state.step,
            state.total_steps,
            state.steps_per_epoch,
            num_views(cfg),
        ) as run_log:
            checkpoints = self.folder / CHECKPOINT_FOLDER
            return train(state, self.loader, self.knn, self.data, checkpoints, run_log, stop)

    def finish(self) -> None:
        """Write the backbone and the record."""
        bad_images = self.loader.bad_images.reasons  # of all ranks, since the last step
        on_first_rank(lambda: export(self.state, self.data, bad_images, self.folder))


def run(job: Job) -> int:
    """Run this rank's part and return its exit code."""
    with contextlib.ExitStack() as held:
        prepared = prepare(job, held)
        if prepared is None:
            return 0
        with stop_requests() as stop:
            if not prepared.train(stop):
                return stop.exit_code
        prepared.finish()
    return 0


def prepare(job: Job, held: contextlib.ExitStack) -> Run | None:
    """Claim the folder, open the images, build or restore the state; None if the run has ended.

    `held` keeps the claim. All that can be refused is refused here, before anything is written.
    """
    cfg, folder = job.cfg, Path(job.cfg.OUTPUT_DIR)
    set_up_logging(rank=rank())
    if device().type == "cpu":
        keep_freed_memory()
    checkpoint = claim(job, held)
    if (folder / RECORD_FILE).exists():
        on_first_rank(lambda: refuse_other_ending(cfg, folder))
        log.info("This run has ended: %s.", folder / RECORD_FILE)
        return None
    source, data = open_images(cfg)
    steps = steps_per_epoch(len(source), cfg.SOLVER.BATCH_SIZE)
    state = build_state(cfg, len(source), steps, device())
    if checkpoint is not None:
        refuse_other_data(checkpoint.content["data"], data, cfg.DATA.TRAIN)
        restore(state, checkpoint.content)
    else:
        state.inputs = start_from_weights(state.learner, cfg)
    loader = build_train_loader(
        cfg,
        source,
        first_step=state.step,
        last_step=state.total_steps,
        rank=rank(),
        world_size=world_size(),
    )
    if checkpoint is not None:
        loader.bad_images.recall(checkpoint.content["bad_images"])
    knn = KnnCheck(cfg) if cfg.EVAL.KNN_PERIOD else None
    if state.step < state.total_steps:
        on_first_rank(lambda: check_room(state, folder))
    # The config is written first: it tells whose folder this is.
    on_first_rank(lambda: save_config(cfg, folder))
    set_up_logging(folder, rank())
    state.world_sizes = world_sizes(checkpoint.content if checkpoint else None, state.step)
    announce(state, data, checkpoint.path if checkpoint is not None else None)
    return Run(folder, state, loader, knn, data)


def claim(job: Job, held: contextlib.ExitStack) -> Checkpoint | None:
    """Hold the folder until the run ends; return the checkpoint to resume from, read once."""
    read: list[Checkpoint] = []

    def on_rank_0() -> Path | None:
        held.enter_context(only_run_in(Path(job.cfg.OUTPUT_DIR)))
        has_ended = (Path(job.cfg.OUTPUT_DIR) / RECORD_FILE).exists()
        newest = find_start(
            job.cfg,
            job.resume,
            job.auto_resume,
            MAY_CHANGE,
            also=required(job.allow_world_size_change or has_ended),
            hints=HINTS,
        )
        if newest is None:
            return None
        read.append(Checkpoint(*newest))
        return read[0].path

    path = on_first_rank(on_rank_0)
    if path is None:
        return None
    return read[0] if read else Checkpoint(path, read_plain(path))
