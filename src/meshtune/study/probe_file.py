"""The cluster file of a probe: what `cluster: my-cluster.toml` reads, and the figures behind it.

[cluster]    settings of the cluster section
[kind]       the device, in hardware.toml's form
[measured]   versions, date, machine, and every figure with its spread
[calibrated] by `meshtune calibrate` alone: what was fitted, and the runs
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.study.probe_figures import MARKED, REFUSED, SPREAD, Figure
from meshtune.study.probe_kind import Device, Fitted


def document_of(
    figures: Sequence[Figure], device: Device, fitted: Fitted, provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """The tables of the file, which `probe --json` prints too.

    provenance: versions, date and machine, as [measured] has them.
    """
    name = f"this-{device.like.name if device.known or device.processor else 'gpu'}"
    cluster: dict[str, Any] = {"gpu": name, "gpus_per_node": device.ranks}
    if not device.processor:
        cluster |= {"gpus": device.ranks}
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for one in figures:
        by_kind.setdefault(one.kind, []).append(one.as_dict())
    network = f"The network, which was not measured, is that of {device.like.name}."
    source = f"meshtune probe, {provenance['date']}, {device.name}. {network}"
    return {
        "cluster": cluster,
        "kind": fitted.table | {"source": source},
        "measured": {
            **provenance,
            "repeats": max(len(one.repeats) for one in figures),
            "spread": SPREAD,
            "marked_above": MARKED,
            "refused_above": REFUSED,
            "marked": [f"{one.name}: {one.spread:.0%}" for one in figures if one.marked],
            "refused": [f"{one.name}: {one.spread:.0%}" for one in figures if one.refused],
            "not_measured": list(fitted.borrowed),
            "off": fitted.off,
            "figures": by_kind,
        },
    }


def text_of(document: Mapping[str, Any], file: str) -> str:
    """The document as TOML. file: its name, for the first line."""
    lines = [f"# `cluster: {file}` in a config, or cluster={file} on the command line, plans with it."]
    if by := document.get("measured"):
        lines.insert(0, f"# Measured by meshtune {by['meshtune']} on {by['date']}: {by['device']}.")
    for name, table in document.items():
        lines += ["", *_table(name, table)]
    return "\n".join(lines) + "\n"


def _table(name: str, table: Mapping[str, Any]) -> list[str]:
    """Lines of a table: plain values, then its tables and lists of tables."""
    lines, after = [f"[{name}]"], []
    for key, value in table.items():
        if key in ("efficiency", "figures"):
            after += ["", *_table(f"{name}.{key}", value)]
        elif key == "shared":
            after += [line for one in value for line in ("", *_table(f"[{name}.{key}]", one))]
        else:
            lines.append(f"{key} = {_value(value)}")
    return lines + after


def _key(key: str) -> str:
    return json.dumps(key) if key[:1].isdigit() else key


def _value(value: Any) -> str:
    """A value in TOML; a list of tables or texts has a line for each."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {_value(one)}' for key, one in value.items())} }}"
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], Mapping | str) and len(value) > 1:
            return "[\n" + "".join(f"    {_value(one)},\n" for one in value) + "]"
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False)
