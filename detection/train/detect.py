"""The detection task: fine-tune a detector, score it on the test set, write its record.

A step of the engine is one iteration of Detectron2's trainer with its hooks. Images, views and all
random draws are functions of seed and iteration, so a resumed run gives the same bits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from detectron2.config import CfgNode
from detectron2.engine import AMPTrainer, SimpleTrainer, hooks
from detectron2.engine.defaults import default_writers
from detectron2.evaluation import inference_on_dataset
from detectron2.modeling.meta_arch import retinanet
from detectron2.solver import build_lr_scheduler
from detectron2.utils import comm
from detectron2.utils.events import CommonMetricPrinter, EventStorage
from detectron2.utils.logger import setup_logger
from fvcore.nn import sigmoid_focal_loss
from fvcore.nn.precise_bn import get_bn_modules
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from detection.config import META_ARCHITECTURES, NORM_KEYS
from detection.convert.certificate import Certificate
from detection.convert.weights import load_weights
from detection.data.sets import RunSets
from detection.scoring import ScorerResult, metrics_of, scorers_for
from detection.scoring.evaluator import SavedPassEvaluator
from detection.scoring.pictures import MOSAIC_FILE, draw_mosaic
from detection.scoring.result import per_class_numbers
from detection.train.detector import (
    CLASSES,
    DETECTOR_HASH,
    EVALUATIONS,
    Training,
    check_room_for,
    export_detector,
    load_detector,
    refuse_run_folder,
)
from detection.train.loader import build_test_loader, build_train_loader, seed_everything
from detection.train.model import build_detector
from detection.train.optimizer import build_optimizer
from detection.train.protocol import OF_RESNETS, WITHOUT_EFFECT, protocol_of, schedule
from kscl.backbone_file import RANDOM
from kscl.cli import WORLD_SIZE_OPTION
from kscl.config import plain, value_at
from kscl.data.labeled import draw_of
from kscl.errors import KsclError
from kscl.methods.encoder import build_backbone
from kscl.records.record import (
    LEAST_AP50,
    LONGER,
    WORKING_AP50,
    Metric,
    Record,
    make_record,
    write_record,
)
from kscl.registry import import_modules
from kscl.run.engine import WORLD_SIZE, WORLD_SIZES, Flags, Run, Stopped, run
from kscl.run.task import Inputs, Task, task
from kscl.runtime.distributed import local_world_size, on_first_rank, wait_for_all
from kscl.runtime.files import only_run_in, sha256_of, write_atomically
from kscl.runtime.precision import set_numerics
from kscl.runtime.processes import stop_requests

LINES_EVERY = 20  # iterations
SCORES_FILE = "scores.json"
RARELY_FOUND = 1.0  # percent AP50 of a class
BATCH_KEY = "SOLVER.IMS_PER_BATCH"
SCALED = (
    "SOLVER.REFERENCE_WORLD_SIZE scales batch, learning rate and schedule to the number of "
    f"processes, so a run must resume on the same number, even with {WORLD_SIZE_OPTION}."
)

ATTRIBUTES = "attributes"  # in a checkpoint: those of `MetaArchitecture`, by rank

log = logging.getLogger(__name__)
# TorchScript compiles the loss during its first calls, which changes the last bits of its
# gradients: a resumed run would differ.
retinanet.sigmoid_focal_loss_jit = sigmoid_focal_loss


@task(
    "detection",
    title="Detector",
    prepared_by="detection.commands.convert",
    trials="num_trials",
    labels="KSCL",
    longer="KSCL.LONGER",
)
class Detection(Task):
    """Fine-tune and score a detector; the state between two steps is Detectron2's trainer."""

    cost_stage = "detection"
    hub_task = "object-detection"
    metrics = (
        Metric("AP50", "AP50", unranked_below=LEAST_AP50, working_from=WORKING_AP50),
        Metric("AP", "AP", headline=True),
        *(Metric(name, name) for name in ("AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100")),
        *(Metric(f"mask/{name}", f"mask {name}") for name in ("AP50", "AP", "AP75")),
    )
    may_change = WITHOUT_EFFECT
    workers_key = "DATALOADER.NUM_WORKERS"
    what_ranks_change = (
        "The batch size stays the same, but images, views and BatchNorm statistics differ, since "
        "each process forms its own batches and draws its own views."
    )
    model: nn.Module
    trainer: SimpleTrainer
    dicts: list[dict[str, Any]]  # the training images
    start: int = 0  # iterations done before this start
    seconds_of_evaluations: float = 0.0  # during training, over all restarts

    def __init__(
        self,
        cfg: CfgNode,
        sets: RunSets,
        certificate: Certificate | None = None,  # None: from scratch
        scaled_from: int = 0,  # processes that the protocol was scaled from; 0 if it was not
        lr_search: dict[str, Any] | None = None,  # the result of a learning-rate search
    ) -> None:
        super().__init__(cfg)
        self.sets = replace(sets.labeled(cfg), bad_images=dict(sets.bad_images))
        self.certificate, self.scaled_from, self.lr_search = certificate, scaled_from, lr_search
        self.schedule = schedule(cfg)
        if cfg.SOLVER.REFERENCE_WORLD_SIZE:
            self.hints = {BATCH_KEY: SCALED, WORLD_SIZE: ""}

    def open(self) -> Inputs:
        weights = {"weights": self.certificate.weights_sha256} if self.certificate else {}
        return Inputs(self.sets.fingerprints, weights, {CLASSES: list(self.sets.class_names)})

    def name_of(self, role: str) -> str:
        keys = {role: f"DATASETS.{role.upper()}" for role in self.sets.fingerprints}
        keys["weights"] = "MODEL.WEIGHTS"
        return f"{keys[role]} {value_at(self.cfg, keys[role])}" if role in keys else role

    def recorded(self, record: Record) -> dict[str, Any]:
        return {**super().recorded(record), CLASSES: record.details.get(CLASSES)}

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn NaN and a full GPU into errors with a fix."""
        cfg = self.cfg
        with super().explained():
            try:
                yield
            except FloatingPointError as error:
                raise KsclError(
                    f"{error}\nTraining diverged. {_naive_norm_advice(cfg)}Lower "
                    f"SOLVER.BASE_LR (now {cfg.SOLVER.BASE_LR:g}) or raise SOLVER.WARMUP_ITERS "
                    f"(now {cfg.SOLVER.WARMUP_ITERS}), and start in a new OUTPUT_DIR."
                ) from error
            except torch.cuda.OutOfMemoryError as error:
                raise KsclError(_memory_advice(cfg, self.scaled_from, error)) from error

    def prepare(self, saved: Mapping[str, Any]) -> None:
        """Build model, optimizer and hooks, the same on every rank and in every restart."""
        cfg = self.cfg
        log_to(None)
        set_numerics(tf32=cfg.KSCL.TF32, cudnn_benchmark=cfg.CUDNN_BENCHMARK)
        self.dicts = self.sets.train_dicts(cfg)
        seed_everything(cfg.SEED, "model")
        self.model = build_detector(cfg)
        parallel = _parallel(self.model)
        optimizer = build_optimizer(cfg, self.model)
        trainer_type = AMPTrainer if cfg.SOLVER.AMP.ENABLED else SimpleTrainer
        self.trainer = trainer_type(parallel, None, optimizer)
        is_exact = cfg.TEST.PRECISE_BN.ENABLED and bool(get_bn_modules(parallel))
        self.trainer.register_hooks(
            [
                # Proposals and RoIs are drawn by step number, so a restart draws the same.
                hooks.CallbackHook(
                    before_step=lambda trainer: seed_everything(
                        cfg.SEED, "step", trainer.iter, comm.get_rank()
                    )
                ),
                hooks.IterationTimer(),
                hooks.LRScheduler(
                    optimizer, build_lr_scheduler(CfgNode({"SOLVER": self.schedule}), optimizer)
                ),
                *([self.exact_statistics()] if is_exact else []),
                hooks.CallbackHook(after_step=lambda _: self.evaluate_on_the_way(is_exact)),
            ]
        )
        if saved:
            self.restore(saved)
        elif cfg.MODEL.WEIGHTS:
            load_weights(self.model, cfg.MODEL.WEIGHTS)
        on_first_rank(lambda: check_room_for(cfg, self.model))

    def exact_statistics(self) -> hooks.PreciseBN:
        """Return Detectron2's hook that recomputes BatchNorm statistics at the end.

        It has its own order of images. It draws from the last iteration's random streams, so a stop
        within it repeats that iteration.
        """
        cfg, bad_images = self.cfg, self.sets.bad_images
        loader = build_train_loader(cfg, self.dicts, cfg.SEED + 1, 0, bad_images=bad_images)
        batches = _UntilStopped(self, loader, fewest=cfg.TEST.PRECISE_BN.NUM_ITER)
        return hooks.PreciseBN(0, self.trainer.model, batches, cfg.TEST.PRECISE_BN.NUM_ITER)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Put a checkpoint into model and trainer."""
        try:
            self.model.load_state_dict(saved["model"], strict=True)
            self.trainer.load_state_dict(saved["trainer"])
            by_rank = saved[ATTRIBUTES]
            self.set_attributes(by_rank[comm.get_rank() % len(by_rank)])  # there may be more ranks
            self.sets.bad_images.update(saved["bad_images"])
            self.seconds_of_evaluations = saved[EVALUATIONS]
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise KsclError(
                f"{self.run.resumed_from} is not a checkpoint of this detector: {error}. Delete it "
                "to resume from the previous one, or choose another OUTPUT_DIR."
            ) from error
        self.start = self.trainer.iter + 1

    def steps(self) -> Iterator[int]:
        """Train to the last iteration, as Detectron2's `TrainerBase.train` does."""
        cfg, trainer, last = self.cfg, self.trainer, self.schedule.MAX_ITER
        log_to(self.folder)
        log.info("Training starts at iteration %d of %d.", self.start, last)
        if self.start == last:
            return
        if comm.is_main_process():
            forget_metrics_after(self.folder, self.start - 1)
            trainer.register_hooks([_Writer(self)])
        trainer.data_loader = build_train_loader(
            *(cfg, self.dicts, cfg.SEED, cfg.DATALOADER.NUM_WORKERS),
            start=self.start,
            bad_images=self.sets.bad_images,
        )
        trainer.start_iter = trainer.iter = self.start
        trainer.max_iter = last
        with EventStorage(self.start) as trainer.storage:
            try:
                trainer.before_train()
                for iteration in range(self.start, last):
                    trainer.iter = iteration
                    trainer.before_step()
                    trainer.run_step()
                    trainer.after_step()
                    yield iteration + 1
                trainer.iter += 1
            finally:
                trainer.after_train()

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due: periodically, and before and after long work.

        A stop during PreciseBN (in the last iteration) or an evaluation resumes from the iteration
        before.
        """
        last, period = self.schedule.MAX_ITER, self.cfg.SOLVER.CHECKPOINT_PERIOD
        by_period = period > 0 and step % period == 0
        return by_period or step in (last - 1, last) or self.is_evaluated(step + 1)

    def is_evaluated(self, step: int) -> bool:
        """Return whether the detector is scored after this step, before the end."""
        period = self.cfg.TEST.EVAL_PERIOD
        return period > 0 and step % period == 0 and step < self.schedule.MAX_ITER

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training; raise an error if a weight is not finite."""
        attributes = comm.gather(self.attributes())
        if not comm.is_main_process():
            return {}
        for name, value in self.model.named_parameters():
            if not value.isfinite().all():
                done = self.trainer.iter + 1
                raise FloatingPointError(f"{name} is NaN or infinite after iteration {done}.")
        return {
            "model": self.model.state_dict(),
            "trainer": self.trainer.state_dict(),
            "bad_images": self.sets.bad_images,
            EVALUATIONS: self.seconds_of_evaluations,
            ATTRIBUTES: attributes,
        }

    def attributes(self) -> dict[str, Any]:
        """Return what training changes besides parameters and buffers, on this rank."""
        names = META_ARCHITECTURES[self.cfg.MODEL.META_ARCHITECTURE].attributes
        return {name: getattr(self.model, name) for name in names if hasattr(self.model, name)}

    def set_attributes(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self.model, name, value)

    def finish(self) -> None:
        """Write the detector, its detections and scores, and last the record."""
        _share_buffers(self.model)
        trained = self.run.seconds - self.seconds_of_evaluations
        bad_images = comm.gather(self.sets.bad_images)
        detector = on_first_rank(lambda: export_detector(self.folder, self.model))
        scores = self.evaluate()
        if comm.is_main_process():
            details = {
                "n_train": self.sets.num_train,
                "scaled_from_processes": self.scaled_from,
                "bad_images": {name: why for found in bad_images for name, why in found.items()},
            }
            if self.cfg.KSCL.FRACTION < 1:
                details["draw"] = draw_of(self.cfg.KSCL, self.cfg.SEED)
            if self.lr_search is not None:
                details["lr_search"] = self.lr_search
            how = (self.run.world_sizes, trained, self.run.seconds)
            self.write_record(scores, detector, *how, details)
        wait_for_all()  # not in a collective of the GPUs: scoring may take long

    def write_record(
        self,
        scores: dict[str, ScorerResult],
        detector: str,
        parts: list[list[int]],
        seconds_of_training: float,
        seconds: float,
        details: dict[str, Any],
        name: str = "",
        iterations: int = 0,
    ) -> None:
        """Write record.json into OUTPUT_DIR; the folder's name is the default of `name`.

        `detector` is the hash of its file, `parts` are the [first iteration, processes] of its
        training, and `iterations` are those of a training that has not ended.
        """
        cfg, certificate = self.cfg, self.certificate
        headline, per_class = scores[cfg.KSCL.SCORER], per_class_numbers(scores)
        metrics = metrics_of(scores, cfg.KSCL.SCORER)
        remarks = [
            f"The class '{name}' is hardly ever found (AP50 below {RARELY_FOUND:g}). Train longer, "
            "or annotate more of its objects."
            for name, row in headline["per_class"].items()
            if row["AP50"] < RARELY_FOUND
        ]
        if metrics["AP50"] < LEAST_AP50:
            what = f"AP50 is {metrics['AP50']:.1f}, too low to compare."
            remarks = [f"{what} Train longer or on more images."]
        details = {
            CLASSES: list(self.sets.class_names),
            "seconds_of_training": round(seconds_of_training, 1),
            "processes": parts[-1][1],
            WORLD_SIZES: parts,
            DETECTOR_HASH: detector,
            **details,
            **({"warnings": remarks} if remarks else {}),
            "backbone": _backbone(cfg, certificate),
            **({LONGER: cfg.KSCL.LONGER} if cfg.KSCL.LONGER > 1 else {}),
            "scorer": cfg.KSCL.SCORER,
            "pictures": MOSAIC_FILE,
            "per_class": per_class[cfg.KSCL.SCORER],
            "per_class_by_scorer": per_class,
            "absent_classes": headline["absent_classes"],
            "curves": headline["curves"],
            "resampled_AP": headline["resampled_AP"],
        }
        inputs: dict[str, str] = {}
        if certificate is not None:
            inputs = {"weights": certificate.weights_sha256, "backbone": certificate.source_sha256}
            details["certificate"] = certificate.as_dict()
        record = make_record(
            kind=self.kind,
            task=self.info(),
            name=name or self.folder.name,
            protocol=protocol_of(cfg, [processes for _, processes in parts], iterations),
            metrics=metrics,
            seconds=seconds,
            seed=cfg.SEED,
            cfg=cfg,
            data=self.inputs.data,
            inputs=inputs,
            details=details,
            without_effect=WITHOUT_EFFECT,
            modules=self.modules(),
        )
        write_record(record, self.folder)

    def evaluate(self) -> dict[str, ScorerResult]:
        """Run and score the test set and save both; return {} on ranks other than 0."""
        scores, _ = self.infer(self.folder)
        if comm.is_main_process():
            write_atomically(self.folder / SCORES_FILE, json.dumps(scores, indent=1).encode())
            draw_mosaic(self.folder, self.sets.test[1].images)
        return scores

    def infer(self, folder: Path | None) -> tuple[dict[str, ScorerResult], dict[str, float]]:
        """Return the scores on the test set, and the numbers by Detectron2's names."""
        scorers = scorers_for(self.cfg.MODEL.MASK_ON, self.cfg.KSCL.SCORER)
        evaluator = SavedPassEvaluator(self.sets.ground_truth, folder, scorers)
        dicts = self.sets.test_dicts()
        fewest = len(dicts) // comm.get_world_size()
        images = _UntilStopped(self, build_test_loader(self.cfg, dicts), fewest)
        numbers = inference_on_dataset(self.model, images, evaluator)
        return evaluator.scores, numbers

    def evaluate_on_the_way(self, is_exact: bool) -> None:
        """Score the detector every TEST.EVAL_PERIOD iterations, as if training ended there.

        Training is unaffected: buffers and attributes are restored, and every step seeds its own
        random streams.
        """
        done, model = self.trainer.iter + 1, self.model
        if not self.is_evaluated(done):
            return
        began = time.monotonic()
        buffers = [buffer.clone() for buffer in model.buffers()]
        attributes = self.attributes()
        try:
            seed_everything(self.cfg.SEED, "evaluation", done, comm.get_rank())
            if is_exact:
                self.exact_statistics().update_stats()
            _share_buffers(model)
            log.info("Evaluation after iteration %d of %d:", done, self.schedule.MAX_ITER)
            _, numbers = self.infer(None)  # {} on ranks other than 0
        finally:
            with torch.no_grad():
                for buffer, before in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
            self.set_attributes(attributes)
        self.trainer.storage.put_scalars(**numbers, smoothing_hint=False)
        wait_for_all()  # not in a collective of the GPUs: rank 0 scores alone
        self.seconds_of_evaluations += time.monotonic() - began


class _UntilStopped:
    """The batches of a rank until the run is asked to stop; each rank has at least `fewest`."""

    def __init__(self, task: Detection, loader: Any, fewest: int) -> None:
        self.task, self.loader, self.fewest = task, loader, fewest

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.loader):
            if number < self.fewest:  # all ranks vote equally often
                self.task.run.leave_if_stopped()
            yield batch


class _Writer(hooks.PeriodicWriter):
    """Write metrics every LINES_EVERY iterations and after an evaluation; print the first too."""

    def __init__(self, task: Detection) -> None:
        self.task, self.iterations = task, task.schedule.MAX_ITER
        super().__init__(default_writers(task.cfg.OUTPUT_DIR, self.iterations), LINES_EVERY)

    def after_step(self) -> None:
        if self.trainer.iter == self.trainer.start_iter:
            CommonMetricPrinter(self.iterations).write()
        super().after_step()
        done = self.trainer.iter + 1
        # Writers take the latest numbers; the next evaluation would replace these.
        if done % LINES_EVERY and self.task.is_evaluated(done):
            for writer in self._writers:
                writer.write()


def run_trial(job: tuple[CfgNode, dict[str, Any], Flags]) -> int:
    """Do this rank's part of a run; the job has the config, arguments of `Detection`, and flags."""
    import_modules()  # in a process that was spawned
    cfg, shared, flags = job
    with local_ranks():
        return run(Detection(cfg, **shared), flags)


def score_detector(job: tuple[CfgNode, RunSets, Path, Training | None]) -> int:
    """Evaluate a trained detector on all ranks and write its record; return the exit code.

    A detector outside of a run's folder gets no record.
    """
    import_modules()
    cfg, sets, path, training = job
    task = Detection(cfg, sets, training.certificate if training else None)
    with task.explained(), contextlib.ExitStack() as held, stop_requests() as stop:

        def acquire() -> None:
            held.enter_context(only_run_in(task.folder))
            refuse_run_folder(task.folder)

        on_first_rank(acquire)
        held.enter_context(local_ranks())
        log_to(None)
        set_numerics(tf32=cfg.KSCL.TF32, cudnn_benchmark=cfg.CUDNN_BENCHMARK)
        task.run = Run(task, stop)
        task.model = build_detector(cfg)
        load_detector(task.model, path)
        try:
            scores = task.evaluate()
        except Stopped:
            return stop.exit_code
        if not comm.is_main_process():
            return 0
        if training is None:
            log.info("No record is written: %s is not in the folder of a run.", path)
            return 0
        task.inputs = task.open()
        if task.inputs.data["train"]["hash"] != training.data["hash"]:  # changed since training
            task.inputs.data = {**task.inputs.data, "train": dict(training.data)}
        task.write_record(
            *(scores, sha256_of(path), training.parts, training.seconds),
            seconds=training.seconds + task.run.seconds,
            details={"evaluated": path.name},
            name=training.run.name,
            iterations=training.iterations,
        )
    return 0


def _backbone(cfg: CfgNode, certificate: Certificate | None) -> dict[str, Any]:
    """Describe the backbone for readers; the leaderboard groups by it."""
    if certificate is not None:
        found = certificate.backbone
        if cfg.KSCL.LABEL and found.get("method") in (None, RANDOM):
            found["method"] = cfg.KSCL.LABEL
        with torch.device("meta"):  # structure only
            backbone = build_backbone(certificate.arch, certificate.arch_kwargs)
        return found | {"parameters": sum(p.numel() for p in backbone.parameters())}
    if cfg.KSCL.TIMM.NAME:
        arch, kwargs = cfg.KSCL.TIMM.NAME, plain(cfg.KSCL.TIMM.KWARGS)
    else:
        kwargs = {key.rpartition(".")[2].lower(): value_at(cfg, key) for key in OF_RESNETS}
        arch = f"resnet{kwargs.pop('depth')}"
    return {"method": "from scratch", "arch": arch, "kwargs": kwargs}


def _naive_norm_advice(cfg: CfgNode) -> str:
    """Return advice about Detectron2's norm whose variance may be negative, if it is used."""
    naive = [key for key in NORM_KEYS if value_at(cfg, key).startswith("naiveSyncBN")]
    if not naive or comm.get_world_size() == 1:  # on one process it is a plain BatchNorm
        return ""
    return (
        f"{' and '.join(naive)} is {value_at(cfg, naive[0])}, whose variance over several "
        "processes can be rounded below 0 if a channel hardly varies, as with few or small images: "
        "use larger images (INPUT.MIN_SIZE_TRAIN), more of them per process (SOLVER.IMS_PER_BATCH) "
        "or another norm (SyncBN on GPUs, BN elsewhere). If that is not the cause: "
    )


def _memory_advice(cfg: CfgNode, scaled_from: int, error: Exception) -> str:
    """Return how to train with fewer or smaller images on a GPU.

    With SOLVER.REFERENCE_WORLD_SIZE, each process has SOLVER.IMS_PER_BATCH divided by it, on any
    number of processes.
    """
    processes = comm.get_world_size()
    images, reference = cfg.SOLVER.IMS_PER_BATCH // processes, scaled_from or processes
    fix = "Use smaller images (INPUT.MIN_SIZE_TRAIN, and _TEST to score)."
    if images > 1:
        by = 2 if images % 2 == 0 else images
        fix = (
            "Use more GPUs, or keep SOLVER.IMS_PER_BATCH and set SOLVER.REFERENCE_WORLD_SIZE "
            f"{by * reference}: batch and learning rate are then divided by {by}, and the schedule "
            f"is {by} times as long, which is another protocol."
        )
    return (
        f"The GPU ran out of memory with {images} image{'s' * (images != 1)} of up to "
        f"{max(cfg.INPUT.MIN_SIZE_TRAIN)} pixels. {fix} ({error})"
    )


def forget_metrics_after(folder: Path, iteration: int) -> None:
    """Drop the lines that an interrupted run wrote after its checkpoint."""
    path = folder / "metrics.json"
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # an incomplete line
            if json.loads(line)["iteration"] <= iteration:
                kept.append(f"{line}\n")
    write_atomically(path, "".join(kept).encode())


def log_to(folder: Path | None) -> None:
    """Send Detectron2's log to the console and this folder only."""
    setup_logger.cache_clear()
    for name in ("fvcore", "detectron2", "detection"):
        logging.getLogger(name).handlers.clear()
        output = None if folder is None else str(folder)
        setup_logger(output, distributed_rank=comm.get_rank(), name=name)


@contextlib.contextmanager
def local_ranks() -> Iterator[None]:
    """Tell Detectron2 the ranks of this machine, and forget them at the end."""
    if comm.get_world_size() == 1:
        yield
        return
    comm.create_local_process_group(local_world_size())
    try:
        yield
    finally:  # a later trial of this process would use a group that has ended
        comm.create_local_process_group.cache_clear()
        comm._get_global_gloo_group.cache_clear()
        comm._LOCAL_PROCESS_GROUP = None


def _parallel(model: nn.Module) -> nn.Module:
    if comm.get_world_size() == 1:
        return model
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else None
    with warnings.catch_warnings():
        # torch's recommended argument would still send all buffers once.
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
        return DistributedDataParallel(model, device_ids=devices, broadcast_buffers=False)


def _share_buffers(model: nn.Module) -> None:
    """Give all ranks the BatchNorm statistics of rank 0, which are saved."""
    if comm.get_world_size() == 1:
        return
    with torch.no_grad():
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
