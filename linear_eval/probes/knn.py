"""Nearest neighbors on cached features: nothing is trained, nothing is chosen."""

from __future__ import annotations

import torch
from fvcore.common.config import CfgNode

from kscl.engine.knn import knn_predict
from linear_eval.data.feature_sets import FeatureSets
from linear_eval.probes.outcome import Outcome
from linear_eval.protocols import knn_protocol
from linear_eval.rules import CENTER
from linear_eval.score import score


def probe_knn(cfg: CfgNode, sets: FeatureSets, device: torch.device) -> list[Outcome]:
    """Return the scores of a vote among the k nearest train images, for each k."""
    train, val, train_features, val_features = sets
    found = []
    for number, k in enumerate(cfg.KNN.K):
        predicted = knn_predict(
            train_features.of_view(CENTER),
            train.targets,
            val_features.of_view(CENTER),
            k=k,
            temperature=cfg.KNN.TEMPERATURE,
            num_classes=len(train.classes),
            device=device,
        )
        result = score(predicted.cpu()[:, None], val.targets, val.classes)
        part = f"knn{k}" if number else ""
        found.append(Outcome(result, part=part, protocol=knn_protocol(cfg, k)))
    return found
