"""How far the training of a probe is: all that its checkpoints store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn

Trained = TypeVar("Trained", bound=nn.Module)


@dataclass
class Progress(Generic[Trained]):
    """The state between two steps, the same on all ranks."""

    module: Trained
    optimizer: torch.optim.SGD
    step: int = 0
    loss_sum: float = 0.0  # of the images of this epoch so far
    epochs: list[Any] = field(default_factory=list)  # what is reported of each

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **{name: getattr(self, name) for name in ("step", "loss_sum", "epochs")},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.loss_sum = state["step"], state["loss_sum"]
        self.epochs = list(state["epochs"])
