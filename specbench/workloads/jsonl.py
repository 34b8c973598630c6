"""Prompt files in the shapes the field uses, read into conversations.

One JSON object per line (or one JSON array of objects), in one of four shapes:

==================  ==========================================================
``turns``           user turns, sent one after another with the model's replies
                    in between (MT-bench, Spec-Bench)
``conversations``   ``{"from": ..., "value": ...}`` (ShareGPT): history up to the
                    last human message, which is what the model answers
``messages``        ``{"role": ..., "content": ...}`` (OpenAI chat): the same;
                    trailing assistant messages are dropped
``prompt``          one user turn, or a raw completion prompt on request
==================  ==========================================================

The first item decides the shape of the file; every item must follow it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

from specbench.errors import InputError
from specbench.records import Conversation
from specbench.workloads.shapes import (
    Item,
    Place,
    detect_shape,
    json_kind,
    make_conversation,
    printable,
)

logger = logging.getLogger(__name__)


def read_conversations(path: Path, *, raw: bool = False) -> list[Conversation]:
    """Read every conversation of a prompt file, in file order.

    Args:
        path: UTF-8 file, a byte-order mark allowed; blank lines are ignored.
        raw: make text completions without a chat template; only for the ``prompt`` shape.

    Returns:
        Conversations with ids that are unique in the file: the item's own ``id`` or
        ``question_id``, else file name and line.

    Raises:
        InputError: the file cannot be read or an item does not fit; names file and line.
    """
    shape: str | None = None
    conversations: list[Conversation] = []
    used_ids: set[str] = set()
    num_skipped = 0
    for place, item in _read_items(path):
        shape = shape or detect_shape(place, item, raw=raw)
        conversation = make_conversation(place, item, shape, used_ids, raw=raw)
        if conversation is None:
            num_skipped += 1
            continue
        used_ids.add(conversation.item_id)
        conversations.append(conversation)
    if not conversations:
        found = f"none of its {num_skipped} items has a human message" if num_skipped else "empty"
        raise InputError(f"{printable(path)}: no prompts in this file ({found})")
    if num_skipped:
        logger.warning(
            "%s: left out %d items without a human message", printable(path), num_skipped
        )
    return conversations


def _read_text(path: Path) -> str:
    name = printable(path)
    try:
        if path.is_dir():
            raise InputError(f"{name} is a directory; give a JSONL file of prompts")
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{name}: no such file; give the path of a JSONL file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{name} cannot be read: {reason}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = data[error.start]
        raise InputError(
            f"{name}, line {line}: byte 0x{byte:02x} is not UTF-8; save the file as UTF-8"
        ) from None


def _read_items(path: Path) -> Iterator[tuple[Place, Item]]:
    """Every object of the file with its place, from lines or from one array."""
    text = _read_text(path)
    if text.lstrip().startswith("["):
        yield from _array_items(path, text)
        return
    # Only "\n" ends a line: JSON strings may hold other Unicode line separators unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = Place(path, "line", number)
            yield place, _parse_object(place, line)


def _array_items(path: Path, text: str) -> Iterator[tuple[Place, Item]]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise Place(path, "line", error.lineno).error(
            f"not readable as JSON ({error.msg} at column {error.colno}); a file that starts "
            "with '[' must be one JSON array of objects"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{printable(path)}: not readable as JSON ({_reason(error)})") from None
    for number, value in enumerate(values, start=1):
        place = Place(path, "item", number)
        yield place, _require_object(place, value)


def _parse_object(place: Place, line: str) -> Item:
    expected = "expected one JSON object per line"
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise place.error(
            f"not readable as JSON ({error.msg} at column {error.colno}); {expected}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise place.error(f"not readable as JSON ({_reason(error)}); {expected}") from None
    return _require_object(place, value)


def _reason(error: Exception) -> str:
    """Why the parser gave up without a syntax error: huge numbers, endless nesting."""
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).split(";")[0]


def _require_object(place: Place, value: object) -> Item:
    if not isinstance(value, dict):
        raise place.error(f"expected a JSON object, found {json_kind(value)}")
    return value
