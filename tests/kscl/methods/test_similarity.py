"""The table of similarities: the one list that config, learner and dictionaries share."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import kscl.methods.similarity
from kscl.errors import KsclError
from kscl.keys import PRETRAIN
from kscl.methods.dictionary import MemoryBank, Minibatch, Queue
from kscl.methods.kscl import KSCL
from kscl.methods.similarity import (
    Similarity,
    blend_directions,
    mean_direction,
)
from kscl.methods.subspace import eigenpairs
from kscl.registry import SIMILARITIES
from tests.helpers.networks.learners import TAU, make, one_step, views_of


def test_configs_offer_what_there_is() -> None:
    assert PRETRAIN.keys["METHOD.SIMILARITY"].choices is SIMILARITIES


@pytest.mark.parametrize("name", SIMILARITIES)
def test_what_holds_a_similarity_can_be_pickled(name: str) -> None:
    assert pickle.loads(pickle.dumps(SIMILARITIES[name])).fit is SIMILARITIES[name].fit


@pytest.mark.parametrize("name", SIMILARITIES)
def test_own_is_the_diagonal_of_every(name: str) -> None:
    similarity = SIMILARITIES[name]
    torch.manual_seed(0)
    shots = 4
    keys, query = (F.normalize(torch.randn(6, n, 16).double(), dim=2) for n in (shots, 1))
    fitted = similarity.fit(keys, 0.7)
    assert fitted.basis.shape == (6, similarity.max_rank(shots, 0.7), 16)
    every = similarity.every(query[:, 0], fitted.basis)
    torch.testing.assert_close(similarity.own(query[:, 0], fitted.basis), every.diagonal())
    opposite = similarity.every(-query[:, 0], fitted.basis)
    torch.testing.assert_close(opposite, -every if similarity.signed else every)


def test_a_blend_is_in_full_precision_whatever_autocast_and_tf32_are(monkeypatch) -> None:
    torch.manual_seed(0)
    fit, blend = SIMILARITIES["projection"].fit, SIMILARITIES["projection"].blend
    old, new = (fit(F.normalize(torch.randn(6, 4, 16), dim=2), 0.7) for _ in range(2))
    expected, tf32 = blend(old.basis, new, 0.5), []

    def watched(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tf32.append(torch.backends.cuda.matmul.allow_tf32)
        return eigenpairs(gram)

    monkeypatch.setattr(kscl.methods.similarity, "eigenpairs", watched)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with torch.autocast("cpu", torch.bfloat16):
            found = blend(old.basis, new, 0.5)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert torch.equal(found, expected)
    assert tf32 == [False]


@pytest.mark.portable
@pytest.mark.parametrize("name", SIMILARITIES)
def test_a_fused_kernel_equals_the_formula_it_stands_for(name: str) -> None:
    similarity = SIMILARITIES[name]
    assert similarity.fused is not None
    torch.manual_seed(0)
    shots = 4
    keys, query = (F.normalize(torch.randn(9, n, 16).double(), dim=2) for n in (shots, 1))
    fitted = similarity.fit(keys, 0.7)
    slots, rank = fitted.basis.transpose(0, 1).contiguous(), fitted.rank.clone()
    slots[:, 3], rank[3] = 0, 0  # an entry that was never filled
    only_own = slots[:, :1], rank[:1], torch.zeros(9, dtype=torch.long)
    nothing = slots[:, :0], rank[:0], None
    for entries, ranks, own in (
        (slots, rank, None),
        (slots, rank, torch.arange(9)),
        only_own,
        nothing,
    ):
        answers = []
        for one in (similarity, replace(similarity, fused=None)):
            v = query[:, 0].clone().requires_grad_()
            answer = one.log_sum(v, entries, ranks, 0.2, own)
            loss = F.softplus(answer[0]).sum() + 0 * v.sum()
            answers.append((*answer, torch.autograd.grad(loss, v)[0]))
        torch.testing.assert_close(*answers)


def near(query: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return minus the squared distance of queries (M, D) to the entries' vectors: (M, N)."""
    return -(query[:, None] - basis[:, 0]).square().sum(2)


@pytest.mark.portable
@pytest.mark.parametrize("kind", ["queue", "bank", "minibatch"])
def test_every_dictionary_scores_by_the_formula_of_a_new_similarity(kind: str, monkeypatch) -> None:
    """Distances go down to −4, and neither a length nor a cosine orders them alike."""
    toy = Similarity(
        fit=mean_direction,
        own=lambda query, basis: near(query, basis).diagonal(),
        every=near,
        blend=blend_directions,
        max_rank=lambda num_shots, rho: 1,
        signed=True,
    )
    monkeypatch.setitem(SIMILARITIES.data, "near", toy)
    learner = make(kind, num_shots=3, similarity="near", length=12).double()
    optimizer = torch.optim.SGD(learner.encoder.parameters(), lr=0.1)
    for step in range(2):  # at the second one, a queue and a bank have entries
        views = views_of(4, 3, seed=step).double()
        with torch.no_grad():
            query = learner.encoder(views[:, 0])
            means = F.normalize(learner.embed_keys(views[:, 1:]).mean(1), dim=1)
        others = means if kind == "minibatch" else stored(learner)
        figures = one_step(learner, views, optimizer, indices=torch.arange(4) + 4 * step)
        positive = -(query - means).square().sum(1)  # (B,)
        negative = -(query[:, None] - others).square().sum(2)  # (B, N)
        if kind == "minibatch":
            negative.fill_diagonal_(-torch.inf)
        logits = torch.cat([positive[:, None], negative], 1) / TAU
        expected = F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
        torch.testing.assert_close(figures["loss"], expected)


def stored(learner: KSCL) -> torch.Tensor:
    """Return the first vectors (N, D) of the entries that are filled."""
    assert not isinstance(learner.dictionary, Minibatch)
    slots, rank = learner.dictionary.filled()
    return slots[0, rank > 0].clone()


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    for build in (SIMILARITIES.__getitem__, lambda name: Minibatch(similarity=name)):
        with pytest.raises(KsclError, match=r"'dot'.*projection, cosine, mean_cosine"):
            build("dot")
    with pytest.raises(KsclError, match="'dot'"):
        Queue(4, 2, 8, similarity="dot")
    with pytest.raises(KsclError, match="'dot'"):
        MemoryBank(4, 2, 8, similarity="dot")
