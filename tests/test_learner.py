"""One learner, many settings: each against a formula written out by hand, step by step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kscl.config import load_config
from kscl.dictionary import Dictionary, MemoryBank, Minibatch, Queue
from kscl.encoder import Encoder, build_encoder
from kscl.errors import KsclError
from kscl.learner import Learner, build_learner, leave_one_out, subspace_rank

DIM = 10
SIZE = 4
TAU = 0.2


def small_encoder(seed: int = 0) -> Encoder:
    """No BatchNorm, double precision: what is compared is the method and nothing else."""
    torch.manual_seed(seed)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 16), nn.Tanh())
    return Encoder(backbone, nn.Linear(16, DIM)).double()


def views_of(batch: int, shots: int, seed: int = 0, spread: float = 0.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(batch, 1, 3, SIZE, SIZE, generator=generator)
    noise = torch.randn(batch, shots + 1, 3, SIZE, SIZE, generator=generator)
    return (image + spread * noise).double()


def make(
    dictionary: str = "queue", *, length: int = 12, bank: float = 0.0, **settings: Any
) -> Learner:
    settings = {"num_shots": 1, "similarity": "projection", "rho": 0.4, **settings}
    signed = settings["similarity"] != "projection"
    rank = subspace_rank(settings["similarity"], settings["num_shots"], settings["rho"])
    store: Dictionary
    if dictionary == "queue":
        store = Queue(length, rank, DIM, signed=signed)
    elif dictionary == "bank":
        store = MemoryBank(length, rank, DIM, momentum=bank, signed=signed)
    else:
        store = Minibatch(signed=signed)
    learner = Learner(small_encoder(), store.double(), temperature=TAU, **settings)
    return learner.double()


SHARED = {"key_encoder": "shared"}
END_TO_END = {**SHARED, "grad_through_keys": True}


def gradients(learner: Learner, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(learner.encoder.parameters())))


def kept_vectors(keys: Tensor, rho: float) -> Tensor:
    """Eigenvectors (L, D) of the D x D matrix of one instance's keys (K, D), by autograd's eigh."""
    values, vectors = torch.linalg.eigh(keys.T @ keys)
    kept = 1
    while values.flip(0)[:kept].sum() < rho * len(keys) - 1e-9:
        kept += 1
    return vectors.T.flip(0)[:kept]


def one_step(
    learner: Learner, views: Tensor, optimizer: torch.optim.Optimizer, **more: Any
) -> dict[str, Tensor]:
    optimizer.zero_grad()
    figures = learner(views, **more)
    figures["loss"].backward()
    optimizer.step()
    learner.after_step()
    return figures


def mean_of(figures: list[dict[str, Tensor]], key: str) -> float:
    return sum(one[key].item() for one in figures) / len(figures)


class TestMoco:
    def test_cosine_with_one_shot_is_moco_over_several_steps(self) -> None:
        """Loss, weights, key encoder and queue of a MoCo written out by hand."""
        learner = make(similarity="cosine", momentum=0.9)
        optimizer = torch.optim.SGD(learner.encoder.parameters(), lr=0.5, momentum=0.9)
        query_net, key_net = small_encoder(), small_encoder()
        reference = torch.optim.SGD(query_net.parameters(), lr=0.5, momentum=0.9)
        queue = torch.zeros(0, DIM).double()
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
        held = learner.dictionary.slots[0].roll(-int(learner.dictionary.pointer), 0)
        torch.testing.assert_close(held, queue)

    def test_gradients_equal_those_of_info_nce(self) -> None:
        learner = make(similarity="cosine")
        learner(views_of(12, 1))
        learner.after_step()
        assert isinstance(learner.dictionary, Queue)
        queue, views = learner.dictionary.slots[0].clone(), views_of(4, 1, seed=1)
        q, k = learner.encoder(views[:, 0]), learner.embed_keys(views[:, 1:])[:, 0]
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / TAU
        expected = gradients(learner, F.cross_entropy(logits, torch.zeros(4, dtype=torch.long)))
        torch.testing.assert_close(gradients(learner, learner(views)["loss"]), expected)

    def test_projection_with_one_shot_is_info_nce_of_absolute_cosines(self) -> None:
        learner = make(similarity="projection")
        learner(views_of(12, 1))
        learner.after_step()
        assert isinstance(learner.dictionary, Queue)
        queue, views = learner.dictionary.slots[0].clone(), views_of(4, 1, seed=1)
        q, k = learner.encoder(views[:, 0]), learner.embed_keys(views[:, 1:])[:, 0]
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1).abs() / TAU
        expected = F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
        loss = learner(views)["loss"]
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
        loss = learner(views)["loss"]
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients(learner, loss), gradients(learner, expected))


class TestKscl:
    @pytest.mark.parametrize("rho", [0.4, 0.9])
    def test_queue_loss_equals_the_paper_written_out(self, rho: float) -> None:
        learner = make(num_shots=5, rho=rho)
        earlier, views = views_of(12, 5), views_of(4, 5, seed=1)
        negatives = [kept_vectors(keys, rho) for keys in learner.embed_keys(earlier[:, 1:])]
        learner(earlier)
        learner.after_step()
        total = torch.zeros(()).double()
        for v, keys in zip(
            learner.encoder(views[:, 0]), learner.embed_keys(views[:, 1:]), strict=True
        ):
            lengths = [(w @ v).norm() for w in (kept_vectors(keys, rho), *negatives)]
            total = total - (torch.stack(lengths) / TAU).log_softmax(0)[0] / 4
        loss = learner(views)["loss"]
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
        loss = learner(views)["loss"]
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients(learner, loss), gradients(learner, expected))

    def test_symmetric_loss_counts_the_subspaces_it_says(self) -> None:
        learner = make("minibatch", num_shots=2, rho=1.0, symmetric=True, **END_TO_END)
        views = views_of(3, 2, spread=2.0)
        every = torch.stack([learner.encoder(view) for view in views.unbind(1)], 1)
        total = torch.zeros(()).double()
        for i in range(3):
            for t in range(3):

                def others(j: int, s: int) -> Tensor:
                    return kept_vectors(torch.stack([every[j, r] for r in range(3) if r != s]), 1.0)

                own = others(i, t)
                rest = [others(j, s) for j in range(3) if j != i for s in range(3)]
                assert len(rest) == 6
                lengths = torch.stack([(w @ every[i, t]).norm() for w in (own, *rest)])
                total = total - (lengths / TAU).log_softmax(0)[0] / 9
        loss = learner(views)["loss"]
        torch.testing.assert_close(loss, total)
        torch.testing.assert_close(gradients(learner, loss), gradients(learner, total))

    def test_without_gradients_through_the_keys_only_queries_are_trained(self) -> None:
        views = views_of(4, 3)
        with_keys = make("minibatch", num_shots=3, **END_TO_END)
        without = make("minibatch", num_shots=3, **SHARED)
        one, two = with_keys(views)["loss"], without(views)["loss"]
        torch.testing.assert_close(one, two)
        momentum = make("minibatch", num_shots=3)
        query_only = gradients(without, two)
        torch.testing.assert_close(query_only, gradients(momentum, momentum(views)["loss"]))
        assert not torch.allclose(gradients(with_keys, one)[0], query_only[0])

    def test_control_compares_with_the_normalised_mean_of_the_keys(self) -> None:
        learner = make("minibatch", num_shots=5, similarity="mean_cosine")
        views = views_of(4, 5)
        means = F.normalize(learner.embed_keys(views[:, 1:]).mean(1), dim=1)
        logits = learner.encoder(views[:, 0]) @ means.T / TAU
        torch.testing.assert_close(learner(views)["loss"], F.cross_entropy(logits, torch.arange(4)))

    def test_memory_bank_compares_with_all_other_images_seen(self) -> None:
        learner = make("bank", length=9, num_shots=3)
        first, second = torch.tensor([1, 5, 8]), torch.tensor([5, 2])
        earlier, views = views_of(3, 3), views_of(2, 3, seed=1)
        stored = [kept_vectors(keys, 0.4) for keys in learner.embed_keys(earlier[:, 1:])]
        learner(earlier, first)
        learner.after_step()
        total = torch.zeros(()).double()
        keys = learner.embed_keys(views[:, 1:])
        for m, v in enumerate(learner.encoder(views[:, 0])):
            rest = [w for w, image in zip(stored, first, strict=True) if image != second[m]]
            lengths = torch.stack([(w @ v).norm() for w in (kept_vectors(keys[m], 0.4), *rest)])
            total = total - (lengths / TAU).log_softmax(0)[0] / 2
        torch.testing.assert_close(learner(views, second)["loss"], total)

    def test_health_figures_are_what_they_say(self) -> None:
        learner = make("minibatch", num_shots=5, rho=0.9)
        views = views_of(6, 5)
        figures = learner(views)
        assert not any(value.requires_grad for key, value in figures.items() if key != "loss")
        query, keys = learner.encoder(views[:, 0]), learner.embed_keys(views[:, 1:])
        bases = [kept_vectors(k, 0.9) for k in keys]
        lengths = torch.stack([torch.stack([(w @ v).norm() for w in bases]) for v in query])
        others = lengths.masked_fill(torch.eye(6).bool(), 0).amax(1)
        mass = [(w @ k.T).square().sum() / 5 for w, k in zip(bases, keys, strict=True)]
        expected = {
            "instance_top1": (lengths.argmax(1) == torch.arange(6)).double().mean(),
            "mean_rank": torch.tensor([float(len(w)) for w in bases]).mean(),
            "eigenvalue_mass": torch.stack(mass).mean(),
            "positive_length": lengths.diagonal().mean(),
            "hardest_negative_length": others.mean(),
            "embedding_spread": query.var(0, correction=0).sum(),
        }
        assert set(figures) == {"loss", *expected}
        for key, value in expected.items():
            assert figures[key].item() == pytest.approx(value.item()), key


class TestSteps:
    def test_accumulated_batches_are_stored_together_after_the_step(self) -> None:
        learner = make(num_shots=2, rho=1.0, momentum=0.5)
        together = copy.deepcopy(learner)
        before = [p.clone() for p in learner.key_encoder.parameters()]  # type: ignore[union-attr]
        one, two = views_of(4, 2), views_of(4, 2, seed=1)
        for views in (one, two):
            learner(views)["loss"].backward()
        assert isinstance(learner.dictionary, Queue)
        assert int(learner.dictionary.count) == 0
        together(torch.cat([one, two]))
        learner.after_step()
        together.after_step()
        torch.testing.assert_close(learner.state_dict(), together.state_dict())
        assert int(learner.dictionary.count) == 8
        after = list(learner.key_encoder.parameters())  # type: ignore[union-attr]
        torch.testing.assert_close(after, before)  # no optimizer ran: nothing to follow

    def test_a_forgotten_after_step_is_an_error(self) -> None:
        learner = make()
        optimizer = torch.optim.SGD(learner.encoder.parameters(), lr=0.1)
        learner(views_of(4, 1))["loss"].backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"after_step\(\) was not called"):
            learner(views_of(4, 1))

    def test_evaluation_leaves_no_trace(self) -> None:
        learner = make(num_shots=2)
        before = copy.deepcopy(learner.state_dict())
        with torch.no_grad():
            learner.eval()(views_of(4, 2))
        learner.train().after_step()
        before["steps"] += 1
        torch.testing.assert_close(learner.state_dict(), before)

    @pytest.mark.parametrize("norm", ["train", "eval"])
    @pytest.mark.parametrize("dictionary", ["queue", "bank"])
    def test_a_restored_run_goes_on_to_the_bit(self, dictionary: str, norm: str) -> None:
        def fresh() -> tuple[Learner, torch.optim.Optimizer]:
            torch.manual_seed(0)
            encoder = build_encoder("resnet18", {"channels": [4, 4, 8, 8]}, dim=8, input_size=32)
            store = Queue(10, 2, 8) if dictionary == "queue" else MemoryBank(10, 2, 8, momentum=0.5)
            learner = Learner(encoder, store, num_shots=4, momentum=0.9, key_batch_norm=norm)
            return learner, torch.optim.SGD(learner.encoder.parameters(), lr=0.1, momentum=0.9)

        batches = [(torch.randn(4, 5, 3, 32, 32), torch.randperm(10)[:4]) for _ in range(4)]
        whole, optimizer = fresh()
        for views, indices in batches:
            one_step(whole, views, optimizer, indices=indices)
        first, optimizer = fresh()
        for views, indices in batches[:2]:
            one_step(first, views, optimizer, indices=indices)
        second, rest = fresh()
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        rest.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for views, indices in batches[2:]:
            one_step(second, views, rest, indices=indices)
        for key, value in whole.state_dict().items():
            assert torch.equal(value, second.state_dict()[key]), key


class TestBatchNorm:
    @staticmethod
    def learner(norm: str) -> Learner:
        torch.manual_seed(0)
        encoder = build_encoder("resnet18", {"channels": [4, 4, 8, 8]}, dim=8, input_size=32)
        return Learner(encoder, Queue(16, 2, 8), num_shots=3, rho=0.6, key_batch_norm=norm)

    def test_each_key_view_is_a_batch_of_its_own(self) -> None:
        learner, views = self.learner("train"), torch.randn(6, 3, 3, 32, 32)
        keys = learner.embed_keys(views)
        views[:, 0] *= 10
        other = learner.embed_keys(views)
        assert torch.equal(keys[:, 1:], other[:, 1:])
        twin = copy.deepcopy(learner.encoder).train()
        torch.testing.assert_close(keys[:, 2], twin(views[:, 2]))

    def test_averaged_statistics_follow_the_query_encoder(self) -> None:
        learner, views = self.learner("eval"), torch.randn(6, 4, 3, 32, 32) * 2 + 1
        twin = learner.key_encoder
        assert twin is not None
        learner.train()
        assert learner.encoder.training
        assert not twin.training
        figures = learner(views)
        assert figures["embedding_spread"] > 0.01
        calibrated = twin.backbone.bn1.running_mean.clone()  # type: ignore[operator, union-attr]
        assert calibrated.abs().max() > 0.05
        query = learner.encoder.backbone.bn1.running_mean  # type: ignore[union-attr]
        expected = 0.999 * calibrated + 0.001 * query  # type: ignore[operator]
        learner.after_step()
        torch.testing.assert_close(twin.backbone.bn1.running_mean, expected)  # type: ignore[union-attr]


class TestPrecision:
    def test_subspaces_stay_in_single_precision_under_autocast(self) -> None:
        learner = make(num_shots=5, rho=0.9).float()
        learner.encoder.forward = lambda images: F.normalize(images.flatten(1)[:, :DIM], dim=1)  # type: ignore[method-assign]
        learner.key_encoder = learner.encoder
        views = views_of(8, 5).float()
        expected = learner(views)
        learner.after_step()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (views[0, 0, 0] @ views[0, 0, 0]).dtype == torch.bfloat16
            figures = learner(views)
        assert figures["mean_rank"] > 2
        torch.testing.assert_close(figures["positive_length"], expected["positive_length"])
        learner.after_step()
        assert isinstance(learner.dictionary, Queue)
        slots, rank = learner.dictionary.filled()
        basis, kept = slots.transpose(0, 1), torch.arange(len(slots)) < rank[:, None]
        torch.testing.assert_close(basis @ basis.mT, torch.diag_embed(kept.float()))


class TestErrors:
    @pytest.mark.parametrize(
        ("views", "named"),
        [
            (torch.zeros(2, 2, 3, 4, 4), r"\(B, 3, 3, H, W\).*\(2, 2, 3, 4, 4\)"),
            (torch.zeros(2, 3, 3, 4, 4, dtype=torch.uint8), "uint8"),
            (torch.zeros(0, 3, 3, 4, 4), r"\(0, 3"),
            (torch.zeros(2, 3, 4, 4), r"\(2, 3, 4, 4\)"),
        ],
    )
    def test_wrong_views_are_named(self, views: Tensor, named: str) -> None:
        with pytest.raises(KsclError, match=named):
            make(num_shots=2)(views)

    def test_nan_in_the_views_is_named_with_rank_step_and_tensor(self) -> None:
        learner = make(num_shots=2, rho=1.0)
        learner(views_of(4, 2))
        learner.after_step()
        views = views_of(4, 2)
        views[2, 1, 0, 0, 0] = torch.nan
        with pytest.raises(
            KsclError, match=r"rank 0 at step 1 in the views of 1 of 4 \(.*number 2"
        ):
            learner(views)

    def test_nan_in_the_weights_is_named_by_what_it_spoils(self) -> None:
        learner = make(num_shots=2)
        with torch.no_grad():
            learner.encoder.head.weight.fill_(torch.inf)  # type: ignore[union-attr, operator]
        with pytest.raises(
            KsclError, match=r"step 0 in the query embeddings of 4 of 4.*learning rate"
        ):
            learner(views_of(4, 2))
        learner = make(num_shots=2)
        with torch.no_grad():
            learner.key_encoder.head.weight.fill_(torch.nan)  # type: ignore[union-attr, operator]
        with pytest.raises(KsclError, match="key embeddings"):
            learner(views_of(4, 2))

    @pytest.mark.parametrize(
        ("dictionary", "settings", "named"),
        [
            ("queue", {"similarity": "cosine", "num_shots": 2}, "cosine compares with one key"),
            ("queue", {"similarity": "dot"}, "similarity 'dot'"),
            ("queue", {"key_batch_norm": "off"}, "'off'"),
            ("queue", {"key_encoder": "twin"}, "'twin'"),
            ("queue", {"momentum": 1.5}, "momentum is 1.5"),
            ("queue", {"grad_through_keys": True}, "minibatch dictionary"),
            ("minibatch", {"grad_through_keys": True}, "shared encoder"),
            ("minibatch", {"symmetric": True}, "shared encoder"),
            ("minibatch", {**SHARED, "key_batch_norm": "eval"}, "shared encoder"),
            ("queue", {"rho": 0.0}, "rho is 0"),
            ("queue", {"num_shots": 0}, "0 key views"),
        ],
    )
    def test_settings_that_contradict_each_other_are_named(
        self, dictionary: str, settings: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(KsclError, match=named):
            make(dictionary, **settings)

    def test_a_dictionary_for_other_settings_is_refused(self) -> None:
        with pytest.raises(KsclError, match="not made for"):
            Learner(small_encoder(), Queue(8, 2, DIM, signed=True))
        with pytest.raises(KsclError, match="stores 1 basis vectors"):
            Learner(small_encoder(), Queue(8, 1, DIM))
        with pytest.raises(KsclError, match="temperature"):
            Learner(small_encoder(), Queue(8, 2, DIM), temperature=0)

    def test_a_memory_bank_asks_for_indices_that_fit(self) -> None:
        learner, views = make("bank", length=9), views_of(2, 1)
        with pytest.raises(KsclError, match=r"indices \(B,\)"):
            learner(views)
        with pytest.raises(KsclError, match="3 to 9 do not fit a memory bank of 9"):
            learner(views, torch.tensor([3, 9]))

    def test_a_queue_of_another_length_is_refused(self) -> None:
        with pytest.raises(KsclError, match="saved queue is 1 x 12 x 10"):
            make(length=16).load_state_dict(make(length=12).state_dict())


NARROW = [
    "BACKBONE.NAME",
    "resnet18",
    "BACKBONE.KWARGS",
    "{channels: [8, 8, 8, 8]}",
    "HEAD.DIM",
    "16",
]
SETTINGS = {
    "KSCL": ["METHOD.NUM_SHOTS", "3"],
    "KSCL, averaged statistics": ["METHOD.NUM_SHOTS", "3", "KEY_ENCODER.BATCH_NORM", "eval"],
    "KSCL in a memory bank": ["METHOD.NUM_SHOTS", "3", "DICTIONARY.TYPE", "memory_bank"],
    "KSCL in the minibatch": ["METHOD.NUM_SHOTS", "3", "DICTIONARY.TYPE", "minibatch"],
    "KSCL end to end": [
        *("METHOD.NUM_SHOTS", "3", "METHOD.RHO", "0.9", "DICTIONARY.TYPE", "minibatch"),
        *("KEY_ENCODER.TYPE", "shared", "METHOD.GRAD_THROUGH_KEYS", "True"),
    ],
    "mean of the keys": ["METHOD.NUM_SHOTS", "3", "METHOD.SIMILARITY", "mean_cosine"],
    "MoCo v1": [
        *("METHOD.NUM_SHOTS", "1", "METHOD.SIMILARITY", "cosine", "HEAD.TYPE", "linear"),
        *("METHOD.TEMPERATURE", "0.07"),
    ],
    "MoCo v2": ["METHOD.NUM_SHOTS", "1", "METHOD.SIMILARITY", "cosine"],
    "SimCLR": [
        *("METHOD.NUM_SHOTS", "1", "METHOD.SIMILARITY", "cosine", "DICTIONARY.TYPE", "minibatch"),
        *("KEY_ENCODER.TYPE", "shared", "METHOD.GRAD_THROUGH_KEYS", "True"),
        *("METHOD.SYMMETRIC", "True"),
    ],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_method_is_a_setting_and_learns_to_tell_images_apart(name: str) -> None:
    small = ["INPUT.SIZE", "16", "DICTIONARY.QUEUE_LENGTH", "32", "SOLVER.BATCH_SIZE", "16"]
    cfg = load_config(None, [*NARROW, *small, "KEY_ENCODER.MOMENTUM", "0.9", *SETTINGS[name]])
    torch.manual_seed(1)
    learner = build_learner(cfg, num_images=48)
    optimizer = torch.optim.SGD(learner.encoder.parameters(), lr=0.05, momentum=0.9)
    images = F.interpolate(torch.randn(48, 3, 2, 2), size=16)[:, None]  # four coloured squares
    figures = []
    for step in range(30):
        indices = torch.arange(16) + 16 * (step % 3)
        views = images[indices] + 0.5 * torch.randn(16, learner.num_shots + 1, 3, 16, 16)
        figures.append(one_step(learner, views, optimizer, indices=indices))
    first, last = figures[3:8], figures[-5:]  # from the fourth step on every dictionary is full
    assert mean_of(last, "loss") < mean_of(first, "loss")
    assert mean_of(last, "instance_top1") > mean_of(first, "instance_top1") + 0.1


def test_an_unknown_number_of_images_stops_a_memory_bank() -> None:
    cfg = load_config(None, [*NARROW, "DICTIONARY.TYPE", "memory_bank"])
    with pytest.raises(KsclError, match="how many images"):
        build_learner(cfg)


def test_leave_one_out_gives_each_view_the_others_in_order() -> None:
    embeddings = torch.arange(6.0).reshape(1, 3, 2)
    others = leave_one_out(embeddings)[0, :, :, 0].tolist()
    assert others == [[2, 4], [0, 4], [0, 2]]
