"""A folder for a model hub: timm loads it to the bit, and its card has the results."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml

from kscl.backbone_file import Description, load_backbone, save_backbone
from kscl.commands.export import main
from kscl.runtime.files import sha256_of
from tests.helpers.leaderboard_records import described, detection, linear, write_all

KWARGS = {"layers": [1, 1, 1, 1], "channels": [8, 8, 16, 32]}
METHOD = "<kscl> & | friends"
SOURCE = {"method": METHOD, "num_shots": 5, "rho": 0.4, "seed": 0, "data": "f00d" * 4}


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    loaded = load_backbone("random", "resnet18", KWARGS, seed=3)
    about = Description("resnet18", KWARGS, mean=(0.4, 0.5, 0.6), size=32, source=SOURCE)
    path = tmp_path_factory.mktemp("card") / "backbone.safetensors"
    save_backbone(path, loaded.backbone.state_dict(), about)
    return path


@pytest.fixture(scope="module")
def hub(weights: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    backbone = sha256_of(weights)
    records = [
        linear(61.5, backbone, details=described(METHOD, 0) | {"n": 1000}),
        *(
            linear(top1, f"{i:064d}", details=described(METHOD, i))
            for i, top1 in ((1, 62), (2, 63))
        ),
        detection(30.0, backbone, details=described(METHOD, 0)),
    ]
    given = ["--records", str(write_all(folder / "records", records))]
    output = folder / "hub"
    assert main(["hub", str(weights), "--output-dir", str(output), *given]) == 0
    return output


def front_matter(hub: Path) -> dict[str, Any]:
    return yaml.safe_load((hub / "README.md").read_text().split("---\n")[1])


def test_timm_loads_it_and_gives_the_same_features_to_the_bit(hub, weights):
    images = torch.randn(3, 3, 32, 32)
    network = timm.create_model(f"local-dir:{hub}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(network(images), load_backbone(weights).backbone(images))
    assert tuple(network.pretrained_cfg["mean"]) == (0.4, 0.5, 0.6)
    assert tuple(network.pretrained_cfg["input_size"]) == (3, 32, 32)


def test_the_card_has_results_with_intervals_license_and_data(hub):
    metadata = front_matter(hub)
    assert metadata["license"] == "apache-2.0"
    results = metadata["model-index"][0]["results"]
    top1 = next(it for it in results if it["dataset"]["name"] == "linear-cached")
    (metric,) = top1["metrics"]
    assert metric["value"] == pytest.approx((61.5 + 62 + 63) / 3, abs=1e-4)
    assert metric["args"]["seeds"] == 3
    low, high = metric["args"]["interval_95"]
    assert low < metric["value"] < high
    ap = next(it for it in results if it["task"]["type"] == "object-detection")
    assert "interval_95" not in ap["metrics"][0]["args"]  # one seed
    text = (hub / "README.md").read_text()
    assert SOURCE["data"] in text
    assert "<kscl>" not in text.split("---\n", 2)[2]


def test_the_badge_is_a_picture_whatever_the_name_is(hub):
    root = ElementTree.parse(hub / "badge.svg").getroot()
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words[0] == f"{METHOD} resnet18"
    assert words[1].startswith("top-1 62.17 [")


def test_records_of_another_backbone_are_refused(weights, tmp_path, capsys):
    records = write_all(tmp_path / "records", [linear(50.0, "a" * 64)])
    output = tmp_path / "hub"
    given = ["hub", str(weights), "--output-dir", str(output), "--records", str(records)]
    assert main(given) == 2
    assert sha256_of(weights)[:16] in capsys.readouterr().err
    assert not output.exists()
    assert main(given[:4]) == 0
    assert "model-index" not in front_matter(output)
    assert main(given[:4]) == 2  # never overwritten
