"""The dataset card's text: what the sets of a shards folder hold, in Markdown, with the front matter that the hub reads.

Belongs here: sections and words.
Belongs elsewhere: where the card lies and when it is written (shard_card.py), counting (shard_statistics.py).
Source: Hugging Face hub, "Dataset cards" and "Manual configuration"; issue "counts, licences if given, histograms".
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from imagemill.buckets import USUAL_RATIOS, bucket_size
from imagemill.embedding_specs import T5_TOKENS, EmbeddingSpec, embedding_specs
from imagemill.pipeline.shards.shard_manifest import Maker, Manifest
from imagemill.pipeline.shards.shard_sets import Tombstone

# The hub's classes of dataset sizes: from this many samples on.
_SIZE_CLASSES = {
    0: "n<1K", 1_000: "1K<n<10K", 10_000: "10K<n<100K", 100_000: "100K<n<1M", 1_000_000: "1M<n<10M", 10_000_000: "10M<n<100M",
}  # fmt: skip

_TOKEN_STEP = 8
_BAR = 40


class Set(NamedTuple):
    """One bucket's set as its documents say."""

    bucket: str
    manifest: Manifest
    tombstones: Sequence[Tombstone]

    @property
    def samples(self) -> int:
        return self.manifest.samples

    @property
    def bytes(self) -> int:
        return self.manifest.bytes


def card(sets: Sequence[Set], marker: str, licence: str | None = None) -> str:
    """The whole document, of one set at least. `marker`: a line that says whose it is."""
    sections = [_warning(sets), _counts(sets), _members(sets), _models(sets), _histograms(sets), _gone(sets)]
    front = yaml.safe_dump(_front_matter(sets, licence), sort_keys=False, allow_unicode=True)
    head = f"---\n{front}---\n\n<!-- {marker} -->\n\n# {_title(sets)}\n\n"
    reading = _READING.replace("<bucket>", sets[0].bucket)
    return head + "\n\n".join([*(section for section in sections if section), reading]) + "\n"


def _title(sets: Sequence[Set]) -> str:
    return (
        f"Images, encoded: {_total(sets):,} samples in {len(sets)} aspect {'bucket' if len(sets) == 1 else 'buckets'}"
    )


def _total(sets: Iterable[Set]) -> int:
    return sum(one.samples for one in sets)


def _front_matter(sets: Sequence[Set], licence: str | None) -> dict[str, Any]:
    configs = [{"config_name": "default", "default": True, "data_files": _files("bucket_*")}]
    configs += [{"config_name": one.bucket, "data_files": _files(f"bucket_{one.bucket}")} for one in sets]
    size = max(limit for limit in _SIZE_CLASSES if limit <= _total(sets))
    return {
        **({"license": licence} if licence else {}),
        "task_categories": ["text-to-image"],
        "tags": ["webdataset", "imagemill", "latents", "aspect-ratio-buckets"],
        "size_categories": [_SIZE_CLASSES[size]],
        "configs": configs,
    }


def _files(folder: str) -> list[dict[str, str]]:
    return [{"split": "train", "path": f"{folder}/shard-*.tar"}]


def _warning(sets: Sequence[Set]) -> str:
    kinds = _preview_kinds(sets)
    if not kinds:
        return ""
    return (
        f"> **NOT FOR TRAINING. Preview models made: {', '.join(kinds)}.** They have the shapes of the real models and random"
        " weights: nothing can be learned from what they made. Configure real models and run imagemill again."
    )


def _preview_kinds(sets: Iterable[Set]) -> list[str]:
    return sorted({kind for one in sets for kind, maker in _makers(one) if maker.preview})


def _makers(one: Set) -> Iterable[tuple[str, Maker]]:
    return one.manifest.provenance.items()


def _counts(sets: Sequence[Set]) -> str:
    rows = [(one.bucket, f"{one.samples:,}", len(one.manifest.shards), _size(one.bytes)) for one in sets]
    shards = sum(len(one.manifest.shards) for one in sets)
    total = ("**all**", f"**{_total(sets):,}**", shards, _size(sum(one.bytes for one in sets)))
    return "## Buckets\n\nA batch holds images of one bucket.\n\n" + _table(
        ("bucket (width x height)", "samples", "shards", "size"), [*rows, total]
    )


def _members(sets: Sequence[Set]) -> str:
    specs = {spec.member: spec for spec in embedding_specs()}
    width, height = bucket_size(sets[0].bucket)
    rows = [(f"`{member}`", *_described(specs.get(member), member, width, height)) for member in _all_members(sets)]
    head = ("member", "dtype", f"shape, of an image of {width} x {height}", "what")
    return "## Members of a sample\n\n" + _table(head, rows)


def _all_members(sets: Iterable[Set]) -> list[str]:
    return list(dict.fromkeys(member for one in sets for member in one.manifest.members))


def _described(spec: EmbeddingSpec | None, member: str, width: int, height: int) -> tuple[str, str, str]:
    if member == "json":
        return "", "", "the record: `image_id`, `caption`, `width`, `height`, `aspect_bucket`, `t5_attention_mask`"
    if member == "t5m.npy":
        return "uint8", f"({T5_TOKENS},)", "the caption's attention mask: 1 where there is text"
    if spec is None:
        return "", "", ""
    shape = spec.shape(height, width)
    varies = "; follows the image's own size" if spec.shape(2 * height, 2 * width) != shape else ""
    return spec.dtype, f"{shape}{varies}", f"`{spec.kind}`, of the {spec.source}"


def _models(sets: Sequence[Set]) -> str:
    made: Counter[tuple[str, ...]] = Counter()
    for one in sets:
        for kind, maker in _makers(one):
            preview = {True: "**preview: random weights**", False: "no", None: "unknown"}[maker.preview]
            named = (kind, _cell(maker.model), _cell(maker.revision), _cell(maker.key), preview)
            made[named] += maker.unknown_maker
    if not made:
        return ""
    head = ("kind", "model", "revision", "key", "preview", "samples whose maker is not known")
    rows = [(*maker, f"{unknown:,}") for maker, unknown in made.items()]
    return "## Models\n\nEqual keys: interchangeable files.\n\n" + _table(head, rows)


def _cell(value: object) -> str:
    return f"`{value}`" if value else "not recorded"


# ---- histograms


def _histograms(sets: Sequence[Set]) -> str:
    """Of the sets whose manifests hold statistics."""
    counts = {name: _summed(sets, name) for name in ("caption_tokens", "aspect_ratios", "megapixels")}
    if not any(counts.values()):
        return ""
    tokens = counts["caption_tokens"]
    parts = [
        "## Histograms",
        f"Tokens of a caption, by its mask; captions that fill all {T5_TOKENS}, and may be cut off: {tokens[str(T5_TOKENS)]:,}.",
        _bars("tokens", _token_classes(tokens)),
        "Width / height of the images:",
        _bars("ratio", _ratio_classes(counts["aspect_ratios"])),
        "Size of the images in megapixels:",
        _bars("megapixels", {name: counts["megapixels"][name] for name in sorted(counts["megapixels"], key=_limit)}),
    ]
    known = sum(tokens.values())
    if known < _total(sets):
        parts.append(f"Not counted: {_total(sets) - known:,} samples of sets written before these were measured.")
    return "\n\n".join(parts)


def _summed(sets: Iterable[Set], name: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in sets:
        if one.manifest.statistics:
            total.update(getattr(one.manifest.statistics, name))
    return total


def _token_classes(tokens: Mapping[str, int]) -> dict[str, int]:
    classes: Counter[int] = Counter()
    for number, count in tokens.items():
        classes[(int(number) - 1) // _TOKEN_STEP] += count
    return {
        f"{n * _TOKEN_STEP + 1}–{min((n + 1) * _TOKEN_STEP, T5_TOKENS)}": classes[n]
        for n in range(min(classes), max(classes) + 1)
    }


def _ratio_classes(ratios: Mapping[str, int]) -> dict[str, int]:
    """Unusual ones, which get their nearest bucket all the same, in one class at each end."""
    low, high = map(float, USUAL_RATIOS)
    classes: Counter[str] = Counter()
    for name in sorted(ratios, key=float):
        classes[f"<{low}" if float(name) < low else f">{high}" if float(name) > high else name] += ratios[name]
    return dict(classes)


def _limit(name: str) -> tuple[float, str]:
    return float(name.lstrip("<>=")), name


def _bars(head: str, counts: Mapping[str, int]) -> str:
    most = max(counts.values())
    rows = [(name, f"{count:,}", "█" * -(-_BAR * count // most)) for name, count in counts.items()]
    return _table((head, "samples", ""), rows)


# ---- the rest


def _gone(sets: Sequence[Set]) -> str:
    why = Counter(tombstone.why for one in sets for tombstone in one.tombstones)
    if not why:
        return ""
    reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in sorted(why.items()))
    return (
        f"## Withdrawn\n\n{why.total():,} samples lie in the tars and count no more ({reasons}): `tombstones.jsonl` in their"
        " bucket's folder names them. `imagemill.reading` and Megatron-Energon pass over them; **`webdataset` and `datasets`"
        " deliver them**. `imagemill shards --repack` writes tars without them: run it before you give the set away."
    )


_READING = """## How to read it

```python
from imagemill.reading import ShardDataset            # batches of one bucket, shuffled, resumable, split by rank and worker
batches = ShardDataset("shards", batch_size=8, latents="crop", tail="pad")

import webdataset                                      # one bucket, in order
samples = webdataset.WebDataset("shards/bucket_<bucket>/shard-000000.tar", shardshuffle=False).decode()

import datasets                                        # all buckets, or one by its name
rows = datasets.load_dataset("shards", split="train", streaming=True).with_format("numpy")

from megatron import energon                           # a bucket's folder, or metadataset.yaml for all of them
energon.get_train_dataset("shards/metadataset.yaml", task_encoder=..., batch_size=8, worker_config=..., ...)
```

- A sample's key is its `image_id` with `.` written `%2E` and `%` written `%25`; the true id is in its json.
- For energon the samples are crude: give your `TaskEncoder` a `Cooker` that takes members by their names (`sample["vae.npy"]`),
  and a `batch_group_criterion` that tells the buckets apart (`sample.__subflavors__["bucket"]`): a batch holds one shape.
- Latents are stored neither scaled nor shifted; both factors stand in `manifest.json` under `provenance.vae_latents.facts`."""


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
