"""Names of models: local paths or ids of the Hugging Face hub, and the hub's errors. Without torch."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Thread
from urllib.parse import urlparse
from urllib.request import getproxies

from meshtune.errors import UserError, check_file, expanded
from meshtune.nearest import path_meant

HUB = "https://huggingface.co"
PATIENCE = 2.0  # seconds in which the hub must answer; its own client tries for half a minute
MODEL = "config.json"  # file that a model folder holds
MODEL_OR_RUN = "config.[jy]*"  # config.json, or a run's config.yaml
HUB_ID = "A hub id is organisation/name, such as Qwen/Qwen3-0.6B."


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
    """Raise UserError if `name` is no folder, nothing is stored of a hub model of that name, and the hub
    can't be reached. Needs no import that takes seconds, so that a mistyped name is answered at once.
    holding: as `folders_like` takes it.
    """
    if not (local_path(name, holding) or is_stored(name) or reachable()):
        raise UserError(not_here(name, revision, holding))


def is_stored(name: str) -> bool:
    """True if the hub's cache on this machine has a folder for the model."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    folder = os.environ.get("HF_HUB_CACHE") or Path(home, "hub")
    return Path(folder, f"models--{name.replace('/', '--')}").expanduser().is_dir()


@cache
def reachable() -> bool:
    """True if the hub answers within PATIENCE, or if that can't be known, as behind a proxy."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "on", "yes", "true"):
        return False
    hub = urlparse(os.environ.get("HF_ENDPOINT", HUB))
    if hub.scheme in getproxies():
        return True
    answers: list[bool] = []

    def ask() -> None:
        try:
            port = hub.port or (443 if hub.scheme == "https" else 80)
            with socket.create_connection((hub.hostname or "", port), PATIENCE):
                answers.append(True)
        except OSError:
            answers.append(False)

    thread = Thread(target=ask, daemon=True)  # looking up a name has no time limit of its own
    thread.start()
    thread.join(PATIENCE)
    return any(answers)


def not_here(name: str, revision: str | None = None, holding: str = MODEL) -> str:
    """Sentence about a name that is no folder, where the hub can't be asked.

    holding: as `folders_like` takes it.
    """
    at = f"{name} at revision {revision}" if revision else name
    return (
        f"There is no folder {name} here{folders_like(name, holding) or '.'} As a hub model, {at} is not in "
        "the local cache, and the Hugging Face hub can't be reached (no network, or HF_HUB_OFFLINE is set). "
        + (
            f"Download it where there is a network (`hf download {name}`; a plan needs its config.json "
            "alone) and set model.name to that folder."
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
        raise UserError(
            f"{name} is gated: accept its terms at https://huggingface.co/{name}, then run "
            f"`hf auth login` or set HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"The hub's {name} has no revision {revision}.") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"There is no folder {name} here and no model {name} on the Hugging Face hub that you may read"
            f"{folders_like(name) or '.'} Check the spelling ({HUB_ID[:-1]}), or, if it is private, run "
            "`hf auth login` or set HF_TOKEN."
        ) from error
    except RemoteEntryNotFoundError as error:
        raise UserError(
            f"The hub's {name} has no config.json, so it is not a model in Hugging Face's format; name the "
            "model that it was made from."
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise UserError(not_here(name, revision)) from error
