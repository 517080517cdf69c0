"""Compiled encoders: the same losses, the same names, and a clear word where nothing compiles."""

from __future__ import annotations

import shutil

import pytest
import torch

from kscl.data.loader import Batch
from kscl.engine.loop import take_step
from kscl.engine.state import TrainState, Window, build_state
from kscl.errors import KsclError
from kscl.keys import load_config
from tests.helpers.runs import TINY

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


@pytest.mark.parametrize("groups", ["1", "2"])
def test_compiled_encoders_have_the_same_losses_and_names(tmp_path, groups):
    words = ("KEY_ENCODER.BATCH_NORM_GROUPS", groups)
    plain = state_of(tmp_path, *words)
    compiled = state_of(tmp_path, *words, "SOLVER.COMPILE", "aot_eager")
    assert plain.cfg.SOLVER.COMPILE == "off"  # by default
    assert list(plain.learner.state_dict()) == list(compiled.learner.state_dict())
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
