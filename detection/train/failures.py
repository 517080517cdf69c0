"""Failures of a training that a user can fix, explained in one message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from detectron2.config import CfgNode
from detectron2.utils import comm

from detection.errors import DetectionError
from kscl.engine.checkpoint import DISK_FULL
from kscl.errors import KsclError

OUT_OF_SHARED_MEMORY = ("shared memory", "Bus error", "No space left on device", "/torch_")
WORKER_ENDED = "DataLoader worker"


@contextlib.contextmanager
def explained(cfg: CfgNode) -> Iterator[None]:
    """Turn a NaN, full memory, a full disk or a lost worker into an error with its fix."""
    try:
        yield
    except KsclError:
        raise
    except FloatingPointError as error:
        raise DetectionError(
            f"{error}\nThe loss is not a number any more. Lower SOLVER.BASE_LR (now "
            f"{cfg.SOLVER.BASE_LR:g}) or raise SOLVER.WARMUP_ITERS (now "
            f"{cfg.SOLVER.WARMUP_ITERS}), and start in a new OUTPUT_DIR."
        ) from error
    except torch.cuda.OutOfMemoryError as error:
        raise DetectionError(
            f"The GPU's memory is full with {cfg.SOLVER.IMS_PER_BATCH // comm.get_world_size()} "
            f"images of up to {max(cfg.INPUT.MIN_SIZE_TRAIN)} pixels on it. Use more GPUs, or a "
            "smaller SOLVER.IMS_PER_BATCH with SOLVER.REFERENCE_WORLD_SIZE set, so that the "
            f"learning rate follows. ({error})"
        ) from error
    except RuntimeError as error:
        reason = _loader_failure(str(error), cfg.DATALOADER.NUM_WORKERS)
        if reason is None:
            raise
        raise DetectionError(reason) from error
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        where = error.filename or cfg.OUTPUT_DIR
        raise DetectionError(
            f"{where} cannot be written: {error.strerror}. Free some space and resume with "
            "--resume, or choose another OUTPUT_DIR."
        ) from error


def _loader_failure(text: str, workers: int) -> str | None:
    """Return what to tell the user if an error is that of a lost loader worker, else None."""
    fix = f"lower DATALOADER.NUM_WORKERS (now {workers}; 0 needs no workers)"
    first_line = text.strip().split("\n")[0]
    if any(mark in text for mark in OUT_OF_SHARED_MEMORY):
        return (
            f"The shared memory of the loader workers is full ({first_line}). Enlarge /dev/shm, or "
            f"{fix}, and resume with --resume."
        )
    if WORKER_ENDED in text:
        return (
            f"A loader worker was lost ({first_line}). If nobody ended it, memory ran out: {fix}, "
            "and resume with --resume."
        )
    return None
