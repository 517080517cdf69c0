"""Images that cannot be read: name each once, count all, stop the run if there are too many."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kscl.data.annotations import Problem
from kscl.data.formats import MAX_PIXELS, UnreadableImage, decode
from kscl.data.source import ImageSource, in_threads, read_picture
from kscl.errors import KsclError
from kscl.rng import Stream, permutation, random_words

logger = logging.getLogger(__name__)

# So many replacements in a row fail only when the storage itself is gone.
MOST_REPLACEMENTS = 100
MOST_PROBES = 1000

# Digests of files that could be decoded, with the pixels that were allowed. A suite checks many
# stages in one process, and most of them train on the same images.
_decodable: set[tuple[bytes, int]] = set()


def replacement(seed: int, epoch: int, index: int, attempt: int, num_images: int) -> int:
    """Return the image shown instead of an unreadable one: the same in every run."""
    return int(
        random_words(seed, epoch, Stream.REPLACEMENT, index, attempt + 1)[attempt] % num_images
    )


class BadImages:
    """A run's images that could not be listed or read, counted where the batches arrive."""

    def __init__(self, source: ImageSource, policy: str, max_fraction: float) -> None:
        self.source = source
        self.policy = policy  # skip or error
        self.max_fraction = max_fraction
        self.reasons: dict[int, str] = {}  # by index of the image
        self.num_lost = sum(lost.num_images for lost in source.lost)
        if source.lost and policy == "error":
            self._refuse(source.lost[0].name, source.lost[0].reason)
        self._check_fraction()

    @property
    def count(self) -> int:
        """Number of images that were lost or could not be read."""
        return self.num_lost + len(self.reasons)

    def names(self) -> list[str]:
        """Return the paths of the images that could not be read."""
        return [self.source.name(index) for index in sorted(self.reasons)]

    def note(self, found: Iterable[tuple[int, str]], again: bool = False) -> None:
        """Count bad images; raise KsclError if there are too many.

        Those of a run before it was resumed are counted `again`, and not logged.
        """
        for index, reason in found:
            if index in self.reasons:
                continue
            self.reasons[index] = reason
            name = self.source.name(index)
            if self.policy == "error":
                self._refuse(name, reason)
            if not again:
                logger.warning("%s cannot be read and is skipped: %s.", name, reason)
        self._check_fraction()

    def _refuse(self, name: str, reason: str) -> None:
        raise KsclError(
            f"{name} cannot be read: {reason}. Fix or remove it, or set DATA.BAD_IMAGES to skip."
        )

    def would_stop(self, num_bad: int, num_decoded: int) -> bool:
        """Return whether a run would stop, going by a sample of decoded images."""
        expected = self.num_lost + num_bad * len(self.source) / num_decoded
        return (num_bad > 0 and self.policy == "error") or expected > self._most

    @property
    def _most(self) -> float:
        return self.max_fraction * (len(self.source) + self.num_lost)

    def _check_fraction(self) -> None:
        if self.count <= self._most:
            return
        if self.source.lost:
            name, reason, _ = self.source.lost[0]
        else:
            index = min(self.reasons)  # the same on all ranks
            name, reason = self.source.name(index), self.reasons[index]
        raise KsclError(
            f"{self.count} of the {len(self.source) + self.num_lost} images of "
            f"{self.source.where} cannot be read, more than DATA.MAX_BAD_FRACTION = "
            f"{self.max_fraction:g} allows. The first is {name} ({reason}). Raise "
            "DATA.MAX_BAD_FRACTION, and --auto-resume continues; or fix or remove them, and start "
            "a new run."
        )


def check_some_image_reads(source: ImageSource, seed: int, max_pixels: int) -> None:
    """Raise KsclError if none of a sample of the images can be read."""
    failures: list[str] = []
    for index in permutation(seed, 0, Stream.PROBE, len(source))[:MOST_PROBES].tolist():
        try:
            read_picture(source, index, max_pixels)
            return
        except UnreadableImage as error:
            failures.append(f"{source.name(index)} ({error})")
    raise KsclError(
        f"No image of {source.where} can be read: {len(failures)} of {len(source)} were tried. "
        f"The first is {failures[0]}. Check the files, or name another folder."
    )


class Findings(NamedTuple):
    """The result of decoding some images."""

    num_decoded: int
    reasons: dict[int, str]  # of each image that cannot be read, by index
    notes: list[Problem]  # that only a sample was decoded


def find_unreadable(
    source: ImageSource, indices: Sequence[int], most: int, max_pixels: int = MAX_PIXELS
) -> Findings:
    """Decode these images of a source, or a fixed sample if there are more than `most`."""
    notes = []
    if len(indices) > most:
        what = f"a sample of {most:,} of the {len(indices):,} images was decoded"
        notes = [Problem("sample", source.where, what, "", fatal=False)]
        indices = random.Random(0).sample(indices, most)
    found = in_threads(lambda index: _reason(source, index, max_pixels), indices)
    reasons = {index: why for index, why in zip(indices, found, strict=True) if why}
    return Findings(len(indices), reasons, notes)


def _reason(source: ImageSource, index: int, max_pixels: int) -> str:
    """Return why an image cannot be read, or nothing."""
    try:
        data = source.read(index)
        known = (hashlib.blake2b(data, digest_size=16).digest(), max_pixels)
        if known not in _decodable:
            decode(data, max_pixels)
            _decodable.add(known)
    except OSError as error:
        return error.strerror or str(error)
    except UnreadableImage as error:
        return str(error)
    return ""
