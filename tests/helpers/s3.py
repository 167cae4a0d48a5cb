"""An S3 server for tests (moto's, in a process of its own), and a proxy before it that counts requests and makes faults.

with s3_server() as server, fault_proxy(server) as proxy:
    proxy.fault = lambda request: Answer(503, "SlowDown") if request.number % 5 == 0 else None
    environment = proxy.environment          # AWS_ENDPOINT_URL, credentials
    proxy.requests                           # what was asked
"""

import http.client
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

SECRET = "not-a-secret-Zq7"  # searched for in everything that a command leaves behind
# moto accepts any signature.
UNSIGNED = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@dataclass
class Server:
    """An S3 server. `url`: its endpoint."""

    url: str

    @property
    def environment(self) -> dict[str, str]:
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.url}

    def request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Send an unsigned request, which moto accepts; return the body of its answer."""
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port or 0, timeout=30)
        try:
            connection.request(
                method,
                path,
                body,
                {"Authorization": UNSIGNED},
            )
            answer = connection.getresponse()
            data = answer.read()
            assert answer.status < 300, (method, path, answer.status, data[:300])
            return data
        finally:
            connection.close()

    def make_bucket(self, name: str) -> None:
        self.request("PUT", f"/{name}")


@contextmanager
def s3_server() -> Iterator[Server]:
    """Run moto's server while the block runs."""
    port = free_port()
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "MOTO_S3_CUSTOM_ENDPOINTS": ""},
    )
    try:
        _await(port, process)
        yield Server(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


def _await(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, "the S3 server has ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError("the S3 server does not answer")


# ---- the proxy


@dataclass
class Request:
    """A request that the proxy got. `number`: from 0; `sent` and `got`: bytes of the bodies of the request and its answer."""

    number: int
    method: str
    path: str
    query: str
    headers: dict[str, str]
    sent: int = 0
    got: int = 0
    status: int = 0

    @property
    def key(self) -> str:
        """The path without the bucket."""
        return self.path.lstrip("/").partition("/")[2]


@dataclass
class Answer:
    """The proxy answers with an error instead of the server."""

    status: int
    code: str = ""


@dataclass
class Cut:
    """The connection breaks after a share of the answer's body."""

    share: float = 0.5


@dataclass
class Dropped:
    """The server handles the request, but its answer is lost."""


@dataclass
class Ignored:
    """The server does not see some headers of the request, by default the conditions."""

    headers: frozenset[str] = frozenset({"if-match", "if-none-match"})


Fault = Answer | Cut | Dropped | Ignored | None


@dataclass
class Proxy(Server):
    """A proxy.

    Attributes:
        fault: which fault a request meets, None for none.
        latency: seconds before each answer.
        rate: bytes per second and connection, None for no limit.
        public: whether requests without credentials are answered, as of a public bucket.
        requests: those that it got.
    """

    fault: Callable[[Request], Fault] = lambda _: None
    latency: float = 0.0
    rate: float | None = None
    public: bool = False
    requests: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def counts(self) -> dict[str, int]:
        """Return the number of requests by method; LIST for listings."""
        with self.lock:
            return dict(Counter("LIST" if "list-type" in each.query else each.method for each in self.requests))

    def read_keys(self) -> set[str]:
        """Return the keys of the objects that were read."""
        with self.lock:
            return {each.key for each in self.requests if each.method == "GET" and "list-type" not in each.query}

    def clear(self) -> None:
        """Forget the requests."""
        with self.lock:
            self.requests.clear()


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1, its key, and its authority's `authority.pem`; return the first two files."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    authority, host = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("authority", "host"))
    began = datetime.now() - timedelta(days=2)
    made = []
    for name, key, is_authority in ((authority, keys[0], True), (host, keys[1], False)):
        builder = (
            x509.CertificateBuilder(authority, name, key.public_key(), x509.random_serial_number(), began)
            .not_valid_after(began + timedelta(days=10))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        )
        made.append(builder.sign(keys[0], hashes.SHA256()).public_bytes(Encoding.PEM))
    files = folder / "certificate.pem", folder / "key.pem"
    (folder / "authority.pem").write_bytes(made[0])
    files[0].write_bytes(made[1])
    files[1].write_bytes(keys[1].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


@contextmanager
def fault_proxy(server: Server, tls: tuple[Path, Path] | None = None) -> Iterator[Proxy]:
    """Run a proxy before a server, in threads of this process, while the block runs. `tls`: as from `certificate`."""
    target = urlsplit(server.url)
    proxy = Proxy("")
    local = threading.local()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (ConnectionError, TimeoutError):
                self.close_connection = True

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path, _, query = self.path.partition("?")
            headers = {name.lower(): value for name, value in self.headers.items()}
            with proxy.lock:
                request = Request(len(proxy.requests), self.command, path, query, headers, len(body))
                proxy.requests.append(request)
            fault = proxy.fault(request)
            if proxy.latency:
                time.sleep(proxy.latency)
            if isinstance(fault, Answer):
                request.status = fault.status
                text = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>no</Message></Error>".encode()
                self._answer(fault.status, [("Content-Type", "application/xml")], text)
                return
            forwarded = {
                name: value
                for name, value in headers.items()
                if name not in {"connection", "content-length"}
                and not (isinstance(fault, Ignored) and name in fault.headers)
            }
            if proxy.public:
                forwarded.setdefault("authorization", UNSIGNED)
            if body or self.command in {"PUT", "POST"}:
                forwarded["content-length"] = str(len(body))
            status, given, data = self._forward(body, forwarded)
            request.status, request.got = status, len(data)
            if isinstance(fault, Dropped):
                self.close_connection = True
                return
            self._answer(status, given, data, cut=fault.share if isinstance(fault, Cut) else None)

        def _forward(self, body: bytes, headers: dict[str, str]) -> tuple[int, list[tuple[str, str]], bytes]:
            for attempt in range(2):
                connection = getattr(local, "connection", None)
                if connection is None:
                    connection = local.connection = http.client.HTTPConnection(
                        target.hostname or "", target.port or 0, timeout=120
                    )
                try:
                    connection.request(self.command, self.path, body, headers)
                    answer = connection.getresponse()
                    return answer.status, answer.getheaders(), answer.read()
                except (ConnectionError, http.client.HTTPException):
                    connection.close()
                    local.connection = None
                    if attempt:
                        raise
            raise AssertionError

        def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, cut: float | None = None) -> None:
            self.send_response_only(status)
            length = {name.lower(): value for name, value in headers}.get("content-length")
            for name, value in headers:
                if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                    self.send_header(name, value)
            self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self._send(data if cut is None else data[: int(len(data) * cut)])
            self.wfile.flush()
            if cut is not None:
                self.close_connection = True

        def _send(self, data: bytes) -> None:
            if not proxy.rate:
                self.wfile.write(data)
                return
            step = 1 << 16
            began = time.monotonic()
            for start in range(0, len(data), step):
                self.wfile.write(data[start : start + step])
                ahead = (start + step) / proxy.rate - (time.monotonic() - began)
                if ahead > 0.002:
                    time.sleep(ahead)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815

    class Threads(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

    running = Threads(("127.0.0.1", 0), Handler)
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        running.socket = context.wrap_socket(running.socket, server_side=True)
    proxy.url = f"{'https' if tls else 'http'}://127.0.0.1:{running.server_address[1]}"
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        running.shutdown()
        running.server_close()
        thread.join(10)
