"""What one item of a prompt file must look like, and the conversation it becomes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from specbench.errors import InputError
from specbench.records import Conversation, Message, Role

Item = dict[str, Any]

ID_KEYS = ("id", "question_id")
MAX_TOKENS_KEYS = ("max_tokens", "output_tokens")

# The names of speakers found in published ShareGPT files.
SHAREGPT_ROLES: dict[str, Role] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}

OPENAI_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}

# An id that ends like the copies made when a workload is cycled through.
_COPY_SUFFIX = re.compile(r"#\d+$")


@dataclass(frozen=True)
class Place:
    """Where in which file something was read; puts itself in front of a message."""

    path: Path
    unit: str
    number: int

    def error(self, problem: str) -> InputError:
        """An error that says where the problem is; the caller raises it."""
        return InputError(f"{printable(self.path)}, {self.unit} {self.number}: {problem}")


def printable(path: Path) -> str:
    """A path that any terminal or file can take, undecodable bytes escaped."""
    return str(path).encode("utf-8", "backslashreplace").decode("utf-8")


# Shapes -------------------------------------------------------------------------------


def detect_shape(place: Place, item: Item, *, raw: bool) -> str:
    """Name the shape of a file by its first item; raises InputError if there is none."""
    shape = next((key for key in SHAPES if key in item), None)
    if shape is None:
        raise place.error(f"no prompt found; {_keys(item)}; expected one of {_known_shapes()}")
    if raw and shape != "prompt":
        raise place.error(f"raw text completion needs 'prompt' items, this file has {shape!r}")
    return shape


def make_conversation(
    place: Place, item: Item, shape: str, used_ids: set[str], *, raw: bool
) -> Conversation | None:
    """Turn one item of a file of the given shape into a conversation with an unused id.

    Returns:
        None for a ShareGPT conversation in which no human says anything; published files
        have such items.

    Raises:
        InputError: something in the item is missing or has the wrong type.
    """
    if shape not in item:
        raise place.error(
            f"no {shape!r}, the shape of this file's first item; {_keys(item)}; "
            f"known shapes are {_known_shapes()}, one per file"
        )
    conversation = SHAPES[shape](place, item)
    if conversation is None:
        return None
    if raw:
        conversation = replace(conversation, turns=(), text=conversation.turns[0])
    return replace(
        conversation,
        item_id=_item_id(place, item, used_ids),
        category=_category(place, item),
        max_tokens=_max_tokens(place, item),
    )


def _known_shapes() -> str:
    names = [repr(name) for name in SHAPES]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _keys(item: Item) -> str:
    shown = [repr(key) for key in list(item)[:8]]
    more = f" and {len(item) - 8} more" if len(item) > 8 else ""
    return f"its keys are {', '.join(shown)}{more}" if shown else "it has no keys"


def _from_turns(place: Place, item: Item) -> Conversation | None:
    turns = _list(place, item["turns"], "'turns'")
    if not turns:
        raise place.error("'turns' is empty; expected at least one user turn")
    return Conversation(
        item_id="",
        turns=tuple(_prompt(place, turn, f"'turns'[{k}]") for k, turn in enumerate(turns)),
    )


def _from_prompt(place: Place, item: Item) -> Conversation | None:
    return Conversation(item_id="", turns=(_prompt(place, item["prompt"], "'prompt'"),))


def _from_messages(place: Place, item: Item) -> Conversation | None:
    messages = _messages(
        place, item["messages"], "'messages'", ("role", "content"), OPENAI_ROLES, _content
    )
    while messages and messages[-1].role == "assistant":
        messages.pop()
    if not messages:
        raise place.error("'messages' has no user message to answer")
    if messages[-1].role != "user":
        raise place.error(f"'messages' ends with a {messages[-1].role} message; expected user")
    last = _prompt(place, messages[-1].content, "the last user message")
    return Conversation(item_id="", history=tuple(messages[:-1]), turns=(last,))


def _from_sharegpt(place: Place, item: Item) -> Conversation | None:
    messages = _messages(
        place, item["conversations"], "'conversations'", ("from", "value"), SHAREGPT_ROLES, _text
    )
    while messages and (messages[-1].role != "user" or not messages[-1].content.strip()):
        messages.pop()
    if not messages:
        return None
    history, last = tuple(messages[:-1]), messages[-1].content
    return Conversation(item_id="", history=history, turns=(last,))


# In the order in which they are looked for when an item carries several of the keys.
SHAPES: dict[str, Callable[[Place, Item], Conversation | None]] = {
    "messages": _from_messages,
    "conversations": _from_sharegpt,
    "turns": _from_turns,
    "prompt": _from_prompt,
}


def _messages(
    place: Place,
    value: object,
    label: str,
    keys: tuple[str, str],
    roles: dict[str, Role],
    read_content: Callable[[Place, object, str], str],
) -> list[Message]:
    role_key, content_key = keys
    messages = []
    for k, entry in enumerate(_list(place, value, label)):
        where = f"{label}[{k}]"
        if not isinstance(entry, dict):
            raise place.error(f"{where} must be an object, found {json_kind(entry)}")
        for key in keys:
            if key not in entry:
                raise place.error(f"{where} has no {key!r}; {_keys(entry)}")
        role = _text(place, entry[role_key], f"{where}[{role_key!r}]")
        if role not in roles:
            raise place.error(
                f"{where} has {role_key} {role!r}; expected one of {', '.join(roles)}"
            )
        content = read_content(place, entry[content_key], f"{where}[{content_key!r}]")
        messages.append(Message(role=roles[role], content=content))
    return messages


# Values -------------------------------------------------------------------------------


def _list(place: Place, value: object, label: str) -> list[object]:
    if not isinstance(value, list):
        raise place.error(f"{label} must be a list, found {json_kind(value)}")
    return cast(list[object], value)


def _text(place: Place, value: object, label: str) -> str:
    if not isinstance(value, str):
        raise place.error(f"{label} must be a string, found {json_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(value[error.start])
        raise place.error(
            f"{label} holds half a surrogate pair (\\u{half:04x}), which no tokenizer can encode"
        ) from None
    return value


def _prompt(place: Place, value: object, label: str) -> str:
    text = _text(place, value, label)
    if not text.strip():
        raise place.error(f"{label} is blank; expected a prompt")
    return text


def _content(place: Place, value: object, label: str) -> str:
    """OpenAI content: a string, or a list of text parts that are joined as they stand."""
    if not isinstance(value, list):
        return _text(place, value, label)
    texts = []
    for k, part in enumerate(value):
        where = f"{label}[{k}]"
        if not isinstance(part, dict) or part.get("type") != "text" or "text" not in part:
            raise place.error(f"{where} is not a text part; only text can be sent")
        texts.append(_text(place, part["text"], f"{where}['text']"))
    return "".join(texts)


def _item_id(place: Place, item: Item, used_ids: set[str]) -> str:
    value = next((item[key] for key in ID_KEYS if item.get(key) is not None), None)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if value is None:
        value = f"{printable(Path(place.path.stem))}:{place.number}"
    item_id = _text(place, value, "the id")
    while item_id in used_ids or _COPY_SUFFIX.search(item_id):
        item_id = f"{item_id}@{place.number}"
    return item_id


def _category(place: Place, item: Item) -> str:
    value = item.get("category")
    return "" if value is None else _text(place, value, "'category'")


def _max_tokens(place: Place, item: Item) -> int | None:
    for key in MAX_TOKENS_KEYS:
        value = item.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise place.error(f"{key!r} must be a whole number, found {json_kind(value)}")
        if value < 1:
            raise place.error(f"{key!r} must be at least 1, found {value}")
        return value
    return None


def json_kind(value: object) -> str:
    """The JSON word for a value's type."""
    if value is None:
        return "null"
    kinds = {bool: "true or false", dict: "an object", list: "a list", str: "a string"}
    return kinds.get(type(value), "a number")
