"""A suite with fractions of the labels: what it plans, and a small one run to its board."""

from __future__ import annotations

import importlib
import json

import pytest
import yaml

from kscl.benchmark.suite.spec import read_suite
from kscl.benchmark.suite.stages import plan
from kscl.errors import KsclError
from kscl.records.record import find_records
from tests.helpers.chain import smoke_suite

SECTIONS = {"knn": "DATA", "detection": "KSCL"}


def test_every_contender_gets_the_same_draws_and_every_seed_its_own(tmp_path):
    suite = smoke_suite(tmp_path, fractions=[0.25, 0.5, 1], draws=2, seeds=[0, 3])
    chosen: dict[tuple[str, str, str], list[tuple[float, int]]] = {}
    for stage in plan(read_suite(suite)):
        if section := SECTIONS.get(stage.kind):
            contender, seed, _ = stage.name.split("/")
            part = [stage.overrides.get(f"{section}.{key}") for key in ("FRACTION", "DRAW")]
            chosen.setdefault((stage.kind, seed, contender), []).append(tuple(part))
    for kind in SECTIONS:
        for seed, draws in (("seed0", (0, 1)), ("seed3", (6, 7))):
            expected = [(fraction, draw) for fraction in (0.25, 0.5) for draw in draws]
            for contender in ("kscl", "random"):
                assert chosen[kind, seed, contender] == [*expected, (None, None)]


def test_an_evaluation_has_fractions_of_its_own_and_one_conversion(tmp_path):
    suite = yaml.safe_load(smoke_suite(tmp_path).read_text())
    suite["evaluations"]["detection"]["fractions"] = [0.5, 1]
    names = {it.name for it in plan(read_suite(smoke_suite(tmp_path, **suite)))}
    mine = {name.removeprefix("random/seed0/") for name in names if name.startswith("random/")}
    assert mine == {"knn", "convert", "detection", "detection-50percent"}


@pytest.mark.parametrize("fractions", [[0.5], [0, 1], [1, 1], [2, 1], 0.5, ["half", 1]])
def test_fractions_that_answer_nothing_are_refused(tmp_path, fractions):
    with pytest.raises(KsclError, match="fractions must be"):
        read_suite(smoke_suite(tmp_path, fractions=fractions))


@pytest.mark.full
def test_a_suite_with_fractions_ends_in_a_chart_and_a_sentence(chain, tmp_path, capsys):
    (tmp_path / "shapes").symlink_to(chain.shapes)
    suite = yaml.safe_load(smoke_suite(tmp_path).read_text())
    suite["contenders"]["kscl"] = {"file": str(chain.backbone)}
    suite |= {"shapes": {}, "fractions": [0.5, 1], "draws": 2}
    suite["evaluations"]["detection"]["overrides"]["SOLVER.MAX_ITER"] = 2
    suite["evaluations"]["detection"]["overrides"]["SOLVER.STEPS"] = [1]
    del suite["basis_image"]
    for stage in plan(read_suite(smoke_suite(tmp_path, **suite))):
        assert importlib.import_module(stage.tool).main(stage.arguments) == 0, stage.name
    said = capsys.readouterr().out
    assert "full-data kNN" in said
    board = tmp_path / "output" / "leaderboard"
    assert (board / "labels_saved.png").stat().st_size > 10_000
    assert "rankme" in (board / "leaderboard.csv").read_text().splitlines()[0]
    saved = json.loads((board / "leaderboard.json").read_text())["labels_saved"]
    assert [it["metric"] for it in saved] == ["top1"]  # detectors are too low to compare
    found = find_records(tmp_path / "output").records.values()
    for kind, images in (("knn", 24), ("detection", 8)):
        details = [it.details for it in found if it.kind == kind]
        drawn = sorted((it["n_train"], it.get("draw", "all")) for it in details)
        half = images // 2
        assert drawn == sorted(2 * [(half, 0), (half, 1), (images, "all")])
