"""The kinds of code edit: which snippets suit them and what is asked."""

from __future__ import annotations

import ast
import builtins
import keyword
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from specbench.workloads.code_bugs import plant_bug
from specbench.workloads.code_sources import parse

# Fewer uses make the edit a single line.
MIN_USES = 3

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)

# How a renamed variable is called, first pattern that is free.
_NEW_NAMES = ("new_{}", "{}_value", "current_{}", "input_{}", "my_{}")


@dataclass(frozen=True)
class Task:
    """What is asked, and the file it is asked about."""

    instruction: str
    code: str


def rename(text: str, rng: random.Random) -> Task | None:
    """Rename a variable or parameter that is used often and means nothing else."""
    tree = parse(text)
    uses = Counter(_variable_uses(tree))
    candidates = sorted(
        name
        for name in uses.keys() - _other_names(tree)
        if uses[name] >= MIN_USES and len(name.strip("_")) > 1 and name not in ("self", "cls")
    )
    if not candidates:
        return None
    old = rng.choice(candidates)
    patterns = list(_NEW_NAMES)
    rng.shuffle(patterns)
    names = [pattern.format(old.strip("_")) for pattern in patterns]
    free = [name for name in names if name not in text and not keyword.iskeyword(name)]
    if not free:
        return None
    return Task(f"Rename `{old}` to `{free[0]}` everywhere in this file.", text)


def add_type_hints(text: str, rng: random.Random) -> Task | None:
    """Annotate functions that have no annotation at all and at least two parameters."""
    functions = [node for node in ast.walk(parse(text)) if isinstance(node, _FUNCTIONS)]
    parameters = [
        argument
        for function in functions
        for argument in ast.walk(function.args)
        if isinstance(argument, ast.arg) and argument.arg not in ("self", "cls")
    ]
    annotated = any(argument.annotation for argument in parameters)
    if len(parameters) < 2 or annotated or any(function.returns for function in functions):
        return None
    return Task("Add type hints to all parameters and return values in this file.", text)


def add_docstrings(text: str, rng: random.Random) -> Task | None:
    """Document what has no docstring yet."""
    nodes = [node for node in ast.walk(parse(text)) if isinstance(node, _DEFINITIONS)]
    if not nodes or all(ast.get_docstring(node) for node in nodes):
        return None
    return Task(
        "Add a one-line docstring to every function, class and method in this file that has none.",
        text,
    )


def reorder(text: str, rng: random.Random) -> Task | None:
    """Sort top-level definitions, or the methods of a single class, by name."""
    body = parse(text).body
    what = "functions and classes"
    if len(body) == 1 and isinstance(body[0], ast.ClassDef):
        what = f"methods of class `{body[0].name}`"
        body = [node for node in body[0].body if isinstance(node, _DEFINITIONS)]
    names = [node.name for node in body if isinstance(node, _DEFINITIONS)]
    if len(names) < max(2, len(body)) or len(set(names)) < len(names) or names == sorted(names):
        return None
    return Task(
        f"Put the {what} of this file in alphabetical order by name; change nothing else.", text
    )


def fix_bug(text: str, rng: random.Random) -> Task | None:
    """Undo a bug that is planted here."""
    planted = plant_bug(text, rng)
    if planted is None:
        return None
    faulty, hint = planted
    return Task(f"This file has one bug: {hint}. Fix the bug; change nothing else.", faulty)


TASKS: dict[str, Callable[[str, random.Random], Task | None]] = {
    "rename": rename,
    "type-hints": add_type_hints,
    "docstrings": add_docstrings,
    "reorder": reorder,
    "fix-bug": fix_bug,
}


def _variable_uses(tree: ast.Module) -> list[str]:
    """Names of local variables and parameters, once for every time they occur."""
    nodes = list(ast.walk(tree))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and _is_store(node)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    used = [node.id for node in nodes if isinstance(node, ast.Name)]
    used += [node.arg for node in nodes if isinstance(node, ast.arg)]
    return [name for name in used if name in bound]


def _is_store(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _other_names(tree: ast.Module) -> set[str]:
    """Names that occur as something else than a variable, where a rename is ambiguous."""
    names = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.update({node.name, node.asname or node.name})
        elif isinstance(node, ast.Global | ast.Nonlocal):
            names.update(node.names)
        elif isinstance(node, _DEFINITIONS):
            names.add(node.name)
    return names
