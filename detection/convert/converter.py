"""Convert a backbone file to weights, config and certificate for Detectron2, or write nothing.

The three files are made in a temporary folder, the proof is run on the very bytes that would be
delivered, and only then the folder is renamed.
"""

from __future__ import annotations

import io
import pickle
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml
from detectron2.config import CfgNode
from torch import Tensor

import kscl
from detection.config import changed_values, load_detection_config, set_network
from detection.convert.certificate import (
    CERTIFICATE_FILE,
    Certificate,
    detector_keys,
    input_keys,
    read_certificate,
    write_certificate,
)
from detection.convert.name_map import COUNTER
from detection.convert.proof import TOLERANCE, check_proof, stage_differences
from detection.convert.routes import EXACT, choose_route
from detection.convert.weights import AUTHOR, as_arrays, by_heuristics
from detection.errors import DetectionError
from detection.train.roi_heads import EXTRA_NORM_HEAD, PLAIN_HEAD
from kscl.backbone_file import Loaded, load_backbone
from kscl.runtime.files import sha256_of, whole_folder, write_atomically

CONFIG_FILE = "config.yaml"
PLAIN_CONFIG_FILE = "config_plain.yaml"  # for Detectron2 without this project
FORMATS = {"pth": "weights.pth", "pkl": "weights.pkl"}
PROTOCOL = "detection/voc0712_c4_24k_moco.yaml"


@dataclass(frozen=True)
class Converted:
    """What was delivered."""

    folder: Path
    certificate: Certificate
    cfg: CfgNode
    said: tuple[str, ...]  # which network of the file was taken, and what was not read

    @property
    def weights(self) -> Path:
        return self.folder / self.certificate.weights_file


def convert(
    source: str | Path,
    output: str | Path,
    *,
    arch: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    container: str | None = None,
    prefix: str | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    protocol: str | Path = PROTOCOL,
    route: str | None = None,
    file_format: str = "pth",
    force: bool = False,
) -> Converted:
    """Convert a backbone for a protocol's detector, prove it, and deliver the folder `output`.

    `container` and `prefix` name the network's place in a file of an unknown layout or with several
    networks; `mean` and `std` (RGB in [0, 1]) are for files whose input is not known. `route`
    "timm" runs the timm network itself also where Detectron2 could build it.
    """
    output = Path(output)
    cfg = load_detection_config(protocol)
    place = {"container": container, "prefix": prefix}
    loaded = load_backbone(source, arch, kwargs, seed, **place, mean=mean, std=std)
    description = loaded.description
    _check_output(output, loaded, force)

    kwargs = description.kwargs
    chosen = choose_route(loaded.backbone, description.arch, kwargs, cfg, route)
    keys = chosen.keys | input_keys(description)
    tensors, not_needed = chosen.carry(loaded.backbone.state_dict())
    _check_finite(tensors, str(source))
    set_network(cfg, keys)
    cfg.MODEL.WEIGHTS = FORMATS[file_format]

    with whole_folder(output, replace=True) as folder:
        weights = folder / FORMATS[file_format]
        write_atomically(weights, weights_bytes(tensors, file_format))
        differences = stage_differences(
            loaded.backbone, kwargs, description.mean, description.std, cfg, weights
        )
        check_proof(differences)
        certificate = Certificate(
            weights_file=weights.name,
            weights_sha256=sha256_of(weights),
            tensors=len(tensors),
            left_behind=[*loaded.left_behind, *not_needed],
            counters=_counters(loaded, not_needed),
            source=_source(loaded, str(source)) | place,
            arch=description.arch,
            arch_kwargs=dict(kwargs),
            detectron2_keys=keys,
            detector_keys=detector_keys(cfg),
            differences=differences,
            tolerance=TOLERANCE,
            made_with=_versions(),
        )
        write_atomically(folder / CONFIG_FILE, _config_text(cfg, certificate).encode())
        if chosen.name == EXACT:  # a timm network runs in a backbone of ours
            plain_text = _plain_config_text(cfg, certificate)
            write_atomically(folder / PLAIN_CONFIG_FILE, plain_text.encode())
        write_certificate(certificate, folder / CERTIFICATE_FILE)
    return Converted(output, certificate, cfg, loaded.said)


def _check_finite(tensors: Mapping[str, Tensor], name: str) -> None:
    broken = [key for key, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise DetectionError(
            f"{name}: {broken[0]} and {len(broken) - 1} other tensors hold NaN or infinite values: "
            "the pretraining diverged, or the file is damaged. Use another checkpoint."
        )


def weights_bytes(tensors: dict[str, Tensor], file_format: str) -> bytes:
    """Serialize with the marks that Detectron2's loader needs."""
    marks = {"matching_heuristics": by_heuristics(tensors), "__author__": AUTHOR}
    if file_format == "pkl":
        return pickle.dumps({"model": as_arrays(tensors), **marks}, protocol=4)
    content = io.BytesIO()
    torch.save({"model": tensors, **marks}, content)
    return content.getvalue()


def _counters(loaded: Loaded, not_needed: list[str]) -> dict[str, int]:
    """Return BatchNorm's counters, which Detectron2 does not keep, for the way back."""
    state = loaded.backbone.state_dict()
    return {name: int(state[name]) for name in not_needed if name.rpartition(".")[2] == COUNTER}


def _source(loaded: Loaded, name: str) -> dict[str, Any]:
    return {
        "name": Path(name).name,
        "path": str(Path(name).resolve()) if loaded.file_sha256 else None,
        "file_sha256": loaded.file_sha256,
        "tensors_sha256": loaded.tensors_sha256,
        "layout": loaded.layout,
        "run": dict(loaded.description.source),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kscl": kscl.__version__}
    for name in ("torch", "timm", "detectron2"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def _config_text(cfg: CfgNode, certificate: Certificate) -> str:
    plain = changed_values(cfg, always=certificate.detectron2_keys)
    values = yaml.safe_dump(plain, sort_keys=True, default_flow_style=None, width=100)
    return (
        f"# {certificate.weights_file} beside this file ({certificate.arch}) in the protocol "
        f"{cfg.KSCL.PROTOCOL or 'that was given'}: the network's keys, and all else\n"
        "# that differs from Detectron2's defaults. The proof is in certificate.json.\n" + values
    )


def _plain_config_text(cfg: CfgNode, certificate: Certificate) -> str:
    """Return the config for those who use Detectron2 without this project."""
    cfg = cfg.clone()
    lines = [
        f"{certificate.weights_file} beside this file ({certificate.arch}) for plain Detectron2, "
        "which reads MODEL.WEIGHTS",
        "from the folder that it is started in. It is checked by nobody there.",
    ]
    if cfg.MODEL.ROI_HEADS.NAME == EXTRA_NORM_HEAD:
        cfg.MODEL.ROI_HEADS.NAME = PLAIN_HEAD
        lines.append("Detectron2 has no extra norm in its head, so this is another detector.")
    if any(":" in name for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)):
        cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ()
        lines.append("DATASETS are to be registered and named.")
    values = changed_values(cfg, always=certificate.detectron2_keys)
    values.pop("KSCL")
    comment = "".join(f"# {line}\n" for line in lines)
    return comment + yaml.safe_dump(values, sort_keys=True, default_flow_style=None, width=100)


def _check_output(output: Path, loaded: Loaded, force: bool) -> None:
    """Raise an error if a folder holds anything but an earlier conversion of this backbone."""
    if not output.exists():
        return
    if not output.is_dir():
        raise DetectionError(f"{output} is a file. Name a folder with --output-dir.")
    names = {path.name for path in output.iterdir()}
    foreign = names - {CONFIG_FILE, PLAIN_CONFIG_FILE, CERTIFICATE_FILE, *FORMATS.values()}
    if foreign:
        raise DetectionError(
            f"{output} holds other things ({', '.join(sorted(foreign)[:3])}). Choose an empty "
            "folder."
        )
    if not names or force:
        return
    try:
        before = read_certificate(output / CERTIFICATE_FILE).source
    except DetectionError:
        before = {}
    if before.get("tensors_sha256") != loaded.tensors_sha256:
        raise DetectionError(
            f"{output} holds a conversion of other weights ({before.get('name', 'unknown')}). "
            "Choose another folder, or overwrite it with --force."
        )
