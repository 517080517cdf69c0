"""The linear suite: logistic regression on many sets, and the mean of their scores.

For each set, 45 weight decays are tried on its training images and the best on its validation
images is trained again on both; test is used once, at the end. A set without validation images has
LINEAR_SUITE.HOLD_OUT of its training images held out, class by class. An annotated set has one
two-class regression per class (all with the same weight decay) and is scored by VOC's 11-point mAP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from kscl.runtime.logs import LOGGER
from kscl.runtime.processes.distributed import rank
from linear_eval.checkpoint import Saver, on_first_rank_unless_stopped
from linear_eval.data.annotated import IGNORED, PRESENT
from linear_eval.data.features import Features
from linear_eval.data.images import LabeledImages
from linear_eval.data.sets import PARTS
from linear_eval.errors import LinearEvalError
from linear_eval.probes.lbfgs import fit_binary, fit_logistic
from linear_eval.probes.outcome import Outcome
from linear_eval.probes.sgd_grid import Rows, outputs_of
from linear_eval.rules import CENTER, MEAN_PER_CLASS, TOP1, VOC_MAP
from linear_eval.score import Score, eleven_point_precision
from linear_eval.splits import hold_out

log = logging.getLogger(LOGGER)

Json = dict[str, Any]


@dataclass(frozen=True)
class Split:
    """Features (n, D) and labels, (n,) or (n, C), to train or to score on."""

    features: Tensor
    labels: np.ndarray

    def part(self, images: np.ndarray) -> Split:
        """Return some of the images."""
        return Split(self.features[torch.from_numpy(images)], self.labels[images])

    def and_also(self, other: Split) -> Split:
        """Return the images of both."""
        features = torch.cat([self.features, other.features])
        return Split(features, np.concatenate([self.labels, other.labels]))


Solution = tuple[Tensor, Tensor]  # weight (C, D), bias (C,)
Fitter = Callable[[Split, float, Solution | None], Solution]


@dataclass
class Tried:
    """The weight decays of one set that were tried so far: their scores, the last solution."""

    name: str = ""
    scores: list[float] = field(default_factory=list)
    last: Solution | None = None

    def begin(self, name: str) -> None:
        """Go on with a set, or begin it if another one was tried."""
        if name != self.name:
            self.name, self.scores, self.last = name, [], None


def probe_linear_suite(
    cfg: CfgNode,
    features: Callable[[str], Features],
    data: dict[str, LabeledImages],
    device: torch.device,
    saver: Saver,
    saved: Json | None,
) -> list[Outcome]:
    """Probe one set after another; `features` gives those of a role, such as SET/train."""
    done: dict[str, Json] = dict(saved["sets"]) if saved else {}
    tried = Tried(**saved["tried"]) if saved and "tried" in saved else Tried()
    names = list(dict.fromkeys(role.partition("/")[0] for role in data))

    def after_each() -> None:
        fits = len(done) * (len(cfg.LINEAR_SUITE.WEIGHT_DECAYS) + 1) + len(tried.scores)
        saver.offer(fits, lambda: {"sets": done, "tried": vars(tried)})

    def probe(name: str, train: Split | None, val: Split | None, test: Split | None) -> None:
        assert train is not None
        assert test is not None
        tried.begin(name)
        fit = fitter(cfg, len(data[f"{name}/train"].classes), metric_of(cfg, name), device)
        done[name] = probe_set(cfg, metric_of(cfg, name), fit, train, val, test, tried, after_each)
        log.info("%s: %s %.2f.", name, done[name]["metric"], done[name]["score"])
        tried.begin("")
        after_each()

    for name in names:
        roles = [f"{name}/{part}" for part in PARTS]
        found = [
            Split(features(role).of_view(CENTER), data[role].labels) if role in data else None
            for role in roles
        ]  # on every rank; the rest is for one
        if name not in done:
            on_first_rank_unless_stopped(partial(probe, name, *found))
    return [_outcome(done, data)] if rank() == 0 else []


def _outcome(done: dict[str, Json], data: dict[str, LabeledImages]) -> Outcome:
    scores = {name: row["score"] for name, row in done.items()}
    count = sum(len(images) for role, images in data.items() if role.endswith("/test"))
    at_edge = [
        f"{name}: weight decay {row['weight_decay']:g} at the edge of its grid"
        for name, row in done.items()
        if row["at_edge"]
    ]
    for words in at_edge:
        log.warning("%s. Widen LINEAR_SUITE.WEIGHT_DECAYS.", words)
    details: Json = {"sets": done, "chosen_on": "val, or images held out of train"}
    if at_edge:
        details["warnings"] = at_edge
    return Outcome(
        Score({"mean": float(np.mean([*scores.values()])), **scores}, {}, count), details
    )


def probe_set(
    cfg: CfgNode,
    metric: str,
    fit: Fitter,
    train: Split,
    val: Split | None,
    test: Split,
    tried: Tried,
    after_each: Callable[[], None] = lambda: None,
) -> Json:
    """Return the score on test, and how it was obtained; go on after what was `tried`."""
    if val is None:
        labels = train.labels if train.labels.ndim == 1 else _rarest(train.labels)
        kept, held = hold_out(labels, cfg.LINEAR_SUITE.HOLD_OUT, cfg.SEED)
        fitted_on, chosen_on = train.part(kept), train.part(held)
        whole = train
    else:
        fitted_on, chosen_on, whole = train, val, train.and_also(val)
    if not len(chosen_on.labels):
        raise LinearEvalError("One train image per class leaves none to choose a weight decay on.")
    # From strong to weak: each solution is then close to the next.
    decays = sorted(cfg.LINEAR_SUITE.WEIGHT_DECAYS, reverse=True)
    scores = tried.scores
    for decay in decays[len(scores) :]:
        tried.last = fit(fitted_on, decay, tried.last)
        scores.append(score_of(metric, tried.last, chosen_on))
        after_each()
    best = max(range(len(decays)), key=lambda n: (scores[n], n))  # among equals the weakest
    chosen = fit(whole, decays[best], None)
    return {
        "score": score_of(metric, chosen, test),
        "metric": metric,
        "weight_decay": decays[best],
        "held_out_score": scores[best],
        "held_out_scores": dict(zip([f"{decay:g}" for decay in decays], scores, strict=True)),
        "at_edge": _at_edge(scores, best),
        "images": {"train": len(whole.labels), "test": len(test.labels)},
    }


def fitter(cfg: CfgNode, classes: int, metric: str, device: torch.device) -> Fitter:
    """Return what fits a split with a weight decay, from the solution of another one or from 0."""
    iterations = cfg.LINEAR_SUITE.ITERATIONS

    def fit(split: Split, decay: float, start: Solution | None) -> Solution:
        if metric == VOC_MAP:
            return fit_binary(split.features, split.labels, decay, iterations, device, start)
        count = len(split.labels)
        rows = Rows(split.features, np.arange(count)[None], torch.from_numpy(split.labels))
        # The source adds up the losses of the images, `fit_logistic` takes their mean.
        return fit_logistic(rows, classes, decay / count, iterations, device, start)[:2]

    return fit


def score_of(metric: str, solution: Solution, split: Split) -> float:
    """Return the metric in percent."""
    weight, bias = solution
    indices = np.arange(len(split.labels))[None]
    outputs = outputs_of(Rows(split.features, indices, torch.empty(0)), weight, bias).numpy()
    if metric == VOC_MAP:
        return 100 * float(np.mean([*_precisions(outputs, split.labels)]))
    right = outputs.argmax(1) == split.labels
    if metric == TOP1:
        return 100 * float(right.mean())
    return 100 * float(np.mean([right[split.labels == c].mean() for c in np.unique(split.labels)]))


def _precisions(outputs: np.ndarray, labels: np.ndarray) -> list[float]:
    found = []
    for scores, of_class in zip(outputs.T, labels.T, strict=True):
        counted = of_class != IGNORED
        found.append(eleven_point_precision(of_class[counted] == PRESENT, scores[counted]))
    return found


def _rarest(labels: np.ndarray) -> np.ndarray:
    """Return for each image its rarest class, or -1, to hold out some of every class."""
    counts = (labels == PRESENT).sum(0)
    rarity = np.where(labels == PRESENT, 1 / np.maximum(counts, 1), 0)
    return np.where(rarity.any(1), rarity.argmax(1), -1)


def _at_edge(scores: Sequence[float], best: int) -> bool:
    """Tell whether an end of the grid is better than all values inside it."""
    if len(scores) < 3 or best not in (0, len(scores) - 1):
        return False
    return scores[best] > max(scores[1:-1])


def check_sets(cfg: CfgNode, data: dict[str, LabeledImages]) -> None:
    """Raise an error that names a set whose metric does not fit its labels."""
    for role, images in data.items():
        name, _, part = role.partition("/")
        annotated, metric = images.labels.ndim == 2, metric_of(cfg, name)
        if annotated != (metric == VOC_MAP):
            kind = "an annotated set" if annotated else "a class folder"
            raise LinearEvalError(
                f"SETS.{name} is {kind}, which has no {metric}. Set its metric to "
                f"{VOC_MAP if annotated else f'{TOP1} or {MEAN_PER_CLASS}'}."
            )
        if annotated and part != "train":
            for number, of_class in enumerate(images.labels.T):
                if not (of_class == PRESENT).any():
                    raise LinearEvalError(
                        f"SETS.{name}.{part} ({images.source.where}) has no image with "
                        f"{images.classes[number]}, so it has no average precision."
                    )


def metric_of(cfg: CfgNode, name: str) -> str:
    """Return how a set is scored."""
    return str(cfg.SETS[name].get("metric", TOP1))
