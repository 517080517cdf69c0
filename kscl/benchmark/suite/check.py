"""Check every stage of a suite before the first one starts: each tool looks for its own problems.

Stages that differ only in seed, label or output folder are checked once. What an earlier stage will
make is left out, except that its network is converted with random weights. The checks share few
processes, since their libraries take longer to import than most checks take; a check whose process
ended without an answer runs again in a process of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from kscl.benchmark.suite.execute import DONE, State
from kscl.benchmark.suite.spec import Suite, override_words
from kscl.benchmark.suite.stages import Stage, network_of
from kscl.config import plain
from kscl.data.annotations import Problem
from kscl.errors import KsclError
from kscl.keys import load_config
from kscl.registry import import_modules
from kscl.runtime.files import write_atomically
from kscl.runtime.paths import is_named

PASSED_FILE = "checked.txt"  # keys of stages whose check has passed
TIMEOUT = 1800.0  # seconds of one check; a preflight decodes thousands of images
# Settings that a check does not depend on.
OF_ONE_STAGE = ("SEED", "LABEL", "KSCL.LABEL", "OUTPUT_DIR", "DATA.DRAW", "KSCL.DRAW")

Show = Callable[[int, int, str], None]  # checks that are done, all of them, the last one's stage


@dataclass
class Request:
    """A check: the function `check` of a tool, its arguments, and the stages that it is for."""

    tool: str
    arguments: dict[str, Any]
    estimate: bool = False
    stages: list[Stage] = field(default_factory=list, repr=False)


class Checked(NamedTuple):
    """What a check has found, and the seconds that the stage may take if they were wanted."""

    problems: list[Problem]
    seconds: float | None = None


def check_stages(
    states: Sequence[State],
    state_dir: Path,
    output_dir: str,
    jobs: int,
    *,
    estimate: bool = False,
    show: Show = lambda done, total, name: None,
) -> list[str]:
    """Return what would stop the stages that are to run, one text per problem.

    `show` is called before the first check and after each. With `estimate`, pretrainings whose time
    is not known yet are measured for a few steps, and it is noted in their states; so are those
    whose check has passed before.
    """
    try:
        passed = set((state_dir / PASSED_FILE).read_text(encoding="utf-8").split())
    except (OSError, ValueError):
        passed = set()
    requests: dict[str, Request] = {}
    missing = {state.stage.folder for state in states if state.status != DONE}
    for state in states:
        stage = state.stage
        unknown = estimate and stage.kind == "pretrain" and state.expected is None
        if state.status == DONE or (stage.key in passed and not unknown):
            continue
        request = check_of(stage, missing, output_dir)
        if request is not None:
            if unknown and not any(need.folder in missing for need in stage.needs):
                request.estimate = True
            requests.setdefault(repr(request), request).stages.append(stage)
    if not requests:
        return []
    show(0, len(requests), "")
    problems: dict[str, list[str]] = {}
    for done, (request, checked) in enumerate(run_checks(list(requests.values()), jobs), 1):
        name = request.stages[0].name
        show(done, len(requests), name)
        fatal = [problem for problem in checked.problems if problem.fatal]
        problems[name] = [f"{name}: {it if it.fix else it.what}" for it in fatal]
        for state in states:
            if checked.seconds is not None and any(state.stage is it for it in request.stages):
                state.expected = checked.seconds
        if not fatal:
            passed |= {stage.key for stage in request.stages}
    if passed and state_dir.is_dir():
        write_atomically(state_dir / PASSED_FILE, "\n".join(sorted(passed)).encode())
    in_order = [request.stages[0].name for request in requests.values()]
    return [text for name in in_order for text in problems[name]]


def fetch_weights(suite: Suite) -> list[str]:
    """Fetch the weights that the suite names; return what is wrong, one text per contender.

    Their hashes are part of the stages' keys, so this comes before the plan.
    """
    problems = []
    for contender in suite.contenders:
        weights = contender.file
        if contender.pretrain:
            words = override_words({**suite.pretrain_overrides, **contender.overrides})
            weights = load_config(contender.pretrain, words).BACKBONE.WEIGHTS
        if not is_named(weights) and not contender.checksum:
            continue
        from kscl.backbone_file import checked_hash, find_weights  # slow to import

        try:
            found = find_weights(weights)
            assert found is not None  # it may be downloaded
            checked_hash(found, weights)
            check_checksum(found.path, contender.checksum)
        except KsclError as error:
            problems.append(f"contender {contender.name}: {error}")
    return problems


def different_networks(suite: Suite) -> str:
    """Return a warning that names the contenders of each network, or nothing if all share one."""
    names: dict[str, list[str]] = {}
    for contender in suite.contenders:
        if network := network_of(suite, contender):
            names.setdefault(network, []).append(contender.name)
    if len(names) < 2:
        return ""
    listed = "; ".join(f"{network}: {', '.join(of)}" for network, of in names.items())
    return (
        f"Warning: the contenders have different backbones ({listed}). A difference between them "
        "may be the network's and not the pretraining's."
    )


def check_checksum(path: Path, checksum: str) -> None:
    """Raise unless a file's hash begins as `checksum`, written md5:… or sha256:…, says."""
    kind, _, digits = checksum.partition(":")
    if not kind:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, kind).hexdigest()
    if not found.startswith(digits):
        raise KsclError(
            f"{path} is not the published file: its {kind} is {found}, not {digits}…. Delete it to "
            "fetch it again, or correct the checksum."
        )


def check_of(stage: Stage, missing: set[str], output_dir: str) -> Request | None:
    """Return the check of a stage, or None if there is nothing to check."""
    pretrain = stage.need("pretrain")
    if stage.kind == "convert":
        arguments = {"source": stage.inputs[0], **dict(stage.options)}
        del arguments["output_dir"]
        arguments.pop("seed", None)  # random weights of one network are alike
        if pretrain is not None and pretrain.folder in missing:
            cfg = load_config(pretrain.config, override_words(pretrain.overrides))
            network = {"arch": cfg.BACKBONE.NAME, "arch_kwargs": plain(cfg.BACKBONE.KWARGS)}
            arguments |= {"source": "random", **network}
        return Request(stage.tool, arguments)
    if not stage.config:
        return None
    later = [need.folder for need in stage.needs if need.kind == "shapes"]
    later = [folder for folder in later if folder in missing]
    overrides = {key: it for key, it in stage.overrides.items() if key not in OF_ONE_STAGE}
    config = stage.config
    if pretrain is not None and pretrain.folder in missing:
        del overrides["BACKBONE.WEIGHTS"]
        later.append("BACKBONE.WEIGHTS")
    if (convert := stage.need("convert")) is not None:
        config = dict(convert.options)["protocol"]
        later.append("MODEL.WEIGHTS")
    overrides["OUTPUT_DIR"] = output_dir
    arguments = {"config": config, "overrides": override_words(overrides), "later": later}
    return Request(stage.tool, arguments | {"num_gpus": stage.num_gpus})


def refuse(problems: Sequence[str]) -> None:
    """Raise one KsclError with all problems, if there are any."""
    if problems:
        listed = "\n".join(f"  {text}" for text in dict.fromkeys(problems))
        raise KsclError(f"The suite cannot run as it is; nothing was started:\n{listed}")


# The processes


def run_checks(
    requests: Sequence[Request], processes: int, timeout: float = TIMEOUT
) -> Iterator[tuple[Request, Checked]]:
    """Run the checks; yield each with what it has found, as they end."""
    # Those of one tool stay together, and so do those that import Detectron2.
    alike = sorted(requests, key=lambda request: request.tool)
    count = max(1, min(processes, len(alike)))
    parts = [alike[i * len(alike) // count : (i + 1) * len(alike) // count] for i in range(count)]
    running: list[_Worker] = []
    try:
        while parts or running:
            while parts and len(running) < count:
                with _without_interrupts():  # which the process inherits
                    running.append(_Worker(parts.pop(0), timeout))
            first = min(worker.until for worker in running)
            ready = wait([it.answers for it in running], max(0.0, first - time.monotonic()))
            for worker in list(running):
                if worker.answers in ready:
                    answer = worker.receive()
                    if answer is not None:
                        yield worker.left.pop(0), answer
                        continue
                    running.remove(worker)
                    worker.process.join(1)  # for its exit code
                    worker.end()
                    if worker.left and (worker.is_late or len(worker.left) == 1):
                        yield worker.left.pop(0), worker.failure()
                    parts += [[request] for request in worker.left]
                elif time.monotonic() >= worker.until:
                    worker.is_late = True
                    worker.kill()  # which closes its end of the pipe
    finally:
        for worker in running:
            worker.end()


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let Ctrl-C wait until the end of the block."""
    resource_tracker.ensure_running()  # the first process starts it, which would unblock Ctrl-C
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class _Worker:
    """A process that works on requests, one after the other."""

    def __init__(self, requests: list[Request], timeout: float) -> None:
        self.left, self.timeout, self.is_late = requests, timeout, False
        self.until = time.monotonic() + timeout
        context = multiprocessing.get_context("spawn")
        self.answers, sender = context.Pipe(duplex=False)
        given = [replace(request, stages=[]) for request in requests]
        self.process = context.Process(target=_work, args=(given, sender))
        self.process.start()
        sender.close()

    def receive(self) -> Checked | None:
        """Return the next answer, or None if the process has ended."""
        self.until = time.monotonic() + self.timeout
        try:
            return self.answers.recv()
        except (EOFError, OSError):
            return None

    def failure(self) -> Checked:
        """Return the answer in place of the one that did not come."""
        how = f"ended with exit code {self.process.exitcode}"
        how = f"took more than {self.timeout:.0f} s" if self.is_late else how
        return _failed(f"The check {how}.")

    def kill(self) -> None:
        """Kill the process and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()  # if it had no group of its own yet

    def end(self) -> None:
        """Kill the process, and wait for its end."""
        self.kill()
        self.process.join()
        self.answers.close()


def _work(requests: Sequence[Request], answers: Connection) -> None:
    """Run the checks in this process; what they print is not wanted."""
    os.setsid()
    os.environ |= {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    for request in requests:
        answers.send(_check(request))


def _check(request: Request) -> Checked:
    try:
        import_modules()
        tool = importlib.import_module(request.tool)
        problems = list(tool.check(**request.arguments))
        if not request.estimate or any(problem.fatal for problem in problems):
            return Checked(problems)
        given = (request.arguments["config"], request.arguments["overrides"])
        return Checked(problems, tool.seconds(*given))
    except KsclError as error:
        return _failed(str(error))
    except (Exception, SystemExit):
        return _failed(traceback.format_exc().strip()[-2000:])


def _failed(what: str) -> Checked:
    return Checked([Problem("check", "", what, "")])
