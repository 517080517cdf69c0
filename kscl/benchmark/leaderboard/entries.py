"""Entries: what a row of the board compares, and which records belong to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kscl.benchmark.leaderboard.reading import RecordFile, inside, mapping, number, text
from kscl.config import config_hash
from kscl.keys import PRETRAIN
from kscl.records.record import LONGER, Json, Record, digest

SAME_FOR_ALL_SEEDS = (*PRETRAIN.without_effect, "SEED")
VARIED = ("METHOD.NUM_SHOTS", "METHOD.RHO")  # the two settings that the plots are drawn against
# Of a described backbone: what makes it another entry. Evaluators add keys of their own.
DESCRIBING = ("method", "similarity", "arch", "kwargs", "epochs", "num_shots", "rho", "remember")

THE_FILE = "the file"  # the replicate of weights that no seed is known of

# Arguments of timm networks that change how wide or deep they are, beside `channels`.
SIZES = ("width", "base_width", "embed_dim", "dims", "depth", "depths", "layers")


@dataclass(frozen=True)
class Entry:
    """What is compared: everything about a pretraining except its seed."""

    method: str  # the run's LABEL
    backbone: str  # timm's name
    width: str  # of a network that is not as wide or deep as its name says; otherwise empty
    epochs: float | None
    shots: int | None  # K
    rho: float | None  # None if there is nothing to cut: K = 1, or no subspace
    config: str  # hash of the pretraining settings without the seed
    data: str  # fingerprint of the pretraining data
    family: str  # hash of the settings without K and rho too
    longer: float = 1.0  # times the protocol's training that the evaluation was trained

    @property
    def shown(self) -> tuple[object, ...]:
        """Return what a reader of the table sees of it."""
        return self.method, self.backbone, self.width, self.epochs, self.shots, self.rho

    @property
    def order(self) -> tuple[object, ...]:
        """Return a key that sorts entries in the same order on every machine."""
        known = (-1.0 if value is None else value for value in self.shown)
        longer = [self.longer] if self.longer > 1 else []
        return *known, self.config, self.data, *longer

    @property
    def key(self) -> str:
        """Return a short name that the same entry has on every board, as in links to a page."""
        return digest({"entry": list(self.order)})[:8]


class Link(NamedTuple):
    """Where one record belongs: an entry, and one replicate of it."""

    entry: Entry
    replicate: str


def links(files: Sequence[RecordFile]) -> list[Link]:
    """Return where each record belongs; the latest of several pretrainings that made one file."""
    own: dict[str, Link] = {}  # of pretrainings, by their record
    made: dict[str | None, Link] = {}
    # What all evaluations of one unknown backbone, trained equally long, say about it.
    words: dict[tuple[str, float], Json] = {}
    for file in files:
        record = file.record
        if record.kind == "pretrain":
            own[file.id] = Link(pretrained(record), f"seed {record.seed}")
            made[made_backbone(record)] = own[file.id]
            continue
        described = mapping(record.details.get("backbone"))
        known = {key: value for key, value in described.items() if value is not None}
        if "arch_kwargs" in known:  # as a certificate calls them
            known.setdefault("kwargs", known["arch_kwargs"])
        is_named = text(known.get("method")) and number(known.get("seed")) is None
        if is_named and not record.inputs.get("backbone"):
            known["seed"] = record.seed  # from scratch: the trial's own seed made the weights
        words[_weights(file)] = {"name": record.name} | known | words.get(_weights(file), {})
    unknown = {weights: said for weights, said in words.items() if weights[0] not in made}
    found = {weights: _described(*weights, said) for weights, said in unknown.items()}
    # Several files of one method and seed differ in settings unknown here: not one trial.
    alike = Counter(found[weights] for weights, said in unknown.items() if "epochs" in said)
    for weights, said in unknown.items():
        if alike[found[weights]] > 1:
            found[weights] = _described(*weights, said, apart=True)

    def link(file: RecordFile) -> Link:
        backbone, longer = weights = _weights(file)
        if backbone in made:
            entry, replicate = made[backbone]
            return Link(replace(entry, longer=longer), replicate)
        return found[weights]

    return [own[file.id] if file.id in own else link(file) for file in files]


def made_backbone(record: Record) -> str | None:
    """Return the sha256 of the backbone file that a pretraining made."""
    return text(inside(record.details, "outputs", "backbone"))


def _weights(file: RecordFile) -> tuple[str, float]:
    """Return the backbone that was evaluated, and how many times as long as the protocol says.

    A record that names no backbone has one to itself.
    """
    longer = number(file.record.details.get(LONGER)) or 1.0
    return file.record.inputs.get("backbone") or file.id, longer


def pretrained(record: Record) -> Entry:
    """Return the entry that a pretraining belongs to."""
    values = record.config.values
    network = mapping(values.get("BACKBONE"))
    words = {key.lower(): value for key, value in mapping(values.get("METHOD")).items()}
    words |= {"method": label(record), "epochs": _epochs(record)}
    words |= {"arch": network.get("NAME"), "kwargs": network.get("KWARGS")}
    family = config_hash(values, (*SAME_FOR_ALL_SEEDS, *VARIED))
    return _entry(words, _settings(record), family, fingerprints(record))


def processes(record: Record) -> int:
    """Return how many processes shared a batch: each has its own BatchNorm statistics."""
    return int(number(record.details.get("processes")) or 1)


def _settings(record: Record) -> str:
    settings = config_hash(record.config.values, SAME_FOR_ALL_SEEDS)
    parts = record.details.get("world_sizes")  # of a run that was resumed on another number
    counts = parts if isinstance(parts, list) and len(parts) > 1 else processes(record)
    return settings if counts == 1 else _digest({"settings": settings, "processes": counts})


def _epochs(record: Record) -> float | None:
    """Return the epochs that were asked for, or those that SOLVER.MAX_STEPS came to."""
    solver = inside(record.config.values, "SOLVER")
    trained = number(record.details.get("epochs"))
    if number(inside(solver, "MAX_STEPS")) and trained is not None:
        return round(trained, 1)
    return number(inside(solver, "EPOCHS"))


def label(record: Record) -> str:
    """Return what a pretraining is called."""
    return text(record.config.values.get("LABEL")) or record.name


def _described(backbone: str, longer: float, words: Json, apart: bool = False) -> Link:
    """Return the entry of a backbone that no pretraining record made, from what is said of it.

    If it is to be `apart`, it has an entry to itself.
    """
    method, seed = text(words.get("method")), number(words.get("seed"))
    settings = {key: _plain(words[key]) for key in DESCRIBING if key in words}
    if seed is None or method is None or apart:
        # Nothing says that two such files are replicates of one another.
        settings["file"] = backbone
    family = {key: value for key, value in settings.items() if key not in ("num_shots", "rho")}
    named = words | {"method": method or str(words["name"])}
    entry = _entry(named, _digest(settings), _digest(family), longer=longer)
    return Link(entry, THE_FILE if seed is None else f"seed {seed:g}")


def _entry(words: Json, config: str, family: str, data: str = "", longer: float = 1.0) -> Entry:
    """Return an entry from what is said of its backbone: see `details["backbone"]`."""
    shots = number(words.get("num_shots"))
    several = words.get("num_shots") != 1 or bool(words.get("remember"))
    cuts = words.get("similarity") in ("projection", None) and several
    return Entry(
        method=words["method"],
        backbone=text(words.get("arch")) or "",
        width=_width(words.get("kwargs")),
        epochs=number(words.get("epochs")),
        shots=None if shots is None else int(shots),
        rho=number(words.get("rho")) if cuts else None,
        config=config,
        data=data,
        family=family,
        longer=longer,
    )


def _width(kwargs: object) -> str:
    """Return the arguments that make a network smaller or larger than its name says, in words."""
    given = mapping(kwargs)
    channels = given.get("channels")
    if isinstance(channels, list) and channels:
        return f"{channels[0]}–{channels[-1]} channels"
    return ", ".join(f"{key} {given[key]}" for key in SIZES if given.get(key) is not None)


def fingerprints(record: Record) -> str:
    """Return one short hash of all the data that a run saw."""
    hashes = {role: print_["hash"] for role, print_ in record.data.items()}
    return _digest(hashes) if hashes else ""


def _plain(value: object) -> object:
    """Return numbers as floats: 200 epochs are 200.0 epochs."""
    as_number = number(value)
    return value if as_number is None else float(as_number)


def _digest(value: Json) -> str:
    return digest(value)[:16]
