"""Names of models: local paths or ids of the Hugging Face hub, and the hub's errors. Without torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshtune.errors import UserError, check_file, expanded


def local_path(name: str) -> Path | None:
    """Return the local path `name` if it exists; None if it may be an id of the hub.

    Raises UserError for a name that can be neither, and for a folder with pipes or devices in it.
    """
    path = expanded(name)
    if path.exists():
        for file in path.iterdir() if path.is_dir() else [path]:
            if not file.is_dir():
                check_file(file)
        return path
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"There is no folder {name}.")
    return None


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

    at = f"{name} at revision {revision}" if revision else name
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
            f"There is no folder {name} here and no model {name} on the Hugging Face hub that you may read; "
            f"check the spelling, or, if it is private, run `hf auth login` or set HF_TOKEN."
        ) from error
    except RemoteEntryNotFoundError as error:
        raise UserError(
            f"The hub's {name} has no config.json, so it is not a model in Hugging Face's format; name the "
            "model that it was made from."
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise UserError(
            f"There is no folder {name} here, {at} is not in the local cache, and the Hugging Face hub can't "
            f"be reached (no network, or HF_HUB_OFFLINE is set). Download it where there is a network "
            f"(`hf download {name}`; a plan needs its config.json alone) and set model.name to that folder."
        ) from error
