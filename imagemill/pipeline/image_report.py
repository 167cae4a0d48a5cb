"""The report on one image: source, caption, files, record, shard, problems. Reads only; opens no image and no npy.

Belongs here: gathering facts from folders, ledger, records and shard indexes.
Belongs elsewhere: the whole data root (status.py), printing (dagster_project/cli/).
Source: CONTRACTS section 0, "No input is dropped silently".
"""

from pathlib import Path
from typing import Any

from imagemill.domain.buckets import assign_bucket
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.ids import image_id_of
from imagemill.domain.layout import DataRoot
from imagemill.errors import MissingInput
from imagemill.formats.jsonl import read_jsonl
from imagemill.formats.npy import NpyStore
from imagemill.fs.fingerprints import signature_bytes
from imagemill.pipeline.problem_list import current_problems, gone_images
from imagemill.pipeline.session import Session
from imagemill.pipeline.shards.shard_sets import INDEX, bucket_folder, read_tombstones, recorded_parameters
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.scan import SOURCE_ASSET, UNUSED_REASONS, Scan
from imagemill.pipeline.status import ledger_of_runs
from imagemill.store.ledger import Ledger, Problem
from imagemill.text.close_names import name_hint


def explain(session: Session, image_id: str) -> dict[str, Any]:
    """The whole story of one image: what is known at every station, and why it went no further.

    Raises:
        MissingInput: no station has ever heard of it.
    """
    root, inventory = session.root, session.overview()
    scan, ledger = inventory.scan, ledger_of_runs(session)
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
    story["record"] = _record_line(inventory, image_id)
    story["shard"] = _shard_place(root.shards, image_id)
    problems = [p for p in current_problems(scan, ledger) if _id_of(p) == image_id]
    if not source and (unused := _unused_files(scan, image_id)):
        story["source"] = {"file": ", ".join(f"approved/{p.item}" for p in unused), "not used": unused[0].reason}
    packable = story["record"] and all(story["embeddings"].values()) and not problems
    if packable and story["shard"] is None and (limit := _limit(root.shards, story.get("bucket"))):
        story["limit"] = limit
    story["problems"] = [
        {"asset": p.asset, "outcome": p.outcome, "reason": p.reason, "detail": p.detail, "do": p.remedy}
        for p in problems
    ] + [
        {"asset": SOURCE_ASSET, "outcome": p.outcome, "reason": p.reason, "detail": p.detail, "do": p.remedy}
        for p in gone_images(scan, ledger) if p.item == image_id
    ]  # fmt: skip
    if not (source or facts or problems or story["record"] or story["shard"]):
        raise MissingInput(
            f"no image {image_id!r}",
            where=root.approved,
            why=name_hint(image_id, known_ids(inventory, ledger)),
            do="check the id: it is the name of the image file without its extension",
        )
    return story


def known_ids(inventory: Inventory, ledger: Ledger) -> set[str]:
    """Return the ids of all images that a data root contains or has contained."""
    stems = {image_id_of(problem.item) for problem in inventory.scan.problems}
    known = {*ledger.ids("sources"), *ledger.ids("withdrawn"), *inventory.recorded.lines}
    return {*inventory.scan.sources, *stems, *known}


def _unused_files(scan: Scan, image_id: str) -> list[Problem]:
    """Return the files of this id that are in `approved/` and are not used: of a collision, or of an unsupported type."""
    return [p for p in scan.problems if p.reason in UNUSED_REASONS and image_id_of(p.item) == image_id]


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


def _record_line(inventory: Inventory, image_id: str) -> int | None:
    span = inventory.recorded.lines.get(image_id)
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
