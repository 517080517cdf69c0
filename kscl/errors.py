"""The exceptions for what a user can fix, and what their messages may hold.

Anything else that is raised is a bug.
"""

from __future__ import annotations


class KsclError(ValueError):
    """A problem in the user's input: its message names the thing, the reason and the fix."""


class ConfigError(KsclError):
    """A config that cannot be used; the message lists every reason."""


def printable(text: str, kept: str = "") -> str:
    """Escape what a terminal would obey or cannot show: controls, line ends, half surrogates."""
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)
