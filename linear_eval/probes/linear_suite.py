"""The linear suite: logistic regression on many sets, and the mean of their scores.

For each set, 45 weight decays are tried on its training images and the best on its validation
images is trained again on both; test is used once, at the end. A set without validation images has
LINEAR_SUITE.HOLD_OUT of its training images held out, class by class. An annotated set has one
two-class regression per class (all with the same weight decay) and is scored by VOC's 11-point mAP.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from kscl.config import Broken, Section, key
from kscl.data.annotations import parse_source, shared_class_names
from kscl.errors import KsclError
from kscl.records.record import Metric
from kscl.run.task import task
from kscl.runtime.distributed import device, on_first_rank
from kscl.runtime.logs import LOGGER
from linear_eval.annotated import IGNORED, PRESENT, is_annotated, open_annotated
from linear_eval.backbone import freeze
from linear_eval.config import CENTER
from linear_eval.images import LabeledImages, check_same_classes, hold_out, open_class_folders
from linear_eval.probe import Data, Json, Probe
from linear_eval.probes.cached import Rows, fit_binary, fit_logistic, outputs_of
from linear_eval.score import Outcome, Score, eleven_point_precision

log = logging.getLogger(LOGGER)

PARTS = ("train", "val", "test")
METRICS = TOP1, MEAN_PER_CLASS, VOC_MAP = "top1", "mean_per_class", "voc07_map"


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


@task("linear_suite", title="Classifier (many sets)")
class LinearSuite(Probe):
    """Fit logistic regression on many sets, one after another.

    The roles of the data are SET/train, SET/val and SET/test.
    """

    metrics = (Metric("mean", "mean of sets", headline=True),)
    all_metrics_are_columns = True  # one per set

    class Keys(Section):
        class LINEAR_SUITE(Section):
            WEIGHT_DECAYS = key(
                [10 ** (-6 + n / 4) for n in range(45)],
                """The grid of weight decays: 45 from 1e-6 to 1e5, the ratio of neighbors being
                equal.""",
                distinct=True,
                above=0,
            )
            HOLD_OUT = key(
                0.2, "Fraction of train to choose on if a set has no val.", above=0, below=1
            )
            ITERATIONS = key(1000, "Largest number of iterations of L-BFGS.", at_least=1)

        SETS = key(
            {},
            """The sets of the linear suite by name; any name is allowed. Each has train, test,
            perhaps val (folders with one folder per class, or annotated sets) and metric: top1,
            mean_per_class, or voc07_map for annotated sets. {} leaves out a set of the config
            file.""",
            any_key=True,
        )

    protocol_id = "linear-suite"
    takes_subset = False
    data_keys = "SETS"
    done: dict[str, Json]  # by set
    tried: Tried

    @staticmethod
    def rules(cfg: CfgNode) -> Iterator[Broken]:
        """Check the sets."""
        if LinearSuite.name == cfg.PROBE and not any(cfg.SETS.values()):
            yield ("SETS",), "names no set: give each a train and a test folder"
        for name, given in cfg.SETS.items():
            full = f"SETS.{name}"
            if not isinstance(given, dict) or not all(isinstance(v, str) for v in given.values()):
                yield (full,), "must be a mapping of train, val, test and metric to text"
            elif given:
                if not {"train", "test"} <= set(given) <= {"train", "val", "test", "metric"}:
                    yield (
                        (full,),
                        "must have train and test, may have val and metric, and no other key",
                    )
                if given.get("metric", TOP1) not in METRICS:
                    yield (full,), f"has the metric {given['metric']}, not {', '.join(METRICS)}"
            if "/" in name or name == "mean":
                yield (full,), "must have another name: it is that of a column beside the mean"

    def sources(self) -> list[dict[str, str]]:
        """Return the parts of each set, which must not share images."""
        return [
            {f"SETS.{name}.{part}": given[part] for part in PARTS if given.get(part)}
            for name, given in self.cfg.SETS.items()
            if given
        ]

    def open_data(self) -> Data:
        """Open all sets.

        Before anything is opened, raise one error that names all sets that are not there.
        """
        missing = [
            f"\n  {key}: {where}"
            for group in self.sources()
            for key, where in group.items()
            if not os.path.isdir(parse_source(where).root if is_annotated(where) else where)
        ]
        if missing:
            raise KsclError(
                f"Sets of the suite are not there: {''.join(missing)}\nPut them there, name other "
                "folders, or take a set off the list with SETS.NAME {} to leave it out."
            )
        data: Data = {}
        for name, given in self.cfg.SETS.items():
            if given:
                data |= open_set(name, given, self.cfg)
        check_sets(self.cfg, data)
        return data

    def name_of(self, role: str) -> str:
        """Return the key of a set."""
        return f"SETS.{role.replace('/', '.')}" if "/" in role else super().name_of(role)

    def settings(self) -> Json:
        """Return the grid, and each set with its metric."""
        suite = self.cfg.LINEAR_SUITE
        return {
            "optimizer": {"name": "lbfgs", "max_iterations": suite.ITERATIONS},
            "grid": {"weight_decay": list(suite.WEIGHT_DECAYS), "of": "the sum of losses"},
            "sets": {
                name: {
                    "metric": given.get("metric", TOP1),
                    "chosen_on": "val" if given.get("val") else f"{suite.HOLD_OUT:g} of train",
                }
                for name, given in sorted(self.cfg.SETS.items())
                if given
            },
            "reported": "chosen weight decay, trained again on train and val; mean over sets",
        }

    def sizes(self) -> dict[str, int]:
        """Count nothing: there are several sets."""
        return {}

    def prepare(self, saved: Mapping[str, Any]) -> None:
        """Take up the sets that are done, and the weight decays that were tried on the next."""
        super().prepare(saved)
        self.done = dict(saved.get("sets", {}))
        self.tried = Tried(**saved.get("tried", {}))

    def state_dict(self) -> Json:
        """Return results so far."""
        return {"sets": self.done, "tried": vars(self.tried)}

    def work(self) -> Iterator[int]:
        """Compute the features of a set on all ranks, then probe it on rank 0.

        Weights that are calibrated are calibrated on the training images of each set.
        """
        frozen = self.frozen
        for number, name in enumerate(dict.fromkeys(role.partition("/")[0] for role in self.data)):
            if name in self.done:
                continue
            if number and self.frozen.calibrated_on:
                frozen = freeze(self.cfg, self.data[f"{name}/train"])
                self.decoded += frozen.decoded
            parts = {}
            for part in PARTS:
                if (images := self.data.get(f"{name}/{part}")) is not None:
                    features = self.extract(images, [CENTER], frozen).of_view(CENTER)
                    parts[part] = Split(features, images.labels)
            self.run.on_first_rank(partial(self.probe_one, name, parts))
        yield from ()

    def probe_one(self, name: str, parts: Mapping[str, Split]) -> Iterator[int]:
        """Probe a set; each fit is a step."""
        if self.tried.name != name:
            self.tried = Tried(name)
        metric = metric_of(self.cfg, name)
        fit = fitter(self.cfg, len(self.data[f"{name}/train"].classes), metric, device())
        before = len(self.done) * (len(self.cfg.LINEAR_SUITE.WEIGHT_DECAYS) + 1)
        for _ in try_decays(self.cfg, metric, fit, parts, self.tried):
            yield before + len(self.tried.scores)
        self.done[name] = result = best_of(self.cfg, metric, fit, parts, self.tried)
        log.info("%s: %s %.2f.", name, result["metric"], result["score"])
        self.tried = Tried()
        yield before + len(self.cfg.LINEAR_SUITE.WEIGHT_DECAYS) + 1

    def outcomes(self) -> list[Outcome]:
        """Return the mean over sets, and each."""
        cfg, done, data = self.cfg, self.done, self.data
        scores = {name: row["score"] for name, row in done.items()}
        count = sum(len(images) for role, images in data.items() if role.endswith("/test"))
        key, decays = "LINEAR_SUITE.WEIGHT_DECAYS", sorted(cfg.LINEAR_SUITE.WEIGHT_DECAYS)
        at_edge = [
            f"{name}: weight decay {row['weight_decay']:g} at the edge of {key} [{decays[0]:g} … "
            f"{decays[-1]:g}]: add values beyond"
            for name, row in done.items()
            if row["at_edge"]
        ]
        for words in at_edge:
            log.warning("%s.", words)
        details: Json = {"sets": done, "chosen_on": "val, or images held out of train"}
        if at_edge:
            details["warnings"] = at_edge
        mean = float(np.mean([*scores.values()]))
        return [Outcome(Score({"mean": mean, **scores}, {}, count), details)]


def open_set(name: str, given: Mapping[str, str], cfg: CfgNode) -> Data:
    """Open the parts of one set by role."""
    parts = [part for part in PARTS if given.get(part)]
    if is_annotated(given["train"]):
        classes = on_first_rank(lambda: shared_class_names([parse_source(given["train"])]))
        return {f"{name}/{part}": open_annotated(given[part], classes, cfg) for part in parts}
    opened = {part: open_class_folders(f"SETS.{name}.{part}", given[part], cfg) for part in parts}
    for part in parts[1:]:
        check_same_classes(opened["train"], opened[part])
    return {f"{name}/{part}": images for part, images in opened.items()}


def _parts_of(cfg: CfgNode, parts: Mapping[str, Split]) -> tuple[Split, Split, Split]:
    """Return what is fitted on, what is chosen on, and both."""
    train = parts["train"]
    if "val" in parts:
        return train, parts["val"], train.and_also(parts["val"])
    labels = train.labels if train.labels.ndim == 1 else _rarest(train.labels)
    kept, held = hold_out(labels, cfg.LINEAR_SUITE.HOLD_OUT, cfg.SEED)
    return train.part(kept), train.part(held), train


def try_decays(
    cfg: CfgNode, metric: str, fit: Fitter, parts: Mapping[str, Split], tried: Tried
) -> Iterator[float]:
    """Try the weight decays that were not tried yet; yield the score of each.

    From strong to weak: each solution is then close to the next.
    """
    fitted_on, chosen_on, _ = _parts_of(cfg, parts)
    if not len(chosen_on.labels):
        raise KsclError("One train image per class leaves none to choose a weight decay on.")
    decays = sorted(cfg.LINEAR_SUITE.WEIGHT_DECAYS, reverse=True)
    for decay in decays[len(tried.scores) :]:
        tried.last = fit(fitted_on, decay, tried.last)
        tried.scores.append(score_of(metric, tried.last, chosen_on))
        yield tried.scores[-1]


def best_of(
    cfg: CfgNode, metric: str, fit: Fitter, parts: Mapping[str, Split], tried: Tried
) -> Json:
    """Train the best weight decay on all images; return its score on test and how it was chosen."""
    scores, (_, chosen_on, whole), test = tried.scores, _parts_of(cfg, parts), parts["test"]
    decays = sorted(cfg.LINEAR_SUITE.WEIGHT_DECAYS, reverse=True)
    best = max(range(len(decays)), key=lambda n: (scores[n], n))  # among equals the weakest
    chosen = fit(whole, decays[best], None)
    return {
        "score": score_of(metric, chosen, test),
        "metric": metric,
        "weight_decay": decays[best],
        "held_out_score": scores[best],
        "held_out_scores": dict(zip([f"{decay:g}" for decay in decays], scores, strict=True)),
        "at_edge": _at_edge(scores, best, len(chosen_on.labels)),
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


def _at_edge(scores: Sequence[float], best: int, images: int) -> bool:
    """Tell whether an end of the grid beats its neighbor by more than the noise of held-out images.

    The noise is that of two independent percentages, which is more than that of the same images.
    """
    if len(scores) < 3 or best not in (0, len(scores) - 1):
        return False
    neighbor = scores[1 if best == 0 else best - 1]
    variance = sum(score * (100 - score) for score in (scores[best], neighbor)) / images
    return scores[best] - neighbor > 1.96 * math.sqrt(variance)


def check_sets(cfg: CfgNode, data: dict[str, LabeledImages]) -> None:
    """Raise an error that names a set whose metric does not fit its labels."""
    for role, images in data.items():
        name, _, part = role.partition("/")
        annotated, metric = images.labels.ndim == 2, metric_of(cfg, name)
        if annotated != (metric == VOC_MAP):
            kind = "an annotated set" if annotated else "a class folder"
            raise KsclError(
                f"SETS.{name} is {kind}, which has no {metric}. Set its metric to "
                f"{VOC_MAP if annotated else f'{TOP1} or {MEAN_PER_CLASS}'}."
            )
        if annotated and part != "train":
            for number, of_class in enumerate(images.labels.T):
                if not (of_class == PRESENT).any():
                    raise KsclError(
                        f"SETS.{name}.{part} ({images.source.where}) has no image with "
                        f"{images.classes[number]}, so it has no average precision."
                    )


def metric_of(cfg: CfgNode, name: str) -> str:
    """Return how a set is scored."""
    return str(cfg.SETS[name].get("metric", TOP1))
