"""The server: uvicorn on one address, until it is interrupted."""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from meshtune.errors import UserError
from meshtune.report.draw import vega
from meshtune.web.folders import Folders

if TYPE_CHECKING:
    from meshtune.web.app import Pages

SHORTEST_TOKEN = 16  # characters


class Server(uvicorn.Server):
    """Ends open streams before uvicorn waits for them."""

    def __init__(self, config: uvicorn.Config, pages: "Pages") -> None:
        super().__init__(config)
        self._pages = pages

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._pages.closing = True
        super().handle_exit(sig, frame)


def serve(
    paths: Sequence[Path], *, host: str, port: int, token: str | None, ready: Callable[[str], None]
) -> None:
    """Serve the pages of runs and sweeps until SIGTERM, or SIGINT, which raises KeyboardInterrupt.

    ready: called with the address once it is listened on. Raises UserError for a path that shows nothing, an
    address that can't be listened on, one beyond this machine without a token, and without Altair.
    """
    from meshtune.web.app import Guard, Pages, is_loopback

    if token is None and not is_loopback(host):
        raise UserError(
            f"--host {host} can be reached from other machines: add --token with at least {SHORTEST_TOKEN} "
            "characters, such as one of `openssl rand -hex 16`."
        )
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise UserError(f"The token has {len(token)} characters; take {SHORTEST_TOKEN} or more.")
    vega.require()
    from meshtune.report.draw import charts  # noqa: F401 - Altair takes a second, which no request should wait

    vega.javascript()
    pages = Pages(Folders(paths))
    config = uvicorn.Config(
        Guard(pages.app(), host=host, token=token), log_level="warning", access_log=False, lifespan="off",
        http="h11", ws="none", loop="asyncio", server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=3,
    )  # fmt: skip
    with listening(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{listener.getsockname()[1]}/")
        Server(config, pages).run(sockets=[listener])
    if pages.closing:  # by SIGINT: what uvicorn raises again at its end is lost at times
        raise KeyboardInterrupt


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. port: 0 takes a free one. Raises UserError where that is not possible."""
    try:
        (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise UserError(
            f"{host} port {port} can't be listened on: {error.strerror or error}; choose another --port, or "
            "--host."
        ) from error
