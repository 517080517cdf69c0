"""The one exception type of this package for what a user can fix."""

from __future__ import annotations

from kscl.errors import KsclError


class LinearEvalError(KsclError):
    """A problem in data, backbone or settings; its message names the thing, reason and fix."""
