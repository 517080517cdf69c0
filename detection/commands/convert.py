"""Convert a pretrained backbone for Detectron2, with proof; or back to timm (--to timm).

Write a folder with the weights, a matching Detectron2 config and a certificate of the proof: the
same images go through the source network and the detector, and every stage is compared. If they
differ, nothing is written and the message says where and why. If the protocol's optimizer does not
suit the network, a warning names a better protocol.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml
from tabulate import tabulate

from detection.install import require_detectron2
from kscl import cli
from kscl.data.annotations import Problem
from kscl.errors import KsclError

COUNTER = "num_batches_tracked"
NOT_FOR_TIMM = ("container", "prefix", "mean", "std", "channels", "route")  # options
EXAMPLES = """  our own file says what it is:
    kscl convert output/kscl/backbone.safetensors --output-dir output/kscl/detectron2
  a checkpoint of another project (docs/checkpoints.md lists them):
    kscl convert moco_200ep.pth.tar --arch resnet50 --output-dir output/moco/detectron2
  the student of DINO, whose teacher is the default; then a layout that is not in the table:
    kscl convert dino.pth --arch resnet50 --container student --output-dir output/dino
    kscl convert own.pth --arch resnet50 --container state_dict --prefix net.trunk. \\
        --mean 0.485 0.456 0.406 --std 0.229 0.224 0.225 --output-dir output/own/detectron2
  a file in Detectron2's layout, such as MoCo's own converter writes; then MSRA's ResNet-50:
    kscl convert moco.pkl --arch resnet50 --output-dir output/moco/detectron2
    kscl convert detectron2://ImageNetPretrained/MSRA/R-50.pkl --arch resnet50 \\
        --arch-kwargs '{stride_in_1x1: true}' --output-dir output/msra/detectron2
  random weights of a narrow network, for the small protocol:
    kscl convert random --arch resnet50 --arch-kwargs '{channels: [8, 16, 32, 64]}' \\
        --protocol configs/detection/shapes_tiny_c4.yaml --output-dir output/random/detectron2
  DINOv2, with a protocol whose optimizer suits transformers:
    kscl convert dinov2_vits14_reg4_pretrain.pth --arch vit_small_patch14_reg4_dinov2 \\
        --protocol configs/detection/coco_fpn_1x_vit.yaml --output-dir output/dinov2/detectron2
  back again, from a folder of this tool, or from any ResNet of Detectron2 and its config:
    kscl convert output/kscl/detectron2 --to timm --output-dir output/kscl/back
    kscl convert model_final.pth --to timm --arch resnet50 --protocol voc.yaml \\
        --output-dir output/back
  then:
    kscl train-net --config-file output/kscl/detectron2/config.yaml \\
        OUTPUT_DIR output/kscl/detection
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    given = vars(_parser().parse_args(argv))
    to, output, is_check, _ = map(given.pop, ("to", "output_dir", "check", "import"))
    require_detectron2()
    convert, report = (_to_timm, _report_of_timm) if to == "timm" else (_to_d2, _report)
    run = functools.partial(convert, **given)
    if is_check:
        return cli.report_problems(lambda: _try(run))
    print(report(run(output=output)))
    return 0


def check(source: str, *, arch_kwargs: dict[str, Any] | None = None, **how: Any) -> list[Problem]:
    """Convert and compare without keeping the result; raise an error if it fails."""
    require_detectron2()
    from detection.convert.converter import convert

    return _try(functools.partial(convert, source, kwargs=arch_kwargs, **how))


def _try(run: Callable[..., object]) -> list[Problem]:
    with tempfile.TemporaryDirectory() as folder:
        run(output=Path(folder, "converted"))
    return []


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__ or "", EXAMPLES)
    cli.add_import(parser)
    add = parser.add_argument
    add(
        "source",
        help="weights: a file of this or another project, a name such as timm:resnet50.a1_in1k, an "
        "address (docs/checkpoints.md), or 'random'",
    )
    add("--to", choices=("detectron2", "timm"), default="detectron2", help="timm: the way back")
    add("--output-dir", required=True, metavar="FOLDER", help="the folder to write")
    add("--arch", help="the timm model, for files that do not say it themselves")
    add("--arch-kwargs", dest="kwargs", default="{}", metavar="YAML", help="its arguments")
    add("--container", metavar="KEY", help="where the file has the tensors: keys joined by dots")
    add("--prefix", help="key prefix of the backbone there, such as module.encoder_q.")
    add("--seed", type=int, default=0, help="of random weights (0)")
    for name, value in (("mean", "0.485 0.456 0.406"), ("std", "0.229 0.224 0.225")):
        about = f"of the pretraining's input, if it is not known (ImageNet: {value})"
        add(f"--{name}", type=float, nargs=3, metavar=("R", "G", "B"), help=about)
    add(
        "--channels",
        choices=("RGB", "BGR"),
        help="of a file in Detectron2's layout, if its converter is not known; a BGR network is "
        "converted to RGB",
    )
    add(
        "--protocol",
        metavar="FILE",
        help="the detector's config (configs/detection/voc0712_c4_24k_moco.yaml)",
    )
    add(
        "--route",
        choices=("exact", "timm"),
        help="exact: Detectron2 builds the same network; timm: run timm's own code (default: "
        "exact if possible)",
    )
    about = "of the weights (pth)"
    add("--format", dest="file_format", choices=("pth", "pkl"), default="pth", help=about)
    about = "convert and compare, print problems as JSON, and write nothing"
    cli.add_flag(parser, "--check", about)
    cli.add_flag(parser, "--force", "overwrite a conversion of other weights")
    return parser


def _kwargs(text: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise KsclError(f"--arch-kwargs is not YAML: {error}.") from error
    if not isinstance(values, dict):
        raise KsclError(
            f"--arch-kwargs must be a mapping such as '{{channels: [8, 16, 32, 64]}}', got {text}."
        )
    return values


def _to_d2(kwargs: str, **given: Any) -> Any:
    from detection.convert.converter import convert  # needs Detectron2

    return convert(kwargs=_kwargs(kwargs), **given)


def _to_timm(kwargs: str, seed: int, file_format: str, **given: Any) -> Any:
    from detection.convert.converter import convert_back

    for name in NOT_FOR_TIMM:
        if given.pop(name) is not None:
            raise KsclError(f"--{name} is not for --to timm. Leave it out.")
    return convert_back(kwargs=_kwargs(kwargs), **given)


def _report_of_timm(back: Any) -> str:
    equal = "equal to the bit to what was once converted" if back.same_as_source else "proven"
    return (
        f"{back.description.arch}, {equal}\n"
        "largest relative difference between Detectron2 and timm: "
        f"{max(back.differences.values()):.1e}\n"
        f"left behind: {in_kinds(back.left_behind)}\n"
        f"written to {back.path}, which timm.create_model takes as its checkpoint_path"
    )


def _report(converted: Any) -> str:
    certificate, folder = converted.certificate, converted.folder
    rows = [(stage, f"{value:.1e}", "equal") for stage, value in certificate.differences.items()]
    keys = [(key, str(value)) for key, value in certificate.detectron2_keys.items()]
    return "\n".join(
        [
            f"{certificate.source['name']} ({certificate.source['layout']}): {certificate.arch}",
            *converted.messages,
            f"Relative difference between timm and Detectron2 (allowed {certificate.tolerance:g}):",
            _table(rows),
            f"{certificate.tensors} tensors were converted; left out: "
            f"{in_kinds(certificate.left_behind)}",
            "Detectron2's keys:",
            _table(keys),
            f"Written to {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}",
            f"Next: kscl train-net --config-file {folder / 'config.yaml'} OUTPUT_DIR {folder}-run",
        ]
    )


def in_kinds(names: Sequence[str]) -> str:
    """Count tensors by their owner, e.g. which of MoCo's two encoders was left out."""
    kinds: Counter[str] = Counter()
    everything = set(names)
    for name in names:
        if name.startswith("["):  # another part of the file, already counted
            kinds[name] = 0
            continue
        layer, _, tensor = name.rpartition(".")
        # The counter of a layer whose other tensors were converted.
        is_counter = tensor == COUNTER and f"{layer}.weight" not in everything
        kinds[COUNTER if is_counter else ".".join(name.split(".")[:2])] += 1
    listed = (f"{kind} ({count})" if count else kind for kind, count in kinds.items())
    return ", ".join(listed) or "nothing"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    return indent(tabulate(rows, tablefmt="plain", disable_numparse=True), "  ")
