"""Who owns an output folder, and what its run can resume from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import CfgNode

from kscl.config.defaults import WITHOUT_EFFECT_ON_RESULTS
from kscl.config.tree import CONFIG_FILE, config_values, leaves
from kscl.engine.checkpoint import CHECKPOINT_FOLDER, load_newest, remove_unfinished
from kscl.errors import KsclError
from kscl.records.record import RECORD_FILE

LEFT_BY_A_START = ("log.", "tensorboard", "events.out.")  # logs of our tools and of Detectron2


def find_start(
    cfg: CfgNode,
    resume: bool,
    auto_resume: bool,
    without_effect: Sequence[str] = WITHOUT_EFFECT_ON_RESULTS,
    also: Mapping[str, object] | None = None,
    hints: Mapping[str, str] | None = None,
) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint to resume from and its content, or None to start.

    Raise an error if neither is right. `without_effect` names the settings that may change on
    resume, `also` maps further entries of a checkpoint to the values they must have, and `hints`
    maps a setting to what to do if it was changed on purpose.
    """
    folder = Path(cfg.OUTPUT_DIR)
    # Hidden are the lock and the unfinished files of a killed process.
    content = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if content and CONFIG_FILE not in content:
        raise KsclError(
            f"OUTPUT_DIR {folder} is not empty and does not hold a run of this tool (it has "
            f"{len(content)} entries, {content[0]} for one). Choose another."
        )
    is_run = any(not _is_of_a_start(folder / name) for name in content)
    if is_run and not (resume or auto_resume):
        raise KsclError(
            f"OUTPUT_DIR {folder} holds a run already. Resume it with --resume, or choose another."
        )
    checkpoints = folder / CHECKPOINT_FOLDER
    remove_unfinished(checkpoints)
    newest = load_newest(checkpoints)
    if newest is not None:
        path, saved = newest
        before = {**saved.get("config", {}), **{name: saved.get(name) for name in also or {}}}
        refuse_changes(before, {**config_values(cfg), **(also or {})}, path, without_effect, hints)
        return newest
    if resume and RECORD_FILE not in content:
        raise KsclError(
            f"There is nothing to resume in {folder}: it holds no checkpoint. --auto-resume starts "
            "a run where there is none."
        )
    if is_run:
        before = _read_config(folder / CONFIG_FILE)
        refuse_changes(before, config_values(cfg), folder, without_effect, hints)
    return None


def _is_of_a_start(path: Path) -> bool:
    """Return whether a start that ended before its first step could have left this behind.

    Such a start must not block the corrected command.
    """
    if path.name == CONFIG_FILE or path.name.startswith(LEFT_BY_A_START):
        return True
    is_empty_file = path.is_file() and path.stat().st_size == 0
    return is_empty_file or (path.is_dir() and not any(path.iterdir()))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise KsclError(f"{path} cannot be read: {error}. Choose another OUTPUT_DIR.") from error
    if not isinstance(values, dict):
        raise KsclError(f"{path} is not the config of a run. Choose another OUTPUT_DIR.")
    return values


def refuse_changes(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    where: Path,
    without_effect: Sequence[str] = WITHOUT_EFFECT_ON_RESULTS,
    hints: Mapping[str, str] | None = None,
) -> None:
    """Raise an error that names every setting that differs and changes results."""
    changes = changed_keys(before, now, without_effect)
    if not changes:
        return
    lines = "".join(f"\n  {key}: {old!r} before, {new!r} now" for key, old, new in changes)
    changed = [key for key, _, _ in changes]
    advice = "".join(f" {text}" for key, text in (hints or {}).items() if key in changed)
    raise KsclError(
        f"{where} was made with other settings, so it cannot be resumed with these:{lines}\n"
        f"Restore them, or start a new run in another OUTPUT_DIR.{advice}"
    )


def changed_keys(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    without_effect: Sequence[str] = WITHOUT_EFFECT_ON_RESULTS,
) -> list[tuple[str, object, object]]:
    """Return (key, old value, new value) of every setting that differs and matters."""
    old, new = dict(leaves(before)), dict(leaves(now))
    return [
        (key, old.get(key), new.get(key))
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
        and not any(key == name or key.startswith(f"{name}.") for name in without_effect)
    ]
