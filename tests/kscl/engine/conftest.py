"""What the tests of the engine share: images, one thread, and the words of a refusal."""

from __future__ import annotations

import pytest
import torch

from kscl.commands.pretrain import main
from tests.helpers.runs import draw_images


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return draw_images(tmp_path_factory.mktemp("images"))


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
