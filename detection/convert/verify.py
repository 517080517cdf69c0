"""Whether a detector may start from weights: their certificate must name, prove and fit them.

What a certificate must say and prove is fixed in code: the file cannot set its own tolerance, leave
keys out or name another network, and if its source is still there, the weights are compared with
it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from torch import Tensor

from detection.config import DETECTOR_KEYS, norm_family
from detection.convert.certificate import (
    CERTIFICATE_FILE,
    Certificate,
    input_keys,
    read_certificate,
    require_fields,
)
from detection.convert.name_map import COUNTER, to_detectron2
from detection.convert.proof import TOLERANCE, stages_of
from detection.convert.routes import EXACT_BUILDERS, Route, choose_route
from detection.convert.weights import CONVERT_IT, read_weights
from detection.errors import DetectionError
from kscl.backbone_file import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    OWN_LAYOUTS,
    Description,
    load_backbone,
)
from kscl.config.tree import plain, value_at
from kscl.method.encoder import build_backbone
from kscl.runtime.files import sha256_of

PIXEL_TOLERANCE = 1e-3  # of 255: files round the mean and std


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
    # Our own files tell their input; of others only the tensors are compared, so any input will do.
    tells = source["layout"] in OWN_LAYOUTS
    loaded = load_backbone(
        path,
        certificate.arch,
        certificate.arch_kwargs,
        container=source["container"],
        prefix=source["prefix"],
        mean=None if tells else IMAGENET_MEAN,
        std=None if tells else IMAGENET_STD,
    )
    theirs, _ = route.carry(loaded.backbone.state_dict())
    different = [key for key in tensors if not torch.equal(tensors[key], theirs[key])]
    if different:
        raise DetectionError(
            f"{weights}: {different[0]} is not that of {path}, which its certificate names as its "
            f"source ({len(different)} tensors differ). {CONVERT_IT}"
        )
    said = {"tensors_sha256": loaded.tensors_sha256, "run": dict(loaded.description.source)}
    if loaded.description.source:  # our own file also tells its input
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
