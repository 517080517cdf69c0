"""Refuse checkpoints that do not hold the network, whole and as numbers of the right kind."""

from __future__ import annotations

from kscl.backbone_file.layouts import HEADS, LAYOUTS, Container
from kscl.backbone_file.places import Place, State, in_sequence, unwrapped
from kscl.backbone_file.unpickle import without_escapes
from kscl.errors import KsclError

CHOOSE = "--container KEY --prefix PREFIX (BACKBONE.CONTAINER and BACKBONE.PREFIX in a config)"


class NotFound(KsclError):
    """A file without the whole network."""


def check_whole(
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
    where = "" if prefix is None else without_escapes(f" at --prefix '{prefix}'")
    prefixes = ", ".join(_prefixes(dicts)) or "none with tensors"
    raise NotFound(
        f"{name} does not hold this network{where}: name another network, or its place, "
        f"{CHOOSE}.{reasons}\n"
        f"  names in it begin with: {prefixes}\n"
        f"  layouts known: {'; '.join(LAYOUTS)}"
    )


def check_stranger(place: Place, tensors: State, wanted: State, name: str, chosen: bool) -> None:
    """Raise an error unless the user chose this place and nothing else stands in the network."""
    literal = place.literal_prefix()
    inside = {(in_sequence(key) if place.sequence else key).split(".")[0] for key in wanted}
    rest = unused(place, tensors)
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
        over = f" ({some(_unexplained(place, rest))} would be left over)" if rest else ""
        raise KsclError(
            f"{name} holds this network in a layout that is not known{over}. To take it from "
            f"there, say {place.flags()} (BACKBONE.CONTAINER and BACKBONE.PREFIX in a config)."
        )


def _unexplained(place: Place, rest: list[str]) -> list[str]:
    """Return what the layout that explains most of the names does not explain, or all of it."""
    near = [
        [key for key in rest if not unwrapped(key).startswith(layout.leave_behind or ("\0",))]
        for layout in LAYOUTS.values()
        if layout.prefix == place.prefix and place.container in (layout.container, ())
    ]
    return min(near, key=len, default=rest) or rest


def check_tensors(place: Place, tensors: State, wanted: State, name: str) -> None:
    """Raise an error for shapes that differ, and for numbers that would be cut to fit."""
    wrong = misfits(place, tensors, wanted)
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


def _prefixes(dicts: dict[Container, State]) -> list[str]:
    """Return the first parts of the names in every dict of tensors."""
    found: dict[str, None] = {}
    for where, tensors in dicts.items():
        inside = f"[{'.'.join(where)}] " if where else ""
        for key in tensors:
            parts = key.split(".")
            found[without_escapes(inside + ".".join(parts[: min(2, len(parts) - 1)]))] = None
    return list(found)[:12]


def some(names: list[str]) -> str:
    """Return up to three names, printable, and how many more there are."""
    shown = ", ".join(without_escapes(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def misfits(place: Place, tensors: State, wanted: State) -> list[str]:
    """Return every tensor whose shape is not that of the network, with both shapes."""
    return [
        f"{key} is {tuple(tensors[theirs].shape)} and should be {tuple(wanted[key].shape)}"
        for key, theirs in place.names.items()
        if tensors[theirs].shape != wanted[key].shape
    ]


def unused(place: Place, tensors: State) -> list[str]:
    """Return the names of the dict that are not part of the network."""
    used = set(place.names.values())
    return [key for key in tensors if key not in used]
