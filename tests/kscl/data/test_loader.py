"""The same views in the same order, however many workers and ranks there are, from any step on."""

from __future__ import annotations

import logging

import cv2
import numpy as np
import pytest
import torch

from kscl.data import bad_images
from kscl.data import loader as train_loader
from kscl.data.bad_images import BadImages, find_unreadable, replacement
from kscl.data.loader import (
    Budget,
    ViewDataset,
    epoch_order,
    load_in_workers,
    measure_budget,
)
from kscl.data.open import open_source
from kscl.errors import KsclError
from kscl.views.normalize import normalize
from kscl.views.recipes import MOCO_V2
from tests.helpers.data.sets import write_image
from tests.kscl.data.conftest import write_pieces

COUNT = 21


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    write_pieces(root, COUNT)
    return root


def copy_with_bad(folder, target, bad):
    """The same folder, but with what the mapping says instead of some of its files."""
    target.mkdir()
    for path in sorted(folder.iterdir()):
        (target / path.name).write_bytes(bad.get(path.name, path.read_bytes()))
    return str(target)


def build_train_loader(cfg, **steps):
    """Open the images that the config names, and load them."""
    return train_loader.build_train_loader(cfg, open_source(cfg.DATA.TRAIN), **steps)


def all_batches(cfg, last_step=7, **where):
    return list(build_train_loader(cfg, last_step=last_step, **where))


def assert_same(one, other):
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.views, b.views)
        assert torch.equal(a.instances, b.instances)


def test_an_epoch_shows_every_image_once_in_an_order_of_its_own():
    orders = [epoch_order(seed, epoch, 1000) for seed in (0, 1) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order) == list(range(1000))
    assert len({tuple(order) for order in orders}) == 4
    assert np.array_equal(orders[3], epoch_order(1, 1, 1000))


def test_a_batch_holds_the_query_and_k_key_views_of_each_image(config):
    batches = all_batches(config, last_step=5)
    for batch in batches:
        assert batch.views.shape == (4, 3, 3, 32, 32)
        assert batch.views.dtype == torch.uint8
        assert batch.bad == []
        views = batch.views.flatten(0, 1)
        assert len(torch.unique(views.flatten(1), dim=0)) == 12, "no two views are alike"
    shown = torch.cat([batch.instances for batch in batches])
    assert shown.tolist() == epoch_order(0, 0, COUNT)[:20].tolist(), "the odd one is left out"


def test_views_differ_between_epochs_and_seeds_and_depend_on_nothing_else(folder):
    source = open_source(str(folder))
    first, again, seed, epoch = (
        ViewDataset(source, MOCO_V2, 2, 32, seed)[epoch, 3].views
        for seed, epoch in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, seed)
    assert not torch.equal(first, epoch)


def test_more_queries_and_small_ones_leave_the_other_views_as_they_are(config):
    before = all_batches(config, last_step=2)
    config.METHOD.NUM_QUERIES = 3
    config.VIEWS.SMALL.COUNT, config.VIEWS.SMALL.SIZE = 2, 16
    after = all_batches(config, last_step=2)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.instances, other.instances)
        assert torch.equal(one.views, other.views[:, [0, 3, 4]])  # the query and the keys
        assert one.small is None
        assert other.small.shape == (4, 2, 3, 16, 16)
        for views in (other.views, other.small):
            every = views.flatten(0, 1).flatten(1)
            assert len(torch.unique(every, dim=0)) == len(every), "no two views are alike"


def test_small_queries_show_the_part_of_the_image_that_their_scale_says(config, folder):
    """A crop of all of a small picture keeps its mean; a crop of little of it does not."""
    config.AUGMENT = [{"op": "random_resized_crop", "scale": [1.0, 1.0], "ratio": [1.25, 1.25]}]
    config.VIEWS.SMALL.COUNT, config.VIEWS.SMALL.SIZE = 2, 32
    spread = {}
    for scale in ([1.0, 1.0], [0.05, 0.14]):
        config.VIEWS.SMALL.SCALE = scale
        (batch,) = all_batches(config, last_step=1)
        shown = torch.cat([batch.views[:, :1], batch.small], 1).float()
        spread[scale[0]] = (shown[:, :1] - shown[:, 1:]).abs().mean()
    assert spread[1.0] == 0
    assert spread[0.05] > 5


def test_keys_may_have_a_recipe_of_their_own(config):
    before = all_batches(config, last_step=2)
    config.AUGMENT_KEYS = [dict(op) for op in config.AUGMENT]
    assert_same(before, all_batches(config, last_step=2))
    config.AUGMENT_KEYS = [{"op": "grayscale", "p": 1.0}]  # the middle square, in gray
    for one, other in zip(before, all_batches(config, last_step=2), strict=True):
        assert torch.equal(one.views[:, 0], other.views[:, 0])
        keys = other.views[:, 1:]
        assert torch.equal(keys[:, 0], keys[:, 1])
        assert torch.equal(keys[:, :, 0], keys[:, :, 2])


def test_sizes_follow_a_schedule_over_epochs_from_any_step_on(config):
    config.INPUT.SIZE = [[0, 16], [1, 24]]  # five steps per epoch
    batches = all_batches(config, last_step=7)
    assert [batch.views.shape[-1] for batch in batches] == [16] * 5 + [24] * 2
    assert_same(batches[4:], all_batches(config, last_step=7, first_step=4))
    config.INPUT.SIZE = 24
    assert_same(batches[5:], all_batches(config, last_step=7, first_step=5))


def test_workers_change_nothing_even_when_opencv_already_runs_threads(config):
    cv2.GaussianBlur(np.zeros((2000, 2000, 3), np.uint8), (0, 0), 2)  # big enough to be shared out
    alone, before = all_batches(config), torch.get_rng_state()
    config.DATA.NUM_WORKERS = 2
    loader = build_train_loader(config, last_step=7)
    loader.batches.timeout = 300
    assert_same(list(loader), alone)
    assert torch.equal(torch.get_rng_state(), before)  # training draws from it
    assert loader.seconds_waited > 0
    assert len(loader) == 7


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_joined_see_what_one_rank_sees(config, world_size):
    alone = all_batches(config)
    ranks = [all_batches(config, rank=r, world_size=world_size) for r in range(world_size)]
    for batch, *shares in zip(alone, *ranks, strict=True):
        assert torch.equal(torch.cat([share.views for share in shares]), batch.views)
        assert torch.equal(torch.cat([share.instances for share in shares]), batch.instances)


def test_a_run_goes_on_from_any_step(config):
    whole = all_batches(config)
    for first_step in range(1, 7):
        config.DATA.NUM_WORKERS = 2 if first_step == 4 else 0
        assert_same(all_batches(config, first_step=first_step), whole[first_step:])


def test_a_late_start_decodes_only_what_it_shows(config):
    loader = build_train_loader(config, first_step=3, last_step=4)
    read = []
    original = loader.dataset.source.read
    loader.dataset.source.read = lambda index: read.append(index) or original(index)
    (batch,) = loader
    assert read == batch.instances.tolist()


def test_a_batch_that_ranks_cannot_share_or_images_cannot_fill_is_an_error(config):
    with pytest.raises(KsclError, match="3 processes cannot share"):
        all_batches(config, world_size=3)
    config.SOLVER.BATCH_SIZE = COUNT + 1
    with pytest.raises(KsclError, match=f"SOLVER.BATCH_SIZE is {COUNT + 1}"):
        all_batches(config)


def test_floats_from_a_worker_equal_bytes_normalized_on_the_device(config):
    as_bytes = all_batches(config, last_step=2)
    config.DATA.NORMALIZE_ON_DEVICE = False
    config.DATA.NUM_WORKERS = 1
    for floats, plain in zip(all_batches(config, last_step=2), as_bytes, strict=True):
        expected = normalize(plain.views, config.INPUT.MEAN, config.INPUT.STD)
        assert floats.views.dtype == torch.float32
        assert torch.allclose(floats.views, expected, atol=1e-6)


def test_bad_images_are_replaced_named_once_and_counted(config, folder, tmp_path, caplog):
    good = all_batches(config, last_step=15)
    bad = {"03.jpg": b"", "07.jpg": b"no image", "11.jpg": (folder / "11.jpg").read_bytes()[:400]}
    config.DATA.TRAIN = copy_with_bad(folder, tmp_path / "with_bad", bad)
    config.DATA.NUM_WORKERS = 2
    loader = build_train_loader(config, last_step=15)
    with caplog.at_level(logging.WARNING):
        batches = list(loader)
    assert loader.bad_images.count == 3
    assert [name.rpartition("/")[2] for name in loader.bad_images.names()] == sorted(bad)
    for name in bad:
        assert caplog.text.count(name) == 1
    for step, (batch, whole) in enumerate(zip(batches, good, strict=True)):
        for place, wanted in enumerate(whole.instances.tolist()):
            if wanted in (3, 7, 11):
                shown = next(
                    index
                    for index in (replacement(0, step // 5, wanted, n, COUNT) for n in range(9))
                    if index not in (3, 7, 11)
                )
                assert batch.instances[place] == shown
            else:
                assert torch.equal(batch.views[place], whole.views[place])


def test_too_many_bad_images_stop_the_run_with_the_reason(config, folder, tmp_path):
    bad = {f"{number:02d}.jpg": b"" for number in range(5)}
    config.DATA.TRAIN = copy_with_bad(folder, tmp_path / "with_bad", bad)
    config.DATA.MAX_BAD_FRACTION = 0.1
    with pytest.raises(KsclError) as caught:
        all_batches(config)
    for words in ("3 of the 21 images", "MAX_BAD_FRACTION = 0.1", ".jpg", "empty"):
        assert words in str(caught.value)


def test_the_policy_error_stops_at_the_first_bad_image(config, folder, tmp_path):
    config.DATA.TRAIN = copy_with_bad(folder, tmp_path / "with_bad", {"05.jpg": b"x"})
    config.DATA.BAD_IMAGES = "error"
    config.DATA.NUM_WORKERS = 2
    with pytest.raises(KsclError, match=r"05\.jpg cannot be read: it is not an image") as caught:
        all_batches(config)
    assert "Traceback" not in str(caught.value)


def test_no_readable_image_is_an_error_before_training(config, tmp_path):
    (tmp_path / "broken").mkdir()
    for number in range(5):
        (tmp_path / f"broken/{number}.png").write_bytes(b"broken")
    config.DATA.TRAIN = str(tmp_path / "broken")
    with pytest.raises(KsclError, match=r"broken can be read: 5 of 5 were tried"):
        build_train_loader(config, last_step=1)


def test_storage_that_goes_away_is_told_from_a_bad_image(config):
    loader = build_train_loader(config, last_step=1)

    def gone(index):
        raise OSError("the server is gone")

    loader.dataset.source.read = gone
    with pytest.raises(KsclError, match=r"in a row .*the server is gone"):
        list(loader)


def test_the_budget_is_measured_on_one_core_and_leaves_the_threads_as_they_were(config):
    loader = build_train_loader(config, last_step=1)
    before = torch.get_num_threads(), cv2.getNumThreads()
    budget = measure_budget(loader.dataset, workers=2, num_images=4)
    assert (torch.get_num_threads(), cv2.getNumThreads()) == before
    assert budget.decode > 0
    assert budget.augment > 0
    assert "holds the run back" in str(budget)


def test_the_budget_says_which_stage_holds_the_run_back():
    budget = Budget(decode=600, augment=300, workers=4)
    assert budget.load == pytest.approx(800)
    assert budget.held_back_by == "augment"
    assert budget.with_encode(500).held_back_by == "encode"
    assert budget.with_encode(900).held_back_by == "augment"
    assert Budget(decode=100, augment=300, workers=0).held_back_by == "decode"
    assert "encode 500" in str(budget.with_encode(500))


IMAGES, SIDE = 8, 64
MEGABYTES = IMAGES * SIDE * SIDE * 3 / 2**20  # what they all take


@pytest.fixture
def images(tmp_path):
    for number in range(IMAGES):
        write_image(tmp_path / "images" / f"{number}.png", number, (SIDE, SIDE))
    return tmp_path / "images"


@pytest.fixture
def read_indices(monkeypatch):
    """Return the indices of the images that are read_indices from here on."""
    seen = []
    original = train_loader.read_decoded

    def read(source, index, *rest):
        seen.append(index)
        return original(source, index, *rest)

    monkeypatch.setattr(train_loader, "read_decoded", read)
    return seen


def dataset(images, megabytes, **more):
    return ViewDataset(
        open_source(str(images)), MOCO_V2, 3, 32, 0, keep_megabytes=megabytes, **more
    )


def epochs(data, count):
    return [data.__getitems__([(e, i) for i in range(IMAGES)]).views for e in range(count)]


def test_a_set_that_fits_is_read_indices_once_and_gives_the_same_views(images, read_indices):
    plain = epochs(dataset(images, 0), 3)
    assert len(read_indices) == 3 * IMAGES
    read_indices.clear()
    kept = epochs(dataset(images, MEGABYTES), 3)
    assert sorted(read_indices) == list(range(IMAGES))
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))


@pytest.mark.parametrize(("room", "reduced"), [(0.9, False), (1, True)])
def test_nothing_is_kept_of_a_set_that_does_not_fit_nor_of_reduced_pictures(images, room, reduced):
    data = dataset(images, room * MEGABYTES, reduced_decode=reduced)
    epochs(data, 1)
    assert not data.kept.pictures


def test_images_larger_than_the_first_ones_do_not_exceed_the_room(tmp_path):
    for number in range(IMAGES):
        side = SIDE if number < 2 else 4 * SIDE
        write_image(tmp_path / f"{number}.png", number, (side, side))
    data = dataset(tmp_path, MEGABYTES)
    epochs(data, 2)
    assert sum(each.picture.nbytes for each in data.kept.pictures.values()) <= MEGABYTES * 2**20


def test_an_image_that_cannot_be_read_is_reported_in_every_epoch(images):
    (images / "3.png").write_bytes(b"no image")
    data = dataset(images, MEGABYTES)
    for epoch in range(2):
        assert [index for index, _ in data.__getitems__([(epoch, 3)]).bad] == [3]


def test_workers_share_the_room_and_give_the_same_views(images):
    wanted = [[(e, i), (e, i + 1)] for e in range(2) for i in range(0, IMAGES, 2)]
    alone = [b.views for b in load_in_workers(dataset(images, MEGABYTES), wanted, 0)]
    shared = [b.views for b in load_in_workers(dataset(images, MEGABYTES), wanted, 2)]
    assert all(np.array_equal(a, b) for a, b in zip(alone, shared, strict=True))


@pytest.fixture
def decoded(monkeypatch):
    """Count the images that are decoded; none is known from before."""
    calls, decode = [], bad_images.decode

    def counting(data, max_pixels):
        calls.append(max_pixels)
        return decode(data, max_pixels)

    monkeypatch.setattr(bad_images, "decode", counting)
    monkeypatch.setattr(bad_images, "_decodable", set())
    return calls


def test_known_files_are_not_decoded_again_but_changed_ones_are(images, decoded):
    source = open_source(str(images), "")
    assert find_unreadable(source, range(IMAGES), most=10) == (IMAGES, {}, [])
    assert find_unreadable(source, range(IMAGES), most=10).reasons == {}
    assert len(decoded) == IMAGES
    assert len(find_unreadable(source, range(IMAGES), most=10, max_pixels=100).reasons) == IMAGES
    broken = images / "3.png"
    broken.write_bytes(broken.read_bytes()[:100])
    (images / "4.png").unlink()
    reasons = find_unreadable(source, range(IMAGES), most=10).reasons
    assert list(reasons) == [3, 4]
    assert "No such file" in reasons[4]
    assert list(find_unreadable(source, range(IMAGES), most=10).reasons) == [3, 4]


def test_of_many_a_fixed_sample_is_decoded_and_said(images, decoded):
    source = open_source(str(images), "")
    num_decoded, _, (note,) = find_unreadable(source, range(IMAGES), most=3)
    assert (num_decoded, len(decoded)) == (3, 3)
    assert not note.fatal
    assert "a sample of 3 of the 8 images was decoded" in note.what
    find_unreadable(source, range(IMAGES), most=3)
    assert len(decoded) == 3, "another sample was taken"


def test_what_a_run_met_before_it_was_resumed_is_judged_by_the_rule_of_now(images):
    source, met = open_source(str(images), ""), [(1, "it is empty"), (3, "it is empty")]
    account = BadImages(source, "skip", 0.5)
    account.note(met, again=True)
    assert account.names() == [str(images / "1.png"), str(images / "3.png")]
    for policy, most, named in (
        ("skip", 0.2, r"2 of the 8 images.*1\.png"),
        ("error", 0.5, r"1\.png cannot be read: it is empty"),
    ):
        with pytest.raises(KsclError, match=named):
            BadImages(source, policy, most).note(met, again=True)
