"""Backbones, heads, the momentum encoder and its BatchNorm statistics."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from kscl.engine.pretrain import exported
from kscl.errors import KsclError
from kscl.methods.batch_norm import calibrate_batch_norm
from kscl.methods.encoder import (
    Encoder,
    build_backbone,
    build_encoder,
    feature_dim,
)
from tests.helpers.networks.learners import make

NARROW = {"channels": [4, 8, 8, 16]}


@pytest.mark.parametrize(
    ("name", "kwargs", "features"),
    [
        ("resnet18", NARROW, 16),
        ("resnet50", NARROW, 64),
        ("resnet50d", NARROW, 64),
        ("mobilenetv3_small_050", {}, 1024),
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 1}, 192),
        ("convnext_atto", {"depths": [1, 1, 1, 1], "dims": [8, 8, 8, 8]}, 8),
    ],
)
def test_any_timm_backbone_gives_unit_embeddings(
    name: str, kwargs: dict[str, object], features: int
) -> None:
    encoder = build_encoder(name, kwargs, dim=6, input_size=32)
    assert feature_dim(encoder.backbone, 32) == features
    embedding = encoder(torch.randn(3, 3, 32, 32))
    assert embedding.shape == (3, 6)
    torch.testing.assert_close(embedding.norm(dim=1), torch.ones(3))
    assert encoder.training


def test_heads_have_the_shapes_of_moco() -> None:
    mlp = build_encoder("resnet18", NARROW, head="mlp", dim=6, input_size=32).head
    assert [tuple(p.shape) for p in mlp.parameters()] == [(16, 16), (16,), (6, 16), (6,)]
    wide = build_encoder("resnet18", NARROW, hidden_dim=20, dim=6, input_size=32).head
    assert [tuple(p.shape) for p in wide.parameters()] == [(20, 16), (20,), (6, 20), (6,)]
    linear = build_encoder("resnet18", NARROW, head="linear", dim=6, input_size=32).head
    assert [tuple(p.shape) for p in linear.parameters()] == [(6, 16), (6,)]


class TestHeadWithBatchNorm:
    @staticmethod
    def encoder(head: str = "mlp_bn") -> Encoder:
        torch.manual_seed(0)
        return build_encoder("resnet18", NARROW, head=head, hidden_dim=20, dim=32, input_size=32)

    def test_has_batch_norm_between_its_layers_and_no_bias_before_it(self) -> None:
        state = self.encoder().head.state_dict()
        assert {key: tuple(value.shape) for key, value in state.items()} == {
            "0.weight": (20, 16),
            "1.weight": (20,),
            "1.bias": (20,),
            "1.running_mean": (20,),
            "1.running_var": (20,),
            "1.num_batches_tracked": (),
            "3.weight": (32, 20),
            "3.bias": (32,),
        }

    def test_centers_its_hidden_units_and_spreads_embeddings_that_are_much_alike(self) -> None:
        images = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 0.3 + 2
        drift = {
            head: self.encoder(head)(images).mean(0).norm().item() for head in ("mlp", "mlp_bn")
        }
        assert drift["mlp_bn"] < drift["mlp"] - 0.1
        encoder = self.encoder()
        assert encoder(images).shape == (64, 32)
        layer, norm = encoder.head[:2]  # type: ignore[index]
        hidden = norm(layer(encoder.backbone(images)))  # (64, 20)
        torch.testing.assert_close(hidden.mean(0), torch.zeros(20), atol=1e-4, rtol=0)
        torch.testing.assert_close(hidden.std(0, correction=0), torch.ones(20), atol=0.02, rtol=0)

    def test_gives_the_same_embedding_alone_and_in_company_in_eval_mode(self) -> None:
        encoder, images = self.encoder(), torch.randn(8, 3, 32, 32)
        calibrate_batch_norm(encoder, [images])
        encoder.eval()
        torch.testing.assert_close(encoder(images[:1]), encoder(images)[:1], atol=1e-4, rtol=0)


def test_residual_blocks_start_as_in_moco_unless_asked_otherwise() -> None:
    gammas = [
        {block.bn3.weight.unique().item() for block in backbone.layer2}
        for backbone in (
            build_backbone("resnet50", NARROW),
            build_backbone("resnet50", {**NARROW, "zero_init_last": True}),
        )
    ]
    assert gammas == [{1.0}, {0.0}]


def test_embeddings_are_unit_in_single_precision_whatever_the_network_gives() -> None:
    encoder = Encoder(nn.Flatten(), nn.Identity())
    embedding = encoder(torch.randn(3, 3, 4, 4).bfloat16())
    assert embedding.dtype == torch.float32
    torch.testing.assert_close(embedding.norm(dim=1), torch.ones(3))


@pytest.mark.parametrize(
    ("name", "kwargs", "settings", "named"),
    [
        ("resnet5O", {}, {}, "no model 'resnet5O'"),
        ("resnet18", {"chanels": [1]}, {}, "chanels"),
        ("vit_tiny_patch16_224", {"depth": 1}, {"input_size": 32}, "img_size"),
    ],
)
def test_what_cannot_be_built_is_named(
    name: str, kwargs: dict[str, object], settings: dict[str, object], named: str
) -> None:
    with pytest.raises(KsclError, match=named):
        build_encoder(name, kwargs, **{"input_size": 32, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"),
        *("features_only", "feature_cfg", "out_indices", "scriptable", "exportable", "num_classes"),
        *("pretrained_strict", "pretrained_filter_fn", "kwargs_filter", "model_cfg", "device"),
    ],
)
def test_only_arguments_of_the_architecture_reach_timm(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_model(*_: object, **__: object) -> None:
        raise AssertionError("timm was called")

    monkeypatch.setattr(timm, "create_model", no_model)
    with pytest.raises(KsclError, match=rf"BACKBONE\.KWARGS: '{name}'.*BACKBONE\.WEIGHTS"):
        build_backbone("resnet18", {**NARROW, name: True})


@pytest.mark.parametrize(
    "value",
    [{"a": 1}, object(), float("nan"), float("inf"), 10**400, [8] * 100, [[[8]]], nn.ReLU, b"8"],
)
def test_values_of_arguments_are_plain_and_of_a_size_that_can_be_meant(value: object) -> None:
    with pytest.raises(KsclError, match=r"BACKBONE\.KWARGS: 'channels'"):
        build_backbone("resnet18", {"channels": value})


@pytest.mark.parametrize(
    "kwargs",
    [{"channels": [8, 8]}, {"layers": 3}, {"act_layer": "none such"}, {"cardinality": 0}],
)
def test_arguments_that_timm_cannot_use_are_an_error_of_ours(kwargs: dict[str, object]) -> None:
    with pytest.raises(KsclError, match=r"BACKBONE\.KWARGS"):
        build_encoder("resnet18", kwargs, input_size=32)


@pytest.mark.parametrize("name", ["hf-hub:timm/resnet18.a1_in1k", "local-dir:/tmp", "../resnet18"])
def test_names_that_point_to_the_network_or_to_files_are_refused(name: str) -> None:
    with pytest.raises(KsclError, match=r"BACKBONE\.NAME"):
        build_backbone(name)


@pytest.mark.parametrize("norm", ["train", "eval"])
def test_the_momentum_encoder_moves_by_one_minus_momentum(norm: str) -> None:
    encoder = build_encoder("resnet18", NARROW, dim=6, input_size=32)
    learner = make(encoder=encoder, dim=6, momentum=0.9, key_batch_norm=norm)
    slow = learner.key_encoder
    assert slow is not None
    assert not any(p.requires_grad for p in slow.parameters())
    assert all(p.requires_grad for p in encoder.parameters())
    before = {key: value.clone() for key, value in slow.state_dict().items()}
    with torch.no_grad():
        for tensor in (*encoder.parameters(), *encoder.buffers()):
            tensor += 1
    learner.after_step()
    for key, value in slow.state_dict().items():
        moved = "running" not in key or norm == "eval"
        if "num_batches" not in key:
            torch.testing.assert_close(value, before[key] + (0.1 if moved else 0))


class TestCalibration:
    def test_statistics_are_the_means_of_those_of_the_batches(self) -> None:
        network = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.5)).eval()
        batches = [torch.randn(4, 3, 5, 5) * (1 + number) + number for number in range(3)]
        calibrate_batch_norm(network, batches)
        norm = network[0]
        assert isinstance(norm, nn.BatchNorm2d)
        mean = torch.stack([batch.mean((0, 2, 3)) for batch in batches]).mean(0)
        variance = torch.stack([batch.var((0, 2, 3)) for batch in batches]).mean(0)
        torch.testing.assert_close(norm.running_mean, mean)
        torch.testing.assert_close(norm.running_var, variance)

    def test_modes_and_momentum_come_back_also_after_an_error(self) -> None:
        network = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.5), nn.BatchNorm2d(3)).eval()
        network[2].train()
        modes = []
        network[1].register_forward_hook(lambda module, *_: modes.append(module.training))
        with pytest.raises(ValueError, match="4D"):
            calibrate_batch_norm(network, [torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4)])
        assert modes == [False]
        assert [module.training for module in network] == [False, False, True]
        assert network[0].momentum == network[2].momentum == 0.1

    def test_fvcores_function_gives_other_variances(self) -> None:
        """Why there is a function of ours: fvcore pools the batches."""
        from fvcore.nn.precise_bn import update_bn_stats

        batches = [
            torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(n)) for n in (0, 1)
        ]
        ours, theirs = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        calibrate_batch_norm(ours, batches)
        update_bn_stats(theirs, batches, len(batches))
        torch.testing.assert_close(ours.running_mean, theirs.running_mean, atol=1e-6, rtol=0)
        assert (ours.running_var - theirs.running_var).abs().max() > 1e-4  # type: ignore[operator]


def test_exported_backbone_loads_into_timm() -> None:
    encoder = build_encoder("resnet50", NARROW, dim=6, input_size=32)
    state = exported(encoder.backbone)
    model = timm.create_model("resnet50", num_classes=0, channels=(4, 8, 8, 16))
    model.load_state_dict(state, strict=True)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model.eval()(images), encoder.backbone.eval()(images))
    state["conv1.weight"].zero_()
    assert encoder.backbone.conv1.weight.any()  # type: ignore[union-attr]
