"""Viewers in front of another web application: at `/imagemill/` for a data root, at `/imagemill/NAME/` for one with a name.

The guard around both is that of the other application. A viewer, and what it imports, is loaded by its first request.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from imagemill.look.links import prefix_of
from imagemill.web_guard import Application, Receive, Send

if TYPE_CHECKING:
    from imagemill.look.viewer import Viewer


class MountedRoot(NamedTuple):
    """A data root to show. `name`: of the root in a shared history, empty without one."""

    path: str
    name: str = ""

    @property
    def prefix(self) -> str:
        """Path of its first page."""
        return prefix_of(self.name)


class WithViewers:
    """An ASGI application that passes requests below `links.PREFIX` to viewers, and all others on.

    Args:
        application: receives all other requests.
        roots: the data roots.
        read_only: whether the viewers change nothing.
    """

    def __init__(self, application: Application, roots: Sequence[MountedRoot], *, read_only: bool = False) -> None:
        self._application, self._read_only = application, read_only
        # The longest prefix first: that of a root without a name begins all others.
        self._roots = sorted(roots, key=lambda root: -len(root.prefix))
        self._applications: dict[str, Application] = {}
        self._viewers: list[Viewer] = []

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it on."""
        if scope["type"] == "lifespan":
            try:
                await self._application(scope, receive, send)
            finally:
                self._close()
            return
        path = scope.get("path", "")
        for root in self._roots if scope["type"] == "http" else ():
            if path.startswith(root.prefix):
                inside = {**scope, "root_path": scope.get("root_path", "") + root.prefix.rstrip("/")}
                await self._viewer(root)(inside, receive, send)
                return
            if path == root.prefix.rstrip("/"):
                from starlette.responses import RedirectResponse

                await RedirectResponse(root.prefix)(scope, receive, send)
                return
        await self._application(scope, receive, send)

    def _viewer(self, root: MountedRoot) -> Application:
        if root.path not in self._applications:
            from imagemill.look.app import make_app
            from imagemill.look.viewer import Viewer

            viewer = Viewer(root.path, read_only=self._read_only)
            self._viewers.append(viewer)
            self._applications[root.path] = make_app(viewer)
        return self._applications[root.path]

    def _close(self) -> None:
        for viewer in self._viewers:
            viewer.close()
