"""Names of models: local paths or ids of the Hugging Face hub, and the hub's errors. Without torch."""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Thread
from typing import TypeVar
from urllib.parse import urlparse
from urllib.request import getproxies

from meshtune.errors import UserError, check_file, expanded, path_meant

HUB = "https://huggingface.co"
T = TypeVar("T")
PATIENCE = 2.5  # seconds in which the hub must answer; its own client tries for half a minute
MODEL = "config.json"  # file that a model folder holds
MODEL_OR_RUN = "config.[jy]*"  # config.json, or a run's config.yaml
HUB_ID = "A hub id is organisation/name, such as Qwen/Qwen3-0.6B."


class NotFromHub(UserError):
    """Error: the hub did not give the model. `reason`: a clause that says why."""

    def __init__(self, problem: str, reason: str = "the Hugging Face hub can't be reached") -> None:
        super().__init__(problem)
        self.reason = reason


def local_path(name: str, holding: str = MODEL) -> Path | None:
    """Return the local path `name` if it exists; None if it may be an id of the hub.

    holding: as `folders_like` takes it. Raises UserError for a name that can be neither, and for a folder
    with pipes or devices in it.
    """
    path = expanded(name)
    if path.exists():
        for file in path.iterdir() if path.is_dir() else [path]:
            if not file.is_dir():
                check_file(file)
        return path
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"There is no folder {name}{folders_like(name, holding) or '.'}")
    return None


def folders_like(name: str, holding: str = MODEL) -> str:
    """Clause with the folders on this machine that `name` may mean; "" where none is near.

    holding: pattern of the file that such a folder has.
    """
    return path_meant(name, lambda path: path.is_dir() and any(path.glob(holding)))


def check_name(name: str, revision: str | None = None, holding: str = MODEL) -> None:
    """Raise UserError if `name` isn't a folder, nothing is stored of a hub model of that name, and the hub
    can't be reached. Needs no import that takes seconds, so that a mistyped name is answered at once.
    holding: as `folders_like` takes it.
    """
    if not (local_path(name, holding) or is_stored(name) or reachable()):
        raise NotFromHub(not_here(name, revision, holding))


def is_stored(name: str) -> bool:
    """True if the hub's cache on this machine has a folder for the model."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    folder = os.environ.get("HF_HUB_CACHE") or Path(home, "hub")
    return Path(os.path.expanduser(folder), f"models--{name.replace('/', '--')}").is_dir()


@cache
def reachable() -> bool:
    """True if the hub answers within PATIENCE, or if that can't be known, as behind a proxy."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "on", "yes", "true"):
        return False
    hub = urlparse(os.environ.get("HF_ENDPOINT", HUB))
    if hub.scheme in getproxies():
        return True

    def connect() -> None:
        port = hub.port or (443 if hub.scheme == "https" else 80)
        socket.create_connection((hub.hostname or "", port), PATIENCE).close()

    try:
        in_time(connect)
    except OSError:
        return False
    return True


def ask_once(name: str, revision: str | None = None) -> None:
    """Ask the hub once whether it gives this user the model's config.json. Raises OSError if it doesn't
    within PATIENCE, ValueError for an impossible name.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(name, MODEL, revision=revision)
    try:
        in_time(lambda: get_hf_file_metadata(url, timeout=PATIENCE))
    except (OSError, ValueError):
        raise
    except Exception as error:  # of the HTTP library under the hub's client
        raise ConnectionError(str(error)) from error


def in_time(work: Callable[[], T]) -> T:
    """Return what `work` returns. Raises TimeoutError after PATIENCE, and what `work` raises.

    Late work continues in its thread: looking up a host's name has no time limit of its own.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=run, daemon=True).start()
    return outcome.result(PATIENCE)


def not_here(name: str, revision: str | None = None, holding: str = MODEL) -> str:
    """Sentence about a name that isn't a folder, where the hub can't be asked.

    holding: as `folders_like` takes it.
    """
    at = f"{name} at revision {revision}" if revision else name
    return (
        f"There is no folder {name} here{folders_like(name, holding) or '.'} As a hub model, {at} is not in "
        "the local cache, and the Hugging Face hub can't be reached (no network, or HF_HUB_OFFLINE is set). "
        + (
            f"Download it where there is a network (`hf download {name}`; a plan needs only its "
            "config.json) and set model.name to that folder."
            if "/" in name
            else HUB_ID
        )
    )


@contextmanager
def hub_errors(name: str, revision: str | None = None) -> Iterator[None]:
    """Turn the hub's errors in the block, about the model `name`, into UserErrors that name the remedy.

    Any other OSError is taken for an unreachable hub.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise NotFromHub(
            f"{name} is gated: accept its terms at https://huggingface.co/{name}, then run "
            f"`hf auth login` or set HF_TOKEN.",
            "the model is gated (accept its terms on the hub, then run `hf auth login`)",
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"The hub's {name} has no revision {revision}.") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise NotFromHub(
            f"There is no folder {name} here and no model {name} on the Hugging Face hub that you may read"
            f"{folders_like(name) or '.'} Check the spelling ({HUB_ID[:-1]}), or, if it is private, run "
            "`hf auth login` or set HF_TOKEN.",
            "the hub has none of that name that you may read",
        ) from error
    except RemoteEntryNotFoundError as error:
        raise UserError(
            f"The hub's {name} has no config.json, so it is not a model in Hugging Face's format; name the "
            "model that it was made from."
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise NotFromHub(not_here(name, revision)) from error
