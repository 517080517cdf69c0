"""Run a trained detector on any image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from detectron2.data.transforms import ResizeShortestEdge

from detection import MIN_SCORE
from detection.config import check_version, load_detection_config
from detection.train.detector import DETECTOR_FILE, load_detector
from detection.train.model import build_detector
from kscl.config import CONFIG_FILE
from kscl.data.formats import UnreadableImage, decode_image
from kscl.data.source import read_file
from kscl.errors import KsclError
from kscl.records.record import RECORD_FILE, WORKING_AP50, read_record


@dataclass(frozen=True)
class Found:
    """One object; the box is (x1, y1, x2, y2) in pixels of the upright picture, 0-based."""

    name: str
    score: float
    box: tuple[float, float, float, float]


Predictor = Callable[[np.ndarray], list[Found]]


def load_predictor(run: str | Path, min_score: float = MIN_SCORE) -> Predictor:
    """Return a function from an RGB picture (uint8) to its objects with at least `min_score`."""
    folder = find_run(Path(run))
    cfg = load_detection_config(folder / CONFIG_FILE, rules=check_version)
    cfg.MODEL.DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
    names = read_record(folder / RECORD_FILE)["details"]["classes"]
    model = build_detector(cfg)
    load_detector(model, folder / DETECTOR_FILE)
    model.eval()
    resize = ResizeShortestEdge(cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST)

    def predict(picture: np.ndarray) -> list[Found]:
        height, width = picture.shape[:2]
        pixels = picture if cfg.INPUT.FORMAT == "RGB" else picture[:, :, ::-1]
        small = resize.get_transform(pixels).apply_image(pixels)
        image = torch.as_tensor(np.ascontiguousarray(small.transpose(2, 0, 1)))
        with torch.no_grad():
            (result,) = model([{"image": image, "height": height, "width": width}])
        found = result["instances"].to("cpu")
        return [
            Found(names[label], float(score), tuple(box))
            for label, score, box in zip(
                found.pred_classes.tolist(),
                found.scores.tolist(),
                found.pred_boxes.tensor.tolist(),
                strict=True,
            )
            if score >= min_score
        ]

    return predict


def weakness(run: str | Path) -> str | None:
    """Return a warning if the run's detector has a low AP50 on its test images."""
    ap50 = read_record(find_run(Path(run)) / RECORD_FILE).metrics["AP50"]
    if ap50 >= WORKING_AP50:
        return None
    return (
        f"This detector is barely trained: its AP50 on its test images is {ap50:.1f}, and below "
        f"{WORKING_AP50:g} a detector misses or mislabels most objects."
    )


def find_run(folder: Path) -> Path:
    """Return the folder of a finished run: this one, or the only one below it."""
    if (folder / DETECTOR_FILE).is_file():
        found = [folder]
    else:
        found = sorted(path.parent for path in folder.rglob(DETECTOR_FILE))
    if not found:
        raise KsclError(
            f"{folder} has no trained detector ({DETECTOR_FILE}). Name a folder of kscl train-net, "
            "or one around it."
        )
    if len(found) > 1:
        listed = "".join(f"\n  {path}" for path in found[:20])
        raise KsclError(f"{folder} has several trained detectors. Name one:{listed}")
    for name in (CONFIG_FILE, RECORD_FILE):
        if not (found[0] / name).is_file():
            raise KsclError(f"{found[0]} has no {name}, so the run is not finished.")
    return found[0]


def read_photo(path: Path) -> np.ndarray:
    """Return an upright RGB picture; an unreadable file is an error."""
    try:
        return decode_image(read_file(path))
    except UnreadableImage as error:
        raise KsclError(f"{path} cannot be read: {error}. {error.fix}, or leave it out.") from error
    except OSError as error:
        raise KsclError(f"{path} cannot be read: {error}. Make it readable.") from error
