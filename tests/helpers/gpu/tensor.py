"""Tensors that say they are on cuda:0 and hold their numbers on the CPU.

They complain as CUDA's do when a CPU tensor meets them, and a `Meter` counts what the host waits
for. In C++ such a tensor is on `meta`, for which autograd needs neither driver nor streams; in
Python its device is cuda:0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kscl.runtime.distributed
from tests.helpers.gpu.meter import WAITING, Meter

CUDA = torch.device("cuda", 0)
METER = Meter()
PINNED = "_pretend_pinned"  # an attribute of CPU tensors
# CUDA takes indices from the CPU, and waits for their copy.
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
NCCL_TYPES = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


class PretendCudaError(RuntimeError):
    """What CUDA or NCCL would have refused."""


class GpuTensor(Tensor):
    """A tensor on the pretend GPU; `inner` has its numbers."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> GpuTensor:
        out = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device="meta",
            _extra_dispatch_keys=torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA),
        )
        out.inner = inner
        return out

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return self.to("cpu")

    def cuda(self, *_: Any, **__: Any) -> GpuTensor:
        return self

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def record_stream(self, stream: object) -> None:
        pass

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": CUDA, **options})

    def __reduce_ex__(self, protocol: Any) -> Any:  # torch.save copies to the host
        METER.wait("torch.save")
        return self.inner.detach().clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch.no_grad():
            out: Tensor = GpuTensor(self.inner.clone())
        if isinstance(self, torch.nn.Parameter):
            out = torch.nn.Parameter(out, requires_grad=self.requires_grad)
        memo[id(self)] = out
        return out

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({tuple(self.shape)}, {self.dtype})"

    def __format__(self, spec: str) -> str:
        return repr(self) if self.ndim else format(self.item(), spec)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {})


def on_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type in ("cuda", "meta")


def inner_of(x: Any) -> Any:
    return x.inner if isinstance(x, GpuTensor) else x


def mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """Return nested arguments with their leaves changed; torch's own way takes most of a test."""
    if isinstance(x, list | tuple):
        return type(x)(mapped(change, y) for y in x) if type(x) in (list, tuple) else change(x)
    if type(x) is dict:
        return {name: mapped(change, y) for name, y in x.items()}
    return change(x)


def leaves_of(x: Any) -> list[Any]:
    found: list[Any] = []
    mapped(found.append, x)
    return found


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation of torch on the numbers, after CUDA's checks."""
    name = func._schema.name.split("::")[1]
    given = leaves_of([args, kwargs])
    ours = [x for x in given if isinstance(x, GpuTensor)]
    theirs = [x for x in given if isinstance(x, Tensor) and not isinstance(x, GpuTensor)]
    if func.namespace == "prim" and name == "device":
        return CUDA if ours else args[0].device
    if func.namespace == "c10d":
        return _collective(func, name, args, kwargs, given, ours, theirs)
    if not ours and not on_gpu(kwargs.get("device")):
        return func(*args, **kwargs)
    if any(isinstance(x, torch.Generator) and x.device.type == "cpu" for x in given):
        raise PretendCudaError(f"Expected a 'cuda' generator but found 'cpu' ({name})")
    if name == "_to_copy":
        return _copied(func, args[0], kwargs)
    if name == "copy_":
        return _copied_into(func, *args, **kwargs)
    if name in INDEXING:
        _check_indices(name, args)
    elif ours and not name.startswith(("lift", "_foreach_copy")):
        bad = [x for x in theirs if x.ndim]
        if bad:
            raise PretendCudaError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu ({func}, CPU shape {tuple(bad[0].shape)})"
            )
    if name in WAITING:
        METER.wait(name)
    plain_args, plain_kwargs = mapped(inner_of, (args, kwargs))
    if on_gpu(kwargs.get("device")):
        plain_kwargs["device"] = torch.device("cpu")
    return _wrapped(func(*plain_args, **plain_kwargs), given)


def _wrapped(result: Any, given: list[Any]) -> Any:
    """Wrap new tensors; an operation in place gives back the very tensors it was given."""
    known = {id(inner_of(x)): x for x in given if isinstance(x, Tensor)}

    def wrapped(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, GpuTensor):
            return x
        return known[id(x)] if id(x) in known else GpuTensor(x)

    return mapped(wrapped, result)


def _copied(func: Any, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Do `to`: a copy between devices, a change of type, or both."""
    kwargs = dict(kwargs)
    target_gpu = isinstance(source, GpuTensor)
    if kwargs.get("device") is not None:
        target_gpu, kwargs["device"] = on_gpu(kwargs["device"]), torch.device("cpu")
    unhurried = kwargs.pop("non_blocking", False)
    if kwargs.get("memory_format") is None:
        kwargs["memory_format"] = torch.preserve_format
    result = func(inner_of(source), **kwargs)
    if target_gpu != isinstance(source, GpuTensor):
        _count_copy(source, target_gpu, unhurried and target_gpu)
    return GpuTensor(result) if target_gpu else result


def _copied_into(func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    to_gpu = isinstance(target, GpuTensor)
    if to_gpu != isinstance(source, GpuTensor):
        on_host = source if to_gpu else target
        _count_copy(on_host, to_gpu, non_blocking)
    func(inner_of(target), inner_of(source))
    return target


def _count_copy(on_host: Tensor, to_gpu: bool, unhurried: bool) -> None:
    """Count a copy between host and device; only from or to pinned memory nobody waits for it."""
    if unhurried and is_pinned(on_host):
        METER.copies += 1
    else:
        METER.wait("copy to the GPU" if to_gpu else "copy to the CPU")


def is_pinned(tensor: Tensor) -> bool:
    return any(getattr(x, PINNED, False) for x in (tensor, tensor._base))


def _check_indices(name: str, args: tuple[Any, ...]) -> None:
    target, indices = args[:2]
    for index in (index for index in indices if index is not None):
        if isinstance(index, GpuTensor) and not isinstance(target, GpuTensor):
            raise PretendCudaError("indices should be on the device of the indexed tensor (cpu)")
        if index.dtype in (torch.bool, torch.uint8):
            METER.wait(f"{name} by a mask")
        elif isinstance(target, GpuTensor) and not isinstance(index, GpuTensor):
            METER.wait(f"{name} by CPU indices")
    put = "index_put" in name and args[2].ndim and isinstance(target, GpuTensor)
    if put and not isinstance(args[2], GpuTensor):
        raise PretendCudaError(f"{name}: the values are on another device")


def _collective(
    func: Any, name: str, args: Any, kwargs: Any, given: list[Any], ours: Any, theirs: Any
) -> Any:
    """Run a collective under NCCL's rules; between hosts, as with gloo, there are none."""
    if not ours and theirs and kscl.runtime.distributed.host_group() is not None:
        METER.exchange(f"{name} between hosts", 0)
        return func(*args, **kwargs)
    if theirs:
        raise PretendCudaError(f"No backend type associated with device type cpu ({name})")
    for tensor in ours:
        if tensor.dtype not in NCCL_TYPES:
            raise PretendCudaError(f"{tensor.dtype} is not supported by NCCL ({name})")
        if not tensor.inner.is_contiguous():
            raise PretendCudaError(f"Tensors must be contiguous ({name})")
    METER.exchange(name, max((tensor.nbytes for tensor in ours), default=0))
    plain_args, plain_kwargs = mapped(inner_of, (args, kwargs))
    return _wrapped(func(*plain_args, **plain_kwargs), given)
