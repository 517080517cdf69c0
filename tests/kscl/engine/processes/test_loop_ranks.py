"""One rank and two: the same images and the same losses; and the loss in half precision."""

from __future__ import annotations

import json

import pytest
import torch

from kscl.data.loader import build_train_loader
from kscl.data.open import open_source
from kscl.engine.metrics_log import METRICS_FILE
from tests.helpers.runs import Run
from tests.kscl.engine.test_loop import WITHOUT_BATCH_NORM, config

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_thread")]


def test_one_rank_and_two_see_the_same_images_in_the_same_order(images, tmp_path):
    cfg = config(tmp_path, "DATA.TRAIN", images)
    source = open_source(str(images))
    one = build_train_loader(cfg, source, first_step=4, last_step=9)
    two = [
        build_train_loader(cfg, source, first_step=4, last_step=9, rank=rank, world_size=2)
        for rank in (0, 1)
    ]
    for whole, *halves in zip(one, *two, strict=True):
        assert torch.equal(whole.instances, torch.cat([half.instances for half in halves]))
        assert torch.equal(whole.views, torch.cat([half.views for half in halves]))


def losses_in(run):
    return [json.loads(line)["loss"] for line in (run.folder / METRICS_FILE).open()]


@pytest.mark.parametrize("similarity", ["projection", "mean_cosine"])
def test_one_rank_and_two_have_the_same_losses(images, tmp_path, similarity):
    words = [*WITHOUT_BATCH_NORM, "BACKBONE.KWARGS.drop_path_rate", 0, "LOG.PERIOD", 1]
    words += ["METHOD.SIMILARITY", similarity, "SOLVER.EPOCHS", 2]
    runs = [Run(tmp_path / f"{ranks}", images, *words, ranks=ranks) for ranks in (1, 2)]
    for run in runs:
        run.finish()
    one, two = map(losses_in, runs)
    assert len(one) == 12
    assert two == pytest.approx(one, rel=1e-4)


def test_bf16_gives_the_same_loss_within_its_precision(images, tmp_path):
    words = [*WITHOUT_BATCH_NORM, "LOG.PERIOD", 1, "SOLVER.EPOCHS", 1]
    runs = [Run(tmp_path / amp, images, *words, "SOLVER.AMP", amp) for amp in ("off", "bf16")]
    for run in runs:
        run.finish()
    plain, half = map(losses_in, runs)
    assert half == pytest.approx(plain, rel=0.02)
    assert half != plain
