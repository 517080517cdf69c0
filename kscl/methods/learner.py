"""The learner: views in, loss and health figures out. KSCL, MoCo and SimCLR are settings of it.

    embed      v = encoder(view 0), the query; v_n^k = key encoder(view k), the keys, k = 1 … K
    fit        W̃_n = fit_subspaces(v_n^1 … v_n^K, ρ), the query's own instance
    positive   ‖W̃_nᵀ v‖
    negatives  ‖W̃_mᵀ v‖ for every other instance m of the dictionary
    loss       −log p(n|v), equation 3: the softmax of these lengths / τ

An image may have several queries, full-size and small ones (multi-crop): its keys are embedded and
fitted once, and the loss is the mean over all queries (or their sum, see `reduction`).

One training step is

    losses = learner(views)              # any number of times, if gradients are accumulated
    losses["loss"].backward()
    optimizer.step()
    learner.after_step()                 # updates dictionary and key encoder, here and only here
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kscl.methods.batch_norm import (
    batch_norms,
    calibrate_batch_norm,
    copy_statistics,
    fixed_statistics,
    group_batch_norms,
    in_mode,
    statistics,
)
from kscl.methods.checks import FiniteCheck, check_finite, check_input, check_settings
from kscl.methods.dictionary import Dictionary, MemoryBank, Minibatch, Negatives
from kscl.methods.encoder import Encoder
from kscl.methods.kernels import full_precision
from kscl.methods.momentum import MomentumUpdate, make_momentum_encoder
from kscl.methods.subspace import Subspaces
from kscl.registry import SIMILARITIES
from kscl.runtime.distributed import Shuffle, average_, rank
from kscl.runtime.precision import weights_cast_once


class Learner(nn.Module):
    """Holds all that changes in training: its state dict between two steps is the whole state.

    num_shots          K, the number of keys per image
    num_queries        Q; views are (B, Q+K, 3, H, W), the queries first
    num_small          S, the number of small queries per image, a tensor (B, S, 3, h, w) of its own
    similarity         a name in `kscl.registry.SIMILARITIES`
    key_encoder        "momentum", a slow copy of the encoder; or "shared", the encoder itself
    key_batch_norm     "train": each key view is a BatchNorm batch of its own, shuffled over ranks;
                       "eval": fixed statistics, moving averages of the query encoder's
    batch_norm_groups  G: BatchNorm normalizes G equal parts of a rank's batch on their own, and
                       keys are shuffled over the parts too, as if there were G times the ranks
    grad_through_keys  train the keys as well (minibatch dictionary, shared encoder)
    symmetric          each view in turn is the query, and the K others span its instance's subspace
                       (minibatch dictionary, shared encoder). Its negatives are all K+1 subspaces,
                       each without one view, of every other instance; the other K subspaces of its
                       own instance, which contain it, do not count. So 1 + (K+1)(N−1) candidates:
                       with K = 1 and cosine the 2N − 1 of SimCLR's NT-Xent. The loss of a small
                       query is the mean over the K+1 subspaces of its instance. All views share
                       one BatchNorm batch.
    reduction          "mean" over all queries; or "sum" over the queries of an image, and the mean
                       over images (with K = 1, symmetric: SimCLR's loss of both directions)
    normalize          makes an encoder's input of views that are bytes; they stay bytes on their
                       way between ranks
    """

    steps: Tensor  # () calls of after_step

    def __init__(
        self,
        encoder: Encoder,
        dictionary: Dictionary,
        *,
        num_shots: int = 5,
        num_queries: int = 1,
        num_small: int = 0,
        rho: float = 0.4,
        similarity: str = "projection",
        temperature: float = 0.2,
        key_encoder: str = "momentum",
        momentum: float = 0.999,
        key_batch_norm: str = "train",
        batch_norm_groups: int = 1,
        grad_through_keys: bool = False,
        symmetric: bool = False,
        reduction: str = "mean",
        normalize: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.dictionary = dictionary
        self.num_shots = num_shots
        self.num_queries = num_queries
        self.num_small = num_small
        self.rho = rho
        self.similarity = SIMILARITIES[similarity]
        self.temperature = temperature
        self.momentum = momentum
        self.shared = key_encoder == "shared"
        self.averaged_norm = key_batch_norm == "eval"
        self.groups = batch_norm_groups
        self.grad_through_keys = grad_through_keys
        self.symmetric = symmetric
        self.reduction = reduction
        self.normalize = normalize
        self.max_rank = self.similarity.max_rank(num_shots, rho)
        check_settings(self, key_encoder, key_batch_norm)
        group_batch_norms(encoder, self.groups)
        self.key_encoder = None if self.shared else make_momentum_encoder(encoder)
        if self.key_encoder is not None:
            self._follow = MomentumUpdate(self.key_encoder, encoder, self.averaged_norm)
        self._batch_norms = batch_norms(encoder)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self._steps = 0  # the same number, for which a GPU need not be asked
        self.check_finite = FiniteCheck()
        self._pending: list[tuple[Subspaces, Tensor]] = []  # of forward passes since after_step
        self._seen_weights = -1
        self.register_load_state_dict_post_hook(_begin_anew)
        self.train()

    def forward(
        self, views: Tensor, indices: Tensor | None = None, small: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the loss of views (B, Q+K, 3, H, W), and detached figures of this rank's batch.

        The figures are those of each image's first query, to compare settings by.
        """
        check_input(self, views, indices, small)
        self._check_loop()
        # (M, D), (B, E, D), (M, K, D); M = B, or B(K+1) if symmetric; E = Q − 1 + S
        query, more, keys = self._embed(views, small)
        instance = self._instances(len(views), indices, query.device)  # (M,)
        with full_precision(query, more, keys) as (query, more, keys):
            embeddings = {"query_embeddings": query, "key_embeddings": keys}
            if more.numel():
                embeddings["further_query_embeddings"] = more
            try:
                own = self.similarity.fit(keys, self.rho)  # basis (M, L, D)
            except torch.linalg.LinAlgError:
                check_finite(self._steps, views, **embeddings)  # NaN has no eigenvalues
                raise
            positive = self.similarity.own(query, own.basis)  # (M,)
            negatives = self._negatives(query, more, instance, own.basis)
            log_sum, more_log_sum = negatives.log_sum.split([len(query), more.shape[:2].numel()])
            # −log of exp(s⁺/τ) / (exp(s⁺/τ) + Σ exp(s⁻/τ))
            losses = F.softplus(log_sum - positive / self.temperature)  # (M,)
            if more.numel():
                losses = torch.cat([losses, self._more_losses(more, own.basis, more_log_sum)])
            loss = losses.mean() if self.reduction == "mean" else losses.sum() / len(views)
            self.check_finite(self._steps, views, **embeddings, loss=loss)
        own = Subspaces(*(part.detach() for part in own))
        if self.training:
            self._pending.append((own, instance))
            self._seen_weights = self._weights_version()
        hardest = negatives.hardest[: len(query)]
        return {"loss": loss, **self._figures(query, own, positive, hardest)}

    def _negatives(self, query: Tensor, more: Tensor, instance: Tensor, basis: Tensor) -> Negatives:
        """Compare the queries (M, D) and (B, E, D) with the other instances: (M + B · E,) each."""
        owners = instance
        if more.numel():
            images, extra = more.shape[:2]
            query = torch.cat([query, more.flatten(0, 1)])
            of_image = instance.view(images, -1)[:, :1].expand(images, extra)  # (B, E)
            instance = torch.cat([instance, of_image.flatten()])
        return self.dictionary.negatives(query, instance, basis, owners, self.temperature)

    def _more_losses(self, more: Tensor, basis: Tensor, log_sum: Tensor) -> Tensor:
        """Return the losses (B · E,) of further queries (B, E, D), of bases (M, L, D).

        An image has G = M / B subspaces: one, or one per view if symmetric.
        """
        images, extra = more.shape[:2]
        own = basis.unflatten(0, (images, 1, -1))  # (B, 1, G, L, D)
        groups = own.shape[2]
        own = own.expand(images, extra, *own.shape[2:]).flatten(0, 2)  # (B · E · G, L, D)
        positive = self.similarity.own(
            more[:, :, None].expand(images, extra, groups, -1).flatten(0, 2), own
        ).view(images * extra, groups)
        return F.softplus(log_sum[:, None] - positive / self.temperature).mean(1)

    @torch.no_grad()
    def _figures(
        self, query: Tensor, own: Subspaces, positive: Tensor, hardest: Tensor
    ) -> dict[str, Tensor]:
        """Return what tells a healthy training from a collapsed one."""
        figures = {
            "instance_top1": (positive > hardest).float().mean(),
            "mean_rank": own.rank.float().mean(),
            "eigenvalue_mass": own.mass.mean(),
            "positive_length": positive.mean(),
            "hardest_negative_length": hardest.mean(),  # -1 while there is none
            "embedding_spread": 1 - query.mean(0).square().sum(),  # 0 when collapsed
        }
        if not isinstance(self.dictionary, Minibatch) and len(query) > 1:
            # Among the batch alone: no negative is older than the positive, or not there yet.
            every = self.similarity.every(query, own.basis)  # (B, B)
            rivals = every.fill_diagonal_(-torch.inf).amax(1)
            figures["batch_top1"] = (positive > rivals).float().mean()
        if not self.similarity.signed:  # a mean of keys has no eigenvalues
            fractions = own.fractions.mean(0).unbind()  # K numbers, of the mass, the largest first
            figures |= {f"eigenvalue_{number}": f for number, f in enumerate(fractions, 1)}
        return figures

    @torch.no_grad()
    def after_step(self) -> None:
        """Store the subspaces of this step's batches; let the key encoder follow the encoder."""
        for subspaces, instance in self._pending:
            self.dictionary.store(subspaces, instance)
        self._pending.clear()
        average_(self.own_statistics())
        if self.key_encoder is not None:
            self._follow(self.momentum)
        self.steps += 1
        self._steps += 1

    def own_statistics(self) -> list[Tensor]:
        """Return the BatchNorm statistics that forward passes change.

        Ranks see different images, but there is one state: these are averaged every step.
        """
        if self.key_encoder is None or self.averaged_norm:
            return statistics(self.encoder)
        return [*statistics(self.encoder), *statistics(self.key_encoder)]

    def train(self, mode: bool = True) -> Learner:
        """Switch the mode; a key encoder with averaged BatchNorm statistics stays in eval mode."""
        super().train(mode)
        if self.key_encoder is not None and self.averaged_norm:
            self.key_encoder.eval()
        return self

    def embed_keys(self, views: Tensor, sent: Shuffle | None = None) -> Tensor:
        """Return unit embeddings (B, K, D) of key views (B, K, 3, H, W), perhaps sent already."""
        if self.key_encoder is None:
            with torch.set_grad_enabled(self.grad_through_keys and torch.is_grad_enabled()):
                return self._each(self.encoder, views)
        with torch.no_grad(), weights_cast_once(self.key_encoder):
            encoder, sent = self.key_encoder, sent or self._send(views)
            if sent is not None:
                return sent.encode(lambda images: encoder(self._input(images)))
            if views.device.type == "cpu":  # whose cache holds one view's batch
                return self._each(encoder, views)
            together = views.transpose(0, 1).flatten(0, 1)  # (K · B, 3, H, W)
            keys = encoder(self._input(together))  # (K · B, D)
            return keys.unflatten(0, (views.shape[1], len(views))).transpose(0, 1)

    @torch.no_grad()
    def _send(self, views: Tensor) -> Shuffle | None:
        """Begin to deal key views (B, K, 3, H, W) anew among the ranks, if BatchNorm needs that."""
        if self.key_encoder is None or not (self._batch_norms and self.key_encoder.training):
            return None  # an embedding does not depend on its companions, or gradients flow back
        return Shuffle(views, 100_003 * self._steps + 1_009 * len(self._pending), self.groups)

    def _each(self, encoder: Encoder, views: Tensor) -> Tensor:
        """Return embeddings (B, V, D) of views (B, V, 3, H, W), each view a batch of its own."""
        return torch.stack([encoder(self._input(view)) for view in views.unbind(1)], 1)

    def _input(self, views: Tensor) -> Tensor:
        return views if self.normalize is None else self.normalize(views)

    def _embed(self, views: Tensor, small: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (M, D), further queries (B, E, D) and the keys (M, K, D) of the former."""
        if self.symmetric:
            every = self._together(views)  # (B, K+1, D)
            keys = leave_one_out(every).flatten(0, 1)  # (B(K+1), K, D)
            more = every[:, :0] if small is None else self._embed_small(small)
            return every.flatten(0, 1), more, keys if self.grad_through_keys else keys.detach()
        keys = views[:, self.num_queries :]
        if self.training and self.averaged_norm and not self._pending and self._steps == 0:
            assert self.key_encoder is not None
            with in_mode(self.key_encoder, training=True):  # as the query encoder makes its own
                calibrate_batch_norm(
                    self.key_encoder, (self._input(view) for view in keys.unbind(1))
                )
            average_(statistics(self.key_encoder))
            copy_statistics(self.key_encoder, self.encoder)
        sent = self._send(keys)  # they travel while the queries are encoded
        queries = self._together(views[:, : self.num_queries])  # (B, Q, D)
        more = queries[:, 1:]
        if small is not None:
            more = torch.cat([more, self._embed_small(small)], 1)
        return queries[:, 0], more, self.embed_keys(keys, sent)

    def _embed_small(self, small: Tensor) -> Tensor:
        """Return embeddings (B, S, D) of small queries (B, S, 3, h, w).

        Their BatchNorm batch is their own, and leaves the running statistics alone: those are for
        keys and for users of the backbone, whose images have the full size.
        """
        with fixed_statistics(self._batch_norms):
            return self._together(small)

    def _together(self, views: Tensor) -> Tensor:
        """Return embeddings (B, V, D) of views (B, V, 3, H, W), all of them in one batch.

        All views of an image are in the same one of G groups, which are n = B / G images each.
        """
        groups = self.groups if self.training else 1
        shape = groups, views.shape[1], len(views) // groups  # G, V, n
        images = views.unflatten(0, (groups, -1)).transpose(1, 2)  # (G, V, n, 3, H, W)
        embeddings = self.encoder(self._input(images.flatten(0, 2)))  # (G · V · n, D)
        return embeddings.unflatten(0, shape).transpose(1, 2).flatten(0, 1)

    def _instances(self, batch: int, indices: Tensor | None, device: torch.device) -> Tensor:
        """Return a number (M,) per query that tells instances apart."""
        if isinstance(self.dictionary, MemoryBank):
            assert indices is not None
            return indices.to(device, non_blocking=True)
        index = torch.arange(batch, device=device) + rank() * batch  # in all ranks' joined batch
        return index.repeat_interleave(self.num_shots + 1) if self.symmetric else index

    def _weights_version(self) -> int:
        """Return a number that grows when an optimizer writes the head's weights in place."""
        return sum(weight._version for weight in self.encoder.head.parameters())

    def _check_loop(self) -> None:
        if self._pending and self._weights_version() != self._seen_weights:
            raise RuntimeError(
                "The weights changed since the last forward pass, but learner.after_step() was not "
                "called: call it after every optimizer.step()."
            )


def _begin_anew(learner: Learner, _: object) -> None:
    learner._pending.clear()
    learner._steps = int(learner.steps)


def leave_one_out(embeddings: Tensor) -> Tensor:
    """Return for each of K+1 views (B, K+1, D) the K others, in order: (B, K+1, K, D)."""
    views = torch.arange(embeddings.shape[1], device=embeddings.device)
    others = views[:-1] + (views[:-1] >= views[:, None])  # (K+1, K)
    return embeddings[:, others]
