"""One step and many: options that must not change the loss, and what stops or warns of a run."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from kscl.engine.loop import (
    TrainState,
    Window,
    build_state,
    check_ranks,
    report,
    restore,
    seed_step,
    state_dict,
    take_step,
    to_device,
    warm_up,
)
from kscl.engine.metrics_log import METRICS_FILE, RunLog, means_of_last_epoch, thinned_curves
from kscl.engine.pretrain import check_room
from kscl.errors import KsclError
from kscl.keys import load_config
from kscl.run.checkpoint import save_checkpoint
from kscl.views.batch import Batch
from kscl.views.normalize import Normalize
from tests.helpers.runs import TINY, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")
# GroupNorm: what an image gives does not depend on its neighbors in the batch.
WITHOUT_BATCH_NORM = ["BACKBONE.NAME", "test_efficientnet_gn"]
CPU = torch.device("cpu")


def config(tmp_path, *words):
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    return load_config(file, [str(word) for word in words])


def new_state(tmp_path, *words) -> TrainState:
    cfg = config(tmp_path, "BACKBONE.KWARGS.drop_path_rate", 0, *words)
    return build_state(cfg, num_images=96, steps_per_epoch=6, device=CPU)


def batches(count, size=16, views=3):
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        shape = (size, views, 3, 32, 32)
        pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        yield Batch(pixels, torch.arange(size) + number * size, [])


def test_groups_that_processes_leave_too_small_are_refused(tmp_path):
    cfg = config(tmp_path, "KEY_ENCODER.BATCH_NORM_GROUPS", 4)  # of a batch of 16
    for ranks in (1, 2):
        check_ranks(cfg, ranks)
    with pytest.raises(KsclError, match=r"BATCH_NORM_GROUPS.* on 4 processes: the 4 images"):
        check_ranks(cfg, 4)


def losses_of(state: TrainState, steps: int = 4) -> list[float]:
    losses = []
    for batch in batches(steps):
        state.window = Window()
        take_step(state, batch)
        losses.append(float(state.window.sums["loss"]))
    return losses


@pytest.mark.parametrize(
    ("option", "tolerance"),
    [
        (["SOLVER.GRAD_ACCUM_STEPS", 4], 1e-5),
        (["SOLVER.CHANNELS_LAST", True], 1e-4),
        (["SOLVER.CLIP_GRAD_NORM", 1e6], 1e-6),
        (["DATA.NORMALIZE_ON_DEVICE", False], 1e-5),
    ],
)
def test_an_option_that_saves_time_or_memory_leaves_the_losses_as_they_are(
    tmp_path, option, tolerance
):
    plain = losses_of(new_state(tmp_path, *WITHOUT_BATCH_NORM))
    with_option = losses_of(new_state(tmp_path, *WITHOUT_BATCH_NORM, *option))
    assert with_option == pytest.approx(plain, rel=tolerance)
    assert len(set(plain)) == 4


def test_parts_of_a_batch_fill_the_queue_like_the_whole_batch(tmp_path):
    whole = new_state(tmp_path, *WITHOUT_BATCH_NORM)
    parts = new_state(tmp_path, *WITHOUT_BATCH_NORM, "SOLVER.GRAD_ACCUM_STEPS", 4)
    for batch in batches(2):
        take_step(whole, batch)
        take_step(parts, batch)
    one, other = whole.method.dictionary, parts.method.dictionary
    assert int(one.stored) == int(other.stored) == 32
    same = (one.slots[0, :32] * other.slots[0, :32]).sum(1).abs()  # (32,) cosines
    assert float(same.min()) > 0.999
    assert whole.step == parts.step == 2


def test_clipping_bounds_the_update(tmp_path):
    clipped = new_state(tmp_path, "SOLVER.CLIP_GRAD_NORM", 1e-3, "SOLVER.WEIGHT_DECAY", 0)
    first, second = batches(2)
    take_step(clipped, first)  # an empty queue gives no gradient
    weights = list(clipped.method.encoder.parameters())
    before = [weight.detach().clone() for weight in weights]
    take_step(clipped, second)
    moves = [(now - old).detach() for now, old in zip(weights, before, strict=True)]
    moved = float(torch.cat([move.flatten() for move in moves]).norm())
    rate = clipped.optimizer.param_groups[0]["lr"]
    assert moved == pytest.approx(rate * 1e-3, rel=0.05)


def test_steps_that_fp16_skips_are_counted_and_too_many_in_a_row_stop_the_run(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("kscl.engine.loop.MOST_SKIPS", 3)
    # Like all optimizers on a GPU, this one is not fused: the scaler itself skips its step.
    state = new_state(tmp_path, "SOLVER.OPTIMIZER", "lars")
    (first,) = batches(1)
    take_step(state, first)
    assert (state.skips.in_a_row, state.skips.since_report) == (0, 0)
    # The scaler of fp16 on a CPU, at a scale at which every gradient overflows.
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=0.99)
    weights = [weight.detach().clone() for weight in state.method.encoder.parameters()]
    take_step(state, first)
    assert same_bits(weights, [w.detach() for w in state.method.encoder.parameters()])
    with RunLog(tmp_path, state.step, 6, 6, 3) as run_log:
        report(state, run_log, waited=0.0)
    (row,) = map(json.loads, (tmp_path / METRICS_FILE).open())
    assert row["skipped_steps"] == 1
    assert row["loss_scale"] == pytest.approx(2.0**127 * 0.99)
    take_step(state, first)
    with pytest.raises(KsclError, match=r"3 steps in a row.*fp16.*SOLVER\.AMP"):
        take_step(state, first)


@pytest.mark.parametrize("channels_last", [False, True])
def test_views_reach_the_encoder_normalized_and_each_in_one_dense_block(tmp_path, channels_last):
    cfg = config(tmp_path, "SOLVER.CHANNELS_LAST", channels_last)
    batch = next(batches(1))
    pixels = batch.views
    views = Normalize(cfg.INPUT.MEAN, cfg.INPUT.STD)(to_device(batch, cfg, CPU).views)
    mean, std = torch.tensor(cfg.INPUT.MEAN), torch.tensor(cfg.INPUT.STD)
    expected = (pixels / 255 - mean[:, None, None]) / std[:, None, None]
    assert torch.allclose(views, expected, atol=1e-5)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert all(view.is_contiguous(memory_format=layout) for view in views.unbind(1))


def test_passes_over_noise_leave_no_trace(tmp_path):
    state = new_state(tmp_path, "KEY_ENCODER.BATCH_NORM", "eval")
    for _ in range(2):
        before = {name: value.clone() for name, value in state.method.state_dict().items()}
        assert warm_up(state) > 0
        assert same_bits(dict(state.method.state_dict()), before)
        assert all(weight.grad is None for weight in state.method.parameters())
        take_step(state, next(batches(1)))


def save(state: TrainState, folder: Path) -> None:
    save_checkpoint(folder, state.step, state_dict(state), 1)


def test_a_restored_state_takes_the_same_next_step(tmp_path):
    words = ["SOLVER.OPTIMIZER", "adamw", "BACKBONE.KWARGS.drop_path_rate", 0.5]
    first = new_state(tmp_path, *words)
    *start, last = batches(3)
    for batch in start:
        take_step(first, batch)
    save(first, tmp_path / "checkpoints")
    (file,) = (tmp_path / "checkpoints").iterdir()
    second = new_state(tmp_path, *words, "SEED", 5)
    second.cfg.defrost()
    second.cfg.SEED = 0
    restore(second, torch.load(file, weights_only=True))
    for state in (first, second):
        take_step(state, last)
    assert same_bits(dict(first.method.state_dict()), dict(second.method.state_dict()))
    assert same_bits(first.optimizer.state_dict(), second.optimizer.state_dict())
    assert same_bits(first.window.sums, second.window.sums)


def test_random_streams_depend_on_seed_and_step_and_on_nothing_before():
    def draws(seed, step):
        seed_step(seed, step)
        return torch.rand(4).tolist()

    first = draws(0, 7)
    assert draws(0, 8) != first
    assert draws(1, 7) != first
    assert draws(0, 7) == first


def test_a_disk_without_room_for_a_checkpoint_is_refused_and_one_with_it_is_not(
    tmp_path, monkeypatch
):
    state = new_state(tmp_path, "SOLVER.OPTIMIZER", "adamw")
    check_room(state, tmp_path)
    take_step(state, next(batches(1)))
    save(state, tmp_path / "checkpoints")
    (file,) = (tmp_path / "checkpoints").iterdir()
    usage = shutil.disk_usage(tmp_path)
    little = file.stat().st_size - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=little))
    with pytest.raises(KsclError, match="OUTPUT_DIR") as error:
        check_room(state, tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_loss_that_is_not_finite_stops_with_step_rate_checkpoint_and_advice(tmp_path):
    state = new_state(tmp_path, "DATA.NORMALIZE_ON_DEVICE", False)
    folder = state.checkpoints = tmp_path / "checkpoints"
    first, second = batches(2)
    take_step(state, first)
    save(state, folder)
    bad = second.views.float()
    bad[3, 0] = float("nan")
    with pytest.raises(KsclError) as error:
        take_step(state, Batch(bad, second.instances, []))
    (checkpoint,) = folder.iterdir()
    for word in (
        "in the views",
        "step 1 (epoch 0.17)",
        "learning rate 0.00",
        str(checkpoint),
        "SOLVER.BASE_LR",
    ):
        assert word in str(error.value)


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    state = new_state(tmp_path)
    folder = state.checkpoints = tmp_path / "checkpoints"
    with torch.no_grad():
        next(state.method.encoder.parameters())[0] = float("inf")
    with pytest.raises(KsclError, match=r"NaN or infinite.*none yet"):
        save(state, folder)
    assert not folder.exists()


def test_a_collapse_is_warned_of(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("kscl"), "propagate", True)
    state = new_state(tmp_path)
    silent = RunLog(None, 0, 10, 10, 3)
    take_step(state, next(batches(1)))
    report(state, silent, 0.0)
    assert "collapsed" not in caplog.text
    with torch.no_grad():
        for weight in state.method.encoder.head[-1].parameters():
            weight.zero_()
        state.method.encoder.head[-1].bias.fill_(1.0)
    take_step(state, next(batches(1)))
    report(state, silent, 0.0)
    assert "embeddings have collapsed" in caplog.text
    assert "SOLVER.WARMUP_EPOCHS" in caplog.text


def test_fp16_is_refused_where_there_is_no_gpu(tmp_path):
    with pytest.raises(KsclError, match="bf16"):
        new_state(tmp_path, "SOLVER.AMP", "fp16")


def test_the_last_epoch_is_averaged_by_steps_and_curves_are_thinned_to_their_end():
    rows = [
        {"step": s, "epoch": s / 6, "steps": 2, "loss": float(s), "time": 0.0}
        for s in range(2, 1201, 2)
    ]
    rows.insert(5, {"step": 12, "knn_top1": 50.0})
    assert means_of_last_epoch(rows) == {"loss": (1200 + 1198 + 1196) / 3}
    curves = thinned_curves(rows)
    assert len(curves["step"]) == 200
    assert curves["step"][-1] == 1200
    assert curves["loss"] == curves["step"]
