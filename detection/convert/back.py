"""Take a Detectron2 ResNet back to timm: the converter's names reversed, and the same proof.

A folder of the converter says which network it holds and what its input is. Of any other file of
Detectron2 the user names both: the timm model, and the config that the weights were trained with.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from torch import Tensor, nn

from detection.config import check_version, load_detection_config
from detection.convert.certificate import CERTIFICATE_FILE, Certificate, read_certificate
from detection.convert.converter import CONFIG_FILE, FORMATS, weights_bytes
from detection.convert.name_map import COUNTER, to_timm, without_prefix
from detection.convert.proof import check_proof, stage_differences
from detection.convert.routes import EXACT_BUILDERS
from detection.convert.verify import verify
from detection.convert.weights import read_detectron2
from detection.errors import DetectionError
from kscl.backbone_file import Description, save_backbone, tensors_hash
from kscl.method.encoder import build_backbone
from kscl.runtime.files import write_atomically

BACKBONE_FILE = "backbone.safetensors"
LARGEST_COUNT = 2**63
DIGITS = 8  # of mean and std: a config holds 255 times of them, rounded


@dataclass(frozen=True)
class TakenBack:
    """What was delivered."""

    path: Path
    description: Description
    differences: dict[str, float]  # as in a certificate
    left_behind: list[str]
    same_as_source: bool  # its tensors have the hash of those that were once converted


def take_back(
    source: str | Path,
    output: str | Path,
    *,
    arch: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    protocol: str | Path | None = None,
    force: bool = False,
) -> TakenBack:
    """Write `backbone.safetensors` into the folder `output`, proven against `source`."""
    weights, certificate = _open(Path(source))
    if certificate is not None:
        if arch is not None or protocol is not None:
            raise DetectionError(
                f"{source} has a certificate, which names its network and config: leave --arch, "
                "--arch-kwargs and --protocol out."
            )
        cfg = load_detection_config(weights.parent / CONFIG_FILE, rules=check_version)
        verify(certificate, weights, cfg)
        arch, kwargs = certificate.arch, certificate.arch_kwargs
    elif arch is None or protocol is None:
        raise DetectionError(
            f"{source} has no certificate beside it, and tensors alone do not tell the stride, the "
            "channel order or the input: name the network (--arch) and the Detectron2 config that "
            "the weights were trained with (--protocol FILE)."
        )
    else:
        cfg = load_detection_config(protocol, rules=check_version)
    if cfg.MODEL.BACKBONE.NAME not in EXACT_BUILDERS:
        raise DetectionError(
            f"{source} holds the timm network itself (MODEL.BACKBONE.NAME "
            f"{cfg.MODEL.BACKBONE.NAME}), without the layers that a detector does not need: use "
            "the file that it was made from."
        )
    target = Path(output) / BACKBONE_FILE
    if target.exists() and not force:
        raise DetectionError(f"{target} exists: choose another folder, or overwrite with --force.")
    tensors, left_behind = _resnet_of(weights)
    backbone = _fill(build_backbone(arch, kwargs), tensors, certificate, weights)
    mean, std = _colors(cfg)
    differences = _prove(backbone, kwargs or {}, mean, std, cfg, tensors)
    run = dict(certificate.source["run"]) if certificate else {}
    description = Description(arch, dict(kwargs or {}), mean, std, source=run)
    same = certificate is not None
    if certificate and tensors_hash(backbone) != certificate.source["tensors_sha256"]:
        raise DetectionError(
            f"{weights}: taken back, its tensors are not those that its certificate names as the "
            "source's. Nothing was written."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    save_backbone(target, backbone.state_dict(), description)
    return TakenBack(target, description, differences, left_behind, same)


def _open(source: Path) -> tuple[Path, Certificate | None]:
    """Return the file of weights, and its certificate if it is one of the converter's."""
    folder = source if source.is_dir() else source.parent
    path = folder / CERTIFICATE_FILE
    certificate = read_certificate(path) if path.is_file() else None
    if certificate and source in (folder, folder / certificate.weights_file):
        return folder / certificate.weights_file, certificate
    if not source.is_file():
        raise DetectionError(
            f"{source} is neither a folder of the converter nor a file of Detectron2's weights."
        )
    return source, None


def _resnet_of(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return the ResNet of a detector by Detectron2's names without prefix, and the other names."""
    tensors: dict[str, Tensor] = {}
    left_behind = []
    for name, tensor in read_detectron2(path).items():
        bare = without_prefix(name)
        if bare is None:
            left_behind.append(name)
        elif bare in tensors and not torch.equal(tensors[bare], tensor):
            raise DetectionError(
                f"{path} holds {bare} twice, with different values: it has two ResNets, and one "
                "file of timm holds one."
            )
        else:
            tensors[bare] = tensor
    if not tensors:
        raise DetectionError(
            f"{path} holds no tensors of a Detectron2 ResNet (stem.conv1.weight, res2.0.…)."
        )
    return tensors, left_behind


def _fill(
    backbone: nn.Module, tensors: dict[str, Tensor], certificate: Certificate | None, path: Path
) -> nn.Module:
    """Load tensors by Detectron2's names into a timm network, all of them, each in its shape."""
    wanted = backbone.state_dict()
    named = {to_timm(name): tensor for name, tensor in tensors.items()}
    counters = certificate.counters if certificate else {}
    for name, count in counters.items():
        if type(count) is not int or not 0 <= count < LARGEST_COUNT:
            raise DetectionError(
                f"{path}: its certificate's counter {name} is {str(count)[:40]}, not a count."
            )
    named |= {name: torch.tensor(count) for name, count in counters.items()}
    needed = [name for name in wanted if not name.endswith(COUNTER)]
    missing = [name for name in needed if name not in named]
    strange = [name for name in named if name not in wanted]
    wrong = [n for n in needed if n in named and named[n].shape != wanted[n].shape]
    for names, what in ((missing, "lacks"), (strange, "has, beyond it,"), (wrong, "has another")):
        if names:
            raise DetectionError(
                f"{path} does not hold this network: it {what} {names[0]} "
                f"({len(names)} tensors in all). Name the right one with --arch and --arch-kwargs."
            )
    backbone.load_state_dict({**wanted, **named}, strict=True)
    return backbone.eval()


def _colors(cfg: CfgNode) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and std of a config's input, RGB in [0, 1]."""
    order = slice(None, None, -1 if cfg.INPUT.FORMAT == "BGR" else 1)
    mean, std = (
        tuple(round(value / 255, DIGITS) for value in list(values)[order])
        for values in (cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD)
    )
    return mean, std


def _prove(
    backbone: nn.Module,
    kwargs: Mapping[str, Any],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    cfg: CfgNode,
    tensors: dict[str, Tensor],
) -> dict[str, float]:
    """Compare timm's network with the detector of the config, stage by stage."""
    with tempfile.TemporaryDirectory() as folder:
        file_format = "pth"
        weights = Path(folder) / FORMATS[file_format]
        write_atomically(weights, weights_bytes(tensors, file_format))
        differences = stage_differences(backbone, kwargs, mean, std, cfg, weights)
    check_proof(differences)
    return differences
