"""Export a pretrained backbone for use elsewhere.

onnx  a file for onnxruntime and others, written only if it computes the same as PyTorch
hub   a folder for a model hub: weights and config for timm, a model card with results, a badge
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kscl import cli
from kscl.errors import KsclError

if TYPE_CHECKING:  # heavy: imported where it is used, so that --help is fast
    from kscl.backbone_file import Loaded

EXAMPLES = """  kscl export onnx output/kscl/pretrain/backbone.safetensors \\
      --output backbone.onnx
  kscl export onnx moco_200ep.pth.tar --arch resnet50 --size 224 --output moco.onnx
  kscl export hub output/kscl/pretrain/backbone.safetensors --records output/kscl \\
      --output-dir kscl_resnet50
"""
NEEDED = ("onnx", "onnxruntime", "onnxscript")
INPUT, OUTPUT = "images", "features"
TOLERANCE = 1e-4  # largest difference, relative to the largest feature
CHECKED_BATCHES = (1, 3)


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = cli.parser(__doc__ or "", EXAMPLES)
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    onnx = kinds.add_parser("onnx", help="a checked ONNX file", allow_abbrev=False)
    hub = kinds.add_parser("hub", help="a folder for a model hub", allow_abbrev=False)
    for arguments in (onnx, hub):
        about = "weights: a file of this project, or any other file with --arch"
        arguments.add_argument("source", help=about)
        arguments.add_argument("--arch", help="timm model, if the file does not name it")
    about = "file to write; must end in .onnx"
    onnx.add_argument("--output", type=Path, required=True, metavar="FILE", help=about)
    about = "width and height of the images (default: as in pretraining)"
    onnx.add_argument("--size", type=int, metavar="N", help=about)
    about = "folder to write"
    hub.add_argument("--output-dir", type=Path, required=True, metavar="FOLDER", help=about)
    about = "folders with the records of its evaluations, for the card's results"
    hub.add_argument("--records", nargs="+", default=[], metavar="FOLDER", help=about)
    about = "license of the weights, as hubs name it (default: %(default)s)"
    hub.add_argument("--license", default="apache-2.0", help=about)
    given = parser.parse_args(argv)

    from kscl.backbone_file import load_backbone

    if given.what == "onnx" and given.output.suffix != ".onnx":
        raise KsclError(f"--output must end in .onnx, got {given.output}.")
    loaded = load_backbone(given.source, given.arch)
    return _onnx(loaded, given) if given.what == "onnx" else _hub(loaded, given)


def _hub(loaded: Loaded, given: argparse.Namespace) -> int:
    from kscl.benchmark.card import write_hub_folder

    results = write_hub_folder(loaded, given.output_dir, given.records, given.license)
    print(
        f"Written: {given.output_dir}, with {len(results)} results in its card. Load it with "
        f'timm.create_model("local-dir:{given.output_dir}", pretrained=True).'
    )
    return 0


def _onnx(loaded: Loaded, given: argparse.Namespace) -> int:
    """Write the file for normalized images (batch, 3, size, size), if it computes the same."""
    from kscl.runtime.files import write_atomically

    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise KsclError(
            f"Exporting to ONNX needs packages that are not installed. Run: pip install "
            f"{' '.join(missing)}"
        )
    described = loaded.description
    size = given.size or described.size
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "backbone.onnx")
        _export(loaded, path, size)
        difference = max(_difference(loaded, path, size, batch) for batch in CHECKED_BATCHES)
        if not difference <= TOLERANCE:
            raise KsclError(
                f"The ONNX file computes other features than PyTorch: they differ by "
                f"{difference:.1e}, more than {TOLERANCE:g}. It was not written."
            )
        write_atomically(given.output, path.read_bytes())
    mean, std = ([round(v, 4) for v in values] for values in (described.mean, described.std))
    print(
        f"Written: {given.output}: images (batch, 3, {size}, {size}), RGB in [0, 1] minus {mean} "
        f"over {std}, to features; differs from PyTorch by {difference:.1e}."
    )
    return 0


def _export(loaded: Loaded, path: Path, size: int) -> None:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter's, about its own future
            torch.onnx.export(
                loaded.backbone,
                (torch.rand(2, 3, size, size),),
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
    """Return the largest difference from PyTorch's features, relative to the largest of them."""
    import numpy as np
    import onnxruntime  # type: ignore[import-untyped]
    import torch

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
