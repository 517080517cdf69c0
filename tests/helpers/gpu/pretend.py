"""A pretend GPU, for tests of what one would do: torch has it within `pretend_gpu()`.

What it cannot show: the rounding and the races of real kernels, memory and speed, and
DistributedDataParallel, whose reducer needs real storages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import _foreach_supported_types
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import kscl.runtime.distributed
from tests.helpers.gpu.meter import Meter
from tests.helpers.gpu.tensor import CUDA, METER, PINNED, GpuTensor, is_pinned, mapped, on_gpu, run

# What autocast runs in half precision and in float32. C++ asks a tensor's true device, so the same
# is done here.
HALVED = {
    *(torch.conv2d, torch.nn.functional.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm, Tensor.addmm),
    *(torch.conv_transpose2d,),
}
WIDENED = {
    *(torch.softmax, Tensor.softmax, torch.log_softmax, Tensor.log_softmax, torch.exp, Tensor.exp),
    *(torch.log, Tensor.log, torch.pow, Tensor.pow, torch.sum, Tensor.sum, torch.norm, Tensor.norm),
    *(torch.rsqrt, Tensor.rsqrt, Tensor.cumsum, torch.nn.functional.layer_norm),
    *(torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss),
    torch.nn.functional.smooth_l1_loss,
}
# A wrapper cannot change its own shape.
RESHAPED = {
    Tensor.unsqueeze_: Tensor.unsqueeze,
    Tensor.squeeze_: Tensor.squeeze,
    Tensor.transpose_: Tensor.transpose,
    Tensor.t_: Tensor.t,
}


class _Functions(TorchFunctionMode):
    """What has to be done before C++ asks for a driver: devices, autocast, pinned memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.device, torch.autocast):
            return func(*args, **kwargs)
        args = tuple(_with_index(x) for x in args)
        kwargs = {name: _with_index(x) for name, x in kwargs.items()}
        if func is Tensor.pin_memory:
            return _pinned(args[0].clone())
        if func is Tensor.is_pinned:
            return is_pinned(args[0])
        if kwargs.pop("pin_memory", False):
            return _pinned(func(*args, **kwargs))
        if func in RESHAPED and isinstance(args[0], GpuTensor):
            func = RESHAPED[func]
        if torch.is_autocast_enabled("cuda") and func in HALVED | WIDENED:
            dtype = torch.get_autocast_dtype("cuda") if func in HALVED else torch.float32
            args, kwargs = mapped(lambda x: _cast(x, dtype), (args, kwargs))
        if func in (torch.tensor, torch.as_tensor) and on_gpu(kwargs.get("device")):
            del kwargs["device"]
            return func(*args, **kwargs).to(CUDA)
        return func(*args, **kwargs)


def _with_index(x: Any) -> Any:
    if isinstance(x, torch.device) and x.type == "cuda" and x.index is None:
        return CUDA
    return CUDA if isinstance(x, str) and x == "cuda" else x


def _pinned(tensor: Tensor) -> Tensor:
    setattr(tensor, PINNED, True)
    return tensor


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if not isinstance(x, GpuTensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(dtype)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class _Stream(contextlib.nullcontext[None]):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def wait_stream(self, other: object) -> None:
        pass


class _Event:
    """Waiting for an event of a step before costs nothing: its work is done by then."""

    def __init__(self, **_: Any) -> None:
        self.step = METER.step

    def record(self, *_: object) -> None:
        self.step = METER.step

    def synchronize(self) -> None:
        if self.step == METER.step:
            METER.wait("event of this step")


def _nothing(*_: Any, **__: Any) -> None:
    pass


TORCH_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: False,
    "_lazy_init": _nothing,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": _nothing,
    "get_device_name": lambda *_: "pretend GPU",
    "get_device_capability": lambda *_: (8, 0),
    "is_bf16_supported": lambda *_, **__: True,
    "synchronize": lambda *_: METER.wait("torch.cuda.synchronize"),
    "is_current_stream_capturing": lambda: False,
    "Stream": _Stream,
    "stream": lambda stream: stream,
    "current_stream": lambda *_: _Stream(),
    "Event": _Event,
    "empty_cache": _nothing,
    "mem_get_info": lambda *_: (2**40, 2**40),
    "memory_allocated": lambda *_: 0,
    "memory_reserved": lambda *_: 0,
    "max_memory_allocated": lambda *_: 0,
    "reset_peak_memory_stats": _nothing,
}


@contextlib.contextmanager
def pretend_gpu() -> Iterator[Meter]:
    """Let torch have one GPU within this block."""
    real_loader = torch.utils.data.DataLoader.__init__

    def loader_without_pinning(self: Any, *args: Any, **options: Any) -> None:
        real_loader(self, *args, **{**options, "pin_memory": False})

    with contextlib.ExitStack() as patches:
        for name, fake in TORCH_CUDA.items():
            patches.enter_context(patch.object(torch.cuda, name, fake))
        for owner, name, fake in (
            (torch.optim.Optimizer, "_accelerator_graph_capture_health_check", _nothing),
            (torch.utils.data.DataLoader, "__init__", loader_without_pinning),
        ):
            patches.enter_context(patch.object(owner, name, fake))
        # So that optimizers take their fast path, as on a GPU.
        _foreach_supported_types.append(GpuTensor)
        patches.callback(_foreach_supported_types.remove, GpuTensor)
        swap = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        patches.callback(torch.__future__.set_swap_module_params_on_conversion, swap)
        METER.reset()
        patches.enter_context(_Operations())
        patches.enter_context(_Functions())
        yield METER


@contextlib.contextmanager
def pretend_ranks(count: int) -> Iterator[None]:
    """Be rank 0 of so many ranks that all have the same data, in torch's fake process group."""
    if count == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        group = dist.new_group(backend="fake")
        with patch.object(kscl.runtime.distributed, "_host_group", group):
            yield
    finally:
        dist.destroy_process_group()
