"""Published rows: shown beside ours for orientation, never ranked with them, never tested.

Publications have no protocol hash, so such a row is listed under a protocol's id only. An evaluator
gives a run that id only if all its settings are the publication's: train_net adds to it what is
not as shipped, the linear probe has another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

IMAGENET_LINEAR = "imagenet-linear-moco"
VOC_C4 = "voc0712-c4-24k-moco"

PAPER = "Xu, Xiong, Qi: K-Shot Contrastive Learning (arXiv 2007.13310)"
MOCO = "MoCo's repository (github.com/facebookresearch/moco)"
MOCO_VOC = f"{MOCO}, detection/README: means of 5 trials"
STD_OF_MOCO_VOC = {"AP50": 0.2, "AP": 0.2, "AP75": 0.4}


@dataclass(frozen=True)
class Reported:
    """One published row."""

    protocol: str  # id
    method: str
    epochs: int | None
    metrics: dict[str, float]
    source: str
    shots: int | None = None
    rho: float | None = None
    std: dict[str, float] = field(default_factory=dict)
    trials: int | None = None
    minutes_per_epoch: float | None = None
    setting: str = ""  # what distinguishes it from the others at a glance
    note: str = ""
    backbone: str = "resnet50"


def reported_rows(protocol_id: str) -> list[Reported]:
    """Return what was published under a protocol."""
    return [row for row in ROWS if row.protocol == protocol_id]


def _of_paper(
    method: str,
    epochs: int,
    top1: float,
    table: int,
    batch: int = 256,
    minutes: float | None = None,
    note: str = "",
    **settings: Any,
) -> Reported:
    return Reported(
        *(IMAGENET_LINEAR, method, epochs, {"top1": top1}, f"{PAPER}, table {table}"),
        minutes_per_epoch=minutes,
        setting=f"batch {batch}",
        note=note or ("minutes per epoch on 8 V100" if minutes else ""),
        **settings,
    )


def _of_moco(method: str, top1: float, std: float) -> Reported:
    return Reported(
        *(IMAGENET_LINEAR, method, 200, {"top1": top1}, f"{MOCO}, README"),
        shots=1,
        std={"top1": std},
        trials=5,
        setting="batch 256",
        note="5 pretrainings, each with its probe",
    )


def _voc(method: str, epochs: int | None, *aps: float, **settings: Any) -> Reported:
    """Return a row of VOC detection; the paper repeats MoCo's, and gives no trials for KSCL's."""
    metrics = dict(zip(STD_OF_MOCO_VOC, aps, strict=True))
    if method == "kscl":
        own: dict[str, Any] = {"rho": 0.4, "note": "number of trials not stated"}
        return Reported(VOC_C4, method, epochs, metrics, f"{PAPER}, table 3", **settings | own)
    own = {"note": "std stated for the whole table", "std": STD_OF_MOCO_VOC, "trials": 5}
    return Reported(VOC_C4, method, epochs, metrics, MOCO_VOC, **own | settings)


ROWS = (
    _of_paper("simclr", 200, 61.9, 1),
    _of_paper("simclr", 200, 66.6, 1, batch=8192),
    _of_paper("simclr", 1000, 69.3, 1, batch=4096),
    _of_paper("moco_v1", 200, 60.5, 1, shots=1),
    _of_moco("moco_v1", 60.8, std=0.2),
    _of_paper("moco_v2", 200, 67.5, 1, shots=1, note="rerun by the paper"),
    _of_moco("moco_v2", 67.5, std=0.1),
    _of_paper("moco_v2", 800, 70.6, 1, shots=1, note="rerun by the paper; 71.1 published by MoCo"),
    _of_paper("kscl", 200, 67.2, 2, shots=1, minutes=16),
    _of_paper("kscl", 200, 68.5, 2, shots=3, rho=0.4, minutes=26),
    _of_paper("kscl", 200, 68.8, 2, shots=5, rho=0.4, minutes=37),
    _of_paper("kscl", 200, 68.4, 2, shots=5, rho=0.9, minutes=37),
    _of_paper("kscl", 800, 71.4, 1, shots=5, rho=0.4),
    _voc("supervised", None, 81.3, 53.5, 58.8, note="MSRA ResNet-50 trained on ImageNet labels"),
    _voc("moco_v1", 200, 81.5, 55.9, 62.6, shots=1),
    _voc("moco_v2", 200, 82.4, 57.0, 63.6, shots=1),
    _voc("moco_v2", 800, 82.5, 57.4, 64.0, shots=1),
    _voc("kscl", 200, 82.4, 57.1, 63.9, shots=5),
    _voc("kscl", 800, 82.7, 57.5, 64.2, shots=5),
)

# The paper's table 2: (K, ρ) → minutes per epoch
MINUTES_OF_PAPER = {
    (row.shots, row.rho): row.minutes_per_epoch for row in ROWS if row.minutes_per_epoch
}
