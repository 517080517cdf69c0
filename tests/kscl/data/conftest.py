"""What the tests of data share: a cache of their own, a folder of images, and no endless wait."""

from __future__ import annotations

import io
import os
import shutil
import signal
import tarfile
import tempfile
from pathlib import Path

import pytest
from iopath.common.file_io import PathHandler

from kscl.keys import PRETRAIN
from kscl.runtime.paths import path_manager
from tests.helpers.data.photos import jpeg, photo

GOOD = 12  # images in the folder
# By kind: makes something at a path that is named like a file and is none.
ODD_FILES = {
    "link to itself": lambda path: path.symlink_to(path.name),
    "dead link": lambda path: path.symlink_to("/nowhere/at all.jpg"),
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.fixture
def no_test_hangs():
    def hang(*_):
        raise AssertionError("it waits for ever")

    signal.signal(signal.SIGALRM, hang)
    signal.alarm(300)
    yield
    signal.alarm(0)


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("KSCL_CACHE", str(folder))
    return folder


@pytest.fixture
def folder():
    """Twelve good images, in a place that any user may enter."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    write_pieces(root, GOOD)
    yield root
    shutil.rmtree(root)


def write_pieces(root: Path, count: int) -> None:
    """Write pieces of a photo, all different, as small images."""
    whole = photo(0)
    for number in range(count):
        piece = whole[8 * number : 8 * number + 40, 10 * number : 10 * number + 50]
        (root / f"{number:02d}.jpg").write_bytes(jpeg(piece))


@pytest.fixture
def config(folder, cache):
    """A pretraining on the folder; modules that have a folder of their own get one on that."""
    cfg = PRETRAIN.defaults()
    cfg.DATA.TRAIN = str(folder)
    cfg.DATA.NUM_WORKERS = 0
    cfg.DATA.MAX_BAD_FRACTION = 0.5
    cfg.INPUT.SIZE = 32
    cfg.METHOD.NUM_SHOTS = 2
    cfg.SOLVER.BATCH_SIZE = 4
    return cfg


def write_tar(path, members: dict[str, bytes], kind: int = tarfile.PAX_FORMAT) -> None:
    with tarfile.open(path, "w", format=kind) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def contents(source) -> list[bytes]:
    return [source.read(index) for index in range(len(source))]


class Elsewhere(PathHandler):
    """A remote store for the tests: `elsewhere://x` is x in the folder that $ELSEWHERE names."""

    def _get_supported_prefixes(self):
        return ["elsewhere://"]

    def _real(self, path):
        return os.path.join(os.environ["ELSEWHERE"], path.removeprefix("elsewhere://"))

    def _open(self, path, mode="r", buffering=-1, **kwargs):
        return open(self._real(path), mode, **kwargs)

    def _isdir(self, path, **kwargs):
        return os.path.isdir(self._real(path))

    def _isfile(self, path, **kwargs):
        return os.path.isfile(self._real(path))

    def _ls(self, path, **kwargs):
        return os.listdir(self._real(path))


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("ELSEWHERE", str(tmp_path))
    path_manager.register_handler(Elsewhere(), allow_override=True)
    return tmp_path
