"""One HTML file with everything in it: it opens from a disk and loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
from collections.abc import Sequence
from pathlib import Path

from kscl.benchmark.leaderboard.board import Board
from kscl.benchmark.leaderboard.page.data import page_data

SCRIPTS = (
    *("dom.js", "columns.js", "table.js", "charts.js", "plots.js", "panel.js", "compare.js"),
    *("address.js", "main.js"),
)

ANSWERS_SHOWN = 4  # above the table; more of them would hide it


def page(
    board: Board,
    title: str,
    folder: Path,
    warnings: Sequence[str] = (),
    answers: Sequence[str] = (),
    advice: Sequence[str] = (),
) -> str:
    """Return the page; `folder` is where it will be, and files are linked from there."""
    style = _part("page.css")
    program = "\n".join(["(() => {", '"use strict";', *map(_part, SCRIPTS), "})();\n"])
    data = json.dumps(page_data(board, title, folder), separators=(",", ":"), allow_nan=False)
    parts = {
        # The browser refuses whatever is not this style, this program or an embedded picture.
        "policy": (
            f"default-src 'none'; img-src data:; style-src {_digest(style)}; "
            f"script-src {_digest(program)}"
        ),
        "title": html.escape(title),
        "answer": _paragraphs(warnings) + _answers(answers) + _paragraphs(advice),
        "style": style,
        # Nothing in the data can end its element.
        "data": data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
        "program": program,
    }
    # One pass over the template, so that no value is searched for another's mark.
    pieces = _part("page.html").split("%%")
    filled = [parts[piece] if i % 2 else piece for i, piece in enumerate(pieces)]
    return "".join(filled)


def _answers(sentences: Sequence[str]) -> str:
    """Return the first answers, and the others in a part that a reader opens."""
    first, more = sentences[:ANSWERS_SHOWN], sentences[ANSWERS_SHOWN:]
    if not more:
        return _paragraphs(first)
    opened = f"<details><summary>{len(more)} more</summary>{_paragraphs(more)}</details>"
    return _paragraphs(first) + opened


def _paragraphs(sentences: Sequence[str]) -> str:
    return "".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences)


def _part(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
