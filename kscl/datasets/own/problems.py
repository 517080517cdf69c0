"""What keeps a user's own set from being written, all of it in one error."""

from __future__ import annotations

from collections.abc import Sequence

from kscl.data.annotated.annotations import Problem, list_problems
from kscl.datasets.own.case import CLASS_NAMES
from kscl.errors import KsclError


def refuse_problems(fatal: Sequence[Problem], skip_bad: bool) -> None:
    """Raise KsclError with all problems, unless they are of images that may be left out."""
    of_images = [problem for problem in fatal if problem.kind != CLASS_NAMES]
    if len(of_images) == len(fatal) and (skip_bad or not fatal):
        return
    advice = ", or leave the images concerned out with --skip-bad." if of_images else "."
    raise KsclError(
        f"{len(fatal)} problem{'s' if len(fatal) > 1 else ''} found; nothing was written:\n"
        f"{list_problems(fatal)}\nFix them{advice}"
    )
