"""Why each setting of a written suite has its value, in a few words by its key."""

from __future__ import annotations

from kscl.benchmark.start.choose import (
    MOST_EPOCHS,
    MOST_ITERATIONS,
    OBJECT_PIXELS,
    Plan,
)
from kscl.benchmark.start.facts import Boxes, Facts

CONFIG = "what is not said below is in this file of configs/"
GROUPS = "keys are shuffled among so many parts of the batch, as among MoCo's eight GPUs"
IN_THE_MINUTES = "what fits into the minutes"

OF_KSCL = {
    "METHOD.SIMILARITY": "a query is compared with the subspace of several keys, not with one",
    "METHOD.NUM_SHOTS": "K, the number of keys of each image",
    "METHOD.RHO": "fraction of the eigenvalues' sum that a subspace keeps",
}

OF_PROBES = {
    "DATA.TRAIN": "one folder per class, to train the classifier on",
    "DATA.VAL": "and to test it on",
    "INPUT.SIZE": "as large as the views of pretraining",
    "INPUT.RESIZE": "the shorter side before the crop: nothing of it is cut off",
}


def of_pretraining(facts: Facts, plan: Plan) -> dict[str, str]:
    """Return the reasons for the settings that both pretrainings have."""
    what = "tiles" if facts.has_tiles else "images"
    cut = f" of {facts.num_photos} images: crops of a whole one would show different objects"
    return {
        "DATA.TRAIN": f"{facts.num_pretrain} {what}{cut if facts.has_tiles else ''}; none like a "
        "test image",
        "INPUT.SIZE": "small views: on a CPU, more epochs help more than more pixels",
        "SOLVER.BATCH_SIZE": f"at most half of the {what}",
        "KEY_ENCODER.BATCH_NORM_GROUPS": GROUPS,
        "DICTIONARY.QUEUE_LENGTH": f"shorter than the {facts.num_pretrain} {what}: a longer queue "
        "would hold the query's own one",
        "SOLVER.EPOCHS": _length(plan.moco_epochs, MOST_EPOCHS),
        "SOLVER.WARMUP_EPOCHS": "a tenth of the epochs, in which the learning rate rises",
        "CHECKPOINT.PERIOD_EPOCHS": "about ten checkpoints in all, to resume from",
        "AUGMENT": "large crops, so that two of them share an object",
    }


def of_detection(facts: Facts, plan: Plan) -> dict[str, str]:
    """Return the reasons for the settings of the detector."""
    assert facts.boxes is not None
    return {
        **of_boxes(facts.boxes),
        "MODEL.ANCHOR_GENERATOR.SIZES": "k-means over the boxes at this input size",
        "INPUT.MIN_SIZE_TRAIN": f"an object of median size then has {OBJECT_PIXELS} pixels, "
        "within 128 to 320 for the whole side",
        "INPUT.MAX_SIZE_TRAIN": "of the longer side: 1.5 times the shorter one",
        "INPUT.MIN_SIZE_TEST": "tested at the size of training",
        "INPUT.MAX_SIZE_TEST": "of the longer side, as in training",
        "SOLVER.IMS_PER_BATCH": "few images at a time, for more iterations in the same minutes",
        "SOLVER.MAX_ITER": _length(plan.iterations, MOST_ITERATIONS),
        "SOLVER.STEPS": "after 80 % of the iterations the learning rate falls to a tenth",
        "SOLVER.WARMUP_ITERS": "a sixth of the iterations, in which the learning rate rises",
    }


def of_boxes(boxes: Boxes) -> dict[str, str]:
    """Return the reasons for what follows from the annotated images alone."""
    return {
        "DATASETS.TRAIN": "annotated images to fine-tune on",
        "DATASETS.TEST": "images to test on; nothing is trained or chosen on them",
        "MODEL.ROI_HEADS.NUM_CLASSES": ", ".join(boxes.class_names[:8]),
        "KSCL.PROTOCOL": "the name of this data and schedule on the board",
    }


def _length(chosen: int, most: int) -> str:
    return IN_THE_MINUTES if chosen < most else f"no more than {most}, whatever the minutes"
