"""Addresses to listen on, and of code servers, as options give them."""

import os
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from dagster_project.code_location import LOCATION
from dagster_project.code_server import CodeServer, shown
from imagemill.domain.layout import DataRoot
from imagemill.errors import WrongUsage
from imagemill.look.mount import MountedRoot


def refuse_port(host: str, port: int) -> None:
    """Raise WrongUsage if this process cannot listen there."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, protocol) as trial:
            if os.name == "posix":
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        raise WrongUsage(
            f"cannot listen on {shown(host)}:{port}", why=error.strerror, do="give another --port or --host"
        ) from error


def mounted(roots: Iterable[DataRoot], names: Iterable[str | None]) -> tuple[MountedRoot, ...]:
    """Return where the UI shows the photographs of data roots with these names in the history."""
    return tuple(MountedRoot(str(root.path), name or "") for root, name in zip(roots, names, strict=True))


def code_servers(given: Iterable[str]) -> list[CodeServer]:
    """Return the code servers of the values of `--code`, `[NAME=]HOST:PORT`.

    Raises:
        WrongUsage: if a value is malformed, or two have one name.
    """
    servers: dict[str, CodeServer] = {}
    for text in given:
        name, _, address = text.rpartition("=")
        server = _code_server(name or LOCATION, address, text)
        if server.location in servers:
            raise WrongUsage(
                f"two code servers named {server.location}", where="--code", do="give each as NAME=HOST:PORT"
            )
        servers[server.location] = server
    return list(servers.values())


def _code_server(name: str, address: str, given: str) -> CodeServer:
    parts = urlsplit(f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.netloc != address or parts.username is not None:
        raise WrongUsage(f"not the address of a code server: {given!r}", where="--code", do="give [NAME=]HOST:PORT")
    return CodeServer(location=name, host=host, port=port)
