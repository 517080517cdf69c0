"""A prepared set and a number of minutes become a suite that fits both."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from kscl.benchmark.start.choose import (
    ENOUGH_ITERATIONS,
    FEWEST_STEPS,
    Costs,
    choose_lengths,
    choose_sizes,
    epoch_steps,
    plan_of,
)
from kscl.benchmark.start.facts import Boxes, Facts, look_at
from kscl.benchmark.start.measure import run_measured
from kscl.benchmark.start.text import STARTS_OF_TRAINING, cpu_suite, gpu_suite
from kscl.benchmark.suite.spec import read_suite
from kscl.benchmark.suite.stages import plan as plan_stages
from kscl.commands import prepare_data, run_suite, start
from kscl.data.open import open_source
from kscl.errors import KsclError
from tests.helpers.commands import tool
from tests.helpers.data.own_folders import shapes_folders, write_photos, write_scenes, write_xml
from tests.helpers.data.sets import write_image

COSTS = Costs(
    moco_start=6.0, moco_epoch=1.0, kscl_epoch=2.0, convert=6.0, detection_start=20.0, iteration=0.3
)


def facts_of(images: int = 273, side: float = 100.0) -> Facts:
    sides = np.concatenate([np.full(100, side / 2), np.full(100, side), np.full(100, 2 * side)])
    boxes = Boxes(("cat", "dog"), sides, np.full(300, 480.0), images, 91)
    photos = "voc:data/mine:pretrain"
    return Facts(Path("data/mine"), photos, images, photos, images, boxes, None, "a.jpg")


def test_sizes_follow_the_boxes():
    sizes = choose_sizes(facts_of(side=100))
    scale = sizes.short_side / 480
    assert 100 * scale == pytest.approx(40, abs=1)
    assert list(sizes.anchors) == pytest.approx([50 * scale, 100 * scale, 200 * scale], abs=1)
    assert choose_sizes(facts_of(side=300)).short_side == 128


def test_boxes_of_one_size_have_one_anchor_and_no_warning(recwarn):
    facts = facts_of()
    assert facts.boxes is not None
    alike = replace(facts, boxes=replace(facts.boxes, sides=np.full(300, 100.0)))
    assert len(choose_sizes(alike).anchors) == 1
    assert not recwarn.list


@pytest.mark.parametrize("images", [1, 2, 7])
def test_too_few_photos_are_refused_on_gpus_too(images, tmp_path):
    with pytest.raises(KsclError, match="at least 8"):
        gpu_suite(facts_of(images), 2, tmp_path)


@pytest.mark.parametrize("images", [8, 9, 63, 64, 65, 200, 257, 5000])
def test_the_queue_is_shorter_than_the_images_and_holds_a_batch(images):
    sizes = choose_sizes(facts_of(images))
    assert sizes.batch <= sizes.queue < images


@pytest.mark.parametrize(
    ("images", "groups"), [(8, 1), (16, 2), (40, 2), (64, 4), (128, 8), (5000, 8)]
)
def test_one_process_shuffles_its_keys_over_groups_of_about_eight_images(images, groups, tmp_path):
    facts, key = facts_of(images), "KEY_ENCODER.BATCH_NORM_GROUPS"
    plan = plan_of(facts, COSTS, 200.0, 2, 1)
    file = tmp_path / "suite.yaml"
    file.write_text(cpu_suite(facts, choose_sizes(facts), plan, 9, tmp_path / "out"))
    for contender in ("moco_v2", "kscl"):
        found = yaml.safe_load(file.read_text())["contenders"][contender]["overrides"][key]
        assert found == groups
    one, two = (yaml.safe_load(gpu_suite(facts, n, tmp_path)) for n in (1, 2))
    batch = one["pretrain_overrides"]["SOLVER.BATCH_SIZE"]
    assert batch % one["pretrain_overrides"][key] == 0
    assert one["pretrain_overrides"][key] == min(8, max(2, batch // 8)) or images == 8
    assert key not in two["pretrain_overrides"]  # keys are shuffled among the GPUs


def test_the_estimate_stays_within_the_minutes_and_contenders_get_the_same_seconds():
    for minutes in (6, 8, 15, 30, 60, 240):
        plan = choose_lengths(facts_of(), COSTS, minutes, cores=2)
        assert plan.total <= 60 * minutes
        assert plan.kscl_epochs * COSTS.kscl_epoch == pytest.approx(
            plan.moco_epochs * COSTS.moco_epoch, abs=COSTS.kscl_epoch
        )
    assert choose_lengths(facts_of(), COSTS, 8, cores=2).seeds == 1
    assert choose_lengths(facts_of(), COSTS, 60, cores=2).seeds == 3


@pytest.mark.parametrize("speed", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("minutes", [10, 20, 30, 60])
def test_most_of_the_minutes_are_used(minutes, speed):
    slow = replace(COSTS, moco_epoch=4.0, kscl_epoch=8.0)  # epochs of 38 steps
    seconds = {name: value * speed for name, value in vars(slow).items() if name != "slowdown"}
    plan = choose_lengths(facts_of(2457), Costs(**seconds), minutes, cores=2)
    assert 0.75 <= plan.total / (60 * minutes) <= 0.95


def test_detectors_get_enough_iterations_before_pretrainings_get_more():
    lengths = [plan_of(facts_of(), COSTS, seconds, 2, 1) for seconds in range(100, 1500, 20)]
    for plan in lengths:
        steps = plan.kscl_epochs * epoch_steps(facts_of())
        assert plan.iterations >= ENOUGH_ITERATIONS or steps <= 2 * FEWEST_STEPS
    assert lengths[-1].iterations > ENOUGH_ITERATIONS
    assert lengths[-1].moco_epochs > 2 * lengths[0].moco_epochs


def test_the_number_of_seeds_can_be_asked_for():
    for seeds in (1, 2, 5):
        assert choose_lengths(facts_of(), COSTS, 90, 2, seeds).seeds == seeds
    with pytest.raises(KsclError, match="with 3 seeds takes about"):
        choose_lengths(facts_of(), COSTS, 8, 2, 3)


PRETENDED = f"""#!{sys.executable}
import time
def work(seconds):  # and as if other programs had the processor as long again
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    time.sleep(seconds)
work(0.5)
for step in range(4):
    work(0.8 if step == 0 else 0.2)
    print(f"iter: {{step}}  loss: 1", flush=True)
"""


def test_what_other_programs_do_does_not_change_what_is_measured(tmp_path, monkeypatch):
    path = tmp_path / "kscl-pretended"
    path.write_text(PRETENDED)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    spent = run_measured("kscl-pretended", [])
    assert spent.step == pytest.approx(0.2, abs=0.1)  # without the first one, which took longer
    assert 1.9 <= spent.work < 3.0 < 3.8 <= spent.clock
    path.write_text(f"#!{sys.executable}\nraise SystemExit('no such file')\n")
    with pytest.raises(KsclError, match="no such file"):
        run_measured("kscl-pretended", [])


@pytest.mark.parametrize("jobs", [1, 2, 3])
@pytest.mark.parametrize("seeds", [1, 3])
def test_the_estimate_counts_stages_that_wait_for_others(jobs, seeds):
    plan = plan_of(facts_of(), COSTS, 300, jobs, seeds)
    times, basis, checks = plan.seconds, COSTS.moco_start, COSTS.moco_start + COSTS.convert
    evaluated = times["convert"] + times["detection"]
    work = seeds * (2 * (times["pretrain"] + basis) + 3 * evaluated)
    longest_chain = times["pretrain"] + evaluated
    ideal = max(work / jobs, longest_chain)
    # A free place always takes a stage that can run, so Graham's bound holds.
    taken, rounding = plan.total - checks, 1e-6
    assert ideal - rounding <= taken <= work / jobs + (1 - 1 / jobs) * longest_chain + rounding
    if jobs == 1:
        assert plan.total - checks == pytest.approx(work)


def test_too_few_minutes_are_refused_with_a_number_that_is_enough():
    with pytest.raises(KsclError, match="--minutes") as refused:
        choose_lengths(facts_of(), COSTS, 1, cores=2)
    enough = int(str(refused.value).split("--minutes ")[1].rstrip("."))
    choose_lengths(facts_of(), COSTS, enough, cores=2)


def test_both_suites_can_be_read_and_planned(tmp_path):
    for images, classes in ((273, None), (50, Path("data/x/classes"))):
        write_image(tmp_path / "a.jpg", seed=0)
        facts = replace(facts_of(images), classes=classes, root=Path("data/a: #1"))
        facts = replace(facts, first_image=str(tmp_path / "a.jpg"))
        sizes = choose_sizes(facts)
        plan = choose_lengths(facts, replace(COSTS, probe=3.0), 60, cores=2)
        for text in (
            cpu_suite(facts, sizes, plan, 60, tmp_path / "out"),
            gpu_suite(facts, 6, tmp_path / "out"),
        ):
            path = tmp_path / "suite.yaml"
            path.write_text(text)
            suite = read_suite(path)
            names = [contender.name for contender in suite.contenders]
            assert names == ["random", "moco_v2", "kscl"]
            assert suite.baseline == ["random"]
            for contender in suite.contenders[1:]:
                values = {**suite.pretrain_overrides, **contender.overrides}
                assert values["DICTIONARY.QUEUE_LENGTH"] < images
                assert values["SOLVER.BATCH_SIZE"] % suite.num_gpus == 0
            assert plan_stages(suite)


@pytest.mark.parametrize("classes", [None, Path("data/x/classes")])
def test_every_setting_of_the_written_suite_is_explained_where_it_first_stands(tmp_path, classes):
    facts = replace(facts_of(), classes=classes)
    plan = choose_lengths(facts, replace(COSTS, probe=3.0), 60, cores=2)
    on_cpu = explained_settings(cpu_suite(facts, choose_sizes(facts), plan, 60, tmp_path / "out"))
    assert {"METHOD.RHO", "SOLVER.STEPS", "KSCL.PROTOCOL", "basis_image"} < on_cpu
    assert "SOLVER.BATCH_SIZE" in explained_settings(gpu_suite(facts, 2, tmp_path / "out"))


def explained_settings(text: str) -> set[str]:
    above, explained = "", set()
    for line in text.splitlines():
        key, colon, _ = line.strip().partition(":")
        if colon and not key.startswith("#"):
            assert key in explained or "  # " in line or above.startswith("#"), line
            explained.add(key)
        above = line.strip()
    return explained


def test_a_length_at_its_limit_is_not_said_to_fill_the_minutes(tmp_path):
    facts, said = facts_of(), []
    for minutes in (30, 600):
        plan = choose_lengths(facts, COSTS, minutes, cores=2)
        text = cpu_suite(facts, choose_sizes(facts), plan, minutes, tmp_path / "out")
        lines = text.splitlines()
        said += [lines[i - 1].strip() for i, line in enumerate(lines) if "SOLVER.EPOCHS" in line][
            :1
        ]
    assert said == ["# what fits into the minutes", "# no more than 800, whatever the minutes"]


def test_the_suite_knows_how_long_its_stages_take_before_the_first_has_run(tmp_path, capsys):
    photo = tmp_path / "a.jpg"
    photo.touch()
    facts = replace(facts_of(), first_image=str(photo))
    plan = choose_lengths(facts, COSTS, 60, cores=2)
    path = tmp_path / "suite.yaml"
    path.write_text(cpu_suite(facts, choose_sizes(facts), plan, 60, tmp_path / "out"))
    assert run_suite.main([str(path), "--dry-run", "--skip-check"]) == 0
    first, *stages = capsys.readouterr().out.splitlines()
    minutes = int(first.removeprefix("About ").partition(":")[0])
    assert minutes == pytest.approx(plan.total / 60, rel=0.15)
    assert [line.split()[0] for line in stages if "about" not in line] == ["leaderboard"]


def test_a_suite_that_is_there_is_kept_and_how_to_add_seeds_to_it_is_said(tmp_path, capsys):
    (tmp_path / "suite.yaml").write_text("name: mine\n")
    assert start.main([str(tmp_path), "--output-dir", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    for part in ("is there already", "`seeds:`", f"tools/run_suite.py {tmp_path}/suite.yaml"):
        assert part in told
    assert (tmp_path / "suite.yaml").read_text() == "name: mine\n"


def test_a_folder_that_is_not_prepared_is_refused(tmp_path, capsys):
    assert start.main([str(tmp_path)]) == 2
    assert "prepare_data.py own" in capsys.readouterr().err


def test_facts_are_those_of_the_prepared_set(tmp_path):
    write_xml(tmp_path / "labels", write_photos(tmp_path / "photos", 12))
    where = ["--images", str(tmp_path / "photos"), "--annotations", str(tmp_path / "labels")]
    assert prepare_data.main(["own", *where, "--output-dir", str(tmp_path / "mine")]) == 0
    facts = look_at(tmp_path / "mine")
    assert facts.boxes is not None
    assert facts.boxes.class_names == ("cat", "dog")
    assert facts.num_pretrain == facts.boxes.num_train == 12 - facts.boxes.num_test


def test_a_short_comparison_of_detectors_is_called_one_before_it_runs(
    tmp_path, monkeypatch, capsys
):
    write_xml(tmp_path / "labels", write_photos(tmp_path / "photos", 12))
    where = ["--images", str(tmp_path / "photos"), "--annotations", str(tmp_path / "labels")]
    assert prepare_data.main(["own", *where, "--output-dir", str(tmp_path / "mine")]) == 0
    monkeypatch.setattr("kscl.benchmark.start.measure.measure", lambda *_: COSTS)
    capsys.readouterr()
    words = [str(tmp_path / "mine"), "--cpu", "--output-dir", str(tmp_path / "out")]
    assert start.main(words) == 0
    said = capsys.readouterr().out
    assert said.index(STARTS_OF_TRAINING) < said.index("Written: ")
    assert "AP50 of 25" in said
    assert STARTS_OF_TRAINING in (tmp_path / "out/suite.yaml").read_text()


def test_small_objects_are_pretrained_on_in_tiles_and_on_gpus_in_whole_photos(tmp_path):
    write_scenes(tmp_path, 12, side=40)
    where = ["--images", str(tmp_path / "photos"), "--annotations", str(tmp_path / "labels")]
    assert prepare_data.main(["own", *where, "--output-dir", str(tmp_path / "mine")]) == 0
    facts = look_at(tmp_path / "mine")
    assert facts.num_pretrain == 12 * facts.num_photos
    plan = choose_lengths(facts, COSTS, 60, cores=2)
    chosen = []
    for text in (
        cpu_suite(facts, choose_sizes(facts), plan, 60, tmp_path / "out"),
        gpu_suite(facts, 2, tmp_path / "out"),
    ):
        (tmp_path / "suite.yaml").write_text(text)
        suite = read_suite(tmp_path / "suite.yaml")
        values = {**suite.pretrain_overrides, **suite.contenders[1].overrides}
        assert len(open_source(values["DATA.TRAIN"])) > values["DICTIONARY.QUEUE_LENGTH"]
        (evaluation,) = suite.evaluations
        assert evaluation.overrides["KSCL.PROTOCOL"].startswith("mine-")  # not bccd
        chosen.append(values["DATA.TRAIN"])
    assert chosen == [str(tmp_path / "mine/tiles"), f"voc:{tmp_path / 'mine'}:pretrain"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["xml", "yolo"])
def test_three_commands_lead_from_folders_to_the_answer_page(tmp_path, kind):
    images, labels = shapes_folders(tmp_path, kind)
    done = tool(
        *("prepare_data", "own", "--images", images, "--annotations", labels),
        *("--output-dir", tmp_path / "data/mine"),
    )
    assert done.returncode == 0, done.stderr
    began = time.monotonic()
    out = ("--output-dir", tmp_path / "output")
    done = tool("start", tmp_path / "data/mine", "--minutes", "8", *out, timeout=900)
    assert done.returncode == 0, done.stderr
    done = tool("run_suite", tmp_path / "output/suite.yaml", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 600
    board = tmp_path / "output/leaderboard"
    assert (board / "leaderboard.html").is_file()
    answers = json.loads((board / "leaderboard.json").read_text())["answers"]
    assert sorted(answer["row"].split()[0] for answer in answers) == ["kscl", "moco_v2"]
    assert all(answer["sentence"] in done.stdout for answer in answers)
