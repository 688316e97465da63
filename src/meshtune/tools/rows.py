"""Rows of other trainers as sources of ours, and back: where they are, their split, format and columns.

axolotl's datasets, LLaMA-Factory's names in dataset_info.json, TRL's hub ids, torchtune's dataset components.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshtune.config import Config
from meshtune.objectives import OBJECTIVES, Rows
from meshtune.sections import HUB_FILES, SourceConfig, is_one_file
from meshtune.tools.job import Conversion, Converted, Job, NoCounterpart, Refused, is_off, listed, short
from meshtune.tools.planned import column_name, columns_of, file_kind, is_file, row_format
from meshtune.tools.table import toml

Source = dict[str, Any]
CONTENT = {"role": "content", "from": "value"}  # key of the role in a message -> that of its text
ALPACA_TEMPLATE = {"data.chat_template": "alpaca"}
ALPACA_REMARK = (
    "without the first line (Below is an instruction ...) and the heading ### Input: of {tool}'s prompt"
)
LOADERS = ("json", "csv", "parquet", "text", "arrow", "jsonl")  # names of readers in the place of a path
KINDS = {"messages": ("messages",), "prompt-completion": ("prompt", "completion"), "text": ("text",)}
ALPACA = {"alpaca_dataset", "alpaca_cleaned_dataset"}
PROMPTED = ALPACA | {"grammar_dataset", "samsum_dataset"}  # builders that write a prompt around the rows
HELD = {"answers": "prompts with one answer", "pairs": "pairs", "judged": "answers that are judged"}
OWN_FORMAT = "rows are asked by data.separator or the chat template, not by a format of their own"
NEW_SHARE = "a share (weight) is drawn anew in each epoch"


def placed(path: str, data_files: Any = None, name: Any = None) -> list[str]:
    """Paths of ours for a hub id or folder, files in it, and a configuration of it."""
    files = listed(data_files) if data_files else []
    if files and path in LOADERS:
        return files
    if files:
        return [f"{HUB_FILES}{path}/{file}" for file in files]
    return [f"{path}:{name}" if name else path]


def source(
    path: str, *, split: Any = None, kind: str = "", columns: Mapping[str, Any] = {}, **more: Any
) -> Source:
    """A source of ours without what is so by default. columns: ours -> theirs."""
    renamed = {ours: theirs for ours, theirs in columns.items() if theirs and theirs != ours}
    split = None if is_one_file(path) else split
    made = {"path": path, "split": split, "format": kind, "columns": renamed, **more}
    return {key: value for key, value in made.items() if value}


def joined(remarks: Iterable[str]) -> str:
    """Remarks as one, each once."""
    return "; ".join(dict.fromkeys(filter(None, remarks)))


def lost_split(split: Any, made: Source) -> str:
    """Remark on a split, other than train, that a source of ours does not have: it is a single file."""
    lost = split not in (None, "", "train") and "split" not in made
    return f"all rows of the file {made['path']}, not split {split}" if lost else ""


def evaluates(job: Job) -> bool:
    return short(job.value("eval_strategy", "evaluation_strategy")) != "no"


# axolotl #


def axolotl_train(value: Any, job: Job) -> Converted:
    converted = axolotl_sources("data.train", value, has_alpaca_prompts(job), job.objective)
    if job.objective != "sft":
        return converted._replace(settings=converted.settings | prompt_of_types(value))
    if not has_alpaca_prompts(job):
        return converted
    remark = joined([converted.remark, ALPACA_REMARK.format(tool="axolotl")])
    return Converted(converted.settings | ALPACA_TEMPLATE, remark, converted.lost)


def axolotl_eval(value: Any, job: Job) -> Converted:
    for rows in listed(value):
        for path in placed(str(rows["path"]), rows.get("data_files")):
            if is_one_file(path) and rows.get("split") not in (None, "train"):
                raise NoCounterpart(
                    f"{path} is a file without a split {rows['split']}; write these rows to another file, "
                    "or set data.eval_split"
                )
    converted = axolotl_sources("data.eval", value, has_alpaca_prompts(job), job.objective)
    return converted._replace(lost=joined([converted.lost, unread(value)]))


def has_alpaca_prompts(job: Job) -> bool:
    """True if all of an axolotl file's rows are of type alpaca, which has a prompt of its own."""
    rows = [*listed(job.value("datasets", default=[])), *listed(job.value("test_datasets", default=[]))]
    return {str(each.get("type")) if isinstance(each, Mapping) else "" for each in rows} == {"alpaca"}


def axolotl_pretraining(value: Any, job: Job) -> Converted:
    rows = [entry if isinstance(entry, Mapping) else {"path": entry} for entry in listed(value)]
    rows = [{"type": "completion", "field": row.get("text_column"), **row} for row in rows]
    for row in rows:
        row["type"] = "completion" if row["type"] == "pretrain" else row["type"]
    converted = axolotl_sources("data.train", rows)
    settings = converted.settings | {"data.streaming": True, "data.train_on": "all"}
    return Converted(settings, converted.remark, joined([converted.lost, unread(value)]))


def axolotl_sources(setting: str, value: Any, alpaca: bool = False, objective: str = "sft") -> Converted:
    """Sources of axolotl's data sets. alpaca: data.chat_template writes the prompt of rows of that type."""
    sources: list[Source] = []
    remarks: list[str] = []
    lost: list[str] = []
    for rows in listed(value):
        kind, columns, left = axolotl_format(rows) if objective == "sft" else axolotl_answers(rows, objective)
        name = str(rows.get("type"))
        if name.startswith("alpaca") and not (name == "alpaca" and alpaca):
            left = f"without the prompt of {name} rows: set data.chat_template"
        lost.append(left)
        roles = {
            theirs: ours
            for ours, names in (rows.get("roles") or {}).items()
            for theirs in listed(names)
            if theirs != ours
        }
        files, split = rows.get("data_files"), rows.get("split")
        plain = split == "train" and (setting == "data.train" or files or rows.get("ds_type"))
        for path in placed(str(rows["path"]), files, rows.get("name")):
            sources.append(
                source(path, split=None if plain else split, kind=kind, columns=columns, roles=roles)
            )
            remarks.append(lost_split(split, sources[-1]))
    return Converted({setting: sources}, joined(remarks), joined(lost))


READ = """
path data_files name ds_type split type text_column conversation field field_messages field_tools roles
message_property_mappings message_field_role message_field_content roles_to_train train_on_eos train_on_eot
"""  # keys of pretraining_dataset and test_datasets


def unread(value: Any) -> str:
    """Name the keys of pretraining_dataset or test_datasets that nothing reads, as lost."""
    sections = [each for each in listed(value) if isinstance(each, Mapping)]
    read = READ.split()
    left = [key for rows in sections for key, given in rows.items() if key not in read and not is_off(given)]
    return f"without {', '.join(dict.fromkeys(left))}" if left else ""


def axolotl_format(rows: Mapping[str, Any]) -> tuple[str, dict[str, Any], str]:
    """(Format, our columns -> theirs, what is lost) of one of axolotl's data sets."""
    kind = rows.get("type")
    if "type" in rows and kind in (None, ""):  # axolotl takes them for tokens
        return "tokens", {}, ""
    if isinstance(kind, Mapping):
        columns = {name: kind.get(f"field_{name}") for name in ("instruction", "output", "input", "system")}
        return "alpaca", columns, "" if kind.get("format") else OWN_FORMAT  # the key itself is named
    name = str(kind or "chat_template").partition(".")[0].partition(":")[0]
    if name in ("chat_template", "sharegpt"):
        return axolotl_messages(rows, shared=name == "sharegpt")
    if name == "completion":
        return "text", {"text": rows.get("field")}, ""
    if name.startswith("alpaca"):
        return "alpaca", {}, ""
    return "", {}, f"rows of type {kind} are read by their columns; meshtune data shows how"


def axolotl_messages(rows: Mapping[str, Any], shared: bool) -> tuple[str, dict[str, Any], str]:
    """`axolotl_format` of conversations. shared: in ShareGPT's form, unless the rows say otherwise."""
    names = rows.get("message_property_mappings") or {}
    role = names.get("role") or rows.get("message_field_role") or ("from" if shared else "role")
    content = names.get("content") or rows.get("message_field_content")
    lost = ""
    if role not in ("role", "from") or content not in (None, CONTENT.get(role)):
        lost = f"messages have role and content, or from and value, not {role} and {content}"
    elif rows.get("conversation"):
        lost = f"without the prompt {rows['conversation']}: set data.chat_template"
    field, tools = rows.get("field_messages"), {"tools": rows.get("field_tools")}
    if role == "from":
        unnamed = "conversations" if shared else "messages"
        return "sharegpt", {"conversations": field or unnamed} | tools, lost
    return "messages", {"messages": field} | tools, lost


PAIR = ("prompt", "system", "chosen", "rejected")
JUDGED = ("prompt", "system", "completion", "label")


def axolotl_answers(rows: Mapping[str, Any], objective: str) -> tuple[str, dict[str, Any], str]:
    """`axolotl_format` of preferences: pairs of answers, or answers that are judged."""
    kind = rows.get("type") or "passthrough"
    fields = JUDGED if objective == "kto" else PAIR
    if isinstance(kind, Mapping):
        return "", {name: kind.get(f"field_{name}") for name in fields}, OWN_FORMAT
    template, _, form = str(kind).partition(".")
    if template == "bradley_terry":  # rows of a reward model, by the tokenizer's template or Llama 3's
        return "", {"prompt": "input"}, ""
    if template == "chat_template" and form != "argilla_chat" and objective not in ("kto", "orpo"):
        columns = {name: rows.get(f"field_{name}") for name in ("messages", "chosen", "rejected")}
        return "messages", columns, axolotl_messages(rows, shared=False)[2]
    if objective == "kto" and form == "argilla_chat":
        return "messages", {"messages": "completion"}, ""
    known = toml("axolotl")["answers"]
    form = form or (template if template in known else "default")
    if form not in known or template == "zephyr":
        return "", {}, f"rows of type {kind} are read by their columns; meshtune data shows how"
    columns = {} if template == "chat_template" else known[form]
    return "", {name: theirs for name, theirs in columns.items() if name in fields}, ""


def prompt_of_types(value: Any) -> dict[str, Any]:
    """The chat template that all types of axolotl's preferences write: chatml.intel has ChatML."""
    names = {str(rows.get("type")).removeprefix("bradley_terry.").partition(".")[0] for rows in listed(value)}
    return {"data.chat_template": names.pop()} if len(names) == 1 and names <= {"chatml", "llama3"} else {}


def axolotl_rows(config: Config, source: SourceConfig) -> dict[str, Any]:
    """A source as one of axolotl's data sets."""

    def column(name: str) -> str:
        return column_name(config.data, source, name)

    rows: dict[str, Any] = {"path": source.path}
    if is_file(source):
        rows["ds_type"] = file_kind(source)
    if source.split or is_file(source):
        rows["split"] = source.split or "train"
    asked = "{instruction}" + config.data.separator
    prompter = {"format": asked, "no_input_format": asked}
    match row_format(config.data, source):
        case "text":
            return rows | {"type": "completion", "field": column("text")}
        case "messages" | "sharegpt" as kind:
            shared = kind == "sharegpt"
            rows |= {"type": "chat_template", "field_messages": column("conversations" if shared else kind)}
            if shared:
                rows["message_property_mappings"] = {"role": "from", "content": "value"}
            if "tools" in columns_of(config.data, source):
                rows["field_tools"] = column("tools")
            if roles := config.data.roles if source.roles is None else source.roles:
                usual = {"human": "user", "gpt": "assistant"} if shared else {}  # which `roles` replaces
                roles = {**usual, **roles}
                rows["roles"] = {
                    ours: [name for name in roles if roles[name] == ours] for ours in roles.values()
                }
            return rows
        case "alpaca":
            known = ("instruction", "output", "input", "system")
            given = [name for name in known if name != "system" or name in columns_of(config.data, source)]
            names = {f"field_{name}": column(name) for name in given}
            prompter["format"] = "{instruction}\n{input}" + config.data.separator
        case _:
            names = {"field_instruction": column("prompt"), "field_output": column("completion")}
    return rows | {"type": names | prompter}


# LLaMA-Factory #


def llama_factory_sources(setting: str, value: Any, job: Job) -> Converted:
    folder = str(job.value("dataset_dir", default="data"))
    found = job.read(f"{folder}/dataset_info.json")
    names = [name.strip() for name in (value.split(",") if isinstance(value, str) else value)]
    if found is None and folder != "ONLINE":
        remark = f"{folder}/dataset_info.json is not here, which says where these are; write their paths"
        return Converted({setting: [f"{folder}/{name}.json" for name in names]}, remark)
    try:
        described = json.loads(found.read_text(encoding="utf-8")) if found else {}
    except ValueError as error:
        raise Refused(f"{found}, which describes the data sets, is not JSON: {error}.") from None
    sources: list[Source] = []
    remarks: list[str] = []
    for name in names:
        entry = described.get(name)
        if entry is None:
            sources.append(source(name if found is None else f"{folder}/{name}.json"))
            if found is not None:
                remarks.append(f"{folder}/dataset_info.json does not describe {name}; write its path")
            continue
        columns = entry.get("columns", {})
        there = "pairs" if entry.get("ranking") else "judged" if "kto_tag" in columns else "answers"
        check_rows(f"The rows of dataset {name}", there, job)
        if entry.get("num_samples"):
            remarks.append(f"{name}: all rows, not {entry['num_samples']}; data.max_samples takes the first")
        made = llama_factory_source(entry, f"{found.parent}/" if found else "")
        if job.value("stage") == "pt":  # its text is what prompts are otherwise
            made |= {"format": "text", "columns": {"text": columns.get("prompt", "instruction")}}
        sources.append(made)
    return Converted({setting: sources}, "; ".join(remarks))


def llama_factory_source(entry: Mapping[str, Any], folder: str) -> Source:
    """A source of ours for an entry of dataset_info.json. folder: that the files are in."""
    hub = entry.get("hf_hub_url") or entry.get("ms_hub_url") or entry.get("om_hub_url")
    path = placed(str(hub), None, entry.get("subset"))[0] if hub else f"{folder}{entry['file_name']}"
    columns, tags, split = entry.get("columns", {}), entry.get("tags", {}), entry.get("split")
    more = {"system": columns.get("system"), "tools": columns.get("tools")}
    named = {"user": "user", "assistant": "assistant", "system": "system", "observation": "tool"}
    roles = {
        tags[f"{theirs}_tag"]: ours
        for theirs, ours in named.items()
        if tags.get(f"{theirs}_tag", ours) != ours
    }
    answers = {"output": "response"}
    if "kto_tag" in columns:
        more["label"] = columns["kto_tag"]
    if entry.get("ranking"):
        more, answers = {**more, "chosen": columns.get("chosen"), "rejected": columns.get("rejected")}, {}
    if entry.get("formatting", "alpaca") == "alpaca":
        theirs = {"instruction": "prompt", "input": "query", "history": "history"} | answers
        names = {ours: columns.get(name) for ours, name in theirs.items()}
        return source(path, split=split, kind="alpaca", columns=names | more)
    messages = columns.get("messages", "conversations")
    if tags.get("role_tag", "from") != "from" or entry["formatting"] == "openai":
        return source(path, split=split, kind="messages", columns={"messages": messages} | more, roles=roles)
    return source(path, split=split, kind="sharegpt", columns={"conversations": messages} | more, roles=roles)


OPENAI_TAGS = {
    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
    "observation_tag": "tool", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip


def llama_factory_rows(config: Config, source: SourceConfig) -> dict[str, Any]:
    """A source as an entry of dataset_info.json: where it is, its format and its names of columns."""

    def their_columns(**columns: str) -> dict[str, str]:
        columns |= {name: name for name in ("system", "tools") if name in columns_of(config.data, source)}
        return {theirs: column_name(config.data, source, ours) for theirs, ours in columns.items()}

    rows: dict[str, Any] = {"file_name" if is_file(source) else "hf_hub_url": source.path}
    if source.split:
        rows["split"] = source.split
    match row_format(config.data, source):
        case "text":
            return rows | {"columns": their_columns(prompt="text")}
        case "messages":
            tagged = {"columns": their_columns(messages="messages"), "tags": OPENAI_TAGS}
            return rows | {"formatting": "sharegpt"} | tagged
        case "sharegpt":
            return rows | {"formatting": "sharegpt", "columns": their_columns(messages="conversations")}
        case "alpaca":
            return rows | {"columns": their_columns(prompt="instruction", query="input", response="output")}
    return rows | {"columns": their_columns(prompt="prompt", response="completion")}


def dataset_info(config: Config) -> dict[str, Any]:
    """LLaMA-Factory's dataset_info.json: train_0, … and eval_0, …"""
    return {
        f"{name}_{index}": llama_factory_rows(config, source)
        for name, sources in (("train", config.data.train), ("eval", config.data.eval))
        for index, source in enumerate(sources)
    }


# TRL #


def trl_dataset(value: Any, job: Job) -> Converted:
    if not job.on("dataset_name"):
        raise NoCounterpart("the file has no dataset_name; set data.train")
    path = placed(str(job.value("dataset_name")), None, job.value("dataset_config"))[0]
    if is_one_file(path):
        remark = "a file has no test split: name held-out rows in data.eval, or set data.eval_split"
        split = job.on("test_split_size") or not evaluates(job)
        return Converted({"data.train": [source(path)]}, "" if split else remark)
    split = job.value("dataset_train_split")
    settings = {"data.train": [source(path, split=None if split == "train" else split)]}
    if job.on("eval_strategy", "evaluation_strategy"):
        settings["data.eval"] = [source(path, split=job.value("dataset_test_split", default="test"))]
    return Converted(settings)


def trl_mixture(value: Any, job: Job) -> Converted:
    sources: list[Source] = []
    remarks: list[str] = []
    for rows in value:
        refuse_pairs(rows.get("columns"), job)
        folder = f"{rows['path']}/{rows['data_dir']}" if rows.get("data_dir") else rows["path"]
        for path in placed(folder, rows.get("data_files"), rows.get("name")):
            sources.append(source(path, split=rows.get("split"), weight=rows.get("fraction")))
            remarks.append(lost_split(rows.get("split"), sources[-1]))
    return Converted({"data.train": sources}, joined(remarks))


def handbook_mixer(value: Any, job: Job) -> Converted:
    """The alignment handbook's {path: share of the rows}, with the same splits for all."""
    if wrong := {path: share for path, share in value.items() if not 0 <= float(share) <= 1}:
        raise ValueError(f"shares are from 0 to 1: {wrong}")
    splits = listed(job.value("dataset_splits", default=["train", "test"]))
    names = listed(job.value("dataset_configs", default=[])) or [None] * len(value)
    settings: dict[str, list[Source]] = {"data.train": [], "data.eval": []}
    remarks: list[str] = []
    for (folder, share), name in zip(value.items(), names, strict=True):
        path = placed(folder, None, name)[0]
        for split in splits:
            if "train" in split and float(share):
                weight = float(share) if float(share) < 1 else None
                settings["data.train"].append(source(path, split=split, weight=weight))
                remarks += [NEW_SHARE if weight else "", lost_split(split, settings["data.train"][-1])]
            elif "test" in split and (job.on("do_eval") or evaluates(job)) and not is_one_file(path):
                settings["data.eval"].append(source(path, split=split))
    return Converted({key: made for key, made in settings.items() if made}, joined(remarks))


def handbook_mixture(value: Any, job: Job) -> Converted:
    """Data sets of Open R1, each with a share of its rows (weight) and the columns that are kept."""
    sources: list[Source] = []
    remarks: list[str] = []
    for rows in value["datasets"]:
        columns = listed(rows.get("columns") or [])
        refuse_pairs(columns, job)
        fitting = (kind for kind, names in KINDS.items() if {*names} <= {*columns})
        kind = next(fitting, "") if job.objective == "sft" else ""
        share = rows.get("weight")
        weight = None if share is None or float(share) == 1 else float(share)
        for path in placed(str(rows["id"]), None, rows.get("config")):
            sources.append(source(path, split=rows.get("split"), kind=kind, weight=weight))
            remarks += [NEW_SHARE if weight else "", lost_split(rows.get("split"), sources[-1])]
    held = {"data.eval_split": value["test_split_size"]} if value.get("test_split_size") else {}
    return Converted({"data.train": sources, **held}, joined(remarks))


def refuse_pairs(columns: Any, job: Job) -> None:
    if "rejected" in (columns or ()) and job.objective == "sft":
        check_rows(f"The rows with the columns {', '.join(columns)}", "pairs", job)


def check_rows(rows: str, held: Rows, job: Job) -> None:
    """Raise Refused for rows of another kind than the objective trains on. rows: their name."""
    needed = OBJECTIVES[job.objective].rows
    if held != needed:
        raise Refused(f"{rows} are {HELD[held]}; objective {job.objective} trains on {HELD[needed]}.")


# torchtune #


def torchtune_dataset(value: Any, job: Job) -> Converted:
    """Read the whole section, or each of a list of them, whichever of its keys is asked for."""
    sections = listed(job.value("dataset"))
    made = [torchtune_sources(rows, job) for rows in sections]
    labels = [labelled for _, labelled in made]
    remarks = [
        lost_split(rows.get("split"), each)
        for rows, (sources, _) in zip(sections, made, strict=True)
        for each in sources
    ]
    settings: dict[str, Any] = {"data.train": [each for sources, _ in made for each in sources]}
    settings |= {"data.train_on": labels[0]} if labels[0] else {}
    if len({*labels}) > 1:
        remarks.append(f"data.train_on is that of the first source; the others label {', '.join(labels[1:])}")
    names = [short(rows["_component_"]) for rows in sections]
    prompted = [name for name in names if name in PROMPTED]
    lost = ""
    if prompted == names and {*names} <= ALPACA:
        settings |= ALPACA_TEMPLATE
        remarks.append(ALPACA_REMARK.format(tool="torchtune"))
    elif prompted:
        lost = f"without torchtune's prompts of {', '.join(prompted)}: set data.chat_template"
    return Converted(settings, joined(remarks), lost)


def torchtune_eval(value: Any, job: Job) -> Converted:
    made = [(rows, each) for rows in listed(value) for each in torchtune_sources(rows, job)[0]]
    for rows, each in made:
        if lost := lost_split(rows.get("split"), each):
            raise NoCounterpart(f"it would be {lost}; write these to another file, or set data.eval_split")
    return Converted({"data.eval": [each for _, each in made]})


def torchtune_sources(rows: Mapping[str, Any], job: Job) -> tuple[list[Source], str]:
    """(Sources, data.train_on) of one of torchtune's dataset components."""
    name = short(rows.get("_component_", ""))
    if name not in job.table.tree["builders"]:
        raise NoCounterpart(f"torchtune's {name or 'data set'} has no counterpart; set data.train")
    path, kind, columns, labels = job.table.tree["builders"][name]
    check_rows(f"The rows of {name}", "pairs" if kind == "pairs" else "answers", job)
    kind = kind.replace("pairs", "")
    column = str(rows.get("conversation_column") or rows.get("column") or "")
    if kind == "sharegpt":
        kind = "messages" if rows.get("conversation_style") == "openai" else kind
        columns = {"messages" if kind == "messages" else "conversations": column}
    elif column:
        columns = {"text": column}
    names = {"input": "prompt", "output": "completion"} if kind == "prompt-completion" else {}
    asked: dict[str, str] = rows.get("column_map") or {}
    columns = {**columns, **{names.get(name, name): theirs for name, theirs in asked.items()}}
    if rows.get("train_on_input") is not None:
        labels = "all" if rows["train_on_input"] else "assistant"
    split = rows.get("split") if rows.get("split") != "train" else None
    paths = placed(str(rows.get("source") or path), rows.get("data_files"), rows.get("subset"))
    return [source(each, split=split, kind=kind, columns=columns) for each in paths], labels


def text_column(value: Any, job: Job) -> dict[str, Any]:
    return {"data.columns": {"text": value}} if value != "text" else {}


CONVERSIONS = {
    **{
        read.__name__: Conversion(read)
        for read in (
            axolotl_pretraining, trl_dataset, trl_mixture, handbook_mixer, handbook_mixture, text_column,
            torchtune_dataset, torchtune_eval,
        )
    },
    "axolotl_train": Conversion(
        axolotl_train, lambda plan: [axolotl_rows(plan.config, each) for each in plan.config.data.train]
    ),
    "axolotl_eval": Conversion(
        axolotl_eval, lambda plan: [axolotl_rows(plan.config, each) for each in plan.config.data.eval]
    ),
    "prepared_rows": Conversion(
        lambda value, job: {"data.cache": value},
        lambda plan: str(Path(plan.config.data.cache).expanduser()) if plan.setting("own_cache") else None,
    ),
    "llama_factory_train": Conversion(
        lambda value, job: llama_factory_sources("data.train", value, job),
        lambda plan: ",".join(name for name in dataset_info(plan.config) if name.startswith("train")),
    ),
    "llama_factory_eval": Conversion(
        lambda value, job: llama_factory_sources("data.eval", value, job),
        lambda plan: ",".join(name for name in dataset_info(plan.config) if name.startswith("eval")),
    ),
}  # fmt: skip
