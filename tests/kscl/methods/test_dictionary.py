"""What the dictionaries hold and answer, against plain lists and formulas over all entries."""

from __future__ import annotations

from collections import deque

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import kscl.methods.kernels
from kscl.errors import KsclError
from kscl.methods.dictionary import Dictionary, MemoryBank, Minibatch, Negatives, Queue
from kscl.methods.kernels import all_lengths, log_sum_of_negatives
from kscl.methods.similarity import mean_direction
from kscl.methods.subspace import Subspaces, fit_subspaces

pytestmark = pytest.mark.portable

DIM = 12
TAU = 0.2


def unit(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def subspaces(batch: int, max_rank: int, seed: int = 0) -> Subspaces:
    """Bases of every rank from 1 to max_rank, zero-padded."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.linalg.qr(torch.randn(batch, DIM, max_rank, generator=generator).double())[0].mT
    rank = torch.arange(batch) % max_rank + 1
    basis = vectors * (torch.arange(max_rank) < rank[:, None])[:, :, None]
    return Subspaces(basis, rank, torch.ones(batch, 1).double())


def by_hand(query: Tensor, basis: Tensor) -> Tensor:
    return torch.einsum("md,nld->mnl", query, basis).square().sum(2).clamp_min(1e-30).sqrt()


def place(count: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + count)


def entries(dictionary: Queue | MemoryBank) -> Tensor:
    return dictionary.slots.transpose(0, 1)


def negatives_of(
    dictionary: Dictionary, query: Tensor, instance: Tensor, basis: Tensor
) -> Negatives:
    """What a dictionary says of queries with a basis each."""
    return dictionary.negatives(query, instance, basis, instance, TAU)


def queue_of(length: int, fitted: Subspaces, similarity: str = "projection") -> Queue:
    queue = Queue(length, fitted.basis.shape[1], DIM, similarity=similarity).double()
    queue.store(fitted, place(len(fitted.basis)))
    return queue


@pytest.fixture(params=[2**19, 40], ids=["one piece", "many pieces"])
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kscl.methods.kernels.PIECE, "cpu", request.param)


class TestQueue:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(1, 9), st.lists(st.integers(1, 20), max_size=8))
    def test_holds_the_last_entries_in_order_for_any_batch_sizes(
        self, length: int, batches: list[int]
    ) -> None:
        queue, expected = Queue(length, 2, DIM).double(), deque[Tensor](maxlen=length)
        for turn, batch in enumerate(batches):
            fitted = subspaces(batch, 2, seed=turn)
            queue.store(fitted, place(batch))
            expected.extend(fitted.basis)
        assert int(queue.stored) == sum(batches)
        oldest = int(queue.stored) if len(expected) == length else 0
        held = entries(queue)[: len(expected)].roll(-oldest, 0)
        assert torch.equal(held, torch.stack([*expected]) if expected else held)
        assert queue.filled()[1].gt(0).all()

    def test_unfilled_entries_do_not_count(self) -> None:
        fitted, query = subspaces(7, 3), unit(4, DIM)
        queue = queue_of(50, fitted)
        expected = by_hand(query, fitted.basis)
        torch.testing.assert_close(all_lengths(query, *queue.filled()), expected)
        answer = negatives_of(queue, query, place(4), fitted.basis)
        torch.testing.assert_close(answer.log_sum, (expected / TAU).logsumexp(1))
        torch.testing.assert_close(answer.hardest, expected.amax(1))

    def test_an_empty_queue_adds_nothing_to_the_loss(self) -> None:
        query = unit(4, DIM).requires_grad_()
        answer = negatives_of(Queue(8, 2, DIM).double(), query, place(4), query[:, None])
        assert torch.isneginf(answer.log_sum).all()
        (grad,) = torch.autograd.grad(F.softplus(answer.log_sum - 1).sum(), query)
        assert not grad.any()

    def test_entries_may_change_before_the_backward_pass(self) -> None:
        fitted, query = subspaces(20, 2), unit(4, DIM).requires_grad_()
        queue = queue_of(20, fitted)
        reference = (by_hand(query, fitted.basis) / TAU).logsumexp(1)
        log_sum = negatives_of(queue, query, place(4), fitted.basis).log_sum
        queue.store(subspaces(20, 2, seed=1), place(20))
        torch.testing.assert_close(
            torch.autograd.grad(log_sum.sum(), query), torch.autograd.grad(reference.sum(), query)
        )

    def test_restores_contents_and_counter(self) -> None:
        queue, copy = queue_of(5, subspaces(7, 2)), Queue(5, 2, DIM).double()
        copy.load_state_dict(queue.state_dict())
        for one in (queue, copy):
            one.store(subspaces(2, 2, seed=3), place(2))
        assert all(torch.equal(a, b) for a, b in zip(queue.buffers(), copy.buffers(), strict=True))

    def test_another_length_is_refused_with_both_sizes(self) -> None:
        with pytest.raises(KsclError, match=r"saved queue is 2 x 5 x 12 .* is 2 x 6 x 12"):
            Queue(6, 2, DIM).load_state_dict(Queue(5, 2, DIM).state_dict())


class TestCost:
    """What makes a long queue affordable, counted and not timed."""

    @staticmethod
    def queue(of_rank_2: int) -> Queue:
        rank = 1 + (torch.arange(400) < of_rank_2).long()
        basis = subspaces(400, 2).basis * (torch.arange(2) < rank[:, None])[:, :, None]
        return queue_of(400, Subspaces(basis, rank, torch.ones(400, 1)))

    @pytest.mark.parametrize("of_rank_2", [0, 4, 100])
    def test_second_vectors_are_computed_only_where_there_are_any(self, of_rank_2: int) -> None:
        queue, query = self.queue(of_rank_2), unit(6, DIM)
        for ask in (
            lambda q: all_lengths(q, *queue.filled()),
            lambda q: negatives_of(queue, q, place(6), q[:, None]),
        ):
            with FlopCounterMode(display=False) as counter:
                ask(query)
            assert counter.get_total_flops() == 2 * 6 * DIM * (400 + of_rank_2)

    def test_nothing_of_the_size_of_queries_by_entries_is_kept_for_the_backward_pass(self) -> None:
        queue, query = self.queue(100), unit(6, DIM).requires_grad_()
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            negatives_of(queue, query, place(6), query[:, None])
            assert [tuple(x.shape) for x in kept] == [(6, DIM)]
            kept.clear()
            all_lengths(query, *queue.filled())
        shapes = {tuple(x.shape) for x in kept}
        assert shapes == {(6, DIM), (2, 400, DIM), (400,)}  # the operands


@pytest.mark.usefixtures("_pieces")
class TestNegatives:
    @pytest.mark.parametrize("max_rank", [1, 2, 5])
    def test_log_sum_and_gradient_equal_those_of_all_logits(self, max_rank: int) -> None:
        fitted, query = subspaces(37, max_rank), unit(6, DIM).requires_grad_()
        slots = fitted.basis.transpose(0, 1).contiguous()
        log_sum, hardest = log_sum_of_negatives(query, slots, fitted.rank, TAU)
        lengths = by_hand(query, fitted.basis)
        expected = (lengths / TAU).logsumexp(1)
        torch.testing.assert_close(log_sum, expected)
        torch.testing.assert_close(hardest, lengths.amax(1))
        weight = torch.arange(6).double()
        torch.testing.assert_close(
            torch.autograd.grad(log_sum @ weight, query),
            torch.autograd.grad(expected @ weight, query),
        )

    @pytest.mark.parametrize("rare", [0, 1, 3, 30])
    def test_a_slot_that_few_entries_fill_is_exact_too(self, rare: int) -> None:
        fitted, query = subspaces(37, 2), unit(6, DIM).requires_grad_()
        rank = (torch.arange(37) % 37 < rare).long() + 1
        basis = fitted.basis * (torch.arange(2) < rank[:, None])[:, :, None]
        slots = basis.transpose(0, 1).contiguous()
        log_sum, _ = log_sum_of_negatives(query, slots, rank, TAU)
        expected = by_hand(query, basis)
        torch.testing.assert_close(all_lengths(query, slots, rank), expected)
        torch.testing.assert_close(
            torch.autograd.grad(all_lengths(query, slots, rank).exp().sum(), query),
            torch.autograd.grad(by_hand(query, basis).exp().sum(), query),
        )
        torch.testing.assert_close(
            torch.autograd.grad(log_sum.sum(), query),
            torch.autograd.grad((expected / TAU).logsumexp(1).sum(), query),
        )

    def test_entries_of_cosine_are_compared_by_cosine(self) -> None:
        keys, query = unit(37, 1, DIM), unit(6, DIM, seed=1).requires_grad_()
        queue = queue_of(40, mean_direction(keys), "cosine")
        answer = negatives_of(queue, query, place(6), keys)
        expected = (query @ keys[:, 0].T / TAU).logsumexp(1)
        torch.testing.assert_close(answer.log_sum, expected)
        torch.testing.assert_close(
            torch.autograd.grad(answer.log_sum.sum(), query),
            torch.autograd.grad(expected.sum(), query),
        )

    @pytest.mark.parametrize("temperature", [1e-3, 0.07, 10.0])
    def test_no_temperature_overflows_in_single_precision(self, temperature: float) -> None:
        fitted, query = subspaces(37, 2), unit(6, DIM).float().requires_grad_()
        slots = fitted.basis.transpose(0, 1).float()
        log_sum, _ = log_sum_of_negatives(query, slots, fitted.rank, temperature)
        expected = (by_hand(query.double(), fitted.basis) / temperature).logsumexp(1)
        torch.testing.assert_close(log_sum.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.isfinite(torch.autograd.grad(log_sum.sum(), query)[0]).all()

    def test_autocast_does_not_lower_the_precision(self) -> None:
        fitted, query = subspaces(37, 2), unit(6, DIM).float().requires_grad_()
        slots = fitted.basis.transpose(0, 1).float()
        expected = log_sum_of_negatives(query, slots, fitted.rank, TAU)[0]
        lengths = all_lengths(query, slots)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            log_sum = log_sum_of_negatives(query, slots, fitted.rank, TAU)[0]
            within = all_lengths(query, slots)
            (grad,) = torch.autograd.grad(within.sum(), query)
        torch.testing.assert_close(log_sum, expected)
        torch.testing.assert_close(within, lengths)
        torch.testing.assert_close(grad, torch.autograd.grad(lengths.sum(), query)[0])


@pytest.mark.usefixtures("_pieces")
class TestMemoryBank:
    def test_neither_the_own_image_nor_an_unseen_one_is_a_negative(self) -> None:
        bank, fitted = MemoryBank(9, 3, DIM).double(), subspaces(5, 3)
        seen = torch.tensor([7, 2, 0, 5, 8])
        bank.store(fitted, seen)
        query = unit(3, DIM).requires_grad_()
        own = torch.tensor([2, 3, 8])  # second and last of those stored, and one not seen
        log_sum, hardest = negatives_of(bank, query, own, fitted.basis)
        lengths = by_hand(query, fitted.basis)
        others = torch.stack([lengths[m][seen != own[m]].max() for m in range(3)])
        expected = torch.stack([(lengths[m][seen != own[m]] / TAU).logsumexp(0) for m in range(3)])
        torch.testing.assert_close(log_sum, expected)
        torch.testing.assert_close(hardest, others)
        torch.testing.assert_close(
            torch.autograd.grad(log_sum.sum(), query), torch.autograd.grad(expected.sum(), query)
        )

    def test_replaces_entries_and_keeps_the_last_of_an_image_that_comes_twice(self) -> None:
        bank, fitted = MemoryBank(6, 2, DIM).double(), subspaces(4, 2)
        bank.store(subspaces(2, 2, seed=1), torch.tensor([3, 4]))
        bank.store(fitted, torch.tensor([3, 1, 3, 0]))
        assert torch.equal(entries(bank)[[3, 1, 0]], fitted.basis[[2, 1, 3]])
        assert torch.equal(entries(bank)[4], subspaces(2, 2, seed=1).basis[1])
        assert bank.rank.tolist() == [2, 2, 0, 1, 2, 0]

    def test_momentum_keeps_the_entry_near_its_past(self) -> None:
        old, new = (fit_subspaces(unit(4, 1, DIM, seed=s), 1.0) for s in (1, 2))
        bank = MemoryBank(4, 1, DIM, momentum=0.9).double()
        for fitted in (old, new):
            bank.store(fitted, place(4))
        to_old = (entries(bank) * old.basis).sum((1, 2)).abs()
        assert (to_old > 0.9).all()
        assert (to_old < 1 - 1e-6).all()

    def test_momentum_of_directions_is_a_normalized_average(self) -> None:
        old, new = (mean_direction(unit(4, 1, DIM, seed=s)) for s in (1, 2))
        bank = MemoryBank(4, 1, DIM, momentum=0.5, similarity="cosine").double()
        for fitted in (old, new):
            bank.store(fitted, place(4))
        torch.testing.assert_close(entries(bank), F.normalize(old.basis + new.basis, dim=2))

    def test_another_number_of_images_is_refused(self) -> None:
        with pytest.raises(KsclError, match="saved memory bank is 2 x 5 x 12"):
            MemoryBank(6, 2, DIM).load_state_dict(MemoryBank(5, 2, DIM).state_dict())


class TestMinibatch:
    @pytest.mark.parametrize("similarity", ["projection", "cosine"])
    def test_every_other_instance_counts_and_gradients_reach_queries_and_bases(
        self, similarity: str
    ) -> None:
        basis = subspaces(6, 2).basis.requires_grad_()
        query = unit(6, DIM).requires_grad_()
        instance = torch.tensor([0, 0, 1, 1, 2, 2])
        answer = negatives_of(Minibatch(similarity=similarity), query, instance, basis)
        near = by_hand(query, basis) if similarity == "projection" else query @ basis[:, 0].T
        expected = torch.stack(
            [(near[m][instance != instance[m]] / TAU).logsumexp(0) for m in range(6)]
        )
        torch.testing.assert_close(answer.log_sum, expected)
        torch.testing.assert_close(
            torch.autograd.grad(answer.log_sum.sum(), (query, basis)),
            torch.autograd.grad(expected.sum(), (query, basis)),
        )
