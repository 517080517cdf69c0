"""Open files of weights as data: nothing in a file is ever run.

PyTorch's own reader (weights_only) builds tensors and plain values and refuses the rest. Others'
checkpoints often hold more: the arguments of a run, a NumPy number, a function of an optimizer.
Each of these becomes an empty object of a class made here under the name in the file; what the file
means by that name is never looked up.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import warnings
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kscl.backbone_file.file import Description, check_description, read_safetensors
from kscl.errors import KsclError, printable

ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
LONGEST_REASON = 300
# What PyTorch's reader builds itself: not listed as dropped.
TENSOR_MODULES = ("torch", "torch._utils", "torch._tensor", "torch.storage", "torch.serialization")
PLAIN = (
    *("collections.OrderedDict", "collections.Counter", "torch.nn.parameter.Parameter"),
    *("_codecs.encode", "builtins.set", "builtins.bytearray", "builtins.complex"),
)
LEGACY_PICKLES = 4  # before PyTorch 1.6: magic number, protocol, machine, and then the content
DICT_NAMES = ("dict", "Dict", "CfgNode")  # ends of names of classes that are filled as a dict is
ARRAYS = (  # all that a pickle of NumPy arrays names
    *("numpy.ndarray", "numpy.dtype", "numpy._core.multiarray._reconstruct"),
    "numpy._core.numeric._frombuffer",  # pickle protocol 5
    "_codecs.encode",  # bytes in pickle protocol 2
)
THREE_LINES = (
    "With that project's own code, save the state dict alone and give that file:\n"
    "  import torch\n"
    "  model = ...  # the network, built and loaded as that project does\n"
    '  torch.save(model.state_dict(), "backbone.pth")'
)


def read_file(path: Path, name: str) -> tuple[dict[str, Any], Description | None, tuple[str, ...]]:
    """Return a file's content, its description if it has ours, and the names of dropped objects."""
    if path.suffix == ".safetensors":
        return *read_safetensors(path, name), ()
    if path.suffix == ".pkl" and not zipfile.is_zipfile(path):
        return read_arrays_pickle(path), None, ()
    content, dropped = read_tensors(path)
    ours = "learner" in content and "description" in content  # a checkpoint of a pretraining
    return content, check_description(content["description"], name) if ours else None, dropped


def read_plain(path: Path) -> dict[str, Any]:
    """Return what torch.save wrote, if it is plain data; refuse anything else unread."""
    return _load(path, "Our tools write no such file: it was exchanged, so delete it.")


def read_tensors(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a file's content, with empty objects for all but plain data, and their names."""
    try:
        names = sorted(set(_globals(path)))
    except Exception:  # not a pickle that can be listed: PyTorch's reader says why, or refuses it
        names = []
    # Names that PyTorch's reader knows stay what they are: it looks them up first.
    with torch.serialization.safe_globals([_stub(module, name) for module, name in names]):
        content = _load(path, THREE_LINES)
    return content, tuple(
        without_escapes(f"{module}.{name}")
        for module, name in names
        if module not in TENSOR_MODULES and f"{module}.{name}" not in PLAIN
    )


def _globals(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the module and name of every global in the pickles of a file, without running any."""
    with path.open("rb") as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                (record,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                streams: list[Any] = [io.BytesIO(archive.read(record))]
        else:
            file.seek(0)
            streams = [file] * LEGACY_PICKLES
        for stream in streams:
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name == "GLOBAL":
                    module, _, name = str(argument).partition(" ")
                    # torch.save writes the names of Python 2.
                    ours = NAME_MAPPING.get((module, name))
                    yield ours or (IMPORT_MAPPING.get(module, module), name)


class _Dropped:
    """An empty object in place of one that is not data; it takes everything and keeps nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class _DroppedDict:
    """The same for objects that a pickle fills with keys: PyTorch's reader fills plain ones."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return OrderedDict()


def _stub(module: str, name: str) -> type:
    """Return a class that PyTorch's reader takes for the one of that name."""
    base = _DroppedDict if name.endswith(DICT_NAMES) else _Dropped
    stub = type(name.rpartition(".")[2], (base,), {"__module__": module, "__qualname__": name})
    stub.__name__ = name  # older versions of PyTorch go by it, newer ones by __qualname__
    return stub


def _load(path: Path, advice: str) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on other pickle protocols; what fails is an error
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RecursionError) as error:
        # PyTorch's message continues with advice on how to read the file unsafely.
        found = re.search(r"WeightsUnpickler error: (.+?)(?:\. |\n|$)", str(error))
        reason = first_line(found[1]) if found else type(error).__name__
        raise KsclError(
            f"{path} is not plain tensors, so it was not read: it is damaged, or a pickle of "
            f"Python objects, which can run code ({reason}). {advice}"
        ) from error
    except Exception as error:  # a damaged pickle fails anywhere inside PyTorch's reader
        raise KsclError(
            f"{path} cannot be read as a checkpoint ({first_line(error)}). Copy it again."
        ) from error
    return _dict_in(content, path, advice)


def _dict_in(content: object, path: Path, advice: str) -> dict[str, Any]:
    if isinstance(content, dict):
        return content
    raise KsclError(f"{path} holds a {type(content).__name__}, not a dict of tensors. {advice}")


class _ArraysOnly(pickle.Unpickler):
    """A reader of pickles that builds NumPy arrays and nothing else: a pickle can run anything."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core.", "numpy._core.")  # before NumPy 2
        if f"{module}.{name}" not in ARRAYS:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def read_arrays_pickle(path: Path) -> dict[str, Any]:
    """Return a pickled dict of NumPy arrays, as Detectron2's `.pkl` are, with tensors instead."""
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on the alignment of types from old files
            content = _as_tensors(_ArraysOnly(file, encoding="latin1").load())
    except Exception as error:  # a damaged pickle fails anywhere
        raise KsclError(
            f"{path} is not a pickle of plain arrays ({first_line(error)}), so it was not read. "
            f"{THREE_LINES}"
        ) from error
    return _dict_in(content, path, THREE_LINES)


def _as_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _as_tensors(inner) for key, inner in value.items()}
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def without_escapes(text: object) -> str:
    """Return text without the terminal's escape codes, which PyTorch's messages hold too."""
    return printable(ESCAPES.sub("", str(text)), kept="\n")


def first_line(error: object) -> str:
    """Return the first line of an error in printable text."""
    return without_escapes(str(error).split("\n")[0])[:LONGEST_REASON] or type(error).__name__


def some(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, printable, and how many more there are."""
    shown = ", ".join(without_escapes(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
