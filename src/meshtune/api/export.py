"""Export: write a run's model as a Hugging Face folder."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshtune.errors import UserError, expanded
from meshtune.units import notice

BASE = ("model.name", "model.revision")  # settings of an export: where the base is now


def exported(
    name: Path,
    to: Path,
    *,
    merge: bool,
    step: int | None,
    push_to: str | None,
    overrides: Sequence[str] = (),
) -> Path:
    """Write the folder `to` from `name`, a run or an adapter folder, upload it if asked, and return it.

    merge: add the LoRA adapter to the base model's weights, in their dtype; else an adapter is written as an
    adapter. step: the checkpoint to take instead of model/; None: model/, or, if there is none, the newest
    whole checkpoint. push_to: a hub id; None: no upload. A run's model/ and an adapter folder are copied as
    they are, anything else is loaded on the CPU. overrides: section.key=value of BASE, for a base that has
    moved.

    Raises UserError if `to` exists and is not an empty folder, if `name` holds no model, if there is nothing
    to merge, and if the hub refuses (`to` stays).
    """
    to = expanded(to)
    if others := [word for word in overrides if word.partition("=")[0].strip() not in BASE]:
        raise UserError(f"{others[0]}: an export has no settings but {' and '.join(BASE)}; leave it out.")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} exists and is not empty; name a new folder.")
    import torch

    from meshtune.api.build import exporter_of
    from meshtune.api.target import open_model, target_of
    from meshtune.layout import Layout
    from meshtune.model.load import load_config
    from meshtune.model.lora import merge_lora
    from meshtune.model.pieces import whole_pieces
    from meshtune.parallel.mesh import join
    from meshtune.precision import UNMIXED
    from meshtune.train.export import push

    target = target_of(str(name), overrides, step=step)
    config = target.config
    adapted = target.adapted or (target.step is not None and config.adapts)
    if merge and not adapted:
        raise UserError(f"--merge: {name} holds no LoRA adapter; leave it out.")
    if target.folder and not merge:  # as it is
        shutil.copytree(target.folder, to, dirs_exist_ok=True)
    else:
        # in host memory: what several GPUs trained may fit on none of them
        base, dtype, precision = config.model, None, None
        if merge and base.init == "pretrained":  # float16, in which nothing is computed, is merged in fp32
            read = load_config(base.name, **base.access)
            stored = str(read.dtype).removeprefix("torch.")
            dtype, precision = getattr(torch, stored, None), UNMIXED.get(stored, "fp32")
        model, tokenizer, encoder = open_model(target, "cpu", merging=merge, precision=precision)
        if merge and (changed := merge_lora(model, dtype)) is not None:
            written = str(dtype or model.dtype).removeprefix("torch.")
            notice(
                f"The adapter is merged into the weights as they were trained, from 4 bits; rounding to "
                f"{written} changes them by {changed:.2%} of their norm."
            )
        ended = target.run.rows("end") if target.run else []  # one that was stopped wrote no model
        exporter = exporter_of(
            config, model, join(Layout(), model.device), pieces=lambda: dict(whole_pieces(model)),
            dtype=dtype or model.dtype, tokenizer=tokenizer, stop_ids=encoder.stop_ids,
        )  # fmt: skip
        steps = target.step or next((row["model_step"] for row in ended[::-1] if "model_step" in row), 0)
        replace(exporter, adapter=None if merge else exporter.adapter).write(to, steps=steps)
    if push_to:
        push(to, push_to, private=config.hub.private, again=f"hf upload {push_to} {to}")
    return to
