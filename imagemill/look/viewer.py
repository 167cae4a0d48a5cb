"""One data root as the viewer sees it: its state now, its marks, and the facts about each image.

    ledger, folders ──unless nothing changed──> Overview (store/ledger/overview.py) ──> pages (app.py)

A viewer belongs to one thread: its methods are called through `call`.
"""

import asyncio
import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from imagemill.config import use_configured_kinds
from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.domain.filters import FILTERS
from imagemill.domain.inputs import NEW_INPUTS
from imagemill.domain.latent_boxes import Box, encoded_box
from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError, MissingInput, WrongUsage
from imagemill.formats.npy import NpyStore, read_npy
from imagemill.fs.fingerprints import FileSignature, folder_time, signature_if_there
from imagemill.look.cache import PictureCache
from imagemill.look.captions import caption_cut, tokenizer_folder
from imagemill.look.export import MOST_ENTRIES, ExportEntry, ExportReason, export_html
from imagemill.look.frames import Frame, frame_of
from imagemill.look.latents import LatentColours, cell_pixels, latents_picture, root_colours
from imagemill.look.pictures import Pictures
from imagemill.look.records import (
    PresetPage,
    SummarisedGroup,
    image_file,
    mission_page,
    preset_folder,
    preset_page,
    presets,
)
from imagemill.look.selection import PAGE_SIZE, View
from imagemill.look.similar import Similar
from imagemill.pipeline.changes import parse_since, written_time
from imagemill.pipeline.curation.near_duplicates import Group, read_groups, read_summary, summary_path
from imagemill.pipeline.image_report import explain
from imagemill.pipeline.image_states import latent_picture, read_states
from imagemill.pipeline.problem_list import InputProblem
from imagemill.pipeline.session import Session, open_session
from imagemill.pipeline.shards.shard_sets import INDEX, TOMBSTONES, bucket_folder
from imagemill.pipeline.stage2.models_in_use import preview_kinds
from imagemill.pipeline.stage2.record_index import known_images, read_recorded
from imagemill.pipeline.stage_a.missions import mission_folder, missions
from imagemill.store.ledger import SourceRow
from imagemill.store.ledger.overview import ImageState, Numbers, Overview, Selection, show_of

T = TypeVar("T")

MOST_SIMILAR = 12
# Longer side of the pictures of an export, in pixels.
EXPORTED_SIDE = 256

_ONE_ROOT = threading.Lock()
# Times of files may be this much older than the clock.
_COARSEST_NS = 20_000_000
# Seconds for which the count of the changes of a day is used again, if nothing else changes.
_RECENT_SECONDS = 60.0


class Page(msgspec.Struct, frozen=True):
    """A page of a grid.

    Attributes:
        states: the inputs of the page.
        number: number of selected inputs.
        first: number of the first one on the page, from 1.
        frames: the parts that training sees, if pictures are shown as cropped.
    """

    states: list[ImageState]
    number: int
    first: int
    frames: dict[str, Frame] = {}


class ShownChanges(NamedTuple):
    """Numbers of the inputs that changed since a time, by kind of change; `unknown`: images of which no time is known."""

    since: str
    counts: dict[str, int]
    unknown: int


class LatentPicture(NamedTuple):
    """A picture of an array. `r2`: share of the colours that it explains; `box`: the part of the image that was encoded."""

    r2: float
    box: Box


class Picture(NamedTuple):
    """A picture of a photograph.

    Attributes:
        size: width and height of the photograph in pixels, 0 if unknown.
        kept: JPEG bytes from the cache, None if they are not there.
        make: returns the bytes, for another thread than the viewer's.
    """

    size: tuple[int, int]
    kept: bytes | None
    make: Callable[[], bytes]


class Shown(msgspec.Struct, frozen=True):
    """The facts about one image.

    Attributes:
        state: its row.
        report: as `imagemill explain` returns it.
        frame: the part that training sees, None if the image was never opened.
        latents: kinds of whose arrays there is a picture.
        cuts: text kinds → number of characters of the caption that the encoder sees; None if its tokenizer is not here.
        similar: the most similar images, with their cosines.
        previous, next: the neighbours within the selection, None at its ends.
        position: number of selected images before it, None if it is not selected.
    """

    state: ImageState
    report: dict[str, Any]
    frame: Frame | None
    latents: dict[str, LatentPicture]
    cuts: dict[str, int | None]
    similar: list[tuple[ImageState, float]]
    previous: str | None
    next: str | None
    position: int | None


class Viewer:
    """A data root.

    Args:
        path: the data root.
        read_only: whether marks cannot be changed.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False) -> None:
        self.path, self.read_only = Path(path), read_only
        self._thread = ThreadPoolExecutor(1, "look")
        self._open = ExitStack()
        self._session: Session | None = None
        self._overview = Overview()
        self._problems: list[InputProblem] = []
        self._seen: tuple[object, ...] | None = None
        self._folders: list[Path] = []
        self._vectors = Similar()
        self._shown: set[str] | None = None
        # Changes of the last 24 hours by a table, until when.
        self._recent: tuple[Overview, float, ShownChanges] | None = None

    def run(self, function: Callable[..., T], *given: Any) -> T:
        """Call a method of this viewer on its thread, and wait."""
        return self._thread.submit(self._with_kinds, function, *given).result()

    def read_ahead(self) -> None:
        """Begin to read the state of the data root, for which the first page then waits. An error is raised by that page."""
        self._thread.submit(self._with_kinds, self._now)

    async def call(self, function: Callable[..., T], *given: Any) -> T:
        """Call a method of this viewer on its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._with_kinds, function, *given)

    def _with_kinds(self, function: Callable[..., T], *given: Any) -> T:
        """Call a function with the embedding kinds of this data root in use, which belong to the process."""
        with _ONE_ROOT:
            use_configured_kinds(DataRoot.resolve(self.path))
            return function(*given)

    def close(self) -> None:
        """Close the ledger, and end the thread."""
        self._thread.submit(self._open.close).result()
        self._thread.shutdown()

    # ---- the present state

    @property
    def session(self) -> Session:
        """The session, as of the last look at the data root."""
        assert self._session
        return self._session

    def _now(self) -> Overview:
        """Return the table of inputs; read it again if the data root has changed.

        A page calls it once: the table and the session of an earlier call are then closed.

        Raises:
            MissingInput: if nothing has run, or the folder of images is gone.
        """
        if self._session is None or self._seen is None or self._seen != self._state():
            # Closed before the next ones are made, because two take twice the memory.
            self._open.close()
            self._overview.close()
            self._seen = None
            self._session = self._open.enter_context(open_session(self.path))
            began, (version, files, _) = time.time_ns(), self._state()
            with _without_collections():
                self._overview, self._problems = read_states(self._session, meanwhile=self._first_page)
            self._shown = None
            approved = self._session.root.approved
            # Objects are looked up again when the ledger has changed.
            self._folders = (
                [approved / folder for folder in self._overview.folders()] if isinstance(approved, Path) else []
            )
            folders = [folder_time(folder) for folder in self._looked_at()]
            # A folder that changed meanwhile is read again by the next call.
            is_fresh = max((changed for changed in folders if changed), default=0) < began - _COARSEST_NS
            self._seen = (version, files, folders) if is_fresh else None
        return self._overview

    def _state(self) -> tuple[object, ...]:
        """Return what changes when the state of the data root may have changed."""
        assert self._session
        root = self._session.root
        sets = (bucket_folder(root.shards, bucket) for bucket in BUCKETS)
        files = [root.stage2_jsonl, root.config_file, summary_path(root.derived)]
        files += [folder / name for folder in sets for name in (INDEX, TOMBSTONES)]
        return (
            self._session.reading.version_seen() if root.ledger.is_file() else None,
            [signature_if_there(path) for path in files],
            [folder_time(folder) for folder in self._looked_at()],
        )

    def _looked_at(self) -> list[Path]:
        root = self.session.root
        return [*self._folders, *(root.derived / spec.folder for spec in embedding_specs())]

    # ---- pages

    def overview(self) -> dict[str, Any]:
        """Return the numbers of the first page."""
        table, session = self._now(), self.session
        ledger = session.reading
        numbers, changes = self._first_page(table)
        return {
            **numbers._asdict(),
            "changes": changes,
            "previews": preview_kinds(ledger),
            "regenerating": sorted(ledger.regenerating()),
            "root": session.root.path,
            "share": session.inputs.share,
        }

    def _first_page(self, table: Overview) -> tuple[Numbers, ShownChanges]:
        """Return the numbers of the first page; changes are counted again after a minute."""
        if self._recent is None or self._recent[0] is not table or time.monotonic() > self._recent[1]:
            ends = time.monotonic() + _RECENT_SECONDS
            self._recent = table, ends, self._shown_changes(table, "24h")
        return table.numbers(), self._recent[2]

    def page(self, view: View) -> Page:
        """Return a page of the grid."""
        table, selection = self._now(), self._selection(view)
        number = table.count(selection)
        first = (view.page - 1) * PAGE_SIZE
        states = table.select(selection, PAGE_SIZE, first)
        frames = ((state.item, self._frame(state)) for state in states) if view.cropped else ()
        return Page(states, number, first + 1, {item: frame for item, frame in frames if frame})

    def image(self, item: str, view: View) -> Shown:
        """Return what is known of one image. Raises MissingInput if there is no such image."""
        table, selection = self._now(), self._selection(view)
        state = table.state(item)
        if state is None:
            raise MissingInput(f"no image {item!r}", where=self.path, do="check the id")
        position = table.position(selection, item)
        before = table.select(selection, 1, position - 1) if position else []
        after = table.select(selection, 1, position + 1) if position is not None else []
        return Shown(
            state,
            self._report(item),
            self._frame(state),
            self._latents(state),
            self._cuts(state),
            self._similar(item, table),
            before[0].item if before else None,
            after[0].item if after else None,
            position,
        )

    def changes(self, since: str) -> ShownChanges:
        """Return how much changed since a time. Raises WrongUsage for a text that is no time."""
        return self._shown_changes(self._now(), since)

    def _shown_changes(self, table: Overview, since: str) -> ShownChanges:
        ledger = self.session.reading
        began = parse_since(since, ledger)
        counts = table.counts_since(began)
        return ShownChanges(written_time(began), counts, ledger.unknown_times())

    def problems(self, item: str) -> list[InputProblem]:
        """Return the problems of one input."""
        return [problem for problem in self._problems if problem.item == item]

    def groups(self, page: int) -> tuple[list[tuple[Group, dict[str, ImageState]]], int]:
        """Return a page of groups of near duplicates that are not withdrawn, with their states, and the number of groups."""
        table, root = self._now(), self.session.root
        withdrawn = set(table.items(Selection("withdrawn")))
        groups = [
            msgspec.structs.replace(group, members=members)
            for group in read_groups(root.derived, read_summary(root.derived)) or []
            if len(members := [member for member in group.members if member.image_id not in withdrawn]) > 1
        ]
        chosen = groups[(page - 1) * _GROUPS : page * _GROUPS]
        return [(group, table.states([member.image_id for member in group.members])) for group in chosen], len(groups)

    def others_of_groups(self) -> list[str]:
        """Return the near duplicates that are not withdrawn: the members of groups but the representatives."""
        return self._now().items(Selection("near_duplicates"))

    def items(self, view: View) -> list[str]:
        """Return all selected items that are images."""
        return self._images(self._now().items(self._selection(view)))

    def _selection(self, view: View) -> Selection:
        if view.changed is None:
            return view.selection
        chosen, since = view.selection, parse_since(view.since, self.session.reading)
        show = show_of(view.changed) if chosen.show == "all" else chosen.show
        return msgspec.structs.replace(chosen, show=show, change=(view.changed, since))

    def _report(self, item: str) -> dict[str, Any]:
        with suppress(ImagemillError):
            return explain(self.session, item)
        return {
            "problems": [msgspec.structs.asdict(problem) | {"do": problem.remedy} for problem in self.problems(item)]
        }

    def _latents(self, state: ImageState) -> dict[str, LatentPicture]:
        root, found = self.session.root, {}
        if not (state.width and state.height):
            return {}
        for spec in map(self.session.in_force, embedding_specs()):
            with suppress(ValueError, ImagemillError):  # for example an id that cannot be a file name
                is_there = signature_if_there(NpyStore(root.derived / spec.folder, spec).path(state.item))
                if is_there and (cell := cell_pixels(spec)) and (colours := self._colours(spec)):
                    box = encoded_box(state.width, state.height, spec.contract.get("size", "original"), cell=cell)
                    found[spec.kind] = LatentPicture(colours.r2, box)
        return found

    def _colours(self, spec: EmbeddingSpec) -> LatentColours | None:
        root, ledger = self.session.root, self.session.reading
        return root_colours(root, ledger, spec, self._pictures(), self._cache(root))

    def _similar(self, item: str, table: Overview) -> list[tuple[ImageState, float]]:
        """Return similar images that are in `approved/` and not withdrawn."""
        if self._shown is None:
            self._shown = set(table.items(Selection("seen")))
        found = self._vectors.to(self.session.root, item, self._shown, MOST_SIMILAR)
        states = table.states([each.image_id for each in found])
        return [(states[each.image_id], each.cosine) for each in found]

    def _cuts(self, state: ImageState) -> dict[str, int | None]:
        if not state.caption:
            return {}
        specs = [self.session.in_force(spec) for spec in embedding_specs() if spec.source == "caption"]
        return {spec.kind: self._cut(spec, state.caption) for spec in specs}

    def _cut(self, spec: EmbeddingSpec, caption: str) -> int | None:
        with suppress(ImagemillError):
            folder = tokenizer_folder(self.session.config.encoder(spec))
            return caption_cut(caption, folder, spec.contract["tokens"]) if folder else None
        return None

    def _frame(self, state: ImageState) -> Frame | None:
        if not (state.width and state.height and state.bucket):
            return None
        return frame_of(state.width, state.height, state.bucket, latent_picture(self.session))

    # ---- presets and Stage-A

    def presets(self) -> dict[str, list[str]]:
        """Return the splits of each preset, by `dataset/preset`."""
        return presets(self._root())

    def preset_page(self, name: str, split: str, label: str | None, page: int) -> tuple[PresetPage, list[InputProblem]]:
        """Return a page of a preset's records, and the problems of its dataset. Raises MissingInput."""
        found = preset_page(self._root(), name, split, label, page)
        with suppress(ImagemillError):  # without images in approved/
            self._now()
        dataset = name.partition("/")[0]
        return found, [problem for problem in self._problems if problem.item.startswith(f"{dataset}/")]

    def missions(self) -> list[str]:
        """Return the missions of Stage-A."""
        return missions(self._root().stage_a_input)

    def mission_page(self, mission: str, page: int) -> tuple[list[SummarisedGroup], int, list[InputProblem]]:
        """Return a page of a mission's records, their number, and its problems. Raises MissingInput."""
        groups, number = mission_page(self._root(), mission, page)
        with suppress(ImagemillError):
            self._now()
        return groups, number, [problem for problem in self._problems if problem.item.startswith(f"{mission}/")]

    def file_of(self, preset: str, mission: str, relative: str) -> tuple[SourceRow, Pictures]:
        """Return what is needed to show an image of a preset or of a mission. Raises MissingInput."""
        root = self._root()
        folder = preset_folder(root, preset).path if preset else mission_folder(root.stage_a_input, mission)
        image_file(folder, relative)
        at = replace(root, approved_at=folder)
        row = SourceRow(relative, relative, FileSignature(""), "", 0, 0)
        return row, Pictures(at, NEW_INPUTS, self._cache(root))

    def _root(self) -> DataRoot:
        """Return the data root with its recorded folders, which may have no images in `approved/`."""
        if self._session is None:
            self._session = self._open.enter_context(open_session(self.path))
        return self._session.root

    # ---- marks

    def marks(self) -> list[ImageState]:
        """Return the marked images in order of id."""
        table = self._now()
        return table.select(Selection("marked"), table.count(Selection("marked")))

    def set_marks(self, items: Sequence[str], marked: bool) -> int:
        """Mark images, or remove their marks; return the number of marked images then.

        Raises:
            MissingInput: for an item that is no image, without changing anything.
        """
        self._now()
        if marked and (unknown := set(items).difference(self._images(items))):
            raise MissingInput(f"no image {min(unknown)!r}", where=self.path, do="reload the page")
        was_open = "ledger" in self.session.__dict__
        ledger = self.session.ledger
        if self._seen and not was_open:  # versions are counted by each connection; own changes do not count
            self._seen = (ledger.version_seen(), *self._seen[1:])
        (ledger.mark if marked else ledger.unmark)(items)
        marks = ledger.marks()
        self._overview.set_marks(marks)
        return len(marks)

    def _images(self, items: Iterable[str]) -> list[str]:
        """Return those items that `withdraw` accepts."""
        items, ledger = list(items), self.session.reading
        known = set(ledger.sources(items))
        if not known.issuperset(items):  # the ids of all records need not be read for others
            known = known_images(ledger, read_recorded(self.session.root.stage2_jsonl))
        return [item for item in items if item in known]

    # ---- pictures

    def picture(self, item: str, px: int, *, cropped: bool) -> Picture:
        """Return a picture of a photograph, or how to make it. Raises MissingInput if there is no such file."""
        source, frame, pictures = self._source(item, self._now().state(item))
        if not cropped or frame is None:
            frame, make = None, functools.partial(pictures.photograph, source, px)
        else:
            make = functools.partial(pictures.cropped, source, frame, px)
        kept = None
        if isinstance(self.session.root.approved, Path):  # a request to object storage would hold up all pages
            with suppress(ImagemillError, OSError):  # which `make` raises again
                kept = pictures.kept(source, px, frame)
        return Picture((source.width, source.height), kept, make)

    def _source(self, item: str, state: ImageState | None) -> tuple[SourceRow, Frame | None, Pictures]:
        if state is None or state.file is None:
            raise MissingInput(f"no image {item!r}", where=self.path, do="check the id")
        row = self.session.reading.sources([item]).get(item) or SourceRow(item, state.file, FileSignature(""), "", 0, 0)
        row = msgspec.structs.replace(row, file_name=state.file)
        return row, self._frame(state), self._pictures()

    def sources(self, view: View, most: int) -> tuple[list[SourceRow], list[Frame], Pictures]:
        """Return what is needed to show the first images of a view."""
        states = [state for state in self._now().select(self._selection(view), most) if state.file and state.width]
        rows = self.session.reading.sources([state.item for state in states])
        shown = [(rows[state.item], frame) for state in states if (frame := self._frame(state)) and state.item in rows]
        return [row for row, _ in shown], [frame for _, frame in shown], self._pictures()

    def export(self, path: Path, view: View) -> tuple[int, int]:
        """Write the selected images that are not withdrawn as one HTML file; return their number in it, and in all.

        Raises:
            WrongUsage: for withdrawn images, and as `export_html`.
            MissingInput: as `export_html`.
        """
        if view.selection.show == "withdrawn" or view.changed == "withdrawn":
            raise WrongUsage("withdrawn images are not exported", do="choose another filter")
        table, selection, root = self._now(), self._selection(view), self.session.root
        number = table.count(selection)
        entries = map(self._entry, table.select(selection, MOST_ENTRIES))
        title = FILTERS[view.selection.show].title
        return export_html(path, entries, root=root, title=title, total=number), number

    def _entry(self, state: ImageState) -> ExportEntry:
        picture = None
        with suppress(ImagemillError, OSError):
            source, _, pictures = self._source(state.item, state)
            picture = pictures.photograph(source, EXPORTED_SIDE)
        return ExportEntry(
            id=state.item,
            file=state.file or "",
            caption=state.caption or "",
            outcome=state.outcome.replace("_", " "),
            reasons=tuple(ExportReason(each.reason, each.detail, each.remedy) for each in self.problems(state.item)),
            bucket=state.bucket or "",
            sizes=(f"{state.width} × {state.height}",) if state.width else (),
            picture=picture,
        )

    def _pictures(self) -> Pictures:
        root = self.session.root
        return Pictures(root, self.session.inputs, self._cache(root))

    def _cache(self, root: DataRoot) -> PictureCache:
        return PictureCache(None if self.read_only and not os.access(root.state, os.W_OK) else root.look)

    def latents(self, item: str, kind: str) -> tuple[bytes, float] | None:
        """Return an array as a PNG, and the share of variance that its colours explain; None if it cannot be shown."""
        self._now()
        spec = next((spec for spec in embedding_specs() if spec.kind == kind), None)
        if spec is None or (colours := self._colours(self.session.in_force(spec))) is None:
            return None
        store = NpyStore(self.session.root.derived / spec.folder, spec)
        with suppress(OSError, ValueError, ImagemillError):
            return latents_picture(read_npy(store.path(item)), colours), colours.r2
        return None


# Groups on a page.
_GROUPS = 20


@contextmanager
def _without_collections() -> Iterator[None]:
    """Switch off the garbage collector, which would look at millions of rows that stay."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
