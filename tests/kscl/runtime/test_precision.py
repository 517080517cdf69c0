"""How floats are computed: what a config asks for is what torch is told and a record says."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kscl.commands.pretrain import main
from kscl.engine.loop import TrainState, Window, build_state, take_step
from kscl.errors import KsclError
from kscl.keys import load_config
from kscl.records.record import read_record
from kscl.runtime.precision import in_tf32, numerics, set_numerics, suggest_tf32, warn_of_emulation
from kscl.views.batch import Batch
from tests.helpers.runs import TINY, Run, draw_images

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


@pytest.mark.parametrize(
    ("amp", "tf32", "device", "capability", "is_told"),
    [
        ("off", False, "cuda:0", (8, 0), True),
        ("off", False, "cuda:0", (12, 0), True),
        ("off", False, "cuda:0", (7, 5), False),  # it has none
        ("off", True, "cuda:0", (8, 0), False),
        ("bf16", False, "cuda:0", (8, 0), False),  # convolutions are faster still
        ("off", False, "cpu", (8, 0), False),
    ],
)
def test_a_gpu_that_could_use_tf32_is_told_what_it_buys(
    monkeypatch, caplog, amp, tf32, device, capability, is_told
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    with caplog.at_level(logging.INFO):
        suggest_tf32(amp, tf32, torch.device(device))
    assert [("SOLVER.TF32 true" in line) for line in caplog.messages] == [True] * is_told


class Casts(TorchDispatchMode):
    """Counts how often each of these tensors is cast."""

    def __init__(self, tensors):
        super().__init__()
        self.counts = {id(tensor): 0 for tensor in tensors}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self.counts:
            self.counts[id(args[0])] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch_norm", ["train", "eval"])
def test_the_momentum_encoders_weights_are_cast_once_per_step_and_not_per_view(
    batch_norm, tmp_path
):
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    words = ("SOLVER.AMP", "bf16", "SOLVER.BATCH_SIZE", "4", "METHOD.NUM_SHOTS", "3")
    cfg = load_config(file, (*words, "KEY_ENCODER.BATCH_NORM", batch_norm))
    state = build_state(cfg, 96, 6, torch.device("cpu"))
    batch = Batch(torch.zeros(4, 4, 3, 32, 32, dtype=torch.uint8), torch.arange(4), [])
    take_step(state, batch)  # the first one calibrates
    weights = list(state.method.key_encoder.parameters())
    with Casts(weights) as casts:
        take_step(state, batch)
    assert set(casts.counts.values()) == {0, 1}  # vectors of BatchNorm are not cast
    assert not any(weight.requires_grad for weight in weights)


def test_tf32_is_a_matter_of_gpus_and_of_what_was_chosen():
    """Cached features must know it: those of one precision are not those of another."""
    try:
        set_numerics(tf32=True)
        assert in_tf32(torch.device("cuda"))
        assert not in_tf32(torch.device("cpu"))
    finally:
        set_numerics()
    assert not in_tf32(torch.device("cuda"))


CPU = torch.device("cpu")


def state_of(folder, *words) -> TrainState:
    file = folder / "tiny.yaml"
    file.write_text(TINY)
    words = ("BACKBONE.KWARGS.drop_path_rate", "0", "SOLVER.BATCH_SIZE", "4", *words)
    return build_state(load_config(file, words), 96, 6, CPU)


def losses_of(state: TrainState) -> list[float]:
    losses = []
    for step in range(3):
        pixels = torch.Generator().manual_seed(step)
        views = torch.randint(0, 256, (4, 3, 3, 32, 32), dtype=torch.uint8, generator=pixels)
        state.window = Window()
        take_step(state, Batch(views, torch.arange(4), []))
        losses.append(float(state.window.sums["loss"]))
    return losses


@pytest.mark.full
@pytest.mark.parametrize("groups", ["1", "2"])
def test_compiled_encoders_have_the_same_losses_and_names(tmp_path, groups):
    words = ("KEY_ENCODER.BATCH_NORM_GROUPS", groups)
    plain = state_of(tmp_path, *words)
    compiled = state_of(tmp_path, *words, "SOLVER.COMPILE", "aot_eager")
    assert plain.cfg.SOLVER.COMPILE == "off"  # by default
    assert list(plain.method.state_dict()) == list(compiled.method.state_dict())
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    expected = losses_of(plain)
    assert losses_of(compiled) == pytest.approx(expected, rel=1e-4)
    assert expected[-1] > 0
    # The query encoder and the momentum encoder, each one graph.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_without_a_compiler_it_is_said_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(KsclError, match=r"SOLVER\.COMPILE inductor needs a C\+\+ compiler"):
        state_of(tmp_path, "SOLVER.COMPILE", "inductor")
