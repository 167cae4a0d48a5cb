"""Listing of photographs with caption files in object storage, and their classification.

    listing    the keys, as entries of the folder
    scan       their classification
    requests   listings that were asked for; at most one per thousand keys, and two

CPU seconds and memory of a process of its own. The server is a process that makes up the keys.

Goals up to 200,000 keys: listing 3 s and 50 MB.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from benchmarks.common.processes import PROJECT
from benchmarks.scale import line_of

LISTING_SECONDS, LISTING_MEGABYTES = 3.0, 50.0
PAGE = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--listed", help=argparse.SUPPRESS)
    parser.add_argument("--served", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.served:
        return _serve(arguments.keys)
    if arguments.listed:
        return 0 if _list(arguments.listed, arguments.keys) else 1
    words = [sys.executable, "-m", "benchmarks.object_listing", "--keys", str(arguments.keys)]
    with subprocess.Popen([*words, "--served"], stdout=subprocess.PIPE, text=True, cwd=PROJECT) as server:
        try:
            assert server.stdout
            url = server.stdout.readline().strip()
            credentials = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
            variables = {**os.environ, **credentials, "PYTHONPATH": str(PROJECT)}
            return subprocess.run([*words, "--listed", url], check=False, env=variables, cwd=PROJECT).returncode
        finally:
            server.kill()


def _list(url: str, keys: int) -> bool:
    from imagemill.domain.inputs import NEW_INPUTS
    from imagemill.fs.blobs import StorageSettings
    from imagemill.fs.folders import ObjectFolder
    from imagemill.fs.location import Location
    from imagemill.fs.objects import Objects
    from imagemill.inputs.listing import list_entries
    from imagemill.inputs.scan import classify

    store = Objects(Location("s3", "photos", "cats"), StorageSettings(endpoint=url, allow_http=True))
    store.check_listing()
    memory, began = _megabytes(), time.process_time()
    entries = list_entries(ObjectFolder(store), NEW_INPUTS)
    listing, used = time.process_time() - began, _megabytes() - memory
    began = time.process_time()
    scan = classify(entries, NEW_INPUTS)
    print(f"{keys:,} keys; CPU seconds", flush=True)
    reached = [
        line_of("listing", listing, LISTING_SECONDS),
        line_of("memory, MB", used, LISTING_MEGABYTES),
    ]
    line_of("scan", time.process_time() - began)
    return all(reached) and len(entries) == keys and len(scan.sources) == keys // 2


def _megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _serve(keys: int) -> int:
    """Answer listings of `cats/00000000.jpg`, `cats/00000000.txt`, and so on."""
    pages: dict[int, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            begin = int(query.get("continuation-token", ["0"])[0])
            body = pages.get(begin) or pages.setdefault(begin, _page(begin, keys))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
    return 0


def _page(begin: int, keys: int) -> bytes:
    end = min(begin + PAGE, keys)
    contents = "".join(
        f"<Contents><Key>cats/{n // 2:08d}.{'txt' if n % 2 else 'jpg'}</Key><LastModified>2026-01-01T00:00:00.000Z"
        f'</LastModified><ETag>"{n:032x}"</ETag><Size>{1000 + n}</Size></Contents>'
        for n in range(begin, end)
    )
    token = f"<NextContinuationToken>{end}</NextContinuationToken>" if end < keys else ""
    truncated = str(end < keys).lower()
    name = "<Name>photos</Name><Prefix>cats/</Prefix>"
    return (
        f"<ListBucketResult>{name}<KeyCount>{end - begin}</KeyCount><IsTruncated>{truncated}</IsTruncated>{token}{contents}"
        "</ListBucketResult>"
    ).encode()


if __name__ == "__main__":
    sys.exit(main())
