"""Images that cannot be read: each named once, all counted, too many stop the run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from kscl.data.decode import UnreadableImage, decode_image
from kscl.data.source import ImageSource
from kscl.errors import KsclError
from kscl.rng import Stream, permutation, random_words

logger = logging.getLogger(__name__)

POLICIES = ("skip", "error")

# So many replacements in a row fail only when the storage itself is gone.
MOST_REPLACEMENTS = 100
MOST_PROBES = 1000


def replacement(seed: int, epoch: int, index: int, attempt: int, num_images: int) -> int:
    """The image shown instead of an unreadable one: the same at every try, in every run."""
    return int(
        random_words(seed, epoch, Stream.REPLACEMENT, index, attempt + 1)[attempt] % num_images
    )


class BadImages:
    """The run's account of unreadable images, kept where the batches arrive."""

    def __init__(self, source: ImageSource, policy: str, max_share: float) -> None:
        if policy not in POLICIES:
            raise KsclError(f"DATA.BAD_IMAGES must be one of {', '.join(POLICIES)}, not {policy!r}")
        self.source = source
        self.policy = policy
        self.max_share = max_share
        self.reasons: dict[int, str] = {}  # by number of the image

    @property
    def count(self) -> int:
        return len(self.reasons)

    def names(self) -> list[str]:
        return [self.source.name(index) for index in sorted(self.reasons)]

    def note(self, found: Iterable[tuple[int, str]]) -> None:
        """Take in what a batch met; stops the run when the policy or the share says so."""
        for index, reason in found:
            if index in self.reasons:
                continue
            self.reasons[index] = reason
            name = self.source.name(index)
            if self.policy == "error":
                raise KsclError(
                    f"{name} cannot be read: {reason}; mend or remove it, "
                    "or set DATA.BAD_IMAGES to skip"
                )
            logger.warning("%s cannot be read and is skipped: %s", name, reason)
        if self.count > self.max_share * len(self.source):
            raise KsclError(
                f"{self.count} of the {len(self.source)} images of {self.source.where} cannot be "
                f"read, more than DATA.MAX_BAD_FRACTION = {self.max_share:g} allows; "
                f"the first: {self._first()}"
            )

    def _first(self) -> str:
        index = next(iter(self.reasons))
        return f"{self.source.name(index)} ({self.reasons[index]})"


def check_some_image_reads(source: ImageSource, seed: int = 0) -> None:
    """Before training: at least one image of the source must be readable."""
    failures: list[str] = []
    for index in _probes(seed, len(source)):
        try:
            decode_image(source.read(index))
            return
        except (UnreadableImage, OSError) as error:
            failures.append(f"{source.name(index)} ({error})")
    raise KsclError(
        f"no image of {source.where} can be read: {len(failures)} of {len(source)} were tried, "
        f"the first: {failures[0]}"
    )


def _probes(seed: int, count: int) -> Sequence[int]:
    return permutation(seed, 0, Stream.PROBE, count)[:MOST_PROBES].tolist()
