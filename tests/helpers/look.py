"""The viewer of a data root without a server."""

import json
import re
from contextlib import contextmanager

from starlette.testclient import TestClient

from imagemill.look.app import make_app
from imagemill.look.viewer import Viewer
from imagemill.web_guard import WebGuard
from tests.helpers.product import command, product


@contextmanager
def viewing(root, *, read_only=False, **options):
    """Yield a client of the viewer behind its guard. `options`: of `make_app`."""
    viewer = Viewer(root.path, read_only=read_only)
    try:
        yield TestClient(WebGuard(make_app(viewer, **options)), base_url="http://127.0.0.1:3100")
    finally:
        viewer.close()


def page(client, path):
    """Return the text of a page that exists."""
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.text


def number_of(client, query):
    """Return the number of inputs that a query selects."""
    return int(re.search(r"<p class=\"count\">([\d,]+) input", page(client, f"/images?{query}"))[1].replace(",", ""))


def numbers_of_reasons(root):
    """Return the number of inputs by reason, after comparing it on all pages and commands that show it."""
    status = json.loads(product(root, "status", "--fresh", "--json"))
    items = {}
    for problem in json.loads(product(root, "problems", "--json")):
        items.setdefault(problem["reason"], set()).add(problem["item"])
    reasons = {name.removeprefix("reason="): n for name, n in status["filters"].items() if name.startswith("reason=")}
    assert reasons == {reason: len(each) for reason, each in items.items()}
    with viewing(root, command=command(stub=True)) as client:
        text = page(client, "/")
        for reason, count in reasons.items():
            assert f'<a href="images?reason={reason}">{count}</a>' in text
            assert number_of(client, f"reason={reason}") == count
    return reasons
