"""Reading of a published version over HTTP, compared with the same reader of the local folder.

    local     ShardDataset of the folder
    near      of a URL, a server of this machine without latency
    far       of a URL, 20 ms before each answer and 100 MB/s for each connection
    alone     as far, but one sample at a time: what a reader without read-ahead does

Samples per second in batches of 8, in one process; rounds are interleaved. The server is a process of its own, on the same cores.
Then seconds and memory of opening a set of many samples.

Goals: near 0.4 of local; far 0.6 of near, and 10 times alone.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from statistics import median
from typing import Any

import msgspec

from benchmarks.common.class_sets import write_class_set
from benchmarks.common.inputs import scratch
from benchmarks.common.processes import PROJECT
from imagemill.formats.published import POINTER, Pointer, encode_pointer, set_key, tar_key, version_of
from imagemill.pipeline.push import LocalSet, local_sets, set_documents
from imagemill.reading import ShardDataset, ShardSet
from imagemill.reading import batches as reading_batches

GOAL_NEAR, GOAL_FAR, GOAL_ALONE = 0.4, 0.6, 10.0
LATENCY, RATE = 0.02, 100e6
BATCH = 8
OPENED = "--opened"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=1600)
    parser.add_argument("--sample-kb", type=int, default=690, help="KiB per sample, an even number")
    parser.add_argument("--opened-samples", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4, help="limit of each reader in each round")
    parser.add_argument("--served", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(OPENED, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.served:
        return _serve(arguments.served)
    if arguments.opened:
        return _open(arguments.opened)
    needed = 1100 * (arguments.sample_kb * arguments.samples + 3 * arguments.opened_samples)
    with scratch(in_memory_bytes=needed) as folder:
        os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
        write_class_set(folder / "shards", arguments.samples, arguments.sample_kb, tars=8, classes=8)
        write_class_set(folder / "many", arguments.opened_samples, 2, tars=20, classes=8)
        for name in ("shards", "many"):
            _publish(folder / name, folder / "web" / name)
        with subprocess.Popen(
            [sys.executable, "-m", "benchmarks.reading_url", "--served", str(folder / "web")],
            stdout=subprocess.PIPE, text=True, cwd=PROJECT,
        ) as server:  # fmt: skip
            try:
                assert server.stdout
                url = server.stdout.readline().strip()
                reached = _compare(folder / "shards", url, arguments)
                words = [sys.executable, "-m", "benchmarks.reading_url", OPENED, f"{url}/near/many"]
                subprocess.run(words, check=True, cwd=PROJECT)
            finally:
                server.kill()
    return int(not reached)


def _publish(output: Path, web: Path) -> None:
    """Lay out a version as `imagemill push` does, with links."""
    sets = local_sets(output)
    for one in sets.values():
        for name, data in set_documents(one):
            path = web / set_key(one.identifier, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        _link_tars(one, web)
    identifiers = {bucket: one.identifier for bucket, one in sets.items()}
    pointer = Pointer(
        root="", writer="", sets=identifiers, time=msgspec.json.decode(b'"2026-01-01T00:00:00Z"', type=_TIME)
    )
    (web / POINTER).write_bytes(encode_pointer(pointer))
    assert version_of(pointer.sets)


def _link_tars(one: LocalSet, web: Path) -> None:
    for shard in one.manifest.shards:
        path = web / tar_key(shard.checksum)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            os.link(one.folder / shard.name, path)


_TIME: Any = Pointer.__annotations__["time"]


def _compare(shards: Path, url: str, arguments: argparse.Namespace) -> bool:
    sources = {"local": shards, "near": f"{url}/near/shards", "far": f"{url}/far/shards", "alone": f"{url}/far/shards"}
    datasets = {
        name: ShardDataset(source, BATCH, members=("json", "t5h"), repeat=True) for name, source in sources.items()
    }
    rates: dict[str, list[float]] = {name: [] for name in sources}
    ahead = reading_batches.CONNECTIONS, reading_batches.SAMPLES_AHEAD
    for number in range(arguments.rounds + 1):
        for name, dataset in datasets.items():
            reading_batches.CONNECTIONS, reading_batches.SAMPLES_AHEAD = (1, 0) if name == "alone" else ahead
            rate = _rate(dataset, arguments.seconds)
            if number:
                rates[name].append(rate)
    found = {name: median(each) for name, each in rates.items()}
    print(f"{arguments.samples} samples of {arguments.sample_kb} KiB, batches of {BATCH}")
    for name, rate in found.items():
        print(f"{name:<10}{rate:>10.0f} samples/s")
    ratios = {
        "near / local": (found["near"] / found["local"], GOAL_NEAR),
        "far / near": (found["far"] / found["near"], GOAL_FAR),
        "far / alone": (found["far"] / found["alone"], GOAL_ALONE),
    }
    for name, (ratio, goal) in ratios.items():
        print(f"{name:<16}{ratio:>8.2f}   (goal: at least {goal:g}{'' if ratio >= goal else ', missed'})")
    return all(ratio >= goal for ratio, goal in ratios.values())


def _rate(batches: Iterable[dict[str, Any]], seconds: float) -> float:
    """Return samples per second after the first batch."""
    running = iter(batches)
    next(running)
    began, count = time.perf_counter(), 0
    for batch in islice(running, 1, None):
        count += len(batch["image_id"])
        if time.perf_counter() - began > seconds:
            break
    return count / (time.perf_counter() - began)


def _open(url: str) -> int:
    import torch  # noqa: F401 - not counted

    before, began = _megabytes(), time.perf_counter()
    found = ShardSet.open(url)
    seconds = time.perf_counter() - began
    print(f"opening {len(found):,} samples: {seconds:.1f} s, {_megabytes() - before:.0f} MB")
    return 0


def _megabytes() -> float:
    """Return the peak of this program. That of getrusage may be its parent's."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1e3


def _serve(folder: Path) -> int:
    """Answer HEAD and ranges of the files below a folder: `/near/…` at once, `/far/…` slowly.

    A server of the standard library would take as long for each answer as the reader does.
    """

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            while asked := self.rfile.readline():
                method, path, _ = asked.decode().split()
                fields: dict[str, str] = {}
                while line := self.rfile.readline().strip():
                    name, _, value = line.decode().partition(":")
                    fields[name.lower()] = value.strip()
                self._answer(method, path, fields.get("range"))

        def _answer(self, method: str, path: str, wanted: str | None) -> None:
            how, _, name = path.lstrip("/").partition("/")
            if how == "far":
                time.sleep(LATENCY)
            if not (folder / name).is_file():
                self.wfile.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                return
            with open(folder / name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                begin, end = 0, size
                if wanted:
                    first, _, last = wanted.removeprefix("bytes=").partition("-")
                    begin, end = int(first), min(int(last) + 1, size) if last else size
                status = f"206 Partial Content\r\nContent-Range: bytes {begin}-{end - 1}/{size}" if wanted else "200 OK"
                self.wfile.write(
                    f'HTTP/1.1 {status}\r\nETag: "{size:x}"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n'
                    f"Accept-Ranges: bytes\r\nContent-Length: {end - begin}\r\n\r\n".encode()
                )
                if method == "GET":
                    self._send(file.fileno(), begin, end, slow=how == "far")

        def _send(self, file: int, begin: int, end: int, *, slow: bool) -> None:
            began, position = time.monotonic(), begin
            while position < end:
                step = min(end - position, 1 << 18) if slow else end - position
                position += os.sendfile(self.connection.fileno(), file, position, step)
                if slow and (ahead := (position - begin) / RATE - (time.monotonic() - began)) > 0.001:
                    time.sleep(ahead)

    class Server(ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
