"""Find what would stop an evaluation before it starts, e.g. training images in val."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from kscl.cli import is_later
from kscl.data.annotations import Problem, is_set_name, parse_source, read_source
from kscl.data.bad_images import find_unreadable
from kscl.data.formats import DECODED_SAMPLE
from kscl.data.open import open_source, open_voc_split
from kscl.data.source import equal_files
from kscl.engine.cost import (
    IMAGENET_IMAGES,
    IMAGENET_VAL,
    Gpu,
    Needs,
    costs_of,
    forward_seconds,
    largest_output,
)
from kscl.errors import KsclError
from kscl.methods.encoder import build_backbone, feature_dim
from kscl.methods.keys import FLOAT_BYTES
from kscl.runtime.logs import LOGGER
from linear_eval.backbone import load
from linear_eval.images import LabeledImages
from linear_eval.probe import probe_of

WEIGHTS_KEY = "BACKBONE.WEIGHTS"
MOST_COMPARED = 200_000  # images of both sets; for larger sets only folders and paths are compared
ALLOWED = 0.01  # fraction of the second set: public sets contain a few duplicates

log = logging.getLogger(LOGGER)


def find_problems(cfg: CfgNode, later: Sequence[str], allow_overlap: bool) -> Iterator[Problem]:
    """Yield the problems of data and weights; nothing is written."""
    probe = probe_of(cfg)
    trained_on = [next(iter(group.values())) for group in probe.sources()]
    if not any(is_later(where, later) for where in trained_on):
        try:
            if not allow_overlap:
                refuse_overlap(cfg)
            data = probe.open_data()
            for images in data.values():
                yield from _unreadable(images, 2 * DECODED_SAMPLE // len(data))
        except KsclError as error:
            yield Problem("data", probe.data_keys, str(error), "")
    if not is_later(WEIGHTS_KEY, later) and not is_later(cfg.BACKBONE.WEIGHTS, later):
        try:
            load(cfg)
        except KsclError as error:
            yield Problem("weights", WEIGHTS_KEY, str(error), "")


def probe_needs(cfg: CfgNode, gpu: Gpu, count: int, arch: str, kwargs: Mapping[str, Any]) -> Needs:
    """Return what a probe takes on these GPUs; images that are not there are ImageNet's."""
    probe, network = probe_of(cfg), build_backbone(arch, kwargs)
    try:
        sizes = {role: len(images) for role, images in probe.open_data().items()}
        val = sum(size for role, size in sizes.items() if role.endswith(("val", "test")))
        train = sum(sizes.values()) - val
    except KsclError:
        train, val = IMAGENET_IMAGES, IMAGENET_VAL
    seen, stored = probe.seen_and_stored(train, val)
    costs, batch = costs_of(network, cfg.INPUT.SIZE), math.ceil(cfg.SOLVER.BATCH_SIZE / count)
    hours = forward_seconds(seen, costs, gpu, count, probe.trains_backbone) / 3600
    weights = costs.parameters * FLOAT_BYTES
    if probe.trains_backbone:  # with gradients and momentum
        memory = 3 * weights + batch * costs.activation_bytes
    else:  # a layer's input and output
        memory = weights + batch * 2 * largest_output(network, cfg.INPUT.SIZE)
    disk = stored * feature_dim(network, cfg.INPUT.SIZE) * FLOAT_BYTES
    return Needs(hours, memory / 2**30, disk / 1e9)


def _unreadable(images: LabeledImages, most: int) -> Iterator[Problem]:
    """Decode a set, or a fixed sample of a large one; report what cannot be read."""
    source, numbers = images.source, images.numbers.tolist()
    num_decoded, reasons, notes = find_unreadable(source, numbers, most, images.max_pixels)
    yield from notes
    if reasons:
        number, reason = next(iter(reasons.items()))
        what = (
            f"{len(reasons)} of the {num_decoded:,} images that were decoded cannot be read, e.g. "
            f"{source.name(number)} ({reason})"
        )
        fix = "A score counts every image, so none is skipped: fix or remove them"
        yield Problem("unreadable image", source.where, what, fix)


def refuse_overlap(cfg: CfgNode) -> None:
    """Raise an error if two sets that must be disjoint share files or equal images."""
    probe = probe_of(cfg)
    paths_of = functools.cache(lambda where: _paths(where, cfg.DATA.CACHE_DIR, probe.voc_lists))
    for group in probe.sources():
        named = [(key, where) for key, where in group.items() if where]
        for (train_key, train), (val_key, val) in itertools.combinations(named, 2):
            if os.path.isdir(train) and os.path.isdir(val):
                first, second = Path(train).resolve(), Path(val).resolve()
                if first == second or first in second.parents or second in first.parents:
                    raise _refused(f"{val_key} {val} and {train_key} {train} overlap")
            _compare(train_key, paths_of(train), val_key, paths_of(val))


def _paths(where: str, cache_dir: str, voc_lists: str) -> list[str]:
    """Return the files of a set; none if it cannot be opened, which is reported elsewhere."""
    if os.path.isdir(where):
        source = open_source(where, cache_dir)
        if len(source) > MOST_COMPARED:
            return []
    elif is_set_name(where):
        try:
            named = parse_source(where)
            if named.format != "voc":
                return [str(image.path) for image in read_source(named).images if image.path]
            source = open_voc_split(f"voc:{named.root}:{named.split}", voc_lists)
        except KsclError:
            return []
    else:
        return []
    return [source.name(index) for index in range(len(source))]


def _compare(train_key: str, train: list[str], val_key: str, val: list[str]) -> None:
    if len(train) + len(val) > MOST_COMPARED:
        known = set(train)
        shared = [(path, path) for path in val if path in known]
    else:
        files = [[Path(path) for path in paths if os.path.isfile(path)] for paths in (train, val)]
        shared = [(str(same), str(path)) for same, path in equal_files(*files)]
    if shared:
        same, path = shared[0]
        what = f"{len(shared)} of the {len(val)} images of {val_key} are in {train_key} too, e.g. "
        what += f"{path} ({same})"
        if len(shared) > ALLOWED * len(val):
            raise _refused(what)
        log.warning("%s.", what)


def _refused(what: str) -> KsclError:
    return KsclError(
        f"{what}: a score on training images is meaningless. Separate them, or run kscl probe "
        "--allow-overlap (suites do not have this option)."
    )
