"""Pretrain a backbone from a config: images in, `backbone.safetensors` and `record.json` out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kscl import cli
from kscl.data.annotations import Problem
from kscl.errors import KsclError
from kscl.keys import load_config, print_config

if TYPE_CHECKING:
    from kscl.engine.cost import Gpu, Needs

EXAMPLES = """  kscl pretrain --config-file configs/pretrain/shapes_kscl.yaml \\
      DATA.TRAIN datasets/shapes/unlabeled OUTPUT_DIR output/mine
  kscl pretrain --config-file configs/pretrain/kscl_k5_rho40_r50_200ep.yaml \\
      --num-gpus 8 --auto-resume DATA.TRAIN /data/imagenet/train
  torchrun --nnodes 2 --nproc-per-node 8 … -m kscl pretrain --auto-resume --config-file …
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Read the config and run every rank."""
    arguments = cli.parser(__doc__ or "", EXAMPLES)
    cli.add_run_arguments(arguments)
    cli.add_world_size_argument(arguments)
    arguments.add_argument(
        "--path-handler",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="iopath handler for remote tar shards of a scheme other than http(s)",
    )
    cli.add_check_arguments(arguments, "config, data, weights and disk")
    about = "with --check: measure a few steps and add an estimate of the seconds"
    cli.add_flag(arguments, "--estimate", about)
    cli.add_config_arguments(arguments)
    given = arguments.parse_args(argv)

    from kscl.engine.pretrain import Pretraining
    from kscl.run.engine import Flags, launch_run
    from kscl.runtime.paths import register_handler

    for handler in given.path_handler:
        register_handler(handler)
    words = (given.config_file, given.overrides)
    if given.check:
        return cli.report_problems(
            lambda: check(*words, given.num_gpus, given.check_later),
            estimate=(lambda: seconds(*words)) if given.estimate else None,
        )
    cfg = load_config(*words)
    if given.print_config:
        print(print_config(cfg), end="")
        return 0
    flags = Flags(given.resume, given.auto_resume, given.allow_world_size_change)
    return launch_run(Pretraining, cfg, flags, given.num_gpus)


def check(
    config: str | None, overrides: Sequence[str], num_gpus: int = 1, later: Sequence[str] = ()
) -> list[Problem]:
    """Return all that would stop the run; `later` names what another command will make."""
    from kscl.engine.check import check_pretraining

    return check_pretraining(load_config(config, overrides), num_gpus, later)


def needs(config: str | None, overrides: Sequence[str], gpu: Gpu, count: int, *_: Any) -> Needs:
    """Return what the run takes on these GPUs; images that are not there are ImageNet's."""
    from kscl.data.open import open_source
    from kscl.engine.cost import IMAGENET_IMAGES, pretraining_needs

    cfg = load_config(config, overrides)
    try:
        images = len(open_source(cfg.DATA.TRAIN, cfg.DATA.CACHE_DIR, cfg.DATA.CACHE_GB))
    except KsclError:
        images = IMAGENET_IMAGES
    return pretraining_needs(cfg, gpu, count, images)


def seconds(config: str | None, overrides: Sequence[str]) -> float:
    """Measure a few steps; return the seconds that the run may take here."""
    from kscl.data.open import open_source
    from kscl.engine.check import budget_here, seconds_of

    cfg = load_config(config, overrides)
    source = open_source(cfg.DATA.TRAIN, cfg.DATA.CACHE_DIR, cfg.DATA.CACHE_GB)
    return seconds_of(cfg, len(source), budget_here(cfg, source))
