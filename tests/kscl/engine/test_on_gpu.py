"""Training on a GPU, which is pretended where there is none: devices, resume, and what it costs.

`make test-gpu` runs the same cases on a real one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kscl.engine.loop import state_dict
from kscl.errors import KsclError
from kscl.methods.encoder import Encoder
from kscl.run.checkpoint import find_checkpoints, save_checkpoint
from kscl.runtime.distributed import Shuffle
from tests.helpers.gpu.tensor import METER
from tests.helpers.gpu.training import (
    CPU,
    K5,
    PRETENDED,
    RANKS,
    REAL,
    STEPS,
    TOLERANCE,
    gpu,
    on_host,
    train,
)
from tests.helpers.runs import same_bits

pytestmark = pytest.mark.full

SHARED = ["KEY_ENCODER.TYPE", "shared", "METHOD.GRAD_THROUGH_KEYS", True]
MINIBATCH = ["DICTIONARY.TYPE", "minibatch"]
BANK = ["DICTIONARY.TYPE", "memory_bank"]
GROUPS = ["KEY_ENCODER.BATCH_NORM_GROUPS", 2, "SOLVER.BATCH_SIZE", 32]
COSINE = ["METHOD.NUM_SHOTS", 1, "METHOD.SIMILARITY", "cosine"]
# Settings, and the most host synchronizations and collectives per step: with one GPU, with eight.
# A memory bank asks which images of a batch are the same.
CASES: dict[str, tuple[list[Any], tuple[int, int, int]]] = {
    "kscl": (K5, (1, 1, 5)),
    "kscl with fixed BatchNorm": ([*K5, "KEY_ENCODER.BATCH_NORM", "eval"], (1, 1, 3)),
    "kscl in groups of BatchNorm": ([*K5, *GROUPS], (1, 1, 5)),
    "moco": (COSINE, (0, 0, 5)),
    "simclr": (
        [*MINIBATCH, *COSINE, *SHARED, "METHOD.SYMMETRIC", True, "SOLVER.OPTIMIZER", "lars"],
        (0, 0, 5),
    ),
    "memory bank": ([*K5, *BANK, "DICTIONARY.BANK_MOMENTUM", 0.5], (3, 3, 5)),
    "remembered keys": ([*K5, "METHOD.REMEMBER", 2], (2, 2, 6)),
    "keys remembered by the host": (
        [*K5, "METHOD.REMEMBER", 2, "METHOD.REMEMBER_IN", "host"],
        (6, 6, 6),
    ),
    "several queries of two sizes": (
        [*K5, "METHOD.NUM_QUERIES", 2, "VIEWS.SMALL.COUNT", 2, "VIEWS.SMALL.SIZE", 16],
        (1, 1, 5),
    ),
    "bf16, channels last, clipped": (
        [*K5, "SOLVER.AMP", "bf16", "SOLVER.CHANNELS_LAST", True, "SOLVER.CLIP_GRAD_NORM", 1.0],
        (1, 1, 5),
    ),
}
MORE: dict[str, tuple[list[Any], tuple[int, int, int]]] = {
    "minibatch": (MINIBATCH, (1, 1, 6)),
    "end to end": ([*MINIBATCH, *SHARED], (1, 1, 6)),
    "mean of the keys": (["METHOD.SIMILARITY", "mean_cosine"], (0, 0, 5)),
    "everything kept": ([*K5[:2], "METHOD.RHO", 1.0], (1, 1, 5)),
    "accumulated": ([*K5, "SOLVER.GRAD_ACCUM_STEPS", 2, "SOLVER.BATCH_SIZE", 32], (2, 2, 9)),
    "adamw": ([*K5, "SOLVER.OPTIMIZER", "adamw"], (1, 1, 5)),
    "normalized in the workers": ([*K5, "DATA.NORMALIZE_ON_DEVICE", False], (1, 1, 5)),
    "moco in a bank": ([*BANK, *COSINE], (1, 1, 5)),
    # Without BatchNorm all keys go in one pass, whose layers would be dropped by other draws.
    "transformer": (
        [*K5, "BACKBONE.NAME", "test_vit", "BACKBONE.KWARGS.drop_path_rate", 0, "INPUT.SIZE", 160],
        (1, 1, 3),
    ),
    "fp16": ([*K5, "SOLVER.AMP", "fp16"], (2, 2, 5)),  # its scaler asks whether to step
}


def check(case: str, words: list[Any], most: tuple[int, int, int], folder: Path) -> None:
    """Train on a GPU: the metrics are the CPU's, a resumed run ends in the same bits, at this cost.

    On several ranks the data is the same on each, so there is no other number to compare.
    """
    expected = {} if case == "fp16" else train(words, folder / "cpu", CPU)[2]
    with gpu() as device:
        trained, loader, metrics = train(words, folder / "gpu", device)
        resumed, _, _ = train(words, folder / "gpu", device, resume=True)
        ends = [on_host(each.method.state_dict()) for each in (trained, resumed)]
    assert same_bits(*ends)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=TOLERANCE)
    assert sum(loader.syncs.values()) <= most[0], loader.told
    if not REAL:
        with gpu(RANKS) as device:
            _, loader, _ = train(words, folder / "ranks", device, RANKS)
        assert sum(loader.syncs.values()) <= most[1], loader.told
        assert sum(loader.collectives.values()) <= most[2], loader.told


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_trains_as_the_cpu_does_and_waits_for_no_more_than_it_must(case, tmp_path):
    check(case, *CASES[case], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_every_other_setting_trains_on_a_gpu_too(case, tmp_path):
    check(case, *MORE[case], tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("case", {**CASES, **MORE})
def test_a_real_gpu_trains_as_the_cpu_does(case, tmp_path):
    check(case, *{**CASES, **MORE}[case], tmp_path)


@pytest.mark.parametrize("similarity", ["projection", "mean_cosine"])
def test_nan_on_a_gpu_is_found_a_step_later_and_before_a_checkpoint(similarity, tmp_path):
    words = ["METHOD.SIMILARITY", similarity]
    with (
        gpu() as device,
        pytest.raises(KsclError, match=r"step \d+ .*NaN or infinity .* step 1 in"),
    ):
        train([*words, "SOLVER.BASE_LR", 1e30], tmp_path, device)
    assert not find_checkpoints(tmp_path)


@PRETENDED
def test_keys_with_fixed_batch_norm_take_one_pass_of_their_encoder(tmp_path):
    passes: list[int] = []
    encode = Encoder.forward

    def counted(encoder: Encoder, images: torch.Tensor) -> torch.Tensor:
        if not encoder.training:
            passes.append(len(images))
        return encode(encoder, images)

    with gpu() as device, patch.object(Encoder, "forward", counted):
        train(CASES["kscl with fixed BatchNorm"][0], tmp_path, device)
    assert passes == [5 * 16] * STEPS  # K keys of 16 images at once


@PRETENDED
def test_shuffled_views_travel_as_bytes_and_only_where_they_are_needed(tmp_path):
    with gpu(RANKS) as device:
        views = torch.zeros(32, 5, 3, 8, 8, dtype=torch.uint8, device=device)
        METER.reset()
        Shuffle(views, 0).encode(lambda images: images.flatten(1)[:, :4].float())
        images, embeddings = 32 * 5 * 3 * 8 * 8, 32 * 5 * 4 * 4
        assert METER.received.total() == images + embeddings
    assert 256 // RANKS * 5 * 3 * 224 * 224 < 25e6  # so many at 224 pixels, 256 images and K = 5


@PRETENDED
def test_a_report_waits_once_and_a_checkpoint_twice_beside_its_copies(tmp_path):
    with gpu() as device:
        trained, _, _ = train(K5, tmp_path, device)
        trained.window.add({f"metric {n}": torch.ones((), device=device) for n in range(12)})
        METER.reset()
        trained.window.over_ranks()
        assert METER.syncs.total() == 1, METER.told()
        METER.reset()
        save_checkpoint(tmp_path, trained.step, state_dict(trained), 1)
        waits = {what: n for what, n in METER.syncs.items() if what[0] != "torch.save"}
        assert sum(waits.values()) == 2, METER.told()  # the metrics, and whether weights are finite
