"""The reference in docs/ and the printed configs say what the declarations say."""

from __future__ import annotations

import re

import pytest

from detection.config import Kscl
from kscl.benchmark.suite import spec
from kscl.config import Schema
from kscl.keys import PRETRAIN
from linear_eval.probe import schema as probes
from tests.helpers.config_reference import DOCS, PAGES, _comments_of

SENTENCE = r"[A-Z\"].*\."


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_current(name):
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


@pytest.mark.parametrize("schema", [PRETRAIN, probes(), Schema.of(Kscl)])
def test_every_setting_is_explained_in_a_sentence(schema):
    for name, key in schema.keys.items():
        assert re.fullmatch(SENTENCE, key.doc), name


@pytest.mark.parametrize("schema", [PRETRAIN, probes(), Schema.of(Kscl)])
def test_every_default_is_allowed(schema):
    assert list(schema.check(schema.defaults())) == []


@pytest.mark.parametrize("declaration", [spec.Suite, spec.Contender, spec.Evaluation])
def test_every_key_of_a_suite_is_explained_in_a_sentence(declaration):
    keys = spec.types_of_keys(declaration)
    comments = _comments_of(declaration)
    for key in keys.keys() - {"name", "contenders", "evaluations"}:
        assert re.fullmatch(SENTENCE, comments.get(key, "")), key
