"""Build the method's objects from a config."""

from __future__ import annotations

from fvcore.common.config import CfgNode

from kscl.errors import KsclError
from kscl.methods.batch_norm import synchronize_batch_norm
from kscl.methods.dictionary import Dictionary, MemoryBank, Minibatch, Queue
from kscl.methods.encoder import Encoder, build_encoder, feature_dim
from kscl.methods.learner import Learner
from kscl.registry import SIMILARITIES
from kscl.views.normalize import Normalize
from kscl.views.sizes import as_schedule, last_size


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
    if cfg.VIEWS.SMALL.COUNT:
        feature_dim(encoder.backbone, cfg.VIEWS.SMALL.SIZE, "VIEWS.SMALL.SIZE")
    return encoder


def build_learner(cfg: CfgNode, num_images: int | None = None) -> Learner:
    """Return the learner of a pretraining config; a memory bank needs the number of images."""
    method, encoder = cfg.METHOD, encoder_of(cfg)
    if cfg.SOLVER.SYNC_BATCH_NORM:
        synchronize_batch_norm(encoder)
    return Learner(
        encoder,
        build_dictionary(cfg, num_images),
        num_shots=method.NUM_SHOTS,
        num_queries=method.NUM_QUERIES,
        num_small=cfg.VIEWS.SMALL.COUNT,
        rho=method.RHO,
        similarity=method.SIMILARITY,
        temperature=method.TEMPERATURE,
        key_encoder=cfg.KEY_ENCODER.TYPE,
        momentum=cfg.KEY_ENCODER.MOMENTUM,
        key_batch_norm=cfg.KEY_ENCODER.BATCH_NORM,
        batch_norm_groups=cfg.KEY_ENCODER.BATCH_NORM_GROUPS,
        grad_through_keys=method.GRAD_THROUGH_KEYS,
        symmetric=method.SYMMETRIC,
        reduction=method.REDUCTION,
        normalize=Normalize(cfg.INPUT.MEAN, cfg.INPUT.STD),
    )


def build_dictionary(cfg: CfgNode, num_images: int | None) -> Dictionary:
    """Return the dictionary of a pretraining config, empty."""
    method, kind, dim = cfg.METHOD, cfg.DICTIONARY.TYPE, cfg.PROJECTOR.DIM
    similarity: str = method.SIMILARITY
    vectors = SIMILARITIES[similarity].max_rank(method.NUM_SHOTS, method.RHO)
    if kind == "queue":
        return Queue(cfg.DICTIONARY.QUEUE_LENGTH, vectors, dim, similarity=similarity)
    if kind == "minibatch":
        return Minibatch(similarity=similarity)
    if kind != "memory_bank":
        raise KsclError(
            f"DICTIONARY.TYPE: there is no dictionary '{kind}': choose queue, minibatch or "
            "memory_bank."
        )
    if num_images is None:
        raise KsclError("A memory bank needs to know how many images there are: give num_images.")
    momentum = cfg.DICTIONARY.BANK_MOMENTUM
    return MemoryBank(num_images, vectors, dim, momentum=momentum, similarity=similarity)
