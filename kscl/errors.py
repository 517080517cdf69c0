"""The exceptions for what a user can fix; anything else that is raised is a bug."""

from __future__ import annotations


class KsclError(ValueError):
    """A problem in the user's input: its message names the thing, the reason and the fix."""


class ConfigError(KsclError):
    """A config that cannot be used; the message lists every reason."""
