"""Pictures that behave like photographs: made from a seed, so none has to be shipped."""

from __future__ import annotations

import cv2
import numpy as np

FIELD = 512


def photo(seed: int, height: int = 375, width: int = 500) -> np.ndarray:
    """uint8 RGB with the 1/f spectrum of natural scenes, crisp edges, and clipped lights."""
    rng = np.random.default_rng(seed)
    light, warm, cold = _field(rng, 1.1), _field(rng, 1.5), _field(rng, 1.5)
    for _ in range(12):
        thing = _ellipse(rng)
        light += 1.2 * rng.normal() * thing
        warm += rng.normal() * thing
        cold += rng.normal() * thing
    base = 115 + 45 * light
    rgb = np.stack(
        [base + 28 * warm, base - 10 * warm - 8 * cold, base + 30 * cold - 10 * warm], axis=2
    )
    return rgb[:height, :width].clip(0, 255).astype(np.uint8)


def _field(rng: np.random.Generator, falloff: float) -> np.ndarray:
    frequency = np.hypot(np.fft.fftfreq(FIELD)[:, None], np.fft.rfftfreq(FIELD)[None])
    frequency[0, 0] = 1
    spectrum = np.fft.rfft2(rng.standard_normal((FIELD, FIELD))) * frequency**-falloff
    field = np.fft.irfft2(spectrum)
    return (field - field.mean()) / field.std()


def _ellipse(rng: np.random.Generator) -> np.ndarray:
    mask = np.zeros((FIELD, FIELD), np.uint8)
    center = rng.integers(0, FIELD, 2).tolist()
    axes = rng.integers(10, 120, 2).tolist()
    cv2.ellipse(mask, center, axes, rng.uniform(0, 180), 0, 360, 255, -1, cv2.LINE_AA)
    return mask / 255


def jpeg(picture: np.ndarray, quality: int = 90) -> bytes:
    bgr = cv2.cvtColor(picture, cv2.COLOR_RGB2BGR)
    return cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()
