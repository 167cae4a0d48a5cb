"""IO manager of shard sets. Byte logic is in formats/tar.py and pipeline/shards/shard_writer.py."""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import msgspec

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.pipeline.leases import Leased
from imagemill.pipeline.shards.known_samples import record_packed
from imagemill.pipeline.shards.readiness import ASSET
from imagemill.pipeline.shards.shard_card import write_beside
from imagemill.pipeline.shards.shard_plan import SCRATCH, PackPlan
from imagemill.pipeline.shards.shard_sets import bucket_folder, read_manifest
from imagemill.pipeline.shards.shard_writer import BucketResult, sample_bytes, write_bucket
from imagemill.pipeline.stage2.damage import damaged_file, file_name
from imagemill.pipeline.stage2.models_in_use import model_text
from imagemill.progress import Progress
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import ModelIdentity, read_identity
from imagemill.store.second_copy import refresh
from imagemill.validation.shard_sets import is_verified, record_written
from io_managers.figures import megabytes
from io_managers.viewer import bucket_shown
from resources.dagster_internals.events import StreamedEvents, images_failed
from resources.data_root import DataRootResource

SHOWN = 5

# Changes of a set that are counted, in samples.
CHANGES = ("added", "changed", "removed")


class TarIOManager(dg.ConfigurableIOManager):
    """Writes the set of each planned bucket, and publishes it in one step."""

    data_root: dg.ResourceDependency[DataRootResource]

    def handle_output(self, context: dg.OutputContext, obj: Leased) -> None:
        """Write the planned sets, record counts, and fail if damaged files were found."""
        ledger = obj.ledger
        with obj.claimed() as plan:
            results = self._write(context, plan, ledger)
            counts = _counts(results)
            ledger.record_counts(context.run_id, "written", counts)
            record_packed(plan, ledger)
            _note_damage(ledger, results, context.run_id)
            refresh(self.data_root.root(), ledger)
        totals = ", ".join(f"{name}={count}" for name, count in counts.items())
        context.log.info(f"all buckets of this run, in {plan.output}: {totals}")
        _fail_if_damaged(results)

    def _write(self, context: dg.OutputContext, shard_set: PackPlan, ledger: Ledger) -> list[BucketResult]:
        """Write one bucket after another; each is reported when it is published."""
        derived, identities, results = self.data_root.root().derived, _identities(ledger), []
        sizes = [sample_bytes(sample) for plan in shard_set.plans for shard in plan.shards for sample in shard]
        with (
            Progress("bucket_shards", len(sizes), unit="sample", work=sum(sizes), work_unit="B") as progress,
            StreamedEvents(context) as events,
        ):
            for plan in shard_set.plans:
                folder = bucket_folder(shard_set.output, plan.bucket)
                verified = plan.updates and is_verified(folder, ledger)
                result = write_bucket(shard_set, plan, derived, identities, on_sample=partial(progress.advance, 1))
                if result.status == "written" and (verified or len(result.written) == result.shards):
                    record_written(folder, ledger)
                metadata = _metadata(result, folder, identities)
                # Without the defer tag Dagster writes the event itself, with the metadata that is added here.
                context.step_context.add_asset_metadata(metadata, partition_key=plan.bucket)
                events.add(plan.bucket, data_version=plan.digest, metadata=metadata)
                results.append(result)
        write_beside(shard_set.output, licence=self.data_root.session.config.licence)
        return results

    def load_input(self, context: dg.InputContext) -> list[str]:
        """Return the tars of the requested buckets, as URLs for a WebDataset pipeline."""
        output = self.data_root.shards_folder()
        return [
            str(tar)
            for bucket in context.asset_partition_keys
            for tar in sorted((output / f"bucket_{bucket}").glob("*.tar"))
        ]


def _identities(ledger: Ledger) -> Mapping[str, ModelIdentity]:
    recorded = {spec.kind: read_identity(ledger, spec.kind) for spec in embedding_specs()}
    return {kind: identity for kind, identity in recorded.items() if identity}


def _note_damage(ledger: Ledger, results: list[BucketResult], run_id: str) -> None:
    """Record each damaged file, so that the next run repairs it, and each sample left out because of it."""
    files = [file for result in results for file in result.rotten.files]
    lost = sorted({image_id for result in results for image_id in result.rotten.lost})
    damaged = [damaged_file(kind, image_id, run_id) for kind, image_id in files]
    of_shards = [msgspec.structs.replace(problem, asset=ASSET) for problem in damaged if problem.item in lost]
    ledger.record_problems([*damaged, *of_shards])


def _fail_if_damaged(results: list[BucketResult]) -> None:
    """Raise dg.Failure if a file was damaged. Everything else is packed."""
    names = [file_name(kind, image_id) for result in results for kind, image_id in result.rotten.files]
    if names:
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        text = (
            f"{len(names)} npy {'file does' if len(names) == 1 else 'files do'} not hold the recorded bytes: {shown}; "
        )
        ids = sorted({image_id for result in results for _, image_id in result.rotten.files})
        raise images_failed(f"{text}run `imagemill run`: it restores them from the shards, or makes them again", ids)


def _metadata(result: BucketResult, folder: Path, identities: Mapping[str, ModelIdentity]) -> dict[str, Any]:
    """Return the metadata of one bucket, not of the whole run."""
    models = ", ".join(f"{kind}: {model_text(identity)}" for kind, identity in sorted(identities.items()))
    tars = {"shards": result.shards, "shards written": len(result.written)}
    change = {f"samples {name}": getattr(result.change, name) for name in CHANGES}
    shown = {"status": result.status, "samples": result.samples, **tars, **change, **megabytes(result.bytes)}
    if result.scratch:
        shown["packed from scratch"] = SCRATCH[result.scratch]
    if result.shards:
        pixels = manifest.pixels if (manifest := read_manifest(folder)) else None
        shown |= {"pixels.color": pixels.color, "colours": pixels.line or "no profiles"} if pixels else {}
        shown |= {**bucket_shown(result.bucket), "models": models, "path": dg.MetadataValue.path(str(folder))}
    return shown


def _counts(results: list[BucketResult]) -> dict[str, int]:
    written = [r for r in results if r.status == "written"]
    return {
        "written_samples": sum(r.written_samples for r in written),
        "written_shards": sum(len(r.written) for r in written),
        "written_bytes": sum(r.written_bytes for r in written),
        "kept_shards": sum(r.shards - len(r.written) for r in written),
        "written_buckets": len(written),
        "updated_buckets": sum(r.updates for r in written),
        "unchanged_buckets": sum(r.status == "unchanged" for r in results),
        **{name: sum(getattr(r.change, name) for r in written) for name in CHANGES},
        **{name: sum(getattr(r, name) for r in results) for name in ("samples", "shards", "bytes")},
        **Counter(f"scratch_{r.scratch}" for r in written if r.scratch),
    }
