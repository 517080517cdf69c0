"""Find a backbone's tensors in a checkpoint: every complete copy of it, and which one is meant.

The whole network must be there, by name and shape. Of two different copies one is taken only if the
layout's project says which, or the user does; the rest of the file is listed by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kscl.backbone_file.detectron2 import BGR, RGB, Trunk, find_trunk, layout_of
from kscl.backbone_file.layouts import LAYOUTS, Color, Container, Layout
from kscl.backbone_file.places import (
    COUNTER,
    Place,
    State,
    find_places,
    tensor_dicts,
    unwrapped,
)
from kscl.backbone_file.refuse import (
    check_stranger,
    check_tensors,
    check_whole,
    misfits,
    some,
    unused,
)
from kscl.backbone_file.unpickle import without_escapes
from kscl.errors import KsclError

GIVEN = "as given"  # the layout of a place that the user names and the table does not know
STRANGER = "this layout is not in the table"


@dataclass(frozen=True)
class Found:
    """A backbone's tensors by timm's names, and what there is to say of them."""

    layout: str  # a name in LAYOUTS, GIVEN, or Detectron2's with the file's channels
    tensors: State
    left_behind: tuple[str, ...]
    input: tuple[Color, Color] | None  # mean and std of the project's input, if they are known
    why_ask: str
    said: str  # which of several networks was taken; "" if there is only one
    stride_in_1x1: bool | None = False  # of its blocks; None: not known


def find_tensors(
    content: Mapping[str, Any],
    backbone: nn.Module,
    name: str,
    container: str | None = None,
    prefix: str | None = None,
    channels: str | None = None,
) -> Found:
    """Return the backbone's tensors in a file's content; `name` is the file, for errors.

    `container` (keys joined by dots) and `prefix` (letter by letter, wrappers included) choose the
    copy to take, and name layouts that are not in the table. `channels`, RGB or BGR, is for files
    in Detectron2's layout; the tensors returned are always for RGB.
    """
    wanted = backbone.state_dict()
    dicts = dict(tensor_dicts(content))
    everywhere = dicts
    if container is not None:
        dicts = _only(dicts, container, name)
    if prefix is None and (trunk := find_trunk(content, dicts, name)):
        return _found_in_detectron2(trunk, everywhere, wanted, name, channels)
    if channels is not None:
        raise KsclError(
            f"{name} is not in Detectron2's layout, which --channels is for: leave it out."
        )
    places = [
        place for where in dicts for place in find_places(where, dicts[where], backbone, wanted)
    ]
    if prefix is not None:
        places = [place for place in places if place.literal_prefix() == prefix]
    whole = [place for place in places if not place.missing]
    check_whole(whole, places, dicts, name, prefix)
    fitting = [p for p in whole if not misfits(p, dicts[p.container], wanted)] or whole
    copies = _distinct(fitting, dicts)
    place, others = _choose(copies, dicts, wanted, name, chosen=prefix is not None)
    layouts = _layouts_of(place, dicts[place.container], wanted)
    known = next(iter(layouts), None)
    if known is None:
        chosen = container is not None or prefix is not None
        check_stranger(place, dicts[place.container], wanted, name, chosen)
    check_tensors(place, dicts[place.container], wanted, name)
    inputs = {layout.input for layout in layouts.values()}
    return Found(
        layout=known or GIVEN,
        tensors=_tensors(place, dicts[place.container], wanted),
        left_behind=_left_behind(place, everywhere),
        input=inputs.pop() if len(inputs) == 1 else None,
        why_ask=_why_ask(layouts),
        said=f"Took {LAYOUTS[known].takes}." if known and others else "",
    )


def _found_in_detectron2(
    trunk: Trunk, dicts: dict[Container, State], wanted: State, name: str, channels: str | None
) -> Found:
    known = trunk.convention
    channels = channels or (known.channels if known else None)
    if channels not in (RGB, BGR):
        raise KsclError(
            f"{name} is in Detectron2's layout ({trunk.kind}), by {trunk.author or 'unknown'}: its "
            "tensors do not tell the channel order, the stride or the input. Say --channels RGB or "
            "BGR, --arch-kwargs '{stride_in_1x1: false}' or true (MODEL.RESNETS.STRIDE_IN_1X1 of "
            "its config), --mean R G B and --std R G B (PIXEL_MEAN and PIXEL_STD in RGB / 255)."
        )
    tensors = dicts[trunk.container]
    names = {ours: theirs for ours, theirs in trunk.names.items() if ours in wanted}
    missing = tuple(key for key in wanted if key not in names and not key.endswith(COUNTER))
    strange = [theirs for ours, theirs in trunk.names.items() if ours not in wanted]
    for keys, what in ((missing, "it lacks"), (strange, "it has, beyond it,")):
        if keys:
            raise KsclError(
                f"{name} does not hold this network: {what} {some(list(keys))}. Name the right one "
                "(BACKBONE.NAME, --arch)."
            )
    place = Place(trunk.container, "", sequence=False, names=names, missing=())
    check_tensors(place, tensors, wanted, name)
    found = _tensors(place, tensors, wanted)
    if channels == BGR:  # the first convolution's inputs
        found["conv1.weight"] = found["conv1.weight"].flip(1)
    bottlenecks = "layer1.0.conv3.weight" in wanted
    stride = (known.stride_in_1x1 if known else None) if bottlenecks else False
    said = f"Read as Detectron2's layout by {trunk.author or 'unknown'}, {channels}"
    return Found(
        layout=layout_of(trunk.kind, channels),
        tensors=found,
        left_behind=_left_behind(place, dicts),
        input=known.input if known else None,
        why_ask="Detectron2's files do not tell it",
        said=f"{said}{': its first convolution is turned to RGB' if channels == BGR else ''}.",
        stride_in_1x1=stride,
    )


def _only(dicts: dict[Container, State], container: str, name: str) -> dict[Container, State]:
    for where in ((), tuple(container.split(".")), (container,)):
        if where in dicts and ".".join(where) == container:
            return {where: dicts[where]}
    known = ", ".join(".".join(where) or "''" for where in list(dicts)[:12]) or "none"
    raise KsclError(
        f"{name}: there are no tensors at --container '{container}'. It has tensors at "
        f"{without_escapes(known)}."
    )


def _distinct(places: list[Place], dicts: dict[Container, State]) -> list[list[Place]]:
    """Group copies with equal tensors: some files hold one network under two names."""
    groups: list[list[Place]] = []
    for place in places:
        for group in groups:
            if _equal(group[0], place, dicts):
                group.append(place)
                break
        else:
            groups.append([place])
    return groups


def _equal(one: Place, other: Place, dicts: dict[Container, State]) -> bool:
    ours, theirs = dicts[one.container], dicts[other.container]
    return all(
        torch.equal(ours[name], theirs[other.names[key]])
        for key, name in one.names.items()
        if key in other.names
    )


def _choose(
    copies: list[list[Place]],
    dicts: dict[Container, State],
    wanted: State,
    name: str,
    chosen: bool,
) -> tuple[Place, list[list[Place]]]:
    """Return the copy to take and those that are not taken; ask if that is not settled."""
    known = [
        next((p for p in group if _layouts_of(p, dicts[p.container], wanted)), group[0])
        for group in copies
    ]
    if len(copies) == 1:
        return known[0], []
    if not chosen:
        for index, place in enumerate(known):
            others = [group for number, group in enumerate(copies) if number != index]
            layout = next(iter(_layouts_of(place, dicts[place.container], wanted).values()), None)
            if layout and all(any(_yields(layout, place, p) for p in group) for group in others):
                return place, others
    options = "".join(f"\n  {place.flags()}" for place in known)
    raise KsclError(
        f"{name} holds this network {len(copies)} times, with different weights: choose one with"
        f"{options}\n(BACKBONE.CONTAINER and BACKBONE.PREFIX in a config)."
    )


def _yields(layout: Layout, taken: Place, other: Place) -> bool:
    """Return whether the layout says that `other` is not the one to take."""
    flat = taken.container == ()
    return any(
        (() if flat else container) == other.container and prefix == other.prefix
        for container, prefix in layout.instead_of
    )


def _layouts_of(place: Place, tensors: State, wanted: State) -> dict[str, Layout]:
    """Return every layout in the table that explains all of the dict's tensors."""
    rest = [unwrapped(key) for key in unused(place, tensors)]
    return {
        name: layout
        for name, layout in LAYOUTS.items()
        if (layout.prefix, layout.sequence) == (place.prefix, place.sequence)
        and place.container in (layout.container, ())
        and all(key.startswith(layout.leave_behind) for key in rest)
        and (not layout.marks or any(key.startswith(layout.marks) for key in rest))
        and not (set(rest) & {layout.prefix + key for key in wanted})
    }


def _why_ask(layouts: dict[str, Layout]) -> str:
    reasons = {layout.why_ask for layout in layouts.values()}
    if len(reasons) > 1:
        return f"files of {' and '.join(layouts)} look like this"
    return reasons.pop() if reasons else STRANGER


def _left_behind(place: Place, dicts: dict[Container, State]) -> tuple[str, ...]:
    """Return the names left in the dict, and how many tensors stand elsewhere in the file."""
    elsewhere: Counter[str] = Counter()
    for where, tensors in dicts.items():
        if where != place.container:
            top = ".".join(where[: len(place.container) or 1])
            elsewhere[without_escapes(top) or "top level"] += len(tensors)
    here = unused(place, dicts[place.container])
    return (*here, *(f"[{top}] ({count} tensors)" for top, count in elsewhere.items()))


def _tensors(place: Place, tensors: State, wanted: State) -> State:
    return {
        key: tensors[place.names[key]] if key in place.names else value
        for key, value in wanted.items()
    }
