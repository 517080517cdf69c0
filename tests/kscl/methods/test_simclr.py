"""The shipped SimCLR config against a transcription of google-research/simclr."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kscl.engine.schedule import build_optimizer, learning_rate, set_learning_rate
from kscl.keys import load_config
from kscl.methods.base import build_method
from kscl.methods.batch_norm import SyncBatchNorm, batch_norms, synchronize_batch_norm
from tests.helpers.networks.learners import run

pytestmark = pytest.mark.portable

CONFIG = "pretrain/simclr_r50_200ep.yaml"
SMALL = ["INPUT.SIZE", "32", "BACKBONE.KWARGS.channels", "[4, 4, 8, 8]", "PROJECTOR.DIM", "6"]
TAU = 0.1


def contrastive_loss(hidden: Tensor) -> Tensor:
    """Return `add_contrastive_loss` of objective.py for the rows of view 1, then of view 2."""
    one, two = F.normalize(hidden, dim=1).chunk(2)
    labels, mask = torch.arange(len(one)), 1e9 * torch.eye(len(one), dtype=hidden.dtype)

    def direction(a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(torch.cat([a @ b.T / TAU, a @ a.T / TAU - mask], 1), labels)

    return direction(one, two) + direction(two, one)


class Reference(nn.Module):
    """ResNet-50 with `projection_head` of model_util.py, of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = timm.create_model(
            "resnet50", num_classes=0, channels=(4, 4, 8, 8), zero_init_last=True
        )
        width = 4 * 8
        self.head = nn.Sequential(
            nn.Linear(width, width, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, 6, bias=False),
            nn.BatchNorm1d(6),
        )

    def forward(self, views: Tensor) -> Tensor:
        return self.head(self.backbone(torch.cat([views[:, 0], views[:, 1]])))


@torch.no_grad()
def lars_step(network: nn.Module, velocity: dict[str, Tensor], lr: float) -> None:
    """Step as lars_optimizer.py does; BatchNorm is neither decayed nor adapted."""
    for name, weight in network.named_parameters():
        if name == "head.4.bias":  # center=False
            continue
        gradient = weight.grad
        assert gradient is not None
        if weight.ndim > 1:
            gradient = gradient + 1e-6 * weight
            sizes = weight.norm(), gradient.norm()
            if min(sizes) > 0:
                gradient = gradient * 0.001 * sizes[0] / sizes[1]
        velocity[name] = 0.9 * velocity.get(name, 0.0) + lr * gradient
        weight -= velocity[name]


def close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-7, msg=name)


def test_the_shipped_config_takes_simclrs_steps() -> None:
    torch.manual_seed(0)  # a network with a nearly dead channel would magnify rounding
    cfg = load_config(CONFIG, SMALL)
    learner = build_method(cfg).double()
    optimizer = build_optimizer(cfg, learner.param_groups())
    assert learning_rate(cfg) == pytest.approx(0.3 * 256 / 256)
    reference, velocity = Reference().double(), dict[str, Tensor]()
    gammas = {name for name, value in reference.named_parameters() if not value.any()}
    gammas = {name for name in gammas if name.endswith("bn3.weight")}
    assert len(gammas) == 16  # one per residual block
    started = dict(learner.encoder.named_parameters())
    assert all(not started[name].any() for name in gammas)
    reference.load_state_dict(learner.encoder.state_dict())
    for step, lr in enumerate((0.1, 0.3, 0.2)):  # from the second step on all weights move
        generator = torch.Generator().manual_seed(step)
        views = torch.randn(5, 2, 3, 32, 32, generator=generator).double()
        set_learning_rate(optimizer, lr)
        optimizer.zero_grad()
        loss = run(learner, views)["loss"]
        loss.backward()
        reference.zero_grad()
        expected = contrastive_loss(reference(views))
        expected.backward()
        torch.testing.assert_close(loss, expected)
        trained = {n: p for n, p in learner.encoder.named_parameters() if p.requires_grad}
        theirs = {n: p for n, p in reference.named_parameters() if n in trained}
        assert set(dict(reference.named_parameters())) - set(theirs) == {"head.4.bias"}
        close({n: p.grad for n, p in trained.items()}, {n: p.grad for n, p in theirs.items()})
        optimizer.step()
        learner.after_step()
        lars_step(reference, velocity, lr)
        close(learner.encoder.state_dict(), reference.state_dict())


def test_every_batch_norm_of_simclr_is_synchronized() -> None:
    encoder = build_method(load_config(CONFIG, SMALL)).encoder
    assert {type(norm) for norm in batch_norms(encoder)} == {SyncBatchNorm}
    plain = build_method(load_config(CONFIG, [*SMALL, "SOLVER.SYNC_BATCH_NORM", "False"])).encoder
    assert list(plain.state_dict()) == list(encoder.state_dict())
    assert SyncBatchNorm not in {type(norm) for norm in batch_norms(plain)}


@pytest.mark.parametrize("training", [True, False])
def test_synchronized_networks_compute_the_same_on_one_process(training: bool) -> None:
    """Also where BatchNorm has an activation of its own, and by the code that GPUs run."""
    plain = timm.create_model("efficientnet_lite0", num_classes=0).train(training)
    ours, torchs = copy.deepcopy(plain), copy.deepcopy(plain)
    for network in (ours, torchs):
        synchronize_batch_norm(network)
    for norm in batch_norms(torchs):
        norm.forward = partial(nn.SyncBatchNorm.forward, norm)  # type: ignore[method-assign]
        norm.register_forward_hook(lambda norm, _, output: norm.act(norm.drop(output)))
    images = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    seeded = []
    for network in (plain, ours, torchs):
        torch.manual_seed(0)  # for stochastic depth
        seeded.append(network(images))
    torch.testing.assert_close(seeded[1], seeded[0], rtol=0, atol=0)
    torch.testing.assert_close(seeded[2], seeded[0], rtol=0, atol=0)
    for network in (ours, torchs):
        torch.testing.assert_close(network.state_dict(), plain.state_dict(), rtol=0, atol=0)
