"""imagemill/web_guard.py: requests of foreign sites never reach the application."""

import asyncio

import pytest

from imagemill.errors import WrongUsage
from imagemill.web_guard import WebGuard, allowed_host

EVIL = "http://evil.example"
MUTATION = b"query=mutation%20%7B%20wipeAssets%20%7D"


def answer(method="GET", *, query=b"", kind="http", hosts=(), extensions=None, **headers):
    """Return the status of a request: 200 if the application was reached; None for a handshake closed without a body."""
    given = {"host": "localhost:3000", **headers}
    sent = []

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(message):
        sent.append(message)

    scope = {
        "type": kind,
        "path": "/graphql",
        "query_string": query,
        "extensions": extensions,
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in given.items() if v is not None],
    }
    if kind == "http":
        scope["method"] = method
    asyncio.run(WebGuard(application, hosts)(scope, None, send))
    return sent[0].get("status"), sent


def status(*arguments, **given):
    return answer(*arguments, **given)[0]


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:3000", "LOCALHOST:8080", "127.0.0.1:1", "[::1]", "[::1]:3000", "localhost."]
)
def test_names_of_this_machine_are_allowed_with_any_port(host):
    assert status(host=host) == 200
    assert status("POST", host=host, origin=f"http://{host}") == 200


@pytest.mark.parametrize(
    "host",
    [
        None, "", "evil.example", "evil.example:3000", "localhost.evil.example", "localhost:3000@evil.example", "localhost/",
        "::1", "127.0.0.1.nip.io", "localhost:3000, evil.example", "0.0.0.0",
    ],
)  # fmt: skip
def test_foreign_missing_or_malformed_host_is_refused(host):
    assert status(host=host) == 403


def test_second_host_header_is_refused():
    """Two readers of such a request may use different ones."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "headers": [(b"host", b"localhost"), (b"Host", b"evil.example")]}
    asyncio.run(WebGuard(None)(scope, None, send))
    assert sent[0]["status"] == 403


@pytest.mark.parametrize(
    "origin", [EVIL, "null", "https://localhost.evil.example", "file://", "chrome-extension://localhost"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_foreign_origin_is_refused(origin, method):
    assert status(method, origin=origin) == 403


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_further_names_are_allowed_in_host_and_origin(kind):
    given = {"host": "ui.example.com", "origin": "https://UI.example.com:8443", "kind": kind}
    assert status("POST", **given) in {403, None}
    assert status("POST", hosts=["ui.example.com"], **given) == 200


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
@pytest.mark.parametrize(
    "query",
    [
        MUTATION, b"operationName=B&query=query+A+%7Bversion%7D+mutation+B+%7Bx%7D", b"query=%6Dutation%7Bx%7D",
        b"query=%23%0Amutation%7Bx%7D", b"query={version}&query=mutation{x}", b"a=1;b=2&query=mutation%20x{y}",
    ],
)  # fmt: skip
def test_mutation_by_any_method_but_post_is_refused(method, query):
    assert status(method, query=query) == 403


def test_reading_by_get_and_changing_by_post_are_allowed():
    assert status(query=b"query=%7Bversion%7D") == 200
    assert status(query=b"other=mutation") == 200
    assert status("POST", query=MUTATION) == 200


@pytest.mark.parametrize(
    ("method", "mode", "dest", "expected"),
    [
        ("GET", "navigate", "document", 200), ("GET", "navigate", "iframe", 403), ("GET", "no-cors", "script", 403),
        ("POST", "navigate", "document", 403), ("GET", "cors", "empty", 403),
    ],
)  # fmt: skip
def test_other_sites_may_link_to_a_page_and_nothing_else(method, mode, dest, expected):
    given = {"sec_fetch_site": "cross-site", "sec_fetch_mode": mode, "sec_fetch_dest": dest}
    assert status(method, **given) == expected
    assert status(method, **{**given, "sec_fetch_site": "same-origin"}) == 200


def test_handshake_of_another_site_is_refused_with_and_without_a_body():
    assert status(kind="websocket", origin="http://localhost:3000") == 200

    closed, sent = answer(kind="websocket", origin=EVIL)
    assert closed is None
    assert sent == [{"type": "websocket.close", "code": 1008, "reason": "refused"}]

    code, sent = answer(kind="websocket", origin=EVIL, extensions={"websocket.http.response": {}})
    assert (code, sent[0]["type"]) == (403, "websocket.http.response.start")


def test_refusal_is_one_plain_sentence():
    _, sent = answer(origin=EVIL)
    text = sent[1]["body"].decode()
    assert text.count("\n") == 1
    assert EVIL in text
    assert "--allowed-host" in text


def test_lifespan_passes():
    reached = []

    async def application(scope, receive, send):
        reached.append(scope["type"])

    asyncio.run(WebGuard(application)({"type": "lifespan"}, None, None))
    assert reached == ["lifespan"]


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ("UI.example.com", "ui.example.com"),
        ("a:80", "a"),
        ("::1", "::1"),
        ("[fe80::1]:3", "fe80::1"),
        ("0.0.0.0", "0.0.0.0"),
    ],
)
def test_allowed_host_is_a_name_with_or_without_port(given, host):
    assert allowed_host(given) == host


@pytest.mark.parametrize("given", ["", "*", "*.example.com", "http://example.com", "a/b", "a b"])
def test_what_is_no_host_name_is_refused(given):
    with pytest.raises(WrongUsage, match="host name"):
        allowed_host(given)
