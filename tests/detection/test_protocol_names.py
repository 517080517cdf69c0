"""The name of a protocol says on what data it is measured, if not on those it is shipped with."""

from __future__ import annotations

import pytest

from detection.config import load_detection_config
from detection.train.protocol import protocol_of
from kscl.config.shipped import shipped_configs

PROTOCOLS = sorted((shipped_configs() / "detection").glob("[!_]*.yaml"))


@pytest.mark.parametrize("path", PROTOCOLS, ids=lambda path: path.stem)
def test_a_protocol_on_its_own_data_has_its_shipped_name_wherever_they_are(path, monkeypatch):
    name = path.stem.replace("_", "-")
    assert protocol_of(load_detection_config(path)).id == name
    monkeypatch.setenv("DETECTRON2_DATASETS", "/elsewhere")
    assert protocol_of(load_detection_config(path)).id == name


@pytest.mark.parametrize(
    ("name", "train", "test", "told"),
    [
        ("bccd_tiny_c4", "voc:/x/mine:trainval", "voc:/x/mine:test", "+DATASETS=mine"),
        ("bccd_tiny_c4", "voc:/x/BCCD:train", "voc:/x/BCCD:val", ""),
        ("bccd_tiny_c4", "voc:/x/BCCD:train", "voc:/x/mine:val", "+DATASETS=BCCD,mine"),
        ("voc07_c4_12k5", "voc:/x/VOC2007:trainval", "voc:/x/VOC2007:test", ""),
        ("voc07_c4_12k5", "voc:mine:trainval", "voc:mine:test", "+DATASETS=mine"),
        (
            "coco_fpn_1x",
            "coco:/x/instances_train2017.json:/y/train2017",
            "coco:/x/instances_val2017.json:/y/val2017",
            "",
        ),
        (
            "coco_fpn_1x",
            "coco:/x/mine/annotations/train.json:/x/mine/images",
            "coco:/x/mine/annotations/val.json:/x/mine/images",
            "+DATASETS=mine",
        ),
    ],
)
def test_the_name_of_a_protocol_follows_the_data(name, train, test, told):
    words = ["DATASETS.TRAIN", f"('{train}',)", "DATASETS.TEST", f"('{test}',)"]
    config, shipped = f"detection/{name}.yaml", name.replace("_", "-")
    assert protocol_of(load_detection_config(config, words)).id == shipped + told
    # A protocol with a name of its own keeps it.
    named = load_detection_config(config, [*words, "KSCL.PROTOCOL", "mine-c4"])
    assert protocol_of(named).id == "mine-c4"
