"""GPUs that the installed torch can use, and memory that is reused without asking the system."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from kscl.errors import KsclError
from kscl.records.health import examine
from kscl.runtime.launch import launch, visible_gpu
from tests.helpers.commands import ROOT


def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_that_a_scheduler_shows(monkeypatch):
    assert [visible_gpu(number, 8) for number in (0, 7)] == [0, 7]
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert visible_gpu(3, 1) == 0


def test_more_ranks_than_gpus_are_refused_by_name(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    for local_rank, gpus in ((1, 1), (4, 4)):
        with pytest.raises(KsclError, match=f"LOCAL_RANK is {local_rank}.*CUDA_VISIBLE_DEVICES"):
            visible_gpu(local_rank, gpus)


@pytest.fixture
def one_gpu(monkeypatch):
    """Pretend a GPU of a given capability beside the wheels of CUDA 13; return a function."""
    built = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]

    def pretend(*capability: int, also: tuple[str, ...] = ()) -> None:
        for name, answer in {
            "device_count": 1,
            "get_device_capability": capability,
            "get_device_name": "Tesla V100",
            "get_arch_list": [*built, *also],
            "get_device_properties": SimpleNamespace(name="Tesla V100", total_memory=2**35),
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)

    return pretend


def work(_: object) -> int:
    return 7


@pytest.mark.parametrize(
    ("capability", "named"),
    [((7, 0), "download.pytorch.org/whl/cu126"), ((13, 0), "pytorch.org/get-started")],
)
def test_a_gpu_that_the_installed_torch_has_no_code_for_is_told_before_anything_starts(
    one_gpu, monkeypatch, capsys, capability, named
):
    one_gpu(*capability)
    sm = f"sm_{capability[0]}{capability[1]}"
    with pytest.raises(KsclError, match=rf"Tesla V100, is {sm}.*sm_75.*{named}"):
        launch(work, None, 1)
    (finding,) = [it for it in examine() if it.what == "GPU 0"]
    assert finding.mark == "PROBLEM"
    assert named in finding.fix
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("kscl.runtime.launch.leave", lambda code: code)
    assert launch(work, None, 1) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("capability", "also"),
    [((7, 5), ()), ((8, 9), ()), ((12, 1), ()), ((13, 0), ("compute_120",)), ((7, 0), ("sm_70",))],
)
def test_a_gpu_runs_code_of_its_major_version_and_code_for_all_later_ones(
    one_gpu, capability, also
):
    one_gpu(*capability, also=also)
    assert launch(work, None, 1) == 7


COUNT_FAULTS = """
import resource, sys
import torch
from kscl.runtime.machine import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = 0
for turn in range(40):
    torch.ones(10_000_000)
    if turn == 29:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="an allocator of Linux")
def test_repeated_large_tensors_cost_no_page_faults_when_memory_is_kept() -> None:
    faults = {}
    for choice in ("keep", "return"):
        command = [sys.executable, "-c", COUNT_FAULTS, choice]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        faults[choice] = int(done.stdout)
    assert faults["keep"] < 0.1 * faults["return"], faults
