"""Where a step's time goes, measured on this machine."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from kscl.commands.profile_step import main, table
from kscl.data.loader import Budget
from kscl.engine import loop
from kscl.engine.profile import StepProfile
from tests.helpers.commands import tool
from tests.helpers.runs import TINY, draw_images

PHASES = {
    *("host to device", "query pass", "key passes", "loss head", "backward pass"),
    *("optimizer", "dictionary, momentum"),
}


def test_the_tool_prints_every_part_of_a_step_and_leaves_no_trace(tmp_path, capsys):
    images = draw_images(tmp_path / "images", count=16)
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    before = loop.to_device, loop.forward, dist.all_reduce
    words = ["--steps", "2", "--config-file", str(config), "DATA.TRAIN", str(images)]
    assert main([*words, "DATA.CACHE_DIR", str(tmp_path), "SOLVER.BATCH_SIZE", "8"]) == 0
    shown = capsys.readouterr().out
    rows = {line.split("|")[1].strip(): line.split("|")[2] for line in shown.splitlines()[3:-1]}
    assert set(rows) >= PHASES
    assert all(float(rows[name].replace(",", "")) > 0 for name in PHASES)
    assert "0 collectives" in shown.splitlines()[-1]
    assert (loop.to_device, loop.forward, dist.all_reduce) == before


@pytest.mark.slow
def test_two_ranks_have_collectives_within_the_budget(tmp_path):
    images = draw_images(tmp_path / "images", count=16)
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    words = ["--num-gpus", "2", "--steps", "2", "--config-file", config, "DATA.TRAIN", images]
    done = tool("profile_step", *words, "DATA.CACHE_DIR", tmp_path, "SOLVER.BATCH_SIZE", "8")
    assert done.returncode == 0, done.stderr
    *rows, last = done.stdout.splitlines()
    assert any(row.startswith("| collectives ") for row in rows)
    assert 1 <= int(last.partition(" collectives beside")[0].split()[-1]) <= 5
    assert "Held back by: " in last


@pytest.mark.parametrize(("workers", "held_back_by"), [(1, "loader"), (64, "key passes")])
def test_it_names_what_holds_the_run_back(workers, held_back_by):
    budget = Budget(decode=800.0, augment=200.0, workers=workers)  # 160 images per second and core
    phases = {"key passes": 50.0, "query pass": 10.0, "backward pass": 30.0}
    profile = StepProfile(32, 90.0, phases, 1.0, 5.0, budget)
    shown = table(profile, 8, "cuda").splitlines()
    assert f"loader ({workers} worker{'s' if workers > 1 else ''}, beside the step)" in shown[3]
    assert shown[-1].startswith("1 host synchronizations and 5 collectives")
    assert shown[-1].endswith(f"Held back by: {held_back_by}.")
