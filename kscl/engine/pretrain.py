"""The pretraining task: images in, `backbone.safetensors` and `record.json` out."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode

from kscl.backbone_file import (
    DESCRIPTION_VERSION,
    RANDOM,
    Description,
    load_backbone,
    save_backbone,
)
from kscl.config import config_values
from kscl.data.loader import TrainLoader, build_train_loader, measure_budget, steps_per_epoch
from kscl.data.open import open_source
from kscl.data.source import ImageSource, is_remote
from kscl.data.tar import RemoteShards
from kscl.engine.health import batch_norm_warnings, health_warnings
from kscl.engine.knn import KnnCheck
from kscl.engine.loop import KNN_TOP1, check_numbers, share_reasons, train_steps, warm_up
from kscl.engine.metrics_log import RunLog, means_of_last_epoch, read_metrics, thinned_curves
from kscl.engine.preview.announce import announce
from kscl.engine.state import TrainState, build_state, check_ranks, check_room, restore, state_dict
from kscl.errors import KsclError
from kscl.keys import PRETRAIN
from kscl.methods.cost import num_views
from kscl.methods.encoder import backbone_state_dict
from kscl.methods.learner import Learner
from kscl.records.fingerprint import fingerprint, fingerprint_of_list
from kscl.records.provenance import source_hash
from kscl.records.record import Protocol, Record, make_record, write_record
from kscl.run.checkpoint import CHECKPOINT_FOLDER
from kscl.run.engine import WORLD_SIZES
from kscl.run.task import Inputs, Task, task
from kscl.runtime.distributed import device, first_rank_first, on_first_rank, rank, world_size
from kscl.runtime.files import sha256_of
from kscl.runtime.machine import keep_freed_memory
from kscl.runtime.paths import is_url
from kscl.views.sizes import last_size

log = logging.getLogger(__name__)

BACKBONE_FILE = "backbone.safetensors"
PROTOCOL = Protocol("pretrain", {"figures": "means over the last epoch", "version": 1})
SAMPLED_IMAGES = 64


@task("pretrain", title="Pretraining")
class Pretraining(Task):
    """Trains a backbone; the state between two steps is `TrainState`."""

    cost_stage = "pretrain"
    # A run that too many unreadable images have stopped resumes when more of them are allowed.
    may_change = (*PRETRAIN.without_effect, "DATA.BAD_IMAGES", "DATA.MAX_BAD_FRACTION")
    what_ranks_change = (
        "The global batch, its order and its views stay the same, but BatchNorm statistics differ: "
        "each process computes them on its own part of the batch."
    )
    source: ImageSource
    state: TrainState
    loader: TrainLoader
    knn: KnnCheck | None
    run_log: RunLog

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__(cfg)
        self.keep = cfg.CHECKPOINT.KEEP
        check_ranks(cfg, world_size())  # before the images are listed, which can take minutes
        if device().type == "cpu":
            keep_freed_memory()

    def open(self) -> Inputs:
        """Open the images, and hash the file of the weights to start from if it is there."""
        where = (self.cfg.DATA.TRAIN, self.cfg.DATA.CACHE_DIR, self.cfg.DATA.CACHE_GB)
        self.source = first_rank_first(lambda: open_source(*where))
        data = on_first_rank(lambda: data_fingerprint(where[0], self.source, where[1]))
        weights = self.cfg.BACKBONE.WEIGHTS
        is_file = weights and not is_url(weights) and Path(weights).is_file()
        return Inputs({"train": data}, {"weights": sha256_of(Path(weights))} if is_file else {})

    def name_of(self, role: str) -> str:
        """Return the key that names an input, and its value."""
        cfg = self.cfg
        named = {"train": ("DATA.TRAIN", cfg.DATA.TRAIN)}
        return " ".join(named.get(role, ("BACKBONE.WEIGHTS", cfg.BACKBONE.WEIGHTS)))

    def names_the_same(self, record: Record) -> bool:
        """Return whether DATA.TRAIN is that of the record; BACKBONE.WEIGHTS cannot change."""
        return bool(record.config.values["DATA"]["TRAIN"] == self.cfg.DATA.TRAIN)

    def can_compare(self, record: Record) -> bool:
        """Return False for remote images, whose comparison would download them."""
        return not (is_remote(self.cfg.DATA.TRAIN) and self.names_the_same(record))

    def prepare(self, saved: Mapping[str, Any]) -> None:
        """Build state and loader, from a checkpoint or from the weights that the config names."""
        cfg = self.cfg
        steps = steps_per_epoch(len(self.source), cfg.SOLVER.BATCH_SIZE)
        self.state = build_state(cfg, len(self.source), steps, device())
        if not saved:
            self.inputs.files |= start_from_weights(self.state.learner, cfg)
        else:
            restore(self.state, saved)
            if "weights" in saved["inputs"]:  # the file may be gone
                self.inputs.files["weights"] = saved["inputs"]["weights"]
        self.loader = build_train_loader(
            cfg,
            self.source,
            first_step=self.state.step,
            last_step=self.state.total_steps,
            rank=rank(),
            world_size=world_size(),
        )
        if saved:
            self.loader.bad_images.recall(saved["bad_images"])
        self.knn = KnnCheck(cfg) if cfg.EVAL.KNN_PERIOD else None
        if self.state.step < self.state.total_steps:
            on_first_rank(lambda: check_room(self.state, self.folder))

    def steps(self) -> Iterator[int]:
        """Train to the last step."""
        state, loader = self.state, self.loader
        announce(state, self.inputs.data["train"])
        if state.step == state.total_steps:
            return
        budget = measure_budget(loader.dataset, self.cfg.DATA.NUM_WORKERS)
        log.info("Each process: %s", budget.with_encode(warm_up(state)))
        folder = self.folder if rank() == 0 else None
        lengths = (state.step, state.total_steps, state.steps_per_epoch, num_views(self.cfg))
        with RunLog(folder, *lengths) as run_log:
            yield from train_steps(
                state, loader, self.knn, run_log, self.folder / CHECKPOINT_FOLDER
            )

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due: every so many steps or epochs, and at the end."""
        period = self.cfg.CHECKPOINT
        epoch, within = divmod(step, self.state.steps_per_epoch)
        by_step = period.PERIOD_STEPS and step % period.PERIOD_STEPS == 0
        by_epoch = within == 0 and epoch % period.PERIOD_EPOCHS == 0
        return bool(by_step) or by_epoch or step == self.state.total_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the training state and what describes its backbone."""
        check_numbers(self.state, self.folder / CHECKPOINT_FOLDER)
        share_reasons(self.loader.bad_images)
        description = {"version": DESCRIPTION_VERSION, **asdict(self.describe())}
        return {
            "description": description,
            "bad_images": self.loader.bad_images.reasons,
            **state_dict(self.state, self.folder / CHECKPOINT_FOLDER),
        }

    def describe(self, metrics: Mapping[str, float] | None = None) -> Description:
        """Return the description that travels with the backbone's weights."""
        cfg, state = self.cfg, self.state
        source = {
            "method": cfg.LABEL,
            "similarity": cfg.METHOD.SIMILARITY,
            "num_shots": cfg.METHOD.NUM_SHOTS,
            "rho": cfg.METHOD.RHO,
            "epochs": state.step / state.steps_per_epoch,
            "seed": cfg.SEED,
            "config_hash": PRETRAIN.hash(cfg),
            "data": self.inputs.data["train"]["hash"],
            "code": source_hash(self.modules()),
            **({"start": self.inputs.files["weights"]} if self.inputs.files else {}),
            **(metrics or {}),
        }
        return Description(
            arch=cfg.BACKBONE.NAME,
            kwargs=config_values(cfg)["BACKBONE"]["KWARGS"],
            mean=tuple(cfg.INPUT.MEAN),
            std=tuple(cfg.INPUT.STD),
            size=last_size(cfg.INPUT.SIZE),
            source=source,
        )

    def finish(self) -> None:
        """Write the backbone, then the record, which says that the run is complete."""
        on_first_rank(self._export)

    def _export(self) -> None:
        cfg, state, data = self.cfg, self.state, self.inputs.data["train"]
        rows = read_metrics(self.folder)
        last = means_of_last_epoch(rows)
        means: dict[str, float] = {
            name: last[name] for name in ("loss", "instance_top1", "mean_rank") if name in last
        }
        backbone = self.folder / BACKBONE_FILE
        save_backbone(backbone, backbone_state_dict(state.learner.encoder), self.describe(means))
        images_per_second = state.step * cfg.SOLVER.BATCH_SIZE / state.seconds
        epochs = state.step / state.steps_per_epoch
        metrics: dict[str, float] = {
            **means,
            "minutes_per_epoch": state.seconds / 60 / epochs,
            "images_per_second": images_per_second,
            "views_per_second": images_per_second * num_views(cfg),
            "bad_images": len(self.loader.bad_images.reasons),
        }
        checks = [row for row in rows if KNN_TOP1 in row]
        if checks:
            metrics[KNN_TOP1] = checks[-1][KNN_TOP1]
        curves = thinned_curves(rows)
        processes = min(count for _, count in self.run.world_sizes)
        warnings = [
            *batch_norm_warnings(cfg, state.learner, processes),
            *health_warnings(cfg, data["images"], curves),
        ]
        for warning in warnings:
            log.warning("%s", warning)
        record = make_record(
            kind=self.kind,
            task=self.info(),
            name=cfg.LABEL,
            protocol=PROTOCOL,
            metrics=metrics,
            seconds=state.seconds,
            seed=cfg.SEED,
            cfg=cfg,
            data=self.inputs.data,
            inputs=self.inputs.files,
            without_effect=PRETRAIN.without_effect,
            modules=self.modules(),
            details={
                "steps": state.step,
                "epochs": epochs,
                "curves": curves,
                "warnings": warnings,
                "knn_curve": [[row["step"], row[KNN_TOP1]] for row in checks],
                "outputs": {"backbone": sha256_of(backbone)},
                "parameters": sum(p.numel() for p in state.learner.encoder.backbone.parameters()),
                "processes": world_size(),
                WORLD_SIZES: self.run.world_sizes,
            },
        )
        log.info("Wrote %s and %s.", backbone, write_record(record, self.folder))


def start_from_weights(learner: Learner, cfg: CfgNode) -> dict[str, str]:
    """Load BACKBONE.WEIGHTS into both encoders; return the inputs of the record: its SHA-256."""
    weights = cfg.BACKBONE.WEIGHTS
    if not weights:
        return {}
    if weights == RANDOM:
        raise KsclError(
            f"BACKBONE.WEIGHTS is '{RANDOM}', but pretraining draws random weights from SEED by "
            "itself: leave it empty."
        )
    network = config_values(cfg)["BACKBONE"]
    with torch.random.fork_rng(devices=[]):  # a start from a file leaves all random streams alone
        loaded = load_backbone(
            weights,
            network["NAME"],
            network["KWARGS"],
            container=network["CONTAINER"] or None,
            prefix=network["PREFIX"] or None,
            mean=cfg.INPUT.MEAN,
            std=cfg.INPUT.STD,
        )
    for sentence in loaded.said:
        log.info(sentence)
    for encoder in (learner.encoder, learner.key_encoder):
        if encoder is not None:
            encoder.backbone.load_state_dict(loaded.backbone.state_dict())
    assert loaded.file_sha256 is not None  # only random weights have no file
    return {"weights": loaded.file_sha256}


def data_fingerprint(where: str, source: ImageSource, cache_dir: str = "") -> dict[str, Any]:
    """Hash names, sizes and sampled contents; of remote shards the hashes of all contents.

    Equal copies have equal hashes, wherever they are.
    """
    if Path(where).exists():
        found = fingerprint(where, cache_dir).as_dict()
        if where.lower().endswith(".txt") and (images := fingerprint_of_list(where)) is not None:
            both = f"{found['hash']}/{images.hash}"
            found["hash"] = hashlib.sha256(both.encode()).hexdigest()[:16]
        return {**found, "images": len(source)}
    digest = hashlib.sha256()
    if isinstance(source, RemoteShards):
        digest.update("\n".join(source.sha256).encode())
        return {"hash": digest.hexdigest()[:16], "images": len(source)}
    names = [source.name(index) for index in range(len(source))]
    folder = os.path.commonpath([os.path.dirname(name) for name in (min(names), max(names))])
    for name in names:
        digest.update(f"{name.removeprefix(folder)}\0".encode("utf-8", "surrogateescape"))
    for index in range(0, len(source), max(1, len(source) // SAMPLED_IMAGES)):
        digest.update(source.read(index))
    return {"hash": digest.hexdigest()[:16], "images": len(source)}
