"""A converted folder is of use to Detectron2 alone: no code of this project, no extra package."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from detection.convert.converter import convert
from tests.helpers.commands import run
from tests.helpers.networks.backbones import NARROW, backbone_file

# What a user of Detectron2 writes, with a data set of two images in memory.
TRAIN = """
import json, sys
import numpy as np
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import DefaultTrainer
from detectron2.structures import BoxMode
from PIL import Image

cfg = get_cfg()
cfg.merge_from_file("config_plain.yaml")
Image.fromarray(np.full((96, 96, 3), 90, np.uint8)).save("image.png")
thing = {"bbox": [9, 9, 60, 60], "bbox_mode": BoxMode.XYXY_ABS, "category_id": 0}
image = {"file_name": "image.png", "height": 96, "width": 96, "image_id": 0, "annotations": [thing]}
DatasetCatalog.register("mine", lambda: [image, image])
MetadataCatalog.get("mine").thing_classes = ["thing"]
cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("mine",), ()
cfg.MODEL.DEVICE, cfg.DATALOADER.NUM_WORKERS, cfg.OUTPUT_DIR = "cpu", 0, "out"
cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS = 1, 1, ()
cfg.SOLVER.REFERENCE_WORLD_SIZE, cfg.TEST.PRECISE_BN.ENABLED = 0, False
cfg.INPUT.MIN_SIZE_TRAIN = (96,)
trainer = DefaultTrainer(cfg)
trainer.resume_or_load(resume=False)
names = [name for name, _ in trainer.model.named_parameters()]
first = {name: value.sum().item() for name, value in trainer.model.state_dict().items()}
trainer.train()
ours = [name for name in sys.modules if name.split(".")[0] in ("kscl", "detection")]
json.dump({"first": first, "ours": ours, "iter": trainer.iter}, open("told.json", "w"))
"""


@pytest.mark.parametrize(
    ("protocol", "prefix"),
    [
        ("shapes_tiny_c4", "backbone."),
        pytest.param("shapes_tiny_fpn", "backbone.bottom_up.", marks=pytest.mark.slow),
        pytest.param("shapes_tiny_retinanet", "backbone.bottom_up.", marks=pytest.mark.slow),
    ],
)
def test_detectron2_alone_trains_a_step_from_the_folder(protocol, prefix, tmp_path):
    source = backbone_file(tmp_path, "resnet50", NARROW)
    folder = convert(source, tmp_path / "out", protocol=f"detection/{protocol}.yaml").folder
    # Not the project's folder on the path: its packages are not to be found.
    done = run(sys.executable, "-W", "ignore", "-c", TRAIN, cwd=folder, env={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    told = json.loads((folder / "told.json").read_text())
    assert told["ours"] == []
    assert told["iter"] == 1
    weights = torch.load(folder / "weights.pth")["model"]
    for name in ("stem.conv1.weight", "res2.0.conv1.weight", "res4.5.conv3.norm.running_var"):
        assert told["first"][prefix + name] == pytest.approx(weights[name].sum().item(), rel=1e-5)


def test_the_model_zoo_of_detectron2_can_be_imported():
    code = "from detectron2 import model_zoo; print(model_zoo.get_config_file(NAME))"
    name = "COCO-Detection/retinanet_R_50_FPN_1x.yaml"
    done = run(sys.executable, "-W", "ignore", "-c", code.replace("NAME", repr(name)))
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip().splitlines()[-1]).is_file()
