"""The leaderboard's rows: who is compared with whom, from which records, and what is told."""

from __future__ import annotations

import pytest

from kscl.benchmark.leaderboard.columns import figures
from kscl.benchmark.leaderboard.rows import TEST_SAMPLING
from kscl.records.record import Protocol, record_id
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


def older(record: dict) -> dict:
    """Return a pretraining's record as it was written before LABEL: the name is in METHOD.NAME."""
    values = {key: value for key, value in record["config"]["values"].items() if key != "LABEL"}
    values["METHOD"] = {"NAME": record["config"]["values"]["LABEL"], **values["METHOD"]}
    values["HEAD"] = values.pop("PROJECTOR")
    content = {**record, "config": {**record["config"], "values": values}}
    return {**content, "id": record_id(content)}


def test_a_run_without_a_label_is_named_by_its_record(tmp_path):
    assert (
        only(board_of(tmp_path, [pretraining("LABEL", "", name="mine")]).rows).entry.method
        == "mine"
    )
