"""Metadata that shows pictures in Dagster's UI and links to the viewer. Addresses are made in imagemill/look/links.py."""

import dagster as dg

from imagemill.look.links import image_note, page_note
from imagemill.store.ledger import SourceRow
from resources.keys import NAME

LABEL = "look"


def image_shown(image_id: str, source: SourceRow | None, *, preview: bool = False) -> dict[str, dg.MetadataValue]:
    """Return the metadata of the event of one image."""
    return {LABEL: dg.MetadataValue.md(image_note(image_id, source, name=NAME, preview=preview))}


def bucket_shown(bucket: str) -> dict[str, dg.MetadataValue]:
    """Return the metadata of the event of one bucket: pictures of its first images, as cropped."""
    text = page_note(
        f"bucket {bucket}", "images", picture="montage", name=NAME, bucket=bucket, crop=1, show="in_shards"
    )
    return {LABEL: dg.MetadataValue.md(text)}


def page_shown(text: str, page: str, **parameters: str) -> dict[str, dg.MetadataValue]:
    """Return metadata with a link to a page of the viewer."""
    return {LABEL: dg.MetadataValue.md(page_note(text, page, name=NAME, **parameters))}
