"""What every probe returns: the scores on val, and how they were obtained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kscl.records.record import Protocol
from linear_eval.score import Score


@dataclass(frozen=True)
class Classifier:
    """A linear layer on the backbone's features as the backbone gives them."""

    weight: Tensor  # (C, D)
    bias: Tensor  # (C,)


@dataclass(frozen=True)
class Outcome:
    """The result of a probe."""

    score: Score
    details: dict[str, Any] = field(default_factory=dict)  # for the record
    remark: str = ""  # for the line that a person reads
    classifier: Classifier | None = None
    part: str = ""  # of a run with several records: what the file of this one is called
    protocol: Protocol | None = None  # if it is not that of the run
    seed: int | None = None  # if it is not that of the run
