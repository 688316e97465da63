"""The server's addresses, and what every request must pass.

    /                    the list of runs and sweeps        /runs/<id>, /sweeps/<id>     their pages
    /compare?run=<id>&…  runs side by side                  /scripts/<digest>/<name>     the pages' code

Each page has its stream of server-sent events at its address + "/events" ("/events" for the list). Nothing
is written, whatever is asked; an answer that refuses names files from the given folders on.
"""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshtune.errors import UserError
from meshtune.report.compare import MOST_RUNS
from meshtune.report.draw import vega
from meshtune.report.draw.document import DRAW, Document
from meshtune.report.draw.page import text
from meshtune.report.experiments.table import SCRIPT as TABLE
from meshtune.rundir import RunDir
from meshtune.web.events import Followed, Hidden, Stamp
from meshtune.web.folders import Entry, Folders
from meshtune.web.pages import (
    RunLines,
    list_page,
    page_of_run,
    page_of_several,
    page_of_sweep,
    stamp_of,
)

MOST_STREAMS = 64
MOST_PAGES = 24  # that are kept while nobody looks at them
LIST_POLL = 2.0  # seconds between two looks at all folders
KEPT = "private, max-age=31536000, immutable"  # of scripts in a browser: others have another address
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
SCRIPTS: dict[str, Callable[[], str]] = {
    "vega.js": vega.javascript,
    **{
        file.name: partial(file.read_text, encoding="utf-8")
        for file in (DRAW, TABLE, Path(__file__).with_name("follow.js"))
    },
}


def is_loopback(host: str) -> bool:
    """True for an address that only this machine can reach."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Pages:
    """The pages of some folders, and their streams."""

    def __init__(self, folders: Folders) -> None:
        self.folders = folders
        self.streams = 0  # that are open, of all pages
        self.closing = False  # True ends all of them
        self._lines = RunLines(folders)
        self._looked = -LIST_POLL  # time.monotonic after the last look for new runs that an unknown id made
        self._looking = asyncio.Lock()
        self._kept: OrderedDict[tuple[str, ...], Followed] = OrderedDict()

    def app(self) -> Starlette:
        """The application without its guard."""
        pages: tuple[tuple[str, Callable[[Request], Followed]], ...] = (
            ("/", self._list),
            ("/runs/{id}", self._run),
            ("/sweeps/{id}", self._sweep),
            ("/compare", self._compare),
        )
        routes = [Route("/scripts/{digest}/{name}", script)]
        for path, find in pages:
            routes += [
                Route(path, partial(self._answer_page, find)),
                Route(path.rstrip("/") + "/events", partial(self._answer_events, find)),
            ]
        handlers = {HTTPException: refused, UserError: self._not_drawn, Hidden: gone}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return app

    async def _answer_page(self, find: Callable[[Request], Followed], request: Request) -> Response:
        return HTMLResponse(await (await self._found(find, request)).html())

    async def _answer_events(self, find: Callable[[Request], Followed], request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        position = request.headers.get("last-event-id") or request.query_params.get("from", "")
        return Events(self, (await self._found(find, request)).stream(position))

    async def _found(self, find: Callable[[Request], Followed], request: Request) -> Followed:
        """The page that is asked for. For unknown ids, new runs are looked for, LIST_POLL s after a look."""
        try:
            return find(request)
        except HTTPException as error:
            if error.status_code != 404:
                raise
        async with self._looking:
            if time.monotonic() - self._looked > LIST_POLL:
                await asyncio.to_thread(self.folders.find)
                self._looked = time.monotonic()
        return find(request)

    def _list(self, request: Request) -> Followed:
        def look() -> Stamp:
            self.folders.find()
            return Stamp(tuple((one.id, stamp_of(one)) for one in self._shown()))

        def page() -> Document:
            return list_page(self._lines.all(), [one for one in self._shown() if one.kind == "sweep"])

        return self._followed(("list",), page, look, "/events", poll=LIST_POLL)

    def _shown(self) -> list[Entry]:
        return [one for one in self.folders.entries.values() if self.folders.may_show(one)]

    def _run(self, request: Request) -> Followed:
        entry = self._entry(request.path_params["id"], "run")
        rows = RunDir(entry.path).metrics_file
        return self._followed(
            (entry.id,),
            partial(page_of_run, entry),
            partial(self._stamps, [entry]),
            f"/runs/{entry.id}/events",
            rows=rows,
        )

    def _sweep(self, request: Request) -> Followed:
        entry = self._entry(request.path_params["id"], "sweep")
        return self._followed(
            (entry.id,),
            partial(page_of_sweep, entry, self.folders.holds),
            partial(self._stamps, [entry]),
            f"/sweeps/{entry.id}/events",
        )

    def _compare(self, request: Request) -> Followed:
        ids = tuple(dict.fromkeys(request.query_params.getlist("run")))
        if not 2 <= len(ids) <= MOST_RUNS:
            raise HTTPException(400, f"Choose 2 to {MOST_RUNS} runs to compare; {len(ids)} are chosen.")
        entries = [self._entry(one, "run") for one in ids]
        events = "/compare/events?" + urlencode([("run", one) for one in ids])
        return self._followed(ids, partial(page_of_several, entries), partial(self._stamps, entries), events)

    def _entry(self, name: str, kind: str) -> Entry:
        """The run or sweep with an id. Raises HTTPException for an unknown one."""
        entry = self.folders.entries.get(name)
        if entry is None or entry.kind != kind:
            raise HTTPException(404, f"There is no {kind} with this id; go back to the list.")
        return entry

    def _stamps(self, entries: Sequence[Entry]) -> Stamp:
        """Stamp of what may be shown. Raises Hidden."""
        if not all(self.folders.may_show(one) for one in entries):
            raise Hidden
        stamps = [stamp_of(one) for one in entries]
        return Stamp(tuple(one.files for one in stamps), tuple(one.state for one in stamps))

    def _followed(
        self, key: tuple[str, ...], page: Callable[[], Document], stamp: Callable[[], Stamp],
        events: str, *, rows: Path | None = None, **options: float,
    ) -> Followed:  # fmt: skip
        """The page that is kept under a key; the oldest ones that nobody looks at are dropped."""
        if key not in self._kept:
            links = "" if events == "/events" else "<nav><a href='/'>all runs</a></nav>"
            served = partial(Document.served, links=links, scripts=f"/scripts/{digest()}", events=events)
            self._kept[key] = Followed(
                page, stamp, lambda shown, position: served(shown, position=position),
                rows=rows, closing=lambda: self.closing, **options,
            )  # fmt: skip
        self._kept.move_to_end(key)
        unseen = [one for one, kept in self._kept.items() if not kept.streams and one != key]
        for old in unseen[: max(0, len(self._kept) - MOST_PAGES)]:
            del self._kept[old]
        return self._kept[key]

    async def _not_drawn(self, request: Request, error: Exception) -> Response:
        """A page on a run or sweep that can't be read, with the reason."""
        assert isinstance(error, UserError)
        reason = "".join(f"<p>{text(self.folders.without_paths(one))}</p>" for one in error.problems)
        page = f"<!doctype html><title>meshtune</title><p><a href='/'>all runs</a></p>{reason}"
        return HTMLResponse(page, 500)


class Events(StreamingResponse):
    """A stream of events that counts among the open ones, or 503 where there are too many."""

    def __init__(self, pages: Pages, stream: object) -> None:
        super().__init__(stream, media_type="text/event-stream")  # type: ignore[arg-type]
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._pages.streams >= MOST_STREAMS:
            message = (
                f"All {MOST_STREAMS} streams of events are taken; close a page, and load this one again.\n"
            )
            await PlainTextResponse(message, 503, {"retry-after": "30"})(scope, receive, send)
            return
        self._pages.streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._pages.streams -= 1


async def script(request: Request) -> Response:
    """A script of the pages, which a browser may keep."""
    name = request.path_params["name"]
    if name not in SCRIPTS or request.path_params["digest"] != digest():
        raise HTTPException(404, "There is no such script.")
    return Response(_code(name), media_type="text/javascript", headers={"cache-control": KEPT})


@cache
def digest() -> str:
    """Digest of all scripts, which stands in their addresses."""
    return hashlib.sha256("\0".join(map(_code, SCRIPTS)).encode()).hexdigest()[:16]


@cache
def _code(name: str) -> str:
    return SCRIPTS[name]()


async def refused(request: Request, error: Exception) -> Response:
    """The sentence of a request that can't be answered."""
    assert isinstance(error, HTTPException)
    return PlainTextResponse(f"{error.detail}\n", error.status_code, error.headers)


async def gone(request: Request, error: Exception) -> Response:
    return PlainTextResponse("It has gone, or its files lead out of the given folders.\n", 404)


class Guard:
    """Middleware: allow only GET and HEAD, known Host headers and, if set, the token; else 4xx."""

    def __init__(self, app: ASGIApp, *, host: str, token: str | None = None) -> None:
        """host: the address that is listened on. token: that a request must have; None: none."""
        self._app, self._host, self._token = app, host, token
        # Of the cookie, until the server ends. A browser sends cookies to all ports of a host, so each server
        # has a name of its own.
        self._cookie, self._session = f"meshtune-{secrets.token_hex(4)}", secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            answer = self._refusal(scope) or self._app
            await answer(scope, receive, partial(_send_with_headers, send))

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that must not pass; None for others."""
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("Only GET and HEAD are answered.\n", 405, {"allow": "GET, HEAD"})
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            return PlainTextResponse("This isn't a name of the server: open it by its address.\n", 400)
        if self._token is None:
            return None
        return self._without_token(scope, headers)

    def _is_own(self, host: str) -> bool:
        """True for the names under which pages may be asked for. A foreign web page whose name leads to this
        machine asks by that name (DNS rebinding); an address can't be led anywhere.
        """
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        name = name.strip("[]").lower()
        if is_loopback(self._host):
            return is_loopback(name)
        try:
            ip_address(name)
        except ValueError:
            return name == self._host.lower() or name == "localhost"
        return True

    def _without_token(self, scope: Scope, headers: Headers) -> Response | None:
        """None for a request that knows the token. One that has it in its address gets a cookie for it, and
        the address without it, which stands in the browser's history.
        """
        request = Request(scope)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if _equal(request.cookies.get(self._cookie, ""), self._session):
            return None
        if scheme.lower() == "bearer" and _equal(bearer, self._token or ""):
            return None
        words = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        if not any(name == "token" and _equal(value, self._token or "") for name, value in words):
            return PlainTextResponse("The server's token is needed: open /?token=TOKEN.\n", 401)
        others = urlencode([(name, value) for name, value in words if name != "token"])
        path = "/" + scope["path"].lstrip("/\\")  # "//name" would be another server
        answer = RedirectResponse(path + (f"?{others}" if others else ""), 303)
        answer.set_cookie(self._cookie, self._session, httponly=True, samesite="strict")
        return answer


def _equal(one: str, other: str) -> bool:
    """Compare in a time that tells nothing of where they differ."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))


async def _send_with_headers(send: Callable[[Message], Awaitable[None]], message: Message) -> None:
    if message["type"] == "http.response.start":
        headers = MutableHeaders(raw=message.setdefault("headers", []))
        for name, value in HEADERS.items():
            headers.setdefault(name, value)
    await send(message)
