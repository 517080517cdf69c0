"""The SVM probes: against scikit-learn itself, on drawn VOC sets, and with bad input."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import average_precision_score
from sklearn.model_selection import cross_val_score
from sklearn.svm import LinearSVC

from kscl.benchmark.leaderboard.rows import build_board
from kscl.benchmark.leaderboard.tables import markdown
from kscl.records.record import find_records, read_record
from linear_eval.commands.linear_eval import main
from linear_eval.probe import load_linear_eval_config, schema
from linear_eval.probes.svm import ROUTES, Machines
from linear_eval.score import (
    average_precision,
    eleven_point_precision,
    interpolated_precision,
)
from tests.helpers.data.digits import overrides
from tests.helpers.data.sets import write_voc

pytestmark = pytest.mark.portable

NAMES = ("cat", "dog", "cow")
BOX = (2, 2, 40, 40)


def rows_of_two_kinds(count: int = 90, dim: int = 12) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = np.where(rng.random(count) < 0.3, 1, -1)
    table = rng.normal(size=(count, dim)) + 0.4 * labels[:, None]
    return table / np.linalg.norm(table, axis=1, keepdims=True), labels


def reference_machine(cost: float, tol: float = 1e-4) -> LinearSVC:
    return LinearSVC(
        C=cost, class_weight={1: 2, -1: 1}, dual=True, tol=tol, max_iter=2000, random_state=0
    )


@pytest.fixture(scope="module")
def animals(tmp_path_factory):
    """Eighteen training and twelve test images of one or two animals each."""
    things = {}
    for number in range(30):
        found = [(NAMES[number % 3], BOX, 0)]
        if number % 4 == 0:
            found.append((NAMES[(number + 1) % 3], BOX, 0))
        things[f"{number:03d}"] = found
    things["001"].append(("cat", BOX, 1))  # difficult: not an image with a cat
    things["019"].append(("cat", BOX, 1))
    ids = list(things)
    splits = {"trainval": ids[:18], "test": ids[18:], "cats": ["021", "024"]}
    root = tmp_path_factory.mktemp("animals") / "VOC2007"
    return write_voc(root, splits, things)


def words(animals, output, probe: str, *more: object) -> list[str]:
    sets = ("DATA.TRAIN", f"voc:{animals}:trainval", "DATA.VAL", f"voc:{animals}:test")
    cache = ("DATA.CACHE_DIR", animals.parent / "cache")
    return overrides(animals, output, "PROBE", probe, *sets, *cache, *more)


def test_average_precisions_agree_with_scikit_learn_and_with_loops():
    rng = np.random.default_rng(1)
    for decimals in (8, 1):  # one digit gives many equal scores
        scores = rng.normal(size=60).round(decimals)
        right = rng.random(60) < 0.3
        assert average_precision(right, scores) == pytest.approx(
            average_precision_score(right, scores), abs=1e-12
        )
        at_least = [scores >= value for value in np.unique(scores)]
        recall = np.array([(right & kept).sum() / right.sum() for kept in at_least])
        precision = np.array([(right & kept).sum() / kept.sum() for kept in at_least])
        eleven = [precision[recall >= step / 10 - 1e-9].max() for step in range(11)]
        assert eleven_point_precision(right, scores) == pytest.approx(np.mean(eleven))
        steps = np.unique(recall[recall > 0])
        best = [precision[recall >= step].max() for step in steps]
        area = np.diff(steps, prepend=0) @ best
        assert interpolated_precision(right, scores) == pytest.approx(area)


def test_the_reference_route_is_scikit_learns_linear_svc():
    table, labels = rows_of_two_kinds()
    svm = schema().defaults().SVM
    rows = np.arange(10, 80)
    found = ROUTES["liblinear"](table, svm)(rows, labels[rows], [0.1, 5.0])
    for cost, weights in zip([0.1, 5.0], found, strict=True):
        machine = reference_machine(cost).fit(table[rows], labels[rows])
        assert np.abs(machine.coef_[0] - weights[:-1]).max() < 1e-6
        assert abs(machine.intercept_[0] - weights[-1]) < 1e-6


def test_liblinear_gives_the_same_bits_on_several_cores():
    table, labels = rows_of_two_kinds(600, 40)
    words = ["PROBE", "svm", "SVM.ITERATIONS", "3", "SVM.COSTS", "[0.1, 10.0, 1000.0]"]
    machines = Machines(load_linear_eval_config(None, words), table, (labels[:, None] > 0) * 1)
    problems = [(0, np.arange(start, len(table))) for start in range(8)]
    machines.threads = 1
    one_by_one = machines.train(problems, 0)
    machines.threads = 4
    for found, expected in zip(machines.train(problems, 0), one_by_one, strict=True):
        assert found.cost == expected.cost
        assert np.array_equal(found.weight, expected.weight)


@pytest.mark.parametrize("dim", [4, 200], ids=["more images", "more features"])
def test_the_exact_route_reaches_the_minimum_of_the_same_objective(dim):
    table, labels = rows_of_two_kinds(dim=dim)
    svm = schema().defaults().SVM
    rows, costs = np.arange(len(table)), [0.01, 1.0, 20.0, 1000.0]
    for cost, weights in zip(costs, ROUTES["exact"](table, svm)(rows, labels, costs), strict=True):
        slack = 1 - labels * (table @ weights[:-1] + weights[-1])
        push = np.where(labels > 0, 2, 1) * cost * np.maximum(0, slack) * labels  # (n,)
        inputs = np.column_stack([table, np.ones(len(table))])
        gradient = weights - 2 * push @ inputs
        assert np.abs(gradient).max() < 1e-6 * max(1, np.abs(push).sum())
    machine = reference_machine(1.0, tol=1e-10).fit(table, labels)
    exact = ROUTES["exact"](table, svm)(rows, labels, [1.0])[0]
    assert np.abs(exact[:-1] - machine.coef_[0]).max() < 1e-5


def test_the_svm_of_a_voc_set_equals_a_direct_script(animals, tmp_path, monkeypatch):
    tables = {}
    import linear_eval.probes.svm as module

    original = module.unit_rows

    def kept(features):
        tables[len(tables)] = original(features)
        return tables[len(tables) - 1]

    monkeypatch.setattr(module, "unit_rows", kept)
    costs = [0.1, 1.0, 10.0]
    assert main(words(animals, tmp_path / "run", "svm", "SVM.COSTS", str(costs))) == 0
    record = read_record(tmp_path / "run" / "record.json")
    assert (record.kind, record.protocol.id) == ("svm", "voc07-svm")
    train, test = tables[0], tables[1]
    shown = [{NAMES[n % 3], *({NAMES[(n + 1) % 3]} if n % 4 == 0 else ())} for n in range(30)]
    expected = {}
    for name in NAMES:
        # VISSL: an image whose cats are all difficult is a negative in train, ignored in test.
        labels = np.array([1 if name in shown[n] else -1 for n in range(18)])
        tested = np.array([n for n in range(18, 30) if not (name == "cat" and n == 19)])
        chosen = max(
            costs,
            key=lambda cost, y=labels: cross_val_score(
                reference_machine(cost), train, y, cv=3, scoring="average_precision"
            ).mean(),
        )
        assert record.details["costs"][name] == chosen
        machine = reference_machine(chosen).fit(train, labels)
        right = np.array([name in shown[n] for n in tested])
        scores = machine.decision_function(test[tested - 18])
        expected[name] = 100 * interpolated_precision(right, scores)
    assert record.details["per_class"] == pytest.approx(expected, abs=1e-6)
    assert record.metrics["mAP"] == pytest.approx(np.mean(list(expected.values())), abs=1e-6)


def test_low_shot_draws_have_a_record_each_and_the_board_shows_their_spread(animals, tmp_path):
    given = words(animals, tmp_path / "run", "low_shot", "LOW_SHOT.K", "[1, 2, 3]")
    given += ["LOW_SHOT.SAMPLES", "3", "SVM.COSTS", "[0.1, 1.0]", "SVM.SOLVER", "exact"]
    assert main(given) == 0
    found = find_records(tmp_path / "run").records
    assert sorted(path.name for path in found) == [
        *("record.json", "sample1.record.json", "sample2.record.json"),
    ]
    assert sorted(record.seed for record in found.values()) == [0, 1, 2]
    for record in found.values():
        assert list(record.metrics) == ["mAP", "k1", "k2", "k3"]
        assert record.details["costs"]["k1"] == [1.0] * 3  # LOW_SHOT.COST_OF_ONE
    (row,) = build_board([tmp_path / "run"]).rows
    (result,) = row.results.values()
    assert result.n_finetune == 3
    assert result.measures["k2"].std is not None
    assert "low-shot mAP" in markdown(build_board([tmp_path / "run"]), "title")


def test_a_stopped_low_shot_run_resumes_to_the_same_numbers(animals, tmp_path, monkeypatch):
    import linear_eval.probes.svm as module

    more = ("LOW_SHOT.K", "[1, 2]", "LOW_SHOT.SAMPLES", 2, "SVM.COSTS", "[0.1, 1.0]")
    more += ("CHECKPOINT.SECONDS", 0)
    assert main(words(animals, tmp_path / "whole", "low_shot", *more)) == 0
    calls = []
    original = module.Machines.train

    def fails_later(self, problems, k):
        calls.append(k)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, problems, k)

    monkeypatch.setattr(module.Machines, "train", fails_later)
    with pytest.raises(KeyboardInterrupt):
        main.__wrapped__(words(animals, tmp_path / "parts", "low_shot", *more))
    assert main(["--resume", *words(animals, tmp_path / "parts", "low_shot", *more)]) == 0
    assert len(calls) == 2 + 1 + 2  # what was done is not done again
    for name in ("record.json", "sample1.record.json"):
        whole, parts = (read_record(tmp_path / run / name) for run in ("whole", "parts"))
        assert whole.metrics == parts.metrics


@pytest.mark.parametrize(
    ("folds", "at_edge"),
    [
        ([[0.5, 0.6, 0.7], [0.5, 0.6, 0.7], [0.4, 0.5, 0.61]], list(NAMES)),
        ([[0.5, 0.6, 0.7], [0.5, 0.6, 0.5], [0.4, 0.5, 0.6]], []),  # better, but within noise
        ([[0.5, 0.8, 0.7], [0.5, 0.8, 0.7], [0.4, 0.8, 0.7]], []),
    ],
)
def test_a_cost_that_is_clearly_best_at_the_edge_is_named_in_the_record_and_on_the_board(
    animals, tmp_path, monkeypatch, folds, at_edge
):
    run = tmp_path / "run"
    precisions = [np.array(fold) for fold in folds]
    monkeypatch.setattr(Machines, "fold_precisions", lambda *_: precisions)
    assert main(words(animals, run, "svm", "SVM.COSTS", "[0.1, 1.0, 2.0]")) == 0
    record = read_record(run / "record.json")
    assert sorted(record.details["cost_at_edge"]) == sorted(at_edge)
    warnings = record.details.get("warnings", [])
    assert len(warnings) == bool(at_edge)
    for warning in warnings:
        assert "cost 2 is at the edge of SVM.COSTS [0.1, 1, 2]" in warning
        assert "at the edge of SVM.COSTS" in markdown(build_board([run]), "title")


@pytest.mark.parametrize(
    ("probe", "more", "named"),
    [
        ("low_shot", ("LOW_SHOT.K", "[1, 9]"), ["cat", "LOW_SHOT.K"]),
        ("low_shot", ("LOW_SHOT.K", "[1, 6]"), ["without", "LOW_SHOT.K"]),
        ("svm", ("SVM.FOLDS", 17), ["cat", "SVM.FOLDS"]),
        ("svm", ("DATA.TRAIN", "voc:nowhere:trainval"), ["nowhere"]),
        ("svm", ("DATA.VAL", ""), ["DATA.VAL"]),
        ("svm", ("SVM.COSTS", "[1.0, 0.1]"), ["SVM.COSTS"]),
        ("svm", ("DATA.FRACTION", 0.5), ["DATA.FRACTION"]),
        ("svm", ("DATA.VAL", "voc:{animals}:cats"), ["cow"]),  # no average precision
    ],
)
def test_bad_input_is_refused_by_name(animals, tmp_path, capsys, probe, more, named):
    more = (str(word).format(animals=animals) for word in more)
    assert main(words(animals, tmp_path / "run", probe, *more)) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in named)
