"""The certificate of a conversion, and whether a detector may start from the weights it certifies.

What a certificate must say and prove is fixed in code: the file cannot set its own tolerance, leave
keys out or name another network, and if its source is still there, the weights are compared with
it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, get_origin, get_type_hints

import torch
from detectron2.config import CfgNode
from torch import Tensor

from detection.config import DETECTOR_KEYS, norm_family
from detection.convert.proof import TOLERANCE, stages_of
from detection.convert.routes import EXACT_BUILDERS, Route, choose_route
from detection.convert.weights import CONVERT_IT, COUNTER, read_weights, to_detectron2
from detection.errors import DetectionError
from kscl.backbone_file import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    OWN_LAYOUTS,
    Description,
    load_backbone,
)
from kscl.backbone_file.detectron2 import channels_of
from kscl.config import plain, value_at
from kscl.methods.encoder import build_backbone
from kscl.runtime.files import sha256_of, write_atomically

CERTIFICATE_FILE = "certificate.json"
VERSION = 4
SOURCE_FIELDS: dict[str, type | UnionType] = {  # of the weights' source, with their types
    "name": str,
    "path": str | None,
    "file_sha256": str | None,
    "tensors_sha256": str,
    "layout": str,  # as it was found
    "container": str | None,  # where the user said to look
    "prefix": str | None,
    "run": dict,
}
PIXEL_TOLERANCE = 1e-3  # of 255: files round the mean and std


@dataclass(frozen=True)
class Certificate:
    """All that is known of a conversion; every field is required."""

    weights_file: str
    weights_sha256: str
    tensors: int  # in the weights
    left_behind: list[str]  # tensors of the source that are not part of the detector
    counters: dict[str, int]  # BatchNorm's, which Detectron2 has no place for, by timm's names
    source: dict[str, Any]  # SOURCE_FIELDS: the file, its hash, its tensors' hash and its run
    arch: str  # timm's name
    arch_kwargs: dict[str, Any]
    detectron2_keys: dict[str, Any]  # network and input; a NORM stands for its family
    detector_keys: dict[str, Any]  # the detector around it; a NORM stands for its family
    differences: dict[str, float]  # stage: relative L2 between timm's output and Detectron2's
    tolerance: float  # when it was made; TOLERANCE decides
    made_with: dict[str, str]  # versions

    @property
    def source_sha256(self) -> str:
        """The hash of the converted file, or of the tensors if the weights are random."""
        return self.source["file_sha256"] or self.source["tensors_sha256"]

    @property
    def backbone(self) -> dict[str, Any]:
        """What a record says of the contender: its network and pretraining run."""
        return {**self.source["run"], "arch": self.arch, "arch_kwargs": self.arch_kwargs}

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {"version": VERSION, **dataclasses.asdict(self)}


def write_certificate(certificate: Certificate, path: Path) -> None:
    """Write a certificate as JSON."""
    write_atomically(path, (json.dumps(certificate.as_dict(), indent=2) + "\n").encode())


def read_certificate(path: str | Path) -> Certificate:
    """Read a certificate; a field that is missing, unknown or of another type is an error."""
    path = Path(path)
    try:
        about = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise DetectionError(
            f"{path}: there is no such certificate, so nothing is known of the weights. "
            f"{CONVERT_IT}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DetectionError(f"{path} cannot be read as a certificate: {error}.") from error
    if not isinstance(about, dict) or about.pop("version", None) != VERSION:
        raise DetectionError(f"{path} is not a certificate of version {VERSION}. {CONVERT_IT}")
    require_fields(about, [field.name for field in dataclasses.fields(Certificate)], str(path))
    for name, kind in get_type_hints(Certificate).items():
        _require_type(about[name], get_origin(kind) or kind, f"{path}: {name}")
    for name in about["left_behind"]:
        _require_type(name, str, f"{path}: left_behind")
    for name, count in about["counters"].items():
        _require_type(count, int, f"{path}: counters.{name}")
    require_fields(about["source"], SOURCE_FIELDS, f"{path}: source")
    for name, kind in SOURCE_FIELDS.items():
        _require_type(about["source"][name], kind, f"{path}: source.{name}")
    return Certificate(**about)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is not a number")


def _require_type(value: Any, kind: Any, where: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = getattr(kind, "__name__", str(kind))
        raise DetectionError(f"{where} is not a {wanted}. {CONVERT_IT}")


def require_fields(found: dict[str, Any], required: Any, where: str) -> None:
    """Raise an error unless exactly the required fields are there."""
    wrong = sorted(set(required) ^ set(found))
    if wrong:
        raise DetectionError(
            f"{where} has missing or unknown fields: {', '.join(wrong)}. {CONVERT_IT}"
        )


def input_keys(description: Description) -> dict[str, Any]:
    """Return the config keys that give Detectron2 the input of pretraining."""
    return {
        "INPUT.FORMAT": "RGB",
        "MODEL.PIXEL_MEAN": [round(255 * value, 6) for value in description.mean],
        "MODEL.PIXEL_STD": [round(255 * value, 6) for value in description.std],
    }


def detector_keys(cfg: CfgNode) -> dict[str, Any]:
    """Return what the detector of a config is made of, beside its network."""
    return {key: plain(value_at(cfg, key)) for key in DETECTOR_KEYS}


def verify_start(cfg: CfgNode) -> Certificate | None:
    """Return the certificate of the weights to start from; None if random ones are asked for."""
    if not cfg.MODEL.WEIGHTS:
        if not cfg.KSCL.FROM_SCRATCH:
            raise DetectionError(
                'MODEL.WEIGHTS is "", which trains from random weights. Name converted weights, or '
                "set KSCL.FROM_SCRATCH True if that is what you want."
            )
        return None
    if cfg.KSCL.FROM_SCRATCH:
        raise DetectionError(
            f"KSCL.FROM_SCRATCH is True and MODEL.WEIGHTS is {cfg.MODEL.WEIGHTS}. Choose one."
        )
    weights = Path(cfg.MODEL.WEIGHTS)
    if not weights.is_file():
        raise DetectionError(f"MODEL.WEIGHTS {weights}: there is no such file. {CONVERT_IT}")
    certificate = read_certificate(cfg.KSCL.CERTIFICATE or weights.parent / CERTIFICATE_FILE)
    verify(certificate, weights, cfg)
    return certificate


def verify(certificate: Certificate, weights: str | Path, cfg: CfgNode) -> None:
    """Raise an error unless the weights are the certified ones, proven, and fit the config."""
    found = sha256_of(Path(weights))
    if found != certificate.weights_sha256:
        raise DetectionError(
            f"{weights} is not the file of this certificate (sha256 {found[:12]}…, certified is "
            f"{certificate.weights_sha256[:12]}…): it was changed or exchanged. {CONVERT_IT}"
        )
    _check_config(certificate, weights, cfg)
    _check_proof(certificate, weights, cfg)
    tensors = read_weights(weights)
    route = _check_network(certificate, tensors, weights, cfg)
    _check_source(certificate, route, tensors, weights)


def _check_proof(certificate: Certificate, weights: str | Path, cfg: CfgNode) -> None:
    """Require that every stage was compared and differed by no more than our own tolerance."""
    proven, required = certificate.differences, stages_of(cfg, certificate.arch_kwargs)
    missing = [stage for stage in required if stage not in proven]
    failed = [stage for stage in proven if stage not in required or not _is_small(proven[stage])]
    if missing or failed:
        raise DetectionError(
            f"{weights}: its certificate proves nothing for {', '.join([*missing, *failed])} "
            f"(allowed is a difference of {TOLERANCE:g}). {CONVERT_IT}"
        )


def _is_small(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value <= TOLERANCE


def _check_network(
    certificate: Certificate, tensors: dict[str, Tensor], weights: str | Path, cfg: CfgNode
) -> Route:
    """Compare tensors and keys with those of the network that the certificate names."""
    with torch.device("meta"):  # no memory, no random numbers: only its structure is needed
        backbone = build_backbone(certificate.arch, certificate.arch_kwargs)
    wanted = "exact" if cfg.MODEL.BACKBONE.NAME in EXACT_BUILDERS else "timm"
    route = choose_route(backbone, certificate.arch, certificate.arch_kwargs, cfg, wanted)
    shapes = (
        {
            to_detectron2(name): tuple(value.shape)
            for name, value in backbone.state_dict().items()
            if name.rpartition(".")[2] != COUNTER
        }
        if route.shapes is None
        else {f"{route.prefix}{name}": shape for name, shape in route.shapes.items()}
    )
    if {name: tuple(value.shape) for name, value in tensors.items()} != shapes:
        raise DetectionError(
            f"{weights} does not hold a {certificate.arch} {certificate.arch_kwargs}, which its "
            f"certificate says. {CONVERT_IT}"
        )
    if certificate.tensors != len(tensors):
        raise DetectionError(
            f"{weights} holds {len(tensors)} tensors, its certificate says {certificate.tensors}. "
            f"{CONVERT_IT}"
        )
    expected = route.keys
    required = {*expected, *input_keys(Description(certificate.arch))}
    where = f"The certificate of {weights}: detectron2_keys"
    require_fields(certificate.detectron2_keys, required, where)
    for key, value in expected.items():
        if not _fits(key, value, certificate.detectron2_keys[key]):
            raise DetectionError(
                f"{where} has {key} {certificate.detectron2_keys[key]}, but a {certificate.arch} "
                f"needs {value}. {CONVERT_IT}"
            )
    require_fields(
        certificate.detector_keys,
        DETECTOR_KEYS,
        f"The certificate of {weights}: detector_keys",
    )
    return route


def _check_source(
    certificate: Certificate, route: Route, tensors: dict[str, Tensor], weights: str | Path
) -> None:
    """Compare the weights with the file they were made from, if it is still there."""
    source = certificate.source
    path = Path(source["path"] or "")
    if not os.path.isfile(path):  # unlike Path's, false for any text
        return
    if sha256_of(path) != source["file_sha256"]:
        raise DetectionError(
            f"{path} was changed since {weights} was made from it, or the certificate was. "
            f"{CONVERT_IT}"
        )
    # Our own files name their input; from others only the tensors are compared.
    is_ours = source["layout"] in OWN_LAYOUTS
    loaded = load_backbone(
        path,
        certificate.arch,
        certificate.arch_kwargs,
        container=source["container"],
        prefix=source["prefix"],
        mean=None if is_ours else IMAGENET_MEAN,
        std=None if is_ours else IMAGENET_STD,
        channels=channels_of(source["layout"]),
    )
    theirs, _ = route.carry(loaded.backbone.state_dict())
    different = [key for key in tensors if not torch.equal(tensors[key], theirs[key])]
    if different:
        raise DetectionError(
            f"{weights}: {different[0]} is not that of {path}, which its certificate names as its "
            f"source ({len(different)} tensors differ). {CONVERT_IT}"
        )
    said = {"tensors_sha256": loaded.tensors_sha256, "run": dict(loaded.description.source)}
    if loaded.description.source:  # our own file also names its input
        said |= input_keys(loaded.description)
    certified = {**source, **certificate.detectron2_keys}
    wrong = [name for name, value in said.items() if not _fits(name, value, certified[name])]
    if wrong:
        raise DetectionError(
            f"{weights}: its certificate has another {wrong[0]} ({certified[wrong[0]]}) than its "
            f"source {path} ({said[wrong[0]]}). {CONVERT_IT}"
        )


def _check_config(certificate: Certificate, weights: str | Path, cfg: CfgNode) -> None:
    certified = certificate.detectron2_keys | certificate.detector_keys
    unknown = [key for key in certified if not _has_key(cfg, key)]
    if unknown:
        raise DetectionError(
            f"The certificate of {weights} names {unknown[0]}, which configs do not have. "
            f"{CONVERT_IT}"
        )
    misfits = [
        f"{key} is {plain(value_at(cfg, key))}; the weights are for {value}"
        for key, value in certified.items()
        if not _fits(key, value_at(cfg, key), value)
    ]
    if misfits:
        lines = "".join(f"\n  {misfit}" for misfit in misfits)
        raise DetectionError(
            f"The config does not fit {weights}:{lines}\n"
            f"Start from {Path(weights).parent / 'config.yaml'}, set these keys, or convert the "
            "source for the other detector (tools/convert.py --protocol)."
        )


def _has_key(cfg: CfgNode, key: str) -> bool:
    try:
        value_at(cfg, key)
    except KeyError:
        return False
    return True


def _fits(key: str, ours: Any, certified: Any) -> bool:
    if key.endswith(".NORM"):
        return isinstance(certified, str) and norm_family(ours) == norm_family(certified)
    if key in ("MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD"):
        if not isinstance(certified, list) or len(ours) != len(certified):
            return False
        numbers = all(isinstance(value, int | float) for value in certified)
        return numbers and all(
            abs(a - b) <= PIXEL_TOLERANCE for a, b in zip(ours, certified, strict=True)
        )
    return plain(ours) == certified
