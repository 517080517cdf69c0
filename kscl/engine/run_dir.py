"""Whose output folder it is: one run's, one process's at a time, and what it can go on from."""

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

LOCK_FILE = ".lock"
LOCK_PATIENCE = 10.0  # seconds; ranks of a killed launcher end within a moment


@contextlib.contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the system lets go of it however the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("w")
    except OSError as error:
        raise KsclError(
            f"OUTPUT_DIR {folder} cannot be written to: {error.strerror}; choose another"
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
                        f"another run is writing to {folder} right now: stop it, or choose another "
                        "OUTPUT_DIR"
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
) -> Path | None:
    """The checkpoint to go on from, None to begin; an error where neither would be right."""
    folder = Path(cfg.OUTPUT_DIR)
    # Hidden are the lock, and what a killed process had not yet given its name.
    content = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    is_run = CONFIG_FILE in content
    if content and not is_run:
        raise KsclError(
            f"OUTPUT_DIR {folder} is not empty and holds no run of this tool ({content[0]} and "
            f"others, {len(content)} in all): choose another"
        )
    if is_run and not (resume or auto_resume):
        raise KsclError(
            f"OUTPUT_DIR {folder} holds a run already: go on with it by --resume, or choose another"
        )
    checkpoints = folder / CHECKPOINT_FOLDER
    remove_unfinished(checkpoints)
    newest = load_newest(checkpoints)
    if newest is not None:
        path, saved = newest
        refuse_changes(saved["config"], cfg, path, without_effect)
        return path
    if resume:
        raise KsclError(
            f"there is nothing to resume in {folder}: it holds no checkpoint. --auto-resume starts "
            "a run where there is none"
        )
    if is_run:
        before = yaml.safe_load((folder / CONFIG_FILE).read_text())
        refuse_changes(before, cfg, folder, without_effect)
    return None


def refuse_changes(
    before: Mapping[str, Any],
    cfg: CfgNode,
    where: Path,
    without_effect: Sequence[str] = WITHOUT_EFFECT_ON_RESULTS,
) -> None:
    """A run goes on with the settings it began with, but for those that change no result."""
    changes = changed_keys(before, config_values(cfg), without_effect)
    if changes:
        lines = "".join(f"\n  {key}: {old!r} before, {new!r} now" for key, old, new in changes)
        raise KsclError(
            f"{where} was made with other settings, so it cannot be resumed with these:{lines}\n"
            "  put them back, or start a new run in another OUTPUT_DIR"
        )


def changed_keys(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    without_effect: Sequence[str] = WITHOUT_EFFECT_ON_RESULTS,
) -> list[tuple[str, object, object]]:
    """(key, old value, new value) of every setting that differs and matters."""
    old, new = dict(leaves(before)), dict(leaves(now))
    return [
        (key, old.get(key), new.get(key))
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
        and not any(key == name or key.startswith(f"{name}.") for name in without_effect)
    ]
