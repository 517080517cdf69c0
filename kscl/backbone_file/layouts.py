"""How known kinds of checkpoints name a backbone's tensors, and finding them by that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kscl.errors import KsclError

State = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """How one kind of checkpoint names a backbone's tensors, and what else it holds."""

    container: tuple[str, ...]  # keys that lead to the dict of tensors
    prefix: str
    leave_behind: tuple[str, ...] = ()  # prefixes of tensors that belong to something else


# In this order; of MoCo's two encoders the query encoder is taken, as MoCo's own evaluation does.
LAYOUTS: dict[str, Layout] = {
    "kscl checkpoint": Layout(
        ("learner",), "encoder.backbone.", ("encoder.head.", "key_encoder.", "dictionary.", "steps")
    ),
    "moco": Layout(
        ("state_dict",),
        "module.encoder_q.",
        ("module.encoder_q.fc.", "module.encoder_k.", "module.queue"),
    ),
    "moco v3": Layout(
        ("state_dict",),
        "module.base_encoder.",
        ("module.base_encoder.fc.", "module.momentum_encoder.", "module.predictor."),
    ),
    "simclr (state_dict, backbone)": Layout(
        ("state_dict",),
        "backbone.",
        ("backbone.fc.", "projector.", "projection_head.", "classifier.", "momentum_"),
    ),
    "simclr (state_dict, encoder)": Layout(
        ("state_dict",), "encoder.", ("encoder.fc.", "projector.", "projection_head.", "head.")
    ),
    "simclr (model, backbone)": Layout(
        ("model",), "backbone.", ("backbone.fc.", "projector.", "projection_head.", "classifier.")
    ),
    "plain": Layout((), "", ("fc.", "head.", "classifier.")),
    "plain (state_dict)": Layout(("state_dict",), "", ("fc.", "head.", "classifier.")),
    "plain (model)": Layout(("model",), "", ("fc.", "head.", "classifier.")),
    "distributed (state_dict)": Layout(("state_dict",), "module.", ("module.fc.", "module.head.")),
    "distributed (model)": Layout(("model",), "module.", ("module.fc.", "module.head.")),
}


def find_tensors(
    content: Mapping[str, Any], backbone: nn.Module, name: str
) -> tuple[str, State, tuple[str, ...]]:
    """Return the layout, the backbone's tensors by timm's names, and the names left behind."""
    wanted = backbone.state_dict()
    near_misses = []
    for layout_name, layout in LAYOUTS.items():
        tensors = _tensors_at(content, layout.container)
        found = {key: tensors.get(layout.prefix + key) for key in wanted}
        missing = [key for key, value in found.items() if value is None]
        # Files from before PyTorch 0.4.1 have no such counters; nothing is computed from them.
        missing = [key for key in missing if not key.endswith("num_batches_tracked")]
        if len(missing) == len([k for k in wanted if not k.endswith("num_batches_tracked")]):
            continue
        if missing:
            near_misses.append(f"as '{layout_name}' {_some(missing)} would be missing")
            continue
        used = {layout.prefix + key for key in wanted}
        rest = [key for key in tensors if key not in used]
        unknown = [key for key in rest if not key.startswith(layout.leave_behind or ("\0",))]
        if unknown:
            near_misses.append(f"as '{layout_name}' {_some(unknown)} would be left over")
            continue
        complete = {key: wanted[key] if value is None else value for key, value in found.items()}
        _check_tensors(complete, wanted, name)
        return layout_name, complete, tuple(rest)
    reasons = "".join(f"\n  {reason}" for reason in near_misses)
    raise KsclError(
        f"{name} does not hold this network: name another one, or save the backbone's state dict "
        f"alone.{reasons}\n"
        f"  prefixes found in it: {', '.join(_prefixes(content)) or 'none with tensors'}\n"
        f"  layouts known: {', '.join(LAYOUTS)}"
    )


def _tensors_at(content: Mapping[str, Any], container: tuple[str, ...]) -> State:
    node: Any = content
    for key in container:
        node = node.get(key) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        return {}
    return {
        key: value
        for key, value in node.items()
        if isinstance(key, str) and isinstance(value, Tensor)
    }


def _check_tensors(tensors: State, wanted: State, name: str) -> None:
    """Raise an error for shapes that differ, and for numbers that would be cut to fit."""
    wrong = [
        f"{key} is {tuple(value.shape)} and should be {tuple(wanted[key].shape)}"
        for key, value in tensors.items()
        if value.shape != wanted[key].shape
    ]
    if wrong:
        raise KsclError(
            f"{name} holds a network of another size: {_some(wrong)}. Name its arguments "
            "(BACKBONE.KWARGS)."
        )
    cut = [
        f"{key} is {value.dtype}"
        for key, value in tensors.items()
        if value.is_floating_point() != wanted[key].is_floating_point() or value.is_complex()
    ]
    if cut:
        raise KsclError(
            f"{name} holds numbers of another kind: {_some(cut)}, and weights are real floating "
            "point numbers. Save them as such."
        )


def _prefixes(content: Mapping[str, Any], inside: str = "", depth: int = 4) -> list[str]:
    """Return what stands before the first convolution's name, in every dict of the file."""
    found: dict[str, None] = {}
    for key, value in content.items():
        if isinstance(value, dict) and depth:
            found.update(dict.fromkeys(_prefixes(value, f"{inside}[{key}] ", depth - 1)))
        elif isinstance(value, Tensor):
            parts = str(key).split(".")
            found[inside + ".".join(parts[: min(2, len(parts) - 1)])] = None
    return list(found)[:12]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
