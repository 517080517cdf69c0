"""Two real processes (gloo) against one process on the joined batch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kscl.engine.loop import TrainState, check_finite
from kscl.errors import KsclError
from kscl.methods.batch_norm import synchronize_batch_norm
from kscl.methods.encoder import Encoder, build_encoder
from kscl.methods.kscl import KSCL
from kscl.runtime.distributed import Shuffle, gather, gather_together, rank, world_size
from tests.helpers.networks import learners
from tests.helpers.networks.learners import learner_with_batch_norm, run, without_gauge

pytestmark = [pytest.mark.full, pytest.mark.portable]

RANKS, BATCH, STEPS, DIM, IMAGES = 2, 3, 3, 8, 20
END_TO_END = {"key_encoder": "shared", "grad_through_keys": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "queue": ("queue", {"num_shots": 3, "rho": 0.9}),
    "MoCo": ("queue", {"num_shots": 1, "similarity": "cosine"}),
    "memory bank": ("bank", {"num_shots": 3, "rho": 0.9}),
    "minibatch": ("minibatch", {"num_shots": 3, "rho": 0.9}),
    "end to end": ("minibatch", {"num_shots": 3, "rho": 0.9, **END_TO_END}),
    "SimCLR": (
        "minibatch",
        {"num_shots": 1, "similarity": "cosine", "symmetric": True, **END_TO_END},
    ),
    "symmetric": ("minibatch", {"num_shots": 3, "rho": 0.9, "symmetric": True, **END_TO_END}),
    "several queries": ("queue", {"num_shots": 3, "rho": 0.9, "num_queries": 2, "num_small": 2}),
    "remembered": ("queue", {"num_shots": 2, "rho": 0.9, "remember": 2, "remember_decay": 0.5}),
    "symmetric, remembered": (
        "minibatch",
        {"similarity": "mean_cosine", "symmetric": True, "remember": 2, **END_TO_END},
    ),
    "SimCLR with small queries": (
        "minibatch",
        {"num_shots": 1, "similarity": "cosine", "symmetric": True, "num_small": 2, **END_TO_END},
    ),
    "SimCLR with SyncBN": (
        "minibatch",
        {
            "num_shots": 1,
            "similarity": "cosine",
            "symmetric": True,
            **END_TO_END,
            "reduction": "sum",
            "num_small": 2,
        },
    ),
}


def make(case: str) -> KSCL:
    """Without SyncBN, GroupNorm: an image's embedding does not depend on its companions."""
    kind, settings = CASES[case]
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8) if case.endswith("SyncBN") else nn.GroupNorm(2, 8)
    backbone = nn.Sequential(
        nn.Conv2d(3, 8, 3), norm, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )
    encoder = Encoder(backbone, nn.Linear(32, DIM))
    synchronize_batch_norm(encoder)
    length = IMAGES if kind == "bank" or "remember" in settings else 10
    settings = {"dim": DIM, "length": length, "bank": 0.5, "momentum": 0.9, **settings}
    return learners.make(kind, encoder=encoder, **settings).double()


def batch_of(step: int, views: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(RANKS * BATCH, views, 3, 6, 6, generator=generator).double()
    return images, torch.randperm(IMAGES, generator=generator)[: RANKS * BATCH]


def train(learner: KSCL, forward: nn.Module, part: slice) -> dict[str, Any]:
    """Losses, gradients of the last step, and the state after some steps."""
    optimizer = torch.optim.SGD(learner.encoder.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        views, indices = batch_of(step, learner.NUM_QUERIES + learner.NUM_SHOTS)
        count = learner.cfg.VIEWS.SMALL.COUNT
        small = batch_of(step, count)[0][part, ..., :4, :4] if count else None
        optimizer.zero_grad()
        loss = run(forward, views[part], indices[part], small)["loss"]
        loss.backward()
        optimizer.step()
        learner.after_step()
        losses.append(loss.detach())
    grads = [p.grad for p in learner.encoder.parameters()]
    return {"losses": torch.stack(losses), "grads": grads, "state": learner.state_dict()}


GROUPED: dict[str, dict[str, Any]] = {
    "keys in train mode": {"num_queries": 2, "num_small": 2},
    "keys in eval mode": {"key_batch_norm": "eval"},
}
GROUPED_BATCH = 8  # over all ranks


def make_grouped(case: str, groups: int) -> KSCL:
    """Every kind of BatchNorm layer there is: of torch in two sizes, and timm's with activation."""
    torch.manual_seed(0)
    backbone = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), BatchNormAct2d(8)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten()),
    )
    head = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, DIM))
    settings = {"num_shots": 3, "rho": 0.9, "momentum": 0.9, **GROUPED[case]}
    return learners.make(
        encoder=Encoder(backbone, head),
        dim=DIM,
        length=24,
        batch_norm_groups=groups,
        **settings,
    ).double()


def train_grouped(case: str, groups: int, ranks: int) -> dict[str, Any]:
    """Train on this rank's part of two accumulated batches per step."""
    learner = make_grouped(case, groups)
    forward = DistributedDataParallel(learner, broadcast_buffers=False) if ranks > 1 else learner
    optimizer = torch.optim.SGD(learner.encoder.parameters(), lr=0.1)
    images = GROUPED_BATCH // ranks
    part, losses = slice(rank() * images, (rank() + 1) * images), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(2):
            numbers = torch.Generator().manual_seed(2 * step + number)
            count = learner.NUM_QUERIES + learner.NUM_SHOTS
            views = torch.randn(GROUPED_BATCH, count, 3, 6, 6, generator=numbers).double()
            crops = learner.cfg.VIEWS.SMALL.COUNT
            small = views[part, :crops, :, :5, :5] if crops else None
            loss = run(forward, views[part], small=small)["loss"]
            loss.backward()
            losses.append(loss.detach())
        grads = [p.grad.clone() for p in learner.encoder.parameters() if p.grad is not None]
        optimizer.step()
        learner.after_step()
    return {"losses": torch.stack(losses), "grads": grads, "state": learner.state_dict()}


def averaged_norm() -> dict[str, Tensor]:
    """A few steps with eval-mode keys; what the key encoder holds afterwards."""
    torch.manual_seed(0)
    encoder = build_encoder("resnet18", {"channels": [4, 4, 8, 8]}, dim=DIM, input_size=32)
    learner = learners.make(
        encoder=encoder, dim=DIM, length=10, num_shots=5, momentum=0.9, key_batch_norm="eval"
    )
    forward = DistributedDataParallel(learner, broadcast_buffers=False)
    optimizer = torch.optim.SGD(learner.encoder.parameters(), lr=0.1)
    for step in range(2):
        torch.manual_seed(10 * step + rank())
        run(forward, torch.randn(BATCH, 6, 3, 32, 32))["loss"].backward()
        optimizer.step()
        learner.after_step()
    assert learner.key_encoder is not None
    return learner.key_encoder.state_dict()


def mates_of_keys() -> Tensor:
    """What the key encoder is given together, (K, B): the first pixels of images that tell."""
    learner = learner_with_batch_norm()
    given: list[Tensor] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        given.append(inputs[0][:, 0, 0, 0])

    assert learner.key_encoder is not None
    learner.key_encoder.register_forward_pre_hook(note)
    views = torch.randn(BATCH, 4, 3, 6, 6).double()
    views[:, :, 0, 0, 0] = (torch.arange(BATCH) + 10 * rank())[:, None]
    run(learner, views)
    return torch.stack(given)


def order_of_work() -> list[str]:
    """What a forward pass begins, in order: messages between ranks, and passes of encoders."""
    learner, begun = learner_with_batch_norm(), list[str]()
    send = dist.all_to_all_single

    def noted(*args: Any, **options: Any) -> Any:
        begun.append("message")
        return send(*args, **options)

    assert learner.key_encoder is not None
    learner.encoder.register_forward_pre_hook(lambda *_: begun.append("queries"))
    learner.key_encoder.register_forward_pre_hook(lambda *_: begun.append("keys"))
    with patch.object(dist, "all_to_all_single", noted):
        run(learner, torch.randn(BATCH, 4, 3, 6, 6).double())
    return begun


def sent_without_waiting(folder: str) -> bool:
    """Whether rank 0 has sent its views, and computes on, while rank 1 has not begun to."""
    sent, views = Path(folder, "sent"), torch.zeros(BATCH, 3, 2)
    if rank() == 0:
        shuffle = Shuffle(views, 0)
        sent.touch()
        early = True
    else:
        late = time.monotonic() + 10
        while not (early := sent.exists()) and time.monotonic() < late:
            time.sleep(0.01)
        shuffle = Shuffle(views, 0)
    shuffle.encode(lambda images: images)
    return early


def message_of_nan() -> str:
    learner = make("queue")
    views, _ = batch_of(0, 4)
    if rank() == 1:
        views[0, 0] = torch.nan
    optimizer, scaler = torch.optim.SGD(learner.parameters()), torch.amp.GradScaler("cpu")
    state = TrainState(learner.cfg, learner, learner, optimizer, scaler, views.device, 1)
    try:
        check_finite(state, views[:BATCH], run(learner, views[:BATCH]))
    except KsclError as error:
        return str(error)
    return ""


def worker(process: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=process, world_size=RANKS
    )
    part = slice(process * BATCH, (process + 1) * BATCH)
    results: dict[str, Any] = {}
    for case in CASES:
        learner = make(case)
        forward = DistributedDataParallel(learner, broadcast_buffers=False)
        results[case] = train(learner, forward, part)
    for case in GROUPED:
        for groups in (1, 2):
            results[case, groups] = train_grouped(case, groups, RANKS)
    mine = torch.arange(4.0)[:, None] + 10 * process
    companions: list[Tensor] = []

    def encode(images: Tensor) -> Tensor:
        companions.append(images.flatten())
        return images * 2

    results["shuffled"] = Shuffle(mine.expand(4, 5)[:, :, None], seed=0).encode(encode)
    results["companions"] = torch.stack(companions)
    images = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(process))
    last = images.contiguous(memory_format=torch.channels_last)
    layouts: list[bool] = []

    def keep(images: Tensor) -> Tensor:
        layouts.append(images.is_contiguous(memory_format=torch.channels_last))
        return images

    results["channels last"] = Shuffle(last[:, None], 0).encode(keep)[:, 0], images
    results["layouts"] = layouts
    results["gathered"] = gather(mine)
    number = torch.tensor([2**62 + process])
    results["together"] = gather_together(mine[:1], number, torch.tensor([[True, False]]))
    results["world"] = world_size()
    results["key encoder"] = averaged_norm()
    results["mates"] = mates_of_keys()
    results["order"] = order_of_work()
    results["sent"] = sent_without_waiting(folder)
    results["nan"] = message_of_nan()
    torch.save(results, f"{folder}/{process}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, (str(folder),), nprocs=RANKS)
    return [torch.load(Path(folder) / f"{process}.pt") for process in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.smoke
def test_two_processes_equal_one_on_the_joined_batch(
    case: str, ranks: list[dict[str, Any]]
) -> None:
    learner = make(case)
    alone = train(learner, learner, slice(None))
    assert alone["losses"][1:].min() > 0
    together = [result[case] for result in ranks]
    torch.testing.assert_close(sum(t["losses"] for t in together) / RANKS, alone["losses"])
    compared = dict if "similarity" in CASES[case][1] else without_gauge
    for result in together:
        torch.testing.assert_close(result["grads"], alone["grads"])
        # With the queue or the bank.
        torch.testing.assert_close(compared(result["state"]), compared(alone["state"]))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("case", GROUPED)
def test_groups_of_batch_norm_equal_as_many_processes(
    case: str, groups: int, ranks: list[dict[str, Any]]
) -> None:
    """With the shuffled keys, running statistics and counters that the processes have."""
    alone = train_grouped(case, groups * RANKS, 1)
    together = [result[case, groups] for result in ranks]
    torch.testing.assert_close(sum(t["losses"] for t in together) / RANKS, alone["losses"])
    for result in together:
        torch.testing.assert_close(result["grads"], alone["grads"])
        torch.testing.assert_close(without_gauge(result["state"]), without_gauge(alone["state"]))
    plain = train_grouped(case, 1, 1)
    assert list(plain["state"]) == list(alone["state"])
    assert not torch.allclose(plain["losses"], alone["losses"], rtol=1e-3)


def test_shuffled_images_come_back_in_order_after_meeting_those_of_other_ranks(
    ranks: list[dict[str, Any]],
) -> None:
    for process, result in enumerate(ranks):
        mine = torch.arange(4.0)[:, None] + 10 * process
        assert result["world"] == RANKS
        assert torch.equal(result["shuffled"], 2 * mine.expand(4, 5)[:, :, None])
        assert torch.equal(
            result["gathered"].flatten(), torch.tensor([0.0, 1, 2, 3, 10, 11, 12, 13])
        )
        from_others = (result["companions"] >= 10) != (process == 1)
        assert from_others.any()
    met = torch.cat([result["companions"] for result in ranks], 1).sort().values
    assert torch.equal(met, torch.tensor([0.0, 1, 2, 3, 10, 11, 12, 13]).expand(5, 8))
    assert len({tuple(one.tolist()) for one in ranks[0]["companions"]}) > 1


def test_each_key_view_is_shuffled_over_the_ranks_in_its_own_way(
    ranks: list[dict[str, Any]],
) -> None:
    together = torch.cat([result["mates"] for result in ranks], 1)  # (K, all ranks' images)
    assert torch.equal(
        together.sort().values, together.new_tensor([0, 1, 2, 10, 11, 12]).expand(3, 6)
    )
    assert (ranks[0]["mates"] >= 10).any()
    assert len({tuple(view.tolist()) for view in together}) > 1


def test_key_views_travel_while_the_queries_are_encoded(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["order"] == ["message", "queries", "keys", "keys", "keys", "message"]
        assert result["sent"]


def test_channels_last_images_are_shuffled_whole(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        returned, images = result["channels last"]
        assert torch.equal(returned, images)
        assert result["layouts"] == [True]


def test_tensors_of_several_types_are_gathered_as_they_are(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        first, number, flags = result["together"]
        assert torch.equal(first, torch.tensor([[0.0], [10.0]]))
        assert torch.equal(number, torch.tensor([2**62, 2**62 + 1]))
        assert torch.equal(flags, torch.tensor([[True, False]] * 2))


def test_key_encoders_stay_the_same_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    one, two = (result["key encoder"] for result in ranks)
    assert one["backbone.bn1.running_mean"].any()
    torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_a_nan_is_reported_by_the_rank_that_has_it(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["nan"] == ""
    assert "rank 1 at step 0 in the views" in ranks[1]["nan"]


def test_one_process_gathers_and_shuffles_nothing() -> None:
    images = torch.arange(4.0)
    assert torch.equal(gather(images), images)
    assert torch.equal(Shuffle(images[:, None], 0).encode(lambda x: x + 1), images[:, None] + 1)
