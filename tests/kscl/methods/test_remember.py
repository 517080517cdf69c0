"""Remembered shots against a plain list per image, and the loss against a written-out loop."""

from __future__ import annotations

import copy
from collections import defaultdict, deque

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kscl.methods.remember
from kscl.errors import ConfigError, KsclError
from kscl.keys import load_config
from kscl.methods.remember import Remembered
from kscl.methods.similarity import main_direction
from tests.helpers.networks.learners import (
    DIM,
    END_TO_END,
    TAU,
    make,
    one_step,
    run,
    views_of,
)

pytestmark = pytest.mark.portable

IMAGES, BATCH, STEPS = 9, 4, 9


def target(keys: list[Tensor], weights: list[float], similarity: str, rho: float) -> Tensor:
    """The basis (L, D) that weighted unit vectors make, by the D x D matrix."""
    mean = F.normalize(sum(w * v for w, v in zip(weights, keys, strict=True)), dim=0)
    if similarity == "mean_cosine":
        return mean[None]
    covariance = sum(w * torch.outer(v, v) for w, v in zip(weights, keys, strict=True))
    values, vectors = torch.linalg.eigh(covariance)
    values, vectors = values.flip(0), vectors.flip(1)
    if similarity == "main_cosine":
        main = vectors[:, 0]
        along = main @ sum(w * v for w, v in zip(weights, keys, strict=True)) / sum(weights)
        return (main * torch.sign(along if abs(along) >= 0.01 else main @ keys[0]))[None]
    kept = next(n for n in range(1, DIM + 1) if values[:n].sum() >= rho * sum(weights) - 1e-9)
    return vectors[:, :kept].T


def compare(query: Tensor, basis: Tensor, similarity: str) -> Tensor:
    return (basis @ query).norm() if similarity == "projection" else query @ basis[0]


@pytest.mark.parametrize("similarity", ["projection", "mean_cosine", "main_cosine"])
@pytest.mark.parametrize("dictionary", ["queue", "minibatch"])
@pytest.mark.parametrize(("shots", "epochs", "decay"), [(1, 2, 1.0), (2, 3, 0.5)])
def test_the_loss_is_that_of_a_loop_over_lists_of_keys(
    dictionary: str, similarity: str, shots: int, epochs: int, decay: float
) -> None:
    settings = {"num_shots": shots, "rho": 0.7, "remember": epochs, "remember_decay": decay}
    learner = make(dictionary, length=IMAGES, similarity=similarity, momentum=0.5, **settings)
    learner.double()
    optimizer = torch.optim.SGD(learner.encoder.parameters(), lr=0.1)
    past = defaultdict[int, deque[list[Tensor]]](lambda: deque(maxlen=epochs))
    queue = deque[Tensor](maxlen=IMAGES)
    for step in range(STEPS):
        views = views_of(BATCH, shots, seed=step).double()
        images = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(step))[:BATCH]
        with torch.no_grad():
            queries, keys = learner.encoder(views[:, 0]), learner.embed_keys(views[:, 1:])
        bases = []
        for image, fresh in zip(images.tolist(), keys, strict=True):
            vectors, weights = list(fresh), [1.0] * shots
            for age, old in enumerate(reversed(past[image]), 1):
                vectors += old
                weights += [decay**age] * shots
            bases.append(target(vectors, weights, similarity, 0.7))
        losses = []
        for n, query in enumerate(queries):
            others = [b for m, b in enumerate(bases) if m != n]
            negatives = others if dictionary == "minibatch" else list(queue)
            s = [compare(query, basis, similarity) / TAU for basis in [bases[n], *negatives]]
            losses.append(-F.log_softmax(torch.stack(s), 0)[0])
        figures = one_step(learner, views, optimizer, indices=images)
        torch.testing.assert_close(figures["loss"], torch.stack(losses).mean())
        for image, fresh, basis in zip(images.tolist(), keys, bases, strict=True):
            past[image].append(list(fresh))
            queue.append(basis)


@pytest.mark.parametrize("similarity", ["projection", "mean_cosine"])
def test_the_symmetric_loss_remembers_all_views_of_an_image(similarity: str) -> None:
    settings = {"num_shots": 1, "rho": 0.7, "remember": 2, "symmetric": True, **END_TO_END}
    learner = make("minibatch", length=BATCH, similarity=similarity, **settings).double()
    optimizer = torch.optim.SGD(learner.encoder.parameters(), lr=0.1)
    past: list[list[Tensor]] = [[] for _ in range(BATCH)]
    for step in range(4):
        views = views_of(BATCH, 1, seed=step).double()
        with torch.no_grad():
            every = learner.encoder(views.flatten(0, 1)).unflatten(0, (BATCH, 2))
        losses = []
        bases = [
            [
                target(v := [every[n, 1 - q], *past[n][-4:]], [1.0] * len(v), similarity, 0.7)
                for q in (0, 1)
            ]
            for n in range(BATCH)
        ]
        for n in range(BATCH):
            for q in (0, 1):
                others = [basis for m in range(BATCH) if m != n for basis in bases[m]]
                s = [
                    compare(every[n, q], basis, similarity) / TAU
                    for basis in [bases[n][q], *others]
                ]
                losses.append(-F.log_softmax(torch.stack(s), 0)[0])
        figures = one_step(learner, views, optimizer, indices=torch.arange(BATCH))
        torch.testing.assert_close(figures["loss"], torch.stack(losses).mean())
        for n in range(BATCH):
            past[n] += list(every[n])


def test_without_a_past_it_is_the_plain_loss() -> None:
    views = views_of(BATCH, 3).double()
    plain, remembering = (
        make("minibatch", num_shots=3, rho=0.6, remember=epochs).double() for epochs in (0, 5)
    )
    torch.testing.assert_close(run(plain, views)["loss"], run(remembering, views)["loss"])


def test_a_ring_holds_the_last_keys_in_half_precision_wherever_it_is() -> None:
    for on_host in (False, True):
        ring = Remembered(5, 3, 2, DIM, on_host=on_host)
        past = defaultdict[int, deque[Tensor]](lambda: deque(maxlen=3))
        for step in range(8):
            generator = torch.Generator().manual_seed(step)
            images = torch.randint(5, (4,), generator=generator)  # some of them twice
            keys = F.normalize(torch.randn(4, 2, DIM, generator=generator), dim=2)
            ring.stage(keys, images)
            ring.store()
            for image in images.unique().tolist():
                past[image].append(keys[images == image][-1].half())
        for image in range(5):
            keys, weight = ring.recall(torch.tensor([image]))
            kept = keys[0][weight[0] > 0]
            assert {tuple(k) for k in kept.tolist()} == {
                tuple(k) for pair in past[image] for k in pair.tolist()
            }
        assert ring.keys.dtype == torch.float16
        assert ring.double().keys.dtype == (torch.float16 if on_host else torch.float64)


def test_accumulated_batches_are_remembered_and_a_look_at_the_loss_is_not() -> None:
    learner = make(num_shots=2, remember=2, length=IMAGES)
    together = copy.deepcopy(learner)
    for number in (0, 1):
        run(learner, views_of(4, 2, seed=number), torch.arange(4) + 4 * number)
    assert learner.remembered is not None
    assert not learner.remembered.seen.any()
    run(together, torch.cat([views_of(4, 2, seed=n) for n in (0, 1)]), torch.arange(8))
    learner.after_step()
    together.after_step()
    assert torch.equal(learner.remembered.seen, together.remembered.seen)  # type: ignore[union-attr]
    torch.testing.assert_close(learner.remembered.keys, together.remembered.keys)  # type: ignore[union-attr]
    before = copy.deepcopy(learner.remembered.state_dict())
    with torch.no_grad():
        run(learner.eval(), views_of(4, 2))
    learner.train().after_step()
    torch.testing.assert_close(learner.remembered.state_dict(), before)


def test_the_main_direction_of_one_key_is_the_key_and_has_a_gradient() -> None:
    keys = F.normalize(torch.randn(6, 4, DIM, dtype=torch.float64), dim=2)
    torch.testing.assert_close(main_direction(keys[:, :1]).basis, keys[:, :1])
    assert ((main_direction(keys).basis @ keys.sum(1)[:, :, None]) > 0).all()
    query = F.normalize(torch.randn(6, DIM, dtype=torch.float64), dim=1)
    assert torch.autograd.gradcheck(
        lambda keys: (main_direction(keys).basis[:, 0] * query).sum(1), keys.requires_grad_()
    )


def test_one_vector_has_no_room_for_remembered_keys() -> None:
    with pytest.raises(ConfigError, match=r"METHOD\.REMEMBER"):
        load_config(
            None, ["METHOD.NUM_SHOTS", "1", "METHOD.SIMILARITY", "cosine", "METHOD.REMEMBER", "1"]
        )


def test_a_ring_that_does_not_fit_into_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kscl.methods.remember, "available_memory", lambda: 2 * 2 * 7 * 3 * DIM - 1)
    with pytest.raises(KsclError, match=r"METHOD\.REMEMBER.*GiB free"):
        Remembered(7, 3, 1, DIM)
    Remembered(7, 2, 1, DIM)
