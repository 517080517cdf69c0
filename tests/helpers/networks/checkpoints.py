"""Checkpoints with the key names of real projects, around given weights.

Each entry makes a file's content from the weights that the project's own evaluation uses and those
of a second network, where its files hold one. Sources are named in kscl/backbone_file/layouts.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
Content = dict[str, Any]
POSITIONS = {"conv1": 0, "bn1": 1, "layer1": 4, "layer2": 5, "layer3": 6, "layer4": 7}


def under(prefix: str, state: State) -> State:
    """The same tensors under a prefix."""
    return {prefix + key: value for key, value in state.items()}


def sequence(prefix: str, state: State) -> State:
    """The tensors of nn.Sequential(*list(torchvision_resnet.children())[:-1])."""
    names = {key: key.partition(".") for key in state}
    return {f"{prefix}{POSITIONS[a]}.{b}": state[key] for key, (a, _, b) in names.items()}


def some(*names: str) -> State:
    """Small tensors of other parts."""
    return {name: torch.full((2,), 0.5) for name in names}


def optimizer() -> Content:
    """An optimizer's state, whose tensors belong to nothing here."""
    return {"state": {0: {"momentum_buffer": torch.zeros(2)}}, "param_groups": [{"lr": 0.1}]}


def exclude_bias(parameter: Tensor) -> bool:
    """A function that Barlow Twins and VICReg save within their optimizer's state."""
    return parameter.ndim == 1


def moco(taken: State, other: State, wrapper: str = "module.") -> Content:
    heads = some(*(f"encoder_{x}.fc.{i}.weight" for x in "qk" for i in (0, 2)))
    tensors = under("encoder_q.", taken) | under("encoder_k.", other) | heads
    tensors |= some("queue", "queue_ptr")
    return {
        "epoch": 200,
        "arch": "resnet18",
        "state_dict": under(wrapper, tensors),
        "optimizer": optimizer(),
    }


def moco_v3(taken: State, other: State) -> Content:
    heads = [f"{x}_encoder.{h}.0.weight" for x in ("base", "momentum") for h in ("fc", "head")]
    tensors = under("base_encoder.", taken) | under("momentum_encoder.", other)
    tensors |= some(*heads, "predictor.0.weight", "predictor.1.running_mean")
    return {"epoch": 300, "state_dict": under("module.", tensors), "scaler": {"scale": 1.0}}


def simsiam(taken: State, _: State) -> Content:
    tensors = under("encoder.", taken) | some("encoder.fc.0.weight", "predictor.0.weight")
    return {"epoch": 100, "arch": "resnet18", "state_dict": under("module.", tensors)}


def simclr_sthalles(taken: State, _: State) -> Content:
    tensors = under("backbone.", taken) | some("backbone.fc.0.weight", "backbone.fc.2.bias")
    return {"epoch": 100, "arch": "resnet18", "state_dict": tensors, "optimizer": optimizer()}


def simclr_spijkervet(taken: State, _: State) -> Content:
    return under("encoder.", taken) | some("projector.0.weight", "projector.2.weight")


def simclr_atanov(taken: State, _: State) -> Content:
    tensors = under("convnet.", taken) | some("projection.fc1.weight", "projection.bn1.bias")
    return {"state_dict": tensors, "hparams": argparse.Namespace(data="imagenet")}


def byol_yaox12(taken: State, other: State) -> Content:
    tensors = sequence("online_network.encoder.", taken)
    tensors |= sequence("target_network.encoder.", other)
    heads = [f"{x}_network.projetion.l1.weight" for x in ("online", "target")]
    tensors |= some(*heads, "predictor.predictor.l1.weight")
    return {"config": {}, "epoch": 1, "model": under("module.", tensors), "amp": {}}


def byol_sthalles(taken: State, other: State) -> Content:
    head = some("projetion.net.0.weight")
    return {
        "online_network_state_dict": sequence("encoder.", taken) | head,
        "encoder_state_dict": sequence("", taken),
        "target_network_state_dict": sequence("encoder.", other) | head,
        "optimizer_state_dict": optimizer(),
    }


def byol_lucidrains(taken: State, other: State) -> Content:
    tensors = under("net.", taken) | under("online_encoder.net.", taken)
    tensors |= under("target_encoder.net.", other)
    heads = [f"{x}net.fc.weight" for x in ("", "online_encoder.", "target_encoder.")]
    return tensors | some(*heads, "online_encoder.projector.0.weight", "online_predictor.0.weight")


def swav(taken: State, _: State) -> Content:
    heads = some("projection_head.0.weight", "projection_head.3.bias", "prototypes.weight")
    tensors = under("module.", taken | heads)
    return {"epoch": 400, "state_dict": tensors, "optimizer": optimizer(), "amp": {}}


def deepcluster_v2(taken: State, _: State) -> Content:
    heads = some("projection_head.0.weight", *(f"prototypes.prototypes{i}.weight" for i in "012"))
    return under("module.", taken | heads)


def mae(taken: State, _: State) -> Content:
    decoder = some("mask_token", "decoder_pos_embed", "decoder_blocks.0.norm1.weight")
    return {"model": taken | decoder, "epoch": 800}


def dino(taken: State, other: State) -> Content:
    head = some("head.mlp.0.weight", "head.last_layer.weight_g")
    return {
        "student": under("module.", under("backbone.", other) | head),
        "teacher": under("backbone.", taken) | head,
        "optimizer": optimizer(),
        "epoch": 100,
        "args": argparse.Namespace(arch="vit_small", lr=0.0005),
        "dino_loss": {"center": torch.zeros(1, 2)},
    }


def barlow_twins(taken: State, _: State) -> Content:
    tensors = under("backbone.", taken) | some("projector.0.weight", "bn.running_mean")
    groups = [{"lr": 0.2, "weight_decay_filter": exclude_bias}]
    return {
        "epoch": 1000,
        "model": under("module.", tensors),
        "optimizer": {"state": {}, "param_groups": groups},
    }


def vicreg(taken: State, _: State) -> Content:
    tensors = under("backbone.", taken) | some("projector.0.weight", "projector.1.bias")
    return {"epoch": 1000, "model": under("module.", tensors), "optimizer": optimizer()}


def vicregl(taken: State, _: State) -> Content:
    heads = some("projector.0.weight", "maps_projector.0.weight", "classifier.weight")
    tensors = under("module.", under("backbone.", taken) | heads)
    return {"epoch": 300, "model": tensors, "optimizer": optimizer()}


def densecl(taken: State, other: State) -> Content:
    tensors = under("encoder_q.0.", taken) | under("backbone.", taken)
    tensors |= under("encoder_k.0.", other)
    parts = [f"encoder_{x}.1.mlp.0.weight" for x in "qk"]
    tensors |= some(*parts, "queue", "queue_ptr", "queue2", "queue2_ptr")
    return {"meta": {"epoch": 200}, "state_dict": tensors, "optimizer": optimizer()}


def mmselfsup_byol(taken: State, other: State) -> Content:
    tensors = under("backbone.", taken) | under("target_net.module.0.", other)
    parts = ("neck.fc0.weight", "head.predictor.fc0.weight", "target_net.steps")
    tensors |= some(*parts, "target_net.module.1.fc0.weight", "data_preprocessor.mean")
    return {"meta": {}, "state_dict": tensors, "message_hub": {}}


def mmselfsup_simclr(taken: State, _: State) -> Content:
    tensors = under("backbone.", taken) | some("neck.fc0.weight", "neck.bn0.running_mean")
    return {"meta": {}, "state_dict": tensors}


def pixpro(taken: State, other: State) -> Content:
    tensors = under("encoder.", taken) | under("encoder_k.", other)
    parts = [f"projector{x}.linear1.weight" for x in ("", "_k", "_instance", "_instance_k")]
    tensors |= some(*parts, "value_transform.weight", "predictor.linear1.weight")
    return {
        "opt": argparse.Namespace(arch="resnet50", pixpro_p=2.0),
        "model": under("module.", tensors),
        "optimizer": optimizer(),
        "scheduler": {},
        "epoch": 100,
    }


def infomin(taken: State, other: State) -> Content:
    heads = some("head.0.weight", "head.2.weight", "head_jig.fc1.weight")
    return {
        "model": under("module.", under("encoder.", taken) | heads),
        "model_ema": under("encoder.", other) | heads,
        "contrast": {"memory": torch.zeros(2, 2)},
        "optimizer": optimizer(),
        "epoch": 800,
    }


def insdis(taken: State, _: State) -> Content:
    tensors = under("module.", under("encoder.", taken) | some("head.0.weight", "head.0.bias"))
    return {"model": tensors, "contrast": {"memory": torch.zeros(2, 2)}, "epoch": 200}


def pirl(taken: State, _: State) -> Content:
    heads = some("head.0.weight", "head_jig.fc1.weight", "head_jig.fc2.bias")
    tensors = under("module.", under("encoder.", taken) | heads)
    return {"opt": argparse.Namespace(method="PIRL"), "model": tensors, "epoch": 200}


def vissl(taken: State, _: State) -> Content:
    model = {"trunk": under("_feature_blocks.", taken), "heads": some("0.clf.0.weight")}
    base = {"model": model, "meters": {}, "optimizer": optimizer()}
    return {"phase_idx": 199, "classy_state_dict": {"base_model": base}}


def solo_learn_byol(taken: State, other: State) -> Content:
    tensors = under("backbone.", taken) | under("momentum_backbone.", other)
    parts = ("classifier.weight", "projector.0.weight", "momentum_projector.0.weight")
    tensors |= some(*parts, "predictor.0.weight")
    return {"pytorch-lightning_version": "2.1", "state_dict": tensors, "callbacks": {}}


def solo_learn_moco(taken: State, other: State) -> Content:
    content = solo_learn_byol(taken, other)
    del content["state_dict"]["predictor.0.weight"]
    content["state_dict"] |= some("queue", "queue_ptr")
    return content


def lightly_byol(taken: State, other: State) -> Content:
    tensors = under("backbone.", taken) | under("teacher_backbone.", other)
    parts = [f"{x}_head.layers.0.weight" for x in ("projection", "prediction")]
    parts += ["teacher_projection_head.layers.0.weight"]
    tensors |= some(*parts, "online_classifier.classification_head.weight")
    return {"pytorch-lightning_version": "2.1", "state_dict": tensors, "hyper_parameters": {}}


def lightly_moco(taken: State, other: State) -> Content:
    tensors = sequence("backbone.", taken) | sequence("backbone_momentum.", other)
    parts = [f"projection_head{x}.layers.0.weight" for x in ("", "_momentum")]
    return {"state_dict": tensors | some(*parts), "epoch": 10}


def lightly_simclr(taken: State, _: State) -> Content:
    return {"state_dict": sequence("backbone.", taken) | some("projection_head.layers.0.weight")}


def timm_training(taken: State, _: State) -> Content:
    return {
        "arch": "resnet18",
        "state_dict": taken | some("fc.weight", "fc.bias"),
        "args": argparse.Namespace(model="resnet18"),
        "optimizer": optimizer(),
        "metric": 70.0,
        "version": 2,
    }


def torchvision_training(taken: State, _: State) -> Content:
    return {
        "model": taken | some("fc.weight", "fc.bias"),
        "optimizer": optimizer(),
        "lr_scheduler": {},
        "epoch": 90,
        "args": argparse.Namespace(model="resnet18"),
    }


def torchvision(taken: State, _: State) -> Content:
    return taken | some("fc.weight", "fc.bias")


def compiled(taken: State, _: State) -> Content:
    return {"model": under("_orig_mod.", taken | some("fc.weight", "fc.bias"))}


def compiled_within_ddp(taken: State, other: State) -> Content:
    return moco(taken, other, wrapper="module._orig_mod.")


def without_ddp(taken: State, other: State) -> Content:
    return moco(taken, other, wrapper="")


Make = Callable[[State, State], Content]
# Project: its maker, the name of its layout, and whether a second network is left behind, aloud.
CHECKPOINTS: dict[str, tuple[Make, str, bool]] = {
    "MoCo v1 and v2": (moco, "moco", True),
    "MoCo v2 without DDP": (without_ddp, "moco", True),
    "MoCo v3": (moco_v3, "moco v3", True),
    "SimSiam": (simsiam, "simsiam", False),
    "SimCLR of sthalles": (simclr_sthalles, "simclr (sthalles)", False),
    "SimCLR of Spijkervet": (simclr_spijkervet, "simclr (spijkervet)", False),
    "SimCLR of AndrewAtanov": (simclr_atanov, "simclr (atanov)", False),
    "BYOL of yaox12": (byol_yaox12, "byol (yaox12)", True),
    "BYOL of sthalles": (byol_sthalles, "byol (sthalles)", True),
    "BYOL of lucidrains": (byol_lucidrains, "byol (lucidrains)", True),
    "SwAV, training": (swav, "swav, deepcluster-v2, sela-v2", False),
    "SwAV, released": (
        lambda taken, other: swav(taken, other)["state_dict"],
        "swav, deepcluster-v2, sela-v2",
        False,
    ),
    "DeepCluster-v2": (deepcluster_v2, "swav, deepcluster-v2, sela-v2", False),
    # Its script is not public: heads under these two names, of SwAV's or DeepCluster-v2's form.
    "SeLa-v2": (deepcluster_v2, "swav, deepcluster-v2, sela-v2", False),
    "DINO": (dino, "dino", True),
    "Barlow Twins": (barlow_twins, "barlow twins, vicreg, vicregl", False),
    "VICReg": (vicreg, "barlow twins, vicreg, vicregl", False),
    "VICRegL": (vicregl, "barlow twins, vicreg, vicregl", False),
    "DenseCL": (densecl, "densecl, openselfsup, mmselfsup", True),
    "mmselfsup BYOL": (mmselfsup_byol, "densecl, openselfsup, mmselfsup", True),
    "mmselfsup SimCLR": (mmselfsup_simclr, "densecl, openselfsup, mmselfsup", False),
    "PixPro": (pixpro, "pixpro", True),
    "InfoMin": (infomin, "infomin, insdis, pirl", True),
    "InsDis": (insdis, "infomin, insdis, pirl", False),
    "PIRL": (pirl, "infomin, insdis, pirl", False),
    "VISSL": (vissl, "vissl", False),
    "solo-learn BYOL": (solo_learn_byol, "solo-learn", True),
    "solo-learn MoCo": (solo_learn_moco, "solo-learn", True),
    "lightly BYOL": (lightly_byol, "lightly", True),
    "lightly MoCo": (lightly_moco, "lightly (sequence)", True),
    "lightly SimCLR": (lightly_simclr, "lightly (sequence)", False),
    "timm training": (timm_training, "plain (state_dict)", False),
    "torchvision training": (torchvision_training, "plain (model)", False),
    "torchvision": (torchvision, "plain", False),
    "torch.compile": (compiled, "plain (model)", False),
    "torch.compile within DDP": (compiled_within_ddp, "moco", True),
}
