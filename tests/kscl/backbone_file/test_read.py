"""Reading backbones: files of ours and other people's, whole or not at all."""

from __future__ import annotations

import http.server
import threading

import pytest
import torch

from kscl.backbone_file import Description, load_backbone, save_backbone, tensors_hash
from kscl.errors import KsclError
from kscl.methods.encoder import build_backbone
from kscl.runtime.files import sha256_of

NARROW = {"channels": [8, 16, 32, 64]}


@pytest.fixture
def backbone():
    torch.manual_seed(0)
    return build_backbone("resnet50", NARROW).eval()


def with_prefix(tensors: dict, prefix: str) -> dict:
    return {prefix + key: value for key, value in tensors.items()}


def test_our_file_says_what_it_is_and_comes_back_the_same(backbone, tmp_path):
    path = tmp_path / "backbone.safetensors"
    description = Description("resnet50", NARROW, size=96, source={"method": "kscl", "epochs": 2})
    save_backbone(path, backbone.state_dict(), description)
    loaded = load_backbone(path)
    assert loaded.description == description
    assert loaded.layout == "kscl backbone"
    assert loaded.tensors_sha256 == tensors_hash(backbone)
    assert not loaded.backbone.training
    assert load_backbone(path, "resnet50", {"channels": (8, 16, 32, 64)}).description == description


@pytest.mark.parametrize(("part", "flipped"), [("tensors", 1), ("tensors", 41), ("description", 1)])
def test_a_file_of_ours_with_flipped_bits_is_refused(backbone, tmp_path, part, flipped):
    path = tmp_path / "backbone.safetensors"
    save_backbone(path, backbone.state_dict(), Description("resnet50", NARROW, source={"seed": 0}))
    content = bytearray(path.read_bytes())
    if part == "description":
        content = content.replace(b'\\"seed\\": 0', b'\\"seed\\": 1')
    else:
        for number in range(flipped):
            content[-1 - 997 * number] ^= 4
    path.write_bytes(content)
    with pytest.raises(KsclError, match=r"backbone\.safetensors is damaged"):
        load_backbone(path)


def test_old_files_without_batch_counters_load(backbone, tmp_path):
    path = tmp_path / "x.pth"
    state = backbone.state_dict()
    torch.save({k: v for k, v in state.items() if "num_batches" not in k}, path)
    assert load_backbone(path, "resnet50", NARROW).layout == "plain"


def test_an_unknown_prefix_is_an_error_that_says_how_to_name_it(backbone, tmp_path):
    path = tmp_path / "x.pth"
    torch.save({"state_dict": with_prefix(backbone.state_dict(), "net.trunk.")}, path)
    with pytest.raises(KsclError, match=r"--container state_dict --prefix 'net\.trunk\.'"):
        load_backbone(path, "resnet50", NARROW)


def test_a_missing_tensor_is_named(backbone, tmp_path):
    path = tmp_path / "x.pth"
    state = backbone.state_dict()
    del state["layer3.0.conv2.weight"]
    torch.save(state, path)
    with pytest.raises(KsclError, match=r"layer3\.0\.conv2\.weight"):
        load_backbone(path, "resnet50", NARROW)


def test_a_tensor_that_has_no_place_is_named(tmp_path):
    path = tmp_path / "x.pth"
    torch.save(build_backbone("seresnet50", NARROW).state_dict(), path)
    with pytest.raises(KsclError, match=r"se\.fc1\.weight"):
        load_backbone(path, "resnet50", NARROW)


def test_a_network_of_another_width_is_refused(backbone, tmp_path):
    path = tmp_path / "x.pth"
    torch.save(backbone.state_dict(), path)
    with pytest.raises(KsclError, match=r"conv1\.weight"):
        load_backbone(path, "resnet50")


def test_a_file_that_does_not_say_what_it_is_needs_a_name(backbone, tmp_path):
    path = tmp_path / "x.pth"
    torch.save(backbone.state_dict(), path)
    with pytest.raises(KsclError, match=r"BACKBONE\.NAME.*--arch"):
        load_backbone(path)


def with_arch(backbone, path, arch: object):
    """Write a file as MoCo does, whose network says what it is."""
    tensors = with_prefix(backbone.state_dict(), "module.encoder_q.")
    torch.save({"epoch": 200, "arch": arch, "state_dict": tensors}, path)
    return path


def test_the_arch_in_a_file_of_moco_names_its_network(backbone, tmp_path):
    path = with_arch(backbone, tmp_path / "moco.pth.tar", "resnet50")
    loaded = load_backbone(path, kwargs=NARROW)
    assert (loaded.layout, loaded.description.arch) == ("moco", "resnet50")
    assert loaded.tensors_sha256 == tensors_hash(backbone)
    for same in ("resnet50", "resnet50.a1_in1k"):  # timm's tag names weights
        assert load_backbone(path, same, NARROW).tensors_sha256 == loaded.tensors_sha256


def test_an_arch_that_contradicts_the_file_is_refused(backbone, tmp_path):
    path = with_arch(backbone, tmp_path / "moco.pth.tar", "resnet50")
    with pytest.raises(KsclError, match=r"moco\.pth\.tar .* resnet50, not resnet101"):
        load_backbone(path, "resnet101", NARROW)


@pytest.mark.parametrize("arch", ["vit_small", 50, None, "\x1b[31mresnet"])
def test_an_arch_that_timm_does_not_know_must_be_named_and_contradicts_nothing(
    backbone, tmp_path, arch
):
    path = with_arch(backbone, tmp_path / "x.pth", arch)
    with pytest.raises(KsclError, match=r"x\.pth .*BACKBONE\.NAME resnet50") as caught:
        load_backbone(path, kwargs=NARROW)
    assert ("vit_small" in str(caught.value)) == (arch == "vit_small")
    assert "\x1b" not in str(caught.value)
    assert load_backbone(path, "resnet50", NARROW).tensors_sha256 == tensors_hash(backbone)


def test_a_description_that_contradicts_the_request_is_refused(backbone, tmp_path):
    path = tmp_path / "backbone.safetensors"
    save_backbone(path, backbone.state_dict(), Description("resnet50", NARROW))
    with pytest.raises(KsclError, match="holds resnet50"):
        load_backbone(path, "resnet101", NARROW)


@pytest.mark.parametrize("name", ["x.pth", "x.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not a checkpoint", bytes(100)])
def test_a_damaged_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(KsclError, match=name):
        load_backbone(tmp_path / name, "resnet50")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(KsclError, match=r"none\.pth"):
        load_backbone(tmp_path / "none.pth", "resnet50")


def test_random_weights_follow_from_the_seed_and_leave_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one = load_backbone("random", "resnet50", NARROW, seed=1)
    assert torch.equal(torch.rand(1), expected)
    again = load_backbone("random", "resnet50", NARROW, seed=1)
    other = load_backbone("random", "resnet50", NARROW, seed=2)
    assert one.tensors_sha256 == again.tensors_sha256 != other.tensors_sha256


def complex_weights(state: dict) -> dict:
    return state | {"conv1.weight": state["conv1.weight"].to(torch.complex64)}


def whole_number_weights(state: dict) -> dict:
    return state | {"conv1.weight": state["conv1.weight"].to(torch.int32)}


def complex_counter(state: dict) -> dict:
    name = "bn1.num_batches_tracked"
    return state | {name: state[name].to(torch.complex64)}


@pytest.mark.parametrize("spoil", [complex_weights, complex_counter, whole_number_weights])
def test_weights_that_are_not_real_floating_point_numbers_are_refused(backbone, tmp_path, spoil):
    path = tmp_path / "x.pth"
    torch.save(spoil(backbone.state_dict()), path)
    with pytest.raises(KsclError, match=r"x\.pth.*: (conv1|bn1)\.\w+ is torch\.(complex64|int32)"):
        load_backbone(path, "resnet50", NARROW)


@pytest.fixture
def server(tmp_path):
    """A web server on this machine that serves a folder and counts the requests."""
    folder = tmp_path / "served"
    folder.mkdir()
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, directory=str(folder), **more)

        def do_GET(self):
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield folder, f"http://127.0.0.1:{running.server_address[1]}", asked
        running.shutdown()


def test_weights_at_an_address_are_downloaded_once_and_hashed(
    backbone, tmp_path, server, monkeypatch
):
    folder, address, asked = server
    monkeypatch.setenv("KSCL_CACHE", str(tmp_path / "cache"))
    for place in ("a", "b"):  # the same name in two folders: two files
        (folder / place).mkdir()
    save_backbone(
        folder / "a/b.safetensors", backbone.state_dict(), Description("resnet50", NARROW)
    )
    torch.save(backbone.state_dict(), folder / "b/b.safetensors.pth")
    ours = load_backbone(f"{address}/a/b.safetensors")
    assert ours.layout == "kscl backbone"
    assert ours.file_sha256 == sha256_of(folder / "a/b.safetensors")
    again = load_backbone(f"{address}/a/b.safetensors")
    assert again.file_sha256 == ours.file_sha256
    assert asked == ["/a/b.safetensors"]
    theirs = load_backbone(f"{address}/b/b.safetensors.pth", "resnet50", NARROW)
    assert theirs.layout == "plain"
    assert theirs.file_sha256 == sha256_of(folder / "b/b.safetensors.pth")


def test_an_address_that_serves_nothing_is_an_error_that_names_it_and_leaves_no_file(
    tmp_path, server, monkeypatch
):
    _, address, _ = server
    monkeypatch.setenv("KSCL_CACHE", str(tmp_path / "cache"))
    for wrong in (f"{address}/none.pth", "http://127.0.0.1:1/none.pth"):
        with pytest.raises(KsclError, match=wrong):
            load_backbone(wrong, "resnet50", NARROW)
    assert not [p for p in (tmp_path / "cache").rglob("*none.pth*") if p.suffix != ".lock"]
