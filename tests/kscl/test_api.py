"""The public API: what `import kscl` gives, and what it does not import."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kscl
from kscl.rng import Stream


def modules_after(program: str) -> set[str]:
    """Which top-level modules a fresh interpreter has imported after a program."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{program}; import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.split(".")[0] for name in done.stdout.split()}


def test_every_public_name_is_there_and_is_listed():
    for name in kscl.__all__:
        assert getattr(kscl, name) is not None
        assert name in dir(kscl)
    assert kscl.KSCL.__module__ == "kscl.methods.kscl"
    assert kscl.fit_subspaces.__module__ == "kscl.methods.subspace"
    assert set(kscl.__all__) >= {
        *("KSCL", "Encoder", "Queue", "MemoryBank", "Minibatch", "fit_subspaces"),
        *("projection_length", "retrieve_instance", "load_backbone", "save_backbone"),
        *("load_config", "KsclError"),
    }


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Lerner"):
        _ = kscl.Lerner
    with pytest.raises(ImportError, match="Lerner"):
        from kscl import Lerner  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize(
    ("program", "imported", "missing"),
    [
        ("import kscl", set(), {"torch", "timm", "numpy", "fvcore", "cv2"}),
        ("import kscl; kscl.load_config", {"fvcore"}, {"timm"}),  # on first use
        ("import kscl.data.loader", {"torch"}, {"timm"}),  # as a loader worker does
        ("import kscl.commands.leaderboard", set(), {"torch", "timm"}),
    ],
)
def test_only_what_is_used_is_imported(program, imported, missing):
    found = modules_after(program)
    assert imported <= found
    assert not missing & found


def test_the_ids_of_random_streams_never_change():
    assert {stream.name: stream.value for stream in Stream} == {
        "ORDER": 0,
        "VIEWS": 1,
        "REPLACEMENT": 2,
        "PROBE": 3,
        "MORE_QUERIES": 4,
        "SMALL_QUERIES": 5,
        "BUFFER": 6,
        "HELD_OUT": 16,
        "FEW_SHOT": 17,
        "CALIBRATION": 18,
        "VIEW_OF_EPOCH": 19,
        "FIXED_CROPS": 20,
        "LOW_SHOT": 21,
        "BOOTSTRAP": 22,
        "LABELED": 32,
    }
