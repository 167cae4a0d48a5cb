"""One HTML file with pictures, captions and reasons, to send to people: without script, and it loads nothing.

    photos.html        mode 0600; pictures inside as data URIs, at most 500

Which images it shows is decided by the caller; pictures are made in pictures.py. The page is in export.html.jinja.
"""

import base64
import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path

import msgspec

from imagemill.domain.layout import DataRoot
from imagemill.errors import MissingInput, WrongUsage
from imagemill.fs.atomic import write_new
from imagemill.fs.listing import is_inside

# Most images of a file, which is then about 10 MB.
MOST_ENTRIES = 500

_TEMPLATE = Path(__file__).with_name("export.html.jinja")
_MODE = 0o600


class ExportReason(msgspec.Struct, frozen=True):
    """A reason why an image did not reach the output, or a warning: its code, what was found, and what to do."""

    reason: str
    detail: str = ""
    remedy: str = ""


class ExportEntry(msgspec.Struct, frozen=True):
    """One image of a file.

    Attributes:
        id: of the image.
        file: path in `approved/`.
        caption: its caption; empty without one.
        outcome: of the image, see `pipeline.accounting`.
        reasons: of its problems.
        bucket: of the image; empty if it was never opened.
        sizes: lines about its size and use, for people.
        picture: JPEG bytes, None if it cannot be shown.
    """

    id: str
    file: str = ""
    caption: str = ""
    outcome: str = ""
    reasons: tuple[ExportReason, ...] = ()
    bucket: str = ""
    sizes: tuple[str, ...] = ()
    picture: bytes | None = None


def export_html(
    path: Path, entries: Iterable[ExportEntry], *, root: DataRoot, title: str, total: int, at: datetime | None = None
) -> int:
    """Write the first `MOST_ENTRIES` entries as one HTML file, durably; return their number.

    Args:
        path: the new file.
        entries: the images, in order; no more than are written are taken.
        root: the data root, in whose folders no file is written.
        title: description of the images, such as the title of a filter.
        total: number of images that the description has.
        at: time of the export; now if it is None.

    Raises:
        WrongUsage: if the file exists, or would be inside the data root.
        MissingInput: if its folder does not exist.
    """
    refuse_place(path, root)
    shown = list(islice(entries, MOST_ENTRIES))
    page = _page(shown, title, total, at or datetime.now().astimezone()).encode("utf-8", "replace")
    try:
        write_new(path, page, _MODE)
    except FileExistsError:
        raise _exists(path) from None
    return len(shown)


def refuse_place(path: Path, root: DataRoot) -> None:
    """Check the place of an export before the pictures are made. Raises as `export_html`."""
    if os.path.lexists(path):
        raise _exists(path)
    if not path.parent.is_dir():
        raise MissingInput(
            "the folder of the export does not exist", where=path.parent, do="create it, or give another file"
        )
    place = os.path.realpath(path)
    images = (root.approved,) if isinstance(root.approved, Path) else ()
    for folder in (root.path, *images, *root.other_folders):
        if is_inside(place, os.path.realpath(folder)):
            raise WrongUsage(
                "an export cannot be inside the data root",
                where=path,
                why=f"{folder} contains what imagemill reads and writes",
                do="give a file in another folder",
            )


def _exists(path: Path) -> WrongUsage:
    return WrongUsage(
        "the file of the export exists",
        where=path,
        why="an export never overwrites",
        do="remove it, or give another name",
    )


def _page(entries: Sequence[ExportEntry], title: str, total: int, at: datetime) -> str:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(_TEMPLATE.read_text("utf-8"))
    when = f"{at:%Y-%m-%d %H:%M %Z}"
    return template.render(entries=entries, title=title, total=total, at=when, data_uri=_data_uri, facts=_facts)


def _facts(entry: ExportEntry) -> str:
    return ", ".join(text for text in (entry.outcome, entry.bucket, *entry.sizes) if text)


def _data_uri(picture: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"
