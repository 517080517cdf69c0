"""Run evaluations: claim a folder, resume what is there, evaluate."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from kscl.config.tree import CONFIG_FILE, save_config
from kscl.engine.run_dir import find_start
from kscl.errors import KsclError
from kscl.records.record import RECORD_FILE, RecordError, read_record
from kscl.runtime.cpu import avoid_broken_amx
from kscl.runtime.folder_lock import only_run_in
from kscl.runtime.logs import LOGGER, set_up_logging
from kscl.runtime.precision import set_numerics, warn_of_emulation
from kscl.runtime.processes.distributed import rank
from kscl.runtime.processes.ranks import device, on_first_rank
from kscl.runtime.processes.signals import stop_requests
from linear_eval.backbone import freeze, load
from linear_eval.checkpoint import Stopped
from linear_eval.config import WITHOUT_EFFECT_ON_RESULTS
from linear_eval.errors import LinearEvalError
from linear_eval.evaluate import evaluate, hash_of_subset, open_and_check
from linear_eval.protocols import protocol_of
from linear_eval.record import sizes_of, summary

log = logging.getLogger(LOGGER)


@dataclass(frozen=True)
class Job:
    """What every rank needs to know of one evaluation."""

    cfg: CfgNode
    resume: bool = False
    auto_resume: bool = False


def jobs_of(cfg: CfgNode, num_seeds: int, resume: bool, auto_resume: bool) -> list[Job]:
    """Return one evaluation, or one per seed in folders seed0, seed1, … if `num_seeds` is not 0."""
    if num_seeds < 0:
        raise LinearEvalError(f"--num-seeds is {num_seeds}. It must be at least 1.")
    configs = [with_seed(cfg, cfg.SEED + n) for n in range(num_seeds)] or [cfg]
    return [Job(each, resume, auto_resume) for each in configs]


def with_seed(cfg: CfgNode, seed: int) -> CfgNode:
    """Return the same evaluation with another seed, in a folder of its own."""
    other = cfg.clone()
    other.defrost()
    other.SEED = seed
    other.OUTPUT_DIR = str(Path(cfg.OUTPUT_DIR) / f"seed{seed}")
    other.freeze()
    return other


def run_all(jobs: Sequence[Job]) -> int:
    """Do one rank's part of several evaluations, one after another; return the exit code."""
    for job in jobs:
        if code := run(job):
            return code
    if rank() == 0:
        print(summary([Path(job.cfg.OUTPUT_DIR) for job in jobs]), flush=True)
    return 0


def run(job: Job) -> int:
    """Do one rank's part of one evaluation, from claiming its folder to its record."""
    cfg, folder = job.cfg, Path(job.cfg.OUTPUT_DIR)
    set_up_logging(rank=rank())
    set_numerics(tf32=cfg.SOLVER.TF32)
    warn_of_emulation(cfg.SOLVER.AMP, device())
    if cfg.SOLVER.AMP == "bf16" and device().type == "cpu":
        avoid_broken_amx()
    with contextlib.ExitStack() as until_the_end, stop_requests() as stop:

        def claim() -> bool:
            until_the_end.enter_context(only_run_in(folder))
            check_folder(job)
            return has_record(folder)

        if on_first_rank(claim):
            refuse_other_ending(cfg, folder)
            log.info("This evaluation has ended: %s.", folder / RECORD_FILE)
            return 0
        # All that can be refused is refused before anything is written: a folder with files of a
        # run that never began would block the corrected command.
        began = time.monotonic()
        data = open_and_check(cfg)
        frozen = freeze(cfg, next(iter(data.values())))
        set_up_logging(folder, rank())
        on_first_rank(lambda: save_config(cfg, folder))
        try:
            evaluate(cfg, folder, stop, data, frozen, began)
        except Stopped as stopped:
            log.info("%s", stopped)
            return stopped.exit_code
    return 0


def check_folder(job: Job) -> None:
    """Raise an error unless the folder is empty, or is that of this run and it may resume."""
    folder = Path(job.cfg.OUTPUT_DIR)
    if job.resume and not (folder / CONFIG_FILE).exists():
        raise LinearEvalError(
            f"There is nothing to resume in {folder}. --auto-resume starts a run if there is none."
        )
    # Most of a probe's state is its cached features, so a run without a checkpoint resumes too.
    find_start(job.cfg, False, job.resume or job.auto_resume, WITHOUT_EFFECT_ON_RESULTS)


def refuse_other_ending(cfg: CfgNode, folder: Path) -> None:
    """Raise if the evaluation that has ended here was of other weights or images than are named.

    What was named in the same way then may be gone now.
    """
    record = read_record(folder / RECORD_FILE)
    named = record.config.values
    before: dict[str, Any] = {}
    now: dict[str, Any] = {}
    try:
        loaded = load(cfg)
        before["the backbone"] = record.inputs.get("backbone")
        now["the backbone"] = loaded.file_sha256 or loaded.tensors_sha256
    except KsclError:
        if named["BACKBONE"]["WEIGHTS"] != cfg.BACKBONE.WEIGHTS:
            raise
    try:
        data = open_and_check(cfg)
        before |= {f"the data of {role}": known["hash"] for role, known in record.data.items()}
        now |= {f"the data of {role}": each.fingerprint["hash"] for role, each in data.items()}
        before["the list of DATA.SUBSET"] = hash_of_subset(record.protocol)
        now["the list of DATA.SUBSET"] = hash_of_subset(protocol_of(cfg, sizes_of(data)))
    except (KsclError, SystemExit):  # the latter on ranks whose rank 0 has the error
        if any(named["DATA"][key] != cfg.DATA[key] for key in ("TRAIN", "VAL")):
            raise
    changed = [name for name in now if before.get(name) != now[name]]
    if changed:
        raise LinearEvalError(
            f"{folder} holds an evaluation that has ended, and {' and '.join(changed)} differ from "
            "what it was made with. Choose another OUTPUT_DIR, or delete the folder to evaluate "
            "again."
        )


def has_record(folder: Path) -> bool:
    """Tell whether the evaluation has ended; raise an error if its record cannot be read."""
    path = folder / RECORD_FILE
    if not os.path.lexists(path):
        return False
    try:
        read_record(path)
    except RecordError as error:
        raise LinearEvalError(
            f"{error} Delete it to evaluate again, or choose another OUTPUT_DIR."
        ) from error
    return True
