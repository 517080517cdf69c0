"""XML from strangers: parsed without entities, so that a file can neither grow nor read others."""

from __future__ import annotations

from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from kscl.errors import KsclError

MAX_BYTES = 64 * 2**20  # the largest annotation files of public sets are a hundred times smaller


def parse_xml(path: Path) -> Element:
    """The root element of a file, or a KsclError whose message says what is wrong with it."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise KsclError(f"cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise KsclError(f"is larger than {MAX_BYTES // 2**20} MiB, which no annotation is")
    builder = TreeBuilder()
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.EntityDeclHandler = _refuse_entity
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
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
