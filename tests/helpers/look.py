"""The viewer of a data root without a server."""

from contextlib import contextmanager

from starlette.testclient import TestClient

from imagemill.look.app import make_app
from imagemill.look.viewer import Viewer
from imagemill.web_guard import WebGuard


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
