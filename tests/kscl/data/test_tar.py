"""Tar shards: damage is named, counted and never silent; remote ones are retried and cached."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from kscl.commands.pretrain import main
from kscl.data import tar
from kscl.data.bad_images import BadImages
from kscl.data.loader import StepSampler, build_train_loader
from kscl.data.open import open_source
from kscl.data.tar import BLOCK, Member, read_members
from kscl.errors import KsclError
from kscl.records.record import read_record
from kscl.runtime import paths
from tests.helpers.commands import ROOT
from tests.helpers.faults.bad_server import serve
from tests.helpers.runs import Run, draw_images, wait_until
from tests.kscl.data.conftest import contents, write_tar

COUNT = 20


def write_many(path, kind=tarfile.PAX_FORMAT, prefix=""):
    """A tar file of COUNT members, and where the header of each starts."""
    names = [f"{prefix}{number:04d}.jpg" for number in range(COUNT)]
    write_tar(path, {name: bytes([n + 1]) * (1500 + n) for n, name in enumerate(names)}, kind)
    with tarfile.open(path) as archive:
        return [member.offset for member in archive]


def overwrite(path, offset, content):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def numbers(members):
    return [int(member.name.rpartition("/")[2].removesuffix(".jpg")) for member in members]


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        (tarfile.PAX_FORMAT, b"\0" * BLOCK),
        (tarfile.PAX_FORMAT, b"x"),
        (tarfile.GNU_FORMAT, b"\xff" * BLOCK),
        (tarfile.USTAR_FORMAT, b"\0" * 4 * BLOCK),
    ],
)
def test_one_damaged_header_costs_one_member_and_is_noted(tmp_path, kind, damage):
    offsets = write_many(tmp_path / "s.tar", kind)
    overwrite(tmp_path / "s.tar", offsets[9], damage)
    gaps = []
    members = list(read_members(str(tmp_path / "s.tar"), gaps))
    assert numbers(members) == [n for n in range(COUNT) if n != 9]
    (gap,) = gaps
    assert (gap.offset, gap.size) == (offsets[9], offsets[10] - offsets[9])
    assert gap.after == "0008.jpg"
    content = (tmp_path / "s.tar").read_bytes()
    for number, (_, offset, size) in zip(numbers(members), members, strict=True):
        assert content[offset : offset + size] == bytes([number + 1]) * (1500 + number)


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_the_header_behind_a_long_name_counts_too(tmp_path, kind):
    offsets = write_many(tmp_path / "s.tar", kind, prefix="deep/" * 40)
    overwrite(tmp_path / "s.tar", offsets[10] - 4 * BLOCK, b"\xff" * BLOCK)  # of member 9
    gaps = []
    assert numbers(read_members(str(tmp_path / "s.tar"), gaps)) == [
        n for n in range(COUNT) if n != 9
    ]
    assert len(gaps) == 1


def test_a_good_file_has_no_gap_however_it_is_padded(tmp_path):
    offsets = write_many(tmp_path / "s.tar")
    whole = (tmp_path / "s.tar").read_bytes()[: offsets[-1] + 5 * BLOCK]
    for padding in (0, 1, BLOCK, 40 * BLOCK, 3000 * BLOCK):
        (tmp_path / "s.tar").write_bytes(whole + b"\0" * padding)
        gaps = []
        assert len(list(read_members(str(tmp_path / "s.tar"), gaps))) == COUNT
        assert gaps == [], padding


def test_other_members_than_files_are_passed_over(tmp_path):
    with tarfile.open(tmp_path / "s.tar", "w") as archive:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo("other")
            info.type = kind
            archive.addfile(info)
        info = tarfile.TarInfo("1.jpg")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    gaps = []
    assert list(read_members(str(tmp_path / "s.tar"), gaps)) == [Member("1.jpg", 2048, 3)]
    assert gaps == []


def test_a_file_that_is_cut_off_or_no_tar_file_is_an_error(tmp_path, cache):
    offsets = write_many(tmp_path / "s.tar")
    whole = (tmp_path / "s.tar").read_bytes()[: offsets[-1] + 1000]
    parts = [whole[: int(part * len(whole))] for part in (0.0, 0.01, 0.5, 0.9)]
    for content in (*parts, b"no tar at all" * 100):
        (tmp_path / "s.tar").write_bytes(content)
        with pytest.raises(KsclError, match=r"s\.tar cannot be read"):
            open_source(str(tmp_path / "s.tar"))


def test_a_negative_size_does_not_lead_around_for_ever(tmp_path):
    write_many(tmp_path / "s.tar", tarfile.GNU_FORMAT)
    with tarfile.open(tmp_path / "s.tar") as archive:
        second = archive.getmembers()[1]
        header = bytearray(second.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 8 + (-3 * BLOCK).to_bytes(4, "big", signed=True)  # base 256
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    overwrite(tmp_path / "s.tar", second.offset, bytes(header))
    with contextlib.suppress(KsclError):  # older versions of Python accept the header
        assert len(list(read_members(str(tmp_path / "s.tar"), []))) <= COUNT


def damaged_shards(folder, damaged_header):
    """Two shards of ten images; one header in the middle of the first is overwritten."""
    images = sorted(folder.glob("*.jpg"))
    for shard in range(2):
        members = {f"{shard}{n:03d}.jpg": images[n].read_bytes() for n in range(10)}
        write_tar(folder / f"s{shard}.tar", members, tarfile.USTAR_FORMAT)
    with tarfile.open(folder / "s0.tar") as archive:
        overwrite(folder / "s0.tar", archive.getmembers()[5].offset, damaged_header)
    for shard in range(2):
        os.utime(folder / f"s{shard}.tar", (1e9, 1e9))
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


def test_a_shard_that_ends_in_junk_counts_the_images_that_it_must_have_held(folder, cache):
    where = damaged_shards(folder, b"")
    length = (folder / "s0.tar").stat().st_size
    half = length // 2 // BLOCK * BLOCK
    overwrite(folder / "s0.tar", half, b"\xa5" * (length - half))
    bad = BadImages(open_source(where), "skip", 1.0)
    assert 2 <= bad.count <= 8


SHARDS, IMAGES = 6, 8  # per shard


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(paths, "BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(paths, "STALL_SECONDS", 1.0)


@pytest.fixture
def shards(tmp_path) -> Path:
    """A folder of small shards; an image holds the number of its shard and its own."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(SHARDS):
        members = {f"{shard}_{n}.jpg": f"{shard} {n}".encode() for n in range(IMAGES)}
        write_tar(folder / f"{shard}.tar", members)
    return folder


def pattern(server) -> str:
    return f"{server.address}/{{0..{SHARDS - 1}}}.tar"


EXPECTED = [f"{shard} {n}".encode() for shard in range(SHARDS) for n in range(IMAGES)]


def test_a_server_that_fails_stalls_and_breaks_off_is_asked_again(shards, tmp_path):
    with serve(shards, ["500", "stall", "truncate"]) as server:
        two = f"{server.address}/{{0..1}}.tar"
        source = open_source(two, str(tmp_path / "cache"))
        assert contents(source) == EXPECTED[: 2 * IMAGES]
        assert source.name(9) == f"{server.address}/1.tar/1_1.jpg"
        assert set(server.asked.values()) == {4}
        again = open_source(two, str(tmp_path / "cache"))
        assert contents(again) == EXPECTED[: 2 * IMAGES]
        assert set(server.asked.values()) == {4}  # from the cache


@pytest.mark.parametrize("failure", ["500", "truncate", "404"])
def test_a_shard_that_never_comes_is_named_and_leaves_nothing(shards, tmp_path, failure):
    with serve(shards, [failure] * 99) as server:
        with pytest.raises(KsclError, match=f"{server.address}/0.tar"):
            open_source(pattern(server), str(tmp_path / "cache"))
        assert server.asked["/0.tar"] == (1 if failure == "404" else paths.ATTEMPTS)
    assert not list((tmp_path / "cache").rglob("*.tar"))


def test_the_cache_keeps_what_it_may_and_fetches_the_rest_again(shards, tmp_path):
    size = (shards / "0.tar").stat().st_size
    with serve(shards) as server:
        source = open_source(pattern(server), str(tmp_path / "cache"), 2.5 * size / 1e9)
        kept = list((tmp_path / "cache").rglob("*.tar"))
        assert sum(path.stat().st_size for path in kept) <= 2.5 * size
        assert len(kept) == 2
        assert contents(source) == EXPECTED
        assert len(list((tmp_path / "cache").rglob("*.tar"))) == 2
        assert server.asked["/0.tar"] == 2


def test_a_shard_that_has_changed_since_it_was_indexed_is_refused_by_name(shards, tmp_path):
    size = (shards / "0.tar").stat().st_size
    with serve(shards) as server:
        source = open_source(pattern(server), str(tmp_path / "cache"), 1.5 * size / 1e9)
        write_tar(shards / "0.tar", {f"0_{n}.jpg": b"0 9" for n in range(IMAGES)})
        with pytest.raises(KsclError, match=f"{server.address}/0.tar has changed"):
            source.read(0)


def test_a_download_that_was_killed_leaves_nothing_that_is_read_or_stays(shards, tmp_path):
    cache = tmp_path / "cache"
    with serve(shards, ["stall"]) as server:
        where = f"{server.address}/0.tar"
        fetch = f"from kscl.data.open import open_source; open_source({where!r}, {str(cache)!r})"
        process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", fetch], cwd=ROOT)
        downloads = cache / paths.DOWNLOADS
        wait_until(lambda: any(downloads.glob(".*.tar.*")) and server.asked["/0.tar"] == 1)
        process.kill()
        process.wait()
        assert any(downloads.glob(".*.tar.*"))  # what came of it
        assert not paths.cached_path(where, cache).exists()
        assert contents(open_source(where, str(cache))) == EXPECTED[:IMAGES]
    assert sorted(path.suffix for path in downloads.iterdir()) == [".lock", ".tar"]


def test_processes_that_index_into_a_small_cache_fetch_again_what_another_one_dropped(
    shards, tmp_path, monkeypatch
):
    size = (shards / "0.tar").stat().st_size
    scan, dropped = tar.scan, []

    def drop_first(path, name=""):
        if not dropped:
            dropped.append(path)
            Path(path).unlink()
        return scan(path, name)

    monkeypatch.setattr(tar, "scan", drop_first)
    with serve(shards) as server:
        source = open_source(pattern(server), str(tmp_path / "cache"), 1.5 * size / 1e9)
        assert server.asked["/0.tar"] == 2
        assert contents(source) == EXPECTED


def test_two_processes_fetch_every_shard_once_between_them(shards, tmp_path):
    with serve(shards) as server:
        fetch = "from kscl.data.open import open_source; from sys import argv; "
        fetch += "source = open_source(*argv[1:]); [source.read(n) for n in range(len(source))]"
        words = [sys.executable, "-W", "ignore", "-c", fetch, pattern(server), tmp_path / "cache"]
        both = [subprocess.Popen([*map(str, words)], cwd=ROOT) for _ in range(2)]
        assert [process.wait(60) for process in both] == [0, 0]
        assert set(server.asked.values()) == {1}


def test_a_person_sees_how_many_shards_are_fetched_and_what_is_tried_again(
    shards, tmp_path, capsys, caplog
):
    caplog.set_level(logging.WARNING)
    with serve(shards, ["500"]) as server:
        open_source(pattern(server), str(tmp_path / "cache"))
    assert f"Fetching shards: {SHARDS} of {SHARDS}" in capsys.readouterr().err
    assert f"{server.address}/0.tar: HTTP Error 500" in caplog.text
    assert "trying again in" in caplog.text


def test_a_shard_that_cannot_be_fetched_by_a_loader_worker_ends_the_run_by_name(tmp_path, capsys):
    files = sorted(draw_images(tmp_path / "images", 32).rglob("*.jpg"))
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(2):
        write_tar(shards / f"{number}.tar", {p.name: p.read_bytes() for p in files[number::2]})
    with serve(shards) as server:
        room = 1.5 * (shards / "0.tar").stat().st_size / 1e9  # for one of the two
        where = f"{server.address}/{{0..1}}.tar"
        cache = ["DATA.CACHE_DIR", tmp_path / "cache", "DATA.CACHE_GB", room]
        run = Run(tmp_path / "run", where, *cache, "DATA.NUM_WORKERS", 1)
        open_source(where, str(tmp_path / "cache"), room)
        server.failures = ["", *["404"] * 99]
        assert main(run.command()) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: {server.address}/")
    assert "cannot be fetched" in last


def test_an_epoch_shows_every_image_once_and_needs_few_shards_at_a_time(
    shards, tmp_path, monkeypatch
):
    monkeypatch.setattr(tar, "BUFFER_IMAGES", IMAGES)
    with serve(shards) as server:
        source = open_source(pattern(server), str(tmp_path / "cache"))
    orders = [source.epoch_order(3, epoch) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order) == list(range(SHARDS * IMAGES))
        turns = list(dict.fromkeys(source.shard[order].tolist()))
        place = np.array([turns.index(shard) for shard in source.shard[order]])
        # An image moves at most a shard's length: beyond it and its neighbor nothing is needed.
        assert np.abs(place - np.arange(len(order)) // IMAGES).max() <= 1
    assert not np.array_equal(*orders)
    assert np.array_equal(orders[1], source.epoch_order(3, 1))
    one = list(StepSampler(48, 8, 3, 2, 9, source=source))
    two = [list(StepSampler(48, 8, 3, 2, 9, rank, 2, source=source)) for rank in (0, 1)]
    assert [left + right for left, right in zip(*two, strict=True)] == one
    assert [index for _, index in one[4]] == orders[1][:8].tolist()


def test_a_check_before_the_start_downloads_nothing(shards, tmp_path, capsys):
    with serve(shards) as server:
        run = Run(tmp_path / "run", pattern(server), "DATA.CACHE_DIR", tmp_path / "cache")
        assert main(run.command("--check")) == 0
        assert dict(server.asked) == {"/0.tar": 1}
        gone = ["DATA.TRAIN", f"{server.address}/9.tar"]
        assert main(run.command("--check", more=gone)) == 1
        assert f"{server.address}/9.tar" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()


def test_a_handler_named_on_the_command_line_serves_a_pretraining(tmp_path, monkeypatch, capsys):
    images = draw_images(tmp_path / "images", 32)
    files = sorted(images.rglob("*.jpg"))
    for shard in range(2):
        members = {path.name: path.read_bytes() for path in files[shard::2]}
        write_tar(tmp_path / f"{shard}.tar", members)
    monkeypatch.setenv("ELSEWHERE", str(tmp_path))
    monkeypatch.setenv(paths.HANDLERS_VARIABLE, "")
    where = "elsewhere://{0..1}.tar"
    words = ["SOLVER.EPOCHS", 1, "DATA.CACHE_DIR", tmp_path / "cache", "DATA.CACHE_GB", 1.0]
    run = Run(tmp_path / "run", where, *words)
    assert main(run.command("--path-handler", "tests.kscl.data.conftest:Elsewhere")) == 0
    assert read_record(run.folder / "record.json")["data"]["train"]["images"] == 32
    assert main(run.command("--path-handler", "tests.nowhere:Elsewhere")) == 2
    assert "tests.nowhere:Elsewhere" in capsys.readouterr().err
