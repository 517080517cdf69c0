"""Convert a backbone file for Detectron2, with proof, or a Detectron2 ResNet back to timm.

Weights, config and certificate are made in a temporary folder, the proof is run on the very bytes
that would be delivered, and only then the folder is renamed. On the way back a folder of the
converter says which network it holds and what its input is; for any other file of Detectron2 the
user names both: the timm model, and the config that the weights were trained with.
"""

from __future__ import annotations

import io
import pickle
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml
from detectron2.config import CfgNode
from detectron2.utils.file_io import Detectron2Handler, PathManager
from torch import Tensor, nn

import kscl
from detection.backbones.builders import EXTRA_NORM_HEAD, PLAIN_HEAD
from detection.config import changed_values, check_version, load_detection_config, set_network
from detection.convert.certificate import (
    CERTIFICATE_FILE,
    Certificate,
    detector_keys,
    input_keys,
    read_certificate,
    verify,
    write_certificate,
)
from detection.convert.proof import TOLERANCE, check_proof, stage_differences
from detection.convert.routes import EXACT, EXACT_BUILDERS, choose_route
from detection.convert.weights import (
    AUTHOR,
    COUNTER,
    as_arrays,
    by_heuristics,
    read_detectron2,
    to_timm,
    without_prefix,
)
from detection.errors import DetectionError
from kscl.backbone_file import Description, Loaded, load_backbone, save_backbone, tensors_hash
from kscl.methods.encoder import STRIDE_IN_1X1, build_backbone
from kscl.runtime.files import sha256_of, whole_folder, write_atomically

CONFIG_FILE = "config.yaml"
PLAIN_CONFIG_FILE = "config_plain.yaml"  # for Detectron2 without this project
FORMATS = {"pth": "weights.pth", "pkl": "weights.pkl"}
PROTOCOL = "detection/voc0712_c4_24k_moco.yaml"
BACKBONE_FILE = "backbone.safetensors"
LARGEST_COUNT = 2**63
DIGITS = 8  # of mean and std: a config holds 255 times of them, rounded


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
    channels: str | None = None,
    protocol: str | Path = PROTOCOL,
    route: str | None = None,
    file_format: str = "pth",
    force: bool = False,
) -> Converted:
    """Convert a backbone for a protocol's detector, prove it, and deliver the folder `output`.

    `container` and `prefix` name the network's place in a file of an unknown layout or with several
    networks; `mean` and `std` (RGB in [0, 1]) are for files whose input is not known, `channels`
    (RGB or BGR) for files in Detectron2's layout. `route` "timm" runs the timm network itself also
    where Detectron2 could build it. `source` may be an address of Detectron2's, `detectron2://…`.
    """
    output = Path(output)
    cfg = load_detection_config(protocol)
    place = {"container": container, "prefix": prefix}
    source = _fetched(source)
    loaded = load_backbone(
        source,
        arch,
        kwargs,
        seed,
        container=container,
        prefix=prefix,
        mean=mean,
        std=std,
        channels=channels,
    )
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


def _fetched(source: str | Path) -> str | Path:
    """Return a source as it is, or the cached file of an address that only Detectron2 knows."""
    if not str(source).startswith(Detectron2Handler.PREFIX):
        return source
    try:
        return PathManager.get_local_path(str(source))
    except OSError as error:  # HTTP and connection errors are among them
        raise DetectionError(
            f"{source} cannot be fetched ({type(error).__name__}: {error}): check the address and "
            "the connection, or download it by hand and give the file's path."
        ) from error


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
    if (kwargs or {}).get(STRIDE_IN_1X1):
        raise DetectionError(
            f"{source} has its stride in 1x1 convolutions ({STRIDE_IN_1X1}), and timm has no such "
            "network: its file would be read as another one. Use the source in our tools."
        )
    tensors, left_behind = _resnet_of(weights)
    in_rgb = dict(tensors)
    if cfg.INPUT.FORMAT == "BGR" and "stem.conv1.weight" in tensors:
        in_rgb["stem.conv1.weight"] = tensors["stem.conv1.weight"].flip(1)
    backbone = _fill(build_backbone(arch, kwargs), in_rgb, certificate, weights)
    mean, std = _colors(cfg)
    differences = _prove(backbone, kwargs or {}, mean, std, cfg, tensors)
    run = dict(certificate.source["run"]) if certificate else {}
    description = Description(arch, dict(kwargs or {}), mean, std, source=run)
    if certificate and tensors_hash(backbone) != certificate.source["tensors_sha256"]:
        raise DetectionError(
            f"{weights}: taken back, its tensors are not those that its certificate names as the "
            "source's. Nothing was written."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    save_backbone(target, backbone.state_dict(), description)
    is_same = certificate is not None
    return TakenBack(target, description, differences, left_behind, is_same)


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
        if not 0 <= count < LARGEST_COUNT:
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
