"""RankMe: how many directions the features of a backbone really use, without any labels.

The effective rank of Garrido et al., "RankMe" (ICML 2023), equation 1. It is at most the smaller of
the numbers of images and dimensions, so it is compared on the same images only.
"""

from __future__ import annotations

import numpy as np

KEY = "rankme"  # of a record's details
EPSILON = 1e-7  # the paper's
MOST_IMAGES = 25_600  # the paper's number; more change little and take long


def rankme(features: np.ndarray) -> float:
    """Return exp of the entropy of the normalized singular values of features (N, D)."""
    used = features[:: -(-len(features) // MOST_IMAGES)]  # evenly, as folders are in class order
    values = np.linalg.svd(used.astype(np.float64), compute_uv=False)  # (min(N, D),), falling
    shares = values / max(float(values.sum()), np.finfo(float).tiny) + EPSILON
    return float(np.exp(-(shares * np.log(shares)).sum()))
