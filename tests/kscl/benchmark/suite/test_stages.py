"""The stages and keys that follow from a suite; nothing runs here."""

from __future__ import annotations

import json
import logging
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from detection.commands import train_net
from kscl.benchmark.suite.check import different_networks
from kscl.benchmark.suite.execute import note_path
from kscl.benchmark.suite.spec import read_suite
from kscl.benchmark.suite.stages import Stage, plan
from kscl.commands import make_shapes, pretrain, run_suite
from kscl.config import value_at
from kscl.errors import KsclError
from linear_eval.commands import linear_eval
from tests.helpers.chain import NETWORK, smoke_suite
from tests.helpers.commands import ROOT
from tests.helpers.data.own_folders import prepare, split_ids, write_scenes
from tests.helpers.data.photos import jpeg, photo
from tests.helpers.data.sets import small_voc, write_image

SEVERAL = {
    "near": {"kind": "knn", "config": "linear_eval/knn.yaml", "num_gpus": 2},
    "far": {"kind": "knn", "config": "linear_eval/knn.yaml", "overrides": {"KNN.K": [200]}},
    "voc": {"kind": "detection", "config": "detection/voc0712_c4_24k_moco.yaml", "trials": 5},
    "coco": {"kind": "detection", "config": "detection/coco_c4_2x.yaml", "num_gpus": 8},
}
# Stages behind a pretraining.
PRETRAINED = {f"kscl/seed0/{it}" for it in ("pretrain", "basis", "knn", "convert", "detection")}


def stages_of(path: Path) -> dict[str, Stage]:
    return {stage.name: stage for stage in plan(read_suite(path))}


def keys(suite: Path) -> dict[str, str]:
    return {name: stage.key for name, stage in stages_of(suite).items()}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]} - {"leaderboard"}


def changed_suite(folder: Path, section: str, **overrides: object) -> Path:
    """Return the suite with other settings in one place."""
    path = smoke_suite(folder)
    suite = yaml.safe_load(path.read_text())
    first, *rest = section.split(".")
    place = suite[first]
    for name in rest:
        place = place[name]
    place |= overrides
    path.write_text(yaml.safe_dump(suite))
    return path


def pretrained_on(folder: Path, where: str) -> Path:
    return changed_suite(folder, "pretrain_overrides", **{"DATA.TRAIN": where})


def test_only_what_depends_on_a_change_gets_another_key(tmp_path):
    before = keys(smoke_suite(tmp_path))
    path = changed_suite(tmp_path, "contenders.kscl.overrides", **{"METHOD.RHO": 0.9})
    assert changed(before, keys(path)) == PRETRAINED
    assert before["leaderboard"] != keys(path)["leaderboard"]


def test_modules_of_others_reach_every_command_and_change_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("KSCL_IMPORT", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_parts.py").write_text("")
    before = keys(smoke_suite(tmp_path))
    stages = stages_of(smoke_suite(tmp_path, **{"import": ["my_parts"]}))
    assert "my_parts" in sys.modules
    assert {name: stage.key for name, stage in stages.items()} == before
    for name in ("kscl/seed0/pretrain", "kscl/seed0/knn", "random/seed0/detection", "leaderboard"):
        words = stages[name].command
        assert words[words.index("--import") + 1] == "my_parts"


def test_a_suite_has_any_number_of_evaluations_of_one_kind(tmp_path):
    stages = stages_of(smoke_suite(tmp_path, evaluations=SEVERAL))
    near, far, voc, coco = (stages[f"random/seed0/{name}"] for name in SEVERAL)
    assert [it.kind for it in (near, far, voc, coco)] == ["knn", "knn", "detection", "detection"]
    assert far.overrides["KNN.K"] == [200]
    assert "KNN.K" not in near.overrides
    assert [it.num_gpus for it in (near, far, voc, coco)] == [2, 1, 1, 8]
    assert [dict(it.options)["num_trials"] for it in (voc, coco)] == [5, 1]
    for name, stage in (("voc", voc), ("coco", coco)):
        convert = stages[f"random/seed0/{name}-convert"]
        assert stage.need("convert") is convert
        assert dict(convert.options)["protocol"] == SEVERAL[name]["config"]
    folders = [stage.folder for stage in stages.values()]
    assert len(set(folders)) == len(folders)
    assert {near.folder, far.folder, voc.folder, coco.folder} <= {*stages["leaderboard"].inputs}


def test_an_evaluation_named_by_its_kind_keeps_its_folders(tmp_path):
    old = stages_of(smoke_suite(tmp_path))
    evaluations = yaml.safe_load(smoke_suite(tmp_path).read_text())["evaluations"]
    for kind, about in evaluations.items():
        about["kind"] = kind
    assert stages_of(smoke_suite(tmp_path, evaluations=evaluations)) == old
    assert "random/seed0/convert" in old


def test_the_place_and_input_of_a_file_reach_the_probe_and_the_converter(tmp_path):
    (tmp_path / "dino.pth").write_bytes(b"x")
    dino = {"file": str(tmp_path / "dino.pth"), "arch": "resnet50", "container": "student"}
    dino |= {"prefix": "module.backbone.", "mean": [0, 0, 0], "std": [1, 1, 1]}
    stages = stages_of(smoke_suite(tmp_path, contenders={"dino": dino}))
    probe = stages["dino/seed0/knn"].overrides
    assert probe["BACKBONE.CONTAINER"] == "student"
    assert probe["BACKBONE.PREFIX"] == "module.backbone."
    assert probe["INPUT.STD"] == [1, 1, 1]
    words = " ".join(stages["dino/seed0/convert"].command)
    assert "--container student --prefix module.backbone. --mean 0 0 0 --std 1 1 1" in words


def test_a_contenders_key_is_the_label_of_its_stages_unless_it_has_another(tmp_path):
    config = "pretrain/shapes_moco.yaml"  # which has a label of its own
    contenders = {
        "mine": {"pretrain": config},
        "longer": {"pretrain": config, "overrides": {"LABEL": "moco_v2", "SOLVER.EPOCHS": 9}},
        "untrained": {"arch": "resnet50", "kwargs": NETWORK},
    }
    evaluations = {"knn": {"config": "linear_eval/shapes_knn.yaml"}}
    suite = smoke_suite(tmp_path, contenders=contenders, evaluations=evaluations, basis_image="")
    labels = {name: stage.overrides.get("LABEL") for name, stage in stages_of(suite).items()}
    assert {name: label for name, label in labels.items() if label} == {
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
        return keys(smoke_suite(tmp_path, contenders=contenders))["mine/seed0/pretrain"]

    before = key()
    child.write_text("# A remark.\n_BASE_: base.yaml\nMETHOD:\n  TEMPERATURE: 0.3  # Warm.\n")
    assert key() == before
    base.write_text(base.read_text() + "SOLVER: {MOMENTUM: 0.8}\n")
    other = key()
    assert other != before
    child.write_text("_BASE_: base.yaml\nMETHOD: {TEMPERATURE: 0.4}\n")
    assert key() not in (before, other)


# The data that a stage reads


def test_a_replaced_photo_is_followed_by_the_line_that_its_pretraining_is_run_again(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("kscl"), "propagate", True)
    caplog.set_level(logging.WARNING)
    write_image(tmp_path / "photos/1.jpg", seed=1)
    suite = pretrained_on(tmp_path, str(tmp_path / "photos"))
    for stage in plan(read_suite(suite)):
        note = note_path(tmp_path / "output/.stages", stage)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps({"key": stage.key, "kind": stage.kind, "seconds": 1.0}))
        Path(stage.folder).mkdir(parents=True, exist_ok=True)
    assert run_suite.main([str(suite), "--dry-run", "--skip-check"]) == 0
    assert caplog.messages == []
    write_image(tmp_path / "photos/1.jpg", seed=99)
    assert run_suite.main([str(suite), "--dry-run", "--skip-check"]) == 0
    assert {text.partition(" is run again: ")[0] for text in caplog.messages} == PRETRAINED


def test_a_replaced_photo_changes_the_pretraining_on_the_tiles_cut_from_it(tmp_path):
    write_scenes(tmp_path, 8, side=40)
    assert prepare(tmp_path) == 0
    suite = pretrained_on(tmp_path, str(tmp_path / "mine/tiles"))
    before = keys(suite)
    assert keys(suite) == before
    photo_of_tiles = tmp_path / f"photos/{split_ids(tmp_path, 'pretrain')[0]}.jpg"
    photo_of_tiles.write_bytes(jpeg(photo(99, 240, 320)))
    assert changed(before, keys(suite)) == PRETRAINED
    photo_of_tiles.unlink()  # the tiles can still be pretrained on
    assert keys(suite)


def test_a_replaced_basis_image_changes_its_figures_alone(tmp_path):
    suite = smoke_suite(tmp_path)
    before = keys(suite)
    write_image(tmp_path / "shapes/unlabeled/000000.jpg", seed=1)  # as the first stage will
    assert keys(suite) == before
    image = tmp_path / "shown.jpg"
    write_image(image, seed=1)
    suite = smoke_suite(tmp_path, basis_image=str(image))
    before = keys(suite)
    write_image(image, seed=2)
    assert changed(before, keys(suite)) == {"kscl/seed0/basis"}
    assert before["leaderboard"] != keys(suite)["leaderboard"]


@pytest.mark.parametrize("pattern", ["train-{000..001}.tar", "train-*.tar"])
def test_a_replaced_shard_of_a_pattern_changes_the_pretraining_on_it(tmp_path, pattern):
    suite = pretrained_on(tmp_path, str(tmp_path / "shards" / pattern))
    missing = keys(suite)  # reported by the check of the stage

    def pack(number: int, seed: int) -> None:
        write_image(tmp_path / "image.png", seed)
        shard = tmp_path / f"shards/train-{number:03d}.tar"
        shard.parent.mkdir(exist_ok=True)
        with tarfile.open(shard, "w") as file:
            file.add(tmp_path / "image.png", "000000.png")

    for number in range(2):
        pack(number, seed=number)
    before = keys(suite)
    assert before != missing
    (tmp_path / "shards/train-000.tar").touch()  # only its time changes
    assert keys(suite) == before
    pack(1, seed=99)
    assert changed(before, keys(suite)) == PRETRAINED


@pytest.mark.parametrize("name", ["voc:{}:", "voc_2007_"])
def test_a_replaced_image_changes_the_stages_that_read_it(tmp_path, monkeypatch, name):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    voc = small_voc(tmp_path / "VOC2007")
    first = name.format(voc)
    sets = {"DATASETS.TRAIN": [f"{first}train"], "DATASETS.TEST": [f"{first}test"]}
    path = changed_suite(tmp_path, "evaluations.detection.overrides", **sets)
    before = keys(path)
    assert before == keys(path)
    write_image(voc / "JPEGImages/a.jpg", seed=99)
    assert changed(before, keys(path)) == {"random/seed0/detection", "kscl/seed0/detection"}


def read_by(folder: Path, kind: str, config: str, overrides: dict) -> Path:
    evaluation = {"kind": kind, "config": config, "overrides": overrides}
    return smoke_suite(folder, evaluations={"mine": evaluation})


def test_every_kind_of_input_is_known_by_its_content(tmp_path):
    write_image(tmp_path / "flowers/train/rose/a.jpg", seed=0)
    (tmp_path / "subset.txt").write_text("a.jpg\n")
    (tmp_path / "start.pth").write_bytes(b"one")
    (tmp_path / "list.txt").write_text("far/a.jpg\n")
    write_image(tmp_path / "far/a.jpg", seed=0)
    sets = {part: str(tmp_path / "flowers" / part) for part in ("train", "test")}
    write_image(tmp_path / "flowers/test/rose/a.jpg", seed=0)
    linear_suite = ("linear_suite", "linear_eval/linear_suite.yaml", {"SETS.flowers": sets})
    few = ("linear", "linear_eval/linear_cached.yaml", {"DATA.SUBSET": f"{tmp_path}/subset.txt"})
    weights = {"BACKBONE.WEIGHTS": f"{tmp_path}/start.pth"}
    for make, replace_input, stage in (
        (
            lambda: read_by(tmp_path, *linear_suite),
            lambda: write_image(tmp_path / "flowers/test/rose/a.jpg", seed=1),
            "random/seed0/mine",
        ),
        (
            lambda: read_by(tmp_path, *few),
            lambda: (tmp_path / "subset.txt").write_text("b.jpg\n"),
            "random/seed0/mine",
        ),
        (
            lambda: pretrained_on(tmp_path, f"{tmp_path}/list.txt"),
            lambda: write_image(tmp_path / "far/a.jpg", seed=1),
            "kscl/seed0/pretrain",
        ),
        (
            lambda: changed_suite(tmp_path, "pretrain_overrides", **weights),
            lambda: (tmp_path / "start.pth").write_bytes(b"two"),
            "kscl/seed0/pretrain",
        ),
    ):
        before = keys(make())
        replace_input()
        assert stage in changed(before, keys(make()))


# The suites in configs/


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "suites").rglob("*.yaml")), ids=str)
def test_every_override_of_every_shipped_suite_is_valid(path, capsys):
    suite = read_suite(path)
    protocols = {each.kind: each.config for each in suite.evaluations}
    mains = {
        "kscl.commands.pretrain": pretrain.main,
        "linear_eval.commands.linear_eval": linear_eval.main,
        "detection.commands.train_net": train_net.main,
    }
    checked, stages, first = set(), plan(suite), suite.contenders[0].seeds[0]
    for stage in stages:
        words = stage.arguments
        if "/seed" in stage.name and f"/seed{first}/" not in stage.name:
            continue  # the same but for the seed
        if stage.kind == "shapes":
            make_shapes._parser().parse_args(words)  # exits at an option that there is not
        elif stage.tool in mains:
            if stage.kind == "detection":  # its own config is written by the stage before
                words[words.index("--config-file") + 1] = protocols["detection"]
                for norm in ("MODEL.RESNETS.NORM", "MODEL.FPN.NORM"):  # SyncBN needs a GPU
                    words += [norm, "naiveSyncBN"]
            assert mains[stage.tool](["--print-config", *words]) == 0, capsys.readouterr().err
            resolved = yaml.safe_load(capsys.readouterr().out)
            for key, value in stage.overrides.items():
                if stage.kind != "detection":
                    assert str(value_at(resolved, key)) in (str(value), str(_plain(value))), key
            checked.add(stage.kind)
    assert stages[-1].kind == "board"
    assert checked == {"pretrain", *protocols} & {stage.kind for stage in stages}
    assert checked >= set(protocols)


def _plain(value: object) -> object:
    return yaml.safe_load(value) if isinstance(value, str) else value


def test_a_contender_is_trained_longer_by_the_evaluations_that_it_names_and_no_others(tmp_path):
    about = yaml.safe_load(smoke_suite(tmp_path).read_text())
    contenders = about["contenders"] | {
        "random_longer": about["contenders"]["random"]
        | {"longer": {"detection": 2.5}, "estimates": {"detection": 70}}
    }
    path = smoke_suite(tmp_path, contenders=contenders, estimates={"detection": 30})
    stages = stages_of(path)
    assert "random_longer/seed0/knn" not in stages
    longer, plain = (stages[f"{it}/seed0/detection"] for it in ("random_longer", "random"))
    assert longer.overrides["KSCL.LONGER"] == 2.5
    assert "KSCL.LONGER" not in plain.overrides
    assert (longer.estimate, plain.estimate) == (70, 30)
    assert longer.network != plain.network == stages["kscl/seed0/detection"].network
    wrong = {"knn": 2, "detect": 2, "detection": 1}
    contenders["random_longer"] |= {"longer": wrong, "estimates": {"talk": 1}}
    with pytest.raises(KsclError) as error:
        read_suite(smoke_suite(tmp_path, contenders=contenders))
    parts = ("longer: knn", "longer: detect is", "longer: detection must", "estimates: talk")
    for part in parts:
        assert f"contender random_longer: {part}" in str(error.value)


def test_contenders_with_different_backbones_are_named(tmp_path):
    about = yaml.safe_load(smoke_suite(tmp_path).read_text())
    assert different_networks(read_suite(tmp_path / "suite.yaml")) == ""
    contenders = about["contenders"] | {"large": {"arch": "resnet50"}}
    told = different_networks(read_suite(smoke_suite(tmp_path, contenders=contenders)))
    assert "resnet50: large" in told
    assert "kscl, random" in told
