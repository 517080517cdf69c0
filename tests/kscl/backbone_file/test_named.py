"""Weights by name: what each name stands for, its cache, and what is said if it cannot be had."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
import torchvision

from kscl.backbone_file import Description, cached_weights, load_backbone, named, save_backbone
from kscl.backbone_file.load import Loaded
from kscl.benchmark.card import write_hub_folder
from kscl.errors import KsclError
from kscl.methods.encoder import build_backbone
from kscl.runtime.files import sha256_of
from tests.helpers import hub as hubs

TIMM = "timm:test_resnet.r160_in1k"
REPOSITORY = "timm/test_resnet.r160_in1k"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub, and empty caches."""
    named._changed.cache_clear()
    with hubs.serve(tmp_path) as hub:
        hubs.use(monkeypatch, tmp_path, hub.address)
        yield hub


def weights_of(name: str, seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a model of timm's with its classifier."""
    torch.manual_seed(seed)
    return timm.create_model(name, num_classes=10).state_dict()


def assert_holds(loaded: Loaded, tensors: dict[str, torch.Tensor]) -> None:
    for key, value in loaded.backbone.state_dict().items():
        assert torch.equal(value, tensors[key]), key


def test_a_name_of_timm_is_fetched_once_and_says_what_it_is(hub, tmp_path):
    tensors = weights_of("test_resnet", seed=1)
    digest = hub.push(REPOSITORY, tensors)
    assert cached_weights(TIMM) is None
    loaded = load_backbone(TIMM)
    assert_holds(loaded, tensors)
    about = timm.get_pretrained_cfg("test_resnet.r160_in1k")
    description = loaded.description
    assert (description.arch, description.mean, description.std, description.size) == (
        *("test_resnet", about.mean, about.std, 160),
    )
    assert loaded.file_sha256 == digest
    assert loaded.path is not None
    assert loaded.path.is_relative_to(tmp_path / "hf")
    hub.asked.clear()
    assert cached_weights(TIMM) == loaded.path
    assert hub.asked == []
    load_backbone(TIMM)
    assert not any(request.startswith("GET") for request in hub.asked)


def test_a_prefilled_cache_serves_offline(hub, tmp_path, monkeypatch):
    tensors = weights_of("test_resnet", seed=1)
    hub.push(REPOSITORY, tensors)
    load_backbone(TIMM)
    shutil.copytree(tmp_path / "hf", tmp_path / "copied/hf", symlinks=True)
    hubs.use(monkeypatch, tmp_path / "copied", offline=True)
    hub.asked.clear()
    loaded = load_backbone(TIMM)
    assert_holds(loaded, tensors)
    assert hub.asked == []


def test_a_model_on_the_hub_is_built_from_its_own_config(hub):
    kwargs = {"channels": [8, 16, 32, 64]}
    tensors = build_backbone("resnet18", kwargs).state_dict()
    colors = {"mean": [0.5, 0.4, 0.3], "std": [0.3, 0.2, 0.1], "input_size": [3, 96, 96]}
    hub.push("me/small", tensors, architecture="resnet18", model_args=kwargs, pretrained_cfg=colors)
    loaded = load_backbone("hf-hub:me/small")
    assert_holds(loaded, tensors)
    assert loaded.description == Description(
        "resnet18", kwargs, mean=(0.5, 0.4, 0.3), std=(0.3, 0.2, 0.1), size=96
    )
    with pytest.raises(KsclError, match=r"INPUT\.MEAN"):
        load_backbone("hf-hub:me/small", mean=(0.485, 0.456, 0.406))
    with pytest.raises(KsclError, match="resnet18, not resnet50"):
        load_backbone("hf-hub:me/small", "resnet50")


def test_what_export_writes_for_a_hub_comes_back(hub, tmp_path):
    state = build_backbone("test_resnet").state_dict()
    save_backbone(tmp_path / "own.safetensors", state, Description("test_resnet", size=32))
    write_hub_folder(
        load_backbone(tmp_path / "own.safetensors"), tmp_path / "folder", [], "apache-2.0"
    )
    files = {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()}
    hub.repositories["me/own"] = files
    loaded = load_backbone("hf-hub:me/own")
    assert_holds(loaded, state)
    assert loaded.description.size == 32


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("timm:test_resnt", "timm:test_resnet.r160_in1k"),
        ("timm:test_resnet.a1", "timm:test_resnet.r160_in1k"),
        ("torchvision:ResNet50_Weights.V2", "torchvision:ResNet50_Weights.IMAGENET1K_V2"),
        ("torchvision:ViT_B_16_Weights.IMAGENET1K_V1", "vit_b_16"),
        ("hf-hub:small", "hf-hub:OWNER/NAME"),
        ("hf-hub:me/other", "'architecture'"),
        ("hf-hub:me/evil", "checkpoint_path"),
        ("hf-hub:me/nothing", "/me/nothing"),
        ("small.pth", "small.pth"),
    ],
)
def test_a_wrong_name_is_refused_with_what_is_near_it(hub, name, named):
    hub.push("me/other", {}, architectures=["ResNetForImageClassification"])
    hub.push("me/evil", {}, architecture="resnet18", model_args={"checkpoint_path": "/etc/passwd"})
    with pytest.raises(KsclError) as error:
        load_backbone(name)
    assert named in str(error.value)
    assert name in str(error.value)


@pytest.mark.parametrize("offline", [True, False], ids=["offline", "no network"])
@pytest.mark.parametrize(
    ("name", "tried", "kept"),
    [
        (TIMM, "/timm/test_resnet.r160_in1k", "models--timm--test_resnet.r160_in1k"),
        ("hf-hub:me/small@main", "/me/small", "models--me--small"),
        (
            "torchvision:ResNet18_Weights.IMAGENET1K_V1",
            "download.pytorch.org/models/resnet18-f37072fd.pth",
            "hub/checkpoints/resnet18-f37072fd.pth",
        ),
        (f"{hubs.NOWHERE}/moco.pth.tar", "/moco.pth.tar", "kscl/downloads"),
    ],
)
def test_without_network_one_error_names_address_and_cache(
    tmp_path, monkeypatch, name, tried, kept, offline
):
    def refused(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refused)  # its host is another one
    monkeypatch.setattr("kscl.runtime.paths.ATTEMPTS", 1)
    hubs.use(monkeypatch, tmp_path, offline=offline)
    with pytest.raises(KsclError) as error:
        load_backbone(name, "resnet18")
    for part in (name, tried, kept, str(tmp_path)):
        assert part in str(error.value)
    assert ("HF_HUB_OFFLINE" in str(error.value)) == offline


def test_a_file_that_changed_on_the_hub_is_named_and_the_cached_one_is_used(hub):
    first, second = (weights_of("test_resnet", seed) for seed in (1, 2))
    hub.push(REPOSITORY, first)
    before = load_backbone(TIMM)
    assert before.messages == ()
    digest = hub.push(REPOSITORY, second)
    named._changed.cache_clear()
    after = load_backbone(TIMM)
    assert after.file_sha256 == before.file_sha256
    assert digest[:12] in after.messages[0]
    pinned = f"hf-hub:{REPOSITORY}@{hub.commit(REPOSITORY)}"
    assert pinned in after.messages[0]
    hub.repositories[REPOSITORY]["config.json"] = json.dumps(
        {"architecture": "test_resnet"}
    ).encode()
    pinned = f"hf-hub:{REPOSITORY}@{hub.commit(REPOSITORY)}"
    assert load_backbone(pinned).file_sha256 == digest


def test_a_damaged_file_in_the_cache_is_refused(hub):
    hub.push(REPOSITORY, weights_of("test_resnet", seed=1))
    path = load_backbone(TIMM).path
    assert path is not None
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.resolve().write_bytes(content)
    with pytest.raises(KsclError, match="damaged"):
        load_backbone(TIMM)


def test_weights_of_torchvision_come_from_its_cache(tmp_path, monkeypatch):
    """By the file that torchvision itself reads, and with the hash in its name."""
    hubs.use(monkeypatch, tmp_path, offline=True)
    torch.manual_seed(3)
    network = torchvision.models.resnet18()
    made = tmp_path / "resnet18.pth"
    torch.save(network.state_dict(), made)
    url = f"https://download.pytorch.org/models/resnet18-{sha256_of(made)[:8]}.pth"
    member = torchvision.models.ResNet18_Weights.IMAGENET1K_V1
    monkeypatch.setattr(type(member.value), "url", property(lambda _: url), raising=False)
    kept = tmp_path / "torch/hub/checkpoints" / Path(url).name
    kept.parent.mkdir(parents=True)
    made.rename(kept)
    theirs = member.get_state_dict(weights_only=True)  # offline: from the same file
    loaded = load_backbone("torchvision:ResNet18_Weights.IMAGENET1K_V1")
    assert_holds(loaded, theirs)
    assert (loaded.path, loaded.description.arch, loaded.description.size) == (
        *(kept, "resnet18", 224),
    )
    kept.write_bytes(kept.read_bytes() + b"0")
    with pytest.raises(KsclError, match="damaged"):
        load_backbone("torchvision:ResNet18_Weights.IMAGENET1K_V1")


def test_the_hash_in_an_address_is_checked(hub):
    made = hub.push("me/plain", build_backbone("test_resnet").state_dict())
    content = hub.repositories["me/plain"]["model.safetensors"]
    for digits, fits in ((made[:8], True), ("0" * 8, False)):
        file = f"net-{digits}.safetensors"
        hub.repositories["me/plain"][file] = content
        address = f"{hub.address}/me/plain/resolve/main/{file}"
        if fits:
            found = load_backbone(address, "test_resnet").file_sha256
            assert found == hashlib.sha256(content).hexdigest()
        else:
            with pytest.raises(KsclError, match="damaged"):
                load_backbone(address, "test_resnet")
