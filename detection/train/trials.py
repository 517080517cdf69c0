"""Several trials of one config, each with its own seed and folder."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from detectron2.config import CfgNode

from detection.convert.verify import verify_start
from detection.data.sets import read_run_sets
from detection.errors import DetectionError
from detection.scoring.result import MASK_PREFIX
from detection.train.check import build_on_paper
from detection.train.checkpoint import refuse_other_use
from detection.train.lr_search import GRID_KEY, SEARCH_FOLDER, check_grid, search, search_summary
from detection.train.trial import Job, is_finished, refuse_run_folder, run_trial, score_detector
from kscl.config.tree import CONFIG_FILE
from kscl.engine.run_dir import find_start
from kscl.records.record import RECORD_FILE, read_record
from kscl.records.spread import mean_and_std
from kscl.runtime.folder_lock import only_run_in
from kscl.runtime.processes.launch import launch

HEADLINE = ("AP50", "AP", "AP75")
OF_MASKS = tuple(f"{MASK_PREFIX}{name}" for name in HEADLINE)


def run_trials(
    cfg: CfgNode,
    num_gpus: int,
    num_trials: int = 0,
    *,
    resume: bool = False,
    auto_resume: bool = False,
    allow_world_size_change: bool = False,
    scaled_from: int = 0,
) -> int:
    """Check data, weights and detector, run every unfinished trial, and return the exit code."""
    if cfg.KSCL.LR_GRID:
        check_grid(list(cfg.KSCL.LR_GRID), GRID_KEY)
        num_trials = max(1, num_trials)  # beside the folder of the search
    configs = trial_configs(cfg, num_trials)
    begun = [Path(cfg.OUTPUT_DIR) / SEARCH_FOLDER]
    begun += [Path(trial_cfg.OUTPUT_DIR) / CONFIG_FILE for trial_cfg in configs]
    if resume and not any(path.exists() for path in begun):
        raise DetectionError(
            f"There is nothing to resume in {cfg.OUTPUT_DIR}. Leave --resume out to start, or use "
            "--auto-resume for either."
        )
    if not (resume or auto_resume):
        _refuse_used_folders(configs)
    sets, report = read_run_sets(cfg)
    print(report, flush=True)
    certificate = verify_start(cfg)
    build_on_paper(cfg)
    # Of several trials some may not have begun: those start.
    one = num_trials == 0
    job = Job(
        cfg,
        certificate,
        sets,
        resume=resume and one,
        auto_resume=auto_resume or (resume and not one),
        allow_world_size_change=allow_world_size_change,
        scaled_from=scaled_from,
    )
    if cfg.KSCL.LR_GRID:
        begin = job
        code, found = search(cfg, sets, lambda c, s: _run(replace(begin, cfg=c, sets=s), num_gpus))
        if found is None:
            return code
        print(search_summary(found), flush=True)
        configs = [_with_rate(trial_cfg, found["chosen"]) for trial_cfg in configs]
        job = replace(job, lr_search=found)
    jobs = [replace(job, cfg=trial_cfg) for trial_cfg in configs]
    for job in jobs:
        if code := _run(job, num_gpus):
            return code
    if int(os.environ.get("RANK", 0)) == 0:
        print(summary([job.folder for job in jobs]), flush=True)
    return 0


def _refuse_used_folders(configs: list[CfgNode]) -> None:
    """Raise an error before data and weights are read if a folder is not free for a new run."""
    for cfg in configs:
        folder = Path(cfg.OUTPUT_DIR)
        if folder.is_dir():
            with only_run_in(folder):
                find_start(cfg, resume=False, auto_resume=False)


def _run(job: Job, num_gpus: int) -> int:
    """Run a trial unless it is finished; return the exit code."""
    if is_finished(job):
        print(f"{job.folder}: finished before, kept.", flush=True)
        return 0
    return launch(run_trial, job, num_gpus)


def _with_rate(cfg: CfgNode, rate: float) -> CfgNode:
    cfg = cfg.clone()
    cfg.defrost()
    cfg.SOLVER.BASE_LR = rate
    cfg.freeze()
    return cfg


def run_evaluation(cfg: CfgNode, num_gpus: int) -> int:
    """Score MODEL.WEIGHTS, a trained detector, and save the pass in OUTPUT_DIR."""
    refuse_run_folder(Path(cfg.OUTPUT_DIR))
    sets, report = read_run_sets(cfg)
    print(report, flush=True)
    refuse_other_use(cfg, sets.class_names)
    return launch(score_detector, Job(cfg, None, sets), num_gpus)


def trial_configs(cfg: CfgNode, num_trials: int) -> list[CfgNode]:
    """Return one frozen config per trial; without a number, the config as it is."""
    configs = []
    for number in range(max(1, num_trials)):
        trial_cfg = cfg.clone()
        if num_trials:
            trial_cfg.SEED = cfg.SEED + number
            trial_cfg.OUTPUT_DIR = str(Path(cfg.OUTPUT_DIR) / f"seed{trial_cfg.SEED}")
        trial_cfg.freeze()
        configs.append(trial_cfg)
    return configs


def summary(folders: list[Path]) -> str:
    """Return mean ± standard deviation over the trials, and what their records warn of."""
    records = [read_record(folder / RECORD_FILE) for folder in folders]
    parts = []
    for name in (*HEADLINE, *OF_MASKS):
        values = [record["metrics"][name] for record in records if name in record["metrics"]]
        if values:
            parts.append(f"{name.replace('/', ' ')} {mean_and_std(values)}")
    count = "1 trial" if len(records) == 1 else f"{len(records)} trials"
    warned = [f"Warning: {text}" for it in records for text in it["details"].get("warnings", [])]
    line = f"{', '.join(parts)} ({count}, {records[0]['details']['scorer']})"
    return "\n".join(dict.fromkeys([line, *warned]))
