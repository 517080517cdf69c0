"""Weights by name: the file that a name stands for, in the cache of the client that fetches it.

    timm:resnet50.a1_in1k                       a tag of timm's table, by the Hugging Face hub
    hf-hub:OWNER/NAME, hf-hub:OWNER/NAME@COMMIT any timm model on the hub
    torchvision:ResNet50_Weights.IMAGENET1K_V2  by torch.hub
    https://…, detectron2://…                   by our own downloads
    anything else                               a file

A cached file is used without asking the network, so a name means the same file in all stages of a
suite, and offline. If the hub has another one by now, that is said. HF_HUB_OFFLINE=1 allows no
download of any kind.
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import huggingface_hub
import timm
import torch.hub
import torchvision.models
from huggingface_hub import constants
from huggingface_hub.utils import EntryNotFoundError, LocalEntryNotFoundError
from iopath.common.file_io import file_lock

from kscl.backbone_file.file import DESCRIPTION_VERSION, Description, check_description
from kscl.data.source import cache_folder
from kscl.errors import KsclError, printable
from kscl.runtime.files import sha256_of
from kscl.runtime.paths import DETECTRON2, HUB, TIMM, TORCHVISION, cached_file, cached_path, is_url

log = logging.getLogger(__name__)

DETECTRON2_FILES = "https://dl.fbaipublicfiles.com/detectron2/"
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,64})\.")  # of a file, as torch.hub names them
WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")  # timm's, in its order
HUB_SECONDS = 5.0  # to wait for the hub's first answer
NEAREST = 5  # names in a message


@dataclass(frozen=True)
class Weights:
    """A file of weights on this machine, and what its name says about it."""

    path: Path
    description: Description | None = None  # None: a file or an address, which say nothing
    sha256: str = ""  # how its SHA-256 begins, if the name tells
    message: str = ""  # for the user


def find_weights(source: str | Path, *, download: bool = True) -> Weights | None:
    """Return the file of a name; None if it is not cached and may not be downloaded.

    Raise an error if there is no such name, or the file cannot be fetched.
    """
    name = str(source)
    if name.startswith(TIMM):
        return _of_timm(name, download)
    if name.startswith(HUB):
        return _of_hub(name, download)
    if name.startswith(TORCHVISION):
        return _of_torchvision(name, download)
    address = name.replace(DETECTRON2, DETECTRON2_FILES, 1) if name.startswith(DETECTRON2) else name
    if not is_url(address):
        return Weights(Path(name))
    target = cached_path(address, cache_folder())
    if not target.is_file():
        if not download:
            return None
        _check_online(name, address, str(target))
        try:
            log.info("Fetching %s to %s.", address, target)
            cached_file(address, cache_folder())
        except KsclError as error:
            if name == address:
                raise
            raise KsclError(f"{name}: {error}") from error
    return Weights(target, sha256=_hash_in(address))


def cached_weights(source: str | Path) -> Path | None:
    """Return the file of a name if it is on this machine; the network is not asked."""
    weights = find_weights(source, download=False)
    return weights.path if weights is not None and weights.path.is_file() else None


def checked_hash(weights: Weights, name: str) -> str:
    """Return a file's SHA-256; raise an error unless it begins as its name or its cache says."""
    found = sha256_of(weights.path)
    if not found.startswith(weights.sha256):
        raise KsclError(
            f"{name}: {weights.path} is damaged: its SHA-256 must begin with "
            f"{weights.sha256[:16]}, got {found[:16]}. Delete it, and it is fetched again."
        )
    return found


def _of_timm(name: str, download: bool) -> Weights | None:
    model = name.removeprefix(TIMM)
    known = timm.list_models(pretrained=True)  # with their tags
    exists = model in known if "." in model else timm.is_model(model)
    about = timm.get_pretrained_cfg(model) if exists else None
    if about is None or not about.has_weights:
        near = [tagged for tagged in known if tagged.partition(".")[0] == model.partition(".")[0]]
        near = near or difflib.get_close_matches(model, known, NEAREST, cutoff=0.5)
        raise KsclError(
            f"{name}: timm has no weights of this name. The nearest are "
            f"{', '.join(TIMM + tagged for tagged in near[: 2 * NEAREST]) or 'none'}; "
            "timm.list_pretrained() lists all."
        )
    described = Description(
        about.architecture, mean=about.mean, std=about.std, size=about.input_size[-1]
    )
    if not about.hf_hub_id:
        return _by_torch_hub(name, about.url, described, download)
    files = [about.hf_hub_filename] if about.hf_hub_filename else WEIGHTS_FILES
    return _by_hub(name, about.hf_hub_id, files, described, download)


def _of_hub(name: str, download: bool) -> Weights | None:
    repository = name.removeprefix(HUB)
    if not REPOSITORY.fullmatch(repository):
        raise KsclError(f"{name}: Write {HUB}OWNER/NAME, or {HUB}OWNER/NAME@COMMIT.")
    config = _by_hub(name, repository, ("config.json",), None, download)
    if config is None:
        return None
    try:
        content = json.loads(config.path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise KsclError(f"{name}: {config.path} is not JSON ({error}). Delete it.") from error
    if not isinstance(content, dict) or "architecture" not in content:
        raise KsclError(
            f"{name} is not a timm model: its config.json names no 'architecture'. Download its "
            "file of weights, and give that file's path and the timm model it fits (BACKBONE.NAME, "
            "--arch)."
        )
    described = check_description(_as_description(content), f"{name} (config.json)")
    return _by_hub(name, repository, WEIGHTS_FILES, described, download)


def _as_description(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return timm's config of a model on the hub in the fields of ours; they are not checked."""
    about = config.get("pretrained_cfg", config)
    default = Description(str(config["architecture"]).partition(".")[0])
    get = about.get if isinstance(about, dict) else {}.get
    size = get("input_size", [default.size])
    kwargs = config.get("model_args") or {}
    if isinstance(kwargs, dict):  # the network is always built without its classifier
        kwargs = {key: value for key, value in kwargs.items() if key != "num_classes"}
    return {
        "version": DESCRIPTION_VERSION,
        "arch": default.arch,
        "kwargs": kwargs,
        "mean": get("mean", default.mean),
        "std": get("std", default.std),
        "size": size[-1] if isinstance(size, list) and size else size,
        "source": {},
    }


def _of_torchvision(name: str, download: bool) -> Weights | None:
    models = {name: torchvision.models.get_model_weights(name) for name in _torchvision_models()}
    known = {str(member): (name, member) for name, kind in models.items() for member in kind}
    wanted = name.removeprefix(TORCHVISION)
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, NEAREST, cutoff=0.5)
        raise KsclError(
            f"{name}: torchvision has no weights of this name for images. The nearest are "
            f"{', '.join(TORCHVISION + member for member in near) or 'none'}."
        )
    model, member = known[wanted]
    if not timm.is_model(model):
        raise KsclError(
            f"{name} are weights of torchvision's {model}, and timm has no network of this name. "
            "Choose weights of a network that both have, such as ResNets."
        )
    preset = member.transforms()
    described = Description(
        model, mean=tuple(preset.mean), std=tuple(preset.std), size=preset.crop_size[0]
    )
    return _by_torch_hub(name, member.url, described, download)


def _torchvision_models() -> list[str]:
    return torchvision.models.list_models(module=torchvision.models)


# The clients


def _by_hub(
    name: str, repository: str, files: Sequence[str], about: Description | None, download: bool
) -> Weights | None:
    """Return the first of these files that a repository of the hub has."""
    repo_id, _, revision = repository.partition("@")
    where: dict[str, Any] = {"repo_id": repo_id, "revision": revision or None}
    for file in files:
        cached = huggingface_hub.try_to_load_from_cache(filename=file, **where)
        if isinstance(cached, str):
            path = Path(cached)
            message = _changed(name, repo_id, revision, path) if download else ""
            return Weights(path, about, _blob_hash(path), message)
    if not download:
        return None
    kept = Path(constants.HF_HUB_CACHE, f"models--{repo_id.replace('/', '--')}")
    bring = (
        f"run `hf download {repo_id}{f' --revision {revision}' if revision else ''}` where there "
        f"is a network and copy the folder {kept} here"
    )
    tried = f"{constants.ENDPOINT}/{repo_id}"
    _check_online(name, tried, bring=bring, target=str(kept))
    for file in files:
        address = huggingface_hub.hf_hub_url(filename=file, **where)
        try:
            # Fails at once; the download itself would try again for half a minute.
            huggingface_hub.get_hf_file_metadata(address, timeout=HUB_SECONDS)
            log.info("Fetching %s to %s.", address, kept)
            path = Path(huggingface_hub.hf_hub_download(filename=file, **where))
            return Weights(path, about, _blob_hash(path))
        except LocalEntryNotFoundError as error:  # the connection was lost in between
            raise _not_fetched(name, tried, str(kept), error, bring) from error
        except EntryNotFoundError:
            continue
        except Exception as error:  # every version of the client has its own
            raise _not_fetched(name, tried, str(kept), error, bring) from error
    raise KsclError(
        f"{name}: {tried} has no file {' or '.join(files)}. Download the file that it has, and "
        "give its path."
    )


@functools.cache  # one question per process
def _changed(name: str, repo_id: str, revision: str, path: Path) -> str:
    """Return a sentence if the hub has another file under this name than the cached one."""
    blob, commit = path.resolve(), path.parent.name
    if constants.HF_HUB_OFFLINE or COMMIT.fullmatch(revision) or blob.parent.name != "blobs":
        return ""
    try:
        address = huggingface_hub.hf_hub_url(repo_id, path.name, revision=revision or None)
        now = huggingface_hub.get_hf_file_metadata(address, timeout=HUB_SECONDS)
    except Exception:  # no network: the cached file is what there is
        return ""
    if now.etag in (None, blob.name):
        return ""
    return (
        f"{name} has changed on the hub: {path.name} is {str(now.etag)[:12]}… there (commit "
        f"{now.commit_hash}) and {blob.name[:12]}… in the cache (commit {commit}). The cached one "
        f"is used; {HUB}{repo_id}@{now.commit_hash} names the new one."
    )


def _blob_hash(path: Path) -> str:
    """Return the SHA-256 by which the hub's cache names a large file."""
    blob = path.resolve().name
    return blob if SHA256.fullmatch(blob) else ""


def _by_torch_hub(name: str, url: str, about: Description, download: bool) -> Weights | None:
    target = Path(torch.hub.get_dir(), "checkpoints", Path(urlparse(url).path).name)
    known = _hash_in(url)
    if not target.is_file():
        if not download:
            return None
        _check_online(name, url, str(target))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(str(target)):  # ranks ask at the same time
                if not target.is_file():
                    log.info("Fetching %s to %s.", url, target)
                    torch.hub.download_url_to_file(url, str(target), known or None, progress=False)
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: another hash
            raise _not_fetched(name, url, str(target), error) from error
    return Weights(target, about, known)


def _hash_in(address: str) -> str:
    """Return the beginning of the SHA-256 in a file's name, as torch.hub writes it."""
    found = HASH_IN_NAME.search(urlparse(address).path.rpartition("/")[2])
    return found[1] if found else ""


def _check_online(name: str, tried: str, target: str, bring: str = "") -> None:
    if constants.HF_HUB_OFFLINE:
        raise _not_fetched(name, tried, target, "HF_HUB_OFFLINE is set", bring)


def _not_fetched(name: str, tried: str, target: str, reason: object, bring: str = "") -> KsclError:
    first = printable(str(reason).strip().split("\n")[0])[:200]
    why = f"{type(reason).__name__}: {first}" if isinstance(reason, Exception) else first
    return KsclError(
        f"{name} is not cached and cannot be fetched from {tried} ({why}). It would be kept as "
        f"{target}. Check the name and the connection; or "
        f"{bring or f'download {tried} elsewhere and copy it to that path'}; or give a file's path."
    )
