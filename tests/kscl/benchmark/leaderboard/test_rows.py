"""The leaderboard's rows: who is compared with whom, from which records, and what is told."""

from __future__ import annotations

import csv
import io
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from kscl.benchmark.leaderboard import tables as cells
from kscl.benchmark.leaderboard.columns import costs as spent
from kscl.benchmark.leaderboard.columns import figures
from kscl.benchmark.leaderboard.differences import differences, named_rows
from kscl.benchmark.leaderboard.exports import as_csv, as_json
from kscl.benchmark.leaderboard.rows import TEST_SAMPLING
from kscl.benchmark.leaderboard.statistics import t_interval
from kscl.benchmark.leaderboard.tables import markdown
from kscl.benchmark.suite.spec import read_suite
from kscl.benchmark.suite.stages import plan
from kscl.errors import KsclError
from kscl.records.record import Protocol, record_id
from kscl.runtime.machine import costs
from tests.helpers.leaderboard_records import (
    DETECTION,
    IMAGENET,
    LINEAR,
    MOCO,
    VOC,
    backbone_of,
    board_of,
    described,
    detection,
    evaluation,
    knn,
    kscl,
    linear,
    only,
    pretraining,
    runs,
    sha,
)


@pytest.mark.smoke
def test_a_row_joins_a_pretraining_with_its_evaluations(tmp_path):
    made = pretraining(*kscl(5, 0.4))
    sha256 = backbone_of(made)
    records = [linear(68.8, sha256), knn(60.1, sha256), detection(57.1, sha256), made]
    row = only(board_of(tmp_path, records).rows)
    assert row.entry.shown == ("kscl", "resnet50", "", 200, 5, 0.4)
    assert figures(row)["mean_rank"] == pytest.approx(1.48)
    means = {p.kind: {m: v.mean for m, v in r.measures.items()} for p, r in row.results.items()}
    assert means["linear"]["top1"] == 68.8
    assert means["knn"] == {"top1": 60.1}
    assert means["detection"]["AP"] == 57.1
    assert means["detection"]["coco_AP"] == pytest.approx(58.5)


def test_seeds_of_one_config_are_one_row_and_other_settings_are_another(tmp_path):
    records = [*runs(kscl(5, 0.4), 68, seeds=3), *runs(kscl(5, 0.9), 67, seeds=2)]
    rows = board_of(tmp_path, records).rows
    assert sorted((row.entry.rho, len(row.pretrainings)) for row in rows) == [
        (0.4, 3),
        (0.9, 2),
    ]


def test_pretraining_on_other_data_is_another_contender(tmp_path):
    other = {"train": {"hash": "dddd", "files": 1, "bytes": 1}}
    records = [pretraining(seed=0), pretraining(seed=1, data=other)]
    rows = board_of(tmp_path, records).rows
    assert len(rows) == 2
    assert all(row.tag.startswith("data ") for row in rows)


def test_pretraining_on_more_processes_is_another_contender(tmp_path):
    records = [pretraining(details={"processes": count}) for count in (1, 8)]
    rows = board_of(tmp_path, records).rows
    assert sorted(row.tag for row in rows) == ["processes 1", "processes 8"]


def test_rho_is_left_out_where_there_is_nothing_to_cut(tmp_path):
    records = [pretraining(*MOCO), pretraining(*kscl(1, 0.4)), pretraining(*kscl(3, 0.4))]
    rows = board_of(tmp_path, records).rows
    assert {(r.entry.method, r.entry.shots): r.entry.rho for r in rows} == {
        ("moco_v2", 1): None,
        ("kscl", 1): None,
        ("kscl", 3): 0.4,
    }


def test_rows_that_look_the_same_are_told_apart_by_what_differs(tmp_path):
    records = [
        pretraining(),
        pretraining("METHOD.TEMPERATURE", "0.1"),
        pretraining(*kscl(3, 0.4)),
    ]
    tags = {(row.entry.shots, row.tag) for row in board_of(tmp_path, records).rows}
    assert tags == {(5, "temperature 0.2"), (5, "temperature 0.1"), (3, "")}


def test_a_backbone_without_a_pretraining_record_speaks_for_itself(tmp_path):
    records = [
        linear(20 + seed, sha("random", seed), details=described("random", seed))
        for seed in range(3)
    ]
    row = only(board_of(tmp_path, records).rows)
    assert (row.entry.method, row.entry.backbone) == ("random", "resnet50")
    (result,) = row.results.values()
    assert result.n_pretrain == 3
    assert result.measures["top1"].mean == 21


def test_files_of_which_nothing_is_known_are_rows_of_their_own(tmp_path):
    records = [linear(50, sha("a")), linear(51, sha("b")), knn(40, sha("a"))]
    rows = board_of(tmp_path, records).rows
    assert sorted(len(row.results) for row in rows) == [1, 2]


def test_two_files_of_one_method_are_no_replicates_unless_their_seeds_say_so(tmp_path):
    records = [linear(75 + i, sha(i), details=described("supervised")) for i in range(2)]
    assert len(board_of(tmp_path, records).rows) == 2


def test_evaluators_need_not_describe_a_backbone_in_the_same_words(tmp_path):
    probe = {"method": "byol", "arch": "resnet50", "epochs": 300, "feature_dim": 2048}
    converter = {"arch": "resnet50", "kwargs": {}, "epochs": 300.0, "loss": 0.3}
    records = [
        linear(74, sha("byol"), details={"backbone": probe}),
        detection(58, sha("byol"), details={"backbone": converter}),
    ]
    row = only(board_of(tmp_path, records).rows)
    assert row.entry.shown == ("byol", "resnet50", "", 300, None, None)
    assert len(row.results) == 2


def test_trials_from_scratch_are_replicates_by_their_own_seeds(tmp_path):
    scratch = {"backbone": {"method": "from scratch"}}
    records = [detection(30 + seed, "", seed=seed, inputs={}, details=scratch) for seed in range(3)]
    (result,) = only(board_of(tmp_path, records).rows).results.values()
    assert (result.n_pretrain, result.n_finetune) == (3, 3)


def test_trials_from_scratch_of_two_networks_are_two_rows(tmp_path):
    words = [{"method": "from scratch", "arch": arch} for arch in ("resnet50", "resnet101")]
    records = [detection(30, "", inputs={}, details={"backbone": each}) for each in words]
    assert len(board_of(tmp_path, records).rows) == 2


def test_backbones_that_are_described_alike_are_not_one_trial(tmp_path):
    """Settings such as a learning rate are in the record of a pretraining, which is not here."""
    words = described("kscl", 0, epochs=200, num_shots=5, rho=0.4)
    other_seed = described("kscl", 1, epochs=200, num_shots=5, rho=0.4)
    records = [linear(60.0, sha("a"), details=words), linear(70.0, sha("b"), details=words)]
    alike = board_of(tmp_path / "alike", records)
    values = sorted(
        measure.values
        for row in alike.rows
        for result in row.results.values()
        for name, measure in result.measures.items()
        if name == "top1"
    )
    assert values == [(60.0,), (70.0,)]
    replicates = [records[0], linear(70.0, sha("b"), details=other_seed)]
    (result,) = only(board_of(tmp_path / "seeds", replicates).rows).results.values()
    assert result.measures["top1"].values == (60.0, 70.0)


def test_a_trial_that_was_recorded_twice_has_an_interval_around_its_mean(tmp_path):
    own = {"confidence_interval": {"top1": [58.6, 61.4]}, "n": 5000}
    words = described("kscl", 0) | own
    records = [linear(60.0, sha("a"), details=words), linear(64.0, sha("a"), details=words)]
    (result,) = only(board_of(tmp_path, records).rows).results.values()
    measure = result.measures["top1"]
    assert measure.mean == 62.0
    low, high = measure.interval
    assert low < 62.0 < high


def test_fine_tuning_trials_are_averaged_and_are_no_replicates_of_pretraining(tmp_path):
    made = [pretraining(seed=seed) for seed in range(2)]
    scores = {0: (50.0, 52.0, 54.0), 1: (60.0,)}
    records = [
        detection(score, backbone_of(made[seed]), seed=trial)
        for seed, trials in scores.items()
        for trial, score in enumerate(trials)
    ]
    row = only(board_of(tmp_path, [*made, *records]).rows)
    (result,) = row.results.values()
    assert (result.n_pretrain, result.n_finetune) == (2, 4)
    assert result.measures["AP"].values == (52.0, 60.0)
    assert result.measures["AP"].mean == 56.0


def test_a_run_repeated_with_its_seed_is_the_same_trial(tmp_path):
    made = pretraining()
    records = [detection(50, backbone_of(made)), detection(52, backbone_of(made), seconds=61.0)]
    (result,) = only(board_of(tmp_path, [made, *records]).rows).results.values()
    assert (result.n_finetune, result.measures["AP"].mean) == (1, 51)
    assert result.measures["AP"].std is None


def test_trials_with_any_seed_count_each(tmp_path):
    made = pretraining()
    records = [detection(50 + i, backbone_of(made), seed=-1) for i in range(3)]
    (result,) = only(board_of(tmp_path, [made, *records]).rows).results.values()
    assert (result.n_pretrain, result.n_finetune) == (1, 3)
    assert result.measures["AP"].std == 1
    assert result.measures["AP"].interval is None  # not what another pretraining would give


def test_the_interval_of_a_single_trial_is_labeled_test_sampling_only(tmp_path):
    own = {"n": 1000, "confidence_interval": [60.0, 64.0]}
    records = [
        linear(62, sha("a"), details=described("a") | {"n": 1000}),
        linear(62, sha("b"), details=described("b") | own),
        linear(62, sha("c"), details=described("c")),
    ]
    rows = board_of(tmp_path, records).rows
    found = {row.entry.method: next(iter(row.results.values())).measures for row in rows}
    assert found["a"]["top1"].interval == pytest.approx((59.0, 65.0), abs=0.1)
    assert found["b"]["top1"].interval == (60.0, 64.0)
    assert found["b"]["top5"].interval == pytest.approx((79.5, 84.4), abs=0.2)
    assert {found[name]["top1"].interval_is for name in "ab"} == {TEST_SAMPLING}
    assert found["c"]["top1"].interval is None


def test_rows_are_ranked_within_one_protocol_id_and_hash_only(tmp_path):
    changed = Protocol(LINEAR.id, {**LINEAR.definition, "epochs": 200})
    records = []
    for method, level in (("a", 60.0), ("b", 50.0)):
        for seed in range(3):
            details = described(method, seed)
            records.append(linear(level + seed / 10, sha(method, seed), details=details))
    for seed in range(3):
        details = described("c", seed)
        records.append(linear(90 + seed / 10, sha("c", seed), protocol=changed, details=details))
    board = board_of(tmp_path, records)
    methods = [[row.entry.method for row in section.rows] for section in board.sections]
    assert sorted(methods) == [["a", "b"], ["c"]]
    section = next(s for s in board.sections if len(s.rows) == 2)
    best, below = (row.results[section.protocol].measures["top1"].standing for row in section.rows)
    assert (best.verdict, below.verdict, below.rank) == ("best", "below the best", 2)


def test_evaluations_on_other_data_are_not_ranked_together(tmp_path):
    other = {"train": {"hash": "bbbb"}, "test": {"hash": "eeee"}}
    records = [
        linear(60, sha("a"), details=described("a")),
        linear(50, sha("b"), details=described("b"), data=other),
    ]
    assert len(board_of(tmp_path, records).sections) == 2


def test_a_contender_without_evaluations_is_a_row_all_the_same(tmp_path):
    row = only(board_of(tmp_path, [pretraining(seed=0), pretraining(seed=1)]).rows)
    assert not row.results
    assert figures(row)["minutes_per_epoch"] == pytest.approx(0.8)


def test_published_rows_stand_under_their_protocol_and_in_no_test(tmp_path):
    records = [linear(67.9, sha("a"), protocol=IMAGENET), detection(57, sha("a"), protocol=VOC)]
    board = board_of(tmp_path, records)
    probe, voc = board.sections
    assert {row.metrics["top1"] for row in probe.reported} >= {67.5, 68.8, 71.4, 60.8}
    assert {row.metrics["AP"] for row in voc.reported} == {53.5, 55.9, 57.0, 57.4, 57.1, 57.5}
    assert all(row.source for section in board.sections for row in section.reported)
    assert only(board.rows).entry.method not in {row.method for row in voc.reported}
    without = board_of(tmp_path / "again", records, with_reported=False)
    assert not any(section.reported for section in without.sections)


def test_a_metric_that_some_records_lack_is_taken_from_the_others(tmp_path):
    made = [pretraining(seed=seed) for seed in range(2)]
    records = [detection(50, backbone_of(made[0])), detection(52, backbone_of(made[1]))]
    bare = evaluation("detection", DETECTION, {"AP": 54}, backbone_of(made[1]), seed=1)
    (result,) = only(board_of(tmp_path, [*made, *records, bare]).rows).results.values()
    assert result.measures["AP"].values == (50, 53)
    assert result.measures["AP75"].values == (56, 58)


def test_a_run_without_a_label_is_named_by_its_record(tmp_path):
    assert (
        only(board_of(tmp_path, [pretraining("LABEL", "", name="mine")]).rows).entry.method
        == "mine"
    )


NARROW = {"kwargs": {"channels": [8, 16, 32, 64]}, "parameters": 480_000}


def random_rows(folder, narrow: dict) -> list:
    """A narrow network and a standard one, both of random weights, and how detectors saw them."""
    records = [detection(20.0, sha("standard"), details=described("random", 0))]
    records.append(detection(10.0, sha("narrow"), details=described("random", 0, **narrow)))
    return board_of(folder, records).rows


def test_a_network_of_another_width_than_its_name_says_tells_it(tmp_path):
    shown = sorted(cells.identity(row)[1] for row in random_rows(tmp_path, NARROW))
    assert shown == ["resnet50", "resnet50 (8–64 channels, 0.5 M parameters)"]


def test_pretrainings_tell_their_width_too(tmp_path):
    words = ("BACKBONE.KWARGS.channels", "[16, 32, 64, 128]")
    (row,) = board_of(tmp_path, [pretraining(*words, details={"parameters": 2_100_000})]).rows
    assert cells.identity(row)[1] == "resnet50 (16–128 channels, 2.1 M parameters)"


def test_networks_that_only_a_detector_saw_are_told_apart_by_their_arguments(tmp_path):
    rows = random_rows(tmp_path, {"arch_kwargs": NARROW["kwargs"]})  # as older records say it
    assert [row.entry.width for row in rows] == ["", "8–64 channels"]


@pytest.mark.parametrize("baseline", ["random@8-64 channels", "random@8–64 channels"])
def test_a_baseline_names_one_of_two_random_rows(tmp_path, baseline):
    rows = random_rows(tmp_path / "one", NARROW)
    assert [row.entry.width for row in named_rows(rows, baseline)] == ["8–64 channels"]
    records = [
        detection(
            ap, sha(arch), details={"backbone": {"method": "random", "arch": arch, "seed": 0}}
        )
        for arch, ap in (("resnet18", 10.0), ("resnet50", 20.0))
    ]
    board = board_of(tmp_path / "two", records)
    with pytest.raises(KsclError, match="resnet18"):
        differences(board, "random")
    assert "+10.00" in differences(board, "random@resnet18")


def test_the_name_of_a_contender_without_pretraining_reaches_its_detector(tmp_path):
    path = tmp_path / "suite.yaml"
    path.write_text(
        "name: two kinds of random weights\noutput_dir: out\n"
        "contenders: {random: {arch: resnet50}, small: {arch: resnet18}}\n"
        "evaluations: {detection: {config: detection/shapes_tiny_c4.yaml}}\n"
    )
    labels = {
        stage.name: [w for k, w in itertools.pairwise(stage.arguments) if k == "KSCL.LABEL"]
        for stage in plan(read_suite(path))
        if stage.kind == "detection"
    }
    assert labels == {"random/seed0/detection": [], "small/seed0/detection": ["small"]}


def test_an_interval_of_ap_never_goes_below_zero(tmp_path):
    details = [described("random", seed) for seed in range(3)]
    aps = (0.5, 4.0, 1.0)
    assert t_interval(aps)[0] < -1
    records = [
        detection(ap, sha(seed), details=details[seed], seed=seed) for seed, ap in enumerate(aps)
    ]
    (row,) = board_of(tmp_path, records).rows
    (result,) = row.results.values()
    assert result.measures["AP"].interval == (0.0, t_interval(aps)[1])


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
    assert [it.mean_rank for it in ranks] == [1.0, 2.0]
    assert [it.row.entry.shots for it in ranks] == [1, 1]


def test_the_mean_rank_and_its_bootstrap_are_those_of_all_possible_draws(board):
    found = {it.row.entry.method: it for it in board.mean_ranks}
    # linear: supervised 1, kscl 62.0 is 2, moco 61.5 is 3; kNN: kscl 45 is 1, moco 44.5 is 2.
    assert found["kscl"].mean_rank == pytest.approx(1.5)
    assert found["moco_v2"].mean_rank == pytest.approx(2.5)
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
    assert (last.mean_rank, last.protocols, last.interval) == (1.0, 1, None)
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
