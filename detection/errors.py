"""The one exception type of this package for what a user can fix."""

from __future__ import annotations

from kscl.errors import KsclError


class DetectionError(KsclError):
    """A problem in data, weights or config: its message names the thing, the reason and the fix."""
