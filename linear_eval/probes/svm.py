"""SVMs on images with several classes each: VOC07's, trained on all images or on k per class.

Each class has a linear SVM of its own on features of length 1. Its cost is chosen by the mean
average precision over folds of the training images; val is used once, at the end. Images on which
all objects of a class are difficult take no part for that class, in training or in the score.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np
import torch
from fvcore.common.config import CfgNode
from threadpoolctl import threadpool_limits

from kscl.runtime.logs import LOGGER
from kscl.runtime.processes.workers import obey_parent_alone, start_method
from linear_eval.checkpoint import Saver
from linear_eval.data.annotated import ABSENT, IGNORED, PRESENT
from linear_eval.data.feature_sets import FeatureSets
from linear_eval.data.features import Features
from linear_eval.data.images import LabeledImages
from linear_eval.errors import LinearEvalError
from linear_eval.probes.outcome import Outcome
from linear_eval.probes.svm_fits import ROUTES, Fit
from linear_eval.rules import CENTER
from linear_eval.score import Score, average_precision, interpolated_precision
from linear_eval.splits import few_of_one_class

log = logging.getLogger(LOGGER)

Json = dict[str, Any]
EDGE_WARNING = "cost at the edge of its grid"


class Chosen(NamedTuple):
    """The SVM of one class."""

    cost: float
    at_edge: bool  # the best cost is an end of the grid and better than all others
    weight: np.ndarray  # (D + 1,), the bias last


def probe_svm(cfg: CfgNode, sets: FeatureSets, saver: Saver, saved: Json | None) -> list[Outcome]:
    """Train one SVM per class on all of train and score them on val."""
    train, val = sets.train, sets.val
    table, test = unit_rows(sets.train_features), unit_rows(sets.val_features)
    problems = [np.flatnonzero(train.labels[:, c] != IGNORED) for c in range(len(train.classes))]
    machines = Machines(cfg, table, train.labels)
    done: list[Json] = list(saved["svm"]) if saved else []
    for number in range(len(done), len(train.classes), machines.threads):
        part = range(number, min(number + machines.threads, len(train.classes)))
        for c, chosen in zip(
            part, machines.train([(c, problems[c]) for c in part], 0), strict=True
        ):
            done.append(_row(train.classes[c], chosen, _precision(chosen, test, val.labels[:, c])))
        saver.offer(len(done), lambda: {"svm": done})
    return [_outcome(done, val, cfg)]


def probe_low_shot(
    cfg: CfgNode, sets: FeatureSets, saver: Saver, saved: Json | None
) -> list[Outcome]:
    """Train on k images with a class and (classes − 1) k without it; one outcome per draw.

    With k = 1 there are no folds, and the cost is LOW_SHOT.COST_OF_ONE.
    """
    train, val = sets.train, sets.val
    shots, others = list(cfg.LOW_SHOT.K), len(train.classes) - 1
    table, test = unit_rows(sets.train_features), unit_rows(sets.val_features)
    machines = Machines(cfg, table, train.labels)
    done: dict[str, list[Json]] = dict(saved["low_shot"]) if saved else {}
    for sample in range(cfg.LOW_SHOT.SAMPLES):
        for k in shots:
            if f"{sample}/{k}" in done:
                continue
            problems = []
            for c in range(len(train.classes)):
                draw = (cfg.SEED, sample, c, k)
                drawn = [few_of_one_class(train.labels[:, c], PRESENT, k, *draw)]
                drawn += [few_of_one_class(train.labels[:, c], ABSENT, others * k, *draw)]
                problems.append((c, np.sort(np.concatenate(drawn))))
            found = machines.train(problems, k)
            done[f"{sample}/{k}"] = [
                _row(train.classes[c], chosen, _precision(chosen, test, val.labels[:, c]))
                for c, chosen in enumerate(found)
            ]
            mean = np.mean([row["AP"] for row in done[f"{sample}/{k}"]])
            log.info("Sample %d, k = %d: mAP %.2f.", sample, k, mean)
            saver.offer(len(done), lambda: {"low_shot": done})
    return [_low_shot_outcome(cfg, sample, done, val) for sample in range(cfg.LOW_SHOT.SAMPLES)]


class Machines:
    """Trains the SVMs of several classes at a time, each on one core."""

    def __init__(self, cfg: CfgNode, table: np.ndarray, labels: np.ndarray) -> None:
        self.cfg, self.table, self.labels = cfg, table, labels
        self.threads = torch.get_num_threads()
        with threadpool_limits(1):  # the same sums whatever the number of cores
            self.fit: Fit = ROUTES[cfg.SVM.SOLVER](table, cfg.SVM)

    def train(self, problems: Sequence[tuple[int, np.ndarray]], k: int) -> list[Chosen]:
        """Return the SVM of each (class, rows of the table); k is 0 for all images."""
        given = [(number, rows, k) for number, rows in problems]
        with threadpool_limits(1):
            if self.cfg.SVM.SOLVER != "liblinear":
                with ThreadPoolExecutor(self.threads) as pool:
                    return list(pool.map(self.train_one, *zip(*given, strict=True)))
            # All threads of a process share liblinear's random numbers, so its result would depend
            # on their timing. A forked process has its own, and shares the table.
            method = start_method(self.threads)
            if self.threads == 1 or method is None:
                return [self.train_one(*problem) for problem in given]
            context = multiprocessing.get_context(method)
            count = min(self.threads, len(given))
            try:
                with ProcessPoolExecutor(count, context, _begin, (self,)) as processes:
                    return list(processes.map(_train_one, given))
            except BrokenProcessPool as error:
                raise LinearEvalError(
                    "A process that trained SVMs was ended. If nobody ended it, memory has run "
                    "out: use fewer threads (OMP_NUM_THREADS). --resume continues."
                ) from error

    def train_one(self, number: int, rows: np.ndarray, k: int) -> Chosen:
        """Choose the cost of one class on folds of its rows, and train on all of them."""
        labels = np.where(self.labels[rows, number] == PRESENT, 1, -1)
        costs, at_edge = self.cfg.SVM.COSTS, False
        if k == 1:
            cost = self.cfg.LOW_SHOT.COST_OF_ONE
        elif len(costs) == 1:
            (cost,) = costs
        else:
            folds = min(self.cfg.SVM.FOLDS, k) if k else self.cfg.SVM.FOLDS
            precisions = np.mean(list(self.fold_precisions(rows, labels, folds)), 0)  # (P,)
            best = int(precisions.argmax())  # among equals the smallest cost
            cost = costs[best]
            ends = precisions[[0, -1]] > precisions[1:-1].max(initial=0)
            at_edge = bool(ends[0] and best == 0) or bool(ends[1] and best == len(costs) - 1)
        return Chosen(cost, at_edge, self.fit(rows, labels, [cost])[0])

    def fold_precisions(
        self, rows: np.ndarray, labels: np.ndarray, folds: int
    ) -> Iterator[np.ndarray]:
        """Yield the average precision on each fold of machines trained on the others (P,)."""
        from sklearn.model_selection import StratifiedKFold  # slow to import

        for kept, held in StratifiedKFold(folds).split(rows, labels):
            weights = self.fit(rows[kept], labels[kept], self.cfg.SVM.COSTS)  # (P, D + 1)
            scores = self.table[rows[held]] @ weights[:, :-1].T + weights[:, -1]  # (n, P)
            yield np.array([average_precision(labels[held] > 0, s) for s in scores.T])


_machines: list[Machines] = []  # in a forked process, those of its parent


def _begin(machines: Machines) -> None:
    obey_parent_alone()
    _machines.append(machines)


def _train_one(problem: tuple[int, np.ndarray, int]) -> Chosen:
    return _machines[-1].train_one(*problem)


def unit_rows(features: Features) -> np.ndarray:
    """Return the features of center crops (N, D), float64, each of length 1."""
    table = features.of_view(CENTER).numpy().astype(np.float64)
    return table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)


def check_annotated(cfg: CfgNode, train: LabeledImages, val: LabeledImages) -> None:
    """Raise an error that names every class that cannot be trained or scored."""
    check_val(val)
    if cfg.PROBE == "svm":
        check_counts(train, cfg.SVM.FOLDS, cfg.SVM.FOLDS, "SVM.FOLDS")
    else:
        most = max(cfg.LOW_SHOT.K)
        check_counts(train, most, (len(train.classes) - 1) * most, "LOW_SHOT.K")


def check_counts(train: LabeledImages, present: int, absent: int, key: str) -> None:
    """Raise an error that names every class with too few images with it, or without it."""
    problems = []
    for number, name in enumerate(train.classes):
        labels = train.labels[:, number]
        for value, wanted, words in ((PRESENT, present, "with"), (ABSENT, absent, "without")):
            count = int((labels == value).sum())
            if count < wanted:
                problems.append(f"{count} {words} {name}, where {wanted} are needed")
    if problems:
        raise LinearEvalError(
            f"{train.source.where} has too few images for {key}: {'; '.join(problems)}. Lower "
            f"{key}, or add images (those with difficult objects only do not count)."
        )


def check_val(val: LabeledImages) -> None:
    """Raise an error that names every class without an average precision."""
    missing = [
        name
        for number, name in enumerate(val.classes)
        if not {PRESENT, ABSENT} <= set(val.labels[:, number].tolist())
    ]
    if missing:
        raise LinearEvalError(
            f"{val.source.where} cannot score {', '.join(missing)}: it needs images with the class "
            "and images without it (those with difficult objects only do not count)."
        )


def _precision(chosen: Chosen, test: np.ndarray, labels: np.ndarray) -> float:
    counted = labels != IGNORED
    scores = test[counted] @ chosen.weight[:-1] + chosen.weight[-1]
    return 100 * interpolated_precision(labels[counted] == PRESENT, scores)


def _row(name: str, chosen: Chosen, precision: float) -> Json:
    return {"class": name, "AP": precision, "cost": chosen.cost, "at_edge": chosen.at_edge}


def _outcome(rows: Sequence[Json], val: LabeledImages, cfg: CfgNode) -> Outcome:
    per_class = {row["class"]: row["AP"] for row in rows}
    score = Score({"mAP": float(np.mean([row["AP"] for row in rows]))}, per_class, len(val))
    details = {
        "costs": {row["class"]: row["cost"] for row in rows},
        "cost_at_edge": [row["class"] for row in rows if row["at_edge"]],
        "chosen_on": f"{cfg.SVM.FOLDS} folds of train",
    }
    return Outcome(score, details | _warnings(rows))


def _low_shot_outcome(
    cfg: CfgNode, sample: int, done: dict[str, list[Json]], val: LabeledImages
) -> Outcome:
    by_shots = {k: done[f"{sample}/{k}"] for k in cfg.LOW_SHOT.K}
    metrics = {f"k{k}": float(np.mean([row["AP"] for row in by_shots[k]])) for k in by_shots}
    most = by_shots[max(by_shots)]
    per_class = {row["class"]: {"mAP": row["AP"]} for row in most}
    details = {
        "sample": sample,
        "per_class_is": f"average precision at k = {max(by_shots)}",
        "costs": {f"k{k}": [row["cost"] for row in rows] for k, rows in by_shots.items()},
        "cost_at_edge": {f"k{k}": sum(r["at_edge"] for r in rows) for k, rows in by_shots.items()},
        "chosen_on": f"up to {cfg.SVM.FOLDS} folds of the drawn images; k = 1 has a fixed cost",
    }
    return Outcome(
        Score({"mAP": float(np.mean(list(metrics.values()))), **metrics}, per_class, len(val)),
        details | _warnings([row for rows in by_shots.values() for row in rows]),
        part=f"sample{sample}" if sample else "",
        seed=cfg.SEED * cfg.LOW_SHOT.SAMPLES + sample,
    )


def _warnings(rows: Sequence[Json]) -> Json:
    if not any(row["at_edge"] for row in rows):
        return {}
    log.warning("A %s: a better one may lie beyond. Widen SVM.COSTS.", EDGE_WARNING)
    return {"warnings": [EDGE_WARNING]}
