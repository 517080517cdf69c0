"""What a suite file says, and the stages and keys that follow from it; nothing runs here."""

from __future__ import annotations

import pytest
import yaml

from kscl.benchmark.suite.spec import read_suite
from kscl.benchmark.suite.stages import Stage, plan
from kscl.errors import KsclError
from tests.helpers.chain import NETWORK, smoke_suite
from tests.helpers.commands import ROOT


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


def test_all_that_is_wrong_with_a_suite_is_told_at_once(tmp_path):
    path = tmp_path / "suite.yaml"
    path.write_text(
        "name: x\noutput_dr: y\nseeds: [0, 0]\ncontenders:\n  a: {pretrain: nowhere.yaml}\n"
        "  b: {}\n  c: {file: nowhere.pth}\n  d: {arch: resnet50, overrides: {METHOD.RHO: 1}}\n"
        "evaluations:\n  segmentation: {config: x}\n"
        "  knn: {config: linear_eval/knn.yaml, trials: 2}\npretrain_overrides: {LABEL: x}\n"
        "estimates: {pretrain: soon, knn: -1, talk: 5, board: 2}\n"
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
        "estimates: pretrain is 'soon'",
        "estimates: knn is -1",
        "estimates: talk is not a kind of stage",
    ):
        assert part in str(error.value)
    assert str(error.value).startswith("14 problems")


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
