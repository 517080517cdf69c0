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


def test_another_scorer_than_the_shipped_one_is_told_by_the_name():
    """Published numbers stand beside those of the same name."""
    for name, shipped, other in (
        ("coco_fpn_1x", "coco-101pt", "voc07-11pt"),
        ("voc07_c4_12k5", "voc07-11pt", "coco-101pt"),
    ):
        names = [
            protocol_of(load_detection_config(f"detection/{name}.yaml", ["KSCL.SCORER", scorer])).id
            for scorer in (shipped, other)
        ]
        own = name.replace("_", "-")
        assert names == [own, f"{own}+KSCL.SCORER={other}"]


def test_plain_batch_norm_on_several_processes_is_another_protocol():
    plain, synchronized = (
        load_detection_config("detection/shapes_tiny_c4.yaml", ["MODEL.RESNETS.NORM", norm])
        for norm in ("BN", "naiveSyncBN")
    )
    found = [protocol_of(plain, processes) for processes in ((1,), (2,), (4,), (2, 1))]
    assert found[0] == protocol_of(plain)
    assert "processes" not in found[0].definition
    assert len({protocol.hash for protocol in found}) == 4
    assert protocol_of(synchronized, (2,)) == protocol_of(synchronized)
