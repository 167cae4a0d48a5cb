"""ASGI guard for local web applications: refuses cross-site requests before the application reads them.

    browser ──> WebGuard(application, allowed_hosts) ──> application
                   │ Host or Origin of a foreign name, a cross-site request, a mutation by GET
                   └── 403 and one sentence

The guarded application has no login. Without the guard, a page of any site that the user visits could send it requests:
directly, or after its DNS name was changed to 127.0.0.1. Programs other than browsers send neither Origin nor
Sec-Fetch-Site; they pass with an allowed Host.

Spec: RFC 9110 section 7.2 (Host), RFC 6454 (Origin), W3C Fetch Metadata (Sec-Fetch-Site).
"""

import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

from imagemill.errors import WrongUsage

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_AUTHORITY = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.%]+)\]|(?P<name>[^\s:/\[\]@,?#\\]+))(?::\d{1,5})?", re.IGNORECASE)
_ORIGIN = re.compile(r"https?://(?P<authority>[^/]+)", re.IGNORECASE)
_MUTATION = re.compile(r"\b(?:mutation|subscription)\b")
# URL parameter of a GraphQL document. Only POST requests may change anything.
_DOCUMENT = "query"


class WebGuard:
    """An ASGI application that passes permitted requests and WebSocket handshakes to another one."""

    def __init__(self, application: Application, allowed_hosts: Iterable[str] = ()) -> None:
        """Guard an application.

        Args:
            application: the guarded application.
            allowed_hosts: names permitted in Host and Origin besides `LOCAL_HOSTS`, with any port.
        """
        self._application = application
        self._hosts = LOCAL_HOSTS | {allowed_host(name) for name in allowed_hosts}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a permitted request to the application, and answer any other one."""
        reason = refusal(scope, self._hosts) if scope["type"] in {"http", "websocket"} else None
        if reason is None:
            await self._application(scope, receive, send)
        else:
            await _refuse(scope, send, reason)


def allowed_host(given: str) -> str:
    """Return the host name of `NAME`, `NAME:PORT` or an IPv6 address, in lower case.

    Raises:
        WrongUsage: if it is a pattern, a URL or no host name.
    """
    name = given.strip().lower()
    host = name if name.count(":") > 1 and not name.startswith("[") else _host_of(name)
    if not host or "*" in host:
        raise WrongUsage(f"not a host name: {given!r}", do="give a name such as ui.example.com, without scheme or path")
    return host


def refusal(scope: MutableMapping[str, Any], hosts: Iterable[str]) -> str | None:
    """Return the reason why a request or handshake is refused, as one sentence, or None if it is permitted."""
    host = _host_of(_only(scope, b"host"))
    if host is None or host not in hosts:
        return _foreign("Host", host)
    for origin in _values(scope, b"origin"):
        match = _ORIGIN.fullmatch(origin)
        name = _host_of(match["authority"]) if match else None
        if name is None or name not in hosts:
            return _foreign("Origin", origin)
    if "cross-site" in _values(scope, b"sec-fetch-site") and not _opens_page(scope):
        return "imagemill refused this request: a page of another site sent it."
    if scope.get("method", "GET") != "POST" and _has_mutation(scope):
        return "imagemill refused this request: changes are accepted by POST only."
    return None


def _foreign(header: str, value: str | None) -> str:
    return (
        f"imagemill refused this request: {header} {value or 'is missing or malformed and'} is not allowed; "
        "if it is yours, start with --allowed-host NAME."
    )


def _values(scope: MutableMapping[str, Any], name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key.lower() == name]


def _only(scope: MutableMapping[str, Any], name: bytes) -> str:
    """Return the value of a header that occurs once, or an empty text."""
    values = _values(scope, name)
    return values[0] if len(values) == 1 else ""


def _host_of(authority: str) -> str | None:
    """Return the host name of `host[:port]` in lower case and without a final dot, or None if it is malformed."""
    match = _AUTHORITY.fullmatch(authority)
    if not match:
        return None
    return (match["ipv6"] or match["name"]).lower().removesuffix(".")


def _opens_page(scope: MutableMapping[str, Any]) -> bool:
    """Return whether a link of another site opens a page here in its own tab, which reads nothing and changes nothing."""
    navigates = _values(scope, b"sec-fetch-mode") == ["navigate"] and _values(scope, b"sec-fetch-dest") == ["document"]
    return scope["type"] == "http" and scope["method"] in {"GET", "HEAD"} and navigates


def _has_mutation(scope: MutableMapping[str, Any]) -> bool:
    """Return whether the query string contains a GraphQL document with an operation that may change something."""
    parameters = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
    return any(name == _DOCUMENT and _MUTATION.search(value) for name, value in parameters)


async def _refuse(scope: MutableMapping[str, Any], send: Send, reason: str) -> None:
    """Answer with 403. If the server cannot send a body for a handshake, close it; the server then answers with 403."""
    if scope["type"] == "websocket" and "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": 1008, "reason": "refused"})
        return
    kind = "http.response" if scope["type"] == "http" else "websocket.http.response"
    body = f"{reason}\n".encode("utf-8", "backslashreplace")
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send({"type": f"{kind}.start", "status": 403, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
