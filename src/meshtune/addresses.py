"""Addresses without their secrets, what may leave a run's config.yaml, and the names of secrets.

https://user:password@host/rows.jsonl?X-Amz-Signature=4fd…  ->  https://host/rows.jsonl?…
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>`\\]*[^\s'\"<>`\\.,;:!)\]}]")
# Schemes of Azure whose user part is a container, not a secret.
CONTAINERS = ("abfs", "abfss", "wasb", "wasbs", "adl", "az")

# Ends the names of variables with secrets.
SECRET = r"(?i)(?:^|_)(?:TOKEN|SECRET|PASS(?:WORD|WD)?|KEY|KEY_ID|CREDENTIALS?)$"
# Begins a value that is written out: not a number, a path, a placeholder, or a short word.
_BEGIN = (
    r"(?![0-9]{1,9}\b)(?=hf_|sk-|[^\s\"'\\]{3,}[0-9]|[^\s\"'\\]*[0-9][^\s\"'\\]{3}|[^\s\"'\\]{12})"
    r"[A-Za-z0-9!@%^*_]"
)
_NAME = (
    r"(?:[A-Z0-9_]+_)?(?:TOKEN|SECRET|PASS(?:WORD|WD)?|CREDENTIALS?)|[A-Z0-9_]+_(?:KEY|KEY_ID)"
    r"|(?:(?:hf|api|auth|access)_)?token|(?:[a-z]+_)?(?:password|secret)|(?:api|access|secret|private)[_-]key"
)
WRITTEN_OUT = re.compile(
    # NAME=value, NAME: value, "NAME": "value"
    rf"(?<![A-Za-z0-9_$])(?<!\$\{{)({_NAME})[\\\"']*[ ]?[=:][ ]?[\\\"']*{_BEGIN}"
    rf"|name: [\"']?({_NAME})[\"']?\s+value: [\"']?{_BEGIN}"
    rf"|--(token|password|api-key|secret)[= ][\"']?{_BEGIN}"
    r"|\b(hf_|github_pat_|gh[pousr]_|sk-|AKIA)[A-Za-z0-9_-]{16}"
    r"|(\w://)[^/\s:@\"'?#]*:[^/\s@\"'?#${][^/\s@\"'?#]*@"
)


def public(value: Any) -> Any:
    """A text, or a tree of mappings and lists with texts in it, without user parts and queries of addresses.

    Any other value is returned unchanged.
    """
    if isinstance(value, str):
        return ADDRESS.sub(lambda found: _cut(found[0]), value) if "://" in value else value
    if isinstance(value, Mapping):
        return {public(key): public(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [public(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def has_secret(value: Any) -> bool:
    """True if a text, or a tree with texts, has an address that `public` cuts."""
    return public(value) != value


def is_secret(name: str, value: Any) -> bool:
    """True if a variable has the name of a secret and a value, but for a number and the path of a file."""
    harmless = value is None or re.match(r"([0-9.]*|[/~].*)$", str(value)) or "${{" in str(value)
    return not harmless and re.search(SECRET, name) is not None


def secrets(variables: Mapping[str, Any], place: str, remedy: str, *, every: bool = False) -> Iterator[str]:
    """Yield a sentence for each secret that the file would have. remedy: clause with another way for NAME.

    every: all variables with a value are secrets.
    """
    for name, value in variables.items():
        if is_secret(name, value) or (every and value is not None):
            yield f"{place}.{name} would be written into the file; {remedy.replace('NAME', name)}."


def written_out(text: str, place: str) -> Iterator[str]:
    """Yield a sentence for each secret in a text that is to be written. place: the file."""
    for found in WRITTEN_OUT.finditer(text):
        name = next(filter(None, found.groups()))
        what = "The password of an address" if "://" in name else f"The secret {name.removesuffix('_')}"
        yield (
            f"{what} would be written into {place}; leave it out of the settings, and give it as a variable "
            "of the machines."
        )


def _cut(address: str) -> str:
    """One address, or several that are chained by `::`, without secrets."""
    return "::".join(map(_cut_one, address.split("::")))


def _cut_one(address: str) -> str:
    scheme, mark, rest = address.partition("://")
    if not mark:
        return address
    place = re.search(r"[?#]", rest)
    path, query = (rest[: place.start()], rest[place.start()]) if place else (rest, "")
    host, slash, behind = path.partition("/")
    user, _, server = host.rpartition("@")
    kept = host if scheme.lower() in CONTAINERS and ":" not in user else server
    more = f"{query}…" if query and len(rest) > len(path) + 1 else query
    return f"{scheme}{mark}{kept}{slash}{behind}{more}"
