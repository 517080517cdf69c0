"""A plan on this machine: a few steps are measured, on the images that the config names."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from kscl.benchmark.suite.check import check_stages
from kscl.benchmark.suite.execute import TO_DO, State
from kscl.benchmark.suite.spec import read_suite
from kscl.benchmark.suite.stages import plan as stages_of
from kscl.commands import plan, pretrain
from kscl.data.loader import Budget
from kscl.engine.check import over_all_sizes, seconds_of
from kscl.keys import load_config
from tests.helpers.chain import smoke_suite
from tests.helpers.commands import ROOT
from tests.helpers.data.photos import jpeg, photo

NUM_IMAGES = 20


@pytest.fixture
def words(tmp_path) -> list[str]:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(NUM_IMAGES):
        (folder / f"{number}.jpg").write_bytes(jpeg(photo(number)[:40, :40]))
    network = ["BACKBONE.NAME", "test_resnet", "INPUT.SIZE", "32", "DICTIONARY.QUEUE_LENGTH", "16"]
    return [*network, "DATA.TRAIN", str(folder), "SOLVER.BATCH_SIZE", "8", "SOLVER.EPOCHS", "50"]


def test_a_cpu_is_measured_and_the_images_are_those_of_the_config(words, capsys):
    assert plan.main(["--gpu", "cpu", *words]) == 0
    told = capsys.readouterr().out
    assert f"an epoch of {NUM_IMAGES} images" in told
    assert "encode" in told
    assert plan.main(["--gpu", "V100", *words]) == 0
    assert f"an epoch of {NUM_IMAGES} images" in capsys.readouterr().out


def test_images_that_cannot_be_read_cannot_be_measured(words, capsys):
    words[words.index("DATA.TRAIN") + 1] = "nowhere"
    assert plan.main(["--gpu", "cpu", *words]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert plan.main(words) == 0
    assert "1,281,167 images" in capsys.readouterr().out


@pytest.mark.parametrize(("workers", "rate"), [("0", 20.0), ("2", 60.0)])
def test_the_time_follows_from_the_measured_rates(words, workers, rate, monkeypatch):
    monkeypatch.setattr("kscl.engine.check.usable_cores", lambda: 2)
    cfg = load_config(None, [*words, "DATA.NUM_WORKERS", workers])
    # A core decodes and augments 30 images per second; the encoder does 60.
    budget = Budget(decode=60.0, augment=60.0, workers=int(workers), encode=60.0)
    assert seconds_of(cfg, NUM_IMAGES, budget) == pytest.approx(50 * (NUM_IMAGES // 8 * 8) / rate)


def test_a_schedule_of_sizes_is_planned_by_all_of_them(words):
    sizes = ["INPUT.SIZE", "[[0, 16], [25, 32]]", "METHOD.NUM_SHOTS", "5"]
    budget = Budget(decode=60.0, augment=60.0, workers=0, encode=60.0)
    # Half of the 50 epochs have four times the pixels of the first, which was measured.
    scaled = over_all_sizes(budget, load_config(None, [*words, *sizes]))
    assert scaled == Budget(60.0, pytest.approx(24.0), 0, pytest.approx(24.0))
    assert over_all_sizes(budget, load_config(None, words)) == budget
    small = ["VIEWS.SMALL.COUNT", "4", "VIEWS.SMALL.SIZE", "16"]
    with_small = over_all_sizes(budget, load_config(None, [*words, *sizes, *small]))
    # Per image at the first size: 6 views forward, 1 backward, 4 small ones forward and backward.
    assert with_small.encode == pytest.approx(60.0 * (8 + 12) / (2.5 * 8 + 12))


def test_a_run_of_so_many_steps_is_planned_by_them(words, capsys):
    budget = Budget(decode=60.0, augment=60.0, workers=0, encode=60.0)
    words += ["DATA.NUM_WORKERS", "0", "SOLVER.MAX_STEPS", "5", "SOLVER.WARMUP_EPOCHS", "0"]
    cfg = load_config(None, words)
    assert seconds_of(cfg, NUM_IMAGES, budget) == pytest.approx(5 * 8 / 20.0)
    assert plan.main(["--gpu", "cpu", *words]) == 0
    assert "; 2.5 epochs: " in capsys.readouterr().out  # of two steps each


def test_warm_up_and_milestones_are_judged_by_the_batch_of_the_run(words, capsys, monkeypatch):
    monkeypatch.setattr("kscl.engine.check.MOST_IMAGES", 4)  # measured with half of it
    words += ["SOLVER.MAX_STEPS", "5", "SOLVER.WARMUP_EPOCHS", "1", "SOLVER.SCHEDULE", "step"]
    assert plan.main(["--gpu", "cpu", *words, "SOLVER.MILESTONES", "[2]"]) == 0
    assert "; 2.5 epochs: " in capsys.readouterr().out


def test_a_check_tells_how_long_the_run_may_take(words, capsys):
    assert pretrain.main(["--check", "--estimate", *words]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] > 0


def test_a_dry_run_knows_the_time_of_a_pretraining_before_it_ever_ran(words, tmp_path):
    folder = words[words.index("DATA.TRAIN") + 1]
    overrides = {"DATA.TRAIN": folder, "SOLVER.BATCH_SIZE": 8}
    overrides["KEY_ENCODER.BATCH_NORM_GROUPS"] = 2
    changes = {"shapes": {}, "basis_image": "", "pretrain_overrides": overrides}
    stages = stages_of(read_suite(smoke_suite(tmp_path, **changes)))
    states = [State(stage, TO_DO) for stage in stages if stage.kind == "pretrain"]
    problems = check_stages(states, tmp_path / "state", str(tmp_path / "output"), 2, estimate=True)
    assert problems == []
    assert all(state.expected for state in states)


@pytest.mark.full
def test_a_suite_is_planned_with_the_papers_and_detectron2s_published_times(tmp_path, capsys):
    suite = yaml.safe_load((ROOT / "configs/suites/paper.yaml").read_text())
    for name in ("moco_v1", "simclr", "moco_v2_800ep", "kscl_800ep"):
        del suite["contenders"][name]
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    assert plan.main(["--suite", str(tmp_path / "suite.yaml"), "--gpu", "V100"]) == 0
    rows = {}
    for line in capsys.readouterr().out.splitlines():
        name, *figures = re.split("  +", line)
        rows[name] = [float(it.replace(",", "")) for it in figures if re.match("[0-9]", it)]
    hours = {name: row[1] for name, row in rows.items() if len(row) == 5}
    assert hours["moco_v2: pretrain"] == pytest.approx(200 * 16 / 60, abs=0.1)
    assert hours["kscl: pretrain"] == pytest.approx(200 * 37 / 60, abs=0.1)
    assert hours["resnet50: detection"] == pytest.approx(24_000 * 0.551 / 3600, rel=0.03)
    assert rows["resnet50: detection"][0] == 5 * len(suite["contenders"])
    whole = sum(row[2] for row in rows.values() if len(row) == 5)
    assert rows["in all"][0] == pytest.approx(whole, abs=0.5)
