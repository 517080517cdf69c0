"""A pretraining that has learned nothing, or cannot, says so."""

from __future__ import annotations

import json

import numpy as np

from kscl.commands.pretrain import main
from kscl.keys import load_config
from kscl.methods.base import build_method
from kscl.records.record import read_record
from tests.helpers.runs import TINY, Run


def test_a_record_holds_the_doubts_of_its_pretraining_and_the_tool_prints_them(
    tmp_path, images, one_thread, capsys
):
    found = {}
    for queue in (64, 96):  # of 96 images
        words = ["DICTIONARY.QUEUE_LENGTH", queue, "SOLVER.EPOCHS", 1]
        run = Run(tmp_path / str(queue), images, *words)
        assert main(run.command()) == 0
        told = capsys.readouterr()
        found[queue] = read_record(run.folder / "record.json")["details"]["warnings"]
        for warning in found[queue]:
            assert warning in told.out + told.err
        # Before the training, and after it.
        assert told.err.count("Set DICTIONARY.QUEUE_LENGTH lower") == (2 if queue == 96 else 0)
    assert not [warning for warning in found[64] if "QUEUE_LENGTH" in warning]
    assert len([warning for warning in found[96] if "QUEUE_LENGTH" in warning]) == 1


UNSHUFFLED = "KEY_ENCODER.BATCH_NORM_GROUPS"


def test_the_check_tells_of_a_queue_as_long_as_the_data_and_lets_it_pass(tmp_path, images, capsys):
    for queue, expected in ((64, []), (96, ["DICTIONARY.QUEUE_LENGTH"])):
        words = ["DICTIONARY.QUEUE_LENGTH", queue, "KEY_ENCODER.BATCH_NORM_GROUPS", 2]
        run = Run(tmp_path / "run", images, *words)
        assert main(run.command("--check")) == 0
        problems = json.loads(capsys.readouterr().out)["problems"]
        assert [problem["where"] for problem in problems] == expected


def test_keys_that_one_process_does_not_shuffle_are_doubted_in_log_record_and_check(
    tmp_path, images, one_thread, capsys
):
    for groups, expected in ((1, [UNSHUFFLED]), (2, [])):
        words = [UNSHUFFLED, groups, "SOLVER.EPOCHS", 1]
        run = Run(tmp_path / str(groups), images, *words)
        assert main(run.command("--check")) == 0
        problems = json.loads(capsys.readouterr().out)["problems"]
        assert [problem["where"] for problem in problems] == expected
        assert main(run.command()) == 0
        assert capsys.readouterr().err.count(f"Set {UNSHUFFLED}") == 2 * len(expected)
        warnings = read_record(run.folder / "record.json")["details"]["warnings"]
        assert len([warning for warning in warnings if UNSHUFFLED in warning]) == len(expected)


def test_only_keys_that_batch_norm_gives_away_are_doubted(tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    transformer = ["BACKBONE.NAME", "test_vit", "BACKBONE.KWARGS.drop_path_rate", "0"]
    shared = ["KEY_ENCODER.TYPE", "shared", "DICTIONARY.TYPE", "minibatch"]
    for words, processes, doubted in (
        ([], 1, True),
        ([], 2, False),
        (["KEY_ENCODER.BATCH_NORM", "eval"], 1, False),
        ([UNSHUFFLED, "2"], 1, False),
        (shared, 1, False),
        ([*transformer, "INPUT.SIZE", "160"], 1, False),
        ([*transformer, "INPUT.SIZE", "160", "PROJECTOR.TYPE", "mlp_bn"], 1, True),
    ):
        cfg = load_config(file, words)
        found = [key for key, _ in build_method(cfg).setup_warnings(None, processes)]
        assert found == [UNSHUFFLED] * doubted, words


NETWORK = ["BACKBONE.NAME", "test_resnet", "INPUT.SIZE", "32"]


def warnings_of(words, **curves):
    method = build_method(load_config(None, [*NETWORK, *words]))
    return list(method.final_warnings(curves))


def test_a_failed_training_is_doubted():
    queue = ["DICTIONARY.QUEUE_LENGTH", "256", "SOLVER.BATCH_SIZE", "64"]
    assert warnings_of(queue, batch_top1=np.linspace(0.1, 0.9, 20).tolist()) == []
    for length in (20, 22, 203):  # thinned curves have any length
        (fallen,) = warnings_of(queue, batch_top1=np.linspace(0.9, 0.1, length).tolist())
        assert "fell" in fallen
    for curve in ([0.02] * 20, [0.02]):
        (warning,) = warnings_of(queue, batch_top1=curve)
        assert "chance (1.6%)" in warning
    few = ["DICTIONARY.QUEUE_LENGTH", "8", "SOLVER.BATCH_SIZE", "8"]
    assert warnings_of(few, batch_top1=[0.3] * 20) == []  # 8 images say little
    within = ["DICTIONARY.TYPE", "minibatch", "SOLVER.BATCH_SIZE", "64", "METHOD.NUM_SHOTS", "1"]
    assert "fell" in warnings_of(within, instance_top1=np.linspace(0.9, 0.1, 20).tolist())[0]


def test_a_queue_that_is_easy_at_first_is_no_reason_to_doubt():
    """Of a KSCL pretraining that learned: nearest neighbors of objects 57 %, untrained 39 %."""
    queue = np.repeat([0.186, 0.168, 0.178, 0.154, 0.123, 0.116, 0.116, 0.146], 3).tolist()
    batch = np.repeat([0.113, 0.141, 0.18, 0.223, 0.235, 0.246, 0.268, 0.283], 3).tolist()
    words = ["DICTIONARY.QUEUE_LENGTH", "256", "SOLVER.BATCH_SIZE", "64"]
    assert warnings_of(words, instance_top1=queue, batch_top1=batch) == []
