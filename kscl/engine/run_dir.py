"""Who owns an output folder: one run, one process at a time; and what that run can resume from.

Pretraining, probes, detection and the drawn data set all claim their folders here.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import CfgNode

from kscl.config.defaults import WITHOUT_EFFECT_ON_RESULTS
from kscl.config.tree import CONFIG_FILE, config_values, leaves
from kscl.engine.checkpoint import CHECKPOINT_FOLDER, load_newest, remove_unfinished
from kscl.errors import KsclError
from kscl.records.record import RECORD_FILE

LOCK_FILE = ".lock"
LEFT_BY_A_START = ("log.", "tensorboard", "events.out.")  # logs of our tools and of Detectron2
LOCK_PATIENCE = 10.0  # seconds; ranks of a killed launcher end within a moment


@contextlib.contextmanager
def only_run_in(folder: Path, setting: str = "OUTPUT_DIR") -> Iterator[None]:
    """Hold the folder for this process; the system releases it however the process ends.

    `setting` is what names the folder to the user.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("w")
    except OSError as error:
        raise KsclError(
            f"{setting} {folder} cannot be written to: {error.strerror}. Choose another."
        ) from error
    with lock:
        deadline = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                # Not flock: forked workers would inherit it and hold it after this process is gone.
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise KsclError(
                        f"Another run is writing to {folder} right now. Stop it, or choose another "
                        f"{setting}."
                    ) from None
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        yield


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
