"""What a cluster is asked for: the keys of a profile, by kind of stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kscl.benchmark.suite.spec import EVALUATION_KINDS, key_problems, types_of_keys
from kscl.benchmark.suite.stages import Stage
from kscl.config import find_config, raise_problems, read_mapping
from kscl.errors import KsclError

WITHOUT_GPU = ("shapes", "convert", "basis", "board")
KINDS = ("pretrain", *EVALUATION_KINDS, *WITHOUT_GPU)


@dataclass(frozen=True)
class Resources:
    """What one stage asks for; an empty value is left to the cluster."""

    # The partition.
    partition: str = ""
    # Number of machines; more than one only for stages that train.
    nodes: int = 1
    # Most GPUs per machine; a stage asks for one per process. Kinds that compute little ask for
    # none unless they say so.
    gpus_per_node: int = 0
    # Instead of gpus_per_node, such as gpu:a100:8, for clusters that want it so.
    gres: str = ""
    # Cores per machine.
    cpus: int = 0
    # Memory per machine, such as 256G.
    memory: str = ""
    # The time limit, such as "24:00:00". A stage that needs longer saves, and is queued again.
    time: str = ""


@dataclass(frozen=True)
class Profile:
    """A cluster as this project sees it."""

    # The resources of every stage.
    resources: Resources = field(default_factory=Resources)
    # What differs for a kind of stage: pretrain, shapes, convert, basis, board, or that of an
    # evaluation.
    kinds: dict[str, Resources] = field(default_factory=dict)
    # Most jobs of the suite that run at once; 0 for no limit.
    max_jobs: int = 0
    # How often a stage is queued again before it counts as failed.
    retries: int = 20
    # Seconds before the time limit at which a stage is asked to save.
    seconds_to_save: int = 120
    # Further options of sbatch, such as ["--account=vision"].
    sbatch: tuple[str, ...] = ()
    # Shell lines before every stage, such as "module load cuda".
    setup: str = ""

    def of(self, stage: Stage) -> Resources:
        """Return what a stage asks for; raise if its processes cannot run on it."""
        asked = self.kinds.get(stage.kind, self.resources)
        words = stage.arguments
        if "--num-gpus" not in words:
            return replace(asked, nodes=1)
        processes = int(words[words.index("--num-gpus") + 1])
        each, rest = divmod(processes, asked.nodes)
        most = _gpus_of(asked)
        if rest or (most and each > most):
            raise KsclError(
                f"{stage.name} has {processes} processes (num_gpus of the suite), which the "
                f"profile's {asked.nodes} machines of {most or 'any number of'} GPUs (nodes, "
                f"gpus_per_node) for the kind {stage.kind} cannot share evenly. Change one of them."
            )
        if asked.gres:
            kind = asked.gres.rpartition(":")[0] if asked.gres[-1].isdecimal() else asked.gres
            return replace(asked, gres=f"{kind}:{each}")
        return replace(asked, gpus_per_node=min(most, each))


KEYS_OF_RESOURCES = types_of_keys(Resources)
KEYS_OF_PROFILE = types_of_keys(Profile) | {"resources": dict}


def _gpus_of(asked: Resources) -> int:
    last = asked.gres.rpartition(":")[2]
    return int(last) if last.isdecimal() else (1 if asked.gres else asked.gpus_per_node)


def read_profile(name: str | Path) -> Profile:
    """Return the profile in this file, or a shipped one; raise one error with all that is wrong."""
    path = find_config(name)
    values = read_mapping(path)
    raise_problems(list(_problems(values)), f"the profile {path}")
    shared = values.get("resources") or {}
    without_gpu = {**shared, "gpus_per_node": 0, "gres": "", "nodes": 1}
    given = values.get("kinds") or {}
    kinds = {
        kind: Resources(
            **((without_gpu if kind in WITHOUT_GPU else shared) | (given.get(kind) or {}))
        )
        for kind in KINDS
    }
    others = {key: value for key, value in values.items() if key not in ("resources", "kinds")}
    if "sbatch" in others:
        others["sbatch"] = tuple(map(str, others["sbatch"]))
    return Profile(resources=Resources(**shared), kinds=kinds, **others)


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    yield from key_problems("the profile", values, KEYS_OF_PROFILE)
    kinds = values.get("kinds")
    parts = {"resources": values.get("resources"), **(kinds if isinstance(kinds, dict) else {})}
    for name, about in parts.items():
        if name not in ("resources", *KINDS):
            yield f"kinds: {name} is not a kind of stage; choose from {', '.join(KINDS)}."
        elif about is not None and not isinstance(about, dict):
            yield f"{name} takes a mapping, not {about!r}."
        else:
            yield from key_problems(name, about or {}, KEYS_OF_RESOURCES)
            yield from _small(name, about or {}, {"nodes": 1, "gpus_per_node": 0, "cpus": 0})
    yield from _small("the profile", values, {"max_jobs": 0, "retries": 0, "seconds_to_save": 1})


def _small(where: str, about: Mapping[str, Any], least: Mapping[str, int]) -> Iterator[str]:
    for key, lowest in least.items():
        value = about.get(key)
        if isinstance(value, int) and value < lowest:
            yield f"{where}: {key} is {value}; it must be at least {lowest}."
