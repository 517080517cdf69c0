"""The linear suite: logistic regression on many sets, and the mean of their scores.

For each set, 45 weight decays are tried on train, and the best on val is trained again on both;
test is used once, at the end. Without val, LINEAR_SUITE.HOLD_OUT of train is held out, class by
class. An annotated set has one binary regression per class (all with the same weight decay) and is
scored by VOC's 11-point mAP.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode

from kscl.config import Broken, Section, key
from kscl.data.annotations import is_set_name, parse_source, shared_class_names
from kscl.errors import KsclError
from kscl.records.record import Metric
from kscl.run.task import task
from kscl.runtime.distributed import device, on_first_rank
from kscl.runtime.logs import LOGGER
from linear_eval.backbone import freeze
from linear_eval.config import CENTER
from linear_eval.images import (
    IGNORED,
    PRESENT,
    check_same_classes,
    hold_out,
    open_annotated,
    open_class_folders,
)
from linear_eval.linear import Rows, Solution, fit_binary, fit_logistic, outputs_of
from linear_eval.probe import Data, Json, Probe
from linear_eval.score import Outcome, Score, beside_end, eleven_point_precision

log = logging.getLogger(LOGGER)

PARTS = ("train", "val", "test")
METRICS = TOP1, MEAN_PER_CLASS, VOC_MAP = "top1", "mean_per_class", "voc07_map"


@task("linear_suite", title="Classifier (many sets)")
class LinearSuite(Probe):
    """Fit logistic regression on many sets, one after another.

    Roles of its data are SET/train, SET/val and SET/test.
    """

    metrics = (Metric("mean", "mean of sets", headline=True),)
    all_metrics_are_columns = True  # one per set

    class Keys(Section):
        class LINEAR_SUITE(Section):
            WEIGHT_DECAYS = key(
                [10 ** (-6 + n / 4) for n in range(45)],
                "The grid of weight decays: 45 from 1e-6 to 1e5, equally spaced in log scale.",
                distinct=True,
                above=0,
            )
            HOLD_OUT = key(
                0.2, "Fraction of train to choose on if a set has no val.", above=0, below=1
            )
            ITERATIONS = key(1000, "Largest number of iterations of L-BFGS.", at_least=1)

        SETS = key(
            {},
            """The sets of the linear suite by name; any name is allowed. Each has train, test and
            optionally val (folders with one folder per class, or annotated sets), and metric:
            top1, mean_per_class, or voc07_map for annotated sets. {} leaves out a set of the
            config file.""",
            any_key=True,
        )

    takes_subset = False
    data_keys = "SETS"
    done: dict[str, Json]  # by set
    tried: Json  # of the set under way: its name, the scores so far, and the last solution

    @staticmethod
    def rules(cfg: CfgNode) -> Iterator[Broken]:
        if LinearSuite.name == cfg.PROBE and not any(cfg.SETS.values()):
            yield ("SETS",), "must have at least one set, with a train and a test folder"
        for name, given in cfg.SETS.items():
            full = f"SETS.{name}"
            if not isinstance(given, dict) or not all(isinstance(v, str) for v in given.values()):
                yield (full,), "must be a mapping of train, val, test and metric to text"
            elif given:
                if not {"train", "test"} <= set(given) <= {*PARTS, "metric"}:
                    yield (full,), "must have train and test, and may have val and metric only"
                if given.get("metric", TOP1) not in METRICS:
                    yield (full,), f"has the metric {given['metric']}, not {', '.join(METRICS)}"
            if "/" in name or name == "mean":
                yield (full,), "must not be called mean or have a slash: it names a column"

    @property
    def sets(self) -> dict[str, Mapping[str, str]]:
        return {name: given for name, given in self.cfg.SETS.items() if given}

    def metric(self, name: str) -> str:
        return str(self.cfg.SETS[name].get("metric", TOP1))

    def sources(self) -> list[dict[str, str]]:
        return [
            {f"SETS.{name}.{part}": given[part] for part in PARTS if given.get(part)}
            for name, given in self.sets.items()
        ]

    def open_data(self) -> Data:
        """Open all sets; one error names all that are missing."""
        missing = [
            f"\n  {key}: {where}"
            for group in self.sources()
            for key, where in group.items()
            if not os.path.isdir(parse_source(where).root if is_set_name(where) else where)
        ]
        if missing:
            raise KsclError(
                f"Sets of the suite are missing:{''.join(missing)}\nPut them there, name other "
                "folders, or leave out a set with SETS.NAME {}."
            )
        return {
            f"{name}/{part}": images
            for name, given in self.sets.items()
            for part, images in self.open_set(name, given).items()
        }

    def open_set(self, name: str, given: Mapping[str, str]) -> Data:
        """Open the parts of one set; its metric must fit its labels."""
        parts, metric = [part for part in PARTS if given.get(part)], self.metric(name)
        annotated = is_set_name(given["train"])
        if annotated != (metric == VOC_MAP):
            kind = "an annotated set" if annotated else "a class folder"
            raise KsclError(
                f"SETS.{name} is {kind}, so its metric must be "
                f"{VOC_MAP if annotated else f'{TOP1} or {MEAN_PER_CLASS}'}, got {metric}."
            )
        if not annotated:
            key = f"SETS.{name}"
            opened = {p: open_class_folders(f"{key}.{p}", given[p], self.cfg) for p in parts}
            for part in parts[1:]:
                check_same_classes(opened["train"], opened[part])
            return opened
        classes = on_first_rank(lambda: shared_class_names([parse_source(given["train"])]))
        opened = {part: open_annotated(given[part], classes, self.cfg) for part in parts}
        for part in parts[1:]:
            for number in np.flatnonzero(~(opened[part].labels == PRESENT).any(0)):
                raise KsclError(
                    f"SETS.{name}.{part} ({given[part]}) has no image with {classes[number]}, so "
                    "its average precision is undefined. Add some."
                )
        return opened

    def name_of(self, role: str) -> str:
        return f"SETS.{role.replace('/', '.')}" if "/" in role else super().name_of(role)

    def settings(self) -> Json:
        suite = self.cfg.LINEAR_SUITE
        return {
            "optimizer": {"name": "lbfgs", "max_iterations": suite.ITERATIONS},
            "grid": {"weight_decay": list(suite.WEIGHT_DECAYS), "of": "the sum of losses"},
            "sets": {
                name: {
                    "metric": self.metric(name),
                    "chosen_on": "val" if given.get("val") else f"{suite.HOLD_OUT:g} of train",
                }
                for name, given in sorted(self.sets.items())
            },
            "reported": "chosen weight decay, trained again on train and val; mean over sets",
        }

    def prepare(self, saved: Mapping[str, Any]) -> None:
        super().prepare(saved)
        self.done, self.tried = dict(saved.get("done", {})), dict(saved.get("tried", {}))

    def state_dict(self) -> Json:
        return {"done": self.done, "tried": self.tried}

    def work(self) -> Iterator[int]:
        """Compute the features of each set on all ranks, then fit on rank 0.

        If weights are calibrated, they are for each set, on its training images.
        """
        frozen = self.frozen
        for number, name in enumerate(self.sets):
            if name in self.done:
                continue
            if number and self.frozen.calibrated_on:
                frozen = freeze(self.cfg, self.data[f"{name}/train"])
                self.decoded += frozen.decoded
            parts = {}
            for part in PARTS:
                if (images := self.data.get(f"{name}/{part}")) is not None:
                    features = self.extract(images, [CENTER], frozen).of_view(CENTER)
                    parts[part] = Rows.of(features, images.targets)
            self.run.on_first_rank(partial(self.probe_set, name, parts))
        yield from ()

    def probe_set(self, name: str, parts: Mapping[str, Rows]) -> Iterator[int]:
        """Try all weight decays on a set and score the best one on test; each fit is a step."""
        suite, metric, train = self.cfg.LINEAR_SUITE, self.metric(name), parts["train"]
        if "val" in parts:
            fit_on, choose_on = train, parts["val"]
            table = torch.cat([fit_on.table, choose_on.table])
            whole = Rows.of(table, torch.cat([fit_on.labels, choose_on.labels]))
        else:
            kept, held = hold_out(train.labels.numpy(), suite.HOLD_OUT, self.cfg.SEED)
            fit_on, choose_on, whole = train.part(kept), train.part(held), train
        if not len(choose_on):
            raise KsclError(
                f"SETS.{name} has one train image per class, so none can be held out to choose a "
                "weight decay. Use more images, or name a val folder."
            )
        fit = partial(_fit, metric, suite.ITERATIONS, len(self.data[f"{name}/train"].classes))
        # From strong to weak: each solution is a good start for the next.
        decays = sorted(suite.WEIGHT_DECAYS, reverse=True)
        before = len(self.done) * (len(decays) + 1)
        if self.tried.get("name") != name:
            self.tried = {"name": name, "scores": [], "last": None}
        scores = self.tried["scores"]
        for decay in decays[len(scores) :]:
            self.tried["last"] = fit(fit_on, decay, self.tried["last"])
            scores.append(score_of(metric, self.tried["last"], choose_on))
            yield before + len(scores)
        best = max(range(len(decays)), key=lambda n: (scores[n], n))  # ties go to the weakest
        result = score_of(metric, fit(whole, decays[best], None), parts["test"])
        self.done[name] = {
            "score": result,
            "metric": metric,
            "weight_decay": decays[best],
            "held_out_score": scores[best],
            "held_out_scores": dict(zip([f"{decay:g}" for decay in decays], scores, strict=True)),
            "at_edge": _at_edge(scores, best, len(choose_on)),
            "images": {"train": len(whole), "test": len(parts["test"])},
        }
        log.info("%s: %s %.2f.", name, metric, result)
        self.tried = {}
        yield before + len(decays) + 1

    def outcomes(self) -> list[Outcome]:
        done = self.done
        scores = {name: row["score"] for name, row in done.items()}
        count = sum(len(images) for role, images in self.data.items() if role.endswith("/test"))
        key, decays = "LINEAR_SUITE.WEIGHT_DECAYS", sorted(self.cfg.LINEAR_SUITE.WEIGHT_DECAYS)
        at_edge = [
            f"{name}: weight decay {row['weight_decay']:g} is at the edge of {key} [{decays[0]:g} "
            f"… {decays[-1]:g}]: extend it"
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


def _fit(
    metric: str, iterations: int, classes: int, rows: Rows, decay: float, start: Solution | None
) -> Solution:
    """Fit rows with a weight decay, starting from a solution or from 0."""
    if metric == VOC_MAP:
        return fit_binary(rows, decay, iterations, device(), start)
    # The protocol sums the losses of the images; `fit_logistic` takes their mean.
    return fit_logistic(rows, classes, decay / len(rows), iterations, device(), start)[:2]


def score_of(metric: str, solution: Solution, rows: Rows) -> float:
    outputs, labels = outputs_of(rows, *solution).numpy(), rows.labels.numpy()
    if metric == VOC_MAP:
        precisions = [
            eleven_point_precision(truth[truth != IGNORED] == PRESENT, scores[truth != IGNORED])
            for scores, truth in zip(outputs.T, labels.T, strict=True)
        ]
        return 100 * float(np.mean(precisions))
    right = outputs.argmax(1) == labels
    if metric == TOP1:
        return 100 * float(right.mean())
    return 100 * float(np.mean([right[labels == c].mean() for c in np.unique(labels)]))


def _at_edge(scores: Sequence[float], best: int, images: int) -> bool:
    """Return whether an end of the grid clearly beats its neighbor.

    The noise is that of two independent percentages, an upper bound for the same images.
    """
    beside = beside_end(best, len(scores))
    if beside is None:
        return False
    variance = sum(score * (100 - score) for score in (scores[best], scores[beside])) / images
    return scores[best] - scores[beside] > 1.96 * math.sqrt(variance)
