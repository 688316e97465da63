"""What a run leaves behind: a Hugging Face folder, or an adapter, that loads anywhere, with a card that says
how it was made.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import meshtune
from meshtune.config import Config
from meshtune.errors import UserError
from meshtune.model.adapter import save_adapter
from meshtune.model.pieces import Piece
from meshtune.model.save import renames, save_model, save_pieces
from meshtune.parallel.apply import Parallel


@dataclass(frozen=True)
class Exporter:
    """Writes the trained model; `adapter` holds LoRA's settings (r, alpha, dropout, target_modules), None for
    a whole model.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    base_name: str
    adapter: dict[str, Any] | None
    recipe: dict[str, str]  # for the card
    stop_ids: tuple[
        int, ...
    ] = ()  # tokens that end an answer: those who load the model shall stop at them too
    push_to: str | None = None
    private: bool = True

    def write(self, folder: Path, *, steps: int) -> Path:
        """A folder that is whole or absent; one that is there already is replaced as a whole.

        `steps` says how many updates the weights are from.
        """
        card = self.card(steps)
        if self.adapter is None:
            save_model(folder, self.model, self.tokenizer, card=card, stop_ids=self.stop_ids)
        else:
            save_adapter(
                folder,
                self.model,
                self.tokenizer,
                base_name=self.base_name,
                card=card,
                stop_ids=self.stop_ids,
                **self.adapter,
            )
        return folder

    def push(self, folder: Path) -> str | None:
        """Upload where asked; returns the address. Raises UserError when the hub refuses (the folder
        stays).
        """
        return push(folder, self.push_to, private=self.private) if self.push_to else None

    def card(self, steps: int) -> str:
        """The model card: front matter that the hub reads, and the recipe as a table."""
        library = "transformers" if self.adapter is None else "peft"
        what = "fine-tuned" if self.adapter is None else "adapted (LoRA)"
        rows = "\n".join(f"| {name} | {value} |" for name, value in [*self.recipe.items(), ("steps", steps)])
        base = "" if Path(self.base_name).exists() else f"base_model: {self.base_name}\n"
        resized = (
            "The tokenizer here has tokens that the base model lacks. Before peft loads the adapter: "
            "`base.resize_token_embeddings(len(tokenizer))`.\n\n"
            if self.adapter and self.adapter["embeddings"]
            else ""
        )
        return (
            f"---\nlibrary_name: {library}\n{base}tags:\n- meshtune\n---\n\n"
            f"# {shown(self.base_name)}, {what}\n\n"
            f"Trained with meshtune {meshtune.__version__}.\n\n{resized}"
            f"| setting | value |\n| --- | --- |\n{rows}\n"
        )


@dataclass(frozen=True, kw_only=True)
class SharedExporter(Exporter):
    """The same by all ranks of a layout; `model` is the whole one, its parameters on meta.

    No rank ever holds the model: each writes its pieces, in `dtype`, into the files. Adapters, which are
    small, the main rank gets and writes; so it does, tensor by tensor, for a family whose checkpoints have
    other tensors than its modules, which transformers alone can write.
    """

    parallel: Parallel
    dtype: torch.dtype

    def write(self, folder: Path, *, steps: int) -> Path:
        world = self.parallel.world
        if self.adapter is None and not renames(self.model):
            save_pieces(
                folder, self.model, self.parallel.own_pieces(), self.tokenizer, dtype=self.dtype,
                gather=world.gather, main=world.main, card=self.card(steps), stop_ids=self.stop_ids,
            )  # fmt: skip
            return folder
        replaced = self._collect()
        if world.main:
            super().write(folder, steps=steps)
        for on_meta, given in replaced:
            put(self.model, on_meta, instead_of=given)
        world.gather(None)  # nobody goes on before it is there
        return folder

    def push(self, folder: Path) -> str | None:
        return super().push(folder) if self.parallel.world.main else None

    def _collect(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Give the main rank's model the values to write; returns (what was on meta, what has a value)."""
        world, own, given = self.parallel.world, self.parallel.own_pieces(), []
        for name, parameter in list(self.model.named_parameters()):
            if self.adapter is not None and not parameter.requires_grad:
                continue
            piece = own.get(name)
            sent = piece and Piece(piece.shape, piece.offsets, piece.tensor.detach().to("cpu", self.dtype))
            parts = world.collect(sent)
            if world.main:
                value = torch.empty(parameter.shape, dtype=self.dtype)
                for part in parts:
                    if part is not None:
                        part.of(value).copy_(part.tensor)
                given.append((parameter, nn.Parameter(value, parameter.requires_grad)))
                put(self.model, given[-1][1], instead_of=parameter)
        return given


def put(model: nn.Module, new: nn.Parameter, *, instead_of: nn.Parameter) -> None:
    """A parameter wherever another one is: under each of its names, where it is tied."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is instead_of:
                module._parameters[name] = new


def recipe(config: Config) -> dict[str, str]:
    """What a reader of the card wants to know of a run."""
    train, data = config.train, config.data
    return {
        "base model": shown(config.model.name),
        "method": config.method
        if config.method == "full"
        else f"LoRA r {config.lora.r}, alpha {config.lora.alpha:g}",
        "data": ", ".join(shown(source.path) for source in data.train),
        "labelled": data.train_on,
        "sequence length": f"{data.seq_len}{', packed' if data.packing else ''}",
        "global batch": f"{config.global_batch_size} sequences",
        "learning rate": f"{train.learning_rate:g}, {train.lr_scheduler}",
        "optimizer": f"AdamW, betas {train.adam_betas}, weight decay {train.weight_decay:g}",
        "precision": train.precision,
        "seed": str(train.seed),
    }


def shown(name: str) -> str:
    """A hub id as it is; of a local path only its last part, which says nothing of the machine."""
    return Path(name).name if Path(name).expanduser().exists() else name


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Upload a folder to the hub; returns its address. Raises UserError when the hub refuses."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        return str(
            api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Trained with meshtune")
        )
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{folder} is complete, but could not be uploaded to {repository}: {reason} Log in "
            "(hf auth login), check the name, and run: meshtune export RUN FOLDER --push-to NAME"
        ) from error
