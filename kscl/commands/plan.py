"""Estimate what a pretraining, or every stage of a suite, takes before it starts.

The cost of a step is that of the encoder passes (a pass with gradients counts three times) and of
what the method adds: for KSCL, K passes of the keys, their transfer between GPUs and the products
with the dictionary. The share of a GPU's peak that a network reaches is calibrated on measured
epochs: the paper's at K = 1 and K = 5 (16 and 37 minutes on 8 V100s), or one of yours. A CPU is
measured instead, on a few images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fvcore.common.config import CfgNode

from kscl import cli
from kscl.engine.cost import (
    GPUS,
    IMAGENET_IMAGES,
    PAPER_COUNT,
    PAPER_GPU,
    Costs,
    calibrated_efficiency,
    count_costs,
    epoch_minutes,
    expected_efficiency,
    forward_passes,
    loader_workers,
    memory_bytes,
    step_flops,
    step_seconds,
)
from kscl.errors import KsclError
from kscl.keys import load_config, print_config
from kscl.methods.keys import method_of
from kscl.runtime.logs import clock

if TYPE_CHECKING:
    from kscl.data.source import ImageSource

CPU = "cpu"
EXAMPLES = """  kscl plan --config-file configs/pretrain/kscl_k5_rho40_r50_200ep.yaml \\
      --gpu V100 --num-gpus 8
  kscl plan --gpu A100 --num-gpus 4 --images 100000 METHOD.NUM_SHOTS 3 SOLVER.AMP bf16
  kscl plan --suite configs/suites/paper.yaml --gpu V100 --num-gpus 8
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = cli.parser(__doc__ or "", EXAMPLES)
    about = f"one of {', '.join(GPUS)}, or cpu to measure a few steps on this machine (default: cpu"
    about += f" where there is no GPU and DATA.TRAIN can be read, {PAPER_GPU} otherwise)"
    arguments.add_argument("--gpu", help=about)
    about = "number of GPUs (default: %(default)s)"
    arguments.add_argument("--num-gpus", type=int, default=PAPER_COUNT, metavar="N", help=about)
    about = "images per epoch (default: those of DATA.TRAIN, or else ImageNet's)"
    arguments.add_argument("--images", type=int, metavar="N", help=about)
    arguments.add_argument(
        "--measured-minutes",
        type=float,
        metavar="M",
        help="time of an epoch of this config on these GPUs, to calibrate on",
    )
    about = "print the hours, memory and disk of a suite's pretrainings, probes and detectors"
    arguments.add_argument("--suite", metavar="FILE", help=about)
    cli.add_config_arguments(arguments)
    given = arguments.parse_args(argv)

    import torch

    from kscl.data.open import open_source

    if given.suite:
        from kscl.benchmark.suite.needs import needs_table
        from kscl.benchmark.suite.spec import read_suite

        name = given.gpu or PAPER_GPU
        _check_gpus(name, given.num_gpus)
        print(f"On {given.num_gpus} x {name}:")
        print(needs_table(read_suite(given.suite), GPUS[name], given.num_gpus))
        return 0
    cfg = load_config(given.config_file, given.overrides)
    if given.print_config:
        print(print_config(cfg), end="")
        return 0
    try:
        source = open_source(cfg.DATA.TRAIN, cfg.DATA.CACHE_DIR, cfg.DATA.CACHE_GB)
    except KsclError:
        if given.gpu == CPU:
            raise
        source = None
    if given.images is None:
        given.images = len(source) if source is not None else IMAGENET_IMAGES
    if given.gpu is None:
        on_gpus = source is None or torch.cuda.is_available() or given.measured_minutes is not None
        given.gpu = PAPER_GPU if on_gpus else CPU
    if given.gpu == CPU and source is not None:
        print("\n".join(report_here(cfg, source, given.images)))
        return 0
    _check_gpus(given.gpu, given.num_gpus)
    if given.images < cfg.SOLVER.BATCH_SIZE:
        raise KsclError("A plan needs at least one batch of images (--images).")
    costs, gpu, count = count_costs(cfg), GPUS[given.gpu], given.num_gpus
    if given.measured_minutes is None:
        efficiency, basis = expected_efficiency(cfg, gpu)
    else:
        efficiency = calibrated_efficiency(
            cfg, costs, gpu, count, given.measured_minutes, given.images
        )
        basis = f"{given.measured_minutes:g} measured minutes"
    seconds = step_seconds(cfg, costs, gpu, count, efficiency)
    for line in report(cfg, costs, given.gpu, count, seconds, given.images):
        print(line)
    print(f"Calibrated on {basis}: {efficiency:.0%} of the peak. The loader's time is not counted.")
    return 0


def _check_gpus(name: str, count: int) -> None:
    if name not in GPUS:
        raise KsclError(f"--gpu {name} is not known: choose one of {', '.join(GPUS)}.")
    if count < 1:
        raise KsclError("A plan needs at least one GPU (--num-gpus).")


def report_here(cfg: CfgNode, source: ImageSource, num_images: int) -> list[str]:
    """Measure a few steps on this machine; return the lines of a plan."""
    from kscl.data.loader import steps_per_epoch
    from kscl.engine.check import budget_here, seconds_of
    from kscl.engine.schedule import total_steps

    budget = budget_here(cfg, source)
    seconds = seconds_of(cfg, num_images, budget)
    steps = steps_per_epoch(num_images, cfg.SOLVER.BATCH_SIZE)
    epochs = total_steps(cfg, steps) / steps
    extras = method_of(cfg).extras(cfg)
    kept = num_images * (extras.stored_per_image + extras.host_per_image)
    return [
        f"on this machine, measured on a few images: {budget}",
        *([f"  {kept / 2**30:7.2f} GiB  kept per image"] if kept else []),
        f"an epoch of {num_images:,} images: {clock(seconds / epochs)}; "
        f"{epochs:.4g} epochs: {clock(seconds)} (h:min:s or min:s)",
    ]


def report(
    cfg: CfgNode, costs: Costs, gpu_name: str, count: int, seconds: float, num_images: int
) -> list[str]:
    """Return the lines of a plan."""
    memory = memory_bytes(cfg, costs, count, num_images)
    total, available = sum(memory.values()) / 2**30, GPUS[gpu_name].memory_gib
    minutes = epoch_minutes(seconds, num_images, cfg.SOLVER.BATCH_SIZE)
    workers = loader_workers(cfg, seconds, count)
    host = method_of(cfg).extras(cfg).host_per_image * num_images
    fits = "fits" if total < 0.9 * available else "does NOT fit: raise SOLVER.GRAD_ACCUM_STEPS"
    epochs = cfg.SOLVER.EPOCHS
    if cfg.SOLVER.MAX_STEPS:
        epochs = cfg.SOLVER.MAX_STEPS / (num_images // cfg.SOLVER.BATCH_SIZE)
    return [
        f"{cfg.BACKBONE.NAME} with head: {costs.parameters / 1e6:.1f} million parameters, "
        f"{costs.forward_flops / 1e9:.2f} GFLOP per image forward",
        f"a step of {cfg.SOLVER.BATCH_SIZE} images, {method_of(cfg).summary(cfg)}: "
        f"{step_flops(cfg, costs) / 1e12:.1f} TFLOP ({forward_passes(cfg):.4g} forward passes per "
        f"image), {seconds * 1e3:.0f} ms on {count} x {gpu_name}",
        *(f"  {size / 2**30:7.2f} GiB  {what}" for what, size in memory.items()),
        f"  {total:7.2f} GiB  per GPU in all, of {available:g} GiB: {fits}",
        *([f"  {host / 2**30:7.2f} GiB  of host memory per GPU, kept per image"] if host else []),
        f"loader: {workers} workers per GPU, {workers * count} cores in all (DATA.NUM_WORKERS)",
        f"an epoch of {num_images:,} images: {minutes:.1f} minutes; {epochs:.4g} epochs: "
        f"{minutes * epochs / 60:.1f} hours",
    ]
