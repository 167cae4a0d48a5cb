"""Print what a number of images takes on one machine, on a cluster and in shares, as Markdown tables.

    imagemill bench --json --data-root data > speeds.json
    imagemill bench --engine ray --json --data-root data > cluster.json
    python examples/scaling_table.py speeds.json --cluster cluster.json --shares 16 --nodes 8

The first file has what one machine does; the second, which may be left out, what an image takes in the process that sends images
to a cluster and takes arrays back. Nothing else is assumed but the speed of the links, and that `--nodes` machines like the
measured ones are as many times as fast.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Bytes per second of links of 10 and 100 Gb/s.
LINKS = {"10 Gb/s": 10e9 / 8, "100 Gb/s": 100e9 / 8}
PART_BYTES = 8_000_000  # a tar is sent to object storage in parts of this size
STAGES = ("prepare", "model_alone", "write")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("speeds", type=Path, help="output of `imagemill bench --json`")
    parser.add_argument("--cluster", type=Path, help="output of `imagemill bench --engine ray --json`")
    parser.add_argument("--nodes", type=int, default=8, help="of the cluster")
    parser.add_argument("--shares", type=int, default=16)
    parser.add_argument("--shard-size", type=int, default=1000, help="samples in a tar")
    parser.add_argument("--images", type=int, nargs="+", default=[60_000, 1_000_000, 10_000_000])
    arguments = parser.parse_args()
    speeds = json.loads(arguments.speeds.read_text())
    cluster = json.loads(arguments.cluster.read_text()) if arguments.cluster else []
    for table in (
        kinds_table(speeds),
        driver_table(cluster) if cluster else [],
        images_table(speeds, cluster, arguments.images, nodes=arguments.nodes, shares=arguments.shares),
        storage_table(speeds, arguments.images, arguments.shard_size),
    ):
        if table:
            print("\n".join(table), end="\n\n")


def kinds_table(speeds: Sequence[dict[str, Any]]) -> list[str]:
    """Return milliseconds per image of each stage alone and of all together, and bytes per image."""
    rows = [
        [
            speed["kind"],
            *[_milliseconds(1 / speed[stage]) for stage in STAGES],
            _milliseconds(1 / speed["stream"]),
            _kilobytes(file_bytes(speed)),
        ]
        for speed in speeds
    ]
    return _table(["ms per image", "prepare", "model", "write", "together", "file"], rows)


def driver_table(cluster: Sequence[dict[str, Any]]) -> list[str]:
    """Return what an image takes in the process of a run on a cluster, and the most images per second of one such process."""
    rows = []
    for speed in cluster:
        row = [
            speed["kind"],
            _milliseconds(speed["driver_cpu"]),
            _kilobytes(speed["sent"]),
            _kilobytes(speed["returned"]),
        ]
        for rate in LINKS.values():
            ceiling, limit = driver_ceiling(speed, rate)
            row.append(f"{ceiling:,.0f} ({limit})")
        rows.append(row)
    return _table(["one driver", "CPU time (ms)", "sent", "back", *[f"images/s at {link}" for link in LINKS]], rows)


def driver_ceiling(speed: dict[str, Any], link: float) -> tuple[float, str]:
    """Return the most images per second of one driver on a link of so many bytes per second, and what limits them."""
    by_driver, by_link = 1 / speed["driver_cpu"], link / max(speed["sent"], speed["returned"], 1)
    return (by_driver, "driver") if by_driver <= by_link else (by_link, "link")


def images_table(
    speeds: Sequence[dict[str, Any]],
    cluster: Sequence[dict[str, Any]],
    counts: Sequence[int],
    *,
    nodes: int,
    shares: int,
) -> list[str]:
    """Return hours for numbers of images: one machine, a cluster of machines like it, and shares."""
    heads = ["images", "one machine", f"{shares} shares"]
    heads += [f"{nodes} nodes, {link}" for link in LINKS] if cluster else []
    of_kind = {speed["kind"]: speed for speed in cluster}
    rows = []
    for count in counts:
        alone = sum(count / speed["stream"] for speed in speeds)
        row = [f"{count:,}", _hours(alone), _hours(alone / shares)]
        for link in LINKS.values() if cluster else ():
            seconds = 0.0
            for speed in speeds:
                rate = nodes * speed["stream"]
                if speed["kind"] in of_kind:
                    rate = min(rate, driver_ceiling(of_kind[speed["kind"]], link)[0])
                seconds += count / rate
            row.append(_hours(seconds))
        rows.append(row)
    return _table(heads, rows)


def storage_table(speeds: Sequence[dict[str, Any]], counts: Sequence[int], shard_size: int) -> list[str]:
    """Return files, tars, and the requests and bytes of a first push and of an epoch from object storage."""
    size = sum(map(file_bytes, speeds))
    rows = []
    for count in counts:
        tars = math.ceil(count / shard_size)
        parts = max(1, math.ceil(shard_size * size / PART_BYTES))
        rows.append(
            [
                f"{count:,}",
                f"{count * len(speeds):,}",
                f"{tars:,}",
                f"{tars * (parts + 2):,}",
                f"{count:,}",
                f"{count * size / 1e9:,.0f} GB",
            ]
        )
    return _table(["images", "files", "tars", "requests of a push", "of an epoch", "bytes of each"], rows)


def file_bytes(speed: dict[str, Any]) -> float:
    """Return the bytes of a file of a kind."""
    return 1e9 * speed["gigabytes"] / speed["remaining"] if speed["remaining"] else 0.0


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"


def _kilobytes(size: float) -> str:
    return f"{size / 1000:,.1f} kB"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def lines() -> Iterator[str]:
        yield "| " + " | ".join(heads) + " |"
        yield "| --- |" + " ---: |" * (len(heads) - 1)
        for row in rows:
            yield "| " + " | ".join(row) + " |"

    return list(lines())


if __name__ == "__main__":
    main()
