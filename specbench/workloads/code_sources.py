"""Pieces of the installed standard library that are small enough to be edited as a file."""

from __future__ import annotations

import ast
import os
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Long enough that copying dominates the answer, short enough for one screen.
MIN_LINES = 15
MAX_LINES = 60

# 400 tokens at 3 characters a token, a low figure for Python text in a byte-pair
# vocabulary: most answers end before the output limit, and the prompt with its
# instruction stays well under 700 tokens.
MAX_CODE_CHARS = 1200

# Parts of the library that are test suites, generated tables or other people's packages.
EXCLUDED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idlelib",
        "idle_test",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Snippet:
    """Whole lines of one module, valid Python on their own.

    Attributes:
        module: dotted name.
        first_line, last_line: 1-based, inclusive.
        text: ASCII source, ends with a newline.
    """

    module: str
    first_line: int
    last_line: int
    text: str


def find_modules(root: Path) -> list[tuple[str, Path]]:
    """Dotted name and file of every module of the standard library, sorted by name.

    Only what belongs to the library itself: ``sys.stdlib_module_names`` keeps out what
    distributions and users drop into the same folder.
    """
    modules = []
    for folder, subfolders, files in os.walk(root):
        # In place, so that large folders of installed packages are not even listed.
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
        for file in files:
            path = Path(folder, file)
            parts = path.relative_to(root).with_suffix("").parts
            if path.suffix == ".py" and parts[0] in sys.stdlib_module_names:
                modules.append((".".join(parts), path))
    return sorted(modules)


def iter_snippets(root: Path, seed: int) -> Iterator[Snippet]:
    """All snippets in seeded order: one of every module, then a second one, and so on.

    Lazy: only as many modules are parsed as the consumer needs. Snippets never overlap.
    """
    modules = find_modules(root)
    random.Random(f"code-edit modules:{seed}").shuffle(modules)
    remaining: list[list[Snippet]] = []
    for name, path in modules:
        found = split_module(name, path, random.Random(f"code-edit {name}:{seed}"))
        if found:
            yield found[0]
            remaining.append(found[1:])
    while remaining := [rest for rest in remaining if rest]:
        yield from [rest.pop(0) for rest in remaining]


def split_module(name: str, path: Path, rng: random.Random) -> list[Snippet]:
    """Cut a module into snippets in shuffled order; unreadable or odd files give none."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = parse(text)
    except (OSError, ValueError, SyntaxError):
        return []
    lines = text.split("\n")
    if tree.body and MIN_LINES <= text.count("\n") <= MAX_LINES:
        ranges = [(1, text.count("\n"))]
    else:
        ranges = _definition_ranges(tree, lines, rng)
    snippets = [_snippet(name, lines, first, last) for first, last in ranges]
    usable = [snippet for snippet in snippets if _is_usable(snippet)]
    rng.shuffle(usable)
    return usable


def parse(text: str) -> ast.Module:
    """``ast.parse`` without the warnings that some library files cause; raises SyntaxError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def _definition_ranges(
    tree: ast.Module, lines: list[str], rng: random.Random
) -> list[tuple[int, int]]:
    """Runs of neighbouring top-level definitions, each grown to a random length in bounds."""
    ranges: list[tuple[int, int]] = []
    start: int | None = None
    end = 0
    target = rng.randint(MIN_LINES, MAX_LINES)
    for node in [*tree.body, None]:
        fits = (
            start is not None
            and end - start + 1 < target
            and isinstance(node, _DEFINITIONS)
            and _in_bounds(lines, start, _last_line(node))
        )
        if start is not None and not fits:
            ranges.append((start, end))
            start, target = None, rng.randint(MIN_LINES, MAX_LINES)
        if isinstance(node, _DEFINITIONS):
            start = _first_line(node) if start is None else start
            end = _last_line(node)
    return [(first, last) for first, last in ranges if last - first + 1 >= MIN_LINES]


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _last_line(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _in_bounds(lines: list[str], first: int, last: int) -> bool:
    num_chars = sum(len(line) + 1 for line in lines[first - 1 : last])
    return last - first + 1 <= MAX_LINES and num_chars <= MAX_CODE_CHARS


def _snippet(name: str, lines: list[str], first: int, last: int) -> Snippet:
    return Snippet(name, first, last, "\n".join(lines[first - 1 : last]) + "\n")


def _is_usable(snippet: Snippet) -> bool:
    """ASCII keeps byte and character columns equal; a code fence inside would end the block."""
    num_lines = snippet.last_line - snippet.first_line + 1
    return (
        MIN_LINES <= num_lines <= MAX_LINES
        and len(snippet.text) <= MAX_CODE_CHARS
        and snippet.text.isascii()
        and "```" not in snippet.text
    )
