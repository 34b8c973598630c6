"""Small mechanical bugs, planted into a source text by replacing a few characters.

The kinds follow the classic mutation operators of software testing: relational,
arithmetic, logical and constant replacement, and statement deletion (Offutt et al.,
"An Experimental Determination of Sufficient Mutant Operators", 1996).
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass

from specbench.workloads.code_sources import parse

_INVERTED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", ">"),
    ast.LtE: ("<=", ">="),
    ast.Gt: (">", "<"),
    ast.GtE: (">=", "<="),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}

_OFF_BY_ONE: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
}

_WRONG_OPERATOR: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "%"),
}

# Larger numbers are sizes and codes rather than indices.
_MAX_INDEX = 9


@dataclass(frozen=True)
class Mutation:
    """Replace ``text[start:end]`` by ``replacement``; ``hint`` tells what is wrong then."""

    start: int
    end: int
    replacement: str
    hint: str


def plant_bug(text: str, rng: random.Random) -> tuple[str, str] | None:
    """Plant one bug into an ASCII source text.

    Returns:
        The faulty text, which still parses and means something else, and a hint; None
        where the text offers no place for a bug.
    """
    tree = parse(text)
    before = ast.dump(tree)
    for mutation in _in_random_order(list(_mutations(text, tree)), rng):
        faulty = text[: mutation.start] + mutation.replacement + text[mutation.end :]
        try:
            after = ast.dump(parse(faulty))
        except SyntaxError:
            continue
        if after != before:
            return faulty, mutation.hint
    return None


def _in_random_order(mutations: list[Mutation], rng: random.Random) -> list[Mutation]:
    """Shuffled kind by kind, so that frequent kinds such as comparisons do not prevail."""
    rng.shuffle(mutations)
    kinds = sorted({mutation.hint for mutation in mutations})
    rng.shuffle(kinds)
    return sorted(mutations, key=lambda mutation: kinds.index(mutation.hint))


def _mutations(text: str, tree: ast.Module) -> Iterator[Mutation]:
    offsets = _Offsets(text)
    for node in _walk_outside_fstrings(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from _comparison(offsets, node)
        elif isinstance(node, ast.BinOp):
            yield from _operator(offsets, node.left, node.op, node.right, "")
        elif isinstance(node, ast.AugAssign):
            yield from _operator(offsets, node.target, node.op, node.value, "=")
        elif isinstance(node, ast.BoolOp):
            yield from _logical(offsets, node)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield from _negation(offsets, node)
        elif isinstance(node, ast.Subscript):
            yield from _index(offsets, node.slice)
        elif isinstance(node, ast.FunctionDef):
            yield from _lost_return(offsets, node)


class _Offsets:
    """Character offsets of syntax nodes in an ASCII text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._line_starts = [0]
        for line in text.split("\n"):
            self._line_starts.append(self._line_starts[-1] + len(line) + 1)

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def between(
        self, left: ast.expr, right: ast.expr, symbol: str, replacement: str, hint: str
    ) -> Iterator[Mutation]:
        """Replace the operator between two operands, if nothing else but brackets is there."""
        gap = self.text[self.end(left) : self.start(right)]
        if gap.strip(" \n()") == symbol:
            start = self.end(left) + gap.index(symbol)
            yield Mutation(start, start + len(symbol), replacement, hint)


def _walk_outside_fstrings(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those inside f-strings, whose positions Python 3.11 gets wrong."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if not isinstance(node, ast.JoinedStr):
            yield node
            pending.extend(ast.iter_child_nodes(node))


def _comparison(offsets: _Offsets, node: ast.Compare) -> Iterator[Mutation]:
    left, right, operator = node.left, node.comparators[0], type(node.ops[0])
    symbol, inverse = _INVERTED[operator]
    yield from offsets.between(left, right, symbol, inverse, "a comparison is inverted")
    if operator in _OFF_BY_ONE:
        symbol, near = _OFF_BY_ONE[operator]
        yield from offsets.between(left, right, symbol, near, "a comparison is off by one")


def _operator(
    offsets: _Offsets, left: ast.expr, operator: ast.operator, right: ast.expr, suffix: str
) -> Iterator[Mutation]:
    if type(operator) in _WRONG_OPERATOR:
        symbol, wrong = (part + suffix for part in _WRONG_OPERATOR[type(operator)])
        yield from offsets.between(left, right, symbol, wrong, "an operator is wrong")


def _logical(offsets: _Offsets, node: ast.BoolOp) -> Iterator[Mutation]:
    symbol, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    hint = f"`{other}` is used where `{symbol}` is meant"
    yield from offsets.between(node.values[0], node.values[1], symbol, other, hint)


def _negation(offsets: _Offsets, node: ast.UnaryOp) -> Iterator[Mutation]:
    start = offsets.start(node)
    end = start + len("not ")
    if offsets.text[start:end] == "not ":
        yield Mutation(start, end, "", "a `not` is missing")


def _index(offsets: _Offsets, index: ast.expr) -> Iterator[Mutation]:
    bounds = [index.lower, index.upper] if isinstance(index, ast.Slice) else [index]
    for bound in bounds:
        number = bound.operand if isinstance(bound, ast.UnaryOp) else bound
        if (
            isinstance(number, ast.Constant)
            and type(number.value) is int
            and number.value <= _MAX_INDEX
        ):
            start, end = offsets.start(number), offsets.end(number)
            yield Mutation(start, end, str(number.value + 1), "an index is off by one")


def _lost_return(offsets: _Offsets, node: ast.FunctionDef) -> Iterator[Mutation]:
    last = node.body[-1]
    if isinstance(last, ast.Return) and last.value is not None:
        start = offsets.start(last)
        yield Mutation(start, start + len("return "), "", "a `return` is missing")
