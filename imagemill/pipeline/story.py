"""What happened to one image, and how the whole data root stands. Reads only; opens no image and no npy.

Belongs here: gathering facts from folders, ledger, records and shard indexes.
Belongs elsewhere: printing them (dagster_project/cli/).
Source: CONTRACTS section 0, "Nothing disappears silently".
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagemill.buckets import BUCKETS, assign_bucket
from imagemill.embedding_specs import embedding_specs
from imagemill.errors import ImagemillError, MissingInput
from imagemill.files import FileSignature, signature_bytes
from imagemill.formats.jsonl import read_jsonl
from imagemill.formats.npy import NpyStore
from imagemill.ids import image_id_of
from imagemill.layout import DataRoot
from imagemill.pipeline.shards.shard_sets import (
    INDEX,
    bucket_folder,
    load_manifest,
    read_tombstones,
    recorded_parameters,
)
from imagemill.pipeline.stage2.plan import EmbeddingPlan, plan_for
from imagemill.pipeline.stage2.recorded import read_recorded
from imagemill.pipeline.stage2.scan import CAPTION_REASONS, SOURCE_ASSET, Scan, scan_approved
from imagemill.store.ledger import Ledger, Problem
from imagemill.store.second_copy import newest


@dataclass(slots=True)
class Status:
    """How a data root stands.

    `kinds`: per embedding kind, counts of done, missing, refused. `regenerating`: kinds whose files are all being replaced.
    `stage1`: records that have not become version 2. `unreadable`: buckets whose manifest cannot be used, and what to do.
    `problems`: rows that hold now.
    """

    images: int = 0
    source_missing: int = 0
    records: int = 0
    kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    stage1: int = 0
    truncated: int = 0
    regenerating: list[str] = field(default_factory=list)
    buckets: dict[str, tuple[int, int]] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def reasons(self) -> dict[str, int]:
        """How many inputs per reason; an input refused by several assets for one reason counts once."""
        return dict(Counter(reason for _, reason in {(p.item, p.reason) for p in self.problems}))


def open_ledger(root: DataRoot) -> Ledger:
    """Open the ledger for reading. Raises MissingInput if nothing has run, or if the ledger is lost."""
    if not root.ledger.exists() and (found := newest(root)):
        raise MissingInput(
            "the ledger is lost",
            where=root.ledger,
            why=f"runs have left a second copy of its settings, of {found.written_at:%Y-%m-%d %H:%M:%S} UTC",
            do="`imagemill repair` reports what can be rebuilt, `imagemill repair --apply` rebuilds it",
        )
    if not root.ledger.exists():
        raise MissingInput("nothing has run on this data root yet", where=root.path, do="imagemill run --data-root …")
    return Ledger(root.ledger, read_only=True)


def _scan(root: DataRoot) -> Scan:
    """`approved/` as it is; nothing where a root that has runs behind it holds only public data or Stage-A."""
    return scan_approved(root.approved) if root.approved.is_dir() or not root.ledger.exists() else Scan({}, [])


def read_status(root: DataRoot) -> Status:
    """Count everything, from listings and the ledger."""
    scan = _scan(root)
    status = Status(images=scan.seen)
    done: dict[str, set[str]] = {}
    with open_ledger(root) as ledger:
        for spec in embedding_specs():
            plan = plan_for(
                spec, list(scan.sources), scan, ledger, NpyStore(root.derived / spec.folder, spec).listing()
            )
            status.kinds[spec.kind] = _plan_counts(plan)
            done[spec.kind] = {row.image_id for row in plan.done}
        status.regenerating, status.truncated = sorted(ledger.regenerating()), ledger.truncated()
        status.source_missing = len(ledger.sources().keys() - scan.sources.keys())
        # A file that is there and current has overcome what once stopped it, whoever brought it back.
        status.problems = [p for p in current_problems(scan, ledger) if p.item not in done.get(p.asset, ())]
    recorded = read_recorded(root.stage2_jsonl)
    status.records, status.stage1 = len(recorded.lines), len(recorded.stage1)
    for bucket in BUCKETS:
        try:
            manifest = load_manifest(bucket_folder(root.shards, bucket))
            status.buckets[bucket] = (manifest.samples, len(manifest.shards))
        except MissingInput:
            continue
        except ImagemillError as error:
            status.unreadable[bucket] = f"{error.what}; {error.do}"
    return status


def _plan_counts(plan: EmbeddingPlan) -> dict[str, int]:
    return {"done": len(plan.done), "to do": len(plan.jobs), "refused": len(plan.refused)}


def current_problems(scan: Scan, ledger: Ledger, problems: Sequence[Problem] | None = None) -> list[Problem]:
    """Return the problems that still hold: of the bytes that are there now, and of names that are still there.

    Args:
        problems: rows of the ledger; unset: all.
    """
    problems = ledger.problems() if problems is None else problems
    rows = [p for p in problems if p.stat is None or p.stat == _stat_of(p, scan)]
    captions = ledger.captions([p.item for p in rows if p.reason == "missing_caption"])
    return [p for p in rows if p.reason != "missing_caption" or p.item not in captions]


def _stat_of(problem: Problem, scan: Scan) -> FileSignature | None:
    source = scan.sources.get(problem.item)
    if source is None:
        return None
    return source.caption if problem.reason in CAPTION_REASONS else source.stat


def explain(root: DataRoot, image_id: str) -> dict[str, Any]:
    """The whole story of one image: what is known at every station, and why it went no further.

    Raises:
        MissingInput: no station has ever heard of it.
    """
    scan = _scan(root)
    with open_ledger(root) as ledger:
        source, facts = scan.sources.get(image_id), ledger.sources([image_id]).get(image_id)
        caption = ledger.captions([image_id]).get(image_id)
        story: dict[str, Any] = {"image_id": image_id}
        if source:
            story["source"] = {"file": f"approved/{source.file_name}", "bytes": signature_bytes(source.stat)}
        if facts:
            story["source"] = {**story.get("source", {"file": f"approved/{facts.file_name}", "missing": True}),
                               "fingerprint": facts.fingerprint, "height": facts.height, "width": facts.width}  # fmt: skip
            story["bucket"] = assign_bucket(facts.width, facts.height)
        if caption:
            story["caption"] = {"text": caption.text, "origin": caption.origin, "truncated": caption.truncated}
        story["embeddings"] = {spec.kind: _embedding(root, spec, image_id, ledger) for spec in embedding_specs()}
        story["record"] = _record_line(root, image_id)
        story["shard"] = _shard_place(root.shards, image_id)
        problems = [p for p in current_problems(scan, ledger) if _id_of(p) == image_id]
        packable = story["record"] and all(story["embeddings"].values()) and not problems
        if packable and story["shard"] is None and (limit := _limit(root.shards, story.get("bucket"))):
            story["limit"] = limit
        story["problems"] = [
            {"asset": p.asset, "outcome": p.outcome, "reason": p.reason, "detail": p.detail, "do": p.remedy}
            for p in problems
        ]
    if not (source or facts or problems or story["record"] or story["shard"]):
        raise MissingInput(
            f"no image {image_id!r}",
            where=root.approved,
            do="ids are file names without extension; `imagemill status` lists problems",
        )
    return story


def _id_of(problem: Problem) -> str:
    """What was refused by its name is known by its file name, everything else by its id."""
    return image_id_of(problem.item) if problem.asset == SOURCE_ASSET else problem.item


def _embedding(root: DataRoot, spec: Any, image_id: str, ledger: Ledger) -> dict[str, Any] | None:
    store = NpyStore(root.derived / spec.folder, spec)
    try:
        path, stat = store.path(image_id), store.stat(image_id)
    except (OSError, ValueError):  # not there, or no name that a file can have
        return None
    rows = [row for row in ledger.files(spec.kind, [image_id]).values() if row.stat == stat]
    known = {"maker": rows[0].maker, "made from": rows[0].source} if rows else {"maker": "not in the ledger"}
    return {"file": f"derived/{spec.folder}/{path.name}", "bytes": signature_bytes(stat), **known}


def _record_line(root: DataRoot, image_id: str) -> int | None:
    span = read_recorded(root.stage2_jsonl).lines.get(image_id)
    return span.number if span else None


def _shard_place(output: Path, image_id: str) -> dict[str, Any] | None:
    """Where its sample lies: the one that counts, else the newest that counts no more."""
    found: dict[str, Any] | None = None
    for index in sorted(output.glob(f"bucket_*/{INDEX}")):
        dead = {tombstone.place: tombstone.why for tombstone in read_tombstones(index.parent)}
        for line in read_jsonl(index):
            if not line.value or line.value.get("image_id") != image_id:
                continue
            name, offset, size = (line.value.get(field) for field in ("shard", "offset", "size"))
            found = {"tar": f"{index.parent.name}/{name}", "offset": offset, "size": size}
            place: Any = (name, offset)
            if place not in dead:
                return found
            found["counts no more"] = dead[place]
    return found


def _limit(output: Path, bucket: str | None) -> int | None:
    """How many samples the set of its bucket was cut down to, all buckets of that packing together."""
    recorded = recorded_parameters(bucket_folder(output, bucket)) if bucket else None
    return recorded.limit if recorded else None
