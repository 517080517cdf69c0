"""How floats are computed: mixed precision, TF32, deterministic kernels, compiled networks."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
from collections.abc import Iterator

import torch
from torch import nn

from kscl.errors import KsclError
from kscl.runtime.logs import LOGGER

log = logging.getLogger(LOGGER)

AMP_TYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # read when the first matrix is multiplied


def autocast(device: torch.device, amp: torch.dtype | None) -> torch.autocast:
    """Return a context in which operations run in this type; None switches it off."""
    return torch.autocast(device.type, amp or torch.bfloat16, enabled=amp is not None)


@contextlib.contextmanager
def weights_cast_once(frozen: nn.Module) -> Iterator[None]:
    """Let autocast cast the weights of a frozen network once instead of in every pass.

    autocast caches only weights that require a gradient, so within this block these do. Compute no
    gradient in it, and do not change the weights before autocast ends.
    """
    weights = [weight for weight in frozen.parameters() if not weight.requires_grad]
    if not weights or not torch.is_autocast_enabled(weights[0].device.type):
        yield
        return
    try:
        for weight in weights:
            weight.requires_grad_(True)
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(False)


def set_numerics(
    *, tf32: bool = False, cudnn_benchmark: bool = False, deterministic: bool = False
) -> None:
    """Choose how GPUs compute; CPUs are unaffected.

    Without `tf32`, float32 is float32: by default torch rounds the inputs of convolutions to 10
    bits on Ampere and later. `deterministic` chooses kernels that repeat results to the bit; torch
    warns where there is none.
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = cudnn_benchmark and not deterministic
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


def in_tf32(device: torch.device) -> bool:
    """Return whether float32 is rounded to TF32 on this device, as `set_numerics` has chosen."""
    return device.type == "cuda" and numerics()["tf32"]


def numerics() -> dict[str, bool]:
    """Return what `set_numerics` has chosen in this process, for the record."""
    return {
        "tf32": torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.backends.cudnn.deterministic,
    }


def warn_of_emulation(amp: str, device: torch.device) -> None:
    """Warn if this GPU has no native bf16: torch emulates it, slower than float32."""
    if amp != "bf16" or device.type != "cuda":
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        log.warning(
            "SOLVER.AMP bf16: %s has no bf16 and emulates it, which is slow. Use SOLVER.AMP fp16.",
            torch.cuda.get_device_name(device),
        )


def suggest_tf32(amp: str, tf32: bool, device: torch.device) -> None:
    """Log what TF32 would gain on a GPU that has it, unless it or mixed precision is on."""
    if tf32 or amp != "off" or device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device) >= (8, 0):
        log.info(
            "SOLVER.TF32 is off: %s computes full float32. SOLVER.TF32 true lets its tensor cores "
            "multiply numbers rounded to 10 bits (at their peak 156 instead of 19.5 TFLOPS on an "
            "A100), as MoCo's code does for convolutions by torch's default.",
            torch.cuda.get_device_name(device),
        )


COMPILERS = ("g++", "clang++", "gcc", "clang")


def compile_in_place(module: nn.Module, backend: str, device: torch.device) -> None:
    """Let a module compile itself at its first call; its state dict keeps its names.

    The compiler's requirements are checked now, not in the middle of a run.
    """
    if backend == "off":
        return
    missing = []
    named = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ((named,) if named else COMPILERS)):
        missing.append(f"a C++ compiler (CXX={named})" if named else "a C++ compiler (g++)")
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        missing.append("Triton (pip install triton)")
    if backend == "inductor" and missing:
        raise KsclError(
            f"SOLVER.COMPILE inductor needs {' and '.join(missing)}, which is not installed here. "
            "Install it, or set SOLVER.COMPILE off."
        )
    module.compile(backend=backend)
