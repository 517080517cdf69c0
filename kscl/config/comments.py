"""Read the comments of settings from the source that declares them.

The defaults are the one place where a setting is explained; `--print-config` and the reference in
docs/ show the same sentences.
"""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable
from typing import Any


def comments_of(declaration: Callable[..., Any]) -> dict[str, str]:
    """Return the comments above and behind every assignment in a function or class, by key.

    The key of `cfg.METHOD.RHO = 0.4` is `METHOD.RHO`, that of a field `seeds: tuple = ()` is
    `seeds`.
    """
    source = textwrap.dedent(inspect.getsource(declaration))
    lines = source.splitlines()
    comments = {
        token.start[0]: token.string.lstrip("# ").rstrip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        first = node.lineno
        while first - 1 in comments and lines[first - 2].lstrip().startswith("#"):
            first -= 1
        text = [comments[n] for n in range(first, (node.end_lineno or first) + 1) if n in comments]
        if text:
            found[ast.unparse(target).removeprefix("cfg.")] = " ".join(text)
    return found
