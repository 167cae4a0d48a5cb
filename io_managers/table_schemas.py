"""Columns of the record files, for Dagster's catalog. The rules for records are in imagemill/domain/."""

from collections.abc import Mapping

import dagster as dg

# Metadata that Dagster's catalog reads.
ROW_COUNT, COLUMN_SCHEMA = "dagster/row_count", "dagster/column_schema"

# Type and description by field.
Columns = Mapping[str, tuple[str, str]]

STAGE2_COLUMNS: Columns = {
    "image_id": ("string", "Id of the image: its path in approved/ without the extension."),
    "image_path": ("string", "Path of the image, relative to the parent of the data root."),
    "caption": ("string", "Caption, the first one of several."),
    "t5_attention_mask": (
        "array<integer>",
        "Mask of the caption's tokens: 0 or 1 for each position of the text encoder.",
    ),
    "height": ("integer", "Height in pixels after orientation."),
    "width": ("integer", "Width in pixels after orientation."),
    "aspect_bucket": ("string", "Nearest aspect bucket, width x height."),
    "format_version": ("integer", "Version of the record format: 2."),
    "crop_box": (
        "array<integer>",
        "Left, top, right, bottom of the VAE's crop in pixels, if it encodes the bucket's size.",
    ),
    "captions": ("array<string>", "All captions, if there are several."),
    "repeats": ("integer", "Draws of the sample in an epoch, if the data root records repeats."),
}

PRESET_COLUMNS: Columns = {
    "images": ("array<string>", "Path of the one image, relative to the preset."),
    "objects": (
        "array<struct>",
        "Objects with desc and bbox_2d or poly, in pixels, 0…999 or tokens by the file's space.",
    ),
    "width": ("integer", "Width of the image in pixels."),
    "height": ("integer", "Height of the image in pixels."),
    "metadata": ("struct", "Other data of the source's annotations, if there are any."),
}

_OPTIONAL = {"crop_box", "captions", "repeats", "metadata"}


def column_schema(columns: Columns) -> dg.TableSchema:
    """Return the columns as Dagster shows them."""
    return dg.TableSchema(
        [
            dg.TableColumn(name, kind, description, dg.TableColumnConstraints(nullable=name in _OPTIONAL))
            for name, (kind, description) in columns.items()
        ]
    )
