"""The leaderboard's statistics against scipy and against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from kscl.benchmark.leaderboard.statistics import (
    ALPHA,
    LEVEL,
    bootstrap_interval,
    compare_all,
    holm,
    prediction_interval,
    std,
    t_interval,
    welch_p,
)
from kscl.benchmark.leaderboard.statistics import standings as standings_of

scores = st.floats(0, 100).map(lambda value: round(value, 2))
replicates = st.lists(scores, min_size=2, max_size=6)
SETTLED = [70.1, 70.3, 70.2]


def standings(groups):
    return standings_of(compare_all(groups))


@given(replicates)
def test_the_interval_is_students(values):
    low, high = t_interval(values)
    error = scipy.stats.sem(values)
    if error == 0:
        assert low == high == np.mean(values)
    else:
        expected = scipy.stats.t.interval(0.95, len(values) - 1, np.mean(values), error)
        assert (low, high) == pytest.approx(expected)
    assert std(values) == pytest.approx(np.std(values, ddof=1))


def test_one_more_value_lies_in_the_prediction_interval_as_often_as_promised():
    rng = np.random.default_rng(0)
    drawn = rng.normal(70, 2, (4000, 5))
    inside = 0
    for *values, another in drawn.tolist():
        low, high = prediction_interval(values)
        inside += low <= another <= high
    assert inside / len(drawn) == pytest.approx(0.95, abs=0.015)


def test_one_value_has_no_spread_and_no_interval():
    assert std([70.0]) is None
    assert t_interval([70.0]) is None
    assert prediction_interval([70.0]) is None


@pytest.mark.filterwarnings("ignore:Precision loss")
@given(replicates, st.lists(replicates, min_size=1, max_size=4))
def test_p_is_welchs(one, others):
    for group, p in zip(others, welch_p([one, *others])[0, 1:], strict=True):
        if max(np.ptp(one), np.ptp(group)) > 0:  # scipy has no answer where nothing varies
            assert p == pytest.approx(scipy.stats.ttest_ind(one, group, equal_var=False).pvalue)


def test_without_any_spread_equal_is_equal_and_unequal_is_different():
    found = welch_p([[0.1 + 0.2] * 3, [0.3] * 3, [0.4] * 2])
    assert found[0].tolist() == [1.0, 1.0, 0.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_the_step_down_procedure_rejects(p):
    corrected = holm(np.array(p))
    rejected = set()
    for step, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        if p[i] * (len(p) - step) >= ALPHA:
            break
        rejected.add(i)
    assert {i for i, value in enumerate(corrected) if value < ALPHA} == rejected
    assert all(corrected >= p)
    assert all(corrected <= 1)


@pytest.mark.parametrize(
    ("percent", "n"), [(67.9, 50_000), (41.5, 200), (0, 50), (100, 50), (3, 7)]
)
def test_the_bootstrap_interval_is_the_percentiles_of_a_binomial(percent, n):
    expected = 100 * scipy.stats.binom.ppf([0.025, 0.975], n, percent / 100) / n
    assert bootstrap_interval(percent, n) == pytest.approx(tuple(expected))


def test_the_bootstrap_interval_is_what_resampling_gives():
    right = np.arange(400) < 260
    draws = np.random.default_rng(0).choice(right, (20_000, 400)).mean(1) * 100
    assert bootstrap_interval(65.0, 400) == pytest.approx(
        tuple(np.percentile(draws, [2.5, 97.5])), abs=0.3
    )


def test_a_row_within_noise_shares_the_first_rank_and_a_worse_one_does_not():
    best, near, far, farther = standings(
        [SETTLED, [70.0, 70.2, 70.1], [60, 60.2, 60.1], [50, 50.3]]
    )
    assert (best.verdict, best.rank, best.p) == ("best", 1, None)
    assert (near.verdict, near.rank) == ("not distinguishable", 1)
    assert near.p > ALPHA
    assert (far.verdict, far.rank) == ("below the best", 3)
    assert far.p < ALPHA
    assert (farther.verdict, farther.rank) == ("below the best", 4)


def test_lower_ranks_are_shared_by_rows_that_the_test_cannot_tell_apart():
    found = standings([SETTLED, [60.0, 60.2, 60.1], [60.1, 60.0, 60.3]])
    assert [standing.rank for standing in found] == [1, 2, 2]


def test_a_row_with_one_seed_is_never_called_different_however_far_it_lies():
    far_below, far_above, *tested = standings([[10.0], [99.0], SETTLED, [70.2, 70.1]])
    assert (far_below.verdict, far_below.rank, far_below.p) == ("not tested", None, None)
    assert far_above.verdict == "not tested"
    assert [standing.rank for standing in tested] == [1, 1]


def test_one_row_with_several_seeds_has_nothing_to_be_better_than():
    assert {s.verdict for s in standings([SETTLED, [60.0], [71.0]])} == {"not tested"}


def test_holm_protects_a_row_that_the_plain_test_would_call_different():
    rival = [69.6, 69.9, 69.5]
    assert standings([SETTLED, rival])[1].verdict == "below the best"
    crowd = [[69.9 + 0.1 * i, 70.2, 70.4] for i in range(4)]
    assert standings([SETTLED, rival, *crowd])[1].verdict == "not distinguishable"


@given(st.lists(st.lists(scores, min_size=1, max_size=4), min_size=1, max_size=6))
def test_standings_are_consistent_and_do_not_depend_on_the_order_of_rows(groups):
    found = standings(groups)
    means = [float(np.mean(group)) for group in groups]
    for group, standing in zip(groups, found, strict=True):
        assert (standing.rank is None) == (standing.verdict == "not tested")
        assert (standing.rank == 1) == (standing.verdict in ("best", "not distinguishable"))
        if len(group) == 1:
            assert standing.verdict == "not tested"
    tested = [mean for mean, group in zip(means, groups, strict=True) if len(group) > 1]
    for mean, standing in zip(means, found, strict=True):
        assert standing.verdict != "best" or mean == max(tested)
    if len(set(means)) == len(means):  # which of two equals leads is a matter of order
        assert standings(groups[::-1]) == found[::-1]


@given(st.lists(replicates, min_size=2, max_size=6))
def test_a_pair_has_one_answer_whichever_row_is_the_reference(groups):
    pairs = compare_all(groups)
    for i in range(len(groups)):
        corrected = holm(np.delete(pairs.plain[i], i))
        assert (np.delete(pairs.p[i], i) >= corrected).all()
        for j in set(range(len(groups))) - {i}:
            assert pairs.p[i, j] == pairs.p[j, i]
            test, low, high = pairs.test(i, j), *pairs.test(i, j).interval
            assert test.level >= LEVEL - 1e-9
            assert -1e-9 <= low + pairs.test(j, i).interval[1] <= 1e-9
            if abs(test.p - ALPHA) > 1e-6:  # the interval is the test's
                assert test.shows == (not low <= 0 <= high)


def test_two_rows_need_no_correction():
    pairs = compare_all([SETTLED, [69.0, 69.9, 69.5]])
    assert pairs.p[0, 1] == pairs.plain[0, 1]
    assert pairs.test(0, 1).level == pytest.approx(LEVEL)


def test_what_is_not_ranked_still_counts_as_a_comparison():
    rows = [SETTLED, [69.6, 69.9, 69.5], *([69.9 + 0.1 * i, 70.2, 70.4] for i in range(4))]
    found = standings_of(compare_all(rows), ranked=[0, 1])
    assert [it.verdict for it in found] == ["best", "not distinguishable", *["not tested"] * 4]
