"""Small detection runs in real processes that can really be killed.

The processes are forked from a server that has imported everything, so that one starts in a
fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

context = multiprocessing.get_context("forkserver")
PATIENCE = 280  # seconds

# One narrow network and few small RoIs: what is tested is the way, not the numbers.
SMALL = (
    *("MODEL.ROI_HEADS.NUM_CLASSES", "2", "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", "8"),
    *("MODEL.RPN.POST_NMS_TOPK_TRAIN", "20", "MODEL.RPN.POST_NMS_TOPK_TEST", "20"),
    *("INPUT.MIN_SIZE_TRAIN", "(64, 80)", "INPUT.MIN_SIZE_TEST", "64"),
    *("SOLVER.IMS_PER_BATCH", "2", "SOLVER.MAX_ITER", "6", "SOLVER.STEPS", "(4,)"),
    *("SOLVER.CHECKPOINT_PERIOD", "1", "TEST.PRECISE_BN.NUM_ITER", "2"),
    *("DATALOADER.NUM_WORKERS", "0"),
)


def arguments(shop: Path, output: Path, *more: str, weights: object = 0) -> list[str]:
    """Return the words of train_net for the sets and the converted weights in `shop`."""
    voc = shop / "voc"
    sets = ["DATASETS.TRAIN", f"('voc:{voc}:train',)", "DATASETS.TEST", f"('voc:{voc}:test',)"]
    config = str(shop / f"weights{weights}" / "config.yaml")
    flags = [word for word in more if word.startswith("--")]
    rest = [word for word in more if not word.startswith("--")]
    return ["--config-file", config, *flags, *SMALL, *sets, "OUTPUT_DIR", str(output), *rest]


@dataclass
class TrainNet:
    """One process of train_net, its output in files beside its folder."""

    process: BaseProcess
    stdout_file: Path
    stderr_file: Path

    @property
    def stdout(self) -> str:
        return self.stdout_file.read_text()

    @property
    def stderr(self) -> str:
        return self.stderr_file.read_text()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> TrainNet:
        self.process.join(PATIENCE)
        self.process.kill()
        self.process.join()
        return self


def start_train_net(
    shop: Path,
    output: Path,
    *more: str,
    weights: object = 0,
    before: Callable[..., None] | None = None,
    told: Sequence[object] = (),
) -> TrainNet:
    """Start train_net; `before(*told)` runs first in its process."""
    context.set_forkserver_preload(["detection.commands.train_net", "torch.utils.tensorboard"])
    output.parent.mkdir(parents=True, exist_ok=True)
    files = [output.parent / f"{output.name}.{name}" for name in ("stdout", "stderr")]
    words = arguments(shop, output, *more, weights=weights)
    process = context.Process(target=_live, args=(words, files, before, tuple(told)))
    process.start()
    return TrainNet(process, *files)


def _live(
    words: list[str], files: list[Path], before: Callable[..., None] | None, told: tuple[object]
) -> None:
    from detection.commands.train_net import main

    for handle, path in zip((1, 2), files, strict=True):
        with path.open("w") as file:
            os.dup2(file.fileno(), handle)
    # Loader workers are forked, as in a process that the server has not made.
    multiprocessing.set_start_method("fork", force=True)
    os.setsid()  # a group of its own, which a test can signal as a whole
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    torch.set_num_threads(1)
    if before is not None:
        before(*told)
    sys.exit(main(words))
