"""Export a pretrained backbone for use elsewhere.

onnx  a file for onnxruntime and others, written only if it computes the same as PyTorch
hub   a folder for a model hub: weights and config for timm, a model card with results, a badge
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kscl import cli
from kscl.errors import KsclError

EXAMPLES = """  python tools/export.py onnx output/kscl/pretrain/backbone.safetensors \\
      --output backbone.onnx
  python tools/export.py onnx moco_200ep.pth.tar --arch resnet50 --size 224 --output moco.onnx
  python tools/export.py hub output/kscl/pretrain/backbone.safetensors --records output/kscl \\
      --output-dir kscl_resnet50
"""
DEFAULT_SIZE = 224


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = cli.parser(__doc__ or "", EXAMPLES)
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    onnx = kinds.add_parser("onnx", help="a checked ONNX file", allow_abbrev=False)
    hub = kinds.add_parser("hub", help="a folder for a model hub", allow_abbrev=False)
    for arguments in (onnx, hub):
        arguments.add_argument("source", help="a file of weights: ours, or another one with --arch")
        about = "the timm model, for files that do not say it themselves"
        arguments.add_argument("--arch", help=about)
    onnx.add_argument("--output", type=Path, required=True, metavar="FILE", help="ends in .onnx")
    about = "width and height of the images (default: that of the pretraining, or 224)"
    onnx.add_argument("--size", type=int, metavar="N", help=about)
    about = "folder to write"
    hub.add_argument("--output-dir", type=Path, required=True, metavar="FOLDER", help=about)
    about = "folders with the records of its evaluations, for the card's results"
    hub.add_argument("--records", nargs="+", default=[], metavar="FOLDER", help=about)
    about = "license of the weights, as hubs name it (default: %(default)s)"
    hub.add_argument("--license", default="apache-2.0", help=about)
    given = parser.parse_args(argv)
    return _onnx(given) if given.what == "onnx" else _hub(given)


def _onnx(given: argparse.Namespace) -> int:
    from kscl.backbone_file import load_backbone
    from kscl.backbone_file.onnx import export_onnx

    if given.output.suffix != ".onnx":
        raise KsclError(f"--output {given.output} must end in .onnx.")
    loaded = load_backbone(given.source, given.arch)
    described = loaded.description
    size = given.size or described.size or DEFAULT_SIZE
    difference = export_onnx(loaded, given.output, size)
    mean, std = ([round(v, 4) for v in values] for values in (described.mean, described.std))
    print(
        f"Written: {given.output}: images (batch, 3, {size}, {size}), RGB in [0, 1] minus {mean} "
        f"over {std}, to features; differs from PyTorch by {difference:.1e}."
    )
    return 0


def _hub(given: argparse.Namespace) -> int:
    from kscl.backbone_file import load_backbone
    from kscl.benchmark.card import write_hub_folder

    loaded = load_backbone(given.source, given.arch)
    results = write_hub_folder(loaded, given.output_dir, given.records, given.license)
    print(
        f"Written: {given.output_dir}, with {len(results)} results in its card. Load it with "
        f'timm.create_model("local-dir:{given.output_dir}", pretrained=True).'
    )
    return 0
