"""Find a backbone's tensors in a checkpoint: every complete copy of it, and which one is meant.

The whole network must be there, by name and shape. Of two different copies one is taken only if the
layout's project says which, or the user does; the rest of the file is listed by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kscl.backbone_file.detectron2 import (
    BGR,
    COUNTER,
    RGB,
    State,
    Trunk,
    find_trunk,
    layout_of,
    unwrapped,
)
from kscl.backbone_file.layouts import HEADS, LAYOUTS, Container, Input, Layout
from kscl.backbone_file.read import some, without_escapes
from kscl.errors import KsclError

GIVEN = "as given"  # the layout of a place that the user names and the table does not know
IN_CONFIG = "(BACKBONE.CONTAINER and BACKBONE.PREFIX in a config)"
DEEPEST = 6  # dicts in dicts
RESNET_CHILDREN = ("conv1", "bn1", "act1", "maxpool", "layer1", "layer2", "layer3", "layer4")


class NotFound(KsclError):
    """A file without the whole network."""


@dataclass(frozen=True)
class Found:
    """A backbone's tensors by timm's names, and what there is to say about them."""

    layout: str  # a name in LAYOUTS, GIVEN, or Detectron2's with the file's channels
    tensors: State
    left_behind: tuple[str, ...]
    input: Input
    message: str  # which of several networks was taken; "" if there is only one
    has_stride: bool = False  # a file of Detectron2 with bottleneck blocks
    stride_in_1x1: bool | None = None  # of these blocks; None: not known


@dataclass(frozen=True, eq=False)
class Place:
    """One copy of the network, whole or in part."""

    container: Container
    tensors: State  # all of the container
    prefix: str  # without wrappers
    sequence: bool
    names: dict[str, str]  # timm's name: the file's, inside the container
    missing: tuple[str, ...] = ()

    @property
    def unused(self) -> list[str]:
        """Return the names in the container that are not part of the network."""
        used = set(self.names.values())
        return [key for key in self.tensors if key not in used]

    @property
    def literal_prefix(self) -> str:
        """Return the network's prefix in the file, wrappers included."""
        name, theirs = next(iter(self.names.items()))
        inner = len(_in_sequence(name) if self.sequence else name)
        return theirs[: len(theirs) - inner]

    @property
    def flags(self) -> str:
        """Return the options that choose this copy."""
        container = f"--container {'.'.join(self.container)} " if self.container else ""
        return without_escapes(f"{container}--prefix '{self.literal_prefix}'")

    def misfits(self, wanted: State) -> list[str]:
        """Return every tensor whose shape is not that of the network, with both shapes."""
        return [
            f"{key} is {tuple(self.tensors[theirs].shape)} and should be {tuple(wanted[key].shape)}"
            for key, theirs in self.names.items()
            if self.tensors[theirs].shape != wanted[key].shape
        ]

    def equals(self, other: Place) -> bool:
        """Return whether both copies have the same values."""
        return all(
            torch.equal(self.tensors[name], other.tensors[other.names[key]])
            for key, name in self.names.items()
            if key in other.names
        )

    def layouts(self, wanted: State) -> dict[str, Layout]:
        """Return every layout in the table that explains all of the container's tensors."""
        rest = [unwrapped(key) for key in self.unused]
        return {
            name: layout
            for name, layout in LAYOUTS.items()
            if (layout.prefix, layout.sequence) == (self.prefix, self.sequence)
            and self.container in (layout.container, ())
            and all(key.startswith(layout.leave_behind) for key in rest)
            and (not layout.marks or any(key.startswith(layout.marks) for key in rest))
            and not (set(rest) & {layout.prefix + key for key in wanted})
        }


def find_tensors(
    content: Mapping[str, Any],
    backbone: nn.Module,
    name: str,
    container: str | None = None,
    prefix: str | None = None,
    channels: str | None = None,
) -> Found:
    """Return the backbone's tensors in a file's content; `name` is the file, for errors.

    `container` (keys joined by dots) and `prefix` (wrappers included) choose the copy to take, and
    name layouts that are not in the table. `channels`, RGB or BGR, is for files in Detectron2's
    layout; the tensors returned are always for RGB.
    """
    wanted = backbone.state_dict()
    everywhere = dict(_tensor_dicts(content))
    dicts = everywhere if container is None else _only(everywhere, container, name)
    if prefix is None and (trunk := find_trunk(content, dicts, name)):
        return _found_in_detectron2(trunk, everywhere, wanted, name, channels)
    if channels is not None:
        raise KsclError(
            f"{name} holds no ResNet in Detectron2's layout (stem.conv1.weight, res2.0.…), which "
            "--channels is for."
        )
    places = [place for where in dicts.items() for place in _places(*where, backbone, wanted)]
    if prefix is not None:
        places = [place for place in places if place.literal_prefix == prefix]
    whole = [place for place in places if not place.missing]
    if not whole:
        raise _not_found(places, dicts, name, prefix)
    fitting = [place for place in whole if not place.misfits(wanted)] or whole
    place, is_one_of_several = _choose(fitting, wanted, name, chosen=prefix is not None)
    layouts = place.layouts(wanted)
    known = next(iter(layouts), None)
    if known is None:
        _check_stranger(place, wanted, name, chosen=container is not None or prefix is not None)
    inputs: set[Input] = {layout.input for layout in layouts.values()}
    if len(inputs) > 1:
        inputs = {f"files of {' and '.join(layouts)} look like this"}
    return Found(
        layout=known or GIVEN,
        tensors=_checked_tensors(place, wanted, name),
        left_behind=_left_behind(place, everywhere),
        input=inputs.pop() if inputs else "this layout is not in the table",
        message=f"Took {LAYOUTS[known].takes}." if known and is_one_of_several else "",
    )


def _tensor_dicts(content: Mapping[str, Any]) -> Iterator[tuple[Container, State]]:
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


def _only(dicts: dict[Container, State], container: str, name: str) -> dict[Container, State]:
    for where, tensors in dicts.items():
        if ".".join(where) == container:
            return {where: tensors}
    known = [".".join(where) or "''" for where in dicts]
    raise KsclError(
        f"{name}: there are no tensors at --container '{container}'. It has tensors at "
        f"{some(known, 12) or 'no place'}."
    )


def _places(
    where: Container, tensors: State, backbone: nn.Module, wanted: State
) -> Iterator[Place]:
    """Yield the copies of the network in a dict of tensors, incomplete ones included."""
    bare = {key: key for key in tensors if unwrapped(key) == key}
    for key in tensors:
        if key not in bare:  # names that differ only by a wrapper belong to two networks
            bare[key if unwrapped(key) in bare else unwrapped(key)] = key
    children = tuple(name for name, _ in backbone.named_children())
    is_resnet = children[: len(RESNET_CHILDREN)] == RESNET_CHILDREN
    for sequence in (False, True) if is_resnet else (False,):
        ours = {_in_sequence(key) if sequence else key: key for key in wanted}
        counts: Counter[str] = Counter()
        for name in bare:
            parts = name.split(".")
            for start in range(len(parts)):
                inner = ".".join(parts[start:])
                if inner in ours and not inner.endswith(COUNTER):
                    counts[name[: len(name) - len(inner)]] += 1
        for prefix, count in counts.items():
            names = {our: bare[prefix + key] for key, our in ours.items() if prefix + key in bare}
            missing = _missing(names, wanted)
            if not missing or count > 1:
                yield Place(where, tensors, prefix, sequence, names, missing)


def _missing(names: Mapping[str, str], wanted: State) -> tuple[str, ...]:
    # Files from before PyTorch 0.4.1 have no counters; nothing is computed from them.
    return tuple(key for key in wanted if key not in names and not key.endswith(COUNTER))


def _in_sequence(name: str) -> str:
    """Return the name of a ResNet's tensor in nn.Sequential(*resnet.children())."""
    child, _, rest = name.partition(".")
    return f"{RESNET_CHILDREN.index(child)}.{rest}" if child in RESNET_CHILDREN else name


def _choose(places: list[Place], wanted: State, name: str, chosen: bool) -> tuple[Place, bool]:
    """Return the copy to take and whether there are others; ask if that is not settled."""
    copies: list[list[Place]] = []  # equal ones together: some files hold one under two names
    for place in places:
        group = next((group for group in copies if group[0].equals(place)), None)
        if group is None:
            copies.append([place])
        else:
            group.append(place)
    known = [next((p for p in group if p.layouts(wanted)), group[0]) for group in copies]
    if len(copies) == 1:
        return known[0], False
    for place in known if not chosen else ():
        layout = next(iter(place.layouts(wanted).values()), None)
        others = [group for group in copies if place not in group]
        if layout and all(any(_yields(layout, place, p) for p in group) for group in others):
            return place, True
    options = "".join(f"\n  {place.flags}" for place in known)
    raise KsclError(
        f"{name} holds this network {len(copies)} times, with different weights: choose one with"
        f"{options}\n{IN_CONFIG}."
    )


def _yields(layout: Layout, taken: Place, other: Place) -> bool:
    """Return whether the layout says that `other` is not the one to take."""
    flat = taken.container == ()
    return any(
        (() if flat else container) == other.container and prefix == other.prefix
        for container, prefix in layout.instead_of
    )


def _not_found(
    places: list[Place], dicts: dict[Container, State], name: str, prefix: str | None
) -> NotFound:
    """Return the error for a file without a whole copy; it lists the nearest ones."""
    near = sorted(places, key=lambda place: len(place.missing))[:3]
    reasons = "".join(f"\n  at {place.flags}: {some(place.missing)} missing" for place in near)
    where = "" if prefix is None else without_escapes(f" at --prefix '{prefix}'")
    found: dict[str, None] = {}
    for container, tensors in dicts.items():
        inside = f"[{'.'.join(container)}] " if container else ""
        for key in tensors:
            parts = key.split(".")
            found[inside + ".".join(parts[: min(2, len(parts) - 1)])] = None
    return NotFound(
        f"{name} does not hold this network{where}. Name another network, or its place with "
        f"--container KEY --prefix PREFIX {IN_CONFIG}.{reasons}\n"
        f"  prefixes in it: {some(list(found), 12) or 'no tensors'}\n"
        f"  layouts known: {'; '.join(LAYOUTS)}"
    )


def _check_stranger(place: Place, wanted: State, name: str, chosen: bool) -> None:
    """Raise an error unless the user chose this place and the network has no further parts."""
    literal = place.literal_prefix
    inside = {(_in_sequence(key) if place.sequence else key).split(".")[0] for key in wanted}
    rest = place.unused
    strange = [
        key
        for key in rest
        if key.startswith(literal)
        and not (inner := key[len(literal) :]).startswith(HEADS)
        and inner.split(".")[0] in inside
    ]
    if strange:
        raise KsclError(
            f"{name} holds a network with more parts than this one: {some(strange)} would be left "
            "over. Name the right network (BACKBONE.NAME, --arch)."
        )
    if not chosen:
        near = [  # what the layout that explains most of the names does not explain
            [key for key in rest if not unwrapped(key).startswith(layout.leave_behind or ("\0",))]
            for layout in LAYOUTS.values()
            if layout.prefix == place.prefix and place.container in (layout.container, ())
        ]
        unexplained = min(near, key=len, default=rest) or rest
        over = f" ({some(unexplained)} would be left over)" if rest else ""
        raise KsclError(
            f"{name} holds this network in an unknown layout{over}. To take it from there, say "
            f"{place.flags} {IN_CONFIG}."
        )


def _checked_tensors(place: Place, wanted: State, name: str) -> State:
    """Return the tensors by timm's names; other shapes or kinds of numbers are an error."""
    if wrong := place.misfits(wanted):
        raise KsclError(
            f"{name} holds a network of another size: {some(wrong)}. Name its arguments "
            "(BACKBONE.KWARGS, --arch-kwargs)."
        )
    cut = [
        f"{key} is {place.tensors[theirs].dtype}"
        for key, theirs in place.names.items()
        if place.tensors[theirs].is_floating_point() != wanted[key].is_floating_point()
        or place.tensors[theirs].is_complex()
    ]
    if cut:
        raise KsclError(
            f"{name}: weights must be real floating point numbers: {some(cut)}. Save them as such."
        )
    return wanted | {key: place.tensors[theirs] for key, theirs in place.names.items()}


def _left_behind(place: Place, dicts: dict[Container, State]) -> tuple[str, ...]:
    """Return the names left in the dict, and how many tensors the rest of the file has."""
    elsewhere: Counter[str] = Counter()
    for where, tensors in dicts.items():
        if where != place.container:
            top = ".".join(where[: len(place.container) or 1])
            elsewhere[without_escapes(top) or "top level"] += len(tensors)
    return (*place.unused, *(f"[{top}] ({count} tensors)" for top, count in elsewhere.items()))


def _found_in_detectron2(
    trunk: Trunk, dicts: dict[Container, State], wanted: State, name: str, channels: str | None
) -> Found:
    known, author = trunk.convention, trunk.author or "unknown"
    channels = channels or (known.channels if known else None)
    if channels not in (RGB, BGR):
        raise KsclError(
            f"{name} is in Detectron2's layout ({trunk.kind}), by {author}: its tensors do not "
            "show the channel order, the stride or the input. Give --channels RGB or BGR, "
            "--arch-kwargs '{stride_in_1x1: false}' or true (MODEL.RESNETS.STRIDE_IN_1X1 of its "
            "config), --mean R G B and --std R G B (PIXEL_MEAN and PIXEL_STD in RGB / 255)."
        )
    names = {ours: theirs for ours, theirs in trunk.names.items() if ours in wanted}
    strange = [theirs for ours, theirs in trunk.names.items() if ours not in wanted]
    for keys, what in ((_missing(names, wanted), "it lacks"), (strange, "it also has")):
        if keys:
            raise KsclError(
                f"{name} does not hold this network: {what} {some(keys)}. Name the right one "
                "(BACKBONE.NAME, --arch)."
            )
    place = Place(trunk.container, dicts[trunk.container], "", sequence=False, names=names)
    found = _checked_tensors(place, wanted, name)
    if channels == BGR:  # the first convolution's inputs
        found["conv1.weight"] = found["conv1.weight"].flip(1)
    flipped = "; its first convolution is turned to RGB" if channels == BGR else ""
    return Found(
        layout=layout_of(trunk.kind, channels),
        tensors=found,
        left_behind=_left_behind(place, dicts),
        input=known.input if known else "Detectron2's files do not contain it",
        message=f"Read as Detectron2's layout by {author}, {channels}{flipped}.",
        has_stride="layer1.0.conv3.weight" in wanted,
        stride_in_1x1=known.stride_in_1x1 if known else None,
    )
