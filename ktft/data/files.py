"""Reads chat records from .json and .jsonl files and checks every one of them.

A record is ``{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}``, roles system,
user and assistant, with at least one assistant turn, each of which answers another's message before it. A data set is
named by its file, or by an entry of ``dataset_info.json`` in the data directory (LLaMA-Factory's form): ``{"name":
{"file_name": "x.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": {"role_tag": "role",
"content_tag": "content", "user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"}}}``.

A record that is not of this form is a :class:`DataError` that names file and line; none is skipped. Tool calls, images,
weights of single turns and other layouts (alpaca) are refused by name in this version; keys of a record that only
describe it (an id, a source) are not read. Files are UTF-8, with or without a byte order mark.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLES = ("system", "user", "assistant")

MEANINGFUL = ("tools", "functions", "system", "images", "videos", "audios")
"""Keys of a record that would change what is learned, so that ignoring them would be wrong."""


class DataError(ValueError):
    """A data set that cannot be found, or a record that cannot be used; the message says where it is."""


@dataclass(frozen=True)
class Chat:
    """One checked conversation.

    Attributes:
        messages: each with exactly the keys role and content, both text.
        where: ``file:line`` (.jsonl) or ``file, record n`` (.json), counted from 1.
    """

    messages: list[dict[str, str]]
    where: str


@dataclass(frozen=True)
class _Layout:
    """How a file names its columns, roles and keys; the default is the messages form."""

    column: str = "messages"
    role: str = "role"
    content: str = "content"
    names: tuple[str, str, str] = ROLES


def read_chats(names: Sequence[str], dataset_dir: str, max_samples: int | None = None) -> list[Chat]:
    """All chats of the named data sets, in order.

    Args:
        names: entries of ``dataset_dir/dataset_info.json``, or paths ending in .json or .jsonl.
        dataset_dir: where ``dataset_info.json`` lies.
        max_samples: take at most this many of each data set, from its beginning.

    Raises:
        DataError: see the module's contract.
    """
    chats: list[Chat] = []
    for name in names:
        path, layout = _locate(name, Path(dataset_dir))
        found = [_chat(record, where, layout) for record, where in _records(path)]
        if not found:
            raise DataError(f"{path} holds no records")
        chats += found[:max_samples]
    return chats


def _locate(name: str, directory: Path) -> tuple[Path, _Layout]:
    if name.endswith((".json", ".jsonl")):
        if not Path(name).is_file():
            raise DataError(f"dataset file {name} does not exist (paths are relative to the working directory)")
        return Path(name), _Layout()
    info_path = directory / "dataset_info.json"
    if not info_path.is_file():
        raise DataError(
            f"dataset {name!r} is looked up in {info_path}, which does not exist; "
            "set dataset_dir, or name a .json or .jsonl file"
        )
    try:
        info = json.loads(_text(info_path))
    except ValueError as error:
        raise DataError(f"{info_path} is not valid JSON: {error}") from None
    if name not in info:
        near = difflib.get_close_matches(name, info, n=1)
        raise DataError(
            f"dataset {name!r} is not in {info_path}; "
            + (f"did you mean {near[0]!r}?" if near else f"it has {sorted(info)}")
        )
    entry = info[name]
    if "file_name" not in entry:
        raise DataError(f"dataset {name!r} in {info_path} has no file_name; ktft reads local .json and .jsonl files")
    columns, tags = entry.get("columns", {}), entry.get("tags", {})
    if entry.get("formatting", "alpaca") != "sharegpt":
        raise DataError(
            f"dataset {name!r} in {info_path} has formatting {entry.get('formatting', 'alpaca')!r}; "
            "ktft reads 'sharegpt'"
        )
    if unread := sorted(set(columns) - {"messages"}) or [
        key for key in ("ranking", "subset", "folder") if entry.get(key)
    ]:
        raise DataError(f"dataset {name!r} in {info_path} uses {unread}, which this version does not read")
    layout = _Layout(
        column=columns.get("messages", "conversations"),
        role=tags.get("role_tag", "from"),
        content=tags.get("content_tag", "value"),
        names=(tags.get("system_tag", "system"), tags.get("user_tag", "human"), tags.get("assistant_tag", "gpt")),
    )
    path = directory / entry["file_name"]
    if not path.is_file():
        raise DataError(f"dataset {name!r}: {path} does not exist")
    return path, layout


def _text(path: Path) -> str:
    """The file's text, without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x}); convert it to UTF-8"
        ) from None


def _empty(value: Any) -> bool:
    """Whether a key with this value says nothing; 0 and false say something."""
    return value is None or value in ("", [], {})


def _records(path: Path) -> Iterator[tuple[Any, str]]:
    """(record, where) of every record in a file."""
    text = _text(path)
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                try:
                    yield json.loads(line), f"{path}:{number}"
                except ValueError as error:
                    raise DataError(f"{path}:{number}: not valid JSON: {error}") from None
        return
    try:
        records = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(records, list):
        raise DataError(f"{path}: expected a list of records, found {type(records).__name__}")
    for number, record in enumerate(records, start=1):
        yield record, f"{path}, record {number}"


def _chat(record: Any, where: str, layout: _Layout) -> Chat:
    if not isinstance(record, dict) or not isinstance(record.get(layout.column), list) or not record[layout.column]:
        found = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{where}: expected a record with a list {layout.column!r}, found {found}")
    if unread := [key for key in MEANINGFUL if key != layout.column and not _empty(record.get(key))]:
        raise DataError(
            f"{where}: the record's {unread} are not read by this version "
            "(text chats only; a system prompt is the first message)"
        )
    roles = dict(zip(layout.names, ROLES, strict=True))
    messages: list[dict[str, str]] = []
    for number, message in enumerate(record[layout.column], start=1):
        here = f"{where}: message {number}"
        if not isinstance(message, dict) or not {layout.role, layout.content} <= message.keys():
            raise DataError(f"{here}: expected keys {layout.role!r} and {layout.content!r}, found {message!r:.80}")
        if extra := sorted(key for key in message.keys() - {layout.role, layout.content} if not _empty(message[key])):
            raise DataError(
                f"{here}: {extra} are not read by this version (text chats only, every answer learned alike)"
            )
        role, content = message[layout.role], message[layout.content]
        if not isinstance(role, str) or role not in roles:
            raise DataError(f"{here}: role {role!r} is not one of {', '.join(layout.names)}")
        if not isinstance(content, str):
            raise DataError(f"{here}: content must be text, found {type(content).__name__}")
        if roles[role] == "assistant" and not messages:
            raise DataError(
                f"{here}: the chat begins with the assistant, so there is nothing it answers; "
                "remove this message or put one before it"
            )
        if roles[role] == "assistant" and messages[-1]["role"] == "assistant":
            raise DataError(
                f"{here}: two messages of the assistant in a row; join them or put what was asked between them"
            )
        messages.append({"role": roles[role], "content": content})
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: no message of the assistant, so there is nothing to learn")
    return Chat(messages, where)


__all__ = ["ROLES", "Chat", "DataError", "read_chats"]
