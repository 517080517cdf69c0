"""Places in a checkpoint where a network's tensors stand, by their names alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kscl.backbone_file.layouts import Container
from kscl.backbone_file.unpickle import without_escapes

State = dict[str, Tensor]
COUNTER = "num_batches_tracked"
WRAPPERS = ("module", "_orig_mod")
DEEPEST = 6  # dicts in dicts
RESNET_CHILDREN = ("conv1", "bn1", "act1", "maxpool", "layer1", "layer2", "layer3", "layer4")


@dataclass(frozen=True)
class Place:
    """One copy of the network, whole or in part."""

    container: Container
    prefix: str  # without wrappers
    sequence: bool
    names: dict[str, str]  # timm's name: the file's, inside the container
    missing: tuple[str, ...]

    def flags(self) -> str:
        """Return the options that choose this copy."""
        container = f"--container {'.'.join(self.container)} " if self.container else ""
        return without_escapes(f"{container}--prefix '{self.literal_prefix()}'")

    def literal_prefix(self) -> str:
        """Return what stands before the network's names in the file, wrappers included."""
        name, theirs = next(iter(self.names.items()))
        inner = len(in_sequence(name) if self.sequence else name)
        return theirs[: len(theirs) - inner]


def tensor_dicts(content: Mapping[str, Any]) -> Iterator[tuple[Container, State]]:
    """Yield every dict of the file that holds tensors, with the keys that lead to it."""
    seen: set[int] = set()
    waiting: list[tuple[Container, Mapping[Any, Any]]] = [((), content)]
    while waiting:
        where, node = waiting.pop(0)
        if id(node) in seen or len(where) > DEEPEST:  # a pickle may hold itself
            continue
        seen.add(id(node))
        named = {key: value for key, value in node.items() if isinstance(key, str)}
        tensors = {key: value for key, value in named.items() if isinstance(value, Tensor)}
        if tensors:
            yield where, tensors
        inner = [(key, value) for key, value in named.items() if isinstance(value, dict)]
        waiting += [((*where, key), value) for key, value in inner]


def find_places(
    where: Container, tensors: State, backbone: nn.Module, wanted: State
) -> Iterator[Place]:
    """Yield the copies of the network in a dict of tensors, those with gaps among them."""
    bare = {key: key for key in tensors if unwrapped(key) == key}
    for key in tensors:
        if key not in bare:  # names that differ by a wrapper only are of two networks
            bare[key if unwrapped(key) in bare else unwrapped(key)] = key
    for sequence in (False, True):
        if sequence and not _is_resnet(backbone):
            continue
        ours = {in_sequence(key) if sequence else key: key for key in wanted}
        counts: Counter[str] = Counter()
        for name in bare:
            parts = name.split(".")
            for start in range(len(parts)):
                inner = ".".join(parts[start:])
                if inner in ours and not inner.endswith(COUNTER):
                    counts[name[: len(name) - len(inner)]] += 1
        for prefix, count in counts.items():
            names = {our: bare[prefix + key] for key, our in ours.items() if prefix + key in bare}
            # Files from before PyTorch 0.4.1 have no counters; nothing is computed from them.
            gaps = (our for our in wanted if our not in names and not our.endswith(COUNTER))
            missing = tuple(gaps)
            if not missing or count > 1:
                yield Place(where, prefix, sequence, names, missing)


def _is_resnet(backbone: nn.Module) -> bool:
    """Return whether its layers stand where torchvision's ResNet has them."""
    children = [name for name, _ in backbone.named_children()]
    return tuple(children[: len(RESNET_CHILDREN)]) == RESNET_CHILDREN


def in_sequence(name: str) -> str:
    """Return the name of a ResNet's tensor in nn.Sequential(*resnet.children())."""
    child, _, rest = name.partition(".")
    return f"{RESNET_CHILDREN.index(child)}.{rest}" if child in RESNET_CHILDREN else name


def unwrapped(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)
