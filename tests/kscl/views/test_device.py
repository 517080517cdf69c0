"""Augmentations on the training device, against the same steps on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kscl.config import ConfigError
from kscl.data.loader import ViewDataset, build_train_loader
from kscl.data.open import open_source
from kscl.engine.loop import prefetched, to_device
from kscl.keys import load_config
from kscl.views import augment
from kscl.views.augment import AUGMENTATIONS, LateStep, Step, apply_steps, augmentation
from kscl.views.batch import Batch, SmallViews
from kscl.views.device import DEVICE_FORMS, apply_pending, gather
from kscl.views.recipes import MOCO_V1, MOCO_V2, RECIPES, SIMCLR
from tests.helpers.data.photos import photo
from tests.helpers.gpu.tensor import METER
from tests.helpers.gpu.training import PRETENDED, gpu
from tests.helpers.runs import TINY

CPU, CFG = torch.device("cpu"), load_config(None, [])
SOLARIZED = [*MOCO_V2, {"op": "solarize", "p": 0.5}]


class Photos:
    """A few pictures in memory."""

    where = "memory"
    labels = None

    def __len__(self) -> int:
        return 4

    def name(self, index: int) -> str:
        return str(index)

    def read(self, index: int) -> bytes:
        import cv2

        return cv2.imencode(".png", photo(index)[..., ::-1])[1].tobytes()


def finished(batch: Batch) -> Batch:
    return to_device(batch, CFG, CPU)


@pytest.mark.parametrize("recipe", [MOCO_V1, MOCO_V2, SIMCLR, SOLARIZED])
def test_views_of_the_device_are_those_of_the_cpu_up_to_rounding(recipe):
    wanted = [(epoch, index) for epoch in (1,) for index in range(4)]
    more = {"num_queries": 2, "small": SmallViews(3, 32, (0.05, 0.3))}
    plain, late = (
        ViewDataset(Photos(), recipe, 5, 96, 7, on_device=on, **more).__getitems__(wanted)
        for on in (False, True)
    )
    assert late.pending, "nothing was left to the device"
    assert late.small_pending
    assert not plain.pending
    done = finished(late)
    assert not done.pending
    for one, other in ((plain.views, done.views), (plain.small, done.small)):
        apart = (one.int() - other.int()).abs().float()
        assert apart.mean() <= 1
        # A step that is left out or swapped moves a view by far more.
        assert apart.mean((2, 3, 4)).max() <= 2.5


ARGUMENTS = {
    augment.adjust_brightness: st.tuples(st.floats(0, 2)),
    augment.adjust_contrast: st.tuples(st.floats(0, 2)),
    augment.adjust_saturation: st.tuples(st.floats(0, 2)),
    augment.adjust_hue: st.tuples(st.floats(-0.5, 0.5)),
    augment.blur: st.tuples(st.floats(0.05, 8)),
    augment.to_grayscale: st.just(()),
    augment.hflip: st.just(()),
    augment.invert_above: st.tuples(st.floats(0, 256)),
}


def test_every_step_with_a_device_form_is_compared():
    assert set(ARGUMENTS) == set(DEVICE_FORMS)


@pytest.mark.parametrize("apply", ARGUMENTS, ids=lambda apply: apply.__name__)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_device_form_equals_the_step_of_each_view(apply, data):
    pictures = [photo(seed)[:40, :30].copy() for seed in range(3)]
    arguments = [data.draw(ARGUMENTS[apply]) for _ in pictures]
    views = torch.stack([torch.from_numpy(picture).permute(2, 0, 1) for picture in pictures])
    steps = [LateStep(n, (1, 0), Step(apply, a)) for n, a in enumerate(arguments)]
    made = apply_pending(views.contiguous().clone(), gather(steps))
    for picture, values, view in zip(pictures, arguments, made, strict=True):
        expected = apply_steps(picture, [Step(apply, values)])
        expected = np.stack([expected] * 3, 2) if expected.ndim == 2 else expected
        apart = np.abs(view.permute(1, 2, 0).numpy().astype(int) - expected)
        assert apart.max() <= 1


def test_steps_of_a_view_keep_their_order():
    views = torch.full((2, 3, 4, 4), 100, dtype=torch.uint8)
    half, invert = Step(augment.adjust_brightness, (0.5,)), Step(augment.invert_above, (0,))
    late = [LateStep(0, (1, 0), half), LateStep(0, (2, 0), invert)]
    late += [LateStep(1, (1, 0), invert), LateStep(1, (2, 0), half)]
    made = apply_pending(views, gather(late))
    assert made[:, 0, 0, 0].tolist() == [205, 77]


def test_ops_before_one_without_a_device_form_run_in_the_workers():
    recipe = [*MOCO_V2[:2], {"op": "paint_corner"}, *MOCO_V2[2:]]

    @augmentation()
    def paint_corner(view):
        return [Step(_paint)]

    try:
        wanted = [(0, index) for index in range(4)]
        plain, late = (
            ViewDataset(Photos(), recipe, 2, 64, 7, on_device=on).__getitems__(wanted)
            for on in (False, True)
        )
        used = {step.apply for step in late.pending}
        assert used <= {augment.to_grayscale, augment.blur, augment.hflip}
        apart = (plain.views.int() - finished(late).views.int()).abs().float()
        assert apart.mean() <= 1
        with pytest.raises(ConfigError, match=r"VIEWS\.DEVICE.*paint_corner"):
            load_config(None, ["VIEWS.DEVICE", "True", "AUGMENT", "[{op: paint_corner}]"])
    finally:
        del AUGMENTATIONS["paint_corner"]


def _paint(picture):
    changed = picture.copy()
    changed[:8, :8] = 255
    return changed


def test_views_of_the_device_do_not_depend_on_workers_or_the_first_step(pictures_folder, tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)

    def batches(workers: int, first: int) -> list[Batch]:
        words = ["VIEWS.DEVICE", "True", "DATA.NUM_WORKERS", str(workers)]
        cfg = load_config(file, [*words, "SOLVER.BATCH_SIZE", "4", "DICTIONARY.QUEUE_LENGTH", "4"])
        source = open_source(str(pictures_folder))
        loader = build_train_loader(cfg, source, last_step=3, first_step=first)
        return [finished(batch) for batch in loader]

    (one, two), (other,) = batches(0, 1), batches(1, 2)
    assert torch.equal(two.views, other.views)
    assert not torch.equal(one.views, other.views)


@PRETENDED
@pytest.mark.full
def test_the_device_applies_steps_without_a_host_sync():
    wanted = [(1, index) for index in range(4)]
    dataset = ViewDataset(Photos(), RECIPES["simclr"], 4, 32, 7, on_device=True)
    batch = dataset.__getitems__(wanted)
    expected = finished(dataset.__getitems__(wanted)).views
    with gpu() as device:
        pinned = [
            step._replace(views=step.views.pin_memory(), arguments=step.arguments.pin_memory())
            for step in batch.pending
        ]
        METER.reset()
        (done,) = prefetched(
            [batch._replace(views=batch.views.pin_memory(), pending=pinned)], CFG, device
        )
        assert not METER.syncs
        assert torch.equal(done.views.cpu(), expected)


@pytest.fixture
def pictures_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index in range(8):
        (folder / f"{index}.png").write_bytes(Photos().read(index))
    return folder
