"""The versions that `make test-versions` tries are those that pyproject.toml promises."""

from __future__ import annotations

import re

import pytest

from tests.helpers.commands import ROOT
from tests.supported_versions import MINORS, lower_bound


@pytest.mark.parametrize(
    ("requirement", "pinned"),
    [
        ("torch>=2.5", "torch==2.5.*,>=2.5"),
        ("omegaconf<2.4,>=2.3", "omegaconf==2.3.*,<2.4,>=2.3"),
        ("timm>=1.0.15", "timm==1.0.15"),
        ("fvcore>=0.1.5.post20221221", "fvcore==0.1.5.post20221221"),
        ('pytest>=8; extra == "dev"', "pytest==8.*,>=8"),
        ("tabulate", "tabulate"),
    ],
)
def test_the_oldest_set_is_at_the_lower_bounds(requirement, pinned):
    assert lower_bound(requirement) == pinned


def test_the_oldest_python_tried_is_the_oldest_promised():
    promised = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert promised is not None
    assert int(promised.group(1)) == MINORS[0]
