"""A prepared set and a number of minutes become a suite that fits both."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from kscl.benchmark.start import (
    CONTENDERS,
    CPU_WEIGHTS,
    ENOUGH_ITERATIONS,
    FEWEST_CONTENDERS,
    FEWEST_STEPS,
    GPU_WEIGHTS,
    NARROW,
    STARTS_OF_TRAINING,
    Boxes,
    Comparison,
    Costs,
    Facts,
    Network,
    choose_lengths,
    cpu_suite,
    find_network,
    gpu_suite,
    left_out,
    look_at,
    minutes_for_three,
    run_measured,
)
from kscl.benchmark.suite.check import different_networks
from kscl.benchmark.suite.spec import Suite, read_suite
from kscl.benchmark.suite.stages import plan as plan_stages
from kscl.commands import prepare_data, run_suite, start
from kscl.data.open import open_source
from kscl.errors import KsclError
from kscl.methods.encoder import build_backbone
from kscl.runtime.logs import clock
from tests.helpers import hub as hubs
from tests.helpers.commands import tool
from tests.helpers.data.own_folders import (
    prepare,
    shapes_folders,
    write_folders,
    write_photos,
    write_scenes,
    write_xml,
)
from tests.helpers.data.sets import write_image
from tests.helpers.slurm import stage

COSTS = Costs(
    moco_start=6.0,
    moco_epoch=1.0,
    kscl_epoch=2.0,
    convert=6.0,
    detection_start=20.0,
    iteration=0.3,
    probe=3.0,
    probe_fit=0.2,
)
NAMED = Network("test_resnet", {}, CPU_WEIGHTS, ([0.5] * 3, [0.5] * 3))
RESNET50 = Network("resnet50", {})


def facts_of(images: int = 273, side: float = 100.0) -> Facts:
    sides = np.concatenate([np.full(100, side / 2), np.full(100, side), np.full(100, 2 * side)])
    boxes = Boxes(("cat", "dog"), sides, np.full(300, 480.0), images, 91)
    photos = "voc:data/mine:pretrain"
    return Facts(Path("data/mine"), photos, images, photos, images, boxes, None, "a.jpg")


def test_sizes_follow_the_boxes():
    boxes = facts_of(side=100).boxes
    scale = boxes.short_side / 480
    assert 100 * scale == pytest.approx(40, abs=1)
    assert boxes.anchors == pytest.approx([50 * scale, 100 * scale, 200 * scale], abs=1)
    assert facts_of(side=300).boxes.short_side == 128


def test_boxes_of_one_size_have_one_anchor_and_no_warning(recwarn):
    assert len(replace(facts_of().boxes, sides=np.full(300, 100.0)).anchors) == 1
    assert not recwarn.list


def test_too_few_photos_are_refused_on_gpus_too(tmp_path):
    with pytest.raises(KsclError, match="at least 8"):
        gpu_suite(facts_of(7), RESNET50, 2, tmp_path)


@pytest.mark.parametrize("images", [8, 9, 65, 200, 5000])
def test_the_queue_is_shorter_than_the_images_and_holds_a_batch(images):
    facts = facts_of(images)
    assert facts.batch <= facts.queue < images


@pytest.mark.parametrize(("images", "groups"), [(8, 1), (40, 2), (64, 4), (5000, 8)])
def test_one_process_shuffles_its_keys_over_groups_of_about_eight_images(images, groups, tmp_path):
    facts, key = facts_of(images), "KEY_ENCODER.BATCH_NORM_GROUPS"
    plan = Comparison(facts, COSTS, 2, 1).plan(200.0)
    file = tmp_path / "suite.yaml"
    file.write_text(cpu_suite(plan, NAMED, 9, tmp_path / "out"))
    for contender in ("moco_v2", "kscl"):
        found = yaml.safe_load(file.read_text())["contenders"][contender]["overrides"][key]
        assert found == groups
    one, two = (yaml.safe_load(gpu_suite(facts, RESNET50, n, tmp_path)) for n in (1, 2))
    batch = one["pretrain_overrides"]["SOLVER.BATCH_SIZE"]
    assert batch % one["pretrain_overrides"][key] == 0
    assert one["pretrain_overrides"][key] == min(8, max(2, batch // 8)) or images == 8
    assert key not in two["pretrain_overrides"]  # keys are shuffled among the GPUs


def test_the_estimate_stays_within_the_minutes_and_contenders_get_the_same_seconds():
    for minutes in (9, 15, 30, 60, 240):
        plan = choose_lengths(facts_of(), COSTS, minutes, cores=2)
        assert plan.total <= 60 * minutes
        assert plan.kscl_epochs * COSTS.kscl_epoch == pytest.approx(
            plan.moco_epochs * COSTS.moco_epoch, abs=COSTS.kscl_epoch
        )
    assert choose_lengths(facts_of(), COSTS, 9, cores=2).comparison.seeds == 1
    assert choose_lengths(facts_of(), COSTS, 60, cores=2).comparison.seeds == 3


@pytest.mark.parametrize(("minutes", "speed"), [(10, 0.5), (20, 1.0), (30, 2.0), (60, 1.0)])
def test_most_of_the_minutes_are_used(minutes, speed):
    slow = replace(COSTS, moco_epoch=4.0, kscl_epoch=8.0)  # epochs of 38 steps
    seconds = {name: value * speed for name, value in vars(slow).items() if name != "slowdown"}
    plan = choose_lengths(facts_of(2457), Costs(**seconds), minutes, cores=2)
    assert 0.75 <= plan.total / (60 * minutes) <= 0.95


def test_detectors_get_enough_iterations_before_pretrainings_get_more():
    lengths = [
        Comparison(facts_of(), COSTS, 2, 1).plan(seconds) for seconds in range(100, 1500, 20)
    ]
    for plan in lengths:
        steps = plan.kscl_epochs * facts_of().epoch_steps
        assert plan.iterations >= ENOUGH_ITERATIONS or steps <= 2 * FEWEST_STEPS
    assert lengths[-1].iterations > ENOUGH_ITERATIONS
    assert lengths[-1].moco_epochs > 2 * lengths[0].moco_epochs


def test_fewer_contenders_come_before_fewer_seeds():
    plans = [choose_lengths(facts_of(), COSTS, minutes, cores=2) for minutes in range(9, 200, 5)]
    chosen = [(plan.comparison.seeds, len(plan.comparison.contenders)) for plan in plans]
    assert chosen == sorted(chosen)
    assert {(3, len(FEWEST_CONTENDERS)), (3, len(CONTENDERS))} <= set(chosen)
    one = next(plan.comparison for plan in plans if plan.comparison.seeds == 1)
    enough = choose_lengths(facts_of(), COSTS, minutes_for_three(one), 2, contenders=one.contenders)
    assert enough.comparison.seeds == 3


def test_random_weights_get_the_seconds_of_a_pretraining():
    facts = replace(facts_of(), classes=Path("data/x/classes"))
    plan = Comparison(facts, COSTS, 2, 3).plan(600.0)
    spent = plan.moco_epochs * COSTS.moco_epoch
    trained = {"detection": plan.iterations * COSTS.iteration, "linear": COSTS.probe_fit}
    assert set(plan.longer) == set(trained)  # nearest neighbors train nothing
    for kind, seconds in trained.items():
        assert (plan.longer[kind] - 1) * seconds == pytest.approx(spent, rel=0.02)
        assert plan.longer_seconds[kind] == pytest.approx(plan.seconds[kind] + spent)


def test_without_network_or_cache_the_contenders_left_out_are_named_with_the_reason(
    boxes, measured, start_on, capsys
):
    suite = start_on(boxes, 0, "--num-seeds", "1")
    told = capsys.readouterr().out
    (comment,) = (line for line in written(suite).splitlines() if line.startswith("# Left out"))
    assert "HF_HUB_OFFLINE" in comment
    for text in (told, comment):
        assert "imagenet and kscl_from_imagenet" in text
        assert CPU_WEIGHTS in text
    assert "cannot answer" in told
    assert "--minutes " in told


def written(suite: Suite) -> str:
    return (Path(suite.output_dir) / "suite.yaml").read_text()


def test_with_weights_in_the_cache_all_contenders_have_their_network(
    boxes, measured, start_on, tmp_path, monkeypatch, capsys
):
    with hubs.serve(tmp_path) as hub:
        hubs.use(monkeypatch, tmp_path / "hub", hub.address)
        hub.push("timm/test_resnet.r160_in1k", build_backbone("test_resnet").state_dict())
        assert find_network(CPU_WEIGHTS, NARROW) == NAMED
    hubs.use(monkeypatch, tmp_path / "hub", offline=True)
    suite = start_on(boxes, 0, "--minutes", "240")
    assert {it.name for it in suite.contenders} == {*CONTENDERS}
    assert different_networks(suite) == ""
    assert "Left out" not in capsys.readouterr().out + written(suite)
    continued = suite.contenders[-1]
    assert continued.overrides["BACKBONE.WEIGHTS"] == CPU_WEIGHTS
    assert left_out(find_network("none", NARROW)) == [
        "Left out: imagenet and kscl_from_imagenet. --weights none"
    ]


def test_the_number_of_seeds_can_be_asked_for():
    for seeds in (1, 2, 5):
        assert choose_lengths(facts_of(), COSTS, 90, 2, seeds).comparison.seeds == seeds
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
    pretended = stage(tmp_path, "one", words=("kscl-pretended",))
    spent = run_measured(pretended)
    assert spent.step == pytest.approx(0.2, abs=0.1)  # without the first one, which took longer
    assert 1.9 <= spent.work < 3.0 < 3.8 <= spent.clock
    path.write_text(f"#!{sys.executable}\nraise SystemExit('no such file')\n")
    with pytest.raises(KsclError, match="no such file"):
        run_measured(pretended)


@pytest.mark.parametrize(("jobs", "seeds"), [(1, 3), (2, 1), (3, 3)])
def test_the_estimate_counts_stages_that_wait_for_others(jobs, seeds):
    plan = Comparison(facts_of(), COSTS, jobs, seeds).plan(300)
    times, basis, checks = plan.seconds, COSTS.moco_start, COSTS.moco_start + COSTS.convert
    evaluated = times["convert"] + times["detection"]
    spent = plan.moco_epochs * COSTS.moco_epoch
    work = seeds * (3 * (times["pretrain"] + basis) + 6 * evaluated + spent)
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
    for images, classes, small, large in (
        (9000, None, NAMED, replace(RESNET50, weights=GPU_WEIGHTS)),
        (50, Path("data/x/classes"), NARROW, RESNET50),
    ):
        write_image(tmp_path / "a.jpg", seed=0)
        facts = replace(facts_of(images), classes=classes, root=Path("data/a: #1"))
        facts = replace(facts, first_image=str(tmp_path / "a.jpg"))
        plan = choose_lengths(facts, COSTS, 240, cores=2, contenders=small.contenders)
        for network, text in (
            (small, cpu_suite(plan, small, 240, tmp_path / "out")),
            (large, gpu_suite(facts, large, 6, tmp_path / "out")),
        ):
            path = tmp_path / "suite.yaml"
            path.write_text(text)
            suite = read_suite(path)
            # On GPUs, pretraining on 50 photos takes no time that could be spent elsewhere.
            quick = {"random_longer"} if network is large and images == 50 else set()
            assert {it.name for it in suite.contenders} == {*network.contenders} - quick
            assert suite.baseline == [it for it in ("random", "random_longer") if it not in quick]
            for longer in (it.longer for it in suite.contenders if it.name == "random_longer"):
                assert longer["detection"] > 1
            assert different_networks(suite) == ""
            for contender in suite.contenders:
                if not contender.pretrain:
                    continue
                values = {**suite.pretrain_overrides, **contender.overrides}
                assert values["DICTIONARY.QUEUE_LENGTH"] < images
                assert values["SOLVER.BATCH_SIZE"] % suite.num_gpus == 0
            assert plan_stages(suite)


@pytest.mark.parametrize("classes", [None, Path("data/x/classes")])
def test_every_setting_of_the_written_suite_is_explained_where_it_first_stands(tmp_path, classes):
    facts = replace(facts_of(), classes=classes)
    plan = choose_lengths(facts, COSTS, 60, cores=2)
    suite = cpu_suite(plan, NAMED, 60, tmp_path / "out")
    on_cpu = explained_settings(suite)
    assert {"METHOD.RHO", "SOLVER.STEPS", "KSCL.PROTOCOL", "basis_image"} < on_cpu
    on_gpus = gpu_suite(facts, RESNET50, 2, tmp_path / "out")
    assert "SOLVER.BATCH_SIZE" in explained_settings(on_gpus)


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
    for minutes in (30, 1200):
        plan = choose_lengths(facts, COSTS, minutes, cores=2, contenders=NARROW.contenders)
        text = cpu_suite(plan, NARROW, minutes, tmp_path / "out")
        lines = text.splitlines()
        said += [lines[i - 1].strip() for i, line in enumerate(lines) if "SOLVER.EPOCHS" in line][
            :1
        ]
    assert said == ["# what fits into the minutes", "# no more than 800, whatever the minutes"]


def test_the_suite_knows_how_long_its_stages_take_before_the_first_has_run(tmp_path, capsys):
    photo = tmp_path / "a.jpg"
    photo.touch()
    facts = replace(facts_of(), first_image=str(photo))
    plan = choose_lengths(facts, COSTS, 60, cores=2, contenders=NARROW.contenders)
    path = tmp_path / "suite.yaml"
    path.write_text(cpu_suite(plan, NARROW, 60, tmp_path / "out"))
    assert run_suite.main([str(path), "--dry-run", "--skip-check"]) == 0
    first, *stages = capsys.readouterr().out.splitlines()
    minutes = int(first.removeprefix("About ").partition(":")[0])
    assert minutes == pytest.approx(plan.total / 60, rel=0.15)
    assert [line.split()[0] for line in stages if "about" not in line] == ["leaderboard"]


def test_a_suite_that_is_there_is_kept_and_how_to_add_seeds_to_it_is_said(tmp_path, capsys):
    (tmp_path / "suite.yaml").write_text("name: mine\n")
    assert start.main([str(tmp_path), "--output-dir", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    for part in ("--num-seeds", f"kscl run {tmp_path}/suite.yaml"):
        assert part in told
    assert (tmp_path / "suite.yaml").read_text() == "name: mine\n"


def test_a_folder_that_is_not_prepared_is_refused(tmp_path, capsys):
    assert start.main([str(tmp_path)]) == 2
    assert "kscl prepare own" in capsys.readouterr().err


@pytest.fixture(scope="module")
def boxes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("boxes")
    write_xml(folder / "labels", write_photos(folder / "photos", 16))
    assert prepare(folder) == 0
    return folder / "mine"


@pytest.fixture(scope="module")
def classes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("classes")
    assert prepare_data.main(write_folders(folder, {"red": 8, "blue": 8})) == 0
    return folder / "mine"


@pytest.fixture
def measured(monkeypatch) -> None:
    monkeypatch.setattr("kscl.benchmark.start.measure", lambda *_: COSTS)


@pytest.fixture(autouse=True)
def _without_weights(tmp_path, monkeypatch) -> None:
    hubs.use(monkeypatch, tmp_path / "hub", offline=True)


@pytest.fixture
def start_on(tmp_path, monkeypatch):
    """A function that starts on a set and a number of GPUs, and returns the suite."""

    def run(data: Path, gpus: int, *more: str) -> Suite:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        assert start.main([str(data), "--output-dir", str(tmp_path / "output"), *more]) == 0
        return read_suite(tmp_path / "output/suite.yaml")

    return run


def test_facts_are_those_of_the_prepared_set(boxes):
    facts = look_at(boxes)
    assert facts.boxes is not None
    assert facts.boxes.class_names == ("cat", "dog")
    assert facts.num_pretrain == facts.boxes.num_train == 16 - facts.boxes.num_test


def test_minutes_that_no_machine_keeps_are_refused_before_anything_is_measured(boxes, capsys):
    assert start.main([str(boxes), "--cpu", "--minutes", "0.5", "--output-dir", "nowhere"]) == 2
    said = capsys.readouterr()
    assert "--minutes " in said.err
    assert "Measuring" not in said.out
    assert not Path("nowhere").exists()


def test_small_objects_are_pretrained_on_in_tiles_and_on_gpus_in_whole_photos(tmp_path):
    write_scenes(tmp_path, 12, side=40)
    assert prepare(tmp_path) == 0
    facts = look_at(tmp_path / "mine")
    assert facts.num_pretrain == 12 * facts.num_photos
    plan = choose_lengths(facts, COSTS, 60, cores=2, contenders=NARROW.contenders)
    chosen = []
    for text in (
        cpu_suite(plan, NARROW, 60, tmp_path / "out"),
        gpu_suite(facts, RESNET50, 2, tmp_path / "out"),
    ):
        (tmp_path / "suite.yaml").write_text(text)
        suite = read_suite(tmp_path / "suite.yaml")
        (kscl,) = (it for it in suite.contenders if it.name == "kscl")
        values = {**suite.pretrain_overrides, **kscl.overrides}
        assert len(open_source(values["DATA.TRAIN"])) > values["DICTIONARY.QUEUE_LENGTH"]
        (evaluation,) = suite.evaluations
        assert evaluation.overrides["KSCL.PROTOCOL"].startswith("mine-")  # not bccd
        chosen.append(values["DATA.TRAIN"])
    assert chosen == [str(tmp_path / "mine/tiles"), f"voc:{tmp_path / 'mine'}:pretrain"]


def test_the_estimate_is_told_for_each_kind_of_stage(boxes, measured, start_on, capsys):
    suite = start_on(boxes, 0, "--num-seeds", "1")
    told = capsys.readouterr().out
    epochs = suite.contenders[2].overrides["SOLVER.EPOCHS"]  # MoCo v2's
    iterations = suite.evaluations[0].overrides["SOLVER.MAX_ITER"]
    seconds = {
        "pretrain": COSTS.moco_start + epochs * COSTS.moco_epoch,
        "convert": COSTS.convert,
        "detection": COSTS.detection_start + iterations * COSTS.iteration,
    }
    for kind, value in seconds.items():
        assert f"{kind} {clock(value)}" in told
    assert "1 seed, " in told
    assert "In all about " in told
    assert told.index(STARTS_OF_TRAINING) < told.index("Written: ")
    assert "AP50 of 25" in told


def test_class_folders_alone_are_compared_by_probes(classes, measured, start_on, capsys):
    suite = start_on(classes, 0)
    assert [evaluation.kind for evaluation in suite.evaluations] == ["linear", "knn"]
    for evaluation in suite.evaluations:
        assert evaluation.overrides["DATA.TRAIN"] == str(classes / "classes/train")
        assert evaluation.overrides["DATA.VAL"] == str(classes / "classes/val")
    assert {it.name for it in suite.contenders} == {*NARROW.contenders}
    assert set(suite.contenders[1].longer) == {"linear"}
    assert not any(stage.kind in ("convert", "detection") for stage in plan_stages(suite))
    told = capsys.readouterr().out
    assert f"linear {clock(COSTS.probe)}" in told
    assert "detection" not in told


def test_a_machine_with_gpus_gets_the_recipes_of_the_paper(boxes, start_on, capsys):
    suite = start_on(boxes, 4)
    assert suite.num_gpus == 4
    assert [contender.pretrain for contender in suite.contenders] == [
        *[""] * (len(suite.contenders) - 2),
        "pretrain/moco_v2_r50_200ep.yaml",
        "pretrain/kscl_k5_rho40_r50_200ep.yaml",
    ]
    (evaluation,) = suite.evaluations
    assert evaluation.config == "detection/voc0712_c4_24k_moco.yaml"
    assert evaluation.overrides["MODEL.ROI_HEADS.NUM_CLASSES"] == 2
    queue = suite.pretrain_overrides["DICTIONARY.QUEUE_LENGTH"]
    assert queue == 2 ** math.floor(math.log2(12 - 1))  # of 16 photos, 4 are to test on
    told = capsys.readouterr().out
    assert "Measuring" not in told
    assert "suite.yaml" in told


def test_on_gpus_the_seeds_are_those_asked_for_and_the_minutes_are_said_to_have_no_part(
    boxes, start_on, capsys
):
    assert start_on(boxes, 4, "--num-seeds", "5").seeds == (0, 1, 2, 3, 4)
    assert "whatever the --minutes" in capsys.readouterr().out


def test_a_set_given_as_a_dot_has_the_name_of_its_folder(boxes, start_on, monkeypatch):
    monkeypatch.chdir(boxes)
    suite = start_on(Path("."), 1)
    assert suite.name.startswith(f"{boxes.name}, ")
    assert suite.evaluations[0].overrides["KSCL.PROTOCOL"] == f"{boxes.name}-c4-24k"


def test_a_machine_with_gpus_compares_class_folders_too(classes, start_on):
    suite = start_on(classes, 1)
    assert [evaluation.kind for evaluation in suite.evaluations] == ["linear"]


def test_the_cpu_is_used_if_asked_for_though_there_are_gpus(boxes, measured, start_on):
    suite = start_on(boxes, 4, "--cpu")
    assert suite.num_gpus == 1
    assert suite.evaluations[0].config == "detection/bccd_tiny_c4.yaml"


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
    assert {answer["row"].split()[0] for answer in answers} >= {"kscl", "random_longer"}
    said = " ".join(done.stdout.split())  # without the line breaks of a terminal
    assert all(answer["sentence"] in said for answer in answers)
