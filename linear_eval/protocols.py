"""Protocols: what makes two probes comparable, written out, named and hashed.

A definition has every setting that changes what is measured, and nothing else: not the backbone,
not the seed, not the data (a record adds its fingerprint). Its words are hashed, so they stay as
the first records have them: other words would make equal measurements incomparable.
"""

from __future__ import annotations

from typing import Any

from fvcore.common.config import CfgNode

from kscl.config.tree import leaves
from kscl.records.record import Protocol
from linear_eval.config import linear_eval_defaults
from linear_eval.data.subsets import PUBLISHED, subset_hash
from linear_eval.rules import CENTER, TOP1

IMAGENET_LINEAR_MOCO = "imagenet-linear-moco"
LINEAR_ONLINE = "linear-online"  # the same kind of probe with other settings, or on other data
LINEAR_CACHED = "linear-cached"
SVM, LOW_SHOT = "voc07-svm", "voc07-low-shot-svm"
LINEAR_SUITE = "linear-suite"
FINETUNE = "finetune"

VIEW_WORDS = {CENTER: "centre"}  # see above
IMAGENET = {"classes": 1000, "train images": 1_281_167, "val images": 50_000}

Json = dict[str, Any]


def protocol_of(cfg: CfgNode, sizes: dict[str, int]) -> Protocol:
    """Return the protocol of a run; `sizes` counts what IMAGENET counts."""
    definition = definition_of(cfg)
    if cfg.PROBE == "online":
        to_the_letter = not deviations(cfg, sizes)
        return Protocol(IMAGENET_LINEAR_MOCO if to_the_letter else LINEAR_ONLINE, definition)
    if cfg.PROBE == "finetune":
        return Protocol(f"{FINETUNE}-{_part(cfg)}", definition)
    if cfg.PROBE == "knn":
        return knn_protocol(cfg, cfg.KNN.K[0])
    return Protocol(IDS[cfg.PROBE], definition)


def _part(cfg: CfgNode) -> str:
    """Name the part of the training images."""
    if cfg.DATA.SUBSET in PUBLISHED:
        return f"imagenet-{cfg.DATA.SUBSET.removeprefix('simclr_')}"
    if cfg.DATA.SUBSET:
        return "list"
    if cfg.DATA.IMAGES_PER_CLASS:
        return f"{cfg.DATA.IMAGES_PER_CLASS}-per-class"
    return f"{100 * cfg.DATA.FRACTION:g}percent"


def knn_protocol(cfg: CfgNode, k: int) -> Protocol:
    """Return the protocol of one number of neighbors."""
    return Protocol(f"knn{k}-T{cfg.KNN.TEMPERATURE:g}", definition_of(cfg) | {"k": k})


def deviations(cfg: CfgNode, sizes: dict[str, int]) -> list[str]:
    """List how an online probe differs from MoCo's on ImageNet; empty if it does not."""
    ours, theirs = (dict(leaves(definition_of(c))) for c in (cfg, linear_eval_defaults()))
    differing = [
        f"{key} is {ours.get(key)}, not {theirs.get(key)}"
        for key in dict.fromkeys([*theirs, *ours])
        if ours.get(key) != theirs.get(key)
    ]
    return differing + [
        f"{sizes[what]:,} {what}, not {count:,}"
        for what, count in IMAGENET.items()
        if sizes[what] != count
    ]


def definition_of(cfg: CfgNode) -> Json:
    """Return every setting that changes what is measured."""
    common: Json = {
        "features": "pooled, frozen, evaluation mode",
        "batch_norm": _batch_norm(cfg),
        "precision": _precision(cfg),
        "train_images_per_class": cfg.DATA.IMAGES_PER_CLASS or "all",
        "test_view": {
            "resize": cfg.INPUT.RESIZE,
            "centre_crop": cfg.INPUT.SIZE,
            "crops": 1,
            "interpolation": cfg.INPUT.INTERPOLATION,
        },
    }
    if cfg.DATA.SUBSET:
        common["train_subset"] = {"sha256": subset_hash(cfg.DATA.SUBSET, cfg.DATA.CACHE_DIR)}
    elif cfg.DATA.FRACTION < 1:
        common["train_subset"] = {"fraction_of_each_class": cfg.DATA.FRACTION}
    return common | SETTINGS[cfg.PROBE](cfg)


def _precision(cfg: CfgNode) -> str:
    full = "tf32" if cfg.SOLVER.TF32 else "float32"
    if cfg.SOLVER.AMP == "off":
        return full
    return cfg.SOLVER.AMP if full == "float32" else f"{cfg.SOLVER.AMP} and {full}"


def _online(cfg: CfgNode) -> Json:
    solver = cfg.SOLVER
    return {
        "head": {"layer": "linear", "weight_std": solver.INIT_STD, "bias": 0},
        "train_view": VIEW_WORDS.get(cfg.INPUT.AUGMENT) or _random_crop(cfg),
        "optimizer": {
            "name": "sgd",
            "lr": solver.BASE_LR,
            "momentum": solver.MOMENTUM,
            "weight_decay": solver.WEIGHT_DECAY,
            "lr_scaling": "none",
        },
        "batch_size": solver.BATCH_SIZE,
        "epochs": solver.EPOCHS,
        "schedule": _schedule(cfg),
        "reported": "last epoch",
    }


def _cached(cfg: CfgNode) -> Json:
    cached, solver = cfg.CACHED, cfg.SOLVER
    views: list[Any] = [VIEW_WORDS.get(view, view) for view in cached.VIEWS]
    if cached.RANDOM_CROPS:
        views.append({"count": cached.RANDOM_CROPS, **_random_crop(cfg)})
    common: Json = {
        "train_views": views,
        "standardize": cached.STANDARDIZE,
        "chosen_on": {"held_out_of_train": cached.HOLD_OUT, "stratified": True},
        "reported": "chosen point, trained again on all of train",
    }
    if cached.METHOD == "lbfgs":
        return common | {
            "optimizer": {"name": "lbfgs", "max_iterations": cached.LBFGS_ITERATIONS},
            "grid": {"l2": list(cached.L2)},
        }
    return common | {
        "head": {"layer": "linear", "weight_std": solver.INIT_STD, "bias": 0},
        "optimizer": {"name": "sgd", "momentum": solver.MOMENTUM},
        "grid": {"lr": list(cached.LRS), "weight_decay": list(cached.WEIGHT_DECAYS)},
        "batch_size": solver.BATCH_SIZE,
        "epochs": solver.EPOCHS,
        "schedule": _schedule(cfg),
    }


def _knn(cfg: CfgNode) -> Json:
    return {
        "k": cfg.KNN.K[0],
        "temperature": cfg.KNN.TEMPERATURE,
        "similarity": "cosine",
        "vote": "exp(similarity / temperature)",
    }


def _svm(cfg: CfgNode) -> Json:
    svm = cfg.SVM
    solver: Json = {"name": "exact"}
    if svm.SOLVER == "liblinear":
        solver = {"name": "liblinear, dual", "tol": svm.TOLERANCE, "iterations": svm.ITERATIONS}
    return {
        "machine": "linear SVM per class, squared hinge, l2, bias as a feature of 1",
        "solver": solver,
        "feature_length": 1,
        "class_weight": {"1": svm.POSITIVE_WEIGHT, "-1": 1},
        "grid": {"cost": list(svm.COSTS)},
        "chosen_on": {"folds_of_train": svm.FOLDS, "by": "average precision", "for": "each class"},
        "difficult": "ignored in train and test",
        "scorer": "mean over classes of the area under interpolated precision",
        "reported": "chosen cost, trained again on all of train",
    }


def _low_shot(cfg: CfgNode) -> Json:
    return _svm(cfg) | {
        "k": list(cfg.LOW_SHOT.K),
        "negatives": "(classes - 1) k",
        "samples": cfg.LOW_SHOT.SAMPLES,
        "folds": "at most k",
        "cost_where_k_is_1": cfg.LOW_SHOT.COST_OF_ONE,
    }


def _finetune(cfg: CfgNode) -> Json:
    online, rates = _online(cfg), {"trunk": cfg.FINETUNE.TRUNK_LR, "head": cfg.FINETUNE.HEAD_LR}
    online["optimizer"] |= {"lr": rates}
    return online | {
        "features": "pooled, trained, BatchNorm in training mode",
        "batch_norm": "trained, per process, from what the weights have",
    }


def _linear_suite(cfg: CfgNode) -> Json:
    suite = cfg.LINEAR_SUITE
    return {
        "optimizer": {"name": "lbfgs", "max_iterations": suite.ITERATIONS},
        "grid": {"weight_decay": list(suite.WEIGHT_DECAYS), "of": "the sum of losses"},
        "sets": {
            name: {
                "metric": given.get("metric", TOP1),
                "chosen_on": "val" if given.get("val") else f"{suite.HOLD_OUT:g} of train",
            }
            for name, given in sorted(cfg.SETS.items())
            if given
        },
        "reported": "chosen weight decay, trained again on train and val; mean over sets",
    }


def _random_crop(cfg: CfgNode) -> Json:
    given = cfg.INPUT
    return {
        "random_resized_crop": given.SIZE,
        "scale": list(given.SCALE),
        "ratio": list(given.RATIO),
        "horizontal_flip": given.FLIP,
        "interpolation": cfg.INPUT.INTERPOLATION,
    }


def _schedule(cfg: CfgNode) -> Json:
    if cfg.SOLVER.SCHEDULE == "cosine":
        return {"name": "cosine", "by": "epoch", "warmup": 0}
    milestones, gamma = list(cfg.SOLVER.MILESTONES), cfg.SOLVER.GAMMA
    return {"name": "step", "milestones": milestones, "gamma": gamma, "by": "epoch", "warmup": 0}


def _batch_norm(cfg: CfgNode) -> Json | str:
    words = {
        "keep": "as stored",
        "calibrate": "statistics of train images",
        "auto": "as stored; of random weights, statistics of train images",
    }[cfg.BACKBONE.BATCH_NORM]
    if cfg.BACKBONE.BATCH_NORM == "keep":
        return words
    return {"statistics": words, "images": cfg.BACKBONE.CALIBRATION_IMAGES}


IDS = {"cached": LINEAR_CACHED, "svm": SVM, "low_shot": LOW_SHOT, "linear_suite": LINEAR_SUITE}
SETTINGS = {
    "online": _online,
    "cached": _cached,
    "knn": _knn,
    "svm": _svm,
    "low_shot": _low_shot,
    "linear_suite": _linear_suite,
    "finetune": _finetune,
}
