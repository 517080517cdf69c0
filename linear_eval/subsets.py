"""Parts of the training images: a published list, a list of your own, or a fraction."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fvcore.common.config import CfgNode

from kscl.data.source import cache_folder, read_file
from kscl.errors import KsclError
from kscl.runtime.distributed import on_first_rank
from kscl.runtime.files import write_atomically
from linear_eval.images import LabeledImages, fraction_of_each_class

SECONDS = 60  # to wait for the server
REPOSITORY = "https://raw.githubusercontent.com/google-research/simclr"
COMMIT = "383d4143fd8cf7879ae10f1046a9baeb753ff438"


@dataclass(frozen=True)
class Published:
    """A list of ImageNet's training images that SimCLR's authors published."""

    file: str
    lines: int
    sha256: str

    @property
    def address(self) -> str:
        """Return where it is published."""
        return f"{REPOSITORY}/{COMMIT}/imagenet_subsets/{self.file}"


PUBLISHED = {
    "simclr_1percent": Published(
        "1percent.txt", 12_811, "71e82a48ba78252683ae334c4d019ebd5c6e855b9599c1389fbe83eb9549cf17"
    ),
    "simclr_10percent": Published(
        "10percent.txt", 128_116, "6d09de11e7bdaf5b1f3b1f249b6183695f97310cdd20f0c03e7235b6b9392091"
    ),
}


def take_subset(images: LabeledImages, cfg: CfgNode) -> LabeledImages:
    """Return the training images that DATA.SUBSET and DATA.FRACTION leave."""
    chosen = np.arange(len(images))
    if cfg.DATA.SUBSET:
        content = on_first_rank(lambda: list_content(cfg.DATA.SUBSET, cfg.DATA.CACHE_DIR))
        chosen = _listed(images, content, cfg.DATA.SUBSET)
    elif cfg.DATA.FRACTION < 1:
        chosen = fraction_of_each_class(images.labels, cfg.DATA.FRACTION, cfg.SEED)
    return images.part(chosen)


def list_content(subset: str, cache_dir: str) -> bytes:
    """Return the list's bytes: of a file, or of a published list, fetched once and checked."""
    published = PUBLISHED.get(subset)
    if published is None:
        return _read(Path(subset), f"DATA.SUBSET names no file and none of {', '.join(PUBLISHED)}")
    path = cache_folder(cache_dir) / "subsets" / published.file
    if not path.exists():
        _download(published, path)
    content = _read(path, "The list cannot be read")
    _check(content, published, str(path))
    return content


def subset_hash(subset: str, cache_dir: str) -> str:
    """Return what stands for a list in a protocol."""
    published = PUBLISHED.get(subset)
    return published.sha256 if published else _digest(list_content(subset, cache_dir))


def _read(path: Path, problem: str) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise KsclError(f"{problem}: {path}: {error.strerror}. Check the path.") from error


def _download(published: Published, path: Path) -> None:
    try:
        with urllib.request.urlopen(published.address, timeout=SECONDS) as source:
            content = source.read()
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise KsclError(
            f"{published.address} could not be downloaded: {error}. Fetch it some other way and "
            f"put it there as {path}."
        ) from error
    _check(content, published, published.address)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise KsclError(
            f"{path} cannot be written: {error.strerror}. Set DATA.CACHE_DIR to another folder."
        ) from error


def _check(content: bytes, published: Published, where: str) -> None:
    if _digest(content) != published.sha256:
        raise KsclError(
            f"{where} is not SimCLR's {published.file} ({published.lines:,} lines, sha256 "
            f"{published.sha256}): its sha256 is {_digest(content)}. Delete it, and fetch it anew."
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _listed(images: LabeledImages, content: bytes, where: str) -> np.ndarray:
    """Return the images whose file names (or paths below the folder) are in the list."""
    names = content.decode("utf-8", "replace").split()
    root, places = images.source.root, {}
    paths: dict[str, list[str]] = {}  # by name alone
    for place, number in enumerate(images.numbers.tolist()):
        path = os.path.relpath(images.source.name(number), root)
        places[path] = place
        paths.setdefault(os.path.basename(path), []).append(path)
    for name in names:
        if name not in places and len(found := paths.get(name, [])) > 1:
            raise KsclError(
                f"{where} lists {name}, and {images.source.where} has {len(found):,} images of "
                f"this name, {found[0]} and {found[1]} among them. List their paths below the "
                "folder."
            )
    places |= {name: places[found[0]] for name, found in paths.items() if name not in places}
    missing = [name for name in names if name not in places]
    if missing or not names:
        raise KsclError(
            f"{len(missing):,} of the {len(names):,} images that {where} lists are not in "
            f"{images.source.where}"
            + (f", {missing[0]} for one" if missing else "")
            + ". Name the folder that the list is about, or another list (DATA.SUBSET)."
        )
    return np.unique([places[name] for name in names])
