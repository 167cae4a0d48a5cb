"""Documents beside the bucket folders: a dataset card, and Energon's blend of all buckets.

    shards/
    ├─ README.md            the card: counts, members, models, histograms, how to read; front matter for `load_dataset`
    ├─ metadataset.yaml     for Megatron-Energon: every bucket, weighted by its samples
    └─ bucket_<bucket>/ …

Both are derived from the buckets' manifests alone and contain no date, so that equal sets give equal bytes. Files of
these names without our marker line are never changed; if README.md is such a file, the card is written to
`DATASET_CARD.md`.

The card's text is in dataset_card.md.jinja, counting in shard_statistics.py, Energon's formats in formats/energon.py.

Reference: Hugging Face hub, "Dataset cards" and "Manual configuration".
Spec: docs/spec/shards.md#updating-a-set
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import yaml

from imagemill.domain.buckets import BUCKETS, USUAL_RATIOS, bucket_size
from imagemill.domain.embedding_specs import T5, mask_length
from imagemill.formats.energon import METADATASET, metadataset
from imagemill.fs.atomic import write_bytes_atomic
from imagemill.pipeline.colours import ColourCounts
from imagemill.pipeline.shards.shard_manifest import CropStatistics, Manifest, recorded_spec, specs_of_set
from imagemill.pipeline.shards.shard_sets import Tombstone, bucket_folder, read_manifest, read_tombstones
from imagemill.pipeline.shards.shard_statistics import POOR_USE, is_poor

CARD = "README.md"
# Name of the card if README.md is a user's file.
OTHER_CARD = "DATASET_CARD.md"

MARKER = "Written by imagemill, again after every run. Remove this line to keep the file as it is."

# Size classes of the Hugging Face hub, by their smallest number of samples.
_SIZE_CLASSES = {
    0: "n<1K", 1_000: "1K<n<10K", 10_000: "10K<n<100K", 100_000: "100K<n<1M", 1_000_000: "1M<n<10M", 10_000_000: "10M<n<100M",
}  # fmt: skip

_TOKEN_STEP = 8
_TEMPLATE = Path(__file__).with_name("dataset_card.md.jinja")


class Set(NamedTuple):
    """One bucket's set, as its documents describe it."""

    bucket: str
    manifest: Manifest
    tombstones: Sequence[Tombstone]


def read_sets(output: Path) -> list[Set]:
    """Return the readable sets of all buckets, in the order of BUCKETS."""
    folders = ((bucket, bucket_folder(output, bucket)) for bucket in BUCKETS)
    found = ((bucket, folder, read_manifest(folder)) for bucket, folder in folders)
    return [Set(bucket, manifest, read_tombstones(folder)) for bucket, folder, manifest in found if manifest]


def write_beside(output: Path, *, licence: str | None = None) -> None:
    """Write both documents, and repeat until they match the sets on disk: a concurrent run may publish a set at any time."""
    described = None
    while (sets := read_sets(output)) != described:
        write_card(output, licence=licence)
        write_metadataset(output)
        described = sets


def write_card(output: Path, *, licence: str | None = None) -> Path | None:
    """Write the card of the sets that now exist below `output`; without sets, remove our card.

    Args:
        output: parent of the bucket folders.
        licence: the data's licence by its id on the hub (`cc-by-4.0`), from the configuration.

    Returns:
        The card's path: DATASET_CARD.md if README.md is a user's file; None if no card was written.
    """
    sets = read_sets(output)
    place = next((path for path in (output / CARD, output / OTHER_CARD) if _may_be_written(path)), None)
    for path in (output / CARD, output / OTHER_CARD):
        if (path != place or not sets) and _is_ours(path):
            path.unlink()
    if place is None or not sets:
        return None
    _write(place, card(sets, licence).encode())
    return place


def write_metadataset(output: Path) -> Path | None:
    """Write Energon's blend of the buckets below `output`; return None without sets, or if the file is a user's."""
    folders = [bucket_folder(output, one.bucket).name for one in read_sets(output) if one.manifest.samples]
    path = output / METADATASET
    if not _may_be_written(path):
        return None
    if not folders:
        path.unlink(missing_ok=True)
        return None
    _write(path, f"# {MARKER}\n".encode() + metadataset(folders))
    return path


def _is_ours(path: Path) -> bool:
    with suppress(OSError):
        return not path.is_symlink() and MARKER.encode() in path.read_bytes()
    return False


def _may_be_written(path: Path) -> bool:
    return _is_ours(path) or not (path.exists() or path.is_symlink())


def _write(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        write_bytes_atomic(path, content)


# ---- the card


def card(sets: Sequence[Set], licence: str | None = None) -> str:
    """Return the text of the card; `sets` must not be empty."""
    import jinja2

    manifests = [one.manifest for one in sets]
    samples = sum(manifest.samples for manifest in manifests)
    most_tokens = mask_length([recorded_spec(T5, manifests[0].provenance)])
    tokens, ratios, megapixels = (
        _summed(manifests, name) for name in ("caption_tokens", "aspect_ratios", "megapixels")
    )
    front_matter = {
        **({"license": licence} if licence else {}),
        "task_categories": ["text-to-image"],
        "tags": ["webdataset", "imagemill", "latents", "aspect-ratio-buckets"],
        "size_categories": [_SIZE_CLASSES[max(limit for limit in _SIZE_CLASSES if limit <= samples)]],
        "configs": [
            {"config_name": "default", "default": True, "data_files": _files("bucket_*")},
            *({"config_name": one.bucket, "data_files": _files(f"bucket_{one.bucket}")} for one in sets),
        ],
    }
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"thousands": "{:,}".format, "size": _size}
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        card_data=yaml.safe_dump(front_matter, allow_unicode=True, sort_keys=False).strip(),
        marker=MARKER,
        sets=sets,
        samples=samples,
        crops=[_crop_row(one.bucket, one.manifest.crop) for one in sets if one.manifest.crop],
        colours=[_colour_row(one.bucket, one.manifest.pixels) for one in sets if one.manifest.pixels],
        poor=[one.bucket for one in sets if one.manifest.crop and is_poor(one.manifest.crop)],
        poor_use=POOR_USE,
        preview_kinds=sorted({kind for each in manifests for kind, entry in each.provenance.items() if entry.preview}),
        members=list(_member_rows(sets, most_tokens)),
        models=_model_rows(manifests),
        most_tokens=most_tokens,
        cut_off=tokens[str(most_tokens)],
        tokens=_token_classes(tokens, most_tokens),
        ratios=_ratio_classes(ratios),
        megapixels=dict(sorted(megapixels.items(), key=lambda item: (float(item[0].lstrip("<>=")), item[0]))),
        not_counted=samples - tokens.total(),
        withdrawn=Counter(tombstone.why for one in sets for tombstone in one.tombstones),
    )


def _crop_row(bucket: str, crop: CropStatistics) -> tuple[str, ...]:
    source = "the image" if crop.size == "original" else "the bucket's crop"
    enlargements = (f"{times:.2f}" for times in (crop.median_enlargement, crop.most_enlargement))
    return bucket, source, f"{crop.median_coverage:.0%}", *enlargements


def _colour_row(bucket: str, pixels: ColourCounts) -> tuple[str, ...]:
    return bucket, f"`{pixels.color}`", pixels.line or "no colour profiles: sRGB"


def _files(folder: str) -> list[dict[str, str]]:
    return [{"split": "train", "path": f"{folder}/shard-*.tar"}]


def _member_rows(sets: Sequence[Set], most_tokens: int) -> Iterator[tuple[str, ...]]:
    specs = {member: spec for one in sets for spec in specs_of_set(one.manifest) for member in spec.members}
    width, height = bucket_size(sets[0].bucket)
    for member in dict.fromkeys(member for one in sets for member in one.manifest.members):
        dtype = shape = what = ""
        if member == "json":
            what = "the record: `image_id`, `caption`, `width`, `height`, `aspect_bucket`, `t5_attention_mask`"
        elif member == "t5m.npy":
            dtype, shape, what = "uint8", f"({most_tokens},)", "the caption's attention mask: 1 where there is text"
        elif spec := specs.get(member):
            shape = str(spec.shapes(height, width)[member])
            if spec.shapes(2 * height, 2 * width) != spec.shapes(height, width):
                shape += "; follows the image's own size"
            dtype, what = spec.dtype, f"`{spec.kind}`, of the {spec.source}"
        yield f"`{member}`", dtype, shape, what


def _model_rows(manifests: Sequence[Manifest]) -> list[tuple[str, ...]]:
    unknown_counts: Counter[tuple[str, ...]] = Counter()
    for kind, entry in (item for manifest in manifests for item in manifest.provenance.items()):
        names = (f"`{value}`" if value else "not recorded" for value in (entry.model, entry.revision, entry.key))
        preview = {True: "**preview: random weights**", False: "no", None: "unknown"}[entry.preview]
        unknown_counts[kind, *names, preview] += entry.unknown_maker
    return [(*row, f"{unknown:,}") for row, unknown in unknown_counts.items()]


def _summed(manifests: Sequence[Manifest], name: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for manifest in manifests:
        if manifest.statistics:
            total.update(getattr(manifest.statistics, name))
    return total


def _token_classes(tokens: Mapping[str, int], most: int) -> dict[str, int]:
    classes: Counter[int] = Counter()
    for number, count in tokens.items():
        classes[(int(number) - 1) // _TOKEN_STEP] += count
    return {
        f"{n * _TOKEN_STEP + 1}–{min((n + 1) * _TOKEN_STEP, most)}": classes[n]
        for n in range(min(classes, default=0), max(classes, default=-1) + 1)
    }


def _ratio_classes(ratios: Mapping[str, int]) -> dict[str, int]:
    """Return the counts by ratio; ratios outside USUAL_RATIOS form one class at each end."""
    low, high = map(float, USUAL_RATIOS)
    classes: Counter[str] = Counter()
    for name in sorted(ratios, key=float):
        classes[f"<{low}" if float(name) < low else f">{high}" if float(name) > high else name] += ratios[name]
    return dict(classes)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
