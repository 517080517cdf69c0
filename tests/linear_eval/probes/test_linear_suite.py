"""The linear suite: many sets in one record, against scikit-learn, and with bad input."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from kscl.benchmark.leaderboard.rows import build_board
from kscl.benchmark.leaderboard.tables import overview_cells
from kscl.commands.make_shapes import main as make_shapes
from kscl.records.record import read_record
from linear_eval.commands.linear_eval import main
from linear_eval.linear import Rows, fit_binary
from linear_eval.probe import load_linear_eval_config
from linear_eval.probes import linear_suite
from linear_eval.probes.linear_suite import LinearSuite, score_of
from tests.helpers.data.digits import overrides, write_digits

pytestmark = pytest.mark.portable

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Digits, and two drawings of the shapes with their scenes."""
    root = tmp_path_factory.mktemp("sets")
    write_digits(root / "digits", train=12, val=4)
    for seed in (1, 2):
        words = ["--output-dir", root / f"shapes{seed}", "--seed", seed, "--num-classes", 3]
        words += ["--unlabeled", 4, "--train", 30, "--val", 15, "--workers", 1]
        words += ["--detection-train", 16, "--detection-test", 8, "--detection-size", 64]
        assert make_shapes([str(word) for word in words]) == 0
    return root


def words(sets, output, *more: object) -> list[str]:
    voc = f"voc:{sets}/shapes1/VOCdevkit/VOC2007"
    given = {
        "SETS.digits": f"{{train: {sets}/digits/train, test: {sets}/digits/val}}",
        "SETS.one": f"{{train: {sets}/shapes1/classes/train, val: {sets}/shapes2/classes/train, "
        f"test: {sets}/shapes1/classes/val, metric: mean_per_class}}",
        "SETS.scenes": f"{{train: '{voc}:trainval', test: '{voc}:test', metric: voc07_map}}",
    }
    small = ("LINEAR_SUITE.WEIGHT_DECAYS", "[0.001, 0.1, 10.0, 1000.0]")
    pairs = [word for pair in given.items() for word in pair]
    return overrides(sets, output, "PROBE", "linear_suite", *small, *pairs, *more)


def test_many_sets_give_one_record_with_their_mean_and_a_column_each(sets, tmp_path):
    assert main(words(sets, tmp_path / "run")) == 0
    record = read_record(tmp_path / "run" / "record.json")
    assert (record.kind, record.protocol.id) == ("linear_suite", "linear-suite")
    assert list(record.metrics) == ["mean", "digits", "one", "scenes"]
    scores = [record.metrics[name] for name in ("digits", "one", "scenes")]
    assert record.metrics["mean"] == pytest.approx(np.mean(scores))
    assert record.metrics["digits"] > 30  # of ten classes
    assert set(record.data) == {
        *("digits/train", "digits/test", "one/train", "one/val", "one/test"),
        *("scenes/train", "scenes/test"),
    }
    header, (row,) = overview_cells(build_board([tmp_path / "run"]))
    assert [f"{value:.2f}" for value in record.metrics.values()] == [
        row[header.index(name)] for name in ("mean of sets", "digits", "one", "scenes")
    ]


def test_a_set_equals_scikit_learns_logistic_regression():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 150)
    features = rng.normal(size=(150, 6)) + np.eye(6)[labels] * 1.5
    table = torch.from_numpy(features).float()
    ends = {"train": (0, 60), "val": (60, 100), "test": (100, 150)}
    targets = torch.from_numpy(labels)
    parts = {part: Rows.of(table[a:b], targets[a:b]) for part, (a, b) in ends.items()}
    decays = [0.01, 1.0, 100.0]
    words = ["LINEAR_SUITE.WEIGHT_DECAYS", str(decays), "SETS.it", "{train: a, test: b}"]
    probe = LinearSuite(load_linear_eval_config(None, words))
    probe.data = {"it/train": SimpleNamespace(classes=range(3))}
    probe.done, probe.tried = {}, {}
    assert list(probe.probe_set("it", parts)) == [1, 2, 3, 4]
    found = probe.done["it"]
    machines = [LogisticRegression(C=1 / wd, max_iter=1000) for wd in decays]
    for machine in machines:
        machine.fit(features[:60], labels[:60])
    scores = [machine.score(features[60:100], labels[60:100]) for machine in machines]
    assert found["held_out_scores"] == pytest.approx(
        {f"{wd:g}": 100 * value for wd, value in zip(decays, scores, strict=True)}
    )
    best = machines[int(np.argmax(scores))].fit(features[:100], labels[:100])
    assert found["score"] == pytest.approx(100 * best.score(features[100:], labels[100:]))


def test_two_class_regressions_equal_scikit_learns_and_skip_what_is_ignored():
    rng = np.random.default_rng(1)
    features = rng.normal(size=(80, 5))
    labels = (features[:, :2] + rng.normal(size=(80, 2)) > 0).astype(np.int64)
    labels[:10, 1] = -1
    rows = Rows.of(torch.from_numpy(features).float(), torch.from_numpy(labels))
    weight, bias = fit_binary(rows, 0.5, 1000, CPU)
    for number, used in enumerate((slice(None), slice(10, None))):
        machine = LogisticRegression(C=2, max_iter=1000, tol=1e-8)
        machine.fit(features[used], labels[used, number])
        assert weight[number].numpy() == pytest.approx(machine.coef_[0], abs=1e-3)
        assert float(bias[number]) == pytest.approx(machine.intercept_[0], abs=1e-3)


def test_mean_per_class_counts_a_small_class_as_much_as_a_large_one():
    rows = Rows.of(torch.eye(2)[[0, 0, 0, 0]], torch.tensor([0, 0, 0, 1]))
    solution = torch.eye(2), torch.zeros(2)
    assert score_of("top1", solution, rows) == 75
    assert score_of("mean_per_class", solution, rows) == 50


@pytest.mark.parametrize(
    ("scores", "best", "images", "at_edge"),
    [
        ([80.0, 70.0, 60.0], 0, 1000, True),
        ([71.0, 70.0, 60.0], 0, 1000, False),  # within the noise of the held-out images
        ([60.0, 70.0, 80.0], 2, 20, False),
        ([60.0, 80.0, 70.0], 1, 1000, False),
        ([60.0, 80.0], 1, 1000, False),  # a grid of two has nothing but edges
    ],
)
def test_an_edge_counts_only_beyond_the_noise_of_the_held_out_images(scores, best, images, at_edge):
    assert linear_suite._at_edge(scores, best, images) is at_edge


def test_a_weight_decay_at_the_edge_is_told_in_the_record_and_on_the_board(
    sets, tmp_path, monkeypatch
):
    monkeypatch.setattr(linear_suite, "_at_edge", lambda scores, best, images: best == 2)
    grid = ("LINEAR_SUITE.WEIGHT_DECAYS", "[0.1, 1000000.0, 2000000.0]")
    left_out = ("SETS.one", "{}", "SETS.scenes", "{}")
    assert main(words(sets, tmp_path / "run", *left_out, *grid)) == 0
    record = read_record(tmp_path / "run" / "record.json")
    assert list(record.metrics) == ["mean", "digits"]
    (warning,) = record.details["warnings"]
    assert "digits" in warning
    assert "LINEAR_SUITE.WEIGHT_DECAYS [0.1 … 2e+06]" in warning
    (section,) = build_board([tmp_path / "run"]).sections
    assert section.rows[0].results[section.protocol].warnings == [warning]


NO_SCENES = "{{train: {sets}/digits/train, test: {sets}/digits/val, metric: voc07_map}}"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("SETS.digits", NO_SCENES), ["SETS.digits"]),
        (("SETS.gone", "{train: nowhere/train, test: nowhere/test}"), ["gone", "nowhere/train"]),
        (("SETS.gone", "{train: nowhere}"), ["SETS.gone"]),
        (("SETS.gone", "{train: a, test: b, metric: top9}"), ["SETS.gone", "top9"]),
        (("SETS.mean", "{train: a, test: b}"), ["SETS.mean"]),
        (("LINEAR_SUITE.WEIGHT_DECAYS", "[0.0]"), ["LINEAR_SUITE.WEIGHT_DECAYS"]),
    ],
)
def test_a_suite_that_cannot_be_run_is_refused_by_name(sets, tmp_path, capsys, change, named):
    name, value = change
    value = value.format(sets=sets) if value == NO_SCENES else value
    assert main(words(sets, tmp_path / "run", name, value)) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in named)


def test_the_shipped_suite_has_twelve_sets_and_the_published_grid():
    cfg = load_linear_eval_config("linear_eval/linear_suite.yaml")
    assert len(cfg.SETS) == 12
    assert np.allclose(cfg.LINEAR_SUITE.WEIGHT_DECAYS, np.logspace(-6, 5, 45))
    metrics = [given.get("metric", "top1") for given in cfg.SETS.values()]
    assert (metrics.count("mean_per_class"), metrics.count("voc07_map")) == (4, 1)
