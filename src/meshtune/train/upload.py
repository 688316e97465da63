"""Upload a model folder to the Hugging Face hub, to a repository that was tried before training."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshtune.errors import UserError


def try_repository(repository: str, *, private: bool) -> None:
    """Create the repository if it is missing. Raises UserError if this login can't write to it.

    private: of a repository that is created; one that is there stays as it is.
    """
    from huggingface_hub import HfApi

    remedy = "Log in (hf auth login) or check the name; or leave hub.push_to out and upload later by export."
    with refusal(f"hub.push_to={repository} can't be written", remedy):
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        api.auth_check(repository, write=True)  # create_repo takes one of others that is there


def push(folder: Path, repository: str, *, private: bool, again: str) -> str:
    """Upload a folder; returns its address. Raises UserError when the hub refuses.

    private: as `try_repository` takes it. again: command that tries once more.
    """
    from huggingface_hub import HfApi

    with refusal(f"{folder} is complete, but was not uploaded to {repository}", f"To upload it: {again}"):
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        return str(
            api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Trained with meshtune")
        )


@contextmanager
def refusal(clause: str, remedy: str) -> Iterator[None]:
    """Turn any error, of the hub, its login or the network, into a UserError: clause, reason, remedy."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].strip()
        raise UserError(f"{clause}: {reason.rstrip('.')}. {remedy}") from error
