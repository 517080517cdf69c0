"""What stages cost, and the mean rank over protocols: shown apart, missing where it is missing."""

from __future__ import annotations

import csv
import io
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from kscl.benchmark.leaderboard.columns import costs as spent
from kscl.benchmark.leaderboard.exports import as_csv, as_json
from kscl.benchmark.leaderboard.tables import markdown
from kscl.records.record import record_id
from kscl.runtime.machine import costs
from tests.helpers.leaderboard_records import (
    MOCO,
    backbone_of,
    board_of,
    described,
    detection,
    knn,
    kscl,
    linear,
    pretraining,
    sha,
)


def evaluated(settings: tuple[str, ...], top1: list[float], neighbors: list[float]) -> list:
    records = []
    for seed, (one, other) in enumerate(zip(top1, neighbors, strict=True)):
        made = pretraining(*settings, seed=seed)
        records += [made, linear(one, backbone_of(made)), knn(other, backbone_of(made))]
    return records


@pytest.fixture
def board(tmp_path: Path):
    records = [
        *evaluated(kscl(5, 0.4), [60.0, 64.0], [50.0, 40.0]),
        *evaluated(MOCO, [61.0, 62.0], [42.0, 47.0]),
        linear(99.0, sha("supervised"), details=described("supervised")),
    ]
    return board_of(tmp_path, records)


def test_a_row_that_warnings_call_unusable_has_no_mean_rank(tmp_path):
    doubted = evaluated(kscl(5, 0.4), [60.0, 64.0], [50.0, 40.0])
    for record in doubted:
        if record["kind"] == "pretrain":
            record["details"]["warnings"] = ["Nothing was learned."]
            record["id"] = record_id(record)
    others = evaluated(MOCO, [61.0, 62.0], [42.0, 47.0])
    others += evaluated(kscl(1, 0.4), [50.0, 51.0], [40.0, 41.0])
    ranks = board_of(tmp_path, [*doubted, *others]).mean_ranks
    assert [it.mean for it in ranks] == [1.0, 2.0]
    assert [it.row.entry.shots for it in ranks] == [1, 1]


def test_the_mean_rank_and_its_bootstrap_are_those_of_all_possible_draws(board):
    found = {it.row.entry.method: it for it in board.mean_ranks}
    # linear: supervised 1, kscl 62.0 is 2, moco 61.5 is 3; kNN: kscl 45 is 1, moco 44.5 is 2.
    assert found["kscl"].mean == pytest.approx(1.5)
    assert found["moco_v2"].mean == pytest.approx(2.5)
    kscl_values = np.array([[60.0, 50.0], [64.0, 40.0]])  # seeds x protocols
    moco_values = np.array([[61.0, 42.0], [62.0, 47.0]])
    draws = list(itertools.product(range(2), repeat=2))
    ranks = []
    for ours, theirs in itertools.product(draws, draws):
        mine = kscl_values[list(ours)].mean(axis=0)
        other = moco_values[list(theirs)].mean(axis=0)
        linear_rank = 2 + (0 if mine[0] > other[0] else 0.5 if mine[0] == other[0] else 1)
        knn_rank = 1 + (0 if mine[1] > other[1] else 0.5 if mine[1] == other[1] else 1)
        ranks.append((linear_rank + knn_rank) / 2)
    expected = np.percentile(np.repeat(ranks, 100), [2.5, 97.5])
    assert found["kscl"].interval == pytest.approx(tuple(expected))


def test_a_protocol_that_a_row_lacks_is_missing_and_not_counted(board):
    ranks = board.mean_ranks
    last = ranks[-1]  # those with more protocols come first
    assert last.row.entry.method == "supervised"
    assert (last.mean, last.protocols, last.interval) == (1.0, 1, None)
    assert "A summary, not a ranking" in markdown(board, "x")
    shown = json.loads(as_json(board, "x"))["summary"]
    assert [it["protocols"] for it in shown] == [2, 2, 1]


def test_one_protocol_has_no_summary(tmp_path):
    board = board_of(tmp_path, [linear(50, sha("a")), linear(60, sha("b"))])
    assert board.mean_ranks == []
    assert "Summary over protocols" not in markdown(board, "x")


def test_costs_are_columns_and_what_was_not_recorded_is_empty(tmp_path):
    made = pretraining(
        *kscl(5, 0.4), details={"costs": {"peak_memory_gib": 1.5, "peak_gpu_memory_gib": 20.0}}
    )
    records = [
        made,
        linear(50, backbone_of(made), seconds=120.0, details={"costs": {"peak_memory_gib": 0.5}}),
        knn(50, backbone_of(made), seconds=60.0, details={"costs": {"peak_memory_gib": 0.75}}),
        detection(30, backbone_of(made), details={"costs": {"peak_gpu_memory_gib": "odd"}}),
    ]
    board = board_of(tmp_path, records)
    assert spent(board.rows[0]) == {
        "pretrain_minutes": 10.0,
        "pretrain_memory": 1.5,
        "pretrain_gpu_memory": 20.0,
        "probe_minutes": 1.5,
        "probe_memory": 0.75,
        "detection_minutes": 1.0,
    }
    (line, *_) = csv.DictReader(io.StringIO(as_csv(board)))
    assert line["pretrain_gpu_memory"] == "20.0"
    assert "detection_gpu_memory" not in line
    text = markdown(board, "x")
    assert "pretrain GPU GiB" in text
    assert "detection GPU GiB" not in text


def test_a_run_knows_its_peak_memory():
    held = np.ones(2**27, np.uint8)  # an eighth of a GiB
    assert held.nbytes / 2**30 < costs()["peak_memory_gib"] < 100
