"""The records of one entry under one protocol → its measures: mean, spread and interval."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from kscl.benchmark.leaderboard.board import (
    OVER_SEEDS,
    OVER_TRIALS,
    TEST_SAMPLING,
    Measure,
    ProtocolKey,
    Result,
    described,
)
from kscl.benchmark.leaderboard.details import image_count, interval
from kscl.benchmark.leaderboard.reading import RecordFile
from kscl.benchmark.leaderboard.statistics import bootstrap_interval, t_interval
from kscl.records.spread import std


def measures_of(result: Result, protocol: ProtocolKey) -> Iterable[tuple[str, Measure]]:
    """Yield every metric of a result: means over seeds, their spread and interval."""
    names = {name for file in result.records for name in file.record.metrics}
    about = described(result.records)
    for metric in [*about, *sorted(names.difference(about))]:
        by_replicate: dict[str, list[float]] = {}
        for trial in result.trials:
            value = trial.mean(metric)
            if value is not None:
                by_replicate.setdefault(trial.replicate, []).append(value)
        if not by_replicate:
            continue
        values = tuple(fmean(trials) for trials in by_replicate.values())
        measure = Measure(values, tuple(by_replicate), fmean(values))
        trials_of_one = next(iter(by_replicate.values()))
        if len(values) > 1:
            measure = replace(
                measure,
                std=std(values),
                std_is=OVER_SEEDS,
                interval=_in_percent(t_interval(values), values),
                interval_is=OVER_SEEDS,
            )
        elif len(trials_of_one) > 1:
            measure = replace(measure, std=std(trials_of_one), std_is=OVER_TRIALS)
        else:
            per_image = metric in about and about[metric].per_image
            sampled = _sampling_interval(
                result.records, metric, measure.mean, metric == protocol.headline, per_image
            )
            if sampled:
                measure = replace(measure, interval=sampled, interval_is=TEST_SAMPLING)
        yield metric, measure


def _in_percent(
    interval: tuple[float, float] | None, values: Sequence[float]
) -> tuple[float, float] | None:
    """Cut an interval at 0 and 100 where no value is outside: AP and accuracies cannot be."""
    if interval is None or min(values) < 0 or max(values) > 100:
        return interval
    return max(0.0, interval[0]), min(100.0, interval[1])


def _sampling_interval(
    files: Sequence[RecordFile], metric: str, value: float, is_headline: bool, per_image: bool
) -> tuple[float, float] | None:
    """Return the interval over draws of test images: the evaluator's own, or from their number.

    The mean of a trial that was recorded several times has none of its own.
    """
    given = interval(files[0].record, metric, is_headline)
    if len(files) > 1:
        given = None
    n = image_count(files[0].record)
    if given is None and n is not None and per_image:
        return bootstrap_interval(value, n)
    return given
