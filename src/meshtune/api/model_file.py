"""The configuration that a plan is made of: the model's own, that of a known shape, or of a typical Llama.

model.name ─┬─ folder, or the hub's cache ──────────────────> its config.json
            ├─ the hub, asked once ─────────────────────────> its config.json
            └─ the hub doesn't answer, or the model is gated ─> models.toml, and a sentence about it
--params ─────> models.py, and a sentence with the shape
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from meshtune.errors import UserError, nearest
from meshtune.model.census_cache import config_file
from meshtune.model.hub import NotFromHub
from meshtune.plan.models import by_size, known_config, known_names, typical_config, typical_parameters


@contextmanager
def model_file(name: str, revision: str | None = None) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Give the configuration file of a model, and sentences on it if it is not the model's own.

    Raises UserError for a model that is neither on this machine, nor given by the hub, nor known, and for an
    impossible number of parameters.
    """
    if (parameters := typical_parameters(name)) is not None:
        fields, sentence = typical_config(parameters)
    else:
        try:
            file = config_file(name, revision)
        except NotFromHub as error:
            fields, sentence = _known(name, error)
        else:
            yield file, ()
            return
    with TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(fields), encoding="utf-8")
        yield file, (sentence,)


def _known(name: str, error: NotFromHub) -> tuple[dict, str]:
    """The fields of config.json that models.toml has, and a sentence that reports it.

    error: why the hub gave none; raised, with a remedy, if models.toml has none either.
    """
    fields = known_config(name)
    if fields is None:
        names, short = [*known_names(), *by_size()], "/" not in name
        part = (lambda each: each.rpartition("/")[2]) if short else str
        longer = [each for each in names if part(each).lower().startswith(name.lower())]
        near = longer[:3] or nearest(name, names, part)
        known = f"Without the hub the shape of {' and of '.join(near)} is known. " if near else ""
        size = re.search(r"\d+(?:\.\d+)?[BM](?![a-z])", name, re.IGNORECASE)
        remedy = (
            f"A typical Llama can be planned: meshtune plan --params {size[0].upper() if size else '8B'}."
        )
        raise UserError([*error.problems, known + remedy]) from error
    return fields, (
        f"The shape of {name} is from meshtune's table plan/models.toml: its config.json is not on this "
        f"machine, and {error.reason}."
    )
