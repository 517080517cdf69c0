"""The suite: stages keyed by what goes into them, run once, taken up again after any kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from detection.commands import train_net
from kscl.benchmark.suite.execute import program_path
from kscl.benchmark.suite.spec import EVALUATION_KINDS, read_suite
from kscl.benchmark.suite.stages import Stage, plan
from kscl.commands import make_shapes, pretrain, run_suite
from kscl.config.tree import value_at
from kscl.errors import KsclError
from kscl.records.record import find_records
from linear_eval.commands import linear_eval
from tests.helpers.commands import ROOT, tool
from tests.helpers.voc_sets import small_voc, write_image

NETWORK = {"channels": [8, 16, 32, 64]}
TINY_SHAPES = {
    "num_classes": 2,
    "unlabeled": 32,
    "train": 24,
    "val": 16,
    "detection_train": 8,
    "detection_test": 4,
    "image_size": 48,
    "detection_size": 64,
    "min_objects": 2,
    "max_objects": 3,
    "workers": 1,
}


def smoke_suite(folder: Path, **changes: object) -> Path:
    """The whole chain, as small as it gets: what is tested is the way, not the numbers."""
    data = folder / "shapes"
    voc = f"voc:{data}/VOCdevkit/VOC2007"
    probe = {
        "DATA.TRAIN": f"{data}/classes/train",
        "DATA.VAL": f"{data}/classes/val",
        "DATA.NUM_WORKERS": 0,
        "DATA.CACHE_DIR": str(folder / "cache"),
        "INPUT.SIZE": 32,
        "INPUT.RESIZE": 32,
    }
    suite = {
        "name": "smoke",
        "jobs": 2,
        "output_dir": str(folder / "output"),
        "shapes": {"output_dir": str(data), **TINY_SHAPES},
        "basis_image": f"{data}/unlabeled/000000.jpg",
        "pretrain_overrides": {
            "DATA.TRAIN": f"{data}/unlabeled",
            "DATA.NUM_WORKERS": 0,
            "DATA.CACHE_DIR": str(folder / "cache"),
            "INPUT.SIZE": 32,
            "SOLVER.EPOCHS": 2,
            "SOLVER.BATCH_SIZE": 16,
            "CHECKPOINT.PERIOD_STEPS": 1,
        },
        "contenders": {
            "random": {"arch": "resnet50", "kwargs": NETWORK},
            "kscl": {
                "pretrain": "pretrain/shapes_kscl.yaml",
                "overrides": {"METHOD.NUM_SHOTS": 2, "BACKBONE.KWARGS": NETWORK},
            },
        },
        "evaluations": {
            "knn": {"config": "linear_eval/shapes_knn.yaml", "overrides": {**probe, "KNN.K": [3]}},
            "detection": {
                "config": "detection/shapes_tiny_c4.yaml",
                "overrides": {
                    "DATASETS.TRAIN": [f"{voc}:trainval"],
                    "DATASETS.TEST": [f"{voc}:test"],
                    "MODEL.ROI_HEADS.NUM_CLASSES": 2,
                    "MODEL.RPN.POST_NMS_TOPK_TEST": 20,
                    "INPUT.MIN_SIZE_TRAIN": [64],
                    "INPUT.MIN_SIZE_TEST": 64,
                    "SOLVER.IMS_PER_BATCH": 2,
                    "SOLVER.MAX_ITER": 3,
                    "SOLVER.STEPS": [2],
                    "SOLVER.CHECKPOINT_PERIOD": 1,
                    "TEST.PRECISE_BN.NUM_ITER": 2,
                },
            },
        },
    }
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(suite | changes))
    return path


def numbers(folder: Path) -> dict:
    """All that a reader of the board compares, by contender, protocol and metric."""
    board = json.loads((folder / "output" / "leaderboard" / "leaderboard.json").read_text())
    return {
        (row["method"], result["protocol"], name): values["mean"]
        for row in board["rows"]
        for result in row["results"]
        for name, values in result["metrics"].items()
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    done = tool("run_suite", smoke_suite(folder), timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.smoke
def test_one_command_goes_from_pixels_to_the_leaderboard(undisturbed):
    board = undisturbed / "output" / "leaderboard"
    assert {path.suffix for path in board.iterdir()} == {".md", ".csv", ".json", ".html"}
    text = (board / "leaderboard.md").read_text()
    assert "kscl" in text
    assert "random" in text
    assert "data:image/png" in (board / "leaderboard.html").read_text()  # the basis images


@pytest.mark.slow
def test_a_pretrained_row_is_made_again_from_its_records(undisturbed, tmp_path):
    for path, old in find_records(undisturbed / "output" / "kscl").records.items():
        if old.kind == "pretrain":
            continue
        again = tmp_path / old.kind
        done = tool("reproduce", path, "--output-dir", again, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        (new,) = [it for it in find_records(again).records.values() if it.kind == old.kind]
        assert new.metrics == old.metrics


def test_a_second_run_runs_nothing_again(undisturbed):
    records = {p: p.stat().st_mtime_ns for p in undisturbed.rglob("record.json")}
    done = tool("run_suite", undisturbed / "suite.yaml")
    assert done.returncode == 0, done.stderr
    assert "running" not in done.stdout.replace("leaderboard: running", "")
    assert records == {p: p.stat().st_mtime_ns for p in undisturbed.rglob("record.json")}


def test_the_dry_run_tells_what_is_done_and_what_is_to_do(undisturbed, tmp_path, capsys):
    shown = {}
    for suite in (undisturbed / "suite.yaml", smoke_suite(tmp_path)):
        assert run_suite.main([str(suite), "--dry-run", "--skip-check"]) == 0
        shown[suite.parent] = capsys.readouterr().out
    assert "kscl/seed0/pretrain" in shown[undisturbed]
    assert "9 of 10 stages done" in shown[undisturbed]
    assert "Time to go not known yet; 0 of 10 stages done" in shown[tmp_path]
    assert not (tmp_path / "output").exists()


def test_the_commands_can_be_printed_for_a_scheduler(tmp_path, capsys):
    assert run_suite.main([str(smoke_suite(tmp_path)), "--print-commands"]) == 0
    programs = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert programs[0] == "kscl-make-shapes"
    assert programs[-1] == "kscl-leaderboard"
    assert all(program_path(name) for name in programs)


def test_only_what_depends_on_a_change_gets_another_key(tmp_path):
    before = {stage.name: stage.key for stage in plan(read_suite(smoke_suite(tmp_path)))}
    suite = yaml.safe_load(smoke_suite(tmp_path).read_text())
    suite["contenders"]["kscl"]["overrides"]["METHOD.RHO"] = 0.9
    path = smoke_suite(tmp_path, contenders=suite["contenders"])
    after = {stage.name: stage.key for stage in plan(read_suite(path))}
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        "kscl/seed0/pretrain",
        "kscl/seed0/basis",
        "kscl/seed0/knn",
        "kscl/seed0/convert",
        "kscl/seed0/detection",
        "leaderboard",
    }


def test_a_replaced_image_changes_the_stages_that_read_it(tmp_path):
    voc = small_voc(tmp_path / "voc")
    sets = {"DATASETS.TRAIN": [f"voc:{voc}:train"], "DATASETS.TEST": [f"voc:{voc}:test"]}
    path = smoke_suite(tmp_path)
    suite = yaml.safe_load(path.read_text())
    suite["evaluations"]["detection"]["overrides"] |= sets
    path.write_text(yaml.safe_dump(suite))
    before = {stage.name: stage.key for stage in plan(read_suite(path))}
    assert before == {stage.name: stage.key for stage in plan(read_suite(path))}
    write_image(voc / "JPEGImages/a.jpg", seed=99)
    after = {stage.name: stage.key for stage in plan(read_suite(path))}
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"random/seed0/detection", "kscl/seed0/detection", "leaderboard"}


@pytest.fixture(scope="module")
def half_failed(tmp_path_factory):
    """One pretraining without images, and two evaluations by nearest neighbors."""
    folder = tmp_path_factory.mktemp("half_failed")
    suite = yaml.safe_load(smoke_suite(folder).read_text())
    suite["contenders"]["kscl"]["overrides"]["DATA.TRAIN"] = str(folder / "nowhere")
    three = suite["evaluations"]["knn"] | {"kind": "knn"}
    one = three | {"overrides": three["overrides"] | {"KNN.K": [1]}}
    suite["evaluations"] = {"three": three, "one": one}
    return folder, tool("run_suite", smoke_suite(folder, **suite), "--skip-check")


def test_a_stage_that_fails_is_shown_and_does_not_stop_the_others(half_failed):
    folder, done = half_failed
    assert done.returncode == 1
    assert "kscl/seed0/pretrain failed" in done.stdout
    assert str(folder / "nowhere") in done.stdout
    assert "kscl/seed0/three: not run" in done.stdout
    assert "random/seed0/three: done" in done.stdout
    assert (folder / "output" / "leaderboard" / "leaderboard.html").exists()


def test_two_neighbor_evaluations_run_and_have_columns_of_their_own(half_failed):
    folder, done = half_failed
    assert "random/seed0/one: done" in done.stdout
    board = (folder / "output" / "leaderboard" / "leaderboard.md").read_text()
    assert "kNN (a)" in board
    assert "kNN (b)" in board
    names = [line for line in board.splitlines() if line.startswith("## knn")]
    assert len(names) == 2
    assert {name.split("-T")[0] for name in names} == {"## knn1", "## knn3"}  # the k of each


def test_all_that_is_wrong_with_a_suite_is_told_at_once(tmp_path):
    path = tmp_path / "suite.yaml"
    path.write_text(
        "name: x\noutput_dr: y\nseeds: [0, 0]\ncontenders:\n  a: {pretrain: nowhere.yaml}\n"
        "  b: {}\n  c: {file: nowhere.pth}\n  d: {arch: resnet50, overrides: {METHOD.RHO: 1}}\n"
        "evaluations:\n  segmentation: {config: x}\n"
        "  knn: {config: linear_eval/knn.yaml, trials: 2}\npretrain_overrides: {LABEL: x}\n"
    )
    with pytest.raises(KsclError) as error:
        read_suite(path)
    for part in (
        "output_dr is not a key; did you mean output_dir?",
        "output_dir is missing",
        "seeds is [0, 0]",
        "contender a: nowhere.yaml",
        "contender b has no backbone",
        "contender c: file nowhere.pth",
        "contender d: METHOD.RHO",
        "evaluation knn: trials",
        "evaluation segmentation: kind is missing",
        "evaluation segmentation: config: x",
        "pretrain_overrides: LABEL",
    ):
        assert part in str(error.value)
    assert str(error.value).startswith("11 problems")


SEVERAL = {
    "near": {"kind": "knn", "config": "linear_eval/knn.yaml", "num_gpus": 2},
    "far": {"kind": "knn", "config": "linear_eval/knn.yaml", "overrides": {"KNN.K": [200]}},
    "voc": {"kind": "detection", "config": "detection/voc0712_c4_24k_moco.yaml", "trials": 5},
    "coco": {"kind": "detection", "config": "detection/coco_c4_2x.yaml", "num_gpus": 8},
}


def test_a_suite_has_any_number_of_evaluations_of_one_kind(tmp_path):
    stages = {s.name: s for s in plan(read_suite(smoke_suite(tmp_path, evaluations=SEVERAL)))}
    kinds = {name: stages[f"random/seed0/{name}"].kind for name in SEVERAL}
    assert kinds == {"near": "knn", "far": "knn", "voc": "detection", "coco": "detection"}
    near, far = (stages[f"random/seed0/{name}"] for name in ("near", "far"))
    assert settings(far)["KNN.K"] == "[200]"
    assert "KNN.K" not in settings(near)
    gpus = [
        stage.arguments[stage.arguments.index("--num-gpus") + 1]
        for stage in (near, far, stages["random/seed0/voc"], stages["random/seed0/coco"])
    ]
    assert gpus == ["2", "1", "1", "8"]
    voc, coco = (stages[f"random/seed0/{name}"] for name in ("voc", "coco"))
    assert voc.arguments[voc.arguments.index("--num-trials") + 1] == "5"
    assert coco.arguments[coco.arguments.index("--num-trials") + 1] == "1"
    for name, stage in (("voc", voc), ("coco", coco)):
        convert = stages[f"random/seed0/{name}-convert"]
        assert convert in stage.needs
        assert SEVERAL[name]["config"] in convert.arguments
    folders = [stage.folder for stage in stages.values()]
    assert len(set(folders)) == len(folders)
    assert {near.folder, far.folder, voc.folder, coco.folder} <= set(
        stages["leaderboard"].arguments
    )


def test_an_evaluation_named_by_its_kind_keeps_its_folders(tmp_path):
    """Suites from before evaluations had names find their finished stages again."""
    old = {stage.name: stage for stage in plan(read_suite(smoke_suite(tmp_path)))}
    evaluations = yaml.safe_load(smoke_suite(tmp_path).read_text())["evaluations"]
    for kind, about in evaluations.items():
        about["kind"] = kind
    new = {s.name: s for s in plan(read_suite(smoke_suite(tmp_path, evaluations=evaluations)))}
    assert new == old
    assert "random/seed0/convert" in old


@pytest.mark.parametrize(
    ("evaluations", "says"),
    [
        ({"voc": {"config": "linear_eval/knn.yaml"}}, "evaluation voc: kind is missing"),
        ({"a": {"kind": "bayes", "config": "linear_eval/knn.yaml"}}, "evaluation a: There is no"),
        ({"a/b": SEVERAL["near"]}, "evaluation a/b: Folders"),
        ({"convert": SEVERAL["voc"]}, "evaluation convert: Folders"),
        ({"a": SEVERAL["voc"], "b": SEVERAL["voc"] | {"trials": 2}}, "b measures the same as a"),
        ({"a": SEVERAL["near"] | {"num_gpus": -1}}, "evaluation a: num_gpus is -1"),
        ({"a": SEVERAL["near"] | {"trials": 2}}, "evaluation a: trials"),
    ],
)
def test_evaluations_that_cannot_be_told_apart_or_run_are_errors(tmp_path, evaluations, says):
    with pytest.raises(KsclError) as error:
        read_suite(smoke_suite(tmp_path, evaluations=evaluations))
    assert says in str(error.value)


def test_the_overrides_of_a_pretraining_are_checked_when_the_suite_is_read(tmp_path):
    suite = yaml.safe_load(smoke_suite(tmp_path).read_text())
    suite["contenders"]["kscl"]["overrides"] |= {"METHOD.RHO": 7, "METHOD.NUM_SHOT": 3}
    with pytest.raises(KsclError) as error:
        read_suite(smoke_suite(tmp_path, **suite))
    assert "contender kscl: 2 problems" in str(error.value)
    assert "overrides: METHOD.NUM_SHOT is not a key; did you mean METHOD.NUM_SHOTS" in str(
        error.value
    )
    assert "METHOD.RHO is 7.0 (overrides)" in str(error.value)


def test_a_contender_that_is_written_twice_is_an_error(tmp_path):
    path = tmp_path / "suite.yaml"
    path.write_text("contenders:\n  a: {arch: resnet50}\n  a: {arch: resnet18}\n")
    with pytest.raises(KsclError, match=f"{path}:3: a appears twice"):
        read_suite(path)


def settings(stage: Stage) -> dict[str, str]:
    """The overrides KEY VALUE of a stage's command."""
    words = list(stage.arguments)
    first = words.index("--num-gpus") + 2
    return dict(zip(words[first::2], words[first + 1 :: 2], strict=True))


def test_the_place_and_input_of_a_file_reach_the_probe_and_the_converter(tmp_path):
    (tmp_path / "dino.pth").write_bytes(b"x")
    dino = {"file": str(tmp_path / "dino.pth"), "arch": "resnet50", "container": "student"}
    dino |= {"prefix": "module.backbone.", "mean": [0, 0, 0], "std": [1, 1, 1]}
    stages = plan(read_suite(smoke_suite(tmp_path, contenders={"dino": dino})))
    probe = settings(next(stage for stage in stages if stage.kind == "knn"))
    assert probe["BACKBONE.CONTAINER"] == "student"
    assert probe["BACKBONE.PREFIX"] == "module.backbone."
    assert probe["INPUT.STD"] == "[1, 1, 1]"
    words = " ".join(next(stage for stage in stages if stage.kind == "convert").arguments)
    assert "--container student --prefix module.backbone. --mean 0 0 0 --std 1 1 1" in words
    with pytest.raises(KsclError, match="contender dino: std"):
        read_suite(smoke_suite(tmp_path, contenders={"dino": {**dino, "std": [1]}}))


def test_a_contenders_key_is_the_label_of_its_stages_unless_it_has_another(tmp_path):
    config = "pretrain/shapes_moco.yaml"  # which has a label of its own
    contenders = {
        "mine": {"pretrain": config},
        "longer": {"pretrain": config, "overrides": {"LABEL": "moco_v2", "SOLVER.EPOCHS": 9}},
        "untrained": {"arch": "resnet50", "kwargs": NETWORK},
    }
    evaluations = {"knn": {"config": "linear_eval/shapes_knn.yaml"}}
    suite = smoke_suite(tmp_path, contenders=contenders, evaluations=evaluations, basis_image="")
    stages = [s for s in plan(read_suite(suite)) if s.kind in ("pretrain", "knn")]
    assert {stage.name: settings(stage)["LABEL"] for stage in stages} == {
        "mine/seed0/pretrain": "mine",
        "mine/seed0/knn": "mine",
        "longer/seed0/pretrain": "moco_v2",
        "longer/seed0/knn": "moco_v2",
        "untrained/seed0/knn": "untrained",
    }


def test_a_stage_depends_on_the_values_of_its_config_and_not_on_comments(tmp_path):
    base, child = tmp_path / "base.yaml", tmp_path / "child.yaml"
    base.write_text("_BASE_: " + str(ROOT / "configs/pretrain/shapes_moco.yaml") + "\n")
    child.write_text("_BASE_: base.yaml\nMETHOD: {TEMPERATURE: 0.3}\n")

    def key() -> str:
        contenders = {"mine": {"pretrain": str(child)}}
        stages = plan(read_suite(smoke_suite(tmp_path, contenders=contenders)))
        return next(stage.key for stage in stages if stage.kind == "pretrain")

    before = key()
    child.write_text("# A remark.\n_BASE_: base.yaml\nMETHOD:\n  TEMPERATURE: 0.3  # Warm.\n")
    assert key() == before
    base.write_text(base.read_text() + "SOLVER: {MOMENTUM: 0.8}\n")
    changed = key()
    assert changed != before
    child.write_text("_BASE_: base.yaml\nMETHOD: {TEMPERATURE: 0.4}\n")
    assert key() not in (before, changed)


@pytest.mark.slow
def test_a_suite_killed_in_every_stage_ends_in_the_same_leaderboard(undisturbed, tmp_path):
    suite = smoke_suite(tmp_path)
    command = [sys.executable, "-W", "ignore", "tools/run_suite.py", str(suite)]
    for number, stage in enumerate(plan(read_suite(suite))):
        log = next_log(tmp_path, stage.name)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        while process.poll() is None and not log():
            time.sleep(0.05)
        time.sleep(1.5)  # into the stage
        os.kill(process.pid, (signal.SIGTERM, signal.SIGKILL)[number % 2])
        process.wait()
    done = tool("run_suite", suite, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(numbers(tmp_path)) > 8
    assert numbers(tmp_path) == numbers(undisturbed)


def next_log(folder: Path, name: str):
    pattern = f"{name.replace('/', '_')}-*.log"
    return lambda: list((folder / "output" / ".stages").glob(pattern))


SHIPPED = sorted((ROOT / "configs" / "suites").rglob("*.yaml"))
MAINS = {
    "pretrain": pretrain.main,
    **dict.fromkeys(set(EVALUATION_KINDS) - {"detection"}, linear_eval.main),
    "detection": train_net.main,
}


@pytest.mark.parametrize("path", SHIPPED, ids=str)
def test_every_shipped_suite_can_be_planned(path):
    stages = plan(read_suite(path))
    assert stages[-1].kind == "board"


@pytest.mark.parametrize("path", SHIPPED, ids=str)
def test_every_override_of_every_shipped_suite_is_valid(path, capsys):
    suite = read_suite(path)
    protocols = {each.kind: each.config for each in suite.evaluations}
    checked, stages = set(), plan(suite)
    for stage in stages:
        words = list(stage.arguments)
        if "/seed" in stage.name and "/seed0/" not in stage.name:
            continue  # the same but for the seed
        if stage.kind == "shapes":
            make_shapes._parser().parse_args(words)  # exits at an option that there is not
        elif stage.kind in MAINS:
            if stage.kind == "detection":  # its own config is written by the stage before
                words[words.index("--config-file") + 1] = protocols["detection"]
            assert MAINS[stage.kind](["--print-config", *words]) == 0, capsys.readouterr().err
            resolved = yaml.safe_load(capsys.readouterr().out)
            for key, text in settings(stage).items():
                if stage.kind != "detection":
                    assert str(value_at(resolved, key)) in (text, str(yaml.safe_load(text))), key
            checked.add(stage.kind)
    assert checked == {"pretrain", *protocols} & {stage.kind for stage in stages}
    assert checked >= set(protocols)


def test_the_other_probes_are_evaluations_of_a_suite():
    stages = plan(read_suite("suites/linear_suite.yaml"))
    programs = {stage.kind: stage.program for stage in stages}
    probes = dict.fromkeys(("linear_suite", "svm", "low_shot"), "kscl-linear-eval")
    assert programs == {**probes, "board": "kscl-leaderboard"}
