"""A page that is kept, and followed while anybody looks at it: one task reads its files for all streams.

    files ──> Followed ──> html()    the page as it was last drawn
                      └──> stream()  server-sent events: `rows`, what new rows change, at once; `again` when
                                     the page has been drawn again, which its readers then fetch

Rows of metrics.jsonl become points of the curves that are on the page, and change its heading and tiles. All
else (tables, the other pictures, curves that begin later) comes with the next drawing, for which at most a
50th of a core is used, or a fifth for a while where a run starts or ends. An event's id is "<number of the
drawing>.<number of the event>", so that a stream continues where it broke off.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from meshtune.errors import UserError
from meshtune.report.draw.document import Document
from meshtune.report.run.panels import Points
from meshtune.rundir import Row, rows_of
from meshtune.web.states import whole_lines

POLL = 0.5  # seconds between two looks at a run's files
QUIET = 15.0  # seconds without an event after which a comment is sent: proxies end silent connections
LEAST_PAUSE = 5.0  # seconds between two drawings
SHARE, SOON = 50, 5  # times those that one takes; where a run has started or ended
MOST_BYTES = 1 << 20  # of new rows that are read at once
STARTS_AND_ENDS = ("run", "end")  # kinds of rows
MOST_DIGITS = 12  # of an event's number; Python refuses to read thousands of them


class Hidden(Exception):
    """The files lead out of the given folders, or have gone."""


class Stamp(NamedTuple):
    """Differs once what is shown has changed."""

    files: Hashable
    state: Hashable = ()  # whether a run trains, which is drawn soon


@dataclass
class Drawing:
    """The page as it was drawn last, and what later rows change on it."""

    number: int  # counts up, also over a new start of the server
    html: str
    stamp: Stamp  # of its files
    ready: float  # time.monotonic when it was done
    seconds: float  # that it took
    points: Points
    later: Callable[[list[Row]], Mapping[str, str]] | None  # of the page
    offset: int  # bytes of metrics.jsonl that it has, or that have been read since
    inode: int
    events: list[dict[str, Any]] = field(default_factory=list)  # data of `rows` since then
    restarted: bool = False  # the run has started or ended since then, or its rows are in another file

    def add(self, rows: list[Row]) -> None:
        """Make an event of what later rows change on the page, if they do."""
        self.restarted |= any(row.get("kind") in STARTS_AND_ENDS for row in rows)
        points, html = self.points.of(rows), self.later(rows) if self.later else {}
        if html:  # takes the place of what was there before
            self.events = [event | {"html": {}} for event in self.events]
        if points or html:
            self.events.append({"end": self.points.end, "points": points, "html": html})

    def not_drawn(self, stamp: Stamp, seconds: float) -> None:
        """Keep this drawing where a new one failed after some seconds: it is tried again after its pause."""
        self.ready, self.seconds = time.monotonic(), max(seconds, self.seconds)
        self.restarted, self.stamp = False, self.stamp._replace(state=stamp.state)


class Followed:
    """One page; its methods are called from one event loop."""

    def __init__(
        self,
        page: Callable[[], Document],
        stamp: Callable[[], Stamp],
        served: Callable[[Document, str], str],
        *,
        rows: Path | None = None,
        poll: float = POLL,
        closing: Callable[[], bool] = bool,
    ) -> None:
        """page: reads the files and makes the page; raises UserError. stamp: of the files; raises Hidden.
        served: page and position -> HTML. rows: metrics.jsonl, whose rows are on the page. Both of the first
        are called in a thread. poll: seconds between two looks at the files. closing: True once all streams
        must end.
        """
        self._page, self._stamp, self._served, self._rows = page, stamp, served, rows
        self._poll, self._closing = poll, closing
        self._drawing: Drawing | None = None
        self._lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._following = False
        self.streams = 0  # that are open

    async def html(self) -> str:
        """The page, drawn again if its files have changed and the last drawing is old enough."""
        return (await self._drawn(await asyncio.to_thread(self._stamp))).html

    async def stream(self, position: str) -> AsyncIterator[str]:
        """Yield server-sent events, as text. position: id of the last one that is known."""
        number, _, seen = position.partition(".")
        place = int(seen) if seen.isdecimal() and len(seen) < MOST_DIGITS else 0
        self.streams += 1
        try:
            if not self._following:
                self._following = True
                self._task = asyncio.create_task(self._follow())
            while True:
                drawing = self._drawing
                if drawing and str(drawing.number) != number:
                    number, place = str(drawing.number), 0
                    yield f"event: again\nid: {number}.0\ndata: {{}}\n\n"
                for event in drawing.events[place:] if drawing else ():
                    place += 1
                    data = json.dumps(event, allow_nan=False)
                    yield f"event: rows\nid: {number}.{place}\ndata: {data}\n\n"
                if not self._following:  # the files have gone, or the server ends
                    return
                if not await self._news(drawing, place):
                    yield ": \n\n"
        finally:
            self.streams -= 1

    async def _news(self, drawing: Drawing | None, place: int) -> bool:
        """Wait until there is more than the first `place` events of a drawing; False after QUIET seconds."""

        def is_new() -> bool:
            newer = self._drawing is not drawing or (drawing is not None and len(drawing.events) > place)
            return newer or not self._following

        try:
            async with asyncio.timeout(QUIET), self._changed:
                return await self._changed.wait_for(is_new)
        except TimeoutError:
            return False

    async def _follow(self) -> None:
        """Look at the files until no stream is open."""
        try:
            while self.streams and not self._closing():
                stamp = await asyncio.to_thread(self._stamp)
                drawing = await self._drawn(stamp)
                if stamp != drawing.stamp:
                    drawing.add(self._read_on(drawing))
                async with self._changed:
                    self._changed.notify_all()
                await asyncio.sleep(self._poll)
        except (Hidden, UserError):  # whoever asks for the page is told
            pass
        finally:
            self._following = False
            async with self._changed:
                self._changed.notify_all()

    async def _drawn(self, stamp: Stamp) -> Drawing:
        """The last drawing, or a new one if it is time for it. Raises UserError where there is none yet."""
        async with self._lock:
            old = self._drawing
            if old is None:
                self._drawing = await asyncio.to_thread(self._draw, stamp)
            elif stamp != old.stamp and time.monotonic() - old.ready > _pause(old, stamp):
                began = time.monotonic()
                try:
                    self._drawing = await asyncio.to_thread(self._draw, stamp)
                except UserError:  # a file that is being written, perhaps: the old page stays for a while
                    old.not_drawn(stamp, time.monotonic() - began)
            assert self._drawing is not None
            return self._drawing

    def _draw(self, stamp: Stamp) -> Drawing:
        began, number = time.monotonic(), time.time_ns()
        offset, inode = 0, 0
        if self._rows is not None:
            try:
                status = self._rows.stat()
                offset, inode = _end_of_rows(self._rows, status.st_size), status.st_ino
            except OSError:  # no row yet
                pass
        page = self._page()
        html = self._served(page, f"{number}.0")
        ready = time.monotonic()
        points = Points(page.panels)
        return Drawing(number, html, stamp, ready, ready - began, points, page.later, offset, inode)

    def _read_on(self, drawing: Drawing) -> list[Row]:
        """Whole rows that were written since; none of a file that is another one now, which is drawn anew."""
        if self._rows is None:
            return []
        try:
            with open(self._rows, "rb") as stream:
                status = os.fstat(stream.fileno())
                if status.st_ino != drawing.inode:
                    drawing.restarted = True
                if status.st_ino != drawing.inode or status.st_size <= drawing.offset:
                    return []
                stream.seek(drawing.offset)
                piece = stream.read(MOST_BYTES)
        except OSError:
            return []
        drawing.offset += piece.rfind(b"\n") + 1
        return rows_of(whole_lines(piece))


def _pause(old: Drawing, stamp: Stamp) -> float:
    """Seconds after a drawing before which there is no other one."""
    soon = old.restarted or stamp.state != old.stamp.state
    return max(LEAST_PAUSE, (SOON if soon else SHARE) * old.seconds)


def _end_of_rows(file: Path, size: int) -> int:
    """Bytes up to the last newline of the first `size` ones."""
    start = max(0, size - MOST_BYTES)
    with open(file, "rb") as stream:
        stream.seek(start)
        return start + stream.read(size - start).rfind(b"\n") + 1
