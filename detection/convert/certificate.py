"""The certificate of a conversion: what was converted, what was proven, which config it fits.

A detector starts only from weights whose certificate names them by their hash and fits its config.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from detectron2.config import CfgNode

from detection.config import NORM_KEY, norm_family
from detection.convert.weights import CONVERT_IT
from detection.errors import DetectionError
from kscl.config.tree import value_at
from kscl.runtime.files import sha256_of, write_atomically

CERTIFICATE_FILE = "certificate.json"
VERSION = 1
PIXEL_TOLERANCE = 1e-3  # of 255: how files round the mean and std


@dataclass(frozen=True)
class Certificate:
    """All of it is needed: an incomplete certificate is none."""

    weights_file: str
    weights_sha256: str
    tensors: int  # in the weights
    left_behind: list[str]  # tensors of the source that are no part of the detector
    source: dict[str, Any]  # file, its hash, that of the backbone's tensors, layout, and its run
    arch: str  # timm's name
    arch_kwargs: dict[str, Any]
    detectron2_keys: dict[str, Any]  # network and input; NORM stands for its family
    differences: dict[str, float]  # stage: relative L2 between timm's output and Detectron2's
    tolerance: float
    made_with: dict[str, str]  # versions

    @property
    def source_sha256(self) -> str:
        """Of the file that was converted; of random weights, which have none, of the tensors."""
        return self.source["file_sha256"] or self.source["tensors_sha256"]

    @property
    def backbone(self) -> dict[str, Any]:
        """What a record says of the contender: its pretraining run, as its file tells it."""
        return {**self.source["run"], "arch": self.arch, "arch_kwargs": self.arch_kwargs}

    def as_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **dataclasses.asdict(self)}


def write_certificate(certificate: Certificate, path: Path) -> None:
    write_atomically(path, (json.dumps(certificate.as_dict(), indent=2) + "\n").encode())


def read_certificate(path: str | Path) -> Certificate:
    path = Path(path)
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DetectionError(
            f"{path}: no such certificate, so nothing is known of the weights; {CONVERT_IT}"
        ) from None
    except (OSError, ValueError) as error:
        raise DetectionError(f"{path} cannot be read as a certificate: {error}") from error
    if not isinstance(about, dict) or about.pop("version", None) != VERSION:
        raise DetectionError(f"{path} is not a certificate of version {VERSION}; {CONVERT_IT}")
    fields = {field.name for field in dataclasses.fields(Certificate)}
    if set(about) != fields:
        wrong = ", ".join(sorted(fields ^ set(about)))
        raise DetectionError(f"{path} has fields missing or unknown: {wrong}; {CONVERT_IT}")
    for name, kind in get_type_hints(Certificate).items():
        plain = get_origin(kind) or kind
        if not isinstance(about[name], plain):
            raise DetectionError(f"{path}: {name} is not a {plain.__name__}; {CONVERT_IT}")
    return Certificate(**about)


def verify(certificate: Certificate, weights: str | Path, cfg: CfgNode) -> None:
    """The weights are those of the certificate, they were proven, and the config fits them."""
    found = sha256_of(Path(weights))
    if found != certificate.weights_sha256:
        raise DetectionError(
            f"{weights} is not the file of this certificate (sha256 {found[:12]}…, certified is "
            f"{certificate.weights_sha256[:12]}…): it was changed or exchanged; {CONVERT_IT}"
        )
    unproven = [s for s, d in certificate.differences.items() if not d <= certificate.tolerance]
    if unproven or not certificate.differences:
        raise DetectionError(f"{weights}: its certificate proves nothing; {CONVERT_IT}")
    misfits = []
    for key, value in certificate.detectron2_keys.items():
        try:
            ours = value_at(cfg, key)
        except KeyError:
            misfits.append(f"{key} is not a key of Detectron2's")
            continue
        if not _fits(key, ours, value):
            misfits.append(f"{key} is {ours}; the weights are for {value}")
    if misfits:
        lines = "".join(f"\n  {misfit}" for misfit in misfits)
        raise DetectionError(
            f"the config does not fit {weights}:{lines}\n"
            f"Start from {Path(weights).parent / 'config.yaml'}, or set these keys."
        )


def verify_start(cfg: CfgNode) -> Certificate | None:
    """What a run starts from: certified weights, or (None) random ones if asked for by name."""
    if not cfg.MODEL.WEIGHTS:
        if not cfg.KSCL.FROM_SCRATCH:
            raise DetectionError(
                'MODEL.WEIGHTS is "", which trains from random weights; name converted weights, or '
                "say KSCL.FROM_SCRATCH True if that is what you want"
            )
        return None
    if cfg.KSCL.FROM_SCRATCH:
        raise DetectionError(
            f"KSCL.FROM_SCRATCH is True and MODEL.WEIGHTS is {cfg.MODEL.WEIGHTS}: choose one"
        )
    weights = Path(cfg.MODEL.WEIGHTS)
    if not weights.is_file():
        raise DetectionError(f"MODEL.WEIGHTS {weights}: no such file; {CONVERT_IT}")
    certificate = read_certificate(cfg.KSCL.CERTIFICATE or weights.parent / CERTIFICATE_FILE)
    verify(certificate, weights, cfg)
    return certificate


def _fits(key: str, ours: Any, certified: Any) -> bool:
    if key == NORM_KEY:
        return norm_family(ours) == norm_family(certified)
    if key in ("MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD"):
        near = [abs(a - b) <= PIXEL_TOLERANCE for a, b in zip(ours, certified, strict=False)]
        return len(ours) == len(certified) and all(near)
    return (list(ours) if isinstance(ours, tuple) else ours) == certified
