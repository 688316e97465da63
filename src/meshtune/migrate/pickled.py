"""Read a Trainer's training_args.bin without running anything: a pickle may call whatever it can name.

Every name in the pickle becomes an inert `Stub`, and nothing is imported. A stub keeps what it was called
with and given as state: an enum is its value, and the arguments are the state of the outermost object.
"""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

from meshtune.errors import UserError

MOST_BYTES = 2**24
PLAIN = (str, int, float, bool)


class Stub:
    """Stand-in for any class or function that a pickle names."""

    arguments: tuple[Any, ...]
    state: dict[str, Any]

    def __new__(cls, *arguments: Any, **named: Any) -> "Stub":  # pickles skip __init__
        stub = super().__new__(cls)
        stub.arguments, stub.state = arguments, named
        return stub

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Take what `__new__` has kept."""

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, dict) else {}

    def append(self, item: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class Inert(pickle.Unpickler):
    """Unpickler that resolves no name."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (Stub,), {})

    def persistent_load(self, pid: Any) -> None:
        return None


def training_arguments(path: Path) -> dict[str, Any]:
    """Read the plain values of a training_args.bin; objects among them are left out, enums are their values.

    Raises UserError if it is no such file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            if archive.getinfo(name).file_size > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
            root = Inert(io.BytesIO(archive.read(name))).load()
        if not isinstance(root, Stub) or "output_dir" not in root.state:
            raise ValueError("it holds no TrainingArguments")
    except Exception as error:  # a broken archive or pickle raises nearly anything
        reason = str(error) or type(error).__name__
        raise UserError(
            f"{path} is no training_args.bin: {reason}. Give the arguments as JSON instead."
        ) from error
    return {key: plain(value) for key, value in root.state.items() if plain(value) is not None}


def plain(value: Any) -> Any:
    """The value if it is plain, an enum's value, None for other objects."""
    if isinstance(value, Stub):
        value = value.arguments[0] if len(value.arguments) == 1 else None
    if isinstance(value, list):
        return [item for item in map(plain, value) if item is not None]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if plain(item) is not None}
    return value if isinstance(value, PLAIN) else None
