"""What a run costs: parameters, operations, memory, and the time of an epoch on given GPUs.

    a step = the encoder's passes, of which one with a gradient costs three
             + what the method adds: e.g. products with a dictionary, and views sent to other GPUs

The fraction of a GPU's peak that a network reaches is not computed but calibrated, on measured
epochs: the paper's at K = 1 and K = 5 (16 and 37 minutes on 8 V100), or one of yours; for tensor
cores, on assumed rates. Only what builds a network imports torch: the leaderboard, which counts
forward passes, starts without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fvcore.common.config import CfgNode

from kscl.errors import KsclError
from kscl.keys import load_config
from kscl.methods.keys import FLOAT_BYTES, method_of, view_pixels
from kscl.views.sizes import as_schedule, last_size, mean_pixels

if TYPE_CHECKING:
    from torch import Tensor, nn

IMAGENET_IMAGES, IMAGENET_VAL = 1_281_167, 50_000
# Values of state that an optimizer keeps beside each weight and its gradient.
OPTIMIZER_VALUES = {"sgd": 1, "lars": 1, "adamw": 2}


@dataclass(frozen=True)
class Gpu:
    """Figures of the maker's data sheet; the link is what one GPU transfers in practice."""

    teraflops: float  # float32
    tf32_teraflops: float  # with SOLVER.TF32; the same where there is none
    half_teraflops: float  # bf16 or fp16, dense
    memory_gib: float
    link_gb_per_second: float = 12.0  # PCIe 3 x16


GPUS: dict[str, Gpu] = {
    "V100": Gpu(15.7, 15.7, 125, 32),
    "T4": Gpu(8.1, 8.1, 65, 16),
    "RTX3090": Gpu(35.6, 35.6, 71, 24),
    "RTX4090": Gpu(82.6, 82.6, 165, 24, 24),
    "L4": Gpu(30.3, 60, 121, 24, 24),
    "A10": Gpu(31.2, 62.5, 125, 24, 24),
    "A100": Gpu(19.5, 156, 312, 80, 200),
    "H100": Gpu(67, 494, 989, 80, 300),
}
# Seconds that one core takes to decode a JPEG of 87 kB, and to make a view of 224 pixels of it:
# 1,040 views per second at K = 5.
DECODE_SECONDS, VIEW_SECONDS = 1.21e-3, 0.76e-3
DEVICE_PART = 0.6  # of a view's seconds that stay in the worker with VIEWS.DEVICE
# Fractions of the peak of tensor cores at which ResNet-50 trains. Assumed, not measured here: they
# give 900 images per second on an A100 in TF32, 2,500 there in bf16 and 1,000 on a V100 in fp16.
# For comparison: NVIDIA/DeepLearningExamples@3bbe228 had 850 to 894 on a V100 in mixed precision.
TF32_EFFICIENCY, HALF_EFFICIENCY = 0.14, 0.2
# The paper's table 2: K = 1, ResNet-50 at 224, batch 256, float32.
PAPER_MINUTES, PAPER_GPU, PAPER_COUNT = 16.0, "V100", 8
# What a key's pass takes, in passes at the rate of the query's: with it, K = 5 takes the table's 37
# minutes, and K = 3 takes 26.5 (26 in the table). It is more than 1 as a key is also loaded,
# shuffled between GPUs and decomposed.
UNTRAINED_PASS = 1.457
FULL_EFFICIENCY = 0.394  # of the peak in float32: what the same two epochs imply
STATE = "weights, gradients, optimizer, key encoder"  # of a GPU's memory


@dataclass(frozen=True)
class Costs:
    """Costs of one image through one encoder, and of the encoder itself."""

    parameters: int
    forward_flops: float  # a multiply-add counts as two
    activation_bytes: int  # kept for the backward pass


@dataclass(frozen=True)
class Needs:
    """What one stage takes on given GPUs."""

    hours: float
    gib: float  # memory of each GPU
    disk_gb: float  # what it leaves, and its checkpoints


def count_costs(cfg: CfgNode) -> Costs:
    """Build the encoder of a config and count what one image costs in it."""
    from kscl.methods.base import encoder_of

    return costs_of(encoder_of(cfg), last_size(cfg.INPUT.SIZE), cfg.SOLVER.AMP)


def costs_of(network: nn.Module, size: int, precision: str = "off") -> Costs:
    """Count what one image of this size costs in a network."""
    import torch
    from fvcore.nn import FlopCountAnalysis

    image = torch.zeros(2, 3, size, size)
    counter = FlopCountAnalysis(network, image).tracer_warnings("none")
    products = counter.unsupported_ops_warnings(False).uncalled_modules_warnings(False).total()
    return Costs(
        parameters=sum(weight.numel() for weight in network.parameters()),
        forward_flops=2 * products / len(image),
        # Mixed precision keeps the inputs of convolutions, nearly all there is, in half the bytes.
        activation_bytes=kept_bytes(network, image) // (1 if precision == "off" else 2),
    )


def kept_bytes(encoder: nn.Module, images: Tensor) -> int:
    """Return the bytes per image that autograd keeps of a forward pass, without the weights."""
    import torch

    weights = {weight.data_ptr() for weight in encoder.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = encoder(images)  # alive while counting: freed memory would be counted twice
    del result
    return sum(kept.values()) // len(images)


def step_flops(cfg: CfgNode, costs: Costs) -> float:
    """Return the operations of one step over all GPUs."""
    extra = method_of(cfg).extras(cfg).flops
    return cfg.SOLVER.BATCH_SIZE * (forward_passes(cfg) * costs.forward_flops + extra)


def _timed_flops(cfg: CfgNode, costs: Costs) -> float:
    """Return the operations of a step, counting those of slower passes as more.

    On tensor cores nothing was measured that could tell passes apart.
    """
    flops = step_flops(cfg, costs)
    if cfg.SOLVER.AMP != "off" or cfg.SOLVER.TF32:
        return flops
    pixels = mean_pixels(cfg.INPUT.SIZE, cfg.SOLVER.EPOCHS) / last_size(cfg.INPUT.SIZE) ** 2
    untrained = method_of(cfg).passes(cfg, pixels).untrained * (UNTRAINED_PASS - 1)
    return flops + cfg.SOLVER.BATCH_SIZE * untrained * costs.forward_flops


def transfer_seconds(cfg: CfgNode, gpu: Gpu, count: int) -> float:
    """Return the time of sending views to the GPU that encodes them (shuffled BatchNorm)."""
    if count == 1:
        return 0.0
    number = 1 if cfg.DATA.NORMALIZE_ON_DEVICE else FLOAT_BYTES  # bytes
    pixels = mean_pixels(cfg.INPUT.SIZE, cfg.SOLVER.EPOCHS)
    view = cfg.SOLVER.BATCH_SIZE // count * 3 * pixels * number
    received = method_of(cfg).extras(cfg).sent * view * (count - 1) / count
    return received / (gpu.link_gb_per_second * 1e9)


def peak_flops(cfg: CfgNode, gpu: Gpu, count: int) -> float:
    """Return the operations per second that the data sheet promises."""
    full = gpu.tf32_teraflops if cfg.SOLVER.TF32 else gpu.teraflops
    return count * 1e12 * (full if cfg.SOLVER.AMP == "off" else gpu.half_teraflops)


def step_seconds(cfg: CfgNode, costs: Costs, gpu: Gpu, count: int, efficiency: float) -> float:
    """Return how long one step takes at this fraction of the peak."""
    compute = _timed_flops(cfg, costs) / (peak_flops(cfg, gpu, count) * efficiency)
    return compute + transfer_seconds(cfg, gpu, count)


def loader_workers(cfg: CfgNode, seconds: float, count: int) -> int:
    """Return the workers per GPU that load as fast as steps of so many seconds take images."""
    view = VIEW_SECONDS * (DEVICE_PART if cfg.VIEWS.DEVICE else 1)
    image = DECODE_SECONDS + view_pixels(cfg, method_of(cfg).views(cfg)) * view
    return math.ceil(cfg.SOLVER.BATCH_SIZE * image / seconds / count)


def epoch_minutes(seconds: float, num_images: int, batch_size: int) -> float:
    """Return the minutes of an epoch from the seconds of a step."""
    return seconds * (num_images // batch_size) / 60


def calibrated_efficiency(
    cfg: CfgNode, costs: Costs, gpu: Gpu, count: int, minutes: float, num_images: int
) -> float:
    """Return the fraction of the peak that a measured epoch of this config implies."""
    seconds = minutes * 60 / (num_images // cfg.SOLVER.BATCH_SIZE)
    compute = seconds - transfer_seconds(cfg, gpu, count)
    if compute <= 0:
        raise KsclError(
            f"{minutes:g} minutes per epoch are less than the transfers alone take: measure again, "
            "or name the GPUs that it was measured on."
        )
    return _timed_flops(cfg, costs) / (compute * peak_flops(cfg, gpu, count))


def expected_efficiency(cfg: CfgNode, gpu: Gpu) -> tuple[float, str]:
    """Return the fraction of the peak to expect where nothing was measured, and what it rests on.

    Tensor cores wait for memory more than they compute: of their peak less is reached.
    """
    if cfg.SOLVER.AMP != "off":
        return HALF_EFFICIENCY, "an assumed rate in half precision"
    if cfg.SOLVER.TF32 and gpu.tf32_teraflops > gpu.teraflops:
        return TF32_EFFICIENCY, "an assumed rate in TF32"
    paper = load_config(None, ["METHOD.NUM_SHOTS", "1"])
    measured = (GPUS[PAPER_GPU], PAPER_COUNT, PAPER_MINUTES, IMAGENET_IMAGES)
    implied = calibrated_efficiency(paper, count_costs(paper), *measured)
    return implied, "the paper's K = 1 and K = 5 on 8 V100"


def memory_bytes(
    cfg: CfgNode, costs: Costs, count: int, num_images: int = IMAGENET_IMAGES
) -> dict[str, int]:
    """Return the memory of one GPU, by what it is needed for."""
    images = cfg.SOLVER.BATCH_SIZE // (count * cfg.SOLVER.GRAD_ACCUM_STEPS)
    last = last_size(cfg.INPUT.SIZE)
    largest = (max(size for _, size in as_schedule(cfg.INPUT.SIZE)) / last) ** 2
    method = method_of(cfg)
    extras, passes = method.extras(cfg), method.passes(cfg, largest)
    values = 2 + OPTIMIZER_VALUES[cfg.SOLVER.OPTIMIZER] + extras.copies
    pixels = view_pixels(cfg, method.views(cfg), largest)
    return {
        STATE: values * costs.parameters * FLOAT_BYTES,
        "activations": round(images * passes.trained * costs.activation_bytes),
        "views": round(images * pixels * 3 * last**2 * FLOAT_BYTES),
        "dictionary": extras.stored,
        "kept per image": extras.stored_per_image * num_images,
    }


def largest_output(network: nn.Module, size: int) -> int:
    """Return the bytes of the largest output of a layer, for one image."""
    import torch

    sizes: list[int] = []

    def note(_: nn.Module, __: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            sizes.append(output.numel() * output.element_size())

    hooks = [layer.register_forward_hook(note) for layer in network.modules()]
    with torch.no_grad():
        network(torch.zeros(2, 3, size, size))
    for hook in hooks:
        hook.remove()
    return max(sizes) // 2


def pretraining_needs(cfg: CfgNode, gpu: Gpu, count: int, num_images: int) -> Needs:
    """Return what a pretraining takes: its checkpoints hold the weights and the dictionary."""
    costs = count_costs(cfg)
    seconds = step_seconds(cfg, costs, gpu, count, expected_efficiency(cfg, gpu)[0])
    steps = cfg.SOLVER.MAX_STEPS or cfg.SOLVER.EPOCHS * (num_images // cfg.SOLVER.BATCH_SIZE)
    memory = memory_bytes(cfg, costs, count, num_images)
    state = memory[STATE] + memory["dictionary"]
    kept = cfg.CHECKPOINT.KEEP * state + costs.parameters * FLOAT_BYTES
    return Needs(steps * seconds / 3600, sum(memory.values()) / 2**30, kept / 1e9)


def forward_seconds(images: float, costs: Costs, gpu: Gpu, count: int, trained: bool) -> float:
    """Return how long a network takes for so many images in float32, with or without training."""
    passes = 1 + BACKWARD if trained else UNTRAINED_PASS
    return images * passes * costs.forward_flops / (count * gpu.teraflops * 1e12 * FULL_EFFICIENCY)


BACKWARD = 2  # forward passes that a backward pass costs

PASSES_OF_MOCO = 4  # a step's: the query forward and backward, one key forward


def forward_passes(cfg: CfgNode, pixels: float | None = None) -> float:
    """Return what a step costs per image, in forward passes of the encoder at its last size.

    `pixels` is those of a full-size view; if not given, their mean over the training.
    """
    if pixels is None:
        pixels = mean_pixels(cfg.INPUT.SIZE, cfg.SOLVER.EPOCHS)
    size = pixels / last_size(cfg.INPUT.SIZE) ** 2
    passes = method_of(cfg).passes(cfg, size)
    return passes.trained + passes.untrained + BACKWARD * passes.trained


def num_views(cfg: CfgNode) -> int:
    """Return the number of views per image, of any size."""
    views = method_of(cfg).views(cfg)
    return views.count + (views.small.count if views.small else 0)
