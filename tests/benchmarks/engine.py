"""Figures of the engine: what a step costs beyond its encoders, and what a second rank gives."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fvcore.common.config import CfgNode

from kscl.data.loader import build_train_loader
from kscl.data.open import open_source
from kscl.engine.loop import TrainState, build_state, take_step, to_device, warm_up
from kscl.keys import load_config
from kscl.methods.kscl import KSCL
from kscl.runtime.distributed import rank, world_size
from kscl.runtime.machine import keep_freed_memory
from kscl.views.batch import Batch
from tests.benchmarks.harness import figure, time_ratio
from tests.helpers.runs import draw_images

CPU = torch.device("cpu")
ROUNDS = TURNS = 5
SMALL = ["BACKBONE.NAME", "resnet18", "INPUT.SIZE", 96, "SOLVER.BATCH_SIZE", 32]
MOCO = ["METHOD.SIMILARITY", "cosine"]
Place = tuple[str, int, int]  # the file of the store, rank, number of ranks


def config(*words: object) -> CfgNode:
    return load_config(None, ["SOLVER.CHANNELS_LAST", "True", *map(str, words)])


def preloaded(cfg: CfgNode) -> Batch:
    share = cfg.SOLVER.BATCH_SIZE // world_size()
    shape = (share, cfg.METHOD.NUM_SHOTS + 1, 3, cfg.INPUT.SIZE, cfg.INPUT.SIZE)
    generator = torch.Generator().manual_seed(rank())
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return Batch(pixels, torch.arange(share), [])


def all_threads() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    keep_freed_memory()


def new_training(cfg: CfgNode) -> TrainState:
    return build_state(cfg, num_images=10_000, steps_per_epoch=100, device=CPU)


@figure(
    "engine-overhead",
    "a K=5 step of ResNet-50 over its bare encoder passes",
    at_most=1.05,
    alone=True,
)
def step_over_bare_encoders() -> float:
    all_threads()
    cfg = config("INPUT.SIZE", 128, "SOLVER.BATCH_SIZE", 16)
    training, batch = new_training(cfg), preloaded(cfg)
    views = training.method.normalize(to_device(batch, cfg, CPU).views)
    encoder, key_encoder = training.method.encoder, training.method.key_encoder
    assert key_encoder is not None

    def bare() -> None:
        query = encoder(views[:, 0])
        with torch.no_grad():
            for view in views[:, 1:].unbind(1):
                key_encoder(view)
        query.sum().backward()
        encoder.zero_grad()

    return time_ratio(lambda: take_step(training, batch), bare, rounds=ROUNDS)


@figure(
    "engine-loader-overlap", "a step fed by one worker over one on preloaded tensors", alone=True
)
def fed_by_a_worker_over_preloaded() -> float:
    all_threads()
    with tempfile.TemporaryDirectory() as folder:
        images = draw_images(Path(folder) / "images", count=256, side=96)
        cfg = config(*SMALL, "DATA.TRAIN", images, "DATA.NUM_WORKERS", 1)
        training, batch = new_training(cfg), preloaded(cfg)
        batches: Iterator[Batch] = iter(
            build_train_loader(cfg, open_source(cfg.DATA.TRAIN), last_step=8 * ROUNDS)
        )

        def fed() -> None:
            take_step(training, next(batches))

        return time_ratio(fed, lambda: take_step(training, batch), rounds=ROUNDS)


def remembering_over_moco(similarity: str) -> float:
    """Return the time of a step with keys of four epochs over that of MoCo v2, both in full swing.

    The queues are full, and so are the rings of the batch's images.
    """
    all_threads()
    steps = []
    for words in (["METHOD.REMEMBER", 4, "METHOD.SIMILARITY", similarity], MOCO):
        cfg = config(*SMALL, "METHOD.NUM_SHOTS", 1, *words)
        training, batch = new_training(cfg), preloaded(cfg)
        method, length = training.method, cfg.DICTIONARY.QUEUE_LENGTH
        assert isinstance(method, KSCL)
        keys = F.normalize(torch.randn(length, 1 + cfg.METHOD.REMEMBER, cfg.PROJECTOR.DIM), dim=2)
        method.dictionary.store(method.similarity.fit(keys, cfg.METHOD.RHO), torch.arange(length))
        for _ in range(cfg.METHOD.REMEMBER):
            take_step(training, batch)
        steps.append(partial(take_step, training, batch))
    return time_ratio(*steps)


@figure(
    "engine-remembered-mean",
    "a step with the mean of this key and those of four epochs over MoCo v2's",
    at_most=1.1,
    alone=True,
)
def remembered_mean() -> float:
    return remembering_over_moco("mean_cosine")


@figure(
    "engine-remembered-projection",
    "a step with the subspace of this key and those of four epochs over MoCo v2's",
    at_most=1.1,
    alone=True,
)
def remembered_projection() -> float:
    return remembering_over_moco("projection")


@figure(
    "engine-two-ranks",
    "images/s of two gloo ranks over two processes that do not communicate, one thread each",
    at_least=0.95,
)
def two_ranks() -> float:
    return statistics.median(apart / pair for apart, pair in steps_of_two())


def steps_of_two() -> list[tuple[float, float]]:
    """Return the seconds of a step of two processes apart, and of two ranks that share a batch.

    The two pairs take turns in the same minutes, and every process has the same images per step.
    """
    with tempfile.TemporaryDirectory() as folder:
        places = {"apart": [("", 0, 1)] * 2, "pair": [(f"{folder}/store", n, 2) for n in (0, 1)]}
        with members(places) as pipes:
            for pipe in (*pipes["apart"], *pipes["pair"]):
                pipe.recv()  # ready
            return [
                (seconds_of_a_step(pipes["apart"]), seconds_of_a_step(pipes["pair"]))
                for _ in range(TURNS)
            ]


@contextmanager
def members(places: dict[str, list[Place]]) -> Iterator[dict[str, list[Connection]]]:
    """Start a process for each place and yield the pipes to them; none outlives the block."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, list[Connection]] = {name: [] for name in places}
    processes = []
    try:
        for name, places_of_group in places.items():
            for place in places_of_group:
                ours, theirs = context.Pipe()
                process = context.Process(target=steps_on_request, args=(place, theirs))
                process.start()
                theirs.close()  # so that a process that ends is noticed here
                pipes[name].append(ours)
                processes.append(process)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def seconds_of_a_step(pipes: list[Connection]) -> float:
    """Of the second of two: what others' turns have driven out of caches is back by then."""
    for _ in range(2):
        begun = time.perf_counter()
        for pipe in pipes:
            pipe.send("step")
        for pipe in pipes:
            pipe.recv()
    return time.perf_counter() - begun


def steps_on_request(place: Place, pipe: Connection) -> None:
    store, number, ranks = place
    torch.set_num_threads(1)
    keep_freed_memory()
    if ranks > 1:
        dist.init_process_group("gloo", f"file://{store}", rank=number, world_size=ranks)
    words = ["BACKBONE.NAME", "resnet18", "INPUT.SIZE", 96, "METHOD.NUM_SHOTS", 3]
    cfg = config(*words, "SOLVER.BATCH_SIZE", 64 * ranks)
    training, batch = new_training(cfg), preloaded(cfg)
    warm_up(training)
    take_step(training, batch)
    pipe.send("ready")
    while pipe.recv() == "step":
        take_step(training, batch)
        pipe.send("done")
