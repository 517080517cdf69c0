"""Mean and spread over seeds, as every tool computes and prints them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def std(values: Sequence[float]) -> float | None:
    """Return the standard deviation of a sample; None for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def mean_and_std(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean ± standard deviation as text, the mean alone for a single value."""
    return number_and_spread(float(np.mean(values)), std(values), digits)


def number_and_spread(number: float, spread: float | None, digits: int = 2) -> str:
    """Return both numbers as text with as many digits after the point."""
    text = f"{number:.{digits}f}"
    return text if spread is None else f"{text} ± {spread:.{digits}f}"
