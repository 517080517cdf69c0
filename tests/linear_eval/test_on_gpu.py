"""Probes on a GPU, pretended where there is none, give the CPU's numbers."""

from __future__ import annotations

import contextlib

import pytest
import torch

from kscl.records.record import read_record
from linear_eval.commands.linear_eval import main
from tests.helpers.data.digits import overrides
from tests.helpers.gpu.pretend import pretend_gpu

PROBES = {
    "online": [],
    "online in bf16": ["SOLVER.AMP", "bf16"],
    "cached": ["PROBE", "cached", "SOLVER.SCHEDULE", "cosine"],
    "cached by lbfgs": ["PROBE", "cached", "CACHED.METHOD", "lbfgs", "CACHED.LBFGS_ITERATIONS", 5],
    "knn": ["PROBE", "knn"],
}


def top1(digits, folder, words) -> float:
    cache = ["DATA.CACHE_DIR", folder / "cache"]
    assert main(overrides(digits, folder / "run", *cache, *words)) == 0
    return read_record(folder / "run" / "record.json")["metrics"]["top1"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU (make test-gpu)")
@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_on_a_gpu_has_the_score_of_the_cpu(probe, digits, tmp_path):
    check(probe, digits, tmp_path, pretend_gpu())


@pytest.mark.gpu
@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_on_a_real_gpu_has_the_score_of_the_cpu(probe, digits, tmp_path):
    check(probe, digits, tmp_path, contextlib.nullcontext())


def check(probe, digits, folder, gpu) -> None:
    with pytest.MonkeyPatch.context() as hidden:
        hidden.setattr(torch.cuda, "is_available", lambda: False)
        on_cpu = top1(digits, folder / "cpu", PROBES[probe])
    with gpu:
        on_gpu = top1(digits, folder / "gpu", PROBES[probe])
    one_image = 100 / 60
    assert on_gpu == pytest.approx(on_cpu, abs=2 * one_image if "bf16" in probe else one_image)
