"""Reading backbones of other projects: one network, whole, from the place that is meant."""

from __future__ import annotations

import pytest
import torch
from timm.models.vision_transformer import checkpoint_filter_fn

from kscl.backbone_file import LAYOUTS, Description, load_backbone, save_backbone, tensors_hash
from kscl.backbone_file.layouts import SWAV_INPUT
from kscl.errors import KsclError
from kscl.methods.encoder import build_backbone
from kscl.runtime.files import sha256_of
from tests.helpers.faults.bad_server import serve
from tests.helpers.networks.checkpoints import CHECKPOINTS, dino, mae, moco, some, under

NARROW = {"channels": [8, 16, 32, 64]}
VIT = "vit_tiny_patch16_224"
SMALL_VIT = {"img_size": 32, "depth": 1, "embed_dim": 12, "num_heads": 2}
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
ASKED = [name for name, layout in LAYOUTS.items() if isinstance(layout.input, str)]


@pytest.fixture(scope="module")
def networks():
    """Two networks: the one that a project's evaluation uses, and the other one."""
    torch.manual_seed(1)
    return [build_backbone("resnet18", NARROW) for _ in range(2)]


@pytest.fixture(scope="module")
def states(networks):
    return [network.state_dict() for network in networks]


@pytest.fixture(scope="module")
def vits():
    torch.manual_seed(1)
    return [build_backbone(VIT, SMALL_VIT) for _ in range(2)]


@pytest.fixture
def saved(tmp_path):
    def save(content):
        torch.save(content, tmp_path / "x.pth")
        return tmp_path / "x.pth"

    return save


def load(path, arch="resnet18", kwargs=NARROW, **more):
    return load_backbone(path, arch, kwargs, **more)


def container_of(content: dict, layout: str) -> dict:
    """The dict of tensors in a project's checkpoint; it may also be saved alone."""
    for key in LAYOUTS[layout].container:
        content = content.get(key, content)
    return content


@pytest.mark.parametrize(
    ("arch", "registers", "kwargs"),
    [
        ("vit_small_patch14_dinov2", 0, {}),
        ("vit_small_patch14_reg4_dinov2", 4, {}),
        ("vit_giant_patch14_reg4_dinov2", 4, {"mlp_ratio": 4}),
    ],
)
def test_a_file_of_dinov2_is_read_as_timm_reads_it(saved, arch, registers, kwargs):
    kwargs = {**kwargs, "img_size": 28, "depth": 1, "embed_dim": 12, "num_heads": 2}
    torch.manual_seed(0)
    network = build_backbone(arch, kwargs)
    names = {"fc1": "w12", "fc2": "w3"} if "giant" in arch else {}
    content = {"mask_token": torch.randn(1, 12), "pos_embed": torch.randn(1, 5, 12)}
    content["cls_token"] = torch.randn(1, 1, 12)
    if registers:
        content["register_tokens"] = torch.randn(1, registers, 12)
    for key, value in network.state_dict().items():
        for ours, theirs in names.items():
            key = key.replace(f".mlp.{ours}.", f".mlp.{theirs}.")
        if key not in ("pos_embed", "cls_token", "reg_token"):
            content[key] = torch.randn_like(value)
    loaded = load(saved(content), arch, kwargs)
    assert loaded.layout == "dinov2"
    assert (loaded.description.mean, loaded.description.std) == tuple(IMAGENET.values())
    expected = checkpoint_filter_fn(dict(content), network)
    assert set(expected) == set(network.state_dict())
    for key, value in loaded.backbone.state_dict().items():
        torch.testing.assert_close(value, expected[key].view_as(value), rtol=0, atol=0)


@pytest.mark.parametrize("project", CHECKPOINTS)
def test_a_checkpoint_is_read_as_its_project_would(networks, states, saved, project):
    make, layout, second = CHECKPOINTS[project]
    content = make(*states)
    loaded = load(saved(content), **(IMAGENET if layout in ASKED else {}))
    assert loaded.layout == layout
    assert loaded.tensors_sha256 == tensors_hash(networks[0])
    taken = [sentence for sentence in loaded.messages if sentence.startswith("Took")]
    assert len(taken) == int(second)
    tensors = [v for v in container_of(content, layout).values() if torch.is_tensor(v)]
    unused = [key for key in loaded.left_behind if not key.startswith("[")]
    assert len(unused) == len(tensors) - len(states[0])


@pytest.mark.parametrize("project", ["MoCo v1 and v2", "DINO", "VISSL", "torchvision"])
def test_a_tensor_that_its_project_does_not_know_is_refused_by_name(states, saved, project):
    make, layout, _ = CHECKPOINTS[project]
    content = make(*states)
    container_of(content, layout)["neck9.weight"] = torch.zeros(2)
    with pytest.raises(KsclError, match=r"neck9\.weight|choose one"):
        load(saved(content), **IMAGENET)


def test_every_layout_of_others_is_tested():
    tested = {layout for _, layout, _ in CHECKPOINTS.values()}
    elsewhere = {"kscl checkpoint", "dino (student)", "dinov2", "mae", "plain (model_state_dict)"}
    averages = {"plain (state_dict_ema)", "plain (model_ema)"}
    assert tested | elsewhere | averages == set(LAYOUTS)


@pytest.mark.parametrize("name", ASKED)
def test_an_input_that_is_not_imagenets_is_asked_for(states, saved, name):
    path = saved(next(make for make, layout, _ in CHECKPOINTS.values() if layout == name)(*states))
    with pytest.raises(KsclError, match=r"--mean .* --std"):
        load(path)
    with pytest.raises(KsclError, match="the std of its input must be given"):
        load(path, mean=(0, 0, 0))
    described = load(path, mean=(0, 0, 0), std=(1, 1, 1)).description
    assert (described.mean, described.std) == ((0, 0, 0), (1, 1, 1))


def test_swavs_own_standard_deviation_is_used(states, saved):
    described = load(saved(CHECKPOINTS["SwAV, released"][0](*states))).description
    assert (described.mean, described.std) == SWAV_INPUT
    assert described.std != IMAGENET["std"]


def test_the_network_that_is_chosen_is_taken(networks, states, saved):
    student = load(saved(dino(*states)), container="student")
    assert student.layout == "dino (student)"
    assert student.tensors_sha256 == tensors_hash(networks[1])
    assert any(name.startswith("[teacher]") for name in student.left_behind)
    place = {"container": "state_dict", "prefix": "module.encoder_k."}
    key_encoder = load(saved(moco(*states)), **place, **IMAGENET)
    assert key_encoder.tensors_sha256 == tensors_hash(networks[1])


@pytest.mark.parametrize(("make", "layout"), [(mae, "mae"), (dino, "dino")])
def test_vision_transformers_of_mae_and_dino_load(vits, saved, make, layout):
    loaded = load(saved(make(*(vit.state_dict() for vit in vits))), VIT, SMALL_VIT)
    assert loaded.layout == layout
    assert loaded.tensors_sha256 == tensors_hash(vits[0])
    assert loaded.description.mean == IMAGENET["mean"]


@pytest.mark.parametrize("key", ["", "state_dict", "state_dict_ema"])
def test_the_input_of_a_plain_file_is_that_of_the_model_in_timm_and_it_is_said(vits, saved, key):
    state = vits[0].state_dict()
    path = saved({"arch": VIT, key: state} if key else state)
    loaded = load(path, VIT, SMALL_VIT)
    assert loaded.description.mean == loaded.description.std == (0.5,) * 3
    assert "--mean" in " ".join(loaded.messages)
    told = load(path, VIT, SMALL_VIT, **IMAGENET)
    assert told.description.mean == IMAGENET["mean"]
    assert told.messages == ()


@pytest.mark.parametrize("key", ["model", "model_ema"])
def test_a_transformer_under_model_is_timms_or_maes_and_its_input_is_asked_for(vits, saved, key):
    path = saved({key: vits[0].state_dict()})  # as MAE releases it: without the decoder
    with pytest.raises(KsclError, match=r"MAE and DeiT .*\(0\.5, .*--mean R G B --std R G B"):
        load(path, VIT, SMALL_VIT)
    loaded = load(path, VIT, SMALL_VIT, **IMAGENET)
    assert loaded.layout == f"plain ({key})"
    assert loaded.description.mean == IMAGENET["mean"]
    deit = load(path, "deit_tiny_patch16_224", SMALL_VIT)  # timm knows its input
    assert (deit.description.mean, deit.messages) == (IMAGENET["mean"], ())


@pytest.mark.parametrize("keys", [("model", "model_ema"), ("state_dict", "state_dict_ema")])
def test_weights_and_their_average_are_refused_until_one_is_chosen(networks, states, saved, keys):
    averaged = under("module.", states[1]) | {"n_averaged": torch.tensor(5)}
    path = saved({keys[0]: states[0], keys[1]: averaged, "epoch": 3})
    with pytest.raises(KsclError, match=rf"--container {keys[0]}(.|\n)*--container {keys[1]}"):
        load(path)
    for key, network in zip(keys, networks, strict=True):
        loaded = load(path, container=key)
        assert loaded.layout == f"plain ({key})"
        assert loaded.tensors_sha256 == tensors_hash(network)


def test_container_and_prefix_name_any_layout_and_the_rest_is_listed(networks, states, saved):
    one, two = states
    tensors = under("net.trunk.", one) | under("net.twin.", two) | some("net.trunk.fc.weight", "x")
    path = saved({"run": {"weights": tensors}, "optimizer": {"state": some("a", "b")}})
    with pytest.raises(KsclError, match=r"run\.weights --prefix 'net\.twin\.'"):
        load(path)
    place = {"container": "run.weights", "prefix": "net.trunk."}
    with pytest.raises(KsclError, match="--mean"):
        load(path, **place)
    loaded = load(path, **place, **IMAGENET)
    assert loaded.tensors_sha256 == tensors_hash(networks[0])
    rest = {*under("net.twin.", two), "net.trunk.fc.weight", "x", "[optimizer.state] (2 tensors)"}
    assert set(loaded.left_behind) == rest


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ({"container": "weights", "prefix": "nothing."}, r"'nothing\.'"),
        ({"container": "weights", "prefix": "net"}, "'net'"),
        ({"container": "none"}, "--container 'none'.*weights"),
        ({"prefix": "net."}, r"layer2\.0\.conv1\.weight"),
    ],
)
def test_a_place_without_the_whole_network_is_refused(states, saved, place, named):
    state = under("net.", states[0])
    if place == {"prefix": "net."}:
        del state["net.layer2.0.conv1.weight"]
    with pytest.raises(KsclError, match=named):
        load(saved({"weights": state}), **place, **IMAGENET)


def test_a_network_with_more_or_fewer_parts_or_of_another_width_is_refused_by_name(states, saved):
    more = build_backbone("seresnet18", NARROW).state_dict()
    for content, place in (({"net": more}, {"container": "net", "prefix": ""}), (more, {})):
        with pytest.raises(KsclError, match=r"se\.fc1\.weight"):
            load(saved(content), **place, **IMAGENET)
    fewer = {key: value for key, value in states[0].items() if key != "layer3.0.conv2.weight"}
    with pytest.raises(KsclError, match=r"layer3\.0\.conv2\.weight"):
        load(saved(fewer))
    with pytest.raises(KsclError, match=r"conv1\.weight"):
        load(saved(states[0]), kwargs={"channels": [4, 8, 16, 32]})


def test_copies_of_a_network_are_told_apart(networks, states, saved):
    one, two = states
    twice = under("backbone.", one) | under("encoder_q.0.", one) | some("queue")
    assert load(saved({"state_dict": twice})).messages == ()  # one network under two names
    path = saved(one | under("module.", two))  # two that differ only by a wrapper
    with pytest.raises(KsclError, match=r"--prefix ''(.|\n)*--prefix 'module\.'"):
        load(path)
    for prefix, network in (("", networks[0]), ("module.", networks[1])):
        assert load(path, prefix=prefix, **IMAGENET).tensors_sha256 == tensors_hash(network)
    third = {key: value + 1 for key, value in one.items()}
    with pytest.raises(KsclError, match="3 times"):
        load(saved(moco(one, two) | {"average": third}))
    smaller = build_backbone("resnet18", {"channels": [4, 8, 16, 32]}).state_dict()
    assert load(saved({"model": one, "model_ema": smaller})).layout == "plain (model)"


def test_odd_files_that_hold_the_network_are_read(states, saved):
    old = {key: value for key, value in states[0].items() if "num_batches" not in key}
    assert load(saved(old)).layout == "plain"
    assert load(saved({"model_state_dict": old})).layout == "plain (model_state_dict)"
    content: dict = {"model": states[0]}
    content["again"] = content  # it holds itself
    assert load(saved(content)).layout == "plain (model)"


@pytest.mark.parametrize("prefix", ["", "backbone.", "backbone.bottom_up."])
def test_a_file_of_detectron2_by_an_unknown_author_is_asked_for_its_channels(saved, prefix):
    names = ("stem.conv1.weight", "res2.0.conv1.weight")
    content = {"model": some(*(prefix + name for name in names)), "__author__": "x"}
    with pytest.raises(KsclError, match="--channels"):
        load(saved(content))
    with pytest.raises(KsclError, match=r"needs no conversion.*--to timm"):
        load(saved(content | {"__author__": "kscl"}))


def test_names_with_escape_codes_are_printed_without_them(states, saved):
    path = saved({"\x1b[31mred": under("\x1b]0;title\x07net.", states[0])})
    with pytest.raises(KsclError, match="--container red") as caught:
        load(path)
    assert "\x1b" not in str(caught.value)
    assert "\x07" not in str(caught.value)


def test_the_arch_in_a_file_of_moco_names_its_network(networks, states, saved):
    path = saved(moco(*states))
    loaded = load_backbone(path, kwargs=NARROW)
    assert (loaded.layout, loaded.description.arch) == ("moco", "resnet18")
    assert loaded.tensors_sha256 == tensors_hash(networks[0])
    same = load(path, "resnet18.a1_in1k")  # timm's tag names weights
    assert same.tensors_sha256 == loaded.tensors_sha256
    with pytest.raises(KsclError, match=r"x\.pth .* resnet18, not resnet34"):
        load(path, "resnet34")


@pytest.mark.parametrize("arch", ["vit_small", 50, None, "\x1b[31mresnet"])
def test_an_arch_that_timm_does_not_know_must_be_named_and_contradicts_nothing(states, saved, arch):
    path = saved(moco(*states) | {"arch": arch})
    with pytest.raises(KsclError, match=r"x\.pth .*BACKBONE\.NAME.*--arch") as caught:
        load_backbone(path, kwargs=NARROW)
    assert ("vit_small" in str(caught.value)) == (arch == "vit_small")
    assert "\x1b" not in str(caught.value)
    assert load(path).layout == "moco"


def test_random_weights_follow_from_the_seed_and_leave_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one = load_backbone("random", "resnet18", NARROW, seed=1)
    assert torch.equal(torch.rand(1), expected)
    again = load_backbone("random", "resnet18", NARROW, seed=1)
    other = load_backbone("random", "resnet18", NARROW, seed=2)
    assert one.tensors_sha256 == again.tensors_sha256 != other.tensors_sha256


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("conv1.weight", torch.complex64),
        ("conv1.weight", torch.int32),
        ("bn1.num_batches_tracked", torch.complex64),
    ],
)
def test_weights_that_are_not_real_floating_point_numbers_are_refused(states, saved, name, kind):
    spoiled = states[0] | {name: states[0][name].to(kind)}
    with pytest.raises(KsclError, match=rf"x\.pth.*: {name} is {kind}"):
        load(saved(spoiled))


def test_weights_at_an_address_are_downloaded_once_and_hashed(states, tmp_path, monkeypatch):
    monkeypatch.setenv("KSCL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("kscl.runtime.paths.BACKOFF_SECONDS", 0.0)
    file = tmp_path / "b.safetensors"
    save_backbone(file, states[0], Description("resnet18", NARROW))
    with serve(tmp_path) as server:
        for _ in range(2):
            loaded = load_backbone(f"{server.address}/b.safetensors")
            assert loaded.layout == "kscl backbone"
            assert loaded.file_sha256 == sha256_of(file)
        assert server.asked == {"/b.safetensors": 1}
        for wrong in (f"{server.address}/none.pth", "http://127.0.0.1:1/none.pth", "/no/none.pth"):
            with pytest.raises(KsclError, match=wrong):
                load(wrong)
    assert not [p for p in (tmp_path / "cache").rglob("*none.pth*") if p.suffix != ".lock"]
