"""Dagster's share of the main job, in milliseconds of CPU time per image and asset.

    share = (the command - the same work as plain calls) / (images x embedding assets)

Both sides are also measured on a few images, and that cost is subtracted, so that start-up counts in neither: the share is a
slope. Everything that the command does beyond one plain pass over the images counts as Dagster's share, including repeated
listings of the folder.

Goals: at most 1 ms, and at most 1/10 of the same command with Dagster's default storage and events.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.common.inputs import noise_photos, scratch
from benchmarks.common.processes import cpu_seconds
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.formats.npy import NpyStore
from imagemill.store.ledger import Ledger
from imagemill.validation.files import embedding_files
from imagemill.validation.findings import Report, collect
from imagemill.validation.shard_sets import set_folders, validate_shards
from imagemill.validation.tables import validate_stage2_table
from imagemill.validation.validator import validate

FEW = 8
GOAL_MS = 1.0
GOAL_RATIO = 0.1
BYTES_PER_IMAGE = 700_000  # an npy per kind, its copy in a tar, the history; twice what it takes

OURS = ("-m", "benchmarks.common.ours", "run", "--data-root")
STOCK = ("-m", "benchmarks.common.stock", "run", "--data-root")
PURE = ("-m", "benchmarks.common.pure")


def main() -> int:
    arguments = _arguments()
    most = max(arguments.images, arguments.stock_images)
    with scratch(in_memory_bytes=BYTES_PER_IMAGE * most) as folder:
        print(
            f"encoders of no cost, {len(embedding_specs())} embedding assets, in {folder.parent}; CPU seconds, user + sys"
        )
        print(f"{'':<34}{'images':>8}{'command':>10}{'plain':>8}{'share':>20}")
        shares = [
            (
                _share("imagemill run", OURS, arguments.images, folder),
                _share("the same on Dagster's defaults", STOCK, arguments.stock_images, folder),
            )
            for _ in range(arguments.rounds)
        ]
    ours, stock = (median(column) for column in zip(*shares, strict=True))
    print(f"the cost on {FEW} images, start-up, is taken off each side")
    print(f"share: {ours:.2f} ms per image and asset (goal: at most {GOAL_MS:g})")
    print(f"against Dagster's defaults ({stock:.1f} ms): {ours / stock:.3f} (goal: at most {GOAL_RATIO:g})")
    return 0 if ours <= GOAL_MS and ours <= GOAL_RATIO * stock else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=5000, help="images for our own storage and events")
    parser.add_argument("--stock-images", type=int, default=1000, help="images for Dagster's defaults")
    parser.add_argument("--rounds", type=int, default=1, help="the median of this many")
    return parser.parse_args()


def _share(name: str, command: Sequence[str], images: int, folder: Path) -> float:
    """Print one line of the table; return the milliseconds per image and asset of the command beyond the plain calls."""
    with_dagster = _slope(command, images, folder)
    plain = _slope(PURE, images, folder)
    share = 1000 * (with_dagster - plain) / ((images - FEW) * len(embedding_specs()))
    print(f"{name:<34}{images:>8}{with_dagster:>10.1f}{plain:>8.1f}{share:>17.2f} ms", flush=True)
    return share


def _slope(command: Sequence[str], images: int, folder: Path) -> float:
    return _cost(command, images, folder) - _cost(command, FEW, folder)


def _cost(command: Sequence[str], images: int, folder: Path) -> float:
    with TemporaryDirectory(dir=folder) as root:
        noise_photos(Path(root, "approved"), images, width=16, height=16)
        seconds = cpu_seconds([*command, root], DAGSTER_HOME=f"{root}/.dagster")
        assert all(report.passed for report in _reports(DataRoot.resolve(root)))
        return seconds


def _reports(root: DataRoot) -> list[Report]:
    """Read everything that was written, which is not measured."""
    stores = [NpyStore(root.derived / spec.folder, spec) for spec in embedding_specs()]
    with Ledger(root.ledger) as ledger:
        return [
            *(collect(store.spec.folder, store.spec.kind, embedding_files(store, ledger)) for store in stores),
            validate(root.stage2_jsonl, kind="stage2"),
            collect(root.stage2_jsonl.name, "stage2 table", validate_stage2_table(root.stage2_jsonl)),
            *validate_shards(set_folders(root.shards), root.derived, ledger),
        ]


if __name__ == "__main__":
    sys.exit(main())
