"""What the tests of the engine share: images, one thread, and the words of a refusal."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from kscl.commands.pretrain import main
from kscl.data.loader import epoch_order
from kscl.data.open import open_source
from tests.helpers.runs import draw_images


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return draw_images(tmp_path_factory.mktemp("images"))


@pytest.fixture
def with_broken(images, tmp_path):
    """A copy of the images; those at the given places of the first epoch cannot be read."""

    def copy(*places):
        source = open_source(str(images))
        some = shutil.copytree(images, tmp_path / "images")
        for index in epoch_order(0, 0, len(source))[list(places)]:
            broken = some / Path(source.name(int(index))).relative_to(images)
            broken.write_bytes(broken.read_bytes()[:200])
        return some

    return copy


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def error_of(capsys):
    """What the tool says when it refuses a command."""

    def run(command):
        capsys.readouterr()
        assert main(command) == 2
        return capsys.readouterr().err

    return run
