"""Address of a code server. The server runs in service.py."""

import socket

import msgspec

_CONNECT_SECONDS = 5.0


class CodeServer(msgspec.Struct, frozen=True, kw_only=True):
    """Address of a code server: a Unix socket, or host and port.

    Attributes:
        location: name of the code location.
        socket_path: path of the socket; empty for a server on a port.
        host: name or address to listen on or to connect to.
        port: port of the server; 0 for a server on a socket.
    """

    location: str
    socket_path: str = ""
    host: str = ""
    port: int = 0

    def entry(self) -> dict[str, dict[str, str | int]]:
        """Return the entry of this server in a workspace file."""
        address = {"socket": self.socket_path} if self.socket_path else {"host": self.host, "port": self.port}
        return {"grpc_server": {**address, "location_name": self.location}}

    def answers(self) -> bool:
        """Return whether a server listens there."""
        try:
            with self._connected():
                return True
        except OSError:
            return False

    def _connected(self) -> socket.socket:
        if not self.socket_path:
            return socket.create_connection((reachable(self.host), self.port), _CONNECT_SECONDS)
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.connect(self.socket_path)
        return client


def shown(host: str) -> str:
    """Return a host as it is written in front of a port."""
    return f"[{host}]" if ":" in host else host


def reachable(host: str) -> str:
    """Return the address at which a server that listens on this one can be reached from its machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
