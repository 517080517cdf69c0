"""On every route a run that is killed, stopped or damaged ends in the numbers of any other."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from detection.commands.convert import main as convert
from tests.detection.commands.test_routes import RETINANET
from tests.detection.commands.test_train_net_resume import (
    STOP_AT,
    assert_same_run,
    flip_bytes,
    newest_of,
    signal_in_training,
    steps_in,
)
from tests.helpers.detection_runs import TrainNet, start_train_net
from tests.helpers.networks.backbones import NARROW
from tests.helpers.networks.small import NETWORKS

KILLS = 10
ROUTES = {  # name: network, its arguments, protocol
    "fpn": ("resnet50", NARROW, "shapes_tiny_fpn"),
    "timm": ("convnext_atto", NETWORKS["convnext_atto"], "shapes_tiny_fpn"),
    "vit": ("vit_tiny_patch16_224", NETWORKS["vit_tiny_patch16_224"], "shapes_tiny_fpn"),
    "mask": ("convnext_atto", NETWORKS["convnext_atto"], "shapes_tiny_mask"),
    "retinanet": ("resnet50", NARROW, "shapes_tiny_retinanet"),
}
# On a busy machine a kill comes some iterations late, but never after the last one.
LONG = ("SOLVER.MAX_ITER", str(KILLS + 10), "SOLVER.STEPS", "(8,)", "TEST.PRECISE_BN.NUM_ITER", "1")

Start = Callable[..., TrainNet]


@pytest.fixture(params=ROUTES)
def start(request, shop, drawn) -> Start:
    """A function that starts a training on a route in a process of its own."""
    network, kwargs, protocol = ROUTES[request.param]
    weights = f"-kill-{request.param}"
    words = ["random", "--arch", network, "--arch-kwargs", str(kwargs), "--force"]
    words += ["--protocol", f"detection/{protocol}.yaml"]
    assert convert([*words, "--output-dir", str(shop / f"weights{weights}")]) == 0
    needed = {"mask": drawn, "retinanet": RETINANET}.get(request.param, [])

    def on_route(output: Path, *more: str, **options: object) -> TrainNet:
        return start_train_net(shop, output, *needed, *LONG, *more, weights=weights, **options)

    return on_route


def assert_finished(done: TrainNet, at_least: int) -> None:
    """Assert that a run ended well, and that it had resumed and not begun again."""
    assert done.returncode == 0, done.stderr
    (begun,) = re.findall(r"Training starts at iteration (\d+) of", done.stdout)
    assert int(begun) >= at_least


def leads_its_group(run: TrainNet) -> bool:
    """Say whether a run can be killed as a whole: one that has just been forked cannot."""
    return os.getpgid(run.process.pid) == run.process.pid


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ten_kills_change_nothing(start, ranks, tmp_path):
    words = (f"--num-gpus={ranks}", "--auto-resume")
    undisturbed, output = tmp_path / "undisturbed", tmp_path / "killed"
    assert_finished(start(undisturbed, *words).wait(), 0)
    for kill in range(1, KILLS + 1):
        run = start(output, *words)
        while max(steps_in(output), default=0) < kill or not leads_its_group(run):
            assert run.process.is_alive(), run.stderr
            time.sleep(0.01)
        time.sleep(0.03 * (kill % 4))  # in a save, a step or between them
        os.killpg(run.process.pid, signal.SIGKILL)
        run.wait()
        assert not (output / "record.json").exists()
    assert_finished(start(output, *words).wait(), KILLS)
    assert_same_run(output, undisturbed)


@pytest.mark.slow
def test_a_signal_saves_and_a_damaged_checkpoint_is_passed_over(start, tmp_path):
    undisturbed, output = tmp_path / "undisturbed", tmp_path / "stopped"
    words = ("SOLVER.CHECKPOINT_PERIOD", "2")  # the signal comes between two periods
    assert_finished(start(undisturbed, *words).wait(), 0)
    done = start(output, *words, before=signal_in_training, told=[signal.SIGTERM]).wait()
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert steps_in(output) == [STOP_AT + 1, STOP_AT]
    damaged = newest_of(output)
    flip_bytes(damaged)
    done = start(output, "--resume", *words).wait()
    assert_finished(done, STOP_AT)
    assert damaged.name in done.stderr + done.stdout
    assert_same_run(output, undisturbed)
