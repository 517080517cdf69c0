"""Linear SVMs with squared hinge loss for many costs, on rows of one table of features.

Minimizes  ½ ‖w‖² + ½ b² + Σ cᵢ max(0, 1 − yᵢ (w·xᵢ + b))²,  cᵢ = cost · (positive weight, or 1),
which is scikit-learn's LinearSVC: its bias is the weight of one more feature that is always 1.

Two routes reach the minimum. `liblinear` is LinearSVC itself, one fit per cost. `exact` works on
the inner products of the rows: there are as many unknowns as rows, and given the rows inside the
margin, S, the minimum solves  (K_SS + diag(1 / 2c)) β = y_S,  w = Σ βᵢ xᵢ. Newton's method changes
S until it fits (Chapelle, 2007); the solution for one cost starts the next.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
from fvcore.common.config import CfgNode
from scipy.linalg.lapack import dposv

from linear_eval.errors import LinearEvalError

# Rows of the table (n,), labels +1 and -1 (n,), rising costs (P,) → weights and bias (P, D + 1).
Fit = Callable[[np.ndarray, np.ndarray, Sequence[float]], np.ndarray]

MAX_GRAM_ROWS = 8192  # 512 MiB; of a larger table each fit multiplies its own rows
MAX_STEPS = 200


def liblinear_route(table: np.ndarray, svm: CfgNode) -> Fit:
    """Return LinearSVC with the protocol's settings, on rows of a table (N, D), float64."""
    from sklearn.exceptions import ConvergenceWarning  # slow to import: only where it is used
    from sklearn.svm import LinearSVC

    def fit(rows: np.ndarray, labels: np.ndarray, costs: Sequence[float]) -> np.ndarray:
        features, found = table[rows], []
        for cost in costs:
            machine = LinearSVC(
                C=cost,
                class_weight={1: svm.POSITIVE_WEIGHT, -1: 1},
                penalty="l2",
                loss="squared_hinge",
                dual=True,
                tol=svm.TOLERANCE,
                max_iter=svm.ITERATIONS,
                random_state=0,
            )
            with warnings.catch_warnings():
                # The protocol ends after so many iterations, whether or not it has converged.
                warnings.simplefilter("ignore", ConvergenceWarning)
                machine.fit(features, labels)
            found.append(np.append(machine.coef_[0], machine.intercept_))
        return np.stack(found)

    return fit


def exact_route(table: np.ndarray, svm: CfgNode) -> Fit:
    """Return the exact minimum of the same objective, on rows of a table (N, D), float64."""
    whole = table @ table.T + 1 if len(table) <= MAX_GRAM_ROWS else None

    def fit(rows: np.ndarray, labels: np.ndarray, costs: Sequence[float]) -> np.ndarray:
        features = table[rows]
        gram = features @ features.T + 1 if whole is None else whole[np.ix_(rows, rows)]  # (n, n)
        weight = np.where(labels > 0, svm.POSITIVE_WEIGHT, 1.0)
        beta, found = np.zeros(len(rows)), []
        for cost in costs:
            beta = minimize(gram, labels.astype(float), cost * weight, beta)
            found.append(np.append(beta @ features, beta.sum()))
        return np.stack(found)

    return fit


ROUTES = {"liblinear": liblinear_route, "exact": exact_route}


def minimize(
    gram: np.ndarray, labels: np.ndarray, costs: np.ndarray, beta: np.ndarray
) -> np.ndarray:
    """Return the coefficients (n,) of the rows at the minimum, starting from `beta`."""
    outputs = gram @ beta
    value = objective(beta, outputs, labels, costs)
    inside = labels * outputs < 1
    for _ in range(MAX_STEPS):
        new = np.zeros_like(beta)
        system = gram[np.ix_(inside, inside)]
        system[np.diag_indices_from(system)] += 0.5 / costs[inside]
        # Symmetric, so the transpose is the layout that LAPACK works on in place.
        _, new[inside], _ = dposv(system.T, labels[inside], overwrite_a=True)
        new_outputs = gram @ new
        new_inside = labels * new_outputs < 1
        if np.array_equal(new_inside, inside):
            return new
        step, new_value = 1.0, objective(new, new_outputs, labels, costs)
        while new_value > value and step > 1e-6:  # too far: the minimum lies between the two
            step /= 2
            new, new_outputs = (beta + new) / 2, (outputs + new_outputs) / 2
            new_value = objective(new, new_outputs, labels, costs)
        if value - new_value <= 1e-12 * value:  # rows at the margin itself, in or out by rounding
            return new if new_value <= value else beta
        beta, outputs, value = new, new_outputs, new_value
        inside = labels * outputs < 1
    raise LinearEvalError(
        f"An SVM on {len(labels)} images did not reach its minimum in {MAX_STEPS} steps. Set "
        "SVM.SOLVER liblinear."
    )


def objective(
    beta: np.ndarray, outputs: np.ndarray, labels: np.ndarray, costs: np.ndarray
) -> float:
    """Return what is minimized, of coefficients and the outputs that they give."""
    slack = np.maximum(0, 1 - labels * outputs)
    return float(0.5 * beta @ outputs + costs @ slack**2)
