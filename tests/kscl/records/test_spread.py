"""Mean and spread over seeds, against the standard library."""

from __future__ import annotations

import statistics

import pytest

from kscl.records.spread import mean_and_std, number_and_spread, std

VALUES = [41.5, 42.0, 40.9]


def test_mean_and_std_are_those_of_a_sample():
    assert std(VALUES) == pytest.approx(statistics.stdev(VALUES))
    mean, spread = statistics.fmean(VALUES), statistics.stdev(VALUES)
    assert mean_and_std(VALUES) == f"{mean:.2f} ± {spread:.2f}"
    assert mean_and_std(VALUES, digits=1) == f"{mean:.1f} ± {spread:.1f}"


def test_a_single_value_has_no_spread():
    assert std([3.0]) is None
    assert mean_and_std([3.0]) == "3.00"
    assert number_and_spread(3.0, None) == "3.00"
    assert number_and_spread(3.0, 0.0) == "3.00 ± 0.00"
