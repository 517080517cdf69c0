"""Values of a config that are refused, alone and together, each with the reason."""

from __future__ import annotations

import pytest

from kscl.keys import load_config
from tests.kscl.config.test_merge import errors_of, write


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["METHOD.SIMILARITY", "cosine"], "set NUM_SHOTS 1"),
        (["KEY_ENCODER.TYPE", "shared"], "needs the slow momentum encoder"),
        (["METHOD.GRAD_THROUGH_KEYS", "True"], "only keys of this batch carry gradients"),
        (["METHOD.SYMMETRIC", "True"], "within a minibatch"),
        (["SOLVER.WARMUP_EPOCHS", "200"], "warm-up must end"),
        (["SOLVER.SCHEDULE", "step", "SOLVER.EPOCHS", "100"], "rising epochs inside the training"),
        (["SOLVER.OPTIMIZER", "lars", "SOLVER.WEIGHT_DECAY", "0"], "set WEIGHT_DECAY above 0"),
        (["INPUT.MEAN", "[0.5]"], "3 numbers"),
        (["INPUT.STD", "[0.5, 0, 0.5]"], "greater than 0"),
        (["KEY_ENCODER.BATCH_NORM_GROUPS", "0"], "at least 1"),
        (["KEY_ENCODER.BATCH_NORM_GROUPS", "3"], "256 images of a forward pass"),
        (["KEY_ENCODER.BATCH_NORM_GROUPS", "256"], "256 images of a forward pass"),
        (
            ["KEY_ENCODER.BATCH_NORM_GROUPS", "8", "SOLVER.GRAD_ACCUM_STEPS", "64"],
            "4 images of a forward pass",
        ),
        (
            ["KEY_ENCODER.BATCH_NORM_GROUPS", "8", "KEY_ENCODER.TYPE", "shared"],
            "set BATCH_NORM_GROUPS 1",
        ),
        (["DICTIONARY.TYPE", "minibatch", "SOLVER.BATCH_SIZE", "1"], "no other instance"),
        (["AUGMENT", "[{op: colour_jitter}]"], "color_jitter"),
        (["AUGMENT_KEYS", "moco_v3"], "moco_v2"),
        (["VIEWS.SMALL.COUNT", "-1"], "at least 0"),
        (["VIEWS.SMALL.COUNT", "4", "INPUT.SIZE", "40"], "set it to at most 40"),
        (["VIEWS.SMALL.COUNT", "4", "INPUT.SIZE", "[[0, 64], [9, 128]]"], "set it to at most 64"),
        (["VIEWS.SMALL.COUNT", "4", "AUGMENT", "[{op: horizontal_flip}]"], "add that op"),
        (["METHOD.NUM_QUERIES", "0"], "at least 1"),
        (["INPUT.SIZE", "[[0, 160], [9, 224]]", "SOLVER.MAX_STEPS", "9"], "MAX_STEPS 0"),
        (["INPUT.SIZE", "[[1, 160], [9, 224]]"], "from 0 on"),
        (["INPUT.SIZE", "[[0, 160], [9, 192], [5, 224]]"], "rising epochs"),
        (["INPUT.SIZE", "[[0, 160], [200, 224]]"], "before the end"),
        (["INPUT.SIZE", "[[0, 160, 3]]"], "pairs"),
        (["INPUT.SIZE", "[[0, 4]]"], "at least 8 pixels"),
    ],
)
def test_values_that_cannot_be_together_are_refused_with_the_reason(overrides, reason):
    assert reason in errors_of(None, overrides)


@pytest.mark.parametrize("nothing", ["null", "None"])
def test_the_recipe_of_the_keys_can_be_unset_over_a_file_that_sets_it(tmp_path, nothing):
    base = write(tmp_path / "a.yaml", "AUGMENT_KEYS: moco_v1\n")
    file = write(tmp_path / "b.yaml", "_BASE_: a.yaml\nAUGMENT_KEYS: null\n")
    assert load_config(base).AUGMENT_KEYS
    assert load_config(file).AUGMENT_KEYS is None
    assert load_config(base, ["AUGMENT_KEYS", nothing]).AUGMENT_KEYS is None
