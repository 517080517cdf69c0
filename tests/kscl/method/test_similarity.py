"""The table of similarities: the one list that config, learner and dictionaries share."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kscl.config.rules import CHOICES
from kscl.errors import KsclError
from kscl.method.dictionary import MemoryBank, Minibatch, Queue
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


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    for make in (find_similarity, lambda name: Minibatch(similarity=name)):
        with pytest.raises(KsclError, match=r"'dot'.*projection, cosine, mean_cosine"):
            make("dot")
    with pytest.raises(KsclError, match="'dot'"):
        Queue(4, 2, 8, similarity="dot")
    with pytest.raises(KsclError, match="'dot'"):
        MemoryBank(4, 2, 8, similarity="dot")
