"""Addresses without their secrets, what may leave a run's config.yaml, and the names of secrets.

https://user:password@host/rows.jsonl?X-Amz-Signature=4fd…  ->  https://host/rows.jsonl?…
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>`\\]*[^\s'\"<>`\\.,;:!)\]}]")
# Schemes of Azure whose user part is a container, not a secret.
CONTAINERS = ("abfs", "abfss", "wasb", "wasbs", "adl", "az")

SECRETS = "(?:TOKEN|SECRET|PASS(?:WORD|WD)?|KEY|KEY_ID|CREDENTIALS?)"  # ends the names of secrets
SECRET = f"(?i){SECRETS}$"


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


def secrets(variables: Mapping[str, Any], place: str, remedy: str, named: str = SECRET) -> Iterator[str]:
    """Yield a sentence for each secret that the file would have. remedy: clause with another way for NAME.

    named: pattern of the secrets' names.
    """
    for name, value in variables.items():
        if value is not None and re.search(named, name) and "${{" not in str(value):
            yield f"{place}.{name} would be written into the file; {remedy.replace('NAME', name)}."


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
