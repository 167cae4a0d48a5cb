"""The viewer as a server of its own, on this machine only."""

from pathlib import Path

import uvicorn

from imagemill.domain.layout import DataRoot
from imagemill.look.app import make_app
from imagemill.look.export import refuse_place
from imagemill.look.selection import read_view
from imagemill.look.viewer import Viewer
from imagemill.store.ledger import CHANGES_SINCE
from imagemill.web_guard import WebGuard

# A page that keeps its connection open must not delay the end.
SHUTDOWN_SECONDS = 2


def export(root: Path, path: Path, query: str) -> tuple[int, int]:
    """Write the images of a filter as one HTML file; return their number in it, and in all.

    Args:
        root: the data root.
        path: the new file.
        query: filter as in the address of the viewer's grid: `show=refused&bucket=1216x832`.

    Raises:
        WrongUsage: for an unknown filter, and for a file that exists or would be inside the data root.
        MissingInput: if the folder of the file does not exist.
    """
    view = read_view(query.partition("?")[2] or query, CHANGES_SINCE)
    viewer = Viewer(root, read_only=True)
    try:
        refuse_place(path, DataRoot.resolve(root))
        return viewer.run(viewer.export, path, view)
    finally:
        viewer.close()


def serve(root: Path, *, port: int, token: str, read_only: bool = False) -> None:
    """Serve one data root on 127.0.0.1 until SIGINT or SIGTERM.

    Args:
        root: the data root.
        port: to listen on.
        token: of the URL, without which requests are refused.
        read_only: whether nothing can be changed.
    """
    viewer = Viewer(root, read_only=read_only)
    application = WebGuard(make_app(viewer, url_token=token))
    viewer.read_ahead()  # while the browser starts
    try:
        uvicorn.run(
            application,  # pyright: ignore[reportArgumentType]
            host="127.0.0.1", port=port, log_level="warning", access_log=False, proxy_headers=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )  # fmt: skip
    finally:
        viewer.close()
