"""Start one process, N processes on this machine, or join the processes that torchrun started.

Ranks live and die together: when one fails the others are ended, when the launcher or torchrun is
killed its ranks end themselves, and a signal to stop reaches all of them.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from kscl.cli import EXIT_INTERRUPTED, EXIT_USER_ERROR, print_error
from kscl.errors import KsclError
from kscl.runtime.distributed import wait_for_all, waiting_on_hosts
from kscl.runtime.failures import explained
from kscl.runtime.machine import usable_cores, without_kernels
from kscl.runtime.processes import (
    EXIT_BUG,
    POLL_SECONDS,
    StopRequest,
    end_with_parent,
    end_with_torchrun,
    leave,
    stop_requests,
)

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SET_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
PATIENCE = datetime.timedelta(hours=1)  # of a rank that waits for another one's tensors
CONNECT_PATIENCE = datetime.timedelta(seconds=3)
AGENT_PATIENCE = datetime.timedelta(minutes=1)  # torchrun's store is there before its ranks
PORT_OF_RANK_0 = "kscl/port of rank 0"
GRACE_SECONDS = 5.0  # for the other ranks to say why, once one has failed

Worker = Callable[[Any], int]

_launches = itertools.count()  # in this process; every rank counts the same


def launch(worker: Worker, argument: object, num_gpus: int) -> int:
    """Run `worker(argument)` on every rank and return the exit code; both must be picklable.

    `num_gpus` processes run on this machine: on its GPUs or, where it has none, on its cores.
    """
    gpus = torch.cuda.device_count()
    if all(name in os.environ for name in RANK_VARIABLES):
        if num_gpus > 1:
            raise KsclError("torchrun has started the processes already. Leave --num-gpus out.")
        return _join(worker, argument, gpus)
    if gpus and num_gpus > gpus:
        raise KsclError(
            f"--num-gpus is {num_gpus}, but {gpus} are visible. Use at most that, or let "
            "CUDA_VISIBLE_DEVICES name more."
        )
    for gpu in range(min(gpus, max(1, num_gpus))):
        require_kernels(gpu)
    if num_gpus > 1:
        return _spawn(worker, argument, num_gpus)
    with explained():
        return worker(argument)


def _join(worker: Worker, argument: object, gpus: int) -> int:
    """Run one of the ranks that torchrun or a scheduler has started."""
    code = EXIT_BUG
    if SET_BY_TORCHRUN in os.environ:
        end_with_torchrun()
    try:
        if gpus:
            gpu = visible_gpu(int(os.environ["LOCAL_RANK"]), gpus)
            require_kernels(gpu)
            torch.cuda.set_device(gpu)
        with _process_group(**_meeting_place()), explained():
            return worker(argument)
    except KsclError as error:
        print_error(error)
        code = EXIT_USER_ERROR
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else EXIT_BUG
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except BaseException:
        traceback.print_exc()
    return leave(code)


def require_kernels(gpu: int) -> None:
    """Raise an error if the installed torch cannot compute on a GPU."""
    lack, fix = without_kernels(gpu)
    if lack:
        raise KsclError(f'{lack}. {fix}. CUDA_VISIBLE_DEVICES="" runs on the CPU instead.')


def visible_gpu(local_rank: int, gpus: int) -> int:
    """Return the GPU of this rank among those that it sees, `gpus` of them."""
    if local_rank < gpus:
        return local_rank
    if gpus == 1 and SET_BY_TORCHRUN not in os.environ:
        return 0  # a scheduler that gives every task one GPU shows it no other
    raise KsclError(
        f"LOCAL_RANK is {local_rank}, but this process sees {gpus} GPU{'s' * (gpus > 1)}. Start at "
        "most one process per GPU (torchrun --nproc-per-node), or let CUDA_VISIBLE_DEVICES name "
        "more."
    )


def _meeting_place() -> dict[str, Any]:
    """Return a store, opened by rank 0 at every start, for ranks that torchrun started.

    torchrun's own store outlives a restart. Ranks would find the addresses of dead ones in it, and
    wait for them (https://github.com/pytorch/pytorch/issues/135712). Launches are numbered: a later
    one in the same process must not find the store of the one before.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}  # MASTER_ADDR and MASTER_PORT say where
    shared, number, count = next(dist.rendezvous("env://", timeout=AGENT_PATIENCE))
    shared.set_timeout(PATIENCE)
    host = os.environ["MASTER_ADDR"]
    key = f"{PORT_OF_RANK_0}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{next(_launches)}"
    store: dist.TCPStore | None = None
    if number == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        shared.set(key, str(store.port))
    while store is None:
        with contextlib.suppress(dist.DistNetworkError):  # the port of a rank 0 that has ended
            port = int(shared.get(key))
            store = dist.TCPStore(host, port, is_master=False, timeout=CONNECT_PATIENCE)
            store.set_timeout(PATIENCE)
    return {"store": store, "rank": number, "world_size": count}


@contextlib.contextmanager
def _process_group(**where: Any) -> Any:
    """Join the other ranks at the store given, or where the environment says."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE, **where)
    with waiting_on_hosts():
        yield
        # Not after an error: both lines wait for the other ranks, and nobody would report it.
        wait_for_all()
    dist.destroy_process_group()


def _spawn(worker: Worker, argument: object, count: int) -> int:
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: dict[BaseProcess, Connection] = {}  # (whether the user can fix it, text), if one fails
    with stop_requests() as stop:
        for number in range(count):
            ours, theirs = context.Pipe(duplex=False)
            place = (number, count, store.port)
            process = context.Process(target=_spawned, args=(place, theirs, worker, argument))
            with _without_interrupts():
                process.start()
            theirs.close()
            ranks[process] = ours
        try:
            first = _wait_for(list(ranks), stop)
        finally:
            for rank in ranks:
                rank.kill()
    return 0 if first is None else _explain(ranks, first, stop)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT; a process started here imports for seconds before it can ignore it."""
    resource_tracker.ensure_running()  # its start would unblock the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for(ranks: list[BaseProcess], stop: StopRequest) -> BaseProcess | None:
    """Wait until all have ended or one has failed, and return that one; pass on signals to stop."""
    passed_on = False
    while True:
        running = [rank for rank in ranks if rank.exitcode is None]
        first = next((rank for rank in ranks if rank.exitcode), None)
        if first is not None or not running:
            break
        if stop and not passed_on:
            passed_on = True
            for rank in running:
                rank.terminate()
        wait([rank.sentinel for rank in running], POLL_SECONDS)
    deadline = time.monotonic() + GRACE_SECONDS
    for rank in running:
        rank.join(max(0.0, deadline - time.monotonic()))
    return first


def _explain(ranks: dict[BaseProcess, Connection], first: BaseProcess, stop: StopRequest) -> int:
    """Raise the error of the first rank that has one for the user, or return an exit code."""
    if stop:
        return stop.exit_code
    reports = []
    for report in (ranks[first], *ranks.values()):
        with contextlib.suppress(EOFError):
            if report.poll():
                reports.append(report.recv())
    for user_can_fix, text in reports:
        if user_can_fix:
            raise KsclError(text)
    code = first.exitcode or EXIT_BUG
    if code < 0:
        number, by = list(ranks).index(first), signal.Signals(-code).name
        raise KsclError(
            f"Rank {number} was killed by {by}, which ended the run. If you did not kill it, it "
            "probably ran out of memory: use a smaller batch, or fewer loader workers per process. "
            "--resume continues from the last checkpoint."
        )
    for _, text in reports[:1]:
        print(text, file=sys.stderr)
    return code


def _spawned(
    place: tuple[int, int, int], report: Connection, worker: Worker, argument: object
) -> None:
    """Run one rank of `_spawn`."""
    number, count, port = place
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the launcher decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    end_with_parent()
    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(number)
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, usable_cores() // count))
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        with _process_group(store=store, rank=number, world_size=count), explained():
            code = worker(argument)
    except KsclError as error:
        report.send((True, str(error)))
        leave(EXIT_USER_ERROR)
    except SystemExit as ended:  # rank 0 says why
        leave(ended.code if isinstance(ended.code, int) else EXIT_BUG)
    except BaseException:
        report.send((False, f"On rank {number}:\n{traceback.format_exc()}"))
        leave(EXIT_BUG)
    sys.exit(code)
