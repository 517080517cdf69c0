"""How a GPU computes: what a config asks for is what torch is told and what a record says."""

from __future__ import annotations

import logging

import pytest
import torch

from kscl.commands.pretrain import main
from kscl.records.record import read_record
from kscl.runtime.precision import numerics, set_numerics, warn_of_emulation
from tests.helpers.runs import Run, draw_images

SWITCHES = ("tf32", "cudnn_benchmark", "deterministic")


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.backends.cudnn.allow_tf32
    yield
    set_numerics()
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("chosen", [(), *((name,) for name in SWITCHES)])
def test_what_was_chosen_is_what_torch_does_and_what_a_record_says(chosen):
    set_numerics(**dict.fromkeys(chosen, True))
    assert [name for name, value in numerics().items() if value] == list(chosen)
    assert torch.backends.cudnn.allow_tf32 is ("tf32" in chosen)
    assert torch.backends.cuda.matmul.allow_tf32 is ("tf32" in chosen)
    assert torch.backends.cudnn.benchmark is ("cudnn_benchmark" in chosen)
    assert torch.are_deterministic_algorithms_enabled() is ("deterministic" in chosen)


def test_what_a_config_chooses_is_in_force_in_the_run_and_in_its_record(tmp_path):
    images = draw_images(tmp_path / "images", count=16)
    for name in SWITCHES:
        words = (f"SOLVER.{name.upper()}", "true", "SOLVER.MAX_STEPS", 1)
        run = Run(tmp_path / name, images, *words)
        assert main(run.command()) == 0
        told = read_record(run.folder / "record.json")["details"]["numerics"]
        assert told == {each: each == name for each in SWITCHES}


def test_bf16_on_a_gpu_that_emulates_it_is_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla V100")
    gpu = torch.device("cuda", 0)
    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
        warn_of_emulation("bf16", gpu)
        warn_of_emulation("bf16", torch.device("cpu"))
        assert not caplog.messages
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
        warn_of_emulation("fp16", gpu)
        assert not caplog.messages
        warn_of_emulation("bf16", gpu)
    (told,) = caplog.messages
    assert "Tesla V100" in told
    assert "fp16" in told
