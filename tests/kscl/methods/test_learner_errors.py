"""What is wrong with settings, views or numbers is told by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kscl.errors import KsclError
from kscl.methods.dictionary import Queue
from kscl.methods.learner import Learner
from tests.helpers.networks.learners import DIM, SHARED, make, small_encoder, views_of


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

    @pytest.mark.parametrize("images", [2, 5])
    def test_a_batch_that_does_not_form_the_groups_is_named(self, images: int) -> None:
        learner = make(num_shots=2, batch_norm_groups=2)
        with pytest.raises(KsclError, match=rf"{images} images .* 2 equal groups"):
            learner(views_of(images, 2))
        learner.eval()(views_of(images, 2))  # groups are for training

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
            ("minibatch", {**SHARED, "batch_norm_groups": 2}, "2 groups"),
            ("queue", {"key_batch_norm": "off"}, "'off'"),
            ("queue", {"key_encoder": "slow"}, "'slow'"),
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
            Learner(small_encoder(), Queue(8, 2, DIM, similarity="cosine"))
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
