"""A folder for a model hub: weights, timm's config, and a model card with results and intervals."""

from __future__ import annotations

import html
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import yaml

from kscl.backbone_file import Loaded, to_safetensors
from kscl.benchmark.leaderboard.entries import made_backbone
from kscl.benchmark.leaderboard.rows import Measure, ProtocolKey, Row, build_board
from kscl.benchmark.leaderboard.tables import interval, table
from kscl.benchmark.leaderboard.tables import text as escaped
from kscl.errors import KsclError
from kscl.runtime.files import write_atomically

WEIGHTS_FILE, CONFIG_FILE, CARD_FILE = "model.safetensors", "config.json", "README.md"
BADGE_FILE = "badge.svg"
LETTER = 6.5  # pixels, in the badge
PADDING = 10


@dataclass(frozen=True)
class Result:
    """One number of the card."""

    protocol: ProtocolKey
    task: str  # the hub's name for it
    label: str
    metric: str
    measure: Measure


def write_hub_folder(
    loaded: Loaded, folder: Path, records: Sequence[str], license_name: str
) -> list[Result]:
    """Write the folder, and return the results that its card shows."""
    if folder.exists() and any(folder.iterdir()):
        raise KsclError(f"--output-dir {folder}: The folder is not empty. Choose another one.")
    results = _results(_row(loaded, records)) if records else []
    tensors = {name: tensor.contiguous() for name, tensor in loaded.backbone.state_dict().items()}
    config = json.dumps(_timm_config(loaded, license_name), indent=2)
    files = {
        WEIGHTS_FILE: to_safetensors(tensors, {"format": "pt"}),
        CONFIG_FILE: f"{config}\n".encode(),
        CARD_FILE: _card(loaded, results, license_name).encode("utf-8", "replace"),
        BADGE_FILE: badge(_name(loaded), results).encode("utf-8", "replace"),
    }
    with tempfile.TemporaryDirectory() as tried:
        for name, content in files.items():
            Path(tried, name).write_bytes(content)
        _check(loaded, tried)
    for name, content in files.items():
        write_atomically(folder / name, content)
    return results


def _check(loaded: Loaded, folder: str) -> None:
    """Raise an error unless timm reads the same network: the same features, to the bit."""
    size = loaded.description.size
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        same = torch.equal(network(images), loaded.backbone(images))
    if not same:
        raise KsclError("timm loads a different network from the folder, so nothing was written.")


def _row(loaded: Loaded, records: Sequence[str]) -> Row:
    """Return the board's row of this very backbone."""
    sha = loaded.file_sha256
    for row in build_board(records, check_stale=False, with_reported=False).rows:
        for file in row.records:
            if sha and sha in (made_backbone(file.record), file.record.inputs.get("backbone")):
                return row
    raise KsclError(
        f"{', '.join(records)}: No record evaluates this backbone ({str(sha)[:16]}). Name the "
        "folder of its evaluations, or leave --records out for a card without results."
    )


def _results(row: Row) -> list[Result]:
    found = []
    for protocol, result in row.results.items():
        metric = protocol.headline
        if metric in result.measures:
            about = result.records[0].record.task
            label = next(it.label for it in about.metrics if it.name == metric)
            found.append(Result(protocol, about.hub_task, label, metric, result.measures[metric]))
    return found


def _timm_config(loaded: Loaded, license_name: str) -> dict[str, Any]:
    about = loaded.description
    return {
        "architecture": about.arch,
        "num_classes": 0,
        "num_features": loaded.backbone.num_features,
        "model_args": {"num_classes": 0, **about.kwargs},
        "pretrained_cfg": {
            "custom_load": False,
            "input_size": [3, about.size, about.size],
            "fixed_input_size": False,
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": list(about.mean),
            "std": list(about.std),
            "num_classes": 0,
            "license": license_name,
        },
    }


def _name(loaded: Loaded) -> str:
    return f"{loaded.description.source.get('method', 'backbone')} {loaded.description.arch}"


def _card(loaded: Loaded, results: Sequence[Result], license_name: str) -> str:
    front = yaml.safe_dump(_metadata(loaded, results, license_name), sort_keys=False)
    about, source = loaded.description, loaded.description.source
    name = escaped(_name(loaded))
    facts = {
        "Network": about.arch,
        "Arguments": json.dumps(about.kwargs) if about.kwargs else "",
        "Input": f"RGB in [0, 1], minus {_rounded(about.mean)}, over {_rounded(about.std)}",
        "Size in pretraining": f"{about.size} pixels",
        "Method": source.get("method", ""),
        "K": source.get("num_shots", ""),
        "ρ": source.get("rho", ""),
        "Epochs": source.get("epochs", ""),
        "Seed": source.get("seed", ""),
        "Fingerprint of the training data": source.get("data", "not recorded"),
        "Hash of the settings": source.get("config_hash", ""),
        "Hash of the code": source.get("code", ""),
        "SHA-256 of the backbone file": loaded.file_sha256 or "",
    }
    lines = [[key, escaped(str(value))] for key, value in facts.items() if value not in ("", None)]
    parts = [
        f"# {name}",
        f"![{name}]({BADGE_FILE})",
        "A backbone without a head. It gives pooled features:",
        "```python\nimport timm\n\n"
        'model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()\n```',
        "## What it is",
        table(["fact", "value"], lines),
        "## Results",
        _table(results) if results else "No evaluation is recorded here.",
    ]
    return f"---\n{front}---\n\n" + "\n\n".join(parts) + "\n"


def _table(results: Sequence[Result]) -> str:
    lines = [
        [
            escaped(it.protocol.id),
            it.protocol.hash,
            it.label,
            f"{it.measure.mean:.2f}",
            interval(it.measure.interval) or "none: one seed",
            it.measure.interval_is,
            str(len(it.measure.values)),
        ]
        for it in results
    ]
    header = ["protocol", "hash", "metric", "mean", "95% interval", "interval is", "seeds"]
    said = (
        "The numbers are of the pretraining with all its seeds; this file is of one of them."
        if any(len(it.measure.values) > 1 for it in results)
        else "One seed: the numbers are of this file."
    )
    return f"{table(header, lines)}\n\n{said}"


def _metadata(loaded: Loaded, results: Sequence[Result], license_name: str) -> dict[str, Any]:
    """Return the card's front matter, with the results as hubs read them (`model-index`)."""
    metadata: dict[str, Any] = {
        "license": license_name,
        "library_name": "timm",
        "pipeline_tag": "image-feature-extraction",
        "tags": ["image-feature-extraction", "timm", "self-supervised", "kscl"],
    }
    entries = []
    for it in results:
        args: dict[str, Any] = {"seeds": len(it.measure.values)}
        if it.measure.interval:
            ends = _rounded(it.measure.interval)
            args |= {"interval_95": ends, "interval_is": it.measure.interval_is}
        metric = {"type": it.metric, "name": it.label, "value": round(it.measure.mean, 4)}
        entries.append(
            {
                "task": {"type": it.task},
                "dataset": {"type": it.protocol.hash, "name": it.protocol.id},
                "metrics": [metric | {"args": args}],
            }
        )
    if entries:
        metadata["model-index"] = [{"name": _name(loaded), "results": entries}]
    return metadata


def badge(name: str, results: Sequence[Result]) -> str:
    """Return a small picture with the row's name and its first number."""
    said = "no results"
    if results:
        first = results[0]
        said = f"{first.label} {first.measure.mean:.2f}"
        if first.measure.interval:
            said += f" [{first.measure.interval[0]:.2f}, {first.measure.interval[1]:.2f}]"
    left, right = (round(LETTER * len(words)) + 2 * PADDING for words in (name, said))
    shown = [html.escape("".join(c if c.isprintable() else " " for c in t)) for t in (name, said)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="22" role="img" '
        f'aria-label="{shown[0]}: {shown[1]}">'
        f'<rect width="{left}" height="22" fill="#3b4148"/>'
        f'<rect x="{left}" width="{right}" height="22" fill="#1a5fb4"/>'
        '<g fill="#fff" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11">'
        f'<text x="{PADDING}" y="15">{shown[0]}</text>'
        f'<text x="{left + PADDING}" y="15">{shown[1]}</text></g></svg>\n'
    )


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]
