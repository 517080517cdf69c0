"""On every route a run that is killed ten times ends in the numbers of one that is not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from detection.commands.convert import main as convert
from kscl.backbone_file import read_plain
from kscl.commands.make_shapes import main as make_shapes
from kscl.datasets.shapes import coco
from kscl.engine.checkpoint import CHECKPOINT_FOLDER, find_checkpoints, step_of
from kscl.records.record import read_record
from tests.helpers.detection_runs import start_train_net
from tests.helpers.networks import NETWORKS
from tests.helpers.runs import same_bits

KILLS = 10
ROUTES = {  # name: network, protocol
    "fpn": ("resnet18", "shapes_tiny_fpn"),
    "timm": ("convnext_atto", "shapes_tiny_fpn"),
    "vit": ("vit_tiny_patch16_224", "shapes_tiny_fpn"),
    "mask": ("convnext_atto", "shapes_tiny_mask"),
}
LONG = ("SOLVER.MAX_ITER", str(KILLS + 2), "SOLVER.STEPS", "(8,)", "TEST.PRECISE_BN.NUM_ITER", "1")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> dict[str, str]:
    """The drawn shapes as COCO files with masks, few and small."""
    root = tmp_path_factory.mktemp("shapes") / "set"
    sizes = ["--num-classes", "2", "--unlabeled", "1", "--train", "2", "--val", "2"]
    sizes += ["--detection-train", "8", "--detection-test", "3"]
    assert make_shapes(["--output-dir", str(root), *sizes]) == 0
    images = root / "VOCdevkit" / "VOC2007" / "JPEGImages"
    return {
        role: f"('coco:{root / coco.file_path(split)}:{images}',)"
        for role, split in (("TRAIN", "trainval"), ("TEST", "test"))
    }


def newest_step(output: Path) -> int:
    return max(map(step_of, find_checkpoints(output / CHECKPOINT_FOLDER)), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("route", ROUTES)
def test_ten_kills_change_nothing(route, ranks, shop, drawn, tmp_path):
    network, protocol = ROUTES[route]
    words = ["random", "--arch", network, "--arch-kwargs", str(NETWORKS[network])]
    words += ["--protocol", f"detection/{protocol}.yaml", "--force"]
    assert convert([*words, "--output-dir", str(shop / f"weights-kill-{route}")]) == 0
    more = [f"--num-gpus={ranks}", "--auto-resume", *LONG]
    if route == "mask":
        for role, name in drawn.items():
            more += [f"DATASETS.{role}", name]

    def start(output: Path):
        return start_train_net(shop, output, *more, weights=f"-kill-{route}")

    undisturbed, output = tmp_path / "undisturbed", tmp_path / "killed"
    done = start(undisturbed).wait()
    assert done.returncode == 0, done.stderr
    for kill in range(1, KILLS + 1):
        run = start(output)
        while newest_step(output) < kill:
            assert run.process.is_alive(), run.stderr
            time.sleep(0.01)
        time.sleep(0.03 * (kill % 4))  # in a save, a step or between them
        os.killpg(run.process.pid, signal.SIGKILL)
        run.wait()
        assert not (output / "record.json").exists()
    done = start(output).wait()
    assert done.returncode == 0, done.stderr
    records = [read_record(folder / "record.json") for folder in (undisturbed, output)]
    assert records[0]["metrics"] == records[1]["metrics"]
    models = [read_plain(folder / "model_final.pth") for folder in (undisturbed, output)]
    assert same_bits(models[0], models[1])
