"""What a suite file says: all that is wrong is reported at once, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kscl.benchmark.suite.spec import read_suite
from kscl.errors import KsclError
from tests.helpers.chain import smoke_suite
from tests.helpers.data.sets import write_image

NEAR = {"kind": "knn", "config": "linear_eval/knn.yaml"}
VOC = {"kind": "detection", "config": "detection/voc0712_c4_24k_moco.yaml", "trials": 5}


def problems_of(path: Path) -> str:
    with pytest.raises(KsclError) as error:
        read_suite(path)
    return str(error.value)


def test_all_that_is_wrong_with_a_suite_is_reported_at_once(tmp_path):
    path = tmp_path / "suite.yaml"
    path.write_text(
        "name: x\noutput_dr: y\nseeds: [0, 0]\ncontenders:\n  a: {pretrain: nowhere.yaml}\n"
        "  b: {}\n  c: {file: nowhere.pth}\n  d: {arch: resnet50, overrides: {METHOD.RHO: 1}}\n"
        "evaluations:\n  panoptic: {config: x}\n"
        "  knn: {config: linear_eval/knn.yaml, trials: 2}\npretrain_overrides: {LABEL: x}\n"
        "estimates: {pretrain: soon, knn: -1, talk: 5, board: 2}\n"
    )
    told = problems_of(path)
    for part in (
        "output_dr is not a key; did you mean output_dir?",
        "output_dir is missing",
        "the suite: seeds",
        "contender a: nowhere.yaml",
        "contender b has no backbone",
        "contender c: file nowhere.pth",
        "contender d: METHOD.RHO",
        "evaluation knn: trials",
        "evaluation panoptic: kind is missing",
        "evaluation panoptic: config: x",
        "pretrain_overrides: LABEL",
        "estimates: pretrain",
        "estimates: knn",
        "estimates: talk is not a kind of stage",
    ):
        assert part in told
    assert told.startswith("14 problems")


@pytest.mark.parametrize(
    ("evaluations", "says"),
    [
        ({"voc": {"config": "linear_eval/knn.yaml"}}, "evaluation voc: kind is missing"),
        ({"a": {"kind": "bayes", "config": "linear_eval/knn.yaml"}}, "evaluation a: There is no"),
        ({"a/b": NEAR}, "evaluation a/b: Folders"),
        ({"convert": VOC}, "evaluation convert: Folders"),
        ({"a": VOC, "b": VOC | {"trials": 2}}, "b measures the same as a"),
        ({"a": NEAR | {"num_gpus": -1}}, "evaluation a: num_gpus"),
        ({"a": NEAR | {"trials": 2}}, "evaluation a: trials"),
    ],
)
def test_evaluations_that_are_alike_or_cannot_run_are_errors(tmp_path, evaluations, says):
    assert says in problems_of(smoke_suite(tmp_path, evaluations=evaluations))


def test_the_overrides_of_a_pretraining_are_checked_when_the_suite_is_read(tmp_path):
    suite = yaml.safe_load(smoke_suite(tmp_path).read_text())
    suite["contenders"]["kscl"]["overrides"] |= {"METHOD.RHO": 7, "METHOD.NUM_SHOT": 3}
    told = problems_of(smoke_suite(tmp_path, **suite))
    for part in ("contender kscl: 2 problems", "mean METHOD.NUM_SHOTS", "METHOD.RHO is 7.0"):
        assert part in told


def test_a_contender_that_is_written_twice_is_an_error(tmp_path):
    path = tmp_path / "suite.yaml"
    path.write_text("contenders:\n  a: {arch: resnet50}\n  a: {arch: resnet18}\n")
    assert f"{path}:3: a appears twice" in problems_of(path)


def test_a_basis_image_exists_or_is_drawn_by_the_suite(tmp_path):
    assert read_suite(smoke_suite(tmp_path)).basis_image  # one of the shapes
    write_image(tmp_path / "one.jpg", seed=0)
    assert read_suite(smoke_suite(tmp_path, basis_image=str(tmp_path / "one.jpg")))
    for changes in ({"shapes": {}}, {"basis_image": "nowhere.jpg"}):
        assert "basis_image" in problems_of(smoke_suite(tmp_path, **changes))


def test_the_number_of_seeds_is_given_on_the_command_line(tmp_path):
    suite = smoke_suite(tmp_path, seeds=[7])
    assert {contender.seeds for contender in read_suite(suite, num_seeds=3).contenders} == {
        (0, 1, 2)
    }


def labeled_suite(folder: Path, baseline: str) -> Path:
    contenders = yaml.safe_load(smoke_suite(folder).read_text())["contenders"]
    contenders["kscl_long"] = contenders.pop("kscl")
    contenders["kscl_long"]["overrides"]["LABEL"] = "kscl"
    return smoke_suite(folder, contenders=contenders, baseline=[baseline])


def test_a_baseline_is_a_label_with_or_without_settings_or_the_key_of_a_row(tmp_path):
    for name in ("random", "kscl", "kscl@2,K=5,40%", "random@8-64 channels", "0a1b2c3d"):
        assert read_suite(labeled_suite(tmp_path, name)).baseline == [name]
    for name, hint in (
        ("randm@2,K=5", "did you mean random?"),
        ("kscl_long", "did you mean kscl?"),  # rows have the label
        ("xyz", "choose from kscl, random."),
    ):
        assert hint in problems_of(labeled_suite(tmp_path, name))
    (tmp_path / "made.safetensors").write_bytes(b"x")  # which may say itself what it is called
    contenders = {"theirs": {"file": str(tmp_path / "made.safetensors")}}
    assert read_suite(smoke_suite(tmp_path, contenders=contenders, baseline=["moco_v2"]))


def test_a_baseline_of_several_lengths_needs_the_epochs_of_one(tmp_path):
    lengths = {"steps": {"kscl": 3}, "lengths": [1, 2]}
    assert "kscl@30" in problems_of(smoke_suite(tmp_path, baseline=["kscl"], **lengths))
    assert read_suite(smoke_suite(tmp_path, baseline=["kscl@2"], **lengths))


def test_a_module_that_cannot_be_imported_is_named(tmp_path):
    assert "no_such_part" in problems_of(smoke_suite(tmp_path, **{"import": ["no_such_part"]}))
