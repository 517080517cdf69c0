"""XML from strangers: parsed without entities, so that a file can neither grow nor read others."""

from __future__ import annotations

from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from kscl.data.source import read_file
from kscl.errors import KsclError

MAX_BYTES = 64 * 2**20  # the largest annotation files of public sets are a hundred times smaller
MAX_DEPTH = 200  # elements within each other; annotations have five


def parse_xml(path: Path) -> Element:
    """Return the root element; the message of the KsclError for a bad file is the reason alone."""
    try:
        content = read_file(path, MAX_BYTES)
    except OSError as error:
        raise KsclError(f"cannot be read: {error.strerror or error}") from error
    builder = TreeBuilder()
    depth = 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > MAX_DEPTH:
            raise KsclError(f"has elements nested more than {MAX_DEPTH} deep")
        builder.start(tag, attributes)

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(tag)

    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.EntityDeclHandler = _refuse_entity
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = builder.data
    try:
        parser.Parse(content, True)
        return builder.close()
    except (expat.ExpatError, LookupError, ValueError, AssertionError) as error:
        if isinstance(error, KsclError):
            raise
        raise KsclError(f"is not well-formed XML: {error}") from error


def _refuse_entity(name: str, *_: object) -> None:
    raise KsclError(f"declares the entity '{name}', which annotations do not need")
