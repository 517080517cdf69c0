"""The table of similarities: the one list that config, learner and dictionaries share."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import kscl.method.similarity
from kscl.config.rules import CHOICES
from kscl.errors import KsclError
from kscl.method.dictionary import MemoryBank, Minibatch, Queue
from kscl.method.eigen import eigenpairs
from kscl.method.similarity import SIMILARITIES, find_similarity


def test_configs_offer_what_there_is() -> None:
    assert CHOICES["METHOD.SIMILARITY"] == tuple(SIMILARITIES)


@pytest.mark.parametrize("name", SIMILARITIES)
def test_own_is_the_diagonal_of_every(name: str) -> None:
    similarity = SIMILARITIES[name]
    torch.manual_seed(0)
    shots = 1 if similarity.one_key else 4
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

    monkeypatch.setattr(kscl.method.similarity, "eigenpairs", watched)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with torch.autocast("cpu", torch.bfloat16):
            found = blend(old.basis, new, 0.5)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert torch.equal(found, expected)
    assert tf32 == [False]


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    for make in (find_similarity, lambda name: Minibatch(similarity=name)):
        with pytest.raises(KsclError, match=r"'dot'.*projection, cosine, mean_cosine"):
            make("dot")
    with pytest.raises(KsclError, match="'dot'"):
        Queue(4, 2, 8, similarity="dot")
    with pytest.raises(KsclError, match="'dot'"):
        MemoryBank(4, 2, 8, similarity="dot")
