"""One evaluation from its data to its records; every rank does its part."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from kscl.config.tree import config_values
from kscl.records.record import Protocol, write_record
from kscl.runtime.logs import LOGGER
from kscl.runtime.processes.distributed import rank, world_size
from kscl.runtime.processes.ranks import device, on_first_rank
from kscl.runtime.processes.signals import StopRequest
from linear_eval.backbone import Frozen, freeze
from linear_eval.checkpoint import SUBSET, Saver, on_first_rank_unless_stopped, saved_state
from linear_eval.data.annotated import open_annotated_pair
from linear_eval.data.feature_sets import FeatureSets
from linear_eval.data.features import Features, cached_features
from linear_eval.data.images import LabeledImages, open_data
from linear_eval.data.sets import Data, open_suite
from linear_eval.data.subsets import take_subset
from linear_eval.data.views import cached_views, geometry
from linear_eval.probes.cached import probe_cached
from linear_eval.probes.finetune import probe_finetune
from linear_eval.probes.knn import probe_knn
from linear_eval.probes.linear_suite import check_sets, probe_linear_suite
from linear_eval.probes.online import probe_online
from linear_eval.probes.outcome import Outcome
from linear_eval.probes.svm import check_annotated, probe_low_shot, probe_svm
from linear_eval.protocols import IMAGENET_LINEAR_MOCO, deviations, protocol_of
from linear_eval.record import in_words, record_of, sizes_of, write_classifier
from linear_eval.rules import CENTER

log = logging.getLogger(LOGGER)

Json = dict[str, Any]
ANNOTATED = ("svm", "low_shot")


@dataclass
class Extractor:
    """Gives features of a backbone, and counts the images that were decoded for them."""

    cfg: CfgNode
    stop: StopRequest
    decoded: int = 0

    def __call__(self, frozen: Frozen, images: LabeledImages, views: Sequence[str]) -> Features:
        """Return the features of these views of the images, from the cache if they are in it."""
        features = cached_features(
            frozen,
            images,
            views,
            geometry(self.cfg),
            cache_dir=self.cfg.DATA.CACHE_DIR,
            num_workers=self.cfg.DATA.NUM_WORKERS,
            stop=self.stop,
        )
        self.decoded += features.decoded
        return features


def evaluate(
    cfg: CfgNode, folder: Path, stop: StopRequest, data: Data, frozen: Frozen, began: float
) -> None:
    """Probe the backbone, resuming what was saved, and write the records."""
    protocol = protocol_of(cfg, sizes_of(data))
    if rank() == 0:
        announce(cfg, protocol, data)
    about = {
        "config": config_values(cfg),
        "backbone": frozen.loaded.tensors_sha256,
        "data": {role: images.fingerprint["hash"] for role, images in data.items()},
        SUBSET: hash_of_subset(protocol),
    }
    saved = on_first_rank(lambda: saved_state(folder, about))
    before = saved["seconds"] if saved else 0.0

    def seconds() -> float:
        return before + time.monotonic() - began

    saver = Saver(folder, about, cfg.CHECKPOINT.SECONDS, stop, seconds)
    extract = Extractor(cfg, stop, frozen.decoded)
    outcomes = probe(cfg, frozen, data, saver, saved, extract)
    frozen.check_unchanged()
    # The one whose name says that the evaluation has ended comes last.
    for outcome in reversed(outcomes):
        outcome.details["images_decoded_for_features"] = extract.decoded
        record = record_of(cfg, outcome.protocol or protocol, frozen, data, outcome, seconds())
        write_classifier(outcome, data, folder)
        path = write_record(record, folder, outcome.part)
        log.info("%s", in_words(record, outcome.remark))
        log.info("Written: %s.", path)


def hash_of_subset(protocol: Protocol) -> str | None:
    """Return the hash of the list of DATA.SUBSET, which the fingerprint of the data leaves out."""
    found: str | None = protocol.definition.get("train_subset", {}).get("sha256")
    return found


def probe(
    cfg: CfgNode,
    frozen: Frozen,
    data: Data,
    saver: Saver,
    saved: Json | None,
    extract: Extractor | None = None,
) -> list[Outcome]:
    """Run the probe that the config names; only rank 0 has outcomes."""
    extract = extract or Extractor(cfg, saver.stop)
    if cfg.PROBE == "linear_suite":
        features = suite_features(cfg, frozen, data, extract)
        return probe_linear_suite(cfg, features, data, device(), saver, saved)
    train, val = data["train"], data["val"]
    if cfg.PROBE == "finetune":
        return probe_finetune(cfg, frozen, train, val, saver, saved)
    of_val = extract(frozen, val, [CENTER])
    if cfg.PROBE == "online":
        outcome = probe_online(cfg, frozen, train, val, of_val, saver, saved)
        return [outcome] if rank() == 0 else []
    # All views of CACHED in one pass, so that no later probe decodes the images again.
    views = [CENTER] if cfg.PROBE in ANNOTATED else [CENTER, *cached_views(cfg)]
    of_train = extract(frozen, train, list(dict.fromkeys(views)))
    sets = FeatureSets(train, val, of_train, of_val)
    outcomes: list[Outcome] = []  # the rest takes one process
    on_first_rank_unless_stopped(lambda: outcomes.extend(_fit(cfg, sets, saver, saved)))
    return outcomes


def _fit(cfg: CfgNode, sets: FeatureSets, saver: Saver, saved: Json | None) -> list[Outcome]:
    if cfg.PROBE == "knn":
        return probe_knn(cfg, sets, device())
    if cfg.PROBE in ANNOTATED:
        probe_annotated = probe_svm if cfg.PROBE == "svm" else probe_low_shot
        return probe_annotated(cfg, sets, saver, saved)
    return [probe_cached(cfg, sets, device(), saver, saved)]


def open_and_check(cfg: CfgNode) -> Data:
    """Open the data of an evaluation by role, and raise an error if it cannot be done with them."""
    if cfg.PROBE == "linear_suite":
        data = open_suite(cfg)
        check_sets(cfg, data)
        return data
    train, val = open_annotated_pair(cfg) if cfg.PROBE in ANNOTATED else open_data(cfg)
    if cfg.PROBE in ANNOTATED:
        check_annotated(cfg, train, val)
        return {"train": train, "val": val}
    return {"train": take_subset(train, cfg), "val": val}


def suite_features(
    cfg: CfgNode, frozen: Frozen, data: Data, extract: Extractor
) -> Callable[[str], Features]:
    """Return what gives the features of a role, such as SET/train.

    Weights that are calibrated are calibrated on the training images of each set.
    """
    by_set = {next(iter(data)).partition("/")[0]: frozen}

    def features(role: str) -> Features:
        name = role.partition("/")[0]
        if name not in by_set:
            of_set = freeze(cfg, data[f"{name}/train"]) if frozen.calibrated_on else frozen
            extract.decoded += of_set.decoded if frozen.calibrated_on else 0
            by_set[name] = of_set
        return extract(by_set[name], data[role], [CENTER])

    return features


def announce(cfg: CfgNode, protocol: Protocol, data: Data) -> None:
    """Log what is measured, and how it differs from the paper's protocol."""
    counts = [f"{len(images):,} {role}" for role, images in data.items()]
    classes = sum(len(images.classes) for role, images in data.items() if role.endswith("train"))
    log.info(
        "%s: %s images of %d classes, on %d x %s.",
        *(protocol.id, ", ".join(counts), classes, world_size(), device().type),
    )
    if cfg.PROBE == "online" and protocol.id != IMAGENET_LINEAR_MOCO:
        differences = "; ".join(deviations(cfg, sizes_of(data)))
        log.info("This is not %s: %s.", IMAGENET_LINEAR_MOCO, differences)
