"""Real pictures for the tests of linear_eval, offline: scikit-learn's handwritten digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from kscl.runtime.processes import StopRequest
from linear_eval.probe import load_linear_eval_config

SIDE = 24
NARROW = "{layers: [1, 1, 1, 1], channels: [8, 8, 16, 32]}"


def write_digits(folder: Path, train: int = 16, val: int = 6) -> Path:
    """Write `train` and `val` images per class into class folders; return the folder."""
    digits = load_digits()
    for number in range(10):
        pictures = digits.images[digits.target == number]
        for split, part in (("train", pictures[:train]), ("val", pictures[train : train + val])):
            target = folder / split / f"digit_{number}"
            target.mkdir(parents=True)
            for place, picture in enumerate(part):
                pixels = np.round(picture * (255 / 16)).astype(np.uint8)
                enlarged = Image.fromarray(pixels).resize(
                    (SIDE + 4, SIDE), Image.Resampling.BICUBIC
                )
                enlarged.convert("RGB").save(target / f"{place:03d}.png")
    return folder


def overrides(data: Path, output: Path, *more: object) -> list[str]:
    """Return a small evaluation of random weights as the command line takes it."""
    words = {
        "OUTPUT_DIR": output,
        "BACKBONE.WEIGHTS": "random",
        "BACKBONE.NAME": "resnet18",
        "BACKBONE.KWARGS": NARROW,
        "BACKBONE.CALIBRATION_IMAGES": 64,
        "DATA.TRAIN": data / "train",
        "DATA.VAL": data / "val",
        "DATA.NUM_WORKERS": 0,
        "DATA.CACHE_DIR": data / "cache",
        "INPUT.SIZE": SIDE,
        "INPUT.RESIZE": SIDE,
        "SOLVER.EPOCHS": 4,
        "SOLVER.MILESTONES": "[2, 3]",
        "SOLVER.BATCH_SIZE": 32,
        "SOLVER.BASE_LR": 0.1,
    }
    words |= dict(zip(more[::2], more[1::2], strict=True))
    return [str(word) for pair in words.items() for word in pair]


def config(data: Path, output: Path, *more: object):
    return load_linear_eval_config(None, overrides(data, output, *more))


NEVER = StopRequest()
