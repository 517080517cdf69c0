"""The suites in configs/: each can be planned, and every override in it is valid."""

from __future__ import annotations

import pytest
import yaml

from detection.commands import train_net
from kscl.benchmark.suite.spec import EVALUATION_KINDS, read_suite
from kscl.benchmark.suite.stages import plan
from kscl.commands import make_shapes, pretrain
from kscl.config import value_at
from linear_eval.commands import linear_eval
from tests.helpers.commands import ROOT
from tests.kscl.benchmark.suite.test_plan import settings

SHIPPED = sorted((ROOT / "configs" / "suites").rglob("*.yaml"))


MAINS = {
    "pretrain": pretrain.main,
    **dict.fromkeys(set(EVALUATION_KINDS) - {"detection"}, linear_eval.main),
    "detection": train_net.main,
}


@pytest.mark.parametrize("path", SHIPPED, ids=str)
def test_every_shipped_suite_can_be_planned(path):
    stages = plan(read_suite(path))
    assert stages[-1].kind == "board"


@pytest.mark.parametrize("path", SHIPPED, ids=str)
def test_every_override_of_every_shipped_suite_is_valid(path, capsys):
    suite = read_suite(path)
    protocols = {each.kind: each.config for each in suite.evaluations}
    checked, stages = set(), plan(suite)
    for stage in stages:
        words = list(stage.arguments)
        if "/seed" in stage.name and "/seed0/" not in stage.name:
            continue  # the same but for the seed
        if stage.kind == "shapes":
            make_shapes._parser().parse_args(words)  # exits at an option that there is not
        elif stage.kind in MAINS:
            if stage.kind == "detection":  # its own config is written by the stage before
                words[words.index("--config-file") + 1] = protocols["detection"]
            assert MAINS[stage.kind](["--print-config", *words]) == 0, capsys.readouterr().err
            resolved = yaml.safe_load(capsys.readouterr().out)
            for key, text in settings(stage).items():
                if stage.kind != "detection":
                    assert str(value_at(resolved, key)) in (text, str(yaml.safe_load(text))), key
            checked.add(stage.kind)
    assert checked == {"pretrain", *protocols} & {stage.kind for stage in stages}
    assert checked >= set(protocols)


def test_the_other_probes_are_evaluations_of_a_suite():
    stages = plan(read_suite("suites/linear_suite.yaml"))
    programs = {stage.kind: stage.program for stage in stages}
    probes = dict.fromkeys(("linear_suite", "svm", "low_shot"), "kscl-linear-eval")
    assert programs == {**probes, "board": "kscl-leaderboard"}
