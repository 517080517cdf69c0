"""SVMs on images with several classes each, as on VOC07: on all images, or on k per class.

Each class has a linear SVM on features of length 1. Its cost is chosen by the mean average
precision over folds of the training images; val is used once, at the end. Images on which all
objects of a class are difficult do not count in the score of that class. As in VISSL, they are
negatives in training on all images, and are not drawn for training on k.

An SVM minimizes  ½ ‖w‖² + ½ b² + Σ cᵢ max(0, 1 − yᵢ (w·xᵢ + b))²,  cᵢ = cost · (positive weight, or
1): scikit-learn's LinearSVC, whose bias is the weight of a constant feature 1. `liblinear` is
LinearSVC itself, one fit per cost. `exact` works on the Gram matrix K: given the rows S inside the
margin, the minimum solves  (K_SS + diag(1 / 2c)) β = y_S,  w = Σ βᵢ xᵢ. Newton's method updates S
until it is consistent (Chapelle, 2007); the solution for one cost starts the next.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from fvcore.common.config import CfgNode
from scipy.linalg.lapack import dposv
from threadpoolctl import threadpool_limits
from torch import Tensor

from kscl.config import Section, key
from kscl.data.annotations import forms, parse_source, shared_class_names
from kscl.errors import KsclError
from kscl.records.record import Metric
from kscl.rng import Stream, random_words
from kscl.run.task import task
from kscl.runtime.distributed import on_first_rank
from kscl.runtime.logs import LOGGER
from kscl.runtime.processes import obey_parent_alone, start_method
from linear_eval.images import ABSENT, IGNORED, PRESENT, LabeledImages, open_annotated
from linear_eval.probe import Data, Json, Probe
from linear_eval.score import (
    Outcome,
    Score,
    average_precision,
    beside_end,
    beyond_noise,
    interpolated_precision,
)

log = logging.getLogger(LOGGER)

# Rows of the table (n,), labels ±1 (n,), rising costs (P,) → weights and bias (P, D + 1).
Fit = Callable[[np.ndarray, np.ndarray, Sequence[float]], np.ndarray]

MAX_GRAM_ROWS = 8192  # 512 MiB; for a larger table each fit computes the products of its own rows
MAX_STEPS = 200


class Chosen(NamedTuple):
    """The SVM of one class."""

    cost: float
    at_edge: bool  # the best cost is at an end of the grid and clearly beats its neighbor
    weight: np.ndarray  # (D + 1,), the bias last


class AnnotatedProbe(Probe):
    """SVMs on an annotated set; the state is the results so far."""

    takes_subset = False
    done: dict[str, list[Json]]  # results by the part of the work that is complete
    test: np.ndarray  # features of val, each of length 1

    def open_data(self) -> Data:
        data = self.cfg.DATA
        for role in ("TRAIN", "VAL"):
            if not data[role]:
                raise KsclError(f"DATA.{role} must be {forms()}, got ''.")
        classes = on_first_rank(lambda: shared_class_names([parse_source(data.TRAIN)]))
        opened = {
            role: open_annotated(where, classes, self.cfg)
            for role, where in (("train", data.TRAIN), ("val", data.VAL))
        }
        check_counts(opened["val"], 1, 1, "Add images to DATA.VAL")
        self.check_train(opened["train"])
        return opened

    def check_train(self, train: LabeledImages) -> None:
        """Raise an error if a class has too few images."""
        raise NotImplementedError

    def settings(self) -> Json:
        svm = self.cfg.SVM
        solver: Json = {"name": "exact"}
        if svm.SOLVER == "liblinear":
            solver = {"name": "liblinear, dual", "tol": svm.TOLERANCE, "iterations": svm.ITERATIONS}
        choice = {"folds_of_train": svm.FOLDS, "by": "average precision", "for": "each class"}
        return {
            "machine": "linear SVM per class, squared hinge, l2, bias as a feature of 1",
            "solver": solver,
            "feature_length": 1,
            "class_weight": {"1": svm.POSITIVE_WEIGHT, "-1": 1},
            "grid": {"cost": list(svm.COSTS)},
            "chosen_on": choice,
            "difficult": "negative in train, ignored in test",
            "scorer": "mean over classes of the area under interpolated precision",
            "reported": "chosen cost, trained again on all of train",
        }

    def prepare(self, saved: Mapping[str, Any]) -> None:
        super().prepare(saved)
        self.done = dict(saved.get("done", {}))

    def state_dict(self) -> Json:
        return {"done": self.done}

    def machines(self) -> Machines:
        """Return the trainer on the features of train; keep those of val for scoring."""
        table, self.test = unit_rows(self.centers("train")), unit_rows(self.centers("val"))
        return Machines(self.cfg, table, self.data["train"].labels)

    def rows_of(self, classes: Sequence[int], chosen: Sequence[Chosen]) -> list[Json]:
        """Score the SVMs of these classes on val."""
        val, found = self.data["val"], []
        for number, machine in zip(classes, chosen, strict=True):
            counted = val.labels[:, number] != IGNORED
            scores = self.test[counted] @ machine.weight[:-1] + machine.weight[-1]
            right = val.labels[counted, number] == PRESENT
            precision = 100 * interpolated_precision(right, scores)
            row = {"class": val.classes[number], "AP": precision}
            found.append(row | {"cost": machine.cost, "at_edge": machine.at_edge})
        return found

    def edge_warnings(self, rows: Sequence[Json]) -> Json:
        """Return a warning if a better cost may lie outside the grid."""
        chosen = {row["cost"] for row in rows if row["at_edge"]}
        if not chosen:
            return {}
        listed = ", ".join(f"{cost:g}" for cost in self.cfg.SVM.COSTS)
        best = " and ".join(f"{cost:g}" for cost in sorted(chosen))
        warning = f"cost {best} is at the edge of SVM.COSTS [{listed}]: extend it"
        log.warning("%s.", warning)
        return {"warnings": [warning]}


@task("svm", title="Classifier (SVMs)")
class Svm(AnnotatedProbe):
    """Train one SVM per class on an annotated set."""

    metrics = (Metric("mAP", "SVM mAP", headline=True),)

    class Keys(Section):
        class SVM(Section):
            """One linear SVM per class, on features of length 1."""

            COSTS = key(
                [0.01, 0.1, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 50.0, 100.0, 1000.0],
                "The grid of costs.",
                rising=True,
                above=0,
            )
            FOLDS = key(3, "Folds of the training images to choose the cost on.", at_least=2)
            POSITIVE_WEIGHT = key(2.0, "Weight of positives relative to negatives.", above=0)
            SOLVER = key(
                "liblinear",
                """LinearSVC of scikit-learn, or the exact minimum of its objective, which is faster
                for few images.""",
                choices=("liblinear", "exact"),
            )
            TOLERANCE = key(1e-4, "Tolerance at which liblinear stops.", above=0)
            ITERATIONS = key(2000, "Largest number of iterations of liblinear.", at_least=1)

    protocol_id = "voc07-svm"

    def check_train(self, train: LabeledImages) -> None:
        folds = self.cfg.SVM.FOLDS
        fix = "Lower SVM.FOLDS, or add images"
        check_counts(train, folds, folds, fix, (ABSENT, IGNORED))

    def fit(self) -> Iterator[int]:
        """Train as many classes at a time as there are cores."""
        machines, train = self.machines(), self.data["train"]
        every = np.arange(len(train))
        while len(self.done) < len(train.classes):
            first = len(self.done)
            part = range(first, min(first + machines.threads, len(train.classes)))
            chosen = machines.train([(number, every) for number in part], 0)
            self.done |= {row["class"]: [row] for row in self.rows_of(part, chosen)}
            yield len(self.done)

    def outcomes(self) -> list[Outcome]:
        rows = [row for (row,) in self.done.values()]
        details = {
            "costs": {row["class"]: row["cost"] for row in rows},
            "cost_at_edge": [row["class"] for row in rows if row["at_edge"]],
            "chosen_on": f"{self.cfg.SVM.FOLDS} folds of train",
        }
        per_class = {row["class"]: row["AP"] for row in rows}
        result = Score({"mAP": mean_precision(rows)}, per_class, len(self.data["val"]))
        return [Outcome(result, details | self.edge_warnings(rows))]


@task("low_shot", title="Classifier (SVMs on few images)")
class LowShot(AnnotatedProbe):
    """Train SVMs on k images with a class and (classes − 1) k without it, for each draw.

    With k = 1 there are no folds, and the cost is LOW_SHOT.COST_OF_ONE.
    """

    metrics = (Metric("mAP", "low-shot mAP", headline=True),)
    all_metrics_are_columns = True  # one per k

    class Keys(Section):
        class LOW_SHOT(Section):
            K = key(
                [1, 2, 4, 8, 16, 32, 64, 96],
                "Positive training images per class.",
                distinct=True,
                at_least=1,
            )
            SAMPLES = key(5, "Independent draws of these images; a record each.", at_least=1)
            COST_OF_ONE = key(1.0, "Cost for k = 1, which cannot be split into folds.", above=0)

    protocol_id = "voc07-low-shot-svm"

    def settings(self) -> Json:
        return super().settings() | {
            "k": list(self.cfg.LOW_SHOT.K),
            "negatives": "(classes - 1) k",
            "samples": self.cfg.LOW_SHOT.SAMPLES,
            "folds": "at most k",
            "cost_where_k_is_1": self.cfg.LOW_SHOT.COST_OF_ONE,
            "difficult": "ignored in train and test",
        }

    def check_train(self, train: LabeledImages) -> None:
        most = max(self.cfg.LOW_SHOT.K)
        fix = "Lower LOW_SHOT.K, or add images"
        check_counts(train, most, (len(train.classes) - 1) * most, fix)

    def fit(self) -> Iterator[int]:
        machines, classes = self.machines(), range(len(self.data["train"].classes))
        for sample, k in itertools.product(range(self.cfg.LOW_SHOT.SAMPLES), self.cfg.LOW_SHOT.K):
            if f"{sample}/{k}" not in self.done:
                draw = partial(drawn_images, self.data["train"].labels, self.cfg.SEED, sample, k)
                problems = [(number, draw(number)) for number in classes]
                rows = self.rows_of(classes, machines.train(problems, k))
                self.done[f"{sample}/{k}"] = rows
                log.info("Sample %d, k = %d: mAP %.2f.", sample, k, mean_precision(rows))
                yield len(self.done)

    def outcomes(self) -> Iterator[Outcome]:
        """Yield one result per draw: the mean over k, and that of each k."""
        low_shot, most = self.cfg.LOW_SHOT, max(self.cfg.LOW_SHOT.K)
        for sample in range(low_shot.SAMPLES):
            by_shots = {f"k{k}": self.done[f"{sample}/{k}"] for k in low_shot.K}
            metrics = {name: mean_precision(rows) for name, rows in by_shots.items()}
            mean = float(np.mean(list(metrics.values())))
            details = {
                "sample": sample,
                "per_class_is": f"average precision at k = {most}",
                "costs": {name: [row["cost"] for row in rows] for name, rows in by_shots.items()},
                "cost_at_edge": {
                    name: sum(row["at_edge"] for row in rows) for name, rows in by_shots.items()
                },
                "chosen_on": f"up to {self.cfg.SVM.FOLDS} folds of the drawn images; "
                "k = 1 has a fixed cost",
            }
            per_class = {row["class"]: {"mAP": row["AP"]} for row in by_shots[f"k{most}"]}
            yield Outcome(
                Score({"mAP": mean, **metrics}, per_class, len(self.data["val"])),
                details | self.edge_warnings([row for rows in by_shots.values() for row in rows]),
                part=f"sample{sample}" if sample else "",
                seed=self.cfg.SEED * low_shot.SAMPLES + sample,
            )


def drawn_images(labels: np.ndarray, seed: int, sample: int, k: int, number: int) -> np.ndarray:
    """Return k images with a class and (classes − 1) k without it; each draw is independent."""
    drawn = []
    for label, count in ((PRESENT, k), (ABSENT, (labels.shape[1] - 1) * k)):
        images = np.flatnonzero(labels[:, number] == label)
        item = (number << 32) + (k << 1) + (label == PRESENT)
        words = random_words(seed, sample, Stream.LOW_SHOT, item, len(images))
        drawn.append(images[np.argsort(words, kind="stable")[:count]])
    return np.sort(np.concatenate(drawn))


def mean_precision(rows: Sequence[Json]) -> float:
    return float(np.mean([row["AP"] for row in rows]))


class Machines:
    """Train the SVMs of several classes at a time, each on one core."""

    def __init__(self, cfg: CfgNode, table: np.ndarray, labels: np.ndarray) -> None:
        self.cfg, self.table, self.labels = cfg, table, labels
        self.threads = torch.get_num_threads()
        with threadpool_limits(1):  # the same sums on any number of cores
            self.fit: Fit = ROUTES[cfg.SVM.SOLVER](table, cfg.SVM)

    def train(self, problems: Sequence[tuple[int, np.ndarray]], k: int) -> list[Chosen]:
        """Return the SVM of each (class, rows of the table); k = 0 is all images."""
        given = [(number, rows, k) for number, rows in problems]
        with threadpool_limits(1):
            if self.cfg.SVM.SOLVER != "liblinear":
                with ThreadPoolExecutor(self.threads) as pool:
                    return list(pool.map(self.train_one, *zip(*given, strict=True)))
            # Threads share liblinear's random numbers, so results would depend on timing. A forked
            # process has its own, and shares the table.
            method = start_method(self.threads)
            if self.threads == 1 or method is None:
                return [self.train_one(*problem) for problem in given]
            context = multiprocessing.get_context(method)
            count = min(self.threads, len(given))
            try:
                with ProcessPoolExecutor(count, context, _begin, (self,)) as processes:
                    return list(processes.map(_train_one, given))
            except BrokenProcessPool as error:
                raise KsclError(
                    "A process that trained SVMs was killed, perhaps for lack of memory: use fewer "
                    "threads (OMP_NUM_THREADS). --resume continues."
                ) from error

    def train_one(self, number: int, rows: np.ndarray, k: int) -> Chosen:
        """Choose the cost of one class on folds of its rows, then train on all of them."""
        labels = np.where(self.labels[rows, number] == PRESENT, 1, -1)
        costs, at_edge = self.cfg.SVM.COSTS, False
        if k == 1:
            cost = self.cfg.LOW_SHOT.COST_OF_ONE
        elif len(costs) == 1:
            (cost,) = costs
        else:
            folds = min(self.cfg.SVM.FOLDS, k) if k else self.cfg.SVM.FOLDS
            precisions = np.stack(list(self.fold_precisions(rows, labels, folds)))  # (folds, P)
            best = int(precisions.mean(0).argmax())  # ties go to the smallest cost
            cost = costs[best]
            if (beside := beside_end(best, len(costs))) is not None:
                at_edge = beyond_noise(precisions[:, best] - precisions[:, beside])
        return Chosen(cost, at_edge, self.fit(rows, labels, [cost])[0])

    def fold_precisions(
        self, rows: np.ndarray, labels: np.ndarray, folds: int
    ) -> Iterator[np.ndarray]:
        """Yield, for each fold, the average precision (P,) of SVMs trained on the others."""
        from sklearn.model_selection import StratifiedKFold  # slow to import

        for kept, held in StratifiedKFold(folds).split(rows, labels):
            weights = self.fit(rows[kept], labels[kept], self.cfg.SVM.COSTS)  # (P, D + 1)
            scores = self.table[rows[held]] @ weights[:, :-1].T + weights[:, -1]  # (n, P)
            yield np.array([average_precision(labels[held] > 0, s) for s in scores.T])


_machines: list[Machines] = []  # the parent's, in a forked process


def _begin(machines: Machines) -> None:
    obey_parent_alone()
    _machines.append(machines)


def _train_one(problem: tuple[int, np.ndarray, int]) -> Chosen:
    return _machines[-1].train_one(*problem)


def unit_rows(features: Tensor) -> np.ndarray:
    """Scale features (N, D) to length 1; return float64."""
    table = features.numpy().astype(np.float64)
    return table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)


def check_counts(
    images: LabeledImages, present: int, absent: int, fix: str, negatives: Sequence[int] = (ABSENT,)
) -> None:
    """Raise an error that names every class with too few images with it, or without it."""
    parts = ([PRESENT], present, "with"), (negatives, absent, "without")
    problems = [
        f"{count} {words} {name}, but {wanted} are needed"
        for name, labels in zip(images.classes, images.labels.T, strict=True)
        for values, wanted, words in parts
        if (count := int(np.isin(labels, values).sum())) < wanted
    ]
    if problems:
        raise KsclError(
            f"{images.source.where} has too few images: {'; '.join(problems)}. {fix} (an image "
            "whose objects of a class are all difficult does not count as one with it)."
        )


def liblinear_route(table: np.ndarray, svm: CfgNode) -> Fit:
    """Return LinearSVC with the protocol's settings, on rows of a table (N, D), float64."""
    from sklearn.exceptions import ConvergenceWarning  # slow to import
    from sklearn.svm import LinearSVC

    def fit(rows: np.ndarray, labels: np.ndarray, costs: Sequence[float]) -> np.ndarray:
        features, found = table[rows], []
        for cost in costs:
            machine = LinearSVC(
                C=cost,
                class_weight={1: svm.POSITIVE_WEIGHT, -1: 1},
                penalty="l2",
                loss="squared_hinge",
                dual=True,
                tol=svm.TOLERANCE,
                max_iter=svm.ITERATIONS,
                random_state=0,
            )
            with warnings.catch_warnings():
                # The protocol has a fixed number of iterations.
                warnings.simplefilter("ignore", ConvergenceWarning)
                machine.fit(features, labels)
            found.append(np.append(machine.coef_[0], machine.intercept_))
        return np.stack(found)

    return fit


def exact_route(table: np.ndarray, svm: CfgNode) -> Fit:
    """Return the exact minimum of the same objective, on rows of a table (N, D), float64."""
    whole = table @ table.T + 1 if len(table) <= MAX_GRAM_ROWS else None

    def fit(rows: np.ndarray, labels: np.ndarray, costs: Sequence[float]) -> np.ndarray:
        features = table[rows]
        gram = features @ features.T + 1 if whole is None else whole[np.ix_(rows, rows)]  # (n, n)
        weight = np.where(labels > 0, svm.POSITIVE_WEIGHT, 1.0)
        beta, found = np.zeros(len(rows)), []
        for cost in costs:
            beta = minimize(gram, labels.astype(float), cost * weight, beta)
            found.append(np.append(beta @ features, beta.sum()))
        return np.stack(found)

    return fit


ROUTES = {"liblinear": liblinear_route, "exact": exact_route}


def minimize(
    gram: np.ndarray, labels: np.ndarray, costs: np.ndarray, beta: np.ndarray
) -> np.ndarray:
    """Return the coefficients (n,) of the rows at the minimum, starting from `beta`."""
    outputs = gram @ beta
    value = objective(beta, outputs, labels, costs)
    inside = labels * outputs < 1
    for _ in range(MAX_STEPS):
        new = np.zeros_like(beta)
        system = gram[np.ix_(inside, inside)]
        system[np.diag_indices_from(system)] += 0.5 / costs[inside]
        # The transpose is the layout that LAPACK can overwrite; the matrix is symmetric.
        _, new[inside], _ = dposv(system.T, labels[inside], overwrite_a=True)
        new_outputs = gram @ new
        new_inside = labels * new_outputs < 1
        if np.array_equal(new_inside, inside):
            return new
        step, new_value = 1.0, objective(new, new_outputs, labels, costs)
        while new_value > value and step > 1e-6:  # overshot: the minimum lies in between
            step /= 2
            new, new_outputs = (beta + new) / 2, (outputs + new_outputs) / 2
            new_value = objective(new, new_outputs, labels, costs)
        if value - new_value <= 1e-12 * value:  # rows on the margin flip by rounding
            return new if new_value <= value else beta
        beta, outputs, value = new, new_outputs, new_value
        inside = labels * outputs < 1
    raise KsclError(
        f"An SVM on {len(labels)} images did not converge in {MAX_STEPS} steps. Set SVM.SOLVER "
        "liblinear."
    )


def objective(
    beta: np.ndarray, outputs: np.ndarray, labels: np.ndarray, costs: np.ndarray
) -> float:
    slack = np.maximum(0, 1 - labels * outputs)
    return float(0.5 * beta @ outputs + costs @ slack**2)
