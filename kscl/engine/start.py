"""Where the weights of a new run come from: its seed, or a file named by BACKBONE.WEIGHTS."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from fvcore.common.config import CfgNode

from kscl.backbone_file import RANDOM, load_backbone
from kscl.config.tree import config_values
from kscl.errors import KsclError
from kscl.method.learner import Learner
from kscl.runtime.files import sha256_of
from kscl.runtime.paths import is_url

log = logging.getLogger(__name__)


def start_from_weights(learner: Learner, cfg: CfgNode) -> dict[str, str]:
    """Load BACKBONE.WEIGHTS into both encoders; return the inputs of the record: its SHA-256."""
    weights = cfg.BACKBONE.WEIGHTS
    if not weights:
        return {}
    if weights == RANDOM:
        raise KsclError(
            f"BACKBONE.WEIGHTS is '{RANDOM}', but pretraining draws random weights from SEED by "
            "itself: leave it empty."
        )
    network = config_values(cfg)["BACKBONE"]
    with torch.random.fork_rng(devices=[]):  # a start from a file leaves all random streams alone
        loaded = load_backbone(
            weights,
            network["NAME"],
            network["KWARGS"],
            container=network["CONTAINER"] or None,
            prefix=network["PREFIX"] or None,
            mean=cfg.INPUT.MEAN,
            std=cfg.INPUT.STD,
        )
    for sentence in loaded.said:
        log.info(sentence)
    for encoder in (learner.encoder, learner.key_encoder):
        if encoder is not None:
            encoder.backbone.load_state_dict(loaded.backbone.state_dict())
    assert loaded.file_sha256 is not None  # only random weights have no file
    return {"weights": loaded.file_sha256}


def refuse_other_weights(cfg: CfgNode, before: str | None) -> None:
    """Raise if BACKBONE.WEIGHTS names another file now than the one that the run began with.

    `before` is the SHA-256 of that one. A file that is gone, or an address, is not compared.
    """
    weights = cfg.BACKBONE.WEIGHTS
    if before is None or is_url(weights) or not Path(weights).is_file():
        return
    now = sha256_of(Path(weights))
    if now != before:
        raise KsclError(
            f"BACKBONE.WEIGHTS {weights} does not hold the weights that this run began with "
            f"(SHA-256 {before[:16]} then, {now[:16]} now). Restore them, or start a new run in "
            "another OUTPUT_DIR."
        )
