"""What a suite takes on GPUs: hours, memory and disk of every stage, in one table."""

from __future__ import annotations

import importlib
import warnings

from tabulate import tabulate

from kscl.benchmark.suite.check import check_of
from kscl.benchmark.suite.spec import Suite
from kscl.benchmark.suite.stages import Stage, network_parts, plan
from kscl.engine.cost import Gpu, Needs
from kscl.run.task import PRETRAIN, commands

HEADER = ["stages", "runs", "hours each", "hours in all", "GiB per GPU", "disk GB in all"]
NOTE = (
    "Pretraining and probes: operations at the fraction of the peak that the paper's epochs imply; "
    "images that are not on this machine are counted as ImageNet's. Detection: Detectron2's "
    "published times of ResNet-50, in proportion to network, pixels and batch. One stage at a time."
)


def needs_table(suite: Suite, gpu: Gpu, count: int) -> str:
    """Return a line for every pretraining and evaluation, those of equal cost together."""
    networks = {it.name: network_parts(suite, it) for it in suite.contenders}
    groups: dict[str, list[Stage]] = {}
    for stage in plan(suite):
        contender, _, name = stage.name.partition("/")
        if stage.config and networks.get(contender, ("",))[0]:
            # Pretrainings differ by contender, evaluations by network and training.
            alike = contender if stage.kind == PRETRAIN else stage.network
            groups.setdefault(f"{alike}: {name.partition('/')[2]}", []).append(stage)
    lines: list[list[str]] = []
    hours = disk = 0.0
    for name, stages in sorted(groups.items(), key=lambda it: it[1][0].kind != PRETRAIN):
        each = _needs(stages[0], gpu, count, networks[stages[0].name.partition("/")[0]])
        trials = commands()[stages[0].kind].trials
        runs = sum(dict(stage.options).get(trials, 1) for stage in stages)
        hours, disk = hours + runs * each.hours, disk + runs * each.disk_gb
        figures = [each.hours, runs * each.hours, each.gib, runs * each.disk_gb]
        lines.append([name, str(runs), *(f"{figure:,.1f}" for figure in figures)])
    lines.append(["in all", "", "", f"{hours:,.1f}", "", f"{disk:,.1f}"])
    unknown = [name for name, (arch, _) in networks.items() if not arch]
    said = f" Not counted: {', '.join(unknown)}, whose file is not here." if unknown else ""
    return f"{tabulate(lines, HEADER, disable_numparse=True)}\n{NOTE}{said}"


def _needs(stage: Stage, gpu: Gpu, count: int, network: tuple[str, dict[str, object]]) -> Needs:
    made = {need.folder for need in stage.needs}
    request = check_of(stage, made, stage.folder)
    assert request is not None  # it has a config
    given = (request.arguments["config"], request.arguments["overrides"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, while they are imported
        found: Needs = importlib.import_module(stage.tool).needs(*given, gpu, count, *network)
    return found
