"""Errors of the machine become sentences for the user; errors of the code stay as they are."""

from __future__ import annotations

import errno
import os
import signal

import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset

from kscl.errors import KsclError
from kscl.runtime.failures import explain, explained


def os_error(number, filename=None):
    return OSError(number, os.strerror(number), filename)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (os_error(errno.ENOSPC, "/a/file"), ("/a/file", "disk is full", "--resume")),
        (os_error(errno.EDQUOT), ("disk is full",)),
        (os_error(errno.EACCES, "/a/cache"), ("/a/cache", "Permission denied", "DATA.CACHE_DIR")),
        (os_error(errno.EROFS, "/a/run"), ("/a/run", "Read-only", "OUTPUT_DIR")),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), ("GPU", "SOLVER.GRAD_ACCUM_STEPS")),
        (RuntimeError("CUDA error: out of memory"), ("GPU", "SOLVER.BATCH_SIZE")),
        (MemoryError(), ("Memory", "smaller batch")),
    ],
)
def test_a_failure_of_the_machine_names_the_thing_and_the_fix(error, words):
    with pytest.raises(KsclError) as raised, explained():
        raise error
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


def test_memory_that_a_cpu_does_not_have_is_a_failure_of_the_machine():
    with pytest.raises(KsclError, match="Memory has run out"), explained():
        torch.empty(2**50)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("size mismatch"),
        KeyError("step"),
        os_error(errno.ECONNRESET),
        os_error(errno.ENOENT, "/a/file"),
        os_error(errno.EACCES),  # of what?
        EOFError(),
    ],
)
def test_any_other_error_passes_unchanged(error):
    with pytest.raises(type(error)) as raised, explained():
        raise error
    assert raised.value is error


def test_an_error_for_the_user_that_a_loader_worker_raised_comes_without_its_traceback():
    try:
        raise KsclError("DATA.TRAIN is gone.\nMount it.")
    except KsclError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(KsclError) as raised:
        wrapped.reraise()
    assert explain(raised.value) == "DATA.TRAIN is gone.\nMount it."
    assert explain(KsclError("DATA.TRAIN is gone.")) is None


class NoSharedMemory(Dataset):
    """Ends its worker as full shared memory does."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGBUS)
        return index


def test_a_bus_error_is_told_from_the_workers_exit_code_where_pytorch_does_not_know_it():
    with pytest.raises(RuntimeError) as raised:
        list(DataLoader(NoSharedMemory(), num_workers=1))
    words = "DataLoader worker (pid(s) 7) exited unexpectedly"
    unknown = RuntimeError(words).with_traceback(raised.value.__traceback__)
    told = explain(unknown) or ""
    assert "/dev/shm" in told
    assert "--shm-size" in told
    assert "/dev/shm" not in (explain(RuntimeError(words)) or "")
