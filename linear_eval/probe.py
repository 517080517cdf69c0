"""What all probes share, from data to records.

A probe is one class in `linear_eval/probes/`, or in a module imported with --import:

    @task("mine", title="Classifier (mine)")
    class Mine(Probe):
        # --help shows its docstring.
        metrics = (Metric("top1", "mine", headline=True, per_image=True),)
        class Keys(Section): ...
        def settings(self): ...     # its part of the protocol
        def outcomes(self): ...     # the scores, on rank 0, from self.data and self.features

A protocol's definition has every setting that changes what is measured, but not the backbone, the
seed or the data (a record adds their hashes). Its words are hashed: rewording them would make equal
measurements incomparable.
"""

from __future__ import annotations

import importlib
import json
import logging
import pkgutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
from fvcore.common.config import CfgNode
from torch import Tensor

import linear_eval.probes
from kscl.backbone_file import RANDOM, Loaded
from kscl.config import CONFIG_FILE, Broken, Schema, Section, config_values, leaves, value_at
from kscl.data.labeled import FRACTION_IN_PROTOCOL, draw_of, percent_words
from kscl.errors import KsclError
from kscl.records.rankme import KEY as RANKME
from kscl.records.rankme import rankme
from kscl.records.record import (
    LONGER,
    RECORD_FILE,
    Protocol,
    Record,
    make_record,
    read_record,
    write_record,
)
from kscl.records.spread import mean_and_std
from kscl.run.task import TASKS, Inputs, Task
from kscl.runtime.distributed import device, on_first_rank, rank, world_size
from kscl.runtime.files import write_atomically
from kscl.runtime.logs import LOG_FILE, LOGGER
from kscl.runtime.machine import avoid_broken_amx
from kscl.runtime.paths import is_named
from kscl.runtime.precision import set_numerics, warn_of_emulation
from linear_eval import config
from linear_eval.backbone import Frozen, freeze, load
from linear_eval.config import CENTER, LinearEval
from linear_eval.features import Features, cached_features
from linear_eval.images import LabeledImages, open_data, subset_hash
from linear_eval.score import LEVEL, Outcome

log = logging.getLogger(LOGGER)

Json = dict[str, Any]
Data = dict[str, LabeledImages]
CLASSIFIER_FILE = "classifier.safetensors"
INPUT_KEYS = {"backbone": "BACKBONE.WEIGHTS", "train": "DATA.TRAIN", "val": "DATA.VAL"}  # by role
SUBSET = "DATA.SUBSET"
VIEW_WORDS = {CENTER: "centre"}  # hashed: see above
METRIC_WORDS = {"top1": "top-1", "top5": "top-5"}
# Fields of a pretraining's description that tell entries of the leaderboard apart.
DESCRIBING = ("method", "similarity", "num_shots", "rho", "remember", "epochs", "seed")


class Probe(Task):
    """Evaluate a backbone, by default on features of train and val."""

    class Keys(Section):
        """The probe's own keys, in their own section."""

    takes_subset: ClassVar[bool] = True  # DATA.SUBSET and the like choose its training images
    data_keys: ClassVar[str] = "DATA.TRAIN and DATA.VAL"
    trains_backbone: ClassVar[bool] = False
    view: ClassVar[str] = CENTER  # the view of val
    voc_lists: ClassVar[str] = "Main"  # the folder of ImageSets/ with the splits
    resumes_without_checkpoint = True  # most of its state is cached features
    what_ranks_change = "Batches, their order and their views stay the same."
    data: Data  # by role
    loaded: Loaded
    frozen: Frozen

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.state_dict is not Probe.state_dict and cls.prepare is Probe.prepare:
            raise KsclError(
                f"{cls.__name__} has state_dict() but never restores it. Add prepare(self, saved), "
                "which calls super().prepare(saved) and restores from saved."
            )

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__(cfg)
        self.may_change = schema().without_effect
        self.solver = schedule(cfg)
        self.decoded = 0  # images decoded for calibration and features
        self.features: dict[str, Features] = {}  # by role

    # What it reads

    @staticmethod
    def rules(cfg: CfgNode) -> Iterator[Broken]:
        """Yield every broken rule about its keys; checked whichever probe is chosen."""
        yield from ()

    def sources(self) -> list[dict[str, str]]:
        """Return groups of sets, by key, that must not share images; the first one trains."""
        return [{"DATA.TRAIN": self.cfg.DATA.TRAIN, "DATA.VAL": self.cfg.DATA.VAL}]

    def open_data(self) -> Data:
        """Open the images by role; raise an error if this probe cannot use them."""
        return dict(zip(("train", "val"), open_data(self.cfg), strict=True))

    def open(self) -> Inputs:
        solver = self.cfg.SOLVER
        set_numerics(tf32=solver.TF32)
        warn_of_emulation(solver.AMP, device())
        if solver.AMP == "bf16" and device().type == "cpu":
            avoid_broken_amx()
        self.data, self.loaded = self.open_data(), load(self.cfg)
        return Inputs(
            {role: images.fingerprint for role, images in self.data.items()},
            {"backbone": self.loaded.file_sha256 or self.loaded.tensors_sha256},
            {SUBSET: hash_of_list(self.definition())},
        )

    def name_of(self, role: str) -> str:
        name = INPUT_KEYS.get(role, role)
        return f"{name} {value_at(self.cfg, name)}"

    def names_the_same(self, record: Record) -> bool:
        before = dict(leaves(record.config.values))
        return all(before[key] == value_at(self.cfg, key) for key in INPUT_KEYS.values())

    def recorded(self, record: Record) -> dict[str, Any]:
        return super().recorded(record) | {SUBSET: hash_of_list(record.protocol.definition)}

    # What it computes

    def prepare(self, saved: Mapping[str, Any]) -> None:
        """Freeze the backbone."""
        self.frozen = freeze(self.cfg, next(iter(self.data.values())), self.loaded)
        self.decoded = self.frozen.decoded

    def steps(self) -> Iterator[int]:
        if rank() == 0:
            self.announce()
        torch.manual_seed(self.cfg.SEED)  # for plug-ins; ours draw by kscl.rng
        yield from self.work()

    def work(self) -> Iterator[int]:
        """Compute the features on all ranks, then fit on rank 0."""
        val = self.extract(self.data["val"], [self.view])
        self.features = {"train": self.extract(self.data["train"], self.train_views()), "val": val}
        self.run.on_first_rank(self.fit)
        yield from ()

    def seen_and_stored(self, train: int, val: int) -> tuple[int, int]:
        """Return how many images the backbone sees, and of how many features are stored."""
        views = len(self.train_views()) * train + val
        return views, views

    def train_views(self) -> list[str]:
        """Return the views of train whose features are needed."""
        return [self.view]

    def fit(self) -> Iterator[int]:
        """Train on rank 0; yield the step number whenever the state is complete."""
        yield from ()

    def extract(
        self, images: LabeledImages, views: Sequence[str], frozen: Frozen | None = None
    ) -> Features:
        """Return the features of these views of the images, cached if possible."""
        features = cached_features(self.cfg, frozen or self.frozen, images, views, self.run)
        self.decoded += features.decoded
        return features

    def centers(self, role: str) -> Tensor:
        """Return the features (N, D) of center crops."""
        return self.features[role].of_view(CENTER)

    def is_due(self, step: int) -> bool:
        return time.monotonic() - self.run.last_saved >= self.cfg.CHECKPOINT.SECONDS

    def state_dict(self) -> Json:
        return {}

    # What it reports

    @property
    def protocol_id(self) -> str:
        """Return the protocol's name; override it with a constant if it differs."""
        return self.name.replace("_", "-")

    def settings(self) -> Json:
        """Return every setting of this probe that changes what is measured."""
        raise NotImplementedError

    def definition(self) -> Json:
        """Return every setting that changes what is measured."""
        return _common_settings(self.cfg) | self.settings()

    def protocol(self, name: str = "", **changes: Any) -> Protocol:
        """Return the protocol, optionally under another name or with changed settings."""
        id_ = (name or self.protocol_id) + percent_words(self.cfg.DATA.FRACTION)
        return Protocol(id_, self.definition() | changes)

    def announce(self) -> None:
        """Log what is measured."""
        counts = [f"{len(images):,} {role}" for role, images in self.data.items()]
        trained = [images for role, images in self.data.items() if role.endswith("train")]
        log.info(
            "%s: %s images of %d classes, on %d x %s.",
            self.protocol().id,
            ", ".join(counts),
            sum(len(images.classes) for images in trained),
            *(world_size(), device().type),
        )

    def outcomes(self) -> Iterable[Outcome]:
        """Return the results; called on rank 0 only."""
        raise NotImplementedError

    def finish(self) -> None:
        self.frozen.check_unchanged()
        on_first_rank(self._write)

    def _write(self) -> None:
        # record.json, which marks the evaluation as finished, comes last.
        for outcome in reversed(list(self.outcomes())):
            record = self.record_of(outcome)
            if outcome.classifier is not None:
                weight, bias = (part.contiguous() for part in outcome.classifier)
                metadata = {"format": "pt", "classes": json.dumps(self.data["val"].classes)}
                content = safetensors.torch.save({"weight": weight, "bias": bias}, metadata)
                write_atomically(self.folder / CLASSIFIER_FILE, content)
            path = write_record(record, self.folder, outcome.part)
            log.info("%s", in_words(record, outcome.remark))
            log.info("Wrote %s.", path)

    def record_of(self, outcome: Outcome) -> Record:
        """Return the record of a result."""
        cfg, score = self.cfg, outcome.score
        backbone = self.describe_backbone()
        trained = [i for role, i in self.data.items() if not role.endswith(("val", "test"))]
        details: Json = {
            "backbone": backbone,
            "n": score.n,
            "n_train": sum(len(images) for images in trained),
            "processes": world_size(),
            "files": {"config": CONFIG_FILE, "log": LOG_FILE},
            **outcome.details,
            "images_decoded_for_features": self.decoded,
        }
        if cfg.SOLVER.LONGER > 1:
            details[LONGER] = cfg.SOLVER.LONGER
        if cfg.DATA.FRACTION < 1:
            details["draw"] = draw_of(cfg.DATA, cfg.SEED)
        if "val" in self.features and self.view == CENTER:  # train depends on the fraction
            details[RANKME] = round(rankme(self.centers("val").numpy()), 3)
        if score.per_class:
            details |= {"classes": self.data["val"].classes, "per_class": score.per_class}
        if score.right:
            details |= {
                "right": score.right,
                "confidence_interval": {name: list(ends) for name, ends in score.intervals.items()},
                "confidence_level": LEVEL,
                "confidence_method": "Wilson, test sampling only",
            }
        if outcome.classifier is not None:
            details["files"]["classifier"] = CLASSIFIER_FILE
        weights = cfg.BACKBONE.WEIGHTS
        name = weights if is_named(weights) else Path(weights.removesuffix(".tar")).stem
        return make_record(
            kind=self.kind,
            task=self.info(score.metrics),
            name=cfg.LABEL or backbone.get("method") or name,
            protocol=outcome.protocol or self.protocol(),
            metrics=score.metrics,
            seconds=self.run.seconds,
            seed=cfg.SEED if outcome.seed is None else outcome.seed,
            cfg=cfg,
            data=self.inputs.data,
            inputs=self.inputs.files,
            details=details,
            without_effect=tuple(self.may_change),
            modules=self.modules(),
        )

    def describe_backbone(self) -> Json:
        """Describe the backbone for readers; the leaderboard groups by it."""
        frozen, loaded = self.frozen, self.frozen.loaded
        known: Mapping[str, Any] = loaded.description.source
        if self.cfg.LABEL and known.get("method") in (None, RANDOM):
            known = {**known, "method": self.cfg.LABEL}
        kwargs = loaded.description.kwargs
        return {
            **{key: known[key] for key in DESCRIBING if key in known},
            "arch": loaded.description.arch,
            "kwargs": config_values(CfgNode(kwargs)) if kwargs else {},
            "parameters": sum(p.numel() for p in loaded.backbone.parameters()),
            "weights": "random" if loaded.layout == RANDOM else f"file, read as {loaded.layout}",
            "mean": [round(value, 6) for value in frozen.mean.flatten().tolist()],
            "std": [round(value, 6) for value in frozen.std.flatten().tolist()],
            "feature_dim": frozen.dim,
            "batch_norm_calibrated_on": frozen.calibrated_on,
            "sha256": frozen.tensors_sha256,
        }


# All probes


def registered() -> dict[str, type[Probe]]:
    """Return all probes by name: those in `linear_eval/probes/`, and imported ones."""
    for module in pkgutil.iter_modules(linear_eval.probes.__path__):
        importlib.import_module(f"{linear_eval.probes.__name__}.{module.name}")
    found = {name: it for name, it in TASKS.loaded().items() if issubclass(it, Probe)}
    return dict(sorted(found.items()))


def probe_of(cfg: CfgNode) -> Probe:
    """Return the probe that a config names."""
    return registered()[cfg.PROBE](cfg)


def schema() -> Schema:
    """Return the keys of all probes."""
    probes = registered()
    rules = (config.rules, _check_chosen, *(each.rules for each in probes.values()))
    found = Schema.of(LinearEval, *(each.Keys for each in probes.values()), rules=rules)
    said = [
        f"{name}: {(each.__doc__ or each.title).splitlines()[0]}" for name, each in probes.items()
    ]
    chosen = found.keys["PROBE"]
    chosen = replace(chosen, doc=" ".join([chosen.doc, *said]), choices=tuple(probes))
    return replace(found, keys={**found.keys, "PROBE": chosen})


def load_linear_eval_config(
    config_file: str | Path | None = None, overrides: Sequence[str] = ()
) -> CfgNode:
    """Return the merge of defaults, file and overrides, checked as a whole and frozen."""
    return schema().load(config_file, overrides)


def _check_chosen(cfg: CfgNode) -> Iterable[Broken]:
    """Yield the keys that the chosen probe does not take."""
    chosen, data = registered().get(cfg.PROBE), cfg.DATA
    if chosen is None:
        return
    limited = data.IMAGES_PER_CLASS > 0 or data.FRACTION < 1 or bool(data.SUBSET)
    if limited and not chosen.takes_subset:
        keys = ("PROBE", *config.SUBSET_KEYS)
        yield keys, "this probe uses all images of its sets: leave these unset"
    if cfg.SOLVER.LONGER > 1 and not chosen.command.longer:
        yield ("PROBE", "SOLVER.LONGER"), "this probe trains nothing for a number of epochs"


def schedule(cfg: CfgNode) -> CfgNode:
    """Return SOLVER with the epochs that are trained: the protocol's, times SOLVER.LONGER."""
    solver, times = cfg.SOLVER.clone(), cfg.SOLVER.LONGER
    solver.defrost()
    solver.EPOCHS = round(times * solver.EPOCHS)
    solver.MILESTONES = [round(times * epoch) for epoch in solver.MILESTONES]
    return solver


# Words of protocols


def _common_settings(cfg: CfgNode) -> Json:
    amp, tf32 = cfg.SOLVER.AMP, cfg.SOLVER.TF32
    reduced = [name for name, used in ((amp, amp != "off"), ("tf32", tf32)) if used]
    batch_norm: Json | str = "as stored"
    if cfg.BACKBONE.BATCH_NORM != "keep":
        statistics = "statistics of train images"
        if cfg.BACKBONE.BATCH_NORM == "auto":
            statistics = f"as stored; of random weights, {statistics}"
        batch_norm = {"statistics": statistics, "images": cfg.BACKBONE.CALIBRATION_IMAGES}
    common: Json = {
        "features": "pooled, frozen, evaluation mode",
        "batch_norm": batch_norm,
        "precision": " and ".join(reduced) or "float32",
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
        common[FRACTION_IN_PROTOCOL] = cfg.DATA.FRACTION
    return common


def hash_of_list(definition: Mapping[str, Any]) -> str | None:
    """Return the hash of DATA.SUBSET's list, which the data's fingerprint does not cover."""
    found: str | None = definition.get("train_subset", {}).get("sha256")
    return found


def random_crop_words(cfg: CfgNode) -> Json:
    given = cfg.INPUT
    return {
        "random_resized_crop": given.SIZE,
        "scale": list(given.SCALE),
        "ratio": list(given.RATIO),
        "horizontal_flip": given.FLIP,
        "interpolation": given.INTERPOLATION,
    }


def schedule_words(cfg: CfgNode) -> Json:
    if cfg.SOLVER.SCHEDULE == "cosine":
        return {"name": "cosine", "by": "epoch", "warmup": 0}
    milestones, gamma = list(cfg.SOLVER.MILESTONES), cfg.SOLVER.GAMMA
    return {"name": "step", "milestones": milestones, "gamma": gamma, "by": "epoch", "warmup": 0}


# Summaries


def in_words(record: Record, remark: str = "") -> str:
    """Return the result as one line of text."""
    metrics, details = record.metrics, record.details
    ends = details.get("confidence_interval", {})
    values = [
        f"{METRIC_WORDS.get(name, name)} {value:.2f}"
        + (f" [{ends[name][0]:.2f}, {ends[name][1]:.2f}]" if name in ends and not number else "")
        for number, (name, value) in enumerate(metrics.items())
    ]
    return (
        f"{record.name}: {', '.join(values)} on {details['n']:,} images, {record.protocol.id}, "
        f"seed {record.seed}" + (f" ({remark})" if remark else "")
    )


def summary(folders: Sequence[Path]) -> str:
    """Return one line per record, or mean ± standard deviation over seeds."""
    first = read_record(folders[0] / RECORD_FILE)
    files = [sorted(folder.glob(f"*{RECORD_FILE}")) for folder in folders]
    found = [read_record(file) for of_folder in files for file in of_folder]
    records = [record for record in found if record.protocol == first.protocol]
    others = [record for record in found if record.protocol != first.protocol]
    if len(records) == 1:
        return "\n".join(map(in_words, [first, *others]))
    parts = [
        f"{name} {mean_and_std([record.metrics[name] for record in records])}"
        for name in first.metrics
    ]
    seeds = ", ".join(str(record.seed) for record in records)
    return f"{first.name}: {', '.join(parts)} over seeds {seeds}, {first.protocol.id}"
