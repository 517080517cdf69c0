"""Finding one network in a file that may hold several, or name them as no known project does."""

from __future__ import annotations

import pytest
import torch

from kscl.backbone_file import load_backbone, tensors_hash
from kscl.errors import KsclError
from kscl.methods.encoder import build_backbone
from tests.helpers.networks.checkpoints import moco, some, under

NARROW = {"channels": [8, 16, 32, 64]}
INPUT = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.fixture(scope="module")
def networks():
    torch.manual_seed(1)
    return [build_backbone("resnet18", NARROW) for _ in range(2)]


@pytest.fixture
def saved(tmp_path):
    def save(content):
        torch.save(content, tmp_path / "x.pth")
        return tmp_path / "x.pth"

    return save


def load(path, **more):
    return load_backbone(path, "resnet18", NARROW, **more)


def test_container_and_prefix_name_any_layout_and_the_rest_is_listed(networks, saved):
    one, two = (network.state_dict() for network in networks)
    tensors = under("net.trunk.", one) | under("net.twin.", two) | some("net.trunk.fc.weight", "x")
    path = saved({"run": {"weights": tensors}, "optimizer": {"state": some("a", "b")}})
    with pytest.raises(KsclError, match=r"run\.weights --prefix 'net\.twin\.'"):
        load(path)
    loaded = load(path, container="run.weights", prefix="net.trunk.", **INPUT)
    assert loaded.tensors_sha256 == tensors_hash(networks[0])
    expected = {
        *under("net.twin.", two),
        "net.trunk.fc.weight",
        "x",
        "[optimizer.state] (2 tensors)",
    }
    assert set(loaded.left_behind) == expected


def test_the_key_encoder_is_taken_if_it_is_chosen(networks, saved):
    path = saved(moco(*(network.state_dict() for network in networks)))
    chosen = load(path, container="state_dict", prefix="module.encoder_k.", **INPUT)
    assert chosen.tensors_sha256 == tensors_hash(networks[1])


def test_the_input_of_an_unknown_layout_is_asked_for(networks, saved):
    path = saved({"weights": networks[0].state_dict()})
    with pytest.raises(KsclError, match="--mean"):
        load(path, container="weights")


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ({"container": "weights", "prefix": "nothing."}, r"'nothing\.'"),
        ({"container": "weights", "prefix": "net"}, "'net'"),
        ({"container": "none"}, "--container 'none'.*weights"),
        ({"prefix": "net."}, r"layer2\.0\.conv1\.weight"),
    ],
)
def test_a_place_without_the_whole_network_is_refused(networks, saved, place, named):
    state = under("net.", networks[0].state_dict())
    if place == {"prefix": "net."}:
        del state["net.layer2.0.conv1.weight"]
    with pytest.raises(KsclError, match=named):
        load(saved({"weights": state}), **place, **INPUT)


def test_a_network_with_more_parts_is_refused_even_where_its_place_is_named(saved):
    state = build_backbone("seresnet18", NARROW).state_dict()
    with pytest.raises(KsclError, match=r"se\.fc1\.weight"):
        load(saved({"net": state}), container="net", prefix="", **INPUT)


def test_one_network_under_two_names_is_one_network(networks, saved):
    state = networks[0].state_dict()
    tensors = under("backbone.", state) | under("encoder_q.0.", state) | some("queue")
    assert load(saved({"state_dict": tensors})).said == ()


def test_two_networks_that_differ_by_a_wrapper_only_are_two(networks, saved):
    one, two = (network.state_dict() for network in networks)
    path = saved(one | under("module.", two))
    with pytest.raises(KsclError, match=r"--prefix ''(.|\n)*--prefix 'module\.'"):
        load(path)
    for prefix, network in (("", networks[0]), ("module.", networks[1])):
        loaded = load(path, prefix=prefix, **INPUT)
        assert loaded.tensors_sha256 == tensors_hash(network)


def test_a_third_network_beside_mocos_two_is_asked_for(networks, saved):
    one, two = (network.state_dict() for network in networks)
    content = moco(one, two)
    third = {key: value + 1 for key, value in one.items()}
    content["average"] = third
    with pytest.raises(KsclError, match="3 times"):
        load(saved(content))


def test_a_smaller_second_network_is_not_this_one(networks, saved):
    smaller = build_backbone("resnet18", {"channels": [4, 8, 16, 32]}).state_dict()
    path = saved({"model": networks[0].state_dict(), "model_ema": smaller})
    assert load(path).layout == "plain (model)"


@pytest.mark.parametrize("prefix", ["", "backbone.", "backbone.bottom_up."])
def test_a_file_of_detectron2_by_an_unknown_author_is_asked_for_its_channels(saved, prefix):
    names = ("stem.conv1.weight", "res2.0.conv1.weight")
    content = {"model": some(*(prefix + name for name in names)), "__author__": "x"}
    with pytest.raises(KsclError, match="--channels"):
        load(saved(content))


def test_a_file_of_the_converter_says_that_it_needs_no_conversion(saved):
    content = {"model": some("stem.conv1.weight", "res2.0.conv1.weight"), "__author__": "kscl"}
    with pytest.raises(KsclError, match=r"needs no conversion.*--to timm"):
        load(saved(content))


def test_a_pkl_that_is_none_is_named(tmp_path):
    (tmp_path / "x.pkl").write_bytes(b"x")
    with pytest.raises(KsclError, match=r"x\.pkl is not a pickle"):
        load(tmp_path / "x.pkl")


def test_a_file_that_holds_itself_is_read(networks, saved):
    content: dict = {"model": networks[0].state_dict()}
    content["again"] = content
    assert load(saved(content)).layout == "plain (model)"


def test_names_with_escape_codes_are_printed_without_them(networks, saved):
    state = networks[0].state_dict()
    path = saved({"\x1b[31mred": under("\x1b]0;title\x07net.", state)})
    with pytest.raises(KsclError, match="--container red") as caught:
        load(path)
    assert "\x1b" not in str(caught.value)
    assert "\x07" not in str(caught.value)
