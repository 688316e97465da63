"""Export of a trained model: a Hugging Face folder or an adapter, with a model card; upload to the hub."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import meshtune
from meshtune.addresses import public
from meshtune.data.tokens import id_bound
from meshtune.errors import UserError, expanded
from meshtune.model.adapter import save_adapter
from meshtune.model.pieces import Piece
from meshtune.model.save import in_pieces, save_model, save_pieces
from meshtune.parallel.mesh import World
from meshtune.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """Writes the trained model, by all ranks of a layout together.

    No rank ever holds the whole: each writes its pieces into the files. Adapters, which are small, the main
    rank collects and writes; so it does with a family whose files hold tensors that are made of several
    parameters, which only transformers can write.
    """

    model: PreTrainedModel  # the whole one; its parameters may be on meta
    pieces: Callable[[], Mapping[str, Piece]]  # what this rank writes; together each parameter once
    world: World
    dtype: torch.dtype  # of the weights in the files
    tokenizer: PreTrainedTokenizerBase
    base_name: str  # of the model before training: a hub id, or a local path
    base_digest: str | None  # of its weights; None of random ones, and on ranks other than the main one
    adapter: dict[str, Any] | None  # LoRA's r, alpha, dropout, embeddings; None: a whole model
    recipe: dict[str, str]  # for the card
    stop_ids: tuple[int, ...] = ()  # tokens that end an answer: generation_config.json names them
    push_to: str | None = None  # hub id; None: nothing is uploaded
    private: bool = True  # the repository, if `push` creates it

    def write(self, folder: Path, *, steps: int) -> Path:
        """Write a folder that is whole or absent, and return it; every rank calls it.

        A model or adapter that is there already is replaced; UserError for a folder of anything else. steps:
        how many updates the weights are from, for the card.
        """
        card, world = self.card(steps), self.world
        if self.adapter is None and in_pieces(self.model):
            save_pieces(
                folder, self.model, self.pieces(), self.tokenizer, dtype=self.dtype,
                gather=world.all_gather_object, main=world.main, card=card, stop_ids=self.stop_ids,
            )  # fmt: skip
            return folder
        replaced = self._collect()
        if world.main:
            options: dict[str, Any] = {"card": card, "stop_ids": self.stop_ids}
            if self.adapter is None:
                save_model(folder, self.model, self.tokenizer, **options)
            else:
                base = {"base_name": self.base_name, "base_digest": self.base_digest, **self.adapter}
                save_adapter(folder, self.model, self.tokenizer, **base, **options)
        for before, collected in replaced:
            put(self.model, before, instead_of=collected)
        world.all_gather_object(None)  # all ranks wait until the folder exists
        return folder

    def push(self, run: RunDir) -> str | None:
        """Upload the run's model where asked, from the main rank. Returns a sentence: the address, or why it
        failed and the command that uploads later. The run is finished either way.
        """
        if not self.push_to or not self.world.main:
            return None
        again = f"meshtune export {run.path} {run.path}-upload --push-to {self.push_to}"
        try:
            return f"Uploaded to {push(run.model, self.push_to, private=self.private, again=again)}."
        except UserError as error:
            return str(error)

    def _collect(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Give the main rank's model the values to write; returns (the parameter before, the one with a
        value).
        """
        world, pieces, replaced = self.world, self.pieces(), []
        for name, parameter in list(self.model.named_parameters()):
            if self.adapter is not None and not parameter.requires_grad:
                continue
            piece = pieces.get(name)
            sent = piece and replace(piece, tensor=piece.tensor.detach().to("cpu", self.dtype))
            parts = [part for part in world.gather_object(sent) if part is not None]
            if world.main:
                value = nn.Parameter(joined(parts), parameter.requires_grad)
                replaced.append((parameter, value))
                put(self.model, value, instead_of=parameter)
        return replaced

    def card(self, steps: int) -> str:
        """The model card: front matter that the hub reads, and the recipe as a table."""
        library = "transformers" if self.adapter is None else "peft"
        verb = f"adapted ({kind_of(self.adapter['use_dora'])})" if self.adapter else "fine-tuned"
        rows = "\n".join(f"| {name} | {value} |" for name, value in [*self.recipe.items(), ("steps", steps)])
        base = f"base_model: {hub_id(self.base_name)}\n"
        loading = (
            "The tokenizer here has tokens that the base model lacks. Before peft loads the adapter: "
            f"`base.resize_token_embeddings({id_bound(self.tokenizer)})`.\n\n"
            if self.adapter and self.adapter["embeddings"]
            else ""
        )
        if self.adapter and self.stop_ids:
            loading += (
                "peft takes the stop tokens of the base model. Those of this one: give `generate` "
                "`generation_config=GenerationConfig.from_pretrained(…)` of this folder.\n\n"
            )
        versions = f"transformers {transformers.__version__} and torch {torch.__version__}"
        return (
            f"---\nlibrary_name: {library}\n{base}tags:\n- meshtune\n---\n\n"
            f"# {shown(self.base_name)}, {verb}\n\n"
            f"Written by meshtune {meshtune.__version__} with {versions}.\n\n{loading}"
            f"| setting | value |\n| --- | --- |\n{rows}\n"
        )


def joined(parts: Sequence[Piece]) -> Tensor:
    """The whole tensor that pieces on the CPU make up; a single whole one is not copied."""
    if len(parts) == 1 and tuple(parts[0].tensor.shape) == parts[0].shape:
        return parts[0].tensor
    whole = torch.empty(parts[0].shape, dtype=parts[0].tensor.dtype)
    for block in (block for part in parts for block in part.blocks()):
        block.of(whole).copy_(block.tensor)
    return whole


def put(model: nn.Module, new: nn.Parameter, *, instead_of: nn.Parameter) -> None:
    """Replace the parameter `instead_of` by `new` in place, under all of its names if it is tied."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is instead_of:
                module._parameters[name] = new


def kind_of(use_dora: bool) -> str:
    """Name of the adapters."""
    return "DoRA" if use_dora else "LoRA"


def hub_id(name: str) -> str:
    """A hub id as it is, also of a snapshot in the hub's cache; of another local path the last part."""
    in_cache = re.search(r"/models--([^/]+?)--([^/]+)/snapshots/", name)
    return f"{in_cache[1]}/{in_cache[2]}" if in_cache else shown(name)


def shown(name: str) -> str:
    """A hub id as it is; of an address what `public` leaves, and of a local path only the last part, since
    the rest is private to the machine, also where nothing is there any more.
    """
    if "://" in name:
        return public(name)
    local = name.startswith(("/", ".", "~")) or expanded(name).exists()
    return Path(name).name if local else name


# Upload to the hub #


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
