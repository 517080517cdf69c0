"""The reference in docs/ and the printed configs say what the defaults say."""

from __future__ import annotations

import re

import pytest
from fvcore.common.config import CfgNode

from detection.config import add_kscl_config
from kscl.benchmark.suite import spec
from kscl.config.comments import comments_of
from kscl.config.defaults import pretrain_defaults
from kscl.config.tree import leaves
from linear_eval.config import linear_eval_defaults
from tests.helpers.config_reference import DOCS, PAGES


def kscl_section() -> CfgNode:
    cfg = CfgNode()
    add_kscl_config(cfg)
    return cfg


DECLARED = {
    pretrain_defaults: [key for key, _ in leaves(pretrain_defaults())],
    linear_eval_defaults: [key for key, _ in leaves(linear_eval_defaults())],
    add_kscl_config: [key for key, _ in leaves(kscl_section())],
    spec.Suite: list(spec.KEYS_OF_SUITE),
    spec.Contender: list(spec.KEYS_OF_CONTENDER),
    spec.Evaluation: list(spec.KEYS_OF_EVALUATION),
}


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_current(name):
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


@pytest.mark.parametrize("declaration", DECLARED, ids=lambda declaration: declaration.__name__)
def test_every_setting_has_a_comment_that_is_a_sentence(declaration):
    comments = comments_of(declaration)
    for key in DECLARED[declaration]:
        assert re.fullmatch(r"[A-Z\"].*\.", comments.get(key, "")), key


def test_comments_above_and_behind_belong_to_their_own_setting():
    def declaration(cfg):
        # Not of the next line.

        cfg.A = 1  # Behind.
        # Above,
        # two lines.
        cfg.B.C = "# no comment"
        cfg.D = [
            1,  # Inside.
        ]
        cfg.E = 2

    assert comments_of(declaration) == {"A": "Behind.", "B.C": "Above, two lines.", "D": "Inside."}
