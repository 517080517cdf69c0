"""The certificate of a conversion: what was converted, what was proven, which config it fits."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, get_origin, get_type_hints

from detectron2.config import CfgNode

from detection.config import DETECTOR_KEYS
from detection.convert.weights import CONVERT_IT
from detection.errors import DetectionError
from kscl.backbone_file import Description
from kscl.config.tree import plain, value_at
from kscl.runtime.files import write_atomically

CERTIFICATE_FILE = "certificate.json"
VERSION = 4
SOURCE_FIELDS: dict[str, type | UnionType] = {  # what tells the weights' source, and its types
    "name": str,
    "path": str | None,
    "file_sha256": str | None,
    "tensors_sha256": str,
    "layout": str,  # as it was found
    "container": str | None,  # where the user said to look
    "prefix": str | None,
    "run": dict,
}


@dataclass(frozen=True)
class Certificate:
    """Everything that a conversion tells; all of it is required."""

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
        """What a record says of the contender: its pretraining run, as its file tells it."""
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
