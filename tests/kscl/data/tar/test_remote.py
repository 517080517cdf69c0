"""Tar shards over the network: retried, cached within bounds, and in an order of their own."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from iopath.common.file_io import PathHandler

from kscl.commands.pretrain import main
from kscl.data.loader import StepSampler
from kscl.data.open import open_source
from kscl.data.tar import remote
from kscl.errors import KsclError
from kscl.records.record import read_record
from kscl.runtime import paths
from tests.helpers.commands import ROOT
from tests.helpers.faults.bad_server import serve
from tests.helpers.runs import Run, draw_images, wait_until

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


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))


def pattern(server) -> str:
    return f"{server.address}/{{0..{SHARDS - 1}}}.tar"


def contents(source) -> list[bytes]:
    return [source.read(index) for index in range(len(source))]


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


@pytest.mark.parametrize("failure", ["500", "truncate"])
def test_a_shard_that_never_comes_is_named_and_leaves_nothing(shards, tmp_path, failure):
    with serve(shards, [failure] * 99) as server:
        with pytest.raises(KsclError, match=f"{server.address}/0.tar"):
            open_source(pattern(server), str(tmp_path / "cache"))
        assert server.asked["/0.tar"] == paths.ATTEMPTS
    assert not list((tmp_path / "cache").rglob("*.tar"))


def test_a_shard_that_is_not_there_is_named_at_once(shards, tmp_path):
    with serve(shards) as server:
        with pytest.raises(KsclError, match=f"{server.address}/9.tar"):
            open_source(f"{server.address}/9.tar", str(tmp_path / "cache"))
        assert server.asked["/9.tar"] == 1


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
    scan, dropped = remote.scan, []

    def drop_first(path, name=""):
        if not dropped:
            dropped.append(path)
            Path(path).unlink()
        return scan(path, name)

    monkeypatch.setattr(remote, "scan", drop_first)
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


def test_a_shard_that_cannot_be_fetched_by_a_loader_worker_ends_the_run_by_name(tmp_path):
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
        (process,) = run.start()
        process.join(120)
    assert process.exitcode == 2
    told = run.log.read_text().splitlines()[-1]
    assert told.startswith(f"error: {server.address}/")
    assert "cannot be fetched" in told


def test_an_epoch_shows_every_image_once_and_needs_few_shards_at_a_time(
    shards, tmp_path, monkeypatch
):
    monkeypatch.setattr(remote, "BUFFER_IMAGES", IMAGES)
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


class Mirror(PathHandler):
    """Paths of the scheme mirror:// lie in a folder that $MIRROR names."""

    def _get_supported_prefixes(self):
        return ["mirror://"]

    def _open(self, path, mode="r", buffering=-1, **kwargs):
        import os

        return open(path.replace("mirror:/", os.environ["MIRROR"]), mode)


def test_a_handler_named_on_the_command_line_serves_a_pretraining(tmp_path, monkeypatch, capsys):
    images = draw_images(tmp_path / "images", 32)
    files = sorted(images.rglob("*.jpg"))
    for shard in range(2):
        members = {path.name: path.read_bytes() for path in files[shard::2]}
        write_tar(tmp_path / f"{shard}.tar", members)
    monkeypatch.setenv("MIRROR", str(tmp_path))
    monkeypatch.setenv(paths.HANDLERS_VARIABLE, "")
    where = "mirror://{0..1}.tar"
    words = ["SOLVER.EPOCHS", 1, "DATA.CACHE_DIR", tmp_path / "cache", "DATA.CACHE_GB", 1.0]
    run = Run(tmp_path / "run", where, *words)
    assert main(run.command("--path-handler", f"{__name__}:Mirror")) == 0
    assert read_record(run.folder / "record.json")["data"]["train"]["images"] == 32
    assert main(run.command("--path-handler", "tests.nowhere:Mirror")) == 2
    assert "tests.nowhere:Mirror" in capsys.readouterr().err
