"""A backbone as an ONNX file, checked by running it with onnxruntime beside PyTorch."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch

from kscl.backbone_file.read import Loaded
from kscl.errors import KsclError
from kscl.runtime.files import write_atomically

NEEDED = ("onnx", "onnxruntime", "onnxscript")
INPUT, OUTPUT = "images", "features"
TOLERANCE = 1e-4  # largest difference, relative to the largest feature
CHECKED_BATCHES = (1, 3)


def export_onnx(loaded: Loaded, output: Path, size: int) -> float:
    """Write the file for images (batch, 3, size, size); return the difference that was measured.

    The images are normalized with the description's mean and std, as for PyTorch. A file that
    computes anything else than the backbone is never written.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise KsclError(
            f"Exporting to ONNX needs {', '.join(missing)}, which {'are' if missing[1:] else 'is'} "
            f"not installed. Run: pip install {' '.join(missing)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "backbone.onnx")
        _write(loaded, path, size)
        difference = max(_difference(loaded, path, size, batch) for batch in CHECKED_BATCHES)
        if not difference <= TOLERANCE:
            raise KsclError(
                f"The ONNX file computes other features than PyTorch: they differ by "
                f"{difference:.1e}, more than {TOLERANCE:g}. It was not written."
            )
        write_atomically(output, path.read_bytes())
    return difference


def _write(loaded: Loaded, path: Path, size: int) -> None:
    images = torch.rand(2, 3, size, size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter about its own future
            torch.onnx.export(
                loaded.backbone,
                (images,),
                str(path),
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except (RuntimeError, torch.onnx.errors.OnnxExporterError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise KsclError(
            f"{loaded.description.arch} cannot be exported to ONNX at {size} pixels: {first} "
            "Try another --size."
        ) from error


def _difference(loaded: Loaded, path: Path, size: int, batch: int) -> float:
    import onnxruntime  # type: ignore[import-untyped]

    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(batch))
    with torch.no_grad():
        expected = loaded.backbone(images).numpy()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = max(1, int(os.environ.get("OMP_NUM_THREADS", "1")))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (found,) = session.run([OUTPUT], {INPUT: images.numpy()})
    if found.shape != expected.shape:
        raise KsclError(f"The ONNX file returns {found.shape} instead of {expected.shape}.")
    return float(np.abs(found - expected).max() / np.abs(expected).max())
