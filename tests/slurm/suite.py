"""The suite that a real SLURM runs, and its profile."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.helpers.chain import smoke_suite

PROFILE = {
    "resources": {"partition": "main", "gpus_per_node": 1, "cpus": 1, "time": "00:20:00"},
    "kinds": {"board": {"time": "00:05:00"}},
    "max_jobs": 2,
    "retries": 3,
    "seconds_to_save": 60,
}


ON_TWO_NODES = {
    "resources": {"partition": "both", "cpus": 1, "time": "00:20:00"},
    "kinds": {"pretrain": {"nodes": 2}},
}


def write_profile(path: Path, **changes: object) -> Path:
    """Write the profile of the cluster."""
    path.write_text(yaml.safe_dump(PROFILE | changes))
    return path


def write_suite(folder: Path, processes: int) -> Path:
    """Write a suite whose pretraining takes long enough to be stopped on the way.

    With two processes it is no more than that pretraining and a probe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    suite = yaml.safe_load(smoke_suite(folder).read_text())
    suite["pretrain_overrides"] |= {"SOLVER.EPOCHS": 60, "CHECKPOINT.PERIOD_STEPS": 5}
    if processes > 1:
        suite["num_gpus"] = processes
        alone = {"DATA.NUM_WORKERS": 1, "KEY_ENCODER.BATCH_NORM_GROUPS": 1}
        suite["pretrain_overrides"] |= alone  # keys are shuffled among the processes
        suite["evaluations"]["knn"]["num_gpus"] = 1
        for of, name in ((suite["contenders"], "random"), (suite["evaluations"], "detection")):
            del of[name]
        del suite["basis_image"]
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(suite))
    return path
