"""Which contender a record speaks of, and which of its pretraining seeds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kscl.benchmark.leaderboard.details import inside, mapping, number, text
from kscl.benchmark.leaderboard.reading import Loaded
from kscl.config.defaults import WITHOUT_EFFECT_ON_RESULTS
from kscl.config.tree import config_hash
from kscl.records.record import Json

SAME_FOR_ALL_SEEDS = (*WITHOUT_EFFECT_ON_RESULTS, "SEED")
VARIED = ("METHOD.NUM_SHOTS", "METHOD.RHO")  # the two settings that the plots are drawn against
# Of a described backbone: what makes it another contender. Evaluators add words of their own.
DESCRIBING = ("method", "similarity", "arch", "kwargs", "epochs", "num_shots", "rho")


@dataclass(frozen=True)
class Contender:
    """What is compared: everything about a pretraining that is not its seed."""

    method: str
    backbone: str
    epochs: float | None
    shots: int | None  # K
    rho: float | None  # None where there is nothing to cut: K = 1, or no subspace
    config: str  # hash of the pretraining settings, the seed left out
    data: str  # fingerprint of the pretraining data
    family: str  # hash of what is left when K and rho are left out too

    @property
    def shown(self) -> tuple[object, ...]:
        """What a reader of the table sees of it."""
        return self.method, self.backbone, self.epochs, self.shots, self.rho

    @property
    def order(self) -> tuple[object, ...]:
        return (
            *(self.method, self.backbone),
            *(-1.0 if value is None else value for value in (self.epochs, self.shots, self.rho)),
            *(self.config, self.data),
        )


@dataclass(frozen=True)
class Link:
    """Where one record belongs: a contender, and one replicate of it."""

    contender: Contender
    replicate: str


def links(records: Sequence[Loaded]) -> list[Link]:
    """Where each record belongs. Of several pretrainings that made the same file, the latest."""
    found: dict[str, Link] = {}
    made: dict[str, Link] = {}
    words: dict[str, Json] = {}  # what all evaluations of one unknown backbone say of it together
    for loaded in records:
        record = loaded.record
        if record["kind"] == "pretrain":
            found[loaded.id] = Link(pretrained(record), f"seed {record['seed']}")
            sha = made_backbone(record)
            if sha:
                made[sha] = found[loaded.id]
        else:
            told = mapping(inside(record, "details", "backbone"))
            known = {key: value for key, value in told.items() if value is not None}
            name = {"name": record["name"]}
            words[_backbone(loaded)] = {**name, **known, **words.get(_backbone(loaded), {})}
    for loaded in records:
        if loaded.id not in found:
            key = _backbone(loaded)
            found[loaded.id] = made.get(key) or _described(loaded, key, words[key])
    return [found[loaded.id] for loaded in records]


def made_backbone(record: Json) -> str | None:
    """The sha256 of the backbone file that a pretraining made."""
    return text(inside(record, "details", "outputs", "backbone"))


def _backbone(loaded: Loaded) -> str:
    """The backbone that was evaluated; a record that names none has one to itself."""
    return text(loaded.record["inputs"].get("backbone")) or loaded.id


def pretrained(record: Json) -> Contender:
    values = record["config"]["values"]
    shots = number(inside(values, "METHOD", "NUM_SHOTS"))
    return Contender(
        method=text(inside(values, "LABEL")) or str(record["name"]),
        backbone=text(inside(values, "BACKBONE", "NAME")) or "",
        epochs=number(inside(values, "SOLVER", "EPOCHS")),
        shots=None if shots is None else int(shots),
        rho=_rho(values, "METHOD", "NUM_SHOTS", "SIMILARITY", "RHO"),
        config=config_hash(values, SAME_FOR_ALL_SEEDS),
        data=fingerprints(record),
        family=config_hash(values, (*SAME_FOR_ALL_SEEDS, *VARIED)),
    )


def _described(loaded: Loaded, backbone: str, words: Mapping[str, Any]) -> Link:
    """A backbone that no pretraining record made, in the words of its evaluations."""
    method, seed = text(words.get("method")), number(words.get("seed"))
    shots = number(words.get("num_shots"))
    settings = {key: _plain(words[key]) for key in DESCRIBING if key in words}
    if seed is None and method is not None and backbone == loaded.id:
        seed = loaded.record["seed"]  # from scratch: the trial's own seed made the weights
    if seed is None or method is None:
        # Nothing says that two such files are replicates of one another.
        settings["file"] = backbone
    contender = Contender(
        method=method or str(words["name"]),
        backbone=text(words.get("arch")) or "",
        epochs=number(words.get("epochs")),
        shots=None if shots is None else int(shots),
        rho=_rho(words, "num_shots", "similarity", "rho"),
        config=_digest(settings),
        data="",
        family=_digest({k: v for k, v in settings.items() if k not in ("num_shots", "rho")}),
    )
    return Link(contender, f"seed {seed:g}" if seed is not None else "the file")


def _rho(values: object, *keys: str) -> float | None:
    """ρ where it has a meaning; `keys` lead to K, the similarity and ρ, from an inner section."""
    *way, shots, similarity, rho = keys
    section = inside(values, *way)
    cuts = inside(section, similarity) in ("projection", None) and inside(section, shots) != 1
    return number(inside(section, rho)) if cuts else None


def fingerprints(record: Json) -> str:
    """One short hash of all the data that a run saw."""
    hashes = {role: inside(print_, "hash") for role, print_ in sorted(record["data"].items())}
    return _digest(hashes) if hashes else ""


def _plain(value: object) -> object:
    """200 epochs are 200.0 epochs."""
    as_number = number(value)
    return value if as_number is None else float(as_number)


def _digest(value: Json) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
