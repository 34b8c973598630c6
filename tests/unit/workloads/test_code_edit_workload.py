"""Code edits over the standard library: sources, planted bugs, tasks, items."""

from __future__ import annotations

import ast
import itertools
import random
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from specbench.errors import EnvironmentProblem
from specbench.records import Conversation
from specbench.workloads import load_workload
from specbench.workloads.code_bugs import plant_bug
from specbench.workloads.code_edit import MAX_OUTPUT_TOKENS, CodeEdit, max_output_tokens
from specbench.workloads.code_sources import find_modules, iter_snippets, split_module
from specbench.workloads.code_tasks import TASKS, add_docstrings, add_type_hints, rename, reorder

STDLIB = Path(sysconfig.get_path("stdlib"))
ITEMS = load_workload("code-edit", None, seed=0)


def _code(item: Conversation) -> str:
    return item.turns[0].split("```python\n")[1].removesuffix("```")


def _original(item: Conversation) -> str:
    """The text the id points at."""
    module, lines = item.item_id.split("/")[-1].split(":")
    first, last = map(int, lines.split("-"))
    path = dict(find_modules(STDLIB))[module]
    return "\n".join(path.read_text(encoding="utf-8").split("\n")[first - 1 : last]) + "\n"


def _library(root: Path, **modules: str) -> Path:
    for name, text in modules.items():
        (root / f"{name}.py").write_text(text, encoding="utf-8")
    return root


def _function(name: str, num_lines: int) -> str:
    body = "".join(f"    value_{k} = text[{k}]\n" for k in range(num_lines - 2))
    return f"def {name}(text, limit):\n{body}    return text\n"


# Items --------------------------------------------------------------------------------


def test_there_are_enough_and_kinds_are_balanced() -> None:
    counts = Counter(i.category for i in ITEMS)
    assert len(ITEMS) >= 72
    assert set(counts) == set(TASKS)
    assert max(counts.values()) - min(counts.values()) <= len(ITEMS) / 10


@pytest.mark.parametrize("item", ITEMS, ids=lambda i: i.item_id)
def test_code_parses_before_and_after_planting(item: Conversation) -> None:
    original, shown = _original(item), _code(item)
    assert 15 <= original.count("\n") <= 60
    assert len(item.turns[0]) <= 2400
    before, after = ast.dump(ast.parse(original)), ast.dump(ast.parse(shown))
    assert (before != after) == (item.category == "fix-bug")
    if item.category != "fix-bug":
        assert shown == original


def test_output_limit_follows_the_size_of_the_file() -> None:
    assert max_output_tokens("x" * 300) == 110
    assert max_output_tokens("x" * 301) == 111
    assert max_output_tokens("x" * 5000) == MAX_OUTPUT_TOKENS == 320
    assert all(i.max_tokens == max_output_tokens(_code(i)) for i in ITEMS)


def test_ids_name_kind_interpreter_module_and_lines() -> None:
    for item in ITEMS:
        prefix, kind, interpreter, place = item.item_id.split("/")
        assert (prefix, kind) == ("code-edit", item.category)
        assert interpreter.startswith("cpython-3.")
        assert place.count(":") == 1


def test_more_than_the_default_number_are_still_distinct() -> None:
    items = load_workload("code-edit", 200, seed=0)
    assert len({_code(i) for i in items}) == 200
    assert not any("#" in i.item_id for i in items)


def test_small_library_is_cycled_through(tmp_path: Path) -> None:
    root = _library(tmp_path, heapq=_function("one", 20), bisect=_function("two", 20))
    items = CodeEdit(root).load(5, seed=0)
    first, second = (i.item_id for i in items[:2])
    assert [i.item_id for i in items[2:]] == [f"{first}#2", f"{second}#2", f"{first}#3"]


def test_interpreter_without_sources_is_explained(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"no Python source files.*\.py files"):
        CodeEdit(tmp_path).load(3, seed=0)


# Sources ------------------------------------------------------------------------------


def test_foreign_and_unreadable_files_are_left_out(tmp_path: Path) -> None:
    _library(tmp_path, heapq=_function("one", 20), sitecustomize=_function("two", 20))
    _library(tmp_path, bisect="def broken(:\n" * 20)
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "tool.py").write_bytes(b"# \xff\n" * 20)
    (tmp_path / "site-packages").mkdir()
    _library(tmp_path / "site-packages", glob=_function("three", 20))
    assert [name for name, _ in find_modules(tmp_path)] == ["bisect", "heapq", "json.tool"]
    assert [s.module for s in iter_snippets(tmp_path, seed=0)] == ["heapq"]


def test_snippets_of_a_module_do_not_overlap() -> None:
    path = STDLIB / "argparse.py"
    for seed in range(5):
        found = split_module("argparse", path, random.Random(seed))
        spans = sorted((s.first_line, s.last_line) for s in found)
        assert len(spans) > 3
        assert all(left[1] < right[0] for left, right in itertools.pairwise(spans))


def test_decorator_belongs_to_its_function(tmp_path: Path) -> None:
    text = "import os\n" * 60 + "@decorated\n" + _function("one", 20)
    root = _library(tmp_path, heapq=text)
    (snippet,) = split_module("heapq", root / "heapq.py", random.Random(0))
    assert snippet.first_line == 61
    assert snippet.text.startswith("@decorated\ndef one")


def test_form_feed_does_not_shift_lines(tmp_path: Path) -> None:
    text = "import os\n" * 60 + "\f\n" + _function("one", 20)
    root = _library(tmp_path, heapq=text)
    (snippet,) = split_module("heapq", root / "heapq.py", random.Random(0))
    assert (snippet.first_line, snippet.text) == (62, _function("one", 20))


def test_text_that_would_break_the_code_block_is_left_out(tmp_path: Path) -> None:
    fence = _function("one", 20) + "# ```\n"
    accent = _function("two", 20) + "# é\n"
    root = _library(tmp_path, heapq=fence, bisect=accent)
    assert list(iter_snippets(root, seed=0)) == []


# Bugs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "faulty", "hint"),
    [
        ("if a == b:\n    pass\n", "if a != b:\n    pass\n", "comparison is inverted"),
        ("x = (a) is not (b)\n", "x = (a) is (b)\n", "comparison is inverted"),
        ("x = a not in b\n", "x = a in b\n", "comparison is inverted"),
        ("x = a * b\n", "x = a + b\n", "operator is wrong"),
        ("a -= b\n", "a += b\n", "operator is wrong"),
        ("x = a and b and c\n", "x = a or b and c\n", "`or` is used where `and` is meant"),
        ("if not a:\n    pass\n", "if a:\n    pass\n", "`not` is missing"),
        ("x = a[-1]\n", "x = a[-2]\n", "index is off by one"),
        ("x = a[1:]\n", "x = a[2:]\n", "index is off by one"),
        ("def f():\n    return g()\n", "def f():\n    g()\n", "`return` is missing"),
    ],
)
def test_each_kind_of_bug(text: str, faulty: str, hint: str) -> None:
    planted = plant_bug(text, random.Random(0))
    assert planted is not None
    assert planted[0] == faulty
    assert hint in planted[1]


@pytest.mark.parametrize(
    "text",
    ["x = 1\n", "import os\n", "x = f'{a == b}'\n", "x = a < b < c\n", "x = a == \\\n  b\n", ""],
)
def test_text_without_a_place_for_a_bug(text: str) -> None:
    assert plant_bug(text, random.Random(0)) is None


def test_both_wrongs_of_an_ordering_occur() -> None:
    seen = {plant_bug("x = a < b\n", random.Random(seed)) for seed in range(20)}
    assert {bug[0] for bug in seen if bug} == {"x = a > b\n", "x = a <= b\n"}


def test_bugs_in_the_library_change_its_meaning_in_one_place() -> None:
    num_planted = 0
    for index, snippet in enumerate(iter_snippets(STDLIB, seed=1)):
        if index == 150:
            break
        planted = plant_bug(snippet.text, random.Random(index))
        if planted is None:
            continue
        num_planted += 1
        faulty = planted[0]
        assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(snippet.text))
        changed = zip(snippet.text.split("\n"), faulty.split("\n"), strict=True)
        assert sum(before != after for before, after in changed) == 1
    assert num_planted > 75


# Tasks --------------------------------------------------------------------------------


def test_rename_takes_a_frequent_unambiguous_variable() -> None:
    text = "def f(path, key):\n    path = path + g(key=key)\n    return path, key\n"
    task = rename(text, random.Random(0))
    assert task is not None
    assert task.code == text
    assert task.instruction.startswith("Rename `path` to `")


@pytest.mark.parametrize(
    "text",
    [
        "def f(self):\n    self.a = self.b + self.c\n",
        "def f(path):\n    return path\n",
        "def f(path):\n    return path.path + path\n",
        "def f(list):\n    return list + list + list\n",
    ],
)
def test_rename_leaves_rare_and_ambiguous_names_alone(text: str) -> None:
    assert rename(text, random.Random(0)) is None


def test_type_hints_are_asked_for_only_where_there_are_none() -> None:
    assert add_type_hints("def f(a, b):\n    return a\n", random.Random(0)) is not None
    assert add_type_hints("def f(a: int, b):\n    return a\n", random.Random(0)) is None
    assert add_type_hints("def f(a, b) -> int:\n    return a\n", random.Random(0)) is None
    assert add_type_hints("def f(self, a):\n    return a\n", random.Random(0)) is None


def test_docstrings_are_asked_for_only_where_one_is_missing() -> None:
    assert add_docstrings("def f():\n    return 1\n", random.Random(0)) is not None
    assert add_docstrings('def f():\n    """Doc."""\n', random.Random(0)) is None
    assert add_docstrings("x = 1\n", random.Random(0)) is None


def test_reorder_needs_something_out_of_order() -> None:
    unsorted = "def b(): pass\ndef a(): pass\n"
    methods = "class C:\n    def b(self): pass\n    def a(self): pass\n"
    assert reorder(unsorted, random.Random(0)) is not None
    assert "methods of class `C`" in str(reorder(methods, random.Random(0)))
    assert reorder("def a(): pass\ndef b(): pass\n", random.Random(0)) is None
    assert reorder("def b(): pass\n", random.Random(0)) is None
    assert reorder("import os\n" + unsorted, random.Random(0)) is None
    assert reorder(unsorted + "def a(): pass\n", random.Random(0)) is None
