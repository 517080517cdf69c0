"""The pretraining task: images in, `backbone.safetensors` and `record.json` out."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from kscl.backbone_file import (
    DESCRIPTION_VERSION,
    Description,
    cached_weights,
    load_backbone,
    save_backbone,
)
from kscl.config import config_values
from kscl.data.loader import TrainLoader, build_train_loader, measure_budget, steps_per_epoch
from kscl.data.open import open_source
from kscl.data.source import ImageSource, is_remote
from kscl.data.tar import RemoteShards
from kscl.engine.cost import OPTIMIZER_VALUES, PASSES_OF_MOCO, forward_passes, num_views
from kscl.engine.knn import KnnCheck
from kscl.engine.loop import (
    KNN_TOP1,
    TrainState,
    build_state,
    check_ranks,
    restore,
    share_reasons,
    state_dict,
    train_steps,
    warm_up,
)
from kscl.engine.metrics_log import RunLog, means_of_last_epoch, read_metrics, thinned_curves
from kscl.engine.schedule import learning_rate
from kscl.errors import KsclError
from kscl.keys import continues, schema_of
from kscl.methods.base import Method
from kscl.methods.keys import method_of
from kscl.records.fingerprint import fingerprint, fingerprint_of_list
from kscl.records.provenance import source_hash
from kscl.records.record import Protocol, Record, make_record, write_record
from kscl.registry import METHODS
from kscl.run.checkpoint import CHECKPOINT_FOLDER, CONTAINER_BYTES, bytes_of
from kscl.run.engine import WORLD_SIZES
from kscl.run.task import Inputs, Task, task
from kscl.runtime.distributed import device, first_rank_first, on_first_rank, rank, world_size
from kscl.runtime.files import sha256_of
from kscl.runtime.machine import keep_freed_memory
from kscl.runtime.precision import suggest_tf32
from kscl.views.sizes import last_size

log = logging.getLogger(__name__)

BACKBONE_FILE = "backbone.safetensors"
PROTOCOL = Protocol("pretrain", {"figures": "means over the last epoch", "version": 1})
SAMPLED_IMAGES = 64


@task("pretrain", title="Pretraining")
class Pretraining(Task):
    """Trains a backbone; the state between two steps is `TrainState`."""

    cost_stage = "pretrain"
    what_ranks_change = (
        "The global batch, its order and its views stay the same, but BatchNorm statistics differ: "
        "each process computes them on its own part of the batch."
    )
    source: ImageSource
    state: TrainState
    loader: TrainLoader
    knn: KnnCheck | None

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__(cfg)
        self.keep = cfg.CHECKPOINT.KEEP
        self.schema = schema_of(cfg.METHOD.NAME)
        # A run that too many unreadable images have stopped resumes when more of them are allowed.
        changing = ("DATA.BAD_IMAGES", "DATA.MAX_BAD_FRACTION")
        self.may_change = (*self.schema.without_effect, *changing)
        check_ranks(cfg, world_size())  # before the images are listed, which can take minutes
        if device().type == "cpu":
            keep_freed_memory()

    def open(self) -> Inputs:
        """Open the images, and hash the file of the weights to start from if it is there."""
        where = (self.cfg.DATA.TRAIN, self.cfg.DATA.CACHE_DIR, self.cfg.DATA.CACHE_GB)
        self.source = first_rank_first(lambda: open_source(*where))
        data = on_first_rank(lambda: data_fingerprint(where[0], self.source, where[1]))
        weights = self.cfg.BACKBONE.WEIGHTS
        file = cached_weights(weights) if continues(self.cfg) else None
        return Inputs({"train": data}, {"weights": sha256_of(file)} if file else {})

    def name_of(self, role: str) -> str:
        """Return the key that names an input, and its value."""
        if role == "train":
            return f"DATA.TRAIN {self.cfg.DATA.TRAIN}"
        return f"BACKBONE.WEIGHTS {self.cfg.BACKBONE.WEIGHTS}"

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
        self.state.checkpoints = self.folder / CHECKPOINT_FOLDER
        if not saved:
            self.inputs.files |= start_from_weights(self.state.method, cfg)
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
            self.loader.bad_images.note(sorted(saved["bad_images"].items()), again=True)
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
        with RunLog(folder, *lengths, state.method.figures) as run_log:
            yield from train_steps(state, loader, self.knn, run_log)

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due: every so many steps or epochs, and at the end."""
        period = self.cfg.CHECKPOINT
        epoch, within = divmod(step, self.state.steps_per_epoch)
        by_step = period.PERIOD_STEPS and step % period.PERIOD_STEPS == 0
        by_epoch = within == 0 and epoch % period.PERIOD_EPOCHS == 0
        return bool(by_step) or by_epoch or step == self.state.total_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the training state and what describes its backbone."""
        share_reasons(self.loader.bad_images)
        description = {"version": DESCRIPTION_VERSION, **asdict(self.describe())}
        return {
            "description": description,
            "bad_images": self.loader.bad_images.reasons,
            **state_dict(self.state),
        }

    def code(self) -> list[str]:
        """Return the modules that make the weights: the task's, plug-ins, and the method's."""
        return list(dict.fromkeys([*self.modules(), METHODS[self.cfg.METHOD.NAME].__module__]))

    def describe(self, metrics: Mapping[str, float] | None = None) -> Description:
        """Return the description that travels with the backbone's weights."""
        cfg, state = self.cfg, self.state
        source = {
            "method": cfg.LABEL,
            **method_of(cfg).facts(cfg),
            "epochs": state.step / state.steps_per_epoch,
            "seed": cfg.SEED,
            "config_hash": self.schema.hash(cfg),
            "data": self.inputs.data["train"]["hash"],
            "code": source_hash(self.code()),
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
            name: last[name] for name in ("loss", *state.method.figures) if name in last
        }
        backbone = self.folder / BACKBONE_FILE
        save_backbone(backbone, exported(state.method.backbone), self.describe(means))
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
            *(text for _, text in state.method.setup_warnings(data["images"], processes)),
            *state.method.final_warnings(curves),
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
            without_effect=self.schema.without_effect,
            modules=self.code(),
            details={
                "steps": state.step,
                "epochs": epochs,
                "curves": curves,
                "warnings": warnings,
                "knn_curve": [[row["step"], row[KNN_TOP1]] for row in checks],
                "outputs": {"backbone": sha256_of(backbone)},
                "parameters": sum(p.numel() for p in state.method.backbone.parameters()),
                "processes": world_size(),
                WORLD_SIZES: self.run.world_sizes,
            },
        )
        log.info("Wrote %s and %s.", backbone, write_record(record, self.folder))


def derived_values(cfg: CfgNode) -> list[str]:
    """Return what follows from the settings, one line each, to check before a long run."""
    batch, method = cfg.SOLVER.BATCH_SIZE, method_of(cfg)
    rate = f"learning rate {learning_rate(cfg):g}"
    if not cfg.SOLVER.SCALE_LR:
        first = f"batch {batch} → {rate}, not scaled (SOLVER.SCALE_LR False)"
    elif batch == cfg.SOLVER.REFERENCE_BATCH_SIZE:
        first = f"batch {batch} → {rate}, as given"
    else:
        first = f"batch {batch} → {rate} by linear scaling (SOLVER.SCALE_LR False to disable)"
    cost = forward_passes(cfg) / PASSES_OF_MOCO
    second = (
        f"{method.summary(cfg)} → {num_views(cfg)} views per image; a step costs about {cost:.2f} "
        "times that of MoCo"
    )
    third = []
    if continues(cfg):
        solver, factor = cfg.SOLVER, cfg.SOLVER.CONTINUED_LR_FACTOR
        third = [
            f"continues from {cfg.BACKBONE.WEIGHTS}: the projector alone for "
            f"{solver.FREEZE_BACKBONE_EPOCHS:g} epochs, then everything with {factor:g} of the "
            "learning rate (SOLVER.FREEZE_BACKBONE_EPOCHS, SOLVER.CONTINUED_LR_FACTOR)"
        ]
    return [first, second, *third, *method.notes(cfg)]


def announce(state: TrainState, data: Mapping[str, Any]) -> None:
    """Log what the run will do."""
    for line in derived_values(state.cfg):
        log.info(line)
    log.info(
        "%s images, fingerprint %s; %d steps per epoch, %d in all; on %s",
        f"{data['images']:,}",
        data["hash"],
        state.steps_per_epoch,
        state.total_steps,
        f"{world_size()} x {state.device.type}",
    )
    suggest_tf32(state.cfg.SOLVER.AMP, state.cfg.SOLVER.TF32, state.device)
    for _, warning in state.method.setup_warnings(data["images"], world_size()):
        log.warning("%s", warning)


def check_room(state: TrainState, folder: Path) -> None:
    """Raise if the disk of an existing folder has no room for one checkpoint."""
    trained = [weight for weight in state.method.parameters() if weight.requires_grad]
    moments = OPTIMIZER_VALUES[state.cfg.SOLVER.OPTIMIZER] * bytes_of(trained)
    needed = bytes_of(state.method.state_dict()) + moments + CONTAINER_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise KsclError(
            f"The disk of OUTPUT_DIR {folder} has {free / 2**20:,.1f} MiB free, but a checkpoint "
            f"takes {needed / 2**20:,.1f} MiB. Make room, or choose another OUTPUT_DIR."
        )


def exported(backbone: nn.Module) -> dict[str, Tensor]:
    """Return copies of a backbone's tensors by timm's names, on the CPU."""
    return {
        name: value.detach().cpu().clone().contiguous()
        for name, value in backbone.state_dict().items()
    }


def start_from_weights(method: Method, cfg: CfgNode) -> dict[str, str]:
    """Load BACKBONE.WEIGHTS into all encoders; return the inputs of the record: its SHA-256."""
    weights = cfg.BACKBONE.WEIGHTS
    if not continues(cfg):
        return {}
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
    for sentence in loaded.messages:
        log.info(sentence)
    for encoder in method.encoders():
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
