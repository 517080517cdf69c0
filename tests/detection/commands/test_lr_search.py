"""A learning rate that is chosen is chosen on training images, and the record says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from detectron2.config import CfgNode

from detection.commands.train_net import main
from detection.config import load_detection_config
from detection.data.sets import RunSets, read_run_sets
from detection.train.protocol import protocol_of
from detection.train.trials import adapt, search, search_sets
from kscl.benchmark.leaderboard.rows import build_board
from kscl.config import ConfigError
from kscl.records.record import read_record, record_id
from kscl.runtime.files import write_atomically
from tests.helpers.detection_runs import arguments, start_train_net

pytestmark = pytest.mark.full

SHORT = ("SOLVER.MAX_ITER", "2", "SOLVER.STEPS", "(1,)", "TEST.PRECISE_BN.NUM_ITER", "1")


def test_the_learning_rate_is_chosen_on_a_part_of_the_training_images(shop, tmp_path, capsys):
    output = tmp_path / "run"
    grid = "--lr-grid=0.001,0.03"
    done = start_train_net(shop, output, grid, *SHORT).wait()
    assert done.returncode == 0, done.stderr
    record = read_record(output / "seed0" / "record.json")
    found = record["details"]["lr_search"]
    trials = [
        read_record(output / "lr_search" / f"lr{rate}" / "record.json") for rate in found["AP"]
    ]
    assert [trial["metrics"]["AP"] for trial in trials] == list(found["AP"].values())
    assert found["AP"][f"{found['chosen']:g}"] == max(found["AP"].values())
    assert (found["trained_on"], found["chosen_on"]) == (8, 2)
    assert record["config"]["values"]["SOLVER"]["BASE_LR"] == found["chosen"]
    assert record["protocol"]["id"] == "shapes-tiny-c4-lr-search+DATASETS=voc (changed)"
    assert record["protocol"]["definition"]["KSCL.LR_GRID"] == [0.001, 0.03]
    assert "SOLVER.BASE_LR" not in record["protocol"]["definition"]
    # Of the search itself nothing is ranked with the result.
    names = sorted(section.protocol.id for section in build_board([output]).sections)
    assert names == [
        "shapes-tiny-c4-lr-search+DATASETS=voc (changed)",
        *["shapes-tiny-c4-lr-trial"] * 2,
    ]
    again = start_train_net(shop, output, grid, "--resume", *SHORT).wait()
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("This run has ended") == 3
    shutil.rmtree(output / "seed0")
    assert main(arguments(shop, output, grid, *SHORT)) == 2
    assert "holds a run already. Resume it with --resume" in capsys.readouterr().err


def test_the_learning_rate_of_the_highest_ap_is_chosen_and_of_equal_ones_the_lowest(
    finished, shop, tmp_path
):
    reached = {0.01: 5.0, 0.02: 9.0, 0.04: 9.0, 0.08: 7.0}
    words = arguments(shop, tmp_path / "run", "KSCL.LR_GRID", str(list(reached)))[2:]
    cfg = load_detection_config(None, words)
    sets, _ = read_run_sets(cfg)
    record = json.loads((finished / "record.json").read_text())

    def run(trial: CfgNode, _: RunSets) -> int:
        record["metrics"]["AP"] = reached[trial.SOLVER.BASE_LR]
        record["id"] = record_id(record)
        write_atomically(Path(trial.OUTPUT_DIR) / "record.json", json.dumps(record).encode())
        return 0

    code, found = search(cfg, sets, run)
    assert code == 0
    assert found["chosen"] == 0.02
    assert found["AP"] == {f"{rate:g}": score for rate, score in reached.items()}


def test_no_image_is_both_trained_on_and_chosen_on(shop, tmp_path):
    cfg = load_detection_config(None, arguments(shop, tmp_path)[2:])
    sets, _ = read_run_sets(cfg)
    parts = search_sets(sets)
    chosen_on = {image.path for image in parts.test[1].images}
    trained_on = {image.path for _, part in parts.train for image in part.images}
    assert chosen_on
    assert not chosen_on & trained_on
    assert chosen_on | trained_on == {image.path for image in sets.train[0][1].images}
    assert not chosen_on & {image.path for image in sets.test[1].images}
    hashes = {parts.fingerprints[role]["hash"] for role in parts.fingerprints}
    assert len(hashes | {print_["hash"] for print_ in sets.fingerprints.values()}) == 4


def test_the_grid_is_part_of_the_protocol_and_scaled_with_the_learning_rate():
    name = "detection/voc0712_c4_24k_moco.yaml"
    plain = load_detection_config(name)
    searched = load_detection_config(name, ["KSCL.LR_GRID", "[0.02, 0.04]"])
    other = load_detection_config(name, ["KSCL.LR_GRID", "[0.02, 0.08]"])
    found = [protocol_of(cfg) for cfg in (plain, searched, other)]
    assert [protocol.id.endswith("-lr-search") for protocol in found] == [False, True, True]
    assert len({protocol.hash for protocol in found}) == 3
    searched.SOLVER.REFERENCE_WORLD_SIZE = 8
    scaled, _, _ = adapt(searched, num_gpus=4)
    assert scaled.KSCL.LR_GRID == [0.01, 0.02]


@pytest.mark.parametrize("grid", ["[0.01]", "[0.01, 0.01]", "[0.01, -1]", "[0.01, x]", "[1, .inf]"])
def test_a_grid_that_gives_no_choice_is_refused(grid):
    with pytest.raises(ConfigError, match=r"KSCL\.LR_GRID"):
        load_detection_config("detection/shapes_tiny_c4.yaml", ["KSCL.LR_GRID", grid])


def test_a_bad_grid_is_told_before_anything_starts(shop, tmp_path, capsys):
    assert main(arguments(shop, tmp_path / "run", "--lr-grid=0.01")) == 2
    assert "KSCL.LR_GRID" in capsys.readouterr().err
    for text in ("", "0.01,x"):
        with pytest.raises(SystemExit):
            main(arguments(shop, tmp_path / "run", f"--lr-grid={text}"))
        assert "--lr-grid" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


FEW = ("DATASETS.TRAIN", "('voc:{}:val',)", "DATASETS.TEST", "('voc:{}:train',)")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--lr-grid=0.01"], "must be at least two different learning rates"),
        (["--lr-grid=0.01,0.02", *FEW], "got 2"),
    ],
)
def test_a_check_tells_what_would_stop_the_search(shop, tmp_path, capsys, words, told):
    words = [word.format(shop / "voc") for word in words]
    assert main(arguments(shop, tmp_path / "run", "--check", *words)) == 1
    (problem,) = [it for it in json.loads(capsys.readouterr().out)["problems"] if it["fatal"]]
    assert told in problem["what"]


def test_a_search_that_can_run_passes_the_check(shop, tmp_path, capsys):
    assert main(arguments(shop, tmp_path / "run", "--check", "--lr-grid=0.01,0.02")) == 0
    assert json.loads(capsys.readouterr().out)["good"]
