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

from kscl.backbone_file.layouts import HEADS, LAYOUTS, Color, Container, Layout
from kscl.backbone_file.places import (
    Place,
    State,
    find_places,
    in_sequence,
    tensor_dicts,
    unwrapped,
)
from kscl.backbone_file.unpickle import printable
from kscl.errors import KsclError

GIVEN = "as given"  # the layout of a place that the user names and the table does not know
STRANGER = "this layout is not in the table"
CHOOSE = "--container KEY --prefix PREFIX (BACKBONE.CONTAINER and BACKBONE.PREFIX in a config)"


class NotFound(KsclError):
    """A file without the whole network."""


@dataclass(frozen=True)
class Found:
    """A backbone's tensors by timm's names, and what there is to say of them."""

    layout: str  # a name in LAYOUTS, or GIVEN
    tensors: State
    left_behind: tuple[str, ...]
    input: tuple[Color, Color] | None  # mean and std of the project's input, if they are known
    why_ask: str
    said: str  # which of several networks was taken; "" if there is only one


def find_tensors(
    content: Mapping[str, Any],
    backbone: nn.Module,
    name: str,
    container: str | None = None,
    prefix: str | None = None,
) -> Found:
    """Return the backbone's tensors in a file's content; `name` is the file, for errors.

    `container` (keys joined by dots) and `prefix` (letter by letter, wrappers included) choose the
    copy to take, and name layouts that are not in the table.
    """
    wanted = backbone.state_dict()
    dicts = dict(tensor_dicts(content))
    _refuse_detectron2(content, dicts, name)
    everywhere = dicts
    if container is not None:
        dicts = _only(dicts, container, name)
    places = [
        place for where in dicts for place in find_places(where, dicts[where], backbone, wanted)
    ]
    if prefix is not None:
        places = [place for place in places if place.literal_prefix() == prefix]
    whole = [place for place in places if not place.missing]
    _check_whole(whole, places, dicts, name, prefix)
    fitting = [p for p in whole if not _misfits(p, dicts[p.container], wanted)] or whole
    copies = _distinct(fitting, dicts)
    place, others = _choose(copies, dicts, wanted, name, chosen=prefix is not None)
    layouts = _layouts_of(place, dicts[place.container], wanted)
    known = next(iter(layouts), None)
    if known is None:
        chosen = container is not None or prefix is not None
        _check_stranger(place, dicts[place.container], wanted, name, chosen)
    _check_tensors(place, dicts[place.container], wanted, name)
    inputs = {layout.input for layout in layouts.values()}
    return Found(
        layout=known or GIVEN,
        tensors=_tensors(place, dicts[place.container], wanted),
        left_behind=_left_behind(place, everywhere),
        input=inputs.pop() if len(inputs) == 1 else None,
        why_ask=_why_ask(layouts),
        said=f"Took {LAYOUTS[known].takes}." if known and others else "",
    )


def _only(dicts: dict[Container, State], container: str, name: str) -> dict[Container, State]:
    for where in ((), tuple(container.split(".")), (container,)):
        if where in dicts and ".".join(where) == container:
            return {where: dicts[where]}
    known = ", ".join(".".join(where) or "''" for where in list(dicts)[:12]) or "none"
    raise KsclError(
        f"{name}: there are no tensors at --container '{container}'. It has tensors at "
        f"{printable(known)}."
    )


def _misfits(place: Place, tensors: State, wanted: State) -> list[str]:
    return [
        f"{key} is {tuple(tensors[theirs].shape)} and should be {tuple(wanted[key].shape)}"
        for key, theirs in place.names.items()
        if tensors[theirs].shape != wanted[key].shape
    ]


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
    rest = [unwrapped(key) for key in _unused(place, tensors)]
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


def _unused(place: Place, tensors: State) -> list[str]:
    used = set(place.names.values())
    return [key for key in tensors if key not in used]


def _left_behind(place: Place, dicts: dict[Container, State]) -> tuple[str, ...]:
    """Return the names left in the dict, and how many tensors stand elsewhere in the file."""
    elsewhere: Counter[str] = Counter()
    for where, tensors in dicts.items():
        if where != place.container:
            top = ".".join(where[: len(place.container) or 1])
            elsewhere[printable(top) or "top level"] += len(tensors)
    here = _unused(place, dicts[place.container])
    return (*here, *(f"[{top}] ({count} tensors)" for top, count in elsewhere.items()))


def _tensors(place: Place, tensors: State, wanted: State) -> State:
    return {
        key: tensors[place.names[key]] if key in place.names else value
        for key, value in wanted.items()
    }


def _check_whole(
    whole: list[Place],
    places: list[Place],
    dicts: dict[Container, State],
    name: str,
    prefix: str | None,
) -> None:
    """Raise an error unless there is a whole copy, with the nearest to one."""
    if whole:
        return
    near = sorted(places, key=lambda place: len(place.missing))[:3]
    reasons = "".join(f"\n  at {p.flags()}: {some(list(p.missing))} missing" for p in near)
    where = "" if prefix is None else f" at --prefix '{prefix}'"
    prefixes = ", ".join(_prefixes(dicts)) or "none with tensors"
    raise NotFound(
        f"{name} does not hold this network{printable(where)}: name another network, or its place, "
        f"{CHOOSE}.{reasons}\n"
        f"  names in it begin with: {prefixes}\n"
        f"  layouts known: {'; '.join(LAYOUTS)}"
    )


def _check_stranger(place: Place, tensors: State, wanted: State, name: str, chosen: bool) -> None:
    """Raise an error unless the user chose this place and nothing else stands in the network."""
    literal = place.literal_prefix()
    inside = {(in_sequence(key) if place.sequence else key).split(".")[0] for key in wanted}
    unused = _unused(place, tensors)
    strange = [
        key
        for key in unused
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
        over = f" ({some(_unexplained(place, unused))} would be left over)" if unused else ""
        raise KsclError(
            f"{name} holds this network in a layout that is not known{over}. To take it from "
            f"there, say {place.flags()} (BACKBONE.CONTAINER and BACKBONE.PREFIX in a config)."
        )


def _unexplained(place: Place, unused: list[str]) -> list[str]:
    """Return what the layout that explains most of the names does not explain, or all of it."""
    near = [
        [key for key in unused if not unwrapped(key).startswith(layout.leave_behind or ("\0",))]
        for layout in LAYOUTS.values()
        if layout.prefix == place.prefix and place.container in (layout.container, ())
    ]
    return min(near, key=len, default=unused) or unused


def _check_tensors(place: Place, tensors: State, wanted: State, name: str) -> None:
    """Raise an error for shapes that differ, and for numbers that would be cut to fit."""
    wrong = _misfits(place, tensors, wanted)
    if wrong:
        raise KsclError(
            f"{name} holds a network of another size: {some(wrong)}. Name its arguments "
            "(BACKBONE.KWARGS)."
        )
    cut = [
        f"{key} is {tensors[theirs].dtype}"
        for key, theirs in place.names.items()
        if tensors[theirs].is_floating_point() != wanted[key].is_floating_point()
        or tensors[theirs].is_complex()
    ]
    if cut:
        raise KsclError(
            f"{name} holds numbers of another kind: {some(cut)}, and weights are real floating "
            "point numbers. Save them as such."
        )


def _refuse_detectron2(
    content: Mapping[str, Any], dicts: dict[Container, State], name: str
) -> None:
    ends = ("stem.conv1.weight", "res2.0.conv1.weight")
    named = any(
        all(any(key.endswith(end) for key in tensors) for end in ends) for tensors in dicts.values()
    )
    if named or ("__author__" in content and "matching_heuristics" in content):
        raise KsclError(
            f"{name} is in Detectron2's format already and needs no conversion: use it as "
            "MODEL.WEIGHTS. For timm, or for a certificate, take it back first: "
            "tools/convert.py FILE --to timm --output-dir FOLDER."
        )


def _prefixes(dicts: dict[Container, State]) -> list[str]:
    """Return the first parts of the names in every dict of tensors."""
    found: dict[str, None] = {}
    for where, tensors in dicts.items():
        inside = f"[{'.'.join(where)}] " if where else ""
        for key in tensors:
            parts = key.split(".")
            found[printable(inside + ".".join(parts[: min(2, len(parts) - 1)]))] = None
    return list(found)[:12]


def some(names: list[str]) -> str:
    """Return up to three names, printable, and how many more there are."""
    shown = ", ".join(printable(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
