"""A pretraining method: a registered class that turns views of images into a loss.

    @method("name")
    class Name(Method):
        WEIGHT = key(1.0, "Weight of the second term.", at_least=0)  # METHOD.WEIGHT

        def forward(self, batch): ...  # {"loss": …, further figures for the log}

The engine brings data, ranks, precision, optimizer, checkpoints, log and record. It knows nothing
of a method but what is declared here and in `MethodKeys`. docs/extending.md has a complete one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from kscl.methods.batch_norm import batch_norms, statistics, synchronize_batch_norm
from kscl.methods.encoder import Encoder, build_encoder, feature_dim
from kscl.methods.keys import MethodKeys, declared_keys
from kscl.registry import METHODS
from kscl.runtime.distributed import average_
from kscl.views.batch import Batch
from kscl.views.normalize import Normalize
from kscl.views.sizes import as_schedule, last_size

Kind = TypeVar("Kind", bound="type[Method]")


def method(name: str) -> Callable[[Kind], Kind]:
    """Register a method under the name that METHOD.NAME selects it by."""
    return lambda kind: METHODS.register(name, kind)


class Method(MethodKeys, nn.Module):
    """Holds all that changes in training: its state dict between two steps is the whole state.

    Its own keys are attributes: METHOD.WEIGHT is self.WEIGHT.
    """

    encoder: Encoder
    unit_length: ClassVar[bool] = True  # whether embeddings have length 1

    def __init__(
        self, cfg: CfgNode, num_images: int | None = None, encoder: Encoder | None = None
    ) -> None:
        super().__init__()
        self.cfg = cfg
        for name in declared_keys(type(self)):
            section, _, last = name.rpartition(".")
            if section == "METHOD":
                setattr(self, last, cfg.METHOD[last])
        self.encoder = encoder_of(cfg) if encoder is None else encoder
        self.encoder.unit = self.unit_length
        if cfg.SOLVER.SYNC_BATCH_NORM:
            synchronize_batch_norm(self.encoder)
        self.normalize = Normalize(cfg.INPUT.MEAN, cfg.INPUT.STD)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss of this rank's batch and detached figures for the log."""
        raise NotImplementedError

    def embed(self, views: Tensor, encoder: nn.Module | None = None) -> Tensor:
        """Return embeddings (B, V, D) of views (B, V, 3, H, W), each view a batch of its own."""
        encoder = self.encoder if encoder is None else encoder
        return torch.stack([encoder(self.normalize(view)) for view in views.unbind(1)], 1)

    @property
    def backbone(self) -> nn.Module:
        """Return the network that a run exports."""
        return self.encoder.backbone

    def encoders(self) -> list[Encoder]:
        """Return the encoder and its copies; a run compiles all, and may start them from a file."""
        return [module for module in self.modules() if isinstance(module, Encoder)]

    def param_groups(self) -> list[dict[str, Any]]:
        """Return groups of trained parameters; `lr_scale` multiplies the learning rate of one."""
        return [{"params": [weight for weight in self.parameters() if weight.requires_grad]}]

    def after_step(self, progress: float = 0.0) -> None:
        """Do what follows a step of the optimizer; progress is the part of the run behind it.

        Ranks see different images, but there is one state: BatchNorm's statistics are averaged.
        """
        average_([one for norm in batch_norms(self) for one in statistics(norm)])

    def setup_warnings(self, num_images: int | None, processes: int) -> Iterator[tuple[str, str]]:
        """Yield (key, sentence) of every setting that will harm a run on so many images.

        Their number is None in a check before they are there.
        """
        return iter(())

    def report_warnings(self, figures: Mapping[str, float]) -> Iterator[str]:
        """Yield what is wrong with the means of the figures since the last report."""
        return iter(())

    def final_warnings(self, curves: Mapping[str, Sequence[float]]) -> Iterator[str]:
        """Yield every sign that a finished run learned little: here, those of its last report."""
        if curves:
            yield from self.report_warnings({name: curve[-1] for name, curve in curves.items()})


def build_method(cfg: CfgNode, num_images: int | None = None) -> Method:
    """Return the method of a config, with random weights."""
    built: Method = METHODS[cfg.METHOD.NAME](cfg, num_images)
    if cfg.SOLVER.SYNC_BATCH_NORM:
        synchronize_batch_norm(built)  # the method's own layers too
    return built


def encoder_of(cfg: CfgNode) -> Encoder:
    """Return the encoder of a pretraining config; it takes views of every size."""
    encoder = build_encoder(
        cfg.BACKBONE.NAME,
        dict(cfg.BACKBONE.KWARGS),
        head=cfg.PROJECTOR.TYPE,
        hidden_dim=cfg.PROJECTOR.HIDDEN_DIM,
        dim=cfg.PROJECTOR.DIM,
        input_size=last_size(cfg.INPUT.SIZE),
    )
    for _, size in as_schedule(cfg.INPUT.SIZE)[:-1]:
        feature_dim(encoder.backbone, size)
    return encoder
