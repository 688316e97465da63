"""Count the models of plan/models.toml, whole and with LoRA, into src/meshtune/model/counts.xz: ten minutes.

    python scripts/model_counts.py

A plan of one of them then needs neither torch nor transformers. Run it after a change of model/ that changes
counts, or of models.toml; tests compare.
"""

import hashlib
import json
import lzma
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from meshtune.model import census_cache
from meshtune.model.census_cache import COUNTS, LoraShape, Variant, build_and_count, inputs_of
from meshtune.plan.models import known_config, known_names, tables


def counted() -> Iterator[str]:
    """Yield a line for each model and variant."""
    shapes = {json.dumps(known_config(name)): name for name in (*known_names(), *tables())}
    with TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        for shape, name in shapes.items():
            file.write_text(shape, encoding="utf-8")
            for variant in (Variant(), Variant(lora=LoraShape())):
                inputs = inputs_of(file, variant)
                assert inputs
                numbers = json.dumps(asdict(build_and_count(name, file, variant)), separators=(",", ":"))
                yield f"{hashlib.sha256(inputs.encode()).hexdigest()}{numbers}\n"


if __name__ == "__main__":
    text = "".join(sorted(counted()))
    Path(census_cache.__file__).with_name(COUNTS).write_bytes(lzma.compress(text.encode(), preset=9))
