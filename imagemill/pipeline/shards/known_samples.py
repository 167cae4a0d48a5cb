"""Samples that a packing run knows from the one before: neither their records nor their rows have changed since.

    row changes after the last packing ──> samples to look at
    live samples of the present sets   ──> all others are known, with their digests

Which samples are ready is decided in readiness.py. A run that cannot continue the last one looks at every record.

Spec: docs/spec/shards.md#readiness
"""

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from imagemill.config import Config
from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.errors import ImagemillError
from imagemill.fs.fingerprints import fingerprint
from imagemill.pipeline.shards.readiness import KnownSample
from imagemill.pipeline.shards.shard_plan import PackPlan
from imagemill.pipeline.shards.shard_sets import (
    IndexLine,
    bucket_folder,
    read_index,
    read_manifest,
    set_digest,
    set_members,
)
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.record_index import read_recorded, state_of
from imagemill.store.ledger import BEGUN, HISTORY, Ledger, PackedSets

# Settings that decide nothing about samples. The first run records its history after it has packed.
_WITHOUT_EFFECT = {BEGUN, HISTORY}


def state_before(inventory: Inventory, config: Config, output: Path, ledger: Ledger) -> PackedSets | None:
    """Return the state that a packing run of all buckets begins with, still without sets. Call it before anything is read.

    It contains the whole configuration, of which any part may decide which images a kind refuses.

    Returns:
        None if the records are not as the last merge left them, or a line of the file is no plain record.
    """
    jsonl, seen = inventory.root.stage2_jsonl, ledger.last_row_change()
    signature, unfinished = state_of(jsonl)
    merged = ledger.merged(jsonl, signature)
    if merged is None or unfinished or not read_recorded(jsonl).is_plain:
        return None
    contracts = [[spec.kind, spec.contract] for spec in map(inventory.in_force, embedding_specs())]
    settings = sorted((name, value) for name, value in ledger.settings().items() if name not in _WITHOUT_EFFECT)
    given = [version("imagemill"), set_members(), repr(config), contracts, settings]
    # A fingerprint, because the configuration may contain credentials.
    return PackedSets(str(output), {}, fingerprint(msgspec.json.encode(given)), merged.epoch, seen)


class KnownSamples(NamedTuple):
    """Live samples of the present sets that have not changed since they were packed, by image id.

    `indices`: the whole index of each set that was read, by bucket.
    """

    samples: Mapping[str, KnownSample] = MappingProxyType({})
    indices: Mapping[str, Sequence[IndexLine]] = MappingProxyType({})


def known_samples(now: PackedSets, buckets: Iterable[str], ledger: Ledger) -> KnownSamples:
    """Return the samples that have not changed.

    Args:
        now: the state that the run begins with.
        buckets: the buckets of the run.
        ledger: the ledger.
    """
    last = ledger.packed(Path(now.path))
    if last is None or (last.parameters, last.epoch) != (now.parameters, now.epoch):
        return KnownSamples()
    changed = ledger.row_changes_after(last.seen)
    if changed is None:
        return KnownSamples()
    indices = {bucket: lines for bucket in buckets if (lines := _index_of(Path(now.path), bucket, last))}
    samples = {
        line.image_id: KnownSample(bucket, line.digest)
        for bucket, lines in indices.items()
        for line in lines
        if line.image_id not in changed
    }
    return KnownSamples(samples, indices)


def _index_of(output: Path, bucket: str, packed: PackedSets) -> list[IndexLine] | None:
    """Return the samples of a set, if it is the one that was packed and its index is that of its manifest."""
    folder = bucket_folder(output, bucket)
    manifest = read_manifest(folder)
    if manifest is None or manifest.manifest_digest != packed.sets.get(bucket) or manifest.tombstones:
        return None
    try:
        lines = read_index(folder)
    except ImagemillError:
        return None
    return lines if set_digest(line.digest for line in lines) == manifest.digest else None


def record_packed(shard_set: PackPlan, ledger: Ledger) -> None:
    """Record a packing run for the next one, if every set has the samples of its plan now.

    If not, the next one continues from an earlier run: sets that have been written since are not those of that run.
    """
    if after := _state_after(shard_set):
        ledger.record_packed(after)


def _state_after(shard_set: PackPlan) -> PackedSets | None:
    if shard_set.state is None or {plan.bucket for plan in shard_set.plans} != set(BUCKETS):
        return None
    sets = {}
    for plan in shard_set.plans:
        manifest = read_manifest(bucket_folder(shard_set.output, plan.bucket))
        if (manifest.digest if manifest else set_digest(())) != plan.digest:
            return None
        if manifest and manifest.manifest_digest:
            sets[plan.bucket] = manifest.manifest_digest
    return msgspec.structs.replace(shard_set.state, sets=sets)
