"""The viewer: an ASGI application over one data root, without Dagster.

    browser ──> WebGuard (web_guard.py) ──> application ──> Viewer (viewer.py) ──> Jinja2 templates, JPEGs

All pages are at the same level, so that their links work wherever the application is mounted. A change needs a POST with the
token of this process, which its pages contain.
"""

import functools
import hmac
import secrets
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlencode

import jinja2
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from imagemill.domain.filters import FILTERS
from imagemill.errors import ImagemillError, MissingInput, WrongUsage
from imagemill.formats.images import fitted_size
from imagemill.look.child import COMMAND, Tasks
from imagemill.look.links import link
from imagemill.look.pictures import as_jpeg
from imagemill.look.records import PAGE
from imagemill.look.selection import PAGE_SIZE, View, read_view
from imagemill.look.viewer import Viewer
from imagemill.pipeline.contact_sheet import grey_picture
from imagemill.store.ledger import CHANGES_SINCE
from imagemill.store.ledger.overview import SORTS, ImageState
from imagemill.text.units import counted
from imagemill.web_guard import Application, Message, Receive, Send

THUMBNAIL, LARGE = 256, 1600
# Longer side of the pictures of presets and groups, in pixels.
FILE_SIDE = 512
# Pictures of a montage, its columns, and the longer side of each picture in pixels.
MONTAGE, MONTAGE_COLUMNS, MONTAGE_SIDE = 12, 6, 128

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_STATIC = {
    "look.css": "text/css; charset=utf-8",
    "look.js": "text/javascript; charset=utf-8",
    "look.svg": "image/svg+xml",
}
_MOST_BODY = 8 << 20
# Of a grey picture in place of one whose size is not known.
_UNKNOWN_SIZE = (4, 3)

Handler = Callable[[Request], Awaitable[Response]]


def make_app(viewer: Viewer, *, url_token: str | None = None, command: Sequence[str] = COMMAND) -> Application:
    """Return the application. It does not check Host and Origin: wrap it, or what mounts it, in WebGuard.

    Args:
        viewer: the data root.
        url_token: token without which every request is refused; it is given once in the URL. None: there is no token.
        command: words that start imagemill.
    """
    pages = _Pages(viewer, Tasks(viewer.path, command))
    routes = [
        Route("/", pages.overview), Route("/images", pages.images), Route("/image", pages.image),
        Route("/duplicates", pages.duplicates), Route("/changes", pages.changes), Route("/marked", pages.marked),
        Route("/presets", pages.presets), Route("/preset", pages.preset), Route("/groups", pages.groups),
        Route("/file", pages.file), Route("/task", pages.task),
        Route("/thumb", pages.thumbnail), Route("/photo", pages.photograph),
        Route("/latents", pages.latents), Route("/montage", pages.montage), Route("/static/{name}", pages.static),
        Route("/marks", pages.set_marks, methods=["POST"]), Route("/withdraw", pages.withdraw, methods=["POST"]),
        Route("/restore", pages.restore, methods=["POST"]),
    ]  # fmt: skip
    application: Application = Starlette(routes=[_reported(pages, route) for route in routes])  # pyright: ignore[reportAssignmentType]
    return _TokenGate(_Headers(application), url_token) if url_token else _Headers(application)


def _reported(pages: "_Pages", route: Route) -> Route:
    """Return the route with the errors of imagemill as pages."""
    handler: Handler = route.endpoint

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ImagemillError as error:
            codes = ((_Forbidden, 403), (MissingInput, 404), (WrongUsage, 400), (ImagemillError, 500))
            code = next(code for kind, code in codes if isinstance(error, kind))
            return pages.render("error.html", code, error=error)

    return Route(route.path, answer, methods=sorted(route.methods - {"HEAD"}) if route.methods else None)


class _Pages:
    """The handlers of all routes."""

    def __init__(self, viewer: Viewer, tasks: Tasks) -> None:
        self._viewer, self._tasks = viewer, tasks
        self._token = secrets.token_urlsafe(32)
        self._templates = jinja2.Environment(
            loader=jinja2.PackageLoader("imagemill.look"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )  # fmt: skip
        self._templates.globals.update(
            filters=FILTERS, sorts=SORTS, token=self._token, read_only=viewer.read_only, counted=counted,
            picture_size=_picture_size, link=link, page_size=PAGE_SIZE,
        )  # fmt: skip

    def render(self, template: str, code: int = 200, **values: Any) -> Response:
        """Return a page. It must not be kept: the next one may show something else."""
        text = self._templates.get_template(template).render(values)
        body = text.encode("utf-8", "backslashreplace")  # names may contain bytes that are no text
        return Response(body, code, {"Cache-Control": "no-store"}, "text/html; charset=utf-8")

    # ---- pages

    async def overview(self, _: Request) -> Response:
        """Return the first page."""
        return self.render("overview.html", **await self._viewer.call(self._viewer.overview))

    async def images(self, request: Request) -> Response:
        """Return a grid."""
        view = self._view(request)
        page = await self._viewer.call(self._viewer.page, view)
        last = max(1, -(-page.number // PAGE_SIZE))
        if view.page > last:
            return RedirectResponse(f"images?{view.query(page=last if last > 1 else None)}", 303)
        return self.render("images.html", view=view, page=page, last=last, kinds_of_change=CHANGES_SINCE)

    async def image(self, request: Request) -> Response:
        """Return the page of one image."""
        view = self._view(request)
        shown = await self._viewer.call(self._viewer.image, request.query_params.get("id", ""), view)
        return self.render("image.html", view=view, shown=shown, state=shown.state)

    async def duplicates(self, request: Request) -> Response:
        """Return groups of near duplicates."""
        page = self._view(request).page
        groups, number = await self._viewer.call(self._viewer.groups, page)
        return self.render("duplicates.html", groups=groups, number=number, page=page)

    async def changes(self, request: Request) -> Response:
        """Return what changed since a time."""
        since = request.query_params.get("since") or "24h"
        return self.render("changes.html", since=since, changes=await self._viewer.call(self._viewer.changes, since))

    async def marked(self, request: Request) -> Response:
        """Return the marked images, with the button that withdraws them."""
        return self.render("marked.html", states=await self._viewer.call(self._viewer.marks), changed=False)

    async def presets(self, request: Request) -> Response:
        """Return the presets and the missions of Stage-A."""
        return self.render(
            "presets.html",
            presets=await self._viewer.call(self._viewer.presets),
            missions=await self._viewer.call(self._viewer.missions),
        )

    async def preset(self, request: Request) -> Response:
        """Return records of a preset, with their objects drawn."""
        given = request.query_params
        name, split, label = given.get("name", ""), given.get("split", ""), given.get("class") or None
        page = self._view(request).page
        found, problems = await self._viewer.call(self._viewer.preset_page, name, split, label, page)
        return self.render(
            "preset.html", name=name, split=split, label=label, page=page, found=found, problems=problems, size=PAGE
        )

    async def groups(self, request: Request) -> Response:
        """Return groups of a mission, images beside their summaries."""
        mission, page = request.query_params.get("mission", ""), self._view(request).page
        groups, number, problems = await self._viewer.call(self._viewer.mission_page, mission, page)
        return self.render(
            "groups.html", mission=mission, page=page, groups=groups, number=number, problems=problems, size=PAGE
        )

    async def file(self, request: Request) -> Response:
        """Return a picture of an image of a preset or a mission."""
        given = request.query_params
        source, pictures = await self._viewer.call(
            self._viewer.file_of, given.get("preset", ""), given.get("mission", ""), given.get("path", "")
        )
        px = LARGE if given.get("large") == "1" else FILE_SIDE
        return await _jpeg(lambda: pictures.photograph(source, px), _UNKNOWN_SIZE, 60)

    async def task(self, request: Request) -> Response:
        """Return the state of the command that was started last."""
        return self.render("task.html", task=self._tasks.last)

    # ---- changes

    async def set_marks(self, request: Request) -> Response:
        """Mark images, or remove their marks: named ones, all of a view, or all near duplicates but the representatives."""
        form = await self._form(request)
        marked = form.get("on", ["1"])[0] == "1"
        if "all" in form:
            view = read_view(form["all"][0], CHANGES_SINCE)
            items = await self._viewer.call(self._viewer.items, view)
        elif "duplicates" in form:
            items = await self._viewer.call(self._viewer.others_of_groups)
        else:
            items = form.get("item", [])
        number = await self._viewer.call(self._viewer.set_marks, items, marked)
        if request.headers.get("accept") == "application/json":
            return JSONResponse({"marked": number})
        return RedirectResponse("marked", 303)

    async def withdraw(self, request: Request) -> Response:
        """Start to withdraw the marked images, if they are those that the page showed."""
        form = await self._form(request)
        states = await self._viewer.call(self._viewer.marks)
        items = [state.item for state in states]
        if items != form.get("item", []):
            return self.render("marked.html", 409, states=states, changed=True)
        self._tasks.withdraw_marked(items)
        return RedirectResponse("task", 303)

    async def restore(self, request: Request) -> Response:
        """Start to bring back images."""
        form = await self._form(request)
        self._tasks.restore(form.get("item", []))
        return RedirectResponse("task", 303)

    async def _form(self, request: Request) -> dict[str, list[str]]:
        """Return the fields of a form. Raises _Forbidden unless it is of a page of this process, and changes are permitted."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BODY:
                raise WrongUsage("the form is too large", do="mark the images of a filter with one button")
        form = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True, errors="surrogateescape")
        given = form.get("token", [""])[0]
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            raise _Forbidden("the page is not of this server", do="reload the page, and repeat the step")
        if self._viewer.read_only:
            raise _Forbidden("this viewer changes nothing", do="run the command that the page shows")
        return form

    # ---- pictures

    async def thumbnail(self, request: Request) -> Response:
        """Return a small picture: whole, or as cropped."""
        return await self._picture(request, THUMBNAIL)

    async def photograph(self, request: Request) -> Response:
        """Return a large picture."""
        return await self._picture(request, LARGE)

    async def _picture(self, request: Request, px: int) -> Response:
        given = request.query_params
        show = functools.partial(self._viewer.picture, cropped=given.get("crop") == "1")
        picture = await self._viewer.call(show, given.get("id", ""), px)
        size = fitted_size(picture.size, px) if picture.size[0] else _UNKNOWN_SIZE
        # Bytes that are at hand need no other thread.
        return _as_kept(picture.kept, 600) if picture.kept else await _jpeg(picture.make, size, 600)

    async def montage(self, request: Request) -> Response:
        """Return the first images of a view in one picture, as cropped."""
        sources, frames, pictures = await self._viewer.call(self._viewer.sources, self._view(request), MONTAGE)
        if not sources:
            return _grey(_UNKNOWN_SIZE)
        return await _jpeg(lambda: pictures.montage(sources, frames, MONTAGE_COLUMNS, MONTAGE_SIDE), _UNKNOWN_SIZE, 60)

    async def latents(self, request: Request) -> Response:
        """Return an array of an image as a picture."""
        given = request.query_params
        found = await self._viewer.call(self._viewer.latents, given.get("id", ""), given.get("kind", ""))
        if found is None:
            raise MissingInput("no latents that can be shown", do="run `imagemill run`")
        return Response(found[0], 200, {"Cache-Control": "no-store", "X-Imagemill-R2": f"{found[1]:.3f}"}, "image/png")

    async def static(self, request: Request) -> Response:
        """Return the style sheet or the script."""
        name = request.path_params["name"]
        if name not in _STATIC:
            return PlainTextResponse("not found", 404)
        body = (files("imagemill.look") / "static" / name).read_bytes()
        return Response(body, 200, {"Cache-Control": "private, max-age=600"}, _STATIC[name])

    @staticmethod
    def _view(request: Request) -> View:
        return read_view(request.url.query, CHANGES_SINCE)


class _Forbidden(WrongUsage):
    """A change that the viewer refuses."""


class _Headers:
    """Middleware that adds the headers of every answer."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((name.lower().encode(), value.encode()) for name, value in _HEADERS.items()),
                ]
            await send(message)

        await self._application(scope, receive, answer)


class _TokenGate:
    """Middleware that refuses requests without the token of the URL that the command printed.

    The token is exchanged for a cookie, so that it does not stay in the address. Other users of the machine have neither.
    """

    def __init__(self, application: Application, token: str) -> None:
        self._application, self._token = application, token

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        request = Request(scope)
        name = f"imagemill-look-{request.url.port or 80}"
        if self._equals(request.cookies.get(name, "")):
            await self._application(scope, receive, send)
        elif request.method == "GET" and self._equals(request.query_params.get("token", "")):
            rest = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
            response = RedirectResponse(request.url.path + (f"?{urlencode(rest)}" if rest else ""), 303)
            response.set_cookie(name, self._token, httponly=True, samesite="strict")
            await response(scope, receive, send)
        else:
            reason = "imagemill refused this request: open the viewer by the URL that `imagemill look` printed.\n"
            await PlainTextResponse(reason, 403)(scope, receive, send)

    def _equals(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


async def _jpeg(make: Callable[[], bytes], size: tuple[int, int], seconds: int) -> Response:
    """Return a picture, which browsers keep for a time; a grey one if it cannot be shown, which its page explains.

    Args:
        make: returns the picture; called on another thread.
        size: of the grey one.
        seconds: how long a browser keeps the picture.
    """
    try:
        made = await run_in_threadpool(make)
    except (ImagemillError, OSError):
        return _grey(size)
    return _as_kept(made, seconds)


def _as_kept(picture: bytes, seconds: int) -> Response:
    return Response(picture, 200, {"Cache-Control": f"private, max-age={seconds}"}, "image/jpeg")


def _grey(size: tuple[int, int]) -> Response:
    return Response(as_jpeg(grey_picture(size)), 200, {"Cache-Control": "no-store"}, "image/jpeg")


def _picture_size(state: ImageState, frame: Any = None, px: int = THUMBNAIL) -> tuple[int, int] | None:
    """Return width and height of a picture of this image, None if its size is not known."""
    if not (state.width and state.height):
        return None
    left, top, right, bottom = frame.box if frame else (0, 0, state.width, state.height)
    return fitted_size((right - left, bottom - top), px)
