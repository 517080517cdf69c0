"""One learner, many settings: each loss against a formula written out by hand, step by step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kscl.methods.dictionary import Queue
from kscl.methods.encoder import Encoder
from kscl.methods.kscl import KSCL
from tests.helpers.networks.learners import (
    DIM,
    END_TO_END,
    SHARED,
    TAU,
    make,
    one_step,
    run,
    small_encoder,
    views_of,
)

pytestmark = [pytest.mark.portable, pytest.mark.usefixtures("_precision")]


@pytest.fixture(params=[torch.float32, torch.float64], ids=["single", "double"])
def _precision(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


def gradients(learner: KSCL, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(learner.encoder.parameters())))


def kept_vectors(keys: Tensor, rho: float) -> Tensor:
    """Eigenvectors (L, D) of the D x D matrix of one instance's keys (K, D), by autograd's eigh."""
    values, vectors = torch.linalg.eigh(keys.T @ keys)
    kept = 1
    while values.flip(0)[:kept].sum() < rho * len(keys) - 1e-6:
        kept += 1
    return vectors.T.flip(0)[:kept]


class TestMoco:
    def test_cosine_with_one_shot_is_moco_over_several_steps(self) -> None:
        """Loss, weights, key encoder and queue of a MoCo written out by hand."""
        learner = make(similarity="cosine", momentum=0.9)
        optimizer = torch.optim.SGD(learner.encoder.parameters(), lr=0.5, momentum=0.9)
        query_net, key_net = small_encoder(), small_encoder()
        reference = torch.optim.SGD(query_net.parameters(), lr=0.5, momentum=0.9)
        queue = torch.zeros(0, DIM)
        for step in range(5):
            views = views_of(4, 1, seed=step)
            q = query_net(views[:, 0])
            with torch.no_grad():
                k = key_net(views[:, 1])
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / TAU
            loss = F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
            reference.zero_grad()
            loss.backward()
            reference.step()
            queue = torch.cat([queue, k])[-12:]
            with torch.no_grad():
                for ours, theirs in zip(key_net.parameters(), query_net.parameters(), strict=True):
                    ours.copy_(0.9 * ours + 0.1 * theirs)
            torch.testing.assert_close(one_step(learner, views, optimizer)["loss"], loss)
        for ours, theirs in (
            (learner.encoder, query_net),
            (learner.key_encoder, key_net),
        ):
            assert isinstance(ours, Encoder)
            torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()))
        assert isinstance(learner.dictionary, Queue)
        held = learner.dictionary.slots[0].roll(-int(learner.dictionary.stored), 0)
        torch.testing.assert_close(held, queue)

    @staticmethod
    def with_cosines(similarity: str) -> tuple[KSCL, Tensor, Tensor]:
        """A learner with a filled queue, views, and their cosines to the own key and the queue."""
        learner = make(similarity=similarity)
        run(learner, views_of(12, 1))
        learner.after_step()
        assert isinstance(learner.dictionary, Queue)
        queue, views = learner.dictionary.slots[0].clone(), views_of(4, 1, seed=1)
        q, k = learner.encoder(views[:, 0]), learner.embed_keys(views[:, 1:])[:, 0]
        return learner, views, torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1)

    def test_gradients_equal_those_of_info_nce(self) -> None:
        learner, views, cosines = self.with_cosines("cosine")
        logits = cosines / TAU
        expected = gradients(learner, F.cross_entropy(logits, torch.zeros(4, dtype=torch.long)))
        torch.testing.assert_close(gradients(learner, run(learner, views)["loss"]), expected)

    def test_projection_with_one_shot_is_info_nce_of_absolute_cosines(self) -> None:
        learner, views, cosines = self.with_cosines("projection")
        logits = cosines.abs() / TAU
        expected = F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
        loss = run(learner, views)["loss"]
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients(learner, loss), gradients(learner, expected))


class TestSimclr:
    @staticmethod
    def nt_xent(one: Tensor, two: Tensor) -> Tensor:
        """Chen et al. 2020, equation 1, over 2N − 1 candidates, pair by pair."""
        z = torch.cat([one, two])
        count, total = len(z), z.new_zeros(())
        for i in range(count):
            j = (i + count // 2) % count
            others = [torch.exp(z[i] @ z[k] / TAU) for k in range(count) if k != i]
            total = total - torch.log(torch.exp(z[i] @ z[j] / TAU) / sum(others))
        return total / count

    def test_symmetric_cosine_in_the_minibatch_is_nt_xent(self) -> None:
        learner = make("minibatch", similarity="cosine", symmetric=True, **END_TO_END)
        views = views_of(5, 1)
        expected = self.nt_xent(learner.encoder(views[:, 0]), learner.encoder(views[:, 1]))
        loss = run(learner, views)["loss"]
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients(learner, loss), gradients(learner, expected))


class TestKscl:
    @pytest.mark.parametrize("rho", [0.4, 0.9])
    def test_queue_loss_equals_the_paper_written_out(self, rho: float) -> None:
        learner = make(num_shots=5, rho=rho)
        earlier, views = views_of(12, 5), views_of(4, 5, seed=1)
        negatives = [kept_vectors(keys, rho) for keys in learner.embed_keys(earlier[:, 1:])]
        run(learner, earlier)
        learner.after_step()
        total = torch.zeros(())
        for v, keys in zip(
            learner.encoder(views[:, 0]), learner.embed_keys(views[:, 1:]), strict=True
        ):
            lengths = [(w @ v).norm() for w in (kept_vectors(keys, rho), *negatives)]
            total = total - (torch.stack(lengths) / TAU).log_softmax(0)[0] / 4
        loss = run(learner, views)["loss"]
        torch.testing.assert_close(loss, total)
        torch.testing.assert_close(gradients(learner, loss), gradients(learner, total))

    def test_end_to_end_loss_in_the_minibatch_equals_autograd_through_eigh(self) -> None:
        learner = make("minibatch", num_shots=3, rho=0.9, **END_TO_END)
        views = views_of(4, 3, spread=2.0)
        bases = [
            kept_vectors(torch.cat([learner.encoder(view[None]) for view in image[1:]]), 0.9)
            for image in views
        ]
        queries = learner.encoder(views[:, 0])
        lengths = torch.stack([torch.stack([(w @ v).norm() for w in bases]) for v in queries])
        expected = F.cross_entropy(lengths / TAU, torch.arange(4))
        loss = run(learner, views)["loss"]
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients(learner, loss), gradients(learner, expected))

    @pytest.mark.parametrize("similarity", ["projection", "mean_cosine"])
    def test_symmetric_loss_counts_the_targets_it_says(self, similarity: str) -> None:
        settings = {"similarity": similarity, "symmetric": True, **END_TO_END}
        learner = make("minibatch", num_shots=2, rho=1.0, **settings)
        views = views_of(3, 2, spread=2.0)
        every = torch.stack([learner.encoder(view) for view in views.unbind(1)], 1)
        total = torch.zeros(())

        def compare(query: Tensor, j: int, s: int) -> Tensor:
            others = torch.stack([every[j, r] for r in range(3) if r != s])
            if similarity == "mean_cosine":
                return F.normalize(others.mean(0), dim=0) @ query
            return (kept_vectors(others, 1.0) @ query).norm()

        for i in range(3):
            for t in range(3):
                query = every[i, t]
                rest = [compare(query, j, s) for j in range(3) if j != i for s in range(3)]
                assert len(rest) == 6
                lengths = torch.stack([compare(query, i, t), *rest])
                total = total - (lengths / TAU).log_softmax(0)[0] / 9
        loss = run(learner, views)["loss"]
        torch.testing.assert_close(loss, total)
        torch.testing.assert_close(gradients(learner, loss), gradients(learner, total))

    def test_without_gradients_through_the_keys_only_queries_are_trained(self) -> None:
        views = views_of(4, 3)
        with_keys = make("minibatch", num_shots=3, **END_TO_END)
        without = make("minibatch", num_shots=3, **SHARED)
        one, two = run(with_keys, views)["loss"], run(without, views)["loss"]
        torch.testing.assert_close(one, two)
        momentum = make("minibatch", num_shots=3)
        query_only = gradients(without, two)
        torch.testing.assert_close(query_only, gradients(momentum, run(momentum, views)["loss"]))
        assert not torch.allclose(gradients(with_keys, one)[0], query_only[0])

    def test_control_compares_with_the_normalized_mean_of_the_keys(self) -> None:
        learner = make("minibatch", num_shots=5, similarity="mean_cosine")
        views = views_of(4, 5)
        means = F.normalize(learner.embed_keys(views[:, 1:]).mean(1), dim=1)
        logits = learner.encoder(views[:, 0]) @ means.T / TAU
        expected = F.cross_entropy(logits, torch.arange(4))
        torch.testing.assert_close(run(learner, views)["loss"], expected)

    def test_memory_bank_compares_with_all_other_images_seen(self) -> None:
        learner = make("bank", length=9, num_shots=3)
        first, second = torch.tensor([1, 5, 8]), torch.tensor([5, 2])
        earlier, views = views_of(3, 3), views_of(2, 3, seed=1)
        stored = [kept_vectors(keys, 0.4) for keys in learner.embed_keys(earlier[:, 1:])]
        run(learner, earlier, first)
        learner.after_step()
        total = torch.zeros(())
        keys = learner.embed_keys(views[:, 1:])
        for m, v in enumerate(learner.encoder(views[:, 0])):
            rest = [w for w, image in zip(stored, first, strict=True) if image != second[m]]
            lengths = torch.stack([(w @ v).norm() for w in (kept_vectors(keys[m], 0.4), *rest)])
            total = total - (lengths / TAU).log_softmax(0)[0] / 2
        torch.testing.assert_close(run(learner, views, second)["loss"], total)

    def test_health_figures_are_what_they_say(self) -> None:
        learner = make("minibatch", num_shots=5, rho=0.9)
        views = views_of(6, 5)
        figures = run(learner, views)
        assert not any(value.requires_grad for key, value in figures.items() if key != "loss")
        query, keys = learner.encoder(views[:, 0]), learner.embed_keys(views[:, 1:])
        bases = [kept_vectors(k, 0.9) for k in keys]
        lengths = torch.stack([torch.stack([(w @ v).norm() for w in bases]) for v in query])
        others = lengths.masked_fill(torch.eye(6).bool(), 0).amax(1)
        mass = [(w @ k.T).square().sum() / 5 for w, k in zip(bases, keys, strict=True)]
        expected = {
            "instance_top1": (lengths.argmax(1) == torch.arange(6)).float().mean(),
            "mean_rank": torch.tensor([float(len(w)) for w in bases]).mean(),
            "eigenvalue_mass": torch.stack(mass).mean(),
            "positive_length": lengths.diagonal().mean(),
            "hardest_negative_length": others.mean(),
            "embedding_spread": query.var(0, correction=0).sum(),
        }
        spectra = torch.stack([torch.linalg.svdvals(k).square() / 5 for k in keys]).mean(0)
        shares = {f"eigenvalue_{place}": share for place, share in enumerate(spectra, 1)}
        assert set(figures) == {"loss", *expected, *shares}
        for key, value in expected.items():
            assert figures[key].item() == pytest.approx(value.item(), rel=1e-5), key
        for key, value in shares.items():  # of a trace of 1, in which the smallest are rounding
            assert figures[key].item() == pytest.approx(value.item(), abs=1e-6), key

    @pytest.mark.parametrize(("shots", "similarity"), [(1, "cosine"), (5, "projection")])
    @pytest.mark.parametrize("dictionary", ["queue", "bank"])
    def test_batch_top1_asks_among_the_batch_whatever_is_stored(
        self, dictionary: str, shots: int, similarity: str
    ) -> None:
        settings = {"num_shots": shots, "similarity": similarity}
        learner = make(dictionary, length=20, **settings)
        batch = torch.arange(8)
        run(learner, views_of(8, shots, seed=1), batch)
        learner.after_step()  # now something is stored
        views = views_of(8, shots, spread=2.0)
        expected = run(make("minibatch", **settings), views)["instance_top1"]
        assert 0 < expected < 1
        figures = run(learner, views, batch + 8)
        assert figures["batch_top1"] == expected
        assert "batch_top1" not in run(make("minibatch", **settings), views)
