"""Convert a backbone file for Detectron2, with proof, or a Detectron2 ResNet back to timm.

Load the backbone, choose its route into the detector, rename its tensors, prove that the detector
computes the same, write the folder. The proof runs on the bytes that are delivered, and the folder
gets its name only after it. On the way back, a converted folder describes its network and input;
for any other Detectron2 file the user names the timm model and the config it was trained with.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from detectron2.config import CfgNode
from torch import nn

import kscl
from detection.backbones import (
    ALL_FROZEN,
    EXACT_BUILDERS,
    EXTRA_NORM_HEAD,
    PLAIN_HEAD,
    is_plain,
)
from detection.config import (
    ADAMW,
    DETECTOR_KEYS,
    SGD,
    changed_values,
    check_version,
    load_detection_config,
    set_network,
)
from detection.convert.certificate import (
    CERTIFICATE_FILE,
    Certificate,
    input_keys,
    read_certificate,
    verify,
    write_certificate,
)
from detection.convert.proof import TOLERANCE, check_proof, stage_differences
from detection.convert.routes import EXACT, choose_route
from detection.convert.weights import is_counter, weights_bytes
from kscl.backbone_file import Description, load_backbone, save_backbone, tensors_hash
from kscl.backbone_file.detectron2 import detectron2_name
from kscl.backbone_file.find import find_tensors
from kscl.backbone_file.read import read_file, some
from kscl.config import plain, value_at
from kscl.errors import KsclError
from kscl.methods.encoder import STRIDE_IN_1X1, build_backbone
from kscl.records.provenance import library_versions
from kscl.runtime.files import sha256_of, whole_folder, write_atomically
from kscl.runtime.paths import is_named

CONFIG_FILE = "config.yaml"
PLAIN_CONFIG_FILE = "config_plain.yaml"  # for plain Detectron2
FORMATS = {"pth": "weights.pth", "pkl": "weights.pkl"}
PROTOCOL = "detection/voc0712_c4_24k_moco.yaml"
BACKBONE_FILE = "backbone.safetensors"
LARGEST_COUNT = 2**63
DIGITS = 8  # of mean and std, which a config has times 255, rounded


@dataclass(frozen=True)
class Converted:
    """What was delivered."""

    folder: Path
    certificate: Certificate
    cfg: CfgNode
    messages: tuple[str, ...]  # which network was used, what was not read, warnings

    @property
    def weights(self) -> Path:
        return self.folder / self.certificate.weights_file


def convert(
    source: str | Path,
    output: str | Path,
    *,
    protocol: str | Path | None = None,
    route: str | None = None,
    file_format: str = "pth",
    force: bool = False,
    **how: Any,
) -> Converted:
    """Convert a backbone for a protocol's detector, prove it, and write the folder `output`.

    `how` are arguments of `load_backbone`. `route` "timm" runs the timm network even if Detectron2
    can build it.
    """
    output = Path(output)
    cfg = load_detection_config(protocol or PROTOCOL)
    loaded = load_backbone(source, **how)
    about, backbone = loaded.description, loaded.backbone
    _check_output(output, loaded.tensors_sha256, force)
    chosen = choose_route(backbone, about.arch, about.kwargs, cfg, route)
    tensors, not_needed = chosen.carry(backbone.state_dict())
    broken = [key for key, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise KsclError(
            f"{source}: {some(broken)} have NaN or infinite values: pretraining diverged, or the "
            "file is damaged. Use another checkpoint."
        )
    keys = chosen.keys | input_keys(about)
    set_network(cfg, keys)
    cfg.MODEL.WEIGHTS = FORMATS[file_format]
    with whole_folder(output, replace=True) as folder:
        weights = folder / FORMATS[file_format]
        write_atomically(weights, weights_bytes(tensors, file_format))
        differences = stage_differences(backbone, about, cfg, weights)
        check_proof(differences)
        certificate = Certificate(
            weights_file=weights.name,
            weights_sha256=sha256_of(weights),
            tensors=len(tensors),
            left_behind=[*loaded.left_behind, *not_needed],
            # For the way back; Detectron2 does not keep them.
            counters={
                name: int(value)
                for name, value in backbone.state_dict().items()
                if is_counter(name)
            },
            source={
                "name": str(source) if is_named(source) else Path(source).name,
                # Not resolved: the hub's cache links to files without a suffix.
                "path": str(loaded.path.absolute()) if loaded.path else None,
                "file_sha256": loaded.file_sha256,
                "tensors_sha256": loaded.tensors_sha256,
                "layout": loaded.layout,
                "container": how.get("container"),
                "prefix": how.get("prefix"),
                "run": dict(about.source),
            },
            arch=about.arch,
            arch_kwargs=dict(about.kwargs),
            detectron2_keys=keys,
            detector_keys={key: plain(value_at(cfg, key)) for key in DETECTOR_KEYS},
            differences=differences,
            tolerance=TOLERANCE,
            made_with={"kscl": kscl.__version__, **library_versions()},
        )
        write_atomically(folder / CONFIG_FILE, _config_text(cfg, certificate).encode())
        if chosen.name == EXACT:  # the timm route needs our backbone
            plain_text = _plain_config_text(cfg, certificate)
            write_atomically(folder / PLAIN_CONFIG_FILE, plain_text.encode())
        write_certificate(certificate, folder / CERTIFICATE_FILE)
    warning = optimizer_warning(cfg, backbone, about.arch)
    return Converted(output, certificate, cfg, (*loaded.messages, *([warning] if warning else [])))


def optimizer_warning(cfg: CfgNode, backbone: nn.Module, arch: str) -> str:
    """Return a warning if the protocol's optimizer does not suit the network."""
    wants_adamw = any(isinstance(module, nn.LayerNorm) for module in backbone.modules())
    wanted = ADAMW if wants_adamw else SGD
    if wanted == cfg.KSCL.OPTIMIZER or cfg.MODEL.BACKBONE.FREEZE_AT == ALL_FROZEN:
        return ""
    is_tiny = cfg.KSCL.PROTOCOL.startswith("shapes-tiny")
    suffix = "_fpn" if is_tiny else ""
    if wants_adamw:
        family = "_convnext" if "convnext" in arch else "_swin"
        suffix = "_vit" if is_plain(backbone, arch) else family
    better = f"configs/detection/{'shapes_tiny' if is_tiny else 'coco_fpn_1x'}{suffix}.yaml"
    return (
        f"Warning: {arch} trains better with KSCL.OPTIMIZER {wanted} than with this protocol's "
        f"{cfg.KSCL.OPTIMIZER}. Use --protocol {better}, or its keys of SOLVER and KSCL in yours."
    )


def _check_output(output: Path, tensors_sha256: str, force: bool) -> None:
    """Raise an error unless a folder is new, empty or an earlier conversion of this backbone."""
    if not output.exists():
        return
    if not output.is_dir():
        raise KsclError(f"{output} is a file. Name a folder with --output-dir.")
    names = {path.name for path in output.iterdir()}
    foreign = names - {CONFIG_FILE, PLAIN_CONFIG_FILE, CERTIFICATE_FILE, *FORMATS.values()}
    if foreign:
        raise KsclError(
            f"{output} has other files ({some(sorted(foreign))}). Choose an empty folder."
        )
    if not names or force:
        return
    try:
        before = read_certificate(output / CERTIFICATE_FILE).source
    except KsclError:
        before = {}
    if before.get("tensors_sha256") != tensors_sha256:
        raise KsclError(
            f"{output} is a conversion of other weights ({before.get('name', 'unknown')}). Choose "
            "another folder, or overwrite it with --force."
        )


def _config_text(cfg: CfgNode, certificate: Certificate) -> str:
    lines = [
        f"{certificate.weights_file} beside this file ({certificate.arch}), protocol "
        f"{cfg.KSCL.PROTOCOL or 'unnamed'}: the network's keys and all",
        "that differ from Detectron2's defaults. certificate.json has the proof.",
    ]
    return _yaml(lines, changed_values(cfg, always=certificate.detectron2_keys))


def _plain_config_text(cfg: CfgNode, certificate: Certificate) -> str:
    """Return the config for Detectron2 without this project."""
    cfg = cfg.clone()
    lines = [
        f"{certificate.weights_file} beside this file ({certificate.arch}) for plain Detectron2,",
        "which reads MODEL.WEIGHTS from the current folder and checks nothing.",
    ]
    if cfg.MODEL.ROI_HEADS.NAME == EXTRA_NORM_HEAD:
        cfg.MODEL.ROI_HEADS.NAME = PLAIN_HEAD
        lines.append("Detectron2's head has no extra norm, so this is another detector.")
    if any(":" in name for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)):
        cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ()
        lines.append("Register your data sets and name them in DATASETS.")
    values = changed_values(cfg, always=certificate.detectron2_keys)
    values.pop("KSCL")
    return _yaml(lines, values)


def _yaml(comment: list[str], values: dict[str, Any]) -> str:
    text = yaml.safe_dump(values, sort_keys=True, default_flow_style=None, width=100)
    return "".join(f"# {line}\n" for line in comment) + text


@dataclass(frozen=True)
class ConvertedBack:
    """What was delivered."""

    path: Path
    description: Description
    differences: dict[str, float]  # as in a certificate
    left_behind: tuple[str, ...]
    same_as_source: bool  # its tensors are those that were converted, by their hash


def convert_back(
    source: str | Path,
    output: str | Path,
    *,
    arch: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    protocol: str | Path | None = None,
    force: bool = False,
) -> ConvertedBack:
    """Write `backbone.safetensors` into the folder `output`, proven against `source`."""
    weights, certificate = _open(Path(source))
    if certificate is not None:
        if arch is not None or protocol is not None:
            raise KsclError(
                f"The certificate of {source} names its network and config. Leave --arch, "
                "--arch-kwargs and --protocol out."
            )
        cfg = load_detection_config(weights.parent / CONFIG_FILE, rules=check_version)
        verify(certificate, weights, cfg)
        arch, kwargs = certificate.arch, certificate.arch_kwargs
    elif arch is None or protocol is None:
        raise KsclError(
            f"{source} has no certificate, and tensors alone do not determine stride, channel "
            "order and input. Name the network (--arch) and the Detectron2 config that the weights "
            "were trained with (--protocol FILE)."
        )
    else:
        cfg = load_detection_config(protocol, rules=check_version)
    kwargs = dict(kwargs or {})
    target = Path(output) / BACKBONE_FILE
    if cfg.MODEL.BACKBONE.NAME not in EXACT_BUILDERS:
        raise KsclError(
            f"{source} has a timm network (MODEL.BACKBONE.NAME {cfg.MODEL.BACKBONE.NAME}) without "
            "the layers that a detector does not need. Use the file it was made from."
        )
    if kwargs.get(STRIDE_IN_1X1):
        raise KsclError(
            f"{source} has its stride in 1x1 convolutions ({STRIDE_IN_1X1}), which timm does not "
            "have: it would read the file as another network. Use the source in our tools."
        )
    if target.exists() and not force:
        raise KsclError(f"{target} exists. Choose another folder, or overwrite with --force.")
    backbone = build_backbone(arch, kwargs).eval()
    content, _, _ = read_file(weights, str(weights))
    content.pop("__author__", None)
    found = find_tensors(content, backbone, str(weights), channels=cfg.INPUT.FORMAT)
    counters = certificate.counters if certificate else {}
    for name, count in counters.items():
        if not 0 <= count < LARGEST_COUNT:
            raise KsclError(f"{weights}: its certificate's counter {name} is not a count.")
    counted = {name: torch.tensor(count) for name, count in counters.items()}
    backbone.load_state_dict(found.tensors | counted, strict=True)
    state, is_bgr = backbone.state_dict(), cfg.INPUT.FORMAT == "BGR"
    tensors = {theirs: state[ours] for ours in state if (theirs := detectron2_name(ours))}
    if is_bgr:  # as the detector has it
        tensors["stem.conv1.weight"] = tensors["stem.conv1.weight"].flip(1)
    mean, std = (  # RGB in [0, 1]
        tuple(round(value / 255, DIGITS) for value in (values[::-1] if is_bgr else values))
        for values in (cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD)
    )
    run = dict(certificate.source["run"]) if certificate else {}
    description = Description(arch, kwargs, mean, std, source=run)
    with tempfile.TemporaryDirectory() as folder:
        network = Path(folder, FORMATS["pth"])
        network.write_bytes(weights_bytes(tensors))
        differences = stage_differences(backbone, description, cfg, network)
    check_proof(differences)
    if certificate and tensors_hash(backbone) != certificate.source["tensors_sha256"]:
        raise KsclError(
            f"{weights}: its tensors, converted back, are not those of the source in its "
            "certificate. Nothing was written."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    save_backbone(target, backbone.state_dict(), description)
    return ConvertedBack(
        target, description, differences, found.left_behind, certificate is not None
    )


def _open(source: Path) -> tuple[Path, Certificate | None]:
    """Return the weights file, and its certificate if it was converted here."""
    folder = source if source.is_dir() else source.parent
    path = folder / CERTIFICATE_FILE
    certificate = read_certificate(path) if path.is_file() else None
    if certificate and source in (folder, folder / certificate.weights_file):
        return folder / certificate.weights_file, certificate
    if not source.is_file():
        raise KsclError(
            f"{source} must be a folder of kscl convert, or a weights file of Detectron2."
        )
    return source, None
