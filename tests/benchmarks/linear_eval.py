"""Figures of the linear evaluation: the cached probe, its grid, and nearest neighbors."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier

from kscl.engine.knn import knn_predict
from kscl.run.engine import Run
from kscl.runtime.processes import StopRequest
from linear_eval.backbone import freeze
from linear_eval.images import open_data
from linear_eval.linear import Rows, epoch_batches, standardized, start_grid, train_grid
from linear_eval.probe import load_linear_eval_config, probe_of
from linear_eval.probes.cached import Cached
from linear_eval.probes.online import Online
from tests.benchmarks.harness import figure, seconds, time_ratio

CLASSES, DIM = 10, 512
IMAGES, VAL_IMAGES, EPOCHS = 20_000, 1_000, 100
CPU = torch.device("cpu")


def two_threads() -> None:
    """What the bounds were set for; figures before this one may have asked for fewer."""
    torch.set_num_threads(2)


def random_features(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten classes that overlap, so that neighbors disagree."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return centers[labels] + 4 * torch.randn(count, DIM, generator=generator), labels


@figure(
    "linear_eval_grid_of_16",
    "time of a 16-point grid over that of one point by the same code; 20k images x 2 views x 512, "
    "mapped from disk, 10 classes",
    at_most=3,
)
def grid_of_16() -> float:
    two_threads()
    with _mapped_rows(20_000, views=2) as rows:
        return time_ratio(lambda: _train(rows, 16), lambda: _train(rows, 1))


@figure(
    "linear_eval_grid_vs_torch",
    "the same grid over one point trained by nn.Linear, cross_entropy and torch.optim.SGD",
)
def grid_against_torch() -> float:
    two_threads()
    with _mapped_rows(20_000, views=2) as rows:
        return time_ratio(lambda: _train(rows, 16), lambda: _train_by_torch(rows))


def _train(rows: Rows, count: int) -> None:
    cfg = load_linear_eval_config("linear_eval/linear_cached.yaml", ["SOLVER.EPOCHS", "2"])
    points = Cached(cfg).points()
    assert len(points) == 16
    training = start_grid(count, CLASSES, DIM, 0.01, 0, CPU)
    list(train_grid(rows, points[:count], training, cfg.SOLVER, 0))


def _train_by_torch(rows: Rows) -> None:
    head = torch.nn.Linear(DIM, CLASSES)
    sgd = torch.optim.SGD(head.parameters(), 0.01, 0.9)
    for epoch in range(2):
        for places, labels in epoch_batches(rows, 256, 0, epoch, torch.device("cpu")):
            loss = torch.nn.functional.cross_entropy(head(rows.take(places)), labels)
            sgd.zero_grad()
            loss.backward()
            sgd.step()


@contextlib.contextmanager
def _mapped_rows(count: int, views: int) -> Iterator[Rows]:
    """As the cached probe finds its features."""
    features, labels = random_features(count * views, 1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "features.f32"
        file.write_bytes(features.numpy().tobytes())
        table = torch.from_numpy(np.memmap(file, np.float32, mode="c", shape=tuple(features.shape)))
        places = np.arange(count * views).reshape(views, count)
        yield standardized(Rows(table, places, labels[:count]))


@figure(
    "linear_eval_knn",
    "kNN of 10k in 50k x 512 features, scikit-learn's brute force over ours; equal predictions",
    at_least=2,
)
def knn() -> float:
    two_threads()
    train, labels = random_features(50_000, 2)
    test, _ = random_features(10_000, 3)
    theirs = KNeighborsClassifier(
        20,
        algorithm="brute",
        metric="cosine",
        weights=lambda distance: np.exp((1 - distance) / 0.07),
        n_jobs=torch.get_num_threads(),
    ).fit(train.numpy(), labels.numpy())
    found: dict[str, np.ndarray] = {}

    def ours_predict() -> None:
        found["ours"] = knn_predict(train, labels, test).numpy()

    def theirs_predict() -> None:
        found["theirs"] = theirs.predict(test.numpy())

    ratio = time_ratio(theirs_predict, ours_predict, rounds=3, warmup=0)
    assert np.array_equal(found["ours"], found["theirs"]), "the predictions differ"
    return ratio


@figure(
    "linear_eval_cached_probe",
    "imagenet-linear-moco (100 x one timed epoch) over linear-cached (2 views stored, 16 points, "
    "100 epochs); 20k images, 32 px, ResNet-18",
    at_least=30,
)
def cached_probe() -> float:
    two_threads()
    with _pictures() as folder:
        cfg = _config(folder, "linear_eval/linear_cached.yaml", folder / "cache")
        train, val = open_data(cfg)
        data = {"train": train, "val": val}
        frozen = freeze(cfg, train)
        online = _config(folder, "linear_eval/imagenet_linear_moco.yaml", folder / "cache")
        rounds = []
        for turn in range(3):
            fresh = _config(folder, "linear_eval/linear_cached.yaml", folder / f"cache{turn}")
            cached = seconds(lambda cfg=fresh: _cached_probe(cfg, frozen, data))
            epoch = seconds(lambda: _online_epoch(online, frozen, data))
            rounds.append(EPOCHS * epoch / cached)
        return sorted(rounds)[1]


def _cached_probe(cfg, frozen, data) -> None:  # type: ignore[no-untyped-def]
    probe = probe_of(cfg)
    probe.data, probe.frozen, probe.run = data, frozen, Run(probe, StopRequest())
    probe.resume({})
    list(probe.work())
    probe.outcomes()


def _online_epoch(cfg, frozen, data) -> None:  # type: ignore[no-untyped-def]
    probe = Online(cfg)
    probe.data, probe.frozen = data, frozen
    probe.start()
    for batch in itertools.islice(probe.batches(), probe.steps_per_epoch):
        probe.take_step(batch)


def _config(folder: Path, name: str, cache: Path):  # type: ignore[no-untyped-def]
    words = {
        "BACKBONE.WEIGHTS": "random",
        "BACKBONE.NAME": "resnet18",
        "BACKBONE.CALIBRATION_IMAGES": 64,
        "DATA.TRAIN": folder / "train",
        "DATA.VAL": folder / "val",
        "DATA.CACHE_DIR": cache,
        "DATA.NUM_WORKERS": 0,
        "INPUT.SIZE": 32,
        "INPUT.RESIZE": 36,
        "SOLVER.EPOCHS": EPOCHS,
    }
    return load_linear_eval_config(name, [str(word) for pair in words.items() for word in pair])


@contextlib.contextmanager
def _pictures() -> Iterator[Path]:
    """Class folders of noise: what is in a picture does not change the time it takes."""
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        for split, count in (("train", IMAGES), ("val", VAL_IMAGES)):
            for number in range(count):
                folder = Path(name) / split / f"class_{number % CLASSES}"
                folder.mkdir(parents=True, exist_ok=True)
                pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                picture = Image.fromarray(pixels).resize((40, 32))
                picture.save(folder / f"{number}.jpg")
        yield Path(name)
