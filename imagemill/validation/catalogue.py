"""Every rule of the validator, as data: what it demands, of which kinds, how grave a breach is and what to do about it.

Adding a rule: one row here, one `finding(…)` where its kind is judged, and a passing and a failing case in
tests/validation/test_catalogue.py, which demands both of every row.

Belongs here: the table, and the one way to make a finding of a row.
Belongs elsewhere: judging (stage2.py, presets.py, images.py, stage_a.py, shards.py, files.py, tables.py, reports.py).
Source: CONTRACTS section 4.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.preset_records import PRESET_RULES, PRESET_WARNINGS
from imagemill.domain.violations import TEXT_WARNINGS, Violation
from imagemill.validation.findings import Finding


class Rule(NamedTuple):
    """One demand. `severity`: an `error` fails the file, a `warning` does not."""

    kinds: tuple[str, ...]
    says: str
    remedy: str
    severity: str = "error"


LINES = ("stage2", "preset", "stage-a")
_STAGE2, _PRESET, _STAGE_A, _SHARDS = ("stage2",), ("preset",), ("stage-a",), ("shards",)
_COVERAGE = ("records and shards",)
_PUBLISH = "run `imagemill run`: it packs every ready record into its bucket, and finishes an interrupted run"
_FILES, _REPORTS = ("embedding files",), ("reports",)
_RERUN, _REPACK = "run imagemill stage2", "run imagemill shards --overwrite"
_REPLACE = "run `imagemill run`: it replaces the file and reports it"
_REPAIR = (
    "run `imagemill stage2 --verify`, which notes the file, then `imagemill run`: it restores the file from the shards, or makes "
    "it again"
)
_AGAIN = "remove the file and materialize its asset again"

RULES: dict[str, Rule] = {
    # any file of records
    "strict_json": Rule(LINES, "a line is one JSON object: UTF-8, no NaN, no infinity, not blank", "repair or remove the line"),
    "duplicate_key": Rule(LINES, "no object has a key twice", "keep one of them"),
    "read_error": Rule((*LINES, *_FILES), "the system opens the file", "make the file readable"),
    "missing_input": Rule((*LINES, "shards"), "what is to be validated is there", "check the path"),
    **{
        name: Rule(("stage2", "preset"), says, remedy, "warning") for name, (says, remedy) in TEXT_WARNINGS.items()
    },
    # Stage 2 records
    "id": Rule(_STAGE2, "image_id can name a file", "use the name of the image file without its extension as id"),
    "path": Rule(_STAGE2, "image_path is text", "give the image's path"),
    "caption": Rule(_STAGE2, "caption is text that is not blank", "write a caption beside the image, then run `imagemill run`"),
    "mask": Rule(("stage2", "shards"), "77 ints, each 0 or 1, at least one 1; in a tar the record's", f"{_RERUN} --pass t5"),
    "size": Rule(_STAGE2, "height and width are ints above 0", _RERUN),
    "bucket": Rule(_STAGE2, "aspect_bucket is one of the seven", f"write one of {', '.join(BUCKETS)}"),
    "version": Rule(_STAGE2, "format_version, where given, is 2", _RERUN),
    "inline": Rule(_STAGE2, "no embedding inside the record", f"{_RERUN}: it moves the vector to an npy file"),
    "duplicate_id": Rule(_STAGE2, "no id twice", "keep one of them"),
    "unusual_ratio": Rule(_STAGE2, "width / height lies within 0.4 and 2.5", "check the image", "warning"),
    "not_nearest_bucket": Rule(_STAGE2, "the bucket is the nearest one", _RERUN, "warning"),
    "stage1": Rule(_STAGE2, "the record is of version 2", f"{_RERUN}; explain says what it lacks", "warning"),
    "source_missing": Rule(_STAGE2, "the image is there", "put the image back, if it is not gone on purpose", "warning"),
    "table": Rule(_STAGE2, "all records together are the table of the schema", _RERUN),
    "ledger_table": Rule(
        ("ledger",), "the ledger's tables are those of their schemas",
        "move .imagemill/ledger.sqlite away and run imagemill again: it adopts what is valid",
    ),
    "index_table": Rule(_SHARDS, "the index is the table of its schema", _REPACK),
    # npy files
    "missing_file": Rule((*_STAGE2, *_REPORTS), "each kind has its file", f"{_RERUN}, or put the image back if it is gone"),
    "wrong_dtype": Rule((*_STAGE2, *_FILES), "the dtype is the kind's", _REPLACE),
    "wrong_shape": Rule((*_STAGE2, *_FILES), "the shape is the record's", _REPLACE),
    "fortran_order": Rule((*_STAGE2, *_FILES), "values lie in C order", _REPLACE),
    "non_finite": Rule((*_STAGE2, *_FILES), "no NaN, no infinity", _REPLACE),
    "truncated": Rule((*_STAGE2, *_FILES), "the file is as long as its header promises", _REPLACE),
    "trailing_bytes": Rule((*_STAGE2, *_FILES), "nothing follows the values", _REPLACE),
    "unreadable": Rule((*_STAGE2, *_FILES, *_SHARDS, *_REPORTS), "the file can be read to its end", _REPLACE),
    "damaged": Rule((*_STAGE2, *_SHARDS), "a file has the bytes that the ledger recorded", _REPAIR),
    "unknown_image": Rule(_FILES, "the ledger knows the image", _RERUN, "warning"),
    # presets and raw records
    **{name: Rule(_PRESET, rule.says, rule.remedy) for name, rule in PRESET_RULES.items()},
    **{name: Rule(_PRESET, rule.says, rule.remedy, "warning") for name, rule in PRESET_WARNINGS.items()},
    "two_sizes": Rule(_PRESET, "one image has one size in all records", "give every record the size of the image file"),
    "images_folder": Rule(
        _PRESET, "images/ is a real directory, no link",
        "never link it: rescale makes the folder, coord fills it with hardlinks",
    ),
    "preset_manifest": Rule(_PRESET, "pipeline_manifest.json can be read", "restore it, or rescale into a new preset"),
    "no_limits": Rule(
        _PRESET, "the manifest has the rescale parameters", "rescale into a new preset, or give --max-pixels and --multiple-of",
        "warning",
    ),
    "legacy_file": Rule(_PRESET, "no .raw.jsonl beside the records", "delete it: <split>.jsonl holds the same"),
    "split_without_pixels": Rule(_PRESET, "a split with norm or coord records has its .jsonl", "run imagemill preset rescale"),
    "split_lines": Rule(_PRESET, "the files of a split have as many lines", "run imagemill preset coord"),
    "split_order": Rule(
        _PRESET, "the files of a split have the same images and objects, in the same order",
        "run imagemill preset coord",
    ),
    "stale_split": Rule(
        _PRESET, "norm and coord are those of the pixel records that are there", "run imagemill preset coord"
    ),
    "base_changed": Rule(
        _PRESET, "a derived preset is of the records that its base has", "delete it and run imagemill preset coord again",
        "warning",
    ),
    # images of records
    "image_missing": Rule(_PRESET, "the image is there", "put the image back, or make the preset again"),
    "not_a_file": Rule((*_STAGE2, *_PRESET), "the image is a regular file", "name an image file"),
    "undecodable": Rule((*_STAGE2, *_PRESET), "the image can be decoded to its end", "replace the file by a whole image"),
    "size_differs": Rule((*_STAGE2, *_PRESET), "the file has the declared size", "correct width and height, or the image"),
    "not_shared": Rule(
        _PRESET, "an image of a derived preset is the base's file, by hardlink",
        "delete the derived preset and run imagemill preset coord again",
    ),
    # Stage-A output
    "fields": Rule(_STAGE_A, "exactly group_id, mission, label, images and per_image", "run imagemill stage-a again"),
    "group": Rule(_STAGE_A, "group_id and mission are text that is not blank", "run imagemill stage-a again"),
    "mission": Rule(_STAGE_A, "the mission is the file's", "move the record to the file of its mission"),
    "label": Rule(_STAGE_A, "label is pass or fail", "run imagemill stage-a again"),
    "group_images": Rule(_STAGE_A, "images is a list of different file names, at least one", "run imagemill stage-a again"),
    "coverage": Rule(_STAGE_A, "per_image has image_1 to image_N, N images, no more", "run imagemill stage-a again"),
    "summary": Rule(_STAGE_A, "a summary is one line of text, not blank", "run imagemill stage-a again"),
    "duplicate_group": Rule(_STAGE_A, "no group twice under one label", "keep one of them"),
    # shards
    "manifest": Rule(_SHARDS, "the folder has a manifest of ours", _REPACK),
    "manifest_digest": Rule(_SHARDS, "the manifest's content is what its digest was taken of", _REPACK),
    "no_manifest_digest": Rule(_SHARDS, "the manifest has a digest of its content", _REPACK, "warning"),
    "index": Rule(_SHARDS, "the index has each sample once, where it is", _REPACK),
    "live_samples": Rule(_SHARDS, "the manifest counts the samples that count", _REPACK),
    "index_order": Rule(_SHARDS, "the index follows the tars, and samples in them", _REPACK),
    "tombstones": Rule(_SHARDS, "tombstones can be read, lie on samples of theirs, are as many as the manifest says", _REPACK),
    "set_bucket": Rule(_SHARDS, "folder, manifest and records name one bucket", _REPACK),
    "statistics": Rule(_SHARDS, "the manifest's statistics are those of the samples that count", _REPACK),
    "energon": Rule(_SHARDS, "the files for Megatron-Energon are those that the index asks for", _REPACK),
    "missing_shard": Rule(_SHARDS, "every tar of the manifest is there", _REPACK),
    "foreign_shard": Rule(_SHARDS, "no other tar is there", "move it away"),
    "checksum": Rule(_SHARDS, "a tar has the manifest's checksum", _REPACK),
    "members": Rule(_SHARDS, "a sample has the manifest's members, in order", _REPACK),
    "count": Rule(_SHARDS, "a tar has as many samples and bytes as the manifest says", _REPACK),
    "record": Rule(_SHARDS, "a sample's json is a valid record of its id", _REPACK),
    "npy": Rule(_SHARDS, "an npy member is what its record asks for", _REPACK),
    "indexed": Rule(_SHARDS, "the index's digest, size and tokens are those of the sample", _REPACK),
    "verbatim": Rule(_SHARDS, "an npy member is the file on disk, byte for byte", _REPACK),
    "live_twice": Rule(_COVERAGE, "no image is live in two buckets", _PUBLISH),
    "unpacked": Rule(_COVERAGE, "every ready record is in a shard", _PUBLISH),
    "other_bucket": Rule(_COVERAGE, "a record's sample is in its own bucket", _PUBLISH),
    # reports of curation
    "not_the_merge": Rule(_REPORTS, "all.json is its buckets put together", _AGAIN),
    "impossible": Rule(_REPORTS, "numbers are such as data can have", _AGAIN),
    "constant_channel": Rule(
        _REPORTS, "no channel has one value throughout", "look at the latents: a real VAE does not make these", "warning"
    ),
    "not_the_summarys": Rule(_REPORTS, "the lines are those that the summary was written with", _AGAIN),
    "bad_group": Rule(_REPORTS, "members are sorted, two or more, the representative among them", _AGAIN),
    "two_groups": Rule(_REPORTS, "no image is in two groups", _AGAIN),
}  # fmt: skip

# What a message or an id may take of a report; a line of a gigabyte says no more than its beginning.
_MESSAGE, _ITEM = 500, 200


def finding(
    rule: str, message: str, *, file: str, line: int = 0, field: str = "", item: str = "", remedy: str | None = None
) -> Finding:
    """A breach of one row; `remedy` where the place knows better than the table."""
    row = RULES[rule]
    return Finding(
        file, rule, message[:_MESSAGE], remedy or row.remedy, line, field[:_ITEM], item[:_ITEM], row.severity
    )


def findings_of(violations: Iterable[Violation], at: Mapping[str, Any]) -> Iterator[Finding]:
    """The findings of what a record breaks; `at`: file, line and item."""
    return (finding(v.rule, v.message, field=v.field, remedy=v.remedy, **at) for v in violations)
