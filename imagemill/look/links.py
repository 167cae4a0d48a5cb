"""Addresses of the viewer's pages, and the Markdown that shows a picture in Dagster's UI."""

import re
from collections.abc import Mapping
from urllib.parse import quote

from imagemill.domain.buckets import assign_bucket
from imagemill.store.ledger import SourceRow

# The viewers are mounted here in front of the UI.
PREFIX = "/imagemill/"

# Dagster shows longer Markdown only in a dialog.
MOST_CHARACTERS = 900

_PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")


def prefix_of(name: str | None) -> str:
    """Return the path of the first page of a data root, by its name in a shared history."""
    return f"{PREFIX}{name}/" if name else PREFIX


def query_string(parameters: Mapping[str, object]) -> str:
    """Return parameters as an address contains them; those without a value are left out."""
    given = ((name, str(value)) for name, value in parameters.items() if value not in (None, "", False))
    return "&".join(f"{name}={_quoted(value)}" for name, value in given)


def _quoted(value: str) -> str:
    return quote(value, safe="", errors="surrogateescape")


def link(page: str, /, **parameters: object) -> str:
    """Return a relative address; parameters without a value are left out."""
    query = query_string(parameters)
    return f"{page}?{query}" if query else page


def image_note(image_id: str, source: SourceRow | None, *, name: str | None, preview: bool) -> str:
    """Return a picture of an image in Markdown, which links to its page, with size and bucket; at most `MOST_CHARACTERS`.

    Args:
        image_id: the image.
        source: its size, None if it is not known.
        name: of the data root in a shared history, None without one.
        preview: whether a preview model made the file.
    """
    facts = (
        [f"{source.width} × {source.height}", f"bucket {assign_bucket(source.width, source.height)}"] if source else []
    )
    text = ", ".join([*facts, *(["PREVIEW WEIGHTS"] if preview else [])])
    prefix, query = prefix_of(name), f"id={_quoted(image_id)}"
    picture = f"[![{escaped(image_id)}]({prefix}thumb?{query})]({prefix}image?{query}) {text}".rstrip()
    return picture if len(picture) <= MOST_CHARACTERS else text or "no picture"


def page_note(text: str, page: str, *, name: str | None, picture: str | None = None, **parameters: object) -> str:
    """Return a link to a page in Markdown. `picture`: page of a picture to show instead of the text."""
    prefix = prefix_of(name)
    shown = f"![{escaped(text)}]({prefix}{link(picture, **parameters)})" if picture else escaped(text)
    return f"[{shown}]({prefix}{link(page, **parameters)})"


def escaped(text: str) -> str:
    """Return a text as Markdown that shows exactly this text."""
    return _PUNCTUATION.sub(r"\\\g<0>", " ".join(text.split()))
