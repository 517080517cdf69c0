"""Shards that are damaged in the middle or at their end: named, counted and never silent."""

from __future__ import annotations

import io
import logging
import os
import tarfile

import pytest

from kscl.data.bad_images import BadImages
from kscl.data.loader import build_train_loader
from kscl.data.open import open_source
from kscl.errors import KsclError

pytestmark = pytest.mark.usefixtures("cache")


def damaged_shards(folder, damaged_header):
    """Two shards of ten images; one header in the middle of the first is overwritten."""
    images = sorted(folder.glob("*.jpg"))
    for shard in range(2):
        with tarfile.open(folder / f"s{shard}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(10):
                info = tarfile.TarInfo(f"{shard}{number:03d}.jpg")
                content = images[number].read_bytes()
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    with tarfile.open(folder / "s0.tar") as tar:
        offset = tar.getmembers()[5].offset
    with open(folder / "s0.tar", "r+b") as file:
        file.seek(offset)
        file.write(damaged_header)
    os.utime(folder / "s0.tar", (1e9, 1e9))
    os.utime(folder / "s1.tar", (1e9, 1e9))
    return str(folder / "s{0..1}.tar")


@pytest.mark.parametrize("damage", [b"\0" * 512, b"junk" * 128], ids=["zeros", "junk"])
def test_a_damaged_shard_loses_one_image_which_is_named_every_time(folder, config, damage, caplog):
    config.DATA.TRAIN = damaged_shards(folder, damage)
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            source = open_source(config.DATA.TRAIN)
        assert len(source) == 19
        assert "s0.tar at byte" in caplog.text
        assert "0004.jpg" in caplog.text
    loader = build_train_loader(config, open_source(config.DATA.TRAIN), last_step=1)
    list(loader)
    assert loader.bad_images.count == 1
    config.DATA.MAX_BAD_FRACTION = 0.01
    with pytest.raises(KsclError, match=r"1 of the 20 images.*s0\.tar"):
        build_train_loader(config, open_source(config.DATA.TRAIN), last_step=1)


def test_a_shard_that_ends_in_junk_counts_the_images_that_it_must_have_held(folder):
    where = damaged_shards(folder, b"")
    length = (folder / "s0.tar").stat().st_size
    with open(folder / "s0.tar", "r+b") as file:
        file.seek(length // 2 // 512 * 512)
        file.write(b"\xa5" * (length - file.tell()))
    source = open_source(where)
    bad = BadImages(source, "skip", 1.0)
    assert 2 <= bad.count <= 8
