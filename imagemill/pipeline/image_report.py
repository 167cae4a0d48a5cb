"""The report on one image: source, caption, files, record, shard, problems. Reads only; opens no image and no npy.

The status of the whole data root is in status.py, printing in dagster_project/cli/.

Spec: docs/spec/conventions.md#no-silent-loss
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imagemill.domain.buckets import assign_bucket
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.ids import image_id_of
from imagemill.domain.inputs import BAD_PROFILE, HDR_TRANSFER, SRGB, ColorSetting
from imagemill.domain.layout import DataRoot
from imagemill.errors import MissingInput
from imagemill.formats.jsonl import read_mentions
from imagemill.formats.npy import NpyStore
from imagemill.fs.fingerprints import signature_bytes
from imagemill.inputs.scan import SOURCE_ASSET, UNUSED_REASONS, Scan, is_image
from imagemill.pipeline.problem_list import current_problems, gone_images
from imagemill.pipeline.session import Session
from imagemill.pipeline.shards.shard_sets import INDEX, bucket_folder, read_tombstones, recorded_parameters
from imagemill.pipeline.stage2.models_in_use import file_model_text
from imagemill.pipeline.stage2.record_index import find_record, known_images
from imagemill.pipeline.stage2.renames import find_renames
from imagemill.pipeline.status import ledger_of_runs
from imagemill.store.ledger import FROM_METADATA, CaptionRow, Ledger, SourceRow
from imagemill.store.provenance import read_identity
from imagemill.text.close_names import name_hint


def explain(session: Session, image_id: str) -> dict[str, Any]:
    """Return the report on one image: the data of every stage, and why it went no further.

    Args:
        session: the session of the data root.
        image_id: the image, or the path of its file below `approved/`.

    Raises:
        MissingInput: if no stage has any record of the image, or if it belongs to another share.
    """
    root, inventory = session.root, session.overview()
    scan, ledger = inventory.scan_of({image_id}), ledger_of_runs(session)
    source, facts = scan.sources.get(image_id), ledger.sources([image_id]).get(image_id)
    same_bytes = ledger.sources_with([facts.fingerprint]) if facts else {}
    if len(same_bytes) > 1:  # under its earlier name, if it was renamed
        scan = inventory.scan_of(same_bytes)
    caption = ledger.captions([image_id]).get(image_id)
    report: dict[str, Any] = {"image_id": image_id}
    if source:
        report["source"] = {"file": f"approved/{source.file_name}", "bytes": signature_bytes(source.stat)}
    if facts:
        report["source"] = {**report.get("source", {"file": f"approved/{facts.file_name}", "missing": True}),
                           "fingerprint": facts.fingerprint, "height": facts.height, "width": facts.width}  # fmt: skip
        report["colours"] = _colours(facts, session.inputs.color)
        report["bucket"] = assign_bucket(facts.width, facts.height)
    if caption:
        report["caption"] = _caption(caption)
        if image_id in ledger.cut_off():
            report["caption"]["cut off"] = "at captioner.max_new_tokens"
    report["embeddings"] = {spec.kind: _embedding(root, spec, image_id, ledger) for spec in embedding_specs()}
    span = find_record(root.stage2_jsonl, image_id)
    report["record"] = span.number if span else None
    report["shard"] = _shard_place(root.shards, image_id)
    # Files refused by their names are listed by file name, all other inputs by image id.
    named = ((p, image_id_of(p.item) if p.asset == SOURCE_ASSET else p.item) for p in ledger.problems())
    problems = current_problems(scan, ledger, [problem for problem, item in named if item == image_id])
    # Files of this id that are not used: of a collision, or of an unsupported type.
    of_id = (p for p in scan.problems if image_id_of(p.item) == image_id)
    if not source and (unused := [p for p in of_id if p.reason in UNUSED_REASONS]):
        report["source"] = {"file": ", ".join(f"approved/{p.item}" for p in unused), "not used": unused[0].reason}
    packable = report["record"] and all(report["embeddings"].values()) and not problems
    if packable and report["shard"] is None and "bucket" in report:
        # The number of samples that its packing was limited to, over all buckets.
        recorded = recorded_parameters(bucket_folder(root.shards, report["bucket"]))
        report |= {"limit": recorded.limit} if recorded and recorded.limit else {}
    if not source and (new := _new_name(image_id, scan, ledger, same_bytes)):
        report["renamed"] = new
    gone = ((SOURCE_ASSET, problem) for problem in gone_images(scan, ledger, same_bytes) if problem.item == image_id)
    report["problems"] = [
        {"asset": asset, "outcome": p.outcome, "reason": p.reason, "detail": p.detail, "do": p.remedy}
        for asset, p in (*((problem.asset, problem) for problem in problems), *gone)
    ]
    if source or facts or problems or report["record"] or report["shard"] or "renamed" in report:
        return report
    scan = inventory.scan
    stems = {image_id_of(problem.item) for problem in scan.problems}
    known = {*scan.sources, *stems, *known_images(ledger, inventory.recorded)}
    if image_id not in known and (named := image_id_of(image_id)) in known:
        return explain(session, named)
    _refuse_elsewhere(session, image_id)
    raise MissingInput(
        f"no image {image_id!r}",
        where=root.approved,
        why=name_hint(image_id, known),
        do="check the id, or the path below approved/: the id is the name of the image file without its extension",
    )


def _refuse_elsewhere(session: Session, image_id: str) -> None:
    own = image_id_of(image_id) if is_image(image_id) else image_id
    if (share := session.inputs.own_share) and not share.has(own):
        raise MissingInput(
            f"{image_id!r} belongs to another share",
            where=session.root.path,
            why=f"its share is {share.of(own)}; this data root has {share}",
            do="ask the data root of that share",
        )


def _new_name(image_id: str, scan: Scan, ledger: Ledger, same_bytes: Mapping[str, SourceRow]) -> dict[str, str] | None:
    """Return the present id of an image that is gone, and when the rename was accepted."""
    if accepted := ledger.rename_of(image_id):
        return {"to": accepted.image_id, "accepted": accepted.at}
    pairs = find_renames(scan, ledger, same_bytes).pairs
    new = next((pair.image.image_id for pair in pairs if pair.former.image_id == image_id), None)
    return {"to": new, "accepted": "not yet"} if new else None


def _caption(row: CaptionRow) -> dict[str, Any]:
    found: dict[str, Any] = {"text": row.text, "origin": row.origin, "truncated": row.truncated}
    if row.origin == FROM_METADATA:
        found["file"] = str(row.stat)
    if row.texts:
        found["others"] = list(row.texts[1:])
    if row.conflict:
        found["conflict"] = "a source of a lower rank has another text"
    return found


def _colours(facts: SourceRow, color: ColorSetting) -> dict[str, Any]:
    """Return the colour description of an image, and what happens to its pixels."""
    if facts.color is None:
        return {"profile": "not examined", "pixels.color": color}
    if not facts.converts:
        pixels = "as stored"
    else:
        pixels = "converted to sRGB" if color == SRGB else "as stored; pixels.color: srgb would convert them"
    state = {BAD_PROFILE: {"unusable": True}, HDR_TRANSFER: {"high dynamic range": True}}.get(facts.color, {})
    frames = {"pictures in the file": "several; the first, or the primary one, is used"} if facts.first_frame else {}
    return {"profile": facts.profile or "none", **state, "pixels": pixels, **frames, "pixels.color": color}


def _embedding(root: DataRoot, spec: Any, image_id: str, ledger: Ledger) -> dict[str, Any] | None:
    store = NpyStore(root.derived / spec.folder, spec)
    try:
        path, stat = store.path(image_id), store.stat(image_id)
    except (OSError, ValueError):  # no such file, or an id that cannot be a file name
        return None
    rows = [row for row in ledger.files(spec.kind, [image_id]).values() if row.stat == stat]
    known = {"maker": "not in the ledger"}
    if rows:
        model = file_model_text(rows[0].model_key, read_identity(ledger, spec.kind))
        known = {"maker": rows[0].model_key, "model": model, "made from": rows[0].source}
    return {"file": f"derived/{spec.folder}/{path.name}", "bytes": signature_bytes(stat), **known}


def _shard_place(output: Path, image_id: str) -> dict[str, Any] | None:
    """Return the position of the image's sample: the one in use, else the last one in the index, with its tombstone."""
    found: dict[str, Any] | None = None
    for index in sorted(output.glob(f"bucket_*/{INDEX}")):
        dead = {tombstone.place: tombstone.why for tombstone in read_tombstones(index.parent)}
        for line in read_mentions(index, image_id):
            if not line.value or line.value.get("image_id") != image_id:
                continue
            name, offset, size = (line.value.get(field) for field in ("shard", "offset", "size"))
            found = {"tar": f"{index.parent.name}/{name}", "offset": offset, "size": size}
            place: Any = (name, offset)
            if place not in dead:
                return found
            found["counts no more"] = dead[place]
    return found
