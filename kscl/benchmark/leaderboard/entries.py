"""Entries: what a row of the board compares, which records belong to it, and what sets it apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kscl.benchmark.leaderboard.reading import RecordFile, inside, mapping, number, text
from kscl.config import config_hash, leaves_without
from kscl.keys import PRETRAIN
from kscl.records.record import LONGER, Json, Record

SAME_FOR_ALL_SEEDS = (*PRETRAIN.without_effect, "SEED")
VARIED = ("METHOD.NUM_SHOTS", "METHOD.RHO")  # the two settings that the plots are drawn against
# Of a described backbone: what makes it another entry. Evaluators add keys of their own.
DESCRIBING = ("method", "similarity", "arch", "kwargs", "epochs", "num_shots", "rho", "remember")

THE_FILE = "the file"  # the replicate of weights that no seed is known of
MAX_SETTINGS = 2  # that set a row apart from one that looks the same
IN_COLUMNS = (
    *("LABEL", "METHOD.NUM_SHOTS", "METHOD.RHO"),
    *("BACKBONE.NAME", "BACKBONE.KWARGS.channels", "SOLVER.EPOCHS"),
)

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
        return (
            *(self.method, self.backbone, self.width),
            *(-1.0 if value is None else value for value in (self.epochs, self.shots, self.rho)),
            *(self.config, self.data),
            *([self.longer] if self.longer > 1 else []),
        )

    @property
    def key(self) -> str:
        """Return a short name that the same entry has on every board, as in links to a page."""
        return _digest({"entry": list(self.order)})[:8]


@dataclass(frozen=True)
class Link:
    """Where one record belongs: an entry, and one replicate of it."""

    entry: Entry
    replicate: str


def links(files: Sequence[RecordFile]) -> list[Link]:
    """Return where each record belongs; the latest of several pretrainings that made one file."""
    found: dict[str, Link] = {}
    made: dict[str, Link] = {}
    # What all evaluations of one unknown backbone, trained equally long, say about it.
    words: dict[tuple[str, float], Json] = {}
    for file in files:
        record = file.record
        if record.kind == "pretrain":
            found[file.id] = Link(pretrained(record), f"seed {record.seed}")
            sha = made_backbone(record)
            if sha:
                made[sha] = found[file.id]
        else:
            described = mapping(record.details.get("backbone"))
            known = {key: value for key, value in described.items() if value is not None}
            if "arch_kwargs" in known:  # as a certificate calls them
                known.setdefault("kwargs", known["arch_kwargs"])
            name = {"name": record.name}
            words[_weights(file)] = {**name, **known, **words.get(_weights(file), {})}
    replicates: dict[Link, set[str]] = {}  # the backbones of each
    for file in files:
        if file.id not in found:
            backbone, longer = key = _weights(file)
            if backbone in made:
                link = made[backbone]
                found[file.id] = replace(link, entry=replace(link.entry, longer=longer))
                continue
            found[file.id] = _described(file, backbone, words[key])
            if "epochs" in words[key]:
                replicates.setdefault(found[file.id], set()).add(backbone)
    for file in files:
        # Several files of one method and seed differ in settings unknown here: not one trial.
        if len(replicates.get(found[file.id], ())) > 1:
            found[file.id] = _described(file, _backbone(file), words[_weights(file)], apart=True)
    return [found[file.id] for file in files]


def made_backbone(record: Record) -> str | None:
    """Return the sha256 of the backbone file that a pretraining made."""
    return text(inside(record.details, "outputs", "backbone"))


def _backbone(file: RecordFile) -> str:
    """Return the backbone that was evaluated; a record that names none has one to itself."""
    return text(file.record.inputs.get("backbone")) or file.id


def _longer(file: RecordFile) -> float:
    """Return how many times as long as its protocol says an evaluation was trained."""
    return number(file.record.details.get(LONGER)) or 1.0


def _weights(file: RecordFile) -> tuple[str, float]:
    return _backbone(file), _longer(file)


def pretrained(record: Record) -> Entry:
    """Return the entry that a pretraining belongs to."""
    values = record.config.values
    shots = number(inside(values, "METHOD", "NUM_SHOTS"))
    return Entry(
        method=label(record),
        backbone=text(inside(values, "BACKBONE", "NAME")) or "",
        width=_width(inside(values, "BACKBONE", "KWARGS")),
        epochs=_epochs(record),
        shots=None if shots is None else int(shots),
        rho=_rho(values, "METHOD", "NUM_SHOTS", "SIMILARITY", "RHO", "REMEMBER"),
        config=_settings(record),
        data=fingerprints(record),
        family=config_hash(values, (*SAME_FOR_ALL_SEEDS, *VARIED)),
    )


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
    trained = number(inside(record.details, "epochs"))
    if number(inside(solver, "MAX_STEPS")) and trained is not None:
        return round(trained, 1)
    return number(inside(solver, "EPOCHS"))


def label(record: Record) -> str:
    """Return what a pretraining is called."""
    return text(record.config.values.get("LABEL")) or record.name


def _described(
    file: RecordFile, backbone: str, words: Mapping[str, Any], apart: bool = False
) -> Link:
    """Return the entry of a backbone that no pretraining record made, from what is said of it.

    If it is to be `apart`, it has an entry to itself.
    """
    method, seed = text(words.get("method")), number(words.get("seed"))
    shots = number(words.get("num_shots"))
    settings = {key: _plain(words[key]) for key in DESCRIBING if key in words}
    if seed is None and method is not None and backbone == file.id:
        seed = file.record.seed  # from scratch: the trial's own seed made the weights
    if seed is None or method is None or apart:
        # Nothing says that two such files are replicates of one another.
        settings["file"] = backbone
    entry = Entry(
        method=method or str(words["name"]),
        backbone=text(words.get("arch")) or "",
        width=_width(words.get("kwargs")),
        epochs=number(words.get("epochs")),
        shots=None if shots is None else int(shots),
        rho=_rho(words, "num_shots", "similarity", "rho", "remember"),
        config=_digest(settings),
        data="",
        family=_digest({k: v for k, v in settings.items() if k not in ("num_shots", "rho")}),
        longer=_longer(file),
    )
    return Link(entry, f"seed {seed:g}" if seed is not None else THE_FILE)


def _width(kwargs: object) -> str:
    """Return the arguments that make a network smaller or larger than its name says, in words."""
    given = mapping(kwargs)
    channels = given.get("channels")
    if isinstance(channels, list) and channels:
        return f"{channels[0]}–{channels[-1]} channels"
    return ", ".join(f"{key} {given[key]}" for key in SIZES if given.get(key) is not None)


def _rho(values: object, *keys: str) -> float | None:
    """Return ρ if there is more than one key to cut.

    `keys` lead to K, the similarity, ρ and the remembered epochs, from inner sections.
    """
    *way, shots, similarity, rho, remember = keys
    section = inside(values, *way)
    several = inside(section, shots) != 1 or bool(inside(section, remember))
    cuts = inside(section, similarity) in ("projection", None) and several
    return number(inside(section, rho)) if cuts else None


def fingerprints(record: Record) -> str:
    """Return one short hash of all the data that a run saw."""
    hashes = {role: print_["hash"] for role, print_ in sorted(record.data.items())}
    return _digest(hashes) if hashes else ""


def _plain(value: object) -> object:
    """Return numbers as floats: 200 epochs are 200.0 epochs."""
    as_number = number(value)
    return value if as_number is None else float(as_number)


def _digest(value: Json) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def tags(rows: Sequence[tuple[Entry, Sequence[RecordFile]]]) -> list[str]:
    """Return for each row the settings in which it differs from rows like it, or a short hash.

    A longer training than the protocol's is always among them.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, (entry, _) in enumerate(rows):
        alike.setdefault((entry.shown, entry.longer), []).append(i)
    found = [f"trained {e.longer:.3g}× as long" if e.longer > 1 else "" for e, _ in rows]
    for indices in alike.values():
        if len(indices) > 1:
            words = _distinguishing([rows[i] for i in indices])
            for i, word in zip(indices, words, strict=True):
                found[i] = ", ".join(filter(None, (word, found[i])))
    return found


def _distinguishing(rows: Sequence[tuple[Entry, Sequence[RecordFile]]]) -> list[str]:
    settings = [
        {
            **leaves_without(files[0].record.config.values, SAME_FOR_ALL_SEEDS),
            "PROCESSES": processes(files[0].record),
        }
        if files
        else {}
        for _, files in rows
    ]
    keys = sorted({key for values in settings for key in values}.difference(IN_COLUMNS))
    differing = [key for key in keys if len({repr(values.get(key)) for values in settings}) > 1]
    short = {key: key.rpartition(".")[2].lower().replace("_", " ") for key in differing}
    words = [
        ", ".join(f"{short[key]} {values[key]}" for key in differing if key in values)
        for values in settings
    ]
    if len(differing) > MAX_SETTINGS or max(map(len, words)) > 60:
        words = [f"settings {entry.config[:6]}" for entry, _ in rows]
    if len(set(words)) < len(rows):
        words = [
            ", ".join(filter(None, (word, f"data {entry.data[:6]}" if entry.data else "")))
            for word, (entry, _) in zip(words, rows, strict=True)
        ]
    if len(set(words)) < len(rows):  # several files about which nothing is known
        words = [f"settings {entry.config[:6]}" for entry, _ in rows]
    return words
