"""A row is made again from its record: the same number, or a sentence that says what differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from kscl.benchmark.leaderboard.statistics import prediction_interval
from kscl.benchmark.reproduce import origin, verdict
from kscl.benchmark.suite.spec import read_suite
from kscl.commands.reproduce import main
from kscl.records.record import find_records, record_id
from linear_eval.commands import linear_eval
from tests.helpers.data.digits import overrides, write_digits
from tests.helpers.leaderboard_records import backbone_of, kscl, linear, pretraining, sha, write_all


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> Path:
    """The record of nearest neighbors on random features of real pictures."""
    folder = tmp_path_factory.mktemp("reproduce")
    words = overrides(
        write_digits(folder / "digits"), folder / "run", "PROBE", "knn", "KNN.K", "[3]"
    )
    assert linear_eval.main([*words, "SEED", "4"]) == 0
    return folder / "run" / "record.json"


def test_the_same_machine_gives_the_same_number_inside_the_old_interval(record, tmp_path, capfd):
    assert main([str(record), "--output-dir", str(tmp_path / "again")]) == 0
    said = capfd.readouterr().out
    assert "top1 was" in said
    assert "the same number" in said
    (new,) = find_records(tmp_path / "again").records.values()
    old = json.loads(record.read_text())
    assert new.metrics == old["metrics"]
    assert new.seed == old["seed"] == 4


def test_what_differs_and_what_is_missing_is_said_before_anything_runs(record, tmp_path, capsys):
    content = json.loads(record.read_text())
    content["libraries"]["torch"] = "1.0"
    content["code"]["commit"] = "a" * 40
    content["hardware"]["cpu"] = "another CPU"
    content["data"]["val"]["hash"] = "0" * 16
    content["config"]["values"]["DATA"]["TRAIN"] = "nowhere/train"
    content["id"] = record_id(content)
    changed = tmp_path / "record.json"
    changed.write_text(json.dumps(content))
    output = tmp_path / "again"
    assert main([str(changed), "--output-dir", str(output), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for words in ("torch was 1.0", "commit was aaaa", "another CPU", "val data was 0000"):
        assert words in shown
    assert "Missing: knn: DATA.TRAIN nowhere/train" in shown
    assert main([str(changed), "--output-dir", str(output)]) == 2
    said = capsys.readouterr().err
    assert "--set knn.DATA.TRAIN=PATH" in said
    assert "val data was 0000" in said  # its number could not be compared
    given = ["--set", f"knn.DATA.TRAIN={tmp_path}", "--dry-run"]
    assert main([str(changed), "--output-dir", str(output), *given]) == 0
    assert "Missing" not in capsys.readouterr().out
    assert yaml.safe_load((output / "knn.yaml").read_text())["DATA"]["TRAIN"] == str(tmp_path)


def test_the_suite_pretrains_with_the_recorded_settings(tmp_path, capsys):
    made = pretraining(*kscl(3, 0.9), "OUTPUT_DIR", "/elsewhere", seed=2)
    records = [made, linear(50, backbone_of(made), seed=2)]
    folder = write_all(tmp_path / "records", records)
    given = [str(folder / "run_0001" / "record.json"), "--records", str(folder)]
    assert main([*given, "--output-dir", str(tmp_path / "again"), "--dry-run"]) == 0
    suite = read_suite(tmp_path / "again" / "suite.yaml")
    (contender,) = suite.contenders
    assert contender.seeds == (2,)
    assert contender.label == made["config"]["values"]["LABEL"]
    values = yaml.safe_load(Path(contender.pretrain).read_text())
    recorded = made["config"]["values"]
    for key in ("OUTPUT_DIR", "SEED", "LABEL"):
        recorded.pop(key)
        assert key not in values
    assert values == recorded


@pytest.mark.parametrize("which", ["a pretraining", "an unknown backbone", "other seeds"])
def test_what_cannot_be_made_again_is_refused(tmp_path, which, capsys):
    made = pretraining(*kscl(3, 0.9), seed=2)
    other = (
        linear(50, sha("x")) if which == "an unknown backbone" else linear(50, backbone_of(made))
    )
    folder = write_all(tmp_path / "records", [made, other])
    number = 0 if which == "a pretraining" else 1
    path = folder / f"run_000{number}" / "record.json"
    assert main([str(path), "--records", str(folder), "--output-dir", str(tmp_path / "x")]) == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert {"a pretraining": "evaluation", "an unknown backbone": sha("x")[:16]}.get(
        which, "seed 2"
    ) in said


@pytest.mark.parametrize("is_flat", [True, False], ids=["submission", "suite"])
def test_another_number_is_judged_by_the_spread_over_all_seeds(tmp_path, monkeypatch, is_flat):
    monkeypatch.chdir(tmp_path)
    top1 = [50.0, 52.0, 57.0]
    for seed, value in enumerate(top1):
        made = pretraining(*kscl(3, 0.9), seed=seed)
        folder = tmp_path / "output" / "mine" / "kscl" / ("" if is_flat else f"seed{seed}")
        for name, record in ("a", made), ("b", linear(value, backbone_of(made), seed=seed)):
            (folder / f"{seed}{name}").mkdir(parents=True)
            (folder / f"{seed}{name}" / "record.json").write_text(json.dumps(record))
    (path,) = (tmp_path / "output").glob("**/2b/record.json")
    start = origin(path)
    for new, inside in ((57.0, True), (44.0, True), (30.0, False)):
        rerun = linear(new, start.record.inputs["backbone"], seed=2)
        again = tmp_path / "output" / "reproduce" / str(new)
        (again / "output" / "x").mkdir(parents=True)
        (again / "output" / "x" / "record.json").write_text(json.dumps(rerun))
        found = verdict(start, again)
        assert found.inside is inside
        assert found.interval == pytest.approx(prediction_interval(top1))


def test_a_row_of_several_processes_is_made_again_on_as_many(tmp_path, capsys):
    made = pretraining(*kscl(3, 0.9), seed=2, details={"processes": 8})
    folder = write_all(tmp_path / "records", [made, linear(50, backbone_of(made), seed=2)])
    given = [str(folder / "run_0001" / "record.json"), "--records", str(folder), "--dry-run"]
    output = tmp_path / "again"
    assert main([*given, "--output-dir", str(output)]) == 0
    assert read_suite(output / "suite.yaml").num_gpus == 8
    assert main([*given, "--output-dir", str(output), "--num-gpus", "2"]) == 0
    assert read_suite(output / "suite.yaml").num_gpus == 2
    assert "Differs: pretrain: The number of processes was 8." in capsys.readouterr().out
