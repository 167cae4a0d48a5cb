"""The viewer as a server of its own, on this machine only."""

from pathlib import Path

import uvicorn

from imagemill.look.app import make_app
from imagemill.look.viewer import Viewer
from imagemill.web_guard import WebGuard

# A page that keeps its connection open must not delay the end.
SHUTDOWN_SECONDS = 2


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
    try:
        uvicorn.run(
            application,  # pyright: ignore[reportArgumentType]
            host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )  # fmt: skip
    finally:
        viewer.close()
