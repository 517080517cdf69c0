"""What a step asks of a GPU: host synchronizations and collectives, with the line that asked."""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = tuple(str(ROOT / name) for name in ("kscl", "linear_eval", "detection"))

# Operations whose result, or its size, the host must know: on CUDA it waits for the device.
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "_linalg_eigh",  # looks at its `info`
    "_linalg_svd",
    "nms",
}


@dataclass
class Meter:
    """Counts, by (what, where), since the last `reset`."""

    syncs: Counter[tuple[str, str]] = field(default_factory=Counter)
    collectives: Counter[tuple[str, str]] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)  # bytes, by collective
    copies: int = 0  # to or from the host, that nobody waits for
    step: int = 0

    def reset(self) -> None:
        """Forget all counts."""
        for counts in (self.syncs, self.collectives, self.received):
            counts.clear()
        self.copies = 0

    def wait(self, what: str) -> None:
        """Count that the host waits for the device."""
        self.syncs[what, project_line()] += 1

    def exchange(self, what: str, num_bytes: int) -> None:
        """Count a collective, and the bytes that this rank receives."""
        self.collectives[what, project_line()] += 1
        self.received[what] += num_bytes

    def told(self) -> str:
        """Return all counts, for the message of an assertion."""
        counts = [*self.syncs.items(), *self.collectives.items()]
        return "\n".join(f"{n} x {what} at {line}" for (what, line), n in counts)


def project_line() -> str:
    """Return the innermost line of the project on the stack."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        name = frame.f_code.co_filename
        if name.startswith(PACKAGES):
            return f"{Path(name).relative_to(ROOT)}:{line}"
    return "elsewhere"
