"""The certificate of a conversion, and the check that a detector may start from its weights.

What a certificate must prove is fixed in code: the file cannot set its own tolerance, leave keys
out or name another network. If its source still exists, the weights are compared with it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from detectron2.config import CfgNode
from torch import Tensor

from detection.backbones import EXACT_BUILDERS
from detection.config import DETECTOR_KEYS, norm_family
from detection.convert.proof import TOLERANCE, stages_of
from detection.convert.routes import EXACT, TIMM, Route, choose_route
from detection.convert.weights import CONVERT_IT, read_weights
from kscl.backbone_file import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    OWN_LAYOUTS,
    Description,
    load_backbone,
)
from kscl.backbone_file.detectron2 import channels_of
from kscl.config import plain, value_at
from kscl.errors import KsclError
from kscl.methods.encoder import build_backbone
from kscl.records.record import listed, wrong_places
from kscl.runtime.files import sha256_of, write_atomically

CERTIFICATE_FILE = "certificate.json"
VERSION = 4
PIXEL_TOLERANCE = 1e-3  # of 255: files round the mean and std


@dataclass(frozen=True)
class Source:
    """The fields of `Certificate.source`."""

    name: str  # the file's, or the address it was fetched from
    path: str | None
    file_sha256: str | None
    tensors_sha256: str
    layout: str  # as it was found
    container: str | None  # as the user gave it
    prefix: str | None
    run: dict[str, Any]


@dataclass(frozen=True)
class Certificate:
    """All that is known about a conversion; every field is required."""

    weights_file: str
    weights_sha256: str
    tensors: int  # in the weights
    left_behind: list[str]  # tensors of the source that are not part of the detector
    counters: dict[str, int]  # BatchNorm's, which Detectron2 does not keep, by timm's names
    source: dict[str, Any]  # see Source
    arch: str  # timm's name
    arch_kwargs: dict[str, Any]
    detectron2_keys: dict[str, Any]  # network and input; a NORM stands for its family
    detector_keys: dict[str, Any]  # the detector around it; a NORM stands for its family
    differences: dict[str, float]  # relative L2 between timm's and Detectron2's output, by stage
    tolerance: float  # when it was made; TOLERANCE decides
    made_with: dict[str, str | None]  # versions

    @property
    def source_sha256(self) -> str:
        """Return the hash of the converted file, or of the tensors if the weights are random."""
        return self.source["file_sha256"] or self.source["tensors_sha256"]

    @property
    def backbone(self) -> dict[str, Any]:
        """Return the network and its pretraining, for a record."""
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
        raise KsclError(
            f"{path}: there is no such certificate, so nothing is known about the weights. "
            f"{CONVERT_IT}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise KsclError(f"{path} cannot be read as a certificate: {error}.") from error
    if not isinstance(about, dict) or about.pop("version", None) != VERSION:
        raise KsclError(f"{path} is not a certificate of version {VERSION}. {CONVERT_IT}")
    problems = list(wrong_places(about, Certificate))
    problems = problems or list(wrong_places(about["source"], Source, "source"))
    if problems:
        raise KsclError(f"{path}: {listed(problems)}. {CONVERT_IT}")
    return Certificate(**about)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def input_keys(description: Description) -> dict[str, Any]:
    """Return the config keys that give Detectron2 the input of pretraining."""
    return {
        "INPUT.FORMAT": "RGB",
        "MODEL.PIXEL_MEAN": [round(255 * value, 6) for value in description.mean],
        "MODEL.PIXEL_STD": [round(255 * value, 6) for value in description.std],
    }


def verify_start(cfg: CfgNode) -> Certificate | None:
    """Return the certificate of the weights to start from; None for training from scratch."""
    if bool(cfg.MODEL.WEIGHTS) == cfg.KSCL.FROM_SCRATCH:
        raise KsclError(
            "Set either MODEL.WEIGHTS (converted weights) or KSCL.FROM_SCRATCH True (random "
            f"weights), got MODEL.WEIGHTS '{cfg.MODEL.WEIGHTS}' and KSCL.FROM_SCRATCH "
            f"{cfg.KSCL.FROM_SCRATCH}."
        )
    if cfg.KSCL.FROM_SCRATCH:
        return None
    weights = Path(cfg.MODEL.WEIGHTS)
    if not weights.is_file():
        raise KsclError(f"MODEL.WEIGHTS {weights}: there is no such file. {CONVERT_IT}")
    certificate = read_certificate(cfg.KSCL.CERTIFICATE or weights.parent / CERTIFICATE_FILE)
    verify(certificate, weights, cfg)
    return certificate


def verify(certificate: Certificate, weights: str | Path, cfg: CfgNode) -> None:
    """Raise an error unless the weights are certified, proven, and fit the config."""
    found = sha256_of(Path(weights))
    if found != certificate.weights_sha256:
        raise KsclError(
            f"{weights} must have the SHA-256 of its certificate, "
            f"{certificate.weights_sha256[:12]}…, got {found[:12]}…: it was changed. {CONVERT_IT}"
        )
    _check_config(certificate, weights, cfg)
    _check_proof(certificate, weights, cfg)
    tensors = read_weights(weights)
    route = _check_network(certificate, tensors, weights, cfg)
    _check_source(certificate, route, tensors, weights)


def _check_config(certificate: Certificate, weights: str | Path, cfg: CfgNode) -> None:
    certified = certificate.detectron2_keys | certificate.detector_keys
    misfits = []
    for key, value in certified.items():
        try:
            ours = plain(value_at(cfg, key))
        except KeyError:
            raise KsclError(
                f"The certificate of {weights} has an unknown key, {key}. {CONVERT_IT}"
            ) from None
        if not _fits(key, ours, value):
            misfits.append(f"\n  {key} is {ours}; the weights are for {value}")
    if misfits:
        raise KsclError(
            f"The config does not fit {weights}:{''.join(misfits)}\n"
            f"Start from {Path(weights).parent / 'config.yaml'}, set these keys, or convert the "
            "source for this detector (kscl convert --protocol)."
        )


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


def _check_proof(certificate: Certificate, weights: str | Path, cfg: CfgNode) -> None:
    """Raise an error unless every stage was compared and is within TOLERANCE."""
    proven, required = certificate.differences, stages_of(cfg, certificate.arch_kwargs)
    wrong = [stage for stage in required if stage not in proven]
    wrong += [s for s, value in proven.items() if s not in required or not 0 <= value <= TOLERANCE]
    if wrong:
        raise KsclError(
            f"{weights}: its certificate does not prove {', '.join(wrong)} (the largest allowed "
            f"difference is {TOLERANCE:g}). {CONVERT_IT}"
        )


def _check_network(
    certificate: Certificate, tensors: dict[str, Tensor], weights: str | Path, cfg: CfgNode
) -> Route:
    """Compare tensors and keys with those of the certificate's network."""
    with torch.device("meta"):  # structure only
        backbone = build_backbone(certificate.arch, certificate.arch_kwargs)
    wanted = EXACT if cfg.MODEL.BACKBONE.NAME in EXACT_BUILDERS else TIMM
    route = choose_route(backbone, certificate.arch, certificate.arch_kwargs, cfg, wanted)
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    if shapes != route.shapes or certificate.tensors != len(tensors):
        raise KsclError(
            f"{weights} does not have the {certificate.tensors} tensors of a {certificate.arch} "
            f"{certificate.arch_kwargs} named in its certificate. {CONVERT_IT}"
        )
    where = f"The certificate of {weights}:"
    network_keys = {*route.keys, *input_keys(Description(certificate.arch))}
    wrong = network_keys ^ set(certificate.detectron2_keys)
    wrong |= set(DETECTOR_KEYS) ^ set(certificate.detector_keys)
    if wrong:
        raise KsclError(
            f"{where} detectron2_keys or detector_keys has missing or unknown fields: "
            f"{', '.join(sorted(wrong))}. {CONVERT_IT}"
        )
    for key, value in route.keys.items():
        if not _fits(key, value, certificate.detectron2_keys[key]):
            raise KsclError(
                f"{where} {key} must be {value} for a {certificate.arch}, got "
                f"{certificate.detectron2_keys[key]}. {CONVERT_IT}"
            )
    return route


def _check_source(
    certificate: Certificate, route: Route, tensors: dict[str, Tensor], weights: str | Path
) -> None:
    """Compare the weights with the file they were made from, if it still exists."""
    source = certificate.source
    path = Path(source["path"] or "")
    if not os.path.isfile(path):  # Path.is_file() raises for some texts
        return
    if sha256_of(path) != source["file_sha256"]:
        raise KsclError(
            f"{path}, or the certificate, was changed after {weights} was made. {CONVERT_IT}"
        )
    # Our own files describe their input; for others only the tensors are compared.
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
        raise KsclError(
            f"{weights}: {len(different)} tensors differ from its source {path}, e.g. "
            f"{different[0]}. {CONVERT_IT}"
        )
    expected = {"tensors_sha256": loaded.tensors_sha256, "run": dict(loaded.description.source)}
    if loaded.description.source:
        expected |= input_keys(loaded.description)
    certified = {**source, **certificate.detectron2_keys}
    for name, value in expected.items():
        if not _fits(name, value, certified[name]):
            raise KsclError(
                f"{weights}: its certificate must have the {name} of its source {path}, {value}, "
                f"got {certified[name]}. {CONVERT_IT}"
            )
