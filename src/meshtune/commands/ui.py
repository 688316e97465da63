"""`meshtune ui`: pages of runs and sweeps in a browser, which continue while these write."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from meshtune.commands.options import announce
from meshtune.errors import UserError, expanded
from meshtune.units import few, notice, working

RUNS = Path("runs")  # where runs are written, unless `output` says otherwise


def ui(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUNS|SWEEP]...", help="run folders, folders of runs, or sweeps; default: runs"
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="address to listen on; others than this machine's need --token")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 8421,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="MESHTUNE_TOKEN", help="a request must have it: open http://HOST:PORT/?token=TOKEN"
        ),
    ] = None,
) -> None:
    """Serve a live page of runs and sweeps: state, curves, comparison. It only reads."""
    folders = [expanded(path) for path in paths or [RUNS]]
    announce(few([*map(str, folders)]))
    with ExitStack() as loading:
        loading.enter_context(working("loading the pages"))
        try:
            from meshtune.web.serve import serve
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
                raise
            raise UserError(
                f"meshtune ui is served by starlette and uvicorn, and '{error.name}' can't be imported; "
                "install them with: pip install starlette uvicorn"
            ) from error

        def ready(address: str) -> None:
            loading.close()
            print(address, flush=True)
            for path in folders:
                if not path.exists():
                    notice(f"meshtune: {path} does not exist yet; the page waits for its first run.")
            notice("meshtune: end it with Ctrl-C.")

        serve(folders, host=host, port=port, token=token, ready=ready)
