"""K-shot contrastive learning, the paper; MoCo and SimCLR are its settings with K = 1.

    embed      v, the query, and v_n^k, the keys, k = 1 … K: unit embeddings of views of image n
    fit        W̃_n, the subspace of the keys (sections 4.1 and 4.2)
    positive   ‖W̃_nᵀ v‖, and negatives ‖W̃_mᵀ v‖ of every other instance m of the dictionary
    loss       −log p(n|v), equation 3: the softmax of these lengths / τ

`KSCL.forward` is that and nothing else. What the paper does not have stands below it: several and
small queries of an image, the symmetric loss, remembered keys, and how BatchNorm sees the keys.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor

from kscl.errors import KsclError
from kscl.methods.base import Method, method
from kscl.methods.batch_norm import (
    batch_norms,
    calibrate_batch_norm,
    fixed_statistics,
    group_batch_norms,
    in_mode,
    statistics,
)
from kscl.methods.dictionary import Dictionary
from kscl.methods.encoder import Encoder, feature_dim
from kscl.methods.keys import Kscl, keys_per_step
from kscl.methods.remember import Remembered
from kscl.methods.similarity import Similarity
from kscl.methods.subspace import Subspaces
from kscl.registry import DICTIONARIES, SIMILARITIES
from kscl.runtime.distributed import Shuffle, average_, rank, world_size
from kscl.runtime.precision import weights_cast_once
from kscl.views.batch import Batch

COLLAPSED = 0.01  # spread of the embeddings: their mean is then nearly a unit vector
NEAR_CHANCE = 3.0  # times the chance to name the right instance
FALLEN = 0.7  # of the best quarter's top-1: below, the last quarter has fallen
FEWEST_REPORTS = 8  # of the log; fewer have no quarters
FEWEST_IMAGES = 16  # to find the own one among; with fewer, chance is too good


@method("kscl")
class KSCL(Kscl, Method):
    """The keys are explained in docs/config.md. Views are (B, Q+K, 3, H, W), the queries first."""

    steps: Tensor  # () calls of after_step

    def __init__(
        self, cfg: CfgNode, num_images: int | None = None, encoder: Encoder | None = None
    ) -> None:
        super().__init__(cfg, num_images, encoder)
        keys = cfg.KEY_ENCODER
        if cfg.VIEWS.SMALL.COUNT and encoder is None:
            feature_dim(self.encoder.backbone, cfg.VIEWS.SMALL.SIZE, "VIEWS.SMALL.SIZE")
        self.similarity: Similarity = SIMILARITIES[self.SIMILARITY]
        kind: type[Dictionary] = DICTIONARIES[cfg.DICTIONARY.TYPE]
        self.dictionary = kind.from_config(cfg, num_images)
        self.remembered = self.ring(num_images) if self.REMEMBER else None
        self.averaged_norm = keys.BATCH_NORM == "eval"
        self.groups = keys.BATCH_NORM_GROUPS
        group_batch_norms(self.encoder, self.groups)
        self.key_encoder: Encoder | None = None  # the encoder itself is shared
        if keys.TYPE == "momentum":
            self.key_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
            # A walk through all modules takes as long as the update itself: once is enough.
            self._ours = list[Tensor](self.key_encoder.parameters())
            self._theirs = list[Tensor](self.encoder.parameters())
        self._batch_norms = batch_norms(self.encoder)
        if self.averaged_norm and self.key_encoder is not None and not self._batch_norms:
            raise KsclError(
                f"KEY_ENCODER.BATCH_NORM is eval, but {self.cfg.BACKBONE.NAME} with its projector "
                "has no BatchNorm. Set it to train."
            )
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self._steps = 0  # host-side copy; avoids a device sync
        self._staged: list[tuple[Subspaces, Tensor]] = []  # of forward passes since after_step
        self.register_load_state_dict_post_hook(_begin_anew)
        self.train()

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss of a batch, and figures of each image's first query."""
        query, further, keys = self.embed_batch(batch)  # v (M, D), v_n^k (M, K, D)
        instance = self.instances(batch)  # n (M,)
        own = self.fit(batch, query, keys)  # W̃_n (M, L, D)
        if further is None:
            positive = self.similarity.own(query, own.basis)  # ‖W̃_nᵀ v‖, (M,)
            log_sum, hardest = self.dictionary.negatives(
                query, instance, own.basis, instance, self.TEMPERATURE
            )  # log Σ_m exp(‖W̃_mᵀ v‖ / τ), (M,)
            # −log p(n|v), equation 3: −log of exp(s⁺/τ) / (exp(s⁺/τ) + Σ exp(s⁻/τ))
            losses = F.softplus(log_sum - positive / self.TEMPERATURE)  # (M,)
        else:
            losses, positive, hardest = self.of_all_queries(query, further, instance, own)
        own = Subspaces(*(part.detach() for part in own))
        if self.training:
            self._staged.append((own, instance))  # `after_step` fills the dictionary
        loss = losses.mean() if self.REDUCTION == "mean" else losses.sum() / len(batch.views)
        return {"loss": loss, **self.measure(query, own, positive, hardest)}

    @torch.no_grad()
    def measure(
        self, query: Tensor, own: Subspaces, positive: Tensor, hardest: Tensor
    ) -> dict[str, Tensor]:
        """Return the figures that tell a healthy training from a collapsed one."""
        figures = {
            "instance_top1": (positive > hardest).float().mean(),
            "mean_rank": own.rank.float().mean(),
            "eigenvalue_mass": own.mass.mean(),
            "positive_length": positive.mean(),
            "hardest_negative_length": hardest.mean(),  # -1 while there is none
            "embedding_spread": 1 - query.mean(0).square().sum(),  # 0 when collapsed
        }
        if not self.dictionary.in_batch and len(query) > 1:
            # Among the batch alone: no negative is older than the positive, or not there yet.
            every = self.similarity.every(query, own.basis)  # (B, B)
            rivals = every.fill_diagonal_(-torch.inf).amax(1)
            figures["batch_top1"] = (positive > rivals).float().mean()
        if not self.similarity.signed:  # a mean of keys has no eigenvalues
            fractions = own.fractions.mean(0).unbind()  # K numbers, of the mass, the largest first
            figures |= {f"eigenvalue_{number}": f for number, f in enumerate(fractions, 1)}
        return figures

    @torch.no_grad()
    def after_step(self, progress: float = 0.0) -> None:
        """Store the subspaces of this step's batches; let the key encoder follow the encoder."""
        for subspaces, instance in self._staged:
            self.dictionary.store(subspaces, instance)
        self._staged.clear()
        if self.remembered is not None:
            self.remembered.store()
        trained = [self.encoder]  # whose BatchNorm statistics forward passes change
        if self.key_encoder is not None and not self.averaged_norm:
            trained.append(self.key_encoder)
        average_([one for encoder in trained for one in statistics(encoder)])
        if self.key_encoder is not None:
            self.follow(self.key_encoder)
        self.steps += 1
        self._steps += 1

    def follow(self, key_encoder: Encoder) -> None:
        """Move the momentum encoder: θ_k ← m θ_k + (1 − m) θ_q (MoCo, section 3.2).

        BatchNorm statistics follow too only where the momentum encoder makes none itself.
        """
        rate = 1 - self.cfg.KEY_ENCODER.MOMENTUM
        torch._foreach_lerp_(self._ours, self._theirs, rate)
        if self.averaged_norm:
            torch._foreach_lerp_(statistics(key_encoder), statistics(self.encoder), rate)

    def train(self, mode: bool = True) -> KSCL:
        """Switch the mode; a key encoder with averaged BatchNorm statistics stays in eval mode."""
        super().train(mode)
        if self.key_encoder is not None and self.averaged_norm:
            self.key_encoder.eval()
        return self

    def instances(self, batch: Batch) -> Tensor:
        """Return a number (M,) per query that tells instances apart."""
        views = batch.views
        if self.dictionary.by_index:
            return batch.instances.to(views.device, non_blocking=True)
        index = torch.arange(len(views), device=views.device) + rank() * len(views)
        return index.repeat_interleave(self.NUM_SHOTS + 1) if self.SYMMETRIC else index

    # Embedding: queries in one BatchNorm batch, keys shuffled over ranks and groups

    def embed_batch(self, batch: Batch) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return queries (M, D), further queries (B, E, D) if any, and keys (M, K, D)."""
        if self.SYMMETRIC:
            return self.each_view_in_turn(batch)
        keys = batch.views[:, self.NUM_QUERIES :]
        if self.training and self.averaged_norm and not self._staged and self._steps == 0:
            self.calibrate(keys)
        sent = self._send(keys)  # they travel while the queries are encoded
        queries = self.together(batch.views[:, : self.NUM_QUERIES])  # (B, Q, D)
        further = [queries[:, 1:]] if self.NUM_QUERIES > 1 else []
        if batch.small is not None:
            further.append(self.embed_small(batch.small))
        every = torch.cat(further, 1) if further else None  # (B, E, D), E = Q − 1 + S
        return queries[:, 0], every, self.embed_keys(keys, sent)

    def together(self, views: Tensor) -> Tensor:
        """Return embeddings (B, V, D) of views (B, V, 3, H, W), all of them in one batch.

        All views of an image are in the same one of G groups, which are n = B / G images each.
        """
        groups = self.groups if self.training else 1
        shape = groups, views.shape[1], len(views) // groups  # G, V, n
        images = views.unflatten(0, (groups, -1)).transpose(1, 2)  # (G, V, n, 3, H, W)
        embeddings = self.encoder(self.normalize(images.flatten(0, 2)))  # (G · V · n, D)
        return embeddings.unflatten(0, shape).transpose(1, 2).flatten(0, 1)

    def embed_keys(self, views: Tensor, sent: Shuffle | None = None) -> Tensor:
        """Return unit embeddings (B, K, D) of key views (B, K, 3, H, W), perhaps sent already."""
        if self.key_encoder is None:
            with torch.set_grad_enabled(self.GRAD_THROUGH_KEYS and torch.is_grad_enabled()):
                return self.embed(views)
        with torch.no_grad(), weights_cast_once(self.key_encoder):
            encoder, sent = self.key_encoder, sent or self._send(views)
            if sent is not None:
                return sent.encode(lambda images: encoder(self.normalize(images)))
            if views.device.type == "cpu":  # whose cache holds one view's batch
                return self.embed(views, encoder)
            keys = encoder(self.normalize(views.transpose(0, 1).flatten(0, 1)))  # (K · B, D)
            return keys.unflatten(0, (views.shape[1], len(views))).transpose(0, 1)

    @torch.no_grad()
    def _send(self, views: Tensor) -> Shuffle | None:
        """Begin to deal key views (B, K, 3, H, W) anew among the ranks, if BatchNorm needs that."""
        if self.key_encoder is None or not (self._batch_norms and self.key_encoder.training):
            return None  # an embedding does not depend on its companions, or gradients flow back
        return Shuffle(views, 100_003 * self._steps + 1_009 * len(self._staged), self.groups)

    def calibrate(self, keys: Tensor) -> None:
        """Start with BatchNorm statistics of key views (B, K, 3, H, W), if these stay averaged."""
        assert self.key_encoder is not None
        with in_mode(self.key_encoder, training=True):  # as the query encoder makes its own
            calibrate_batch_norm(self.key_encoder, (self.normalize(key) for key in keys.unbind(1)))
        calibrated = statistics(self.key_encoder)
        average_(calibrated)
        torch._foreach_copy_(statistics(self.encoder), calibrated)

    # Beyond the paper: the symmetric loss, and several queries of an image

    def each_view_in_turn(self, batch: Batch) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return each of K+1 views as a query (M, D), M = B(K+1), and the K others as its keys.

        Negatives are all K+1 subspaces, each without one view, of every other instance: 1 + (K+1)
        (N − 1) candidates, with K = 1 and cosine the 2N − 1 of SimCLR's NT-Xent. All views share
        one BatchNorm batch.
        """
        every = self.together(batch.views)  # (B, K+1, D)
        keys = leave_one_out(every).flatten(0, 1)  # (M, K, D)
        further = None if batch.small is None else self.embed_small(batch.small)
        return every.flatten(0, 1), further, keys if self.GRAD_THROUGH_KEYS else keys.detach()

    def ring(self, num_images: int | None) -> Remembered:
        """Return room for the keys of METHOD.REMEMBER epochs."""
        assert num_images is not None
        if self.similarity.weigh is None:
            raise KsclError(
                f"METHOD.REMEMBER is {self.REMEMBER}, but METHOD.SIMILARITY {self.SIMILARITY} does "
                "not say how keys are weighed: give it `weigh`, or set METHOD.REMEMBER 0."
            )
        return Remembered(
            num_images,
            self.REMEMBER,
            keys_per_step(self.cfg),
            self.cfg.PROJECTOR.DIM,
            decay=self.REMEMBER_DECAY,
            on_host=self.REMEMBER_IN == "host",
        )

    def fit(self, batch: Batch, query: Tensor, keys: Tensor) -> Subspaces:
        """Return the subspaces (M, L, D) of the keys (M, K, D) and of those remembered, if any.

        In the symmetric loss an image's keys are all its views, which are the queries (M, D).
        """
        if self.remembered is None:
            return self.similarity.fit(keys, self.RHO)
        assert self.similarity.weigh is not None
        every, weight = self.remembered.beside(keys, batch.instances)
        if self.training:
            fresh = query.unflatten(0, (len(batch.views), -1)) if self.SYMMETRIC else keys
            self.remembered.stage(fresh, batch.instances)
        return self.similarity.fit(self.similarity.weigh(every, weight), self.RHO)

    def embed_small(self, small: Tensor) -> Tensor:
        """Return embeddings (B, S, D) of small queries (B, S, 3, h, w).

        Their BatchNorm batch is their own, and leaves the running statistics alone: those are for
        keys and for users of the backbone, whose images have the full size.
        """
        with fixed_statistics(self._batch_norms):
            return self.together(small)

    def of_all_queries(
        self, query: Tensor, further: Tensor, instance: Tensor, own: Subspaces
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses (M + B · E,) of queries (M, D) and of further ones (B, E, D).

        Beside them stand the positives and the hardest negatives of the first ones, (M,) each. An
        image has G = M / B subspaces: one, or one per view if symmetric. The loss of a further
        query is the mean over these.
        """
        images, extra = further.shape[:2]
        everyone = torch.cat([query, further.flatten(0, 1)])  # (M + B · E, D)
        of_image = instance.view(images, -1)[:, :1].expand(images, extra)  # (B, E)
        whose = torch.cat([instance, of_image.flatten()])  # (M + B · E,)
        negatives = self.dictionary.negatives(
            everyone, whose, own.basis, instance, self.TEMPERATURE
        )
        log_sum, further_log_sum = negatives.log_sum.split([len(query), images * extra])
        positive = self.similarity.own(query, own.basis)  # (M,)
        losses = F.softplus(log_sum - positive / self.TEMPERATURE)  # (M,)
        bases = own.basis.unflatten(0, (images, 1, -1))  # (B, 1, G, L, D)
        groups = bases.shape[2]
        bases = bases.expand(images, extra, *bases.shape[2:]).flatten(0, 2)  # (B · E · G, L, D)
        each = further[:, :, None].expand(images, extra, groups, -1).flatten(0, 2)
        lengths = self.similarity.own(each, bases).view(images * extra, groups)
        more = F.softplus(further_log_sum[:, None] - lengths / self.TEMPERATURE).mean(1)
        return torch.cat([losses, more]), positive, negatives.hardest[: len(query)]

    # Health

    def setup_warnings(self, num_images: int | None, processes: int) -> Iterator[tuple[str, str]]:
        """Yield a queue as long as the data, and keys that BatchNorm does not shuffle."""
        keys, length = self.cfg.KEY_ENCODER, self.cfg.DICTIONARY.QUEUE_LENGTH
        is_queue = self.cfg.DICTIONARY.TYPE == "queue"
        if is_queue and num_images is not None and length >= num_images:
            yield (
                "DICTIONARY.QUEUE_LENGTH",
                f"The queue of {length} is as long as the data ({num_images} images), so it holds "
                "the query's own image as a negative. Set DICTIONARY.QUEUE_LENGTH lower.",
            )
        if self.key_encoder is None or self.averaged_norm or not self._batch_norms:
            return
        if self.cfg.SOLVER.SYNC_BATCH_NORM:
            yield (
                "SOLVER.SYNC_BATCH_NORM",
                "With SOLVER.SYNC_BATCH_NORM a query and its keys are normalized with the same "
                "images, those of all processes, by which they can recognize each other. Set it to "
                "False.",
            )
        elif processes * keys.BATCH_NORM_GROUPS == 1:
            yield (
                "KEY_ENCODER.BATCH_NORM_GROUPS",
                "One process with one BatchNorm group shuffles no keys: a query and its keys are "
                "normalized with the same other images, by which they can recognize each other. "
                "Set KEY_ENCODER.BATCH_NORM_GROUPS to 8, or to fewer groups of about 8 images.",
            )

    def report_warnings(self, figures: Mapping[str, float]) -> Iterator[str]:
        """Yield a collapse."""
        if figures["embedding_spread"] < COLLAPSED:
            yield (
                "The embeddings have collapsed: all images look alike to the encoder (spread "
                f"{figures['embedding_spread']:.4f}). Lower the learning rate (SOLVER.BASE_LR), "
                "warm up longer (SOLVER.WARMUP_EPOCHS), or let the key encoder follow more slowly "
                "(KEY_ENCODER.MOMENTUM)."
            )

    def final_warnings(self, curves: Mapping[str, Sequence[float]]) -> Iterator[str]:
        """Yield a top-1 near chance, or one that fell.

        Not the top-1 among the queue: that is high while the queue fills, and while the encoder
        moves fast, since the queue's older entries are then easy to tell from the present ones.
        """
        in_batch, solver = self.dictionary.in_batch, self.cfg.SOLVER
        curve = curves.get("instance_top1" if in_batch else "batch_top1", ())
        images = solver.BATCH_SIZE / (1 if in_batch else solver.GRAD_ACCUM_STEPS * world_size())
        top1 = _quarters(curve) if images >= FEWEST_IMAGES else []
        if top1 and top1[-1] < NEAR_CHANCE / images:
            yield (
                f"The batch top-1 ended at {top1[-1]:.1%}, near chance ({1 / images:.1%}): nothing "
                "was learned. Train longer, or with crops or tiles that two views of an image "
                "share."
            )
        elif top1 and top1[-1] < FALLEN * max(top1):
            yield (
                f"The batch top-1 fell from {max(top1):.1%} to {top1[-1]:.1%}: the embeddings "
                "collapse. Lower the learning rate."
            )


def leave_one_out(embeddings: Tensor) -> Tensor:
    """Return for each of K+1 views (B, K+1, D) the K others, in order: (B, K+1, K, D)."""
    views = torch.arange(embeddings.shape[1], device=embeddings.device)
    others = views[:-1] + (views[:-1] >= views[:, None])  # (K+1, K)
    return embeddings[:, others]


def _begin_anew(learner: KSCL, _: object) -> None:
    learner._staged.clear()
    learner._steps = int(learner.steps)


def _quarters(curve: Sequence[float]) -> list[float]:
    """Return the means of the four quarters of a curve; of a short one, its last value alone."""
    if len(curve) < FEWEST_REPORTS:
        return list(curve[-1:])
    size = len(curve) // 4
    last = curve[-4 * size :]
    return [sum(last[i * size : (i + 1) * size]) / size for i in range(4)]
