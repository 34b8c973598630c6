"""What the target is asked when training data is made: chat, code edits, code writing.

Nothing here comes from a data set. Chat prompts are written by the target itself or put
together from this project's own topics and forms; code comes from the installed Python
standard library. Files that the built-in code-edit workload takes its items from are kept
for the test split, so that a drafter is never trained on what it is later compared on.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from specbench.errors import EnvironmentProblem
from specbench.records import Message
from specbench.workloads import TASKS, CodeEdit, Snippet, iter_snippets, max_output_tokens

Split = Literal["train", "test"]

# One prompt in twenty, by hash, is kept for testing; code is split by source file instead.
TEST_SHARE = 0.05
# Longer answers of a small model mostly repeat themselves.
MAX_CHAT_TOKENS = 256
# Share of the code tasks over held-out files that is kept: these files are a quarter of the
# library, far more than a test needs.
HELD_OUT_KEPT = 0.25
# Seeds of the code-edit workload whose files are kept out of training: its default.
HELD_OUT_SEED = 0

# How much of each source: the drafter is judged on chat and on code edits; writing code is
# what published code benchmarks ask.
SOURCE_SHARES = {"chat-self": 0.28, "chat-topic": 0.32, "code-edit": 0.28, "code-write": 0.12}
# Greedy decoding is what most deployments of code models run; 0.7 and 1 are usual for chat.
TEMPERATURE_SHARES = {0.0: 0.5, 0.7: 0.2, 1.0: 0.3}

_CHAT = json.loads(Path(__file__).with_name("chat_prompts.json").read_text(encoding="utf-8"))
_CODE_CLOSING = "Answer with the whole file in one Python code block and nothing else."
_WRITE_FORMS = (
    "Complete this Python function:",
    "Write the body of this function so that it does what its docstring says.",
    "Here is the start of a Python function. Finish it and answer with the code.",
    "Implement the following:",
)
_EXPLAIN_FORMS = (
    "Explain what this code does:",
    "Add comments to this code that explain each step:",
    "Write three unit tests for this code:",
)


@dataclass(frozen=True)
class PromptSpec:
    """One request to the target.

    Attributes:
        prompt_id: names the prompt; the same seed and index give the same prompt.
        source: see SOURCE_SHARES.
        split: whether training may see it.
        messages: the conversation so far; None asks the target to write the first turn.
        temperature: of the answer.
        max_tokens: limit of the answer.
        may_follow_up: the user may go on after the answer; see :func:`follow_up`.
        later_turns: what the user says next, each after an answer; see :func:`next_turn`.
    """

    prompt_id: str
    source: str
    split: Split
    messages: tuple[Message, ...] | None
    temperature: float
    max_tokens: int
    may_follow_up: bool = False
    later_turns: tuple[str, ...] = ()

    @property
    def all_ids(self) -> tuple[str, ...]:
        """Ids of this prompt and of those that its later turns become."""
        return tuple(self.prompt_id + "+" * turn for turn in range(len(self.later_turns) + 1))


def iter_prompts(seed: int, *, root: Path | None = None) -> Iterator[PromptSpec]:
    """Prompts without end, the sources mixed by SOURCE_SHARES; the same for the same seed.

    Args:
        seed: other seeds give other prompts (code: other tasks and temperatures).
        root: folder of the standard library; None takes the running interpreter's.
    """
    streams = {
        "chat-self": _self_written(seed),
        "chat-topic": _topics(seed),
        "code-edit": _code_edits(seed, root),
        "code-write": _code_writing(seed, root),
    }
    rng = random.Random(f"prompt mix:{seed}")
    names, weights = list(SOURCE_SHARES), list(SOURCE_SHARES.values())
    while True:
        yield next(streams[rng.choices(names, weights)[0]])


def follow_up(answered: PromptSpec, answer: str, rng: random.Random) -> PromptSpec:
    """The same conversation with the answer and one more request of the user."""
    turn = rng.choice(_CHAT["follow_ups"])
    return next_turn(replace(answered, later_turns=(turn,)), answer)


def next_turn(answered: PromptSpec, answer: str) -> PromptSpec:
    """The same conversation with the answer and the first of its later turns."""
    turn = Message("user", answered.later_turns[0])
    return replace(
        answered,
        prompt_id=f"{answered.prompt_id}+",
        messages=(*(answered.messages or ()), Message("assistant", answer), turn),
        may_follow_up=False,
        later_turns=answered.later_turns[1:],
    )


def split_of(key: str) -> Split:
    """Split of a prompt, by a hash of what must not be on both sides."""
    digest = hashlib.sha256(f"split:{key}".encode()).digest()
    return "test" if int.from_bytes(digest[:4], "big") < TEST_SHARE * 2**32 else "train"


def held_out_modules(root: Path | None = None) -> frozenset[str]:
    """Modules that the default items of the code-edit workload are taken from."""
    items = CodeEdit(root).items(None, HELD_OUT_SEED)
    return frozenset(item.item_id.split("/")[-1].split(":")[0] for item in items)


def _temperature(rng: random.Random) -> float:
    return rng.choices(list(TEMPERATURE_SHARES), list(TEMPERATURE_SHARES.values()))[0]


def _self_written(seed: int) -> Iterator[PromptSpec]:
    rng = random.Random(f"chat-self:{seed}")
    index = 0
    while True:
        prompt_id = f"chat-self/{seed}/{index}"
        yield PromptSpec(
            prompt_id,
            "chat-self",
            split_of(prompt_id),
            None,
            _temperature(rng),
            MAX_CHAT_TOKENS,
            may_follow_up=True,
        )
        index += 1


def _topics(seed: int) -> Iterator[PromptSpec]:
    """Every topic in every form, shuffled; a topic is on one side of the split only."""
    pairs = [(topic, form) for topic in _CHAT["topics"] for form in _CHAT["forms"]]
    rng = random.Random(f"chat-topic:{seed}")
    lap = 0
    while True:
        rng.shuffle(pairs)
        for topic, form in pairs:
            text = form.format(topic=topic)
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            yield PromptSpec(
                f"chat-topic/{seed}.{lap}/{digest}",
                "chat-topic",
                split_of(topic),
                (Message("user", text),),
                _temperature(rng),
                MAX_CHAT_TOKENS,
                may_follow_up=True,
            )
        lap += 1


def _snippets(seed: int, root: Path | None) -> Iterator[tuple[int, Snippet, Split]]:
    """Snippets without end: each lap cuts the files at other places.

    Raises:
        EnvironmentProblem: there are none.
    """
    held_out = held_out_modules(root)
    library = root or Path(sysconfig.get_path("stdlib"))
    lap = 0
    while True:
        index = -1
        # Laps of other seeds and other laps cut files differently; see iter_snippets.
        for index, snippet in enumerate(iter_snippets(library, seed * 1000 + lap)):
            if snippet.module not in held_out:
                yield lap, snippet, "train"
            elif index % round(1 / HELD_OUT_KEPT) == 0:
                yield lap, snippet, "test"
        if index < 0:
            raise EnvironmentProblem(
                f"{library} holds no Python source to make code prompts from; "
                "install Python with its standard library"
            )
        lap += 1


def _code_edits(seed: int, root: Path | None) -> Iterator[PromptSpec]:
    for lap, snippet, split in _snippets(seed, root):
        rng = random.Random(f"train code-edit {seed} {lap} {snippet}")
        kinds = list(TASKS)
        rng.shuffle(kinds)
        tasks = ((kind, TASKS[kind](snippet.text, rng)) for kind in kinds)
        kind, task = next(((kind, task) for kind, task in tasks if task), (None, None))
        if kind is None or task is None:
            continue
        text = f"{task.instruction} {_CODE_CLOSING}\n\n```python\n{task.code}```"
        place = f"{snippet.module}:{snippet.first_line}-{snippet.last_line}"
        yield PromptSpec(
            f"code-edit/{seed}.{lap}/{kind}/{place}",
            "code-edit",
            split,
            (Message("user", text),),
            _temperature(rng),
            max_output_tokens(task.code),
        )


def _code_writing(seed: int, root: Path | None) -> Iterator[PromptSpec]:
    # Another stream of snippets than the edits', so that one piece of code rarely has both.
    for lap, snippet, split in _snippets(seed + 1, root):
        rng = random.Random(f"train code-write {seed} {lap} {snippet}")
        stub = documented_stub(snippet.text)
        if stub is None:
            form, code = rng.choice(_EXPLAIN_FORMS), snippet.text
        else:
            form, code = rng.choice(_WRITE_FORMS), stub
        place = f"{snippet.module}:{snippet.first_line}-{snippet.last_line}"
        yield PromptSpec(
            f"code-write/{seed}.{lap}/{place}",
            "code-write",
            split,
            (Message("user", f"{form}\n\n```python\n{code}```"),),
            _temperature(rng),
            MAX_CHAT_TOKENS,
        )


def documented_stub(text: str) -> str | None:
    """Signature and docstring of the first documented function; None if there is none."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            end = node.body[0].end_lineno or node.body[0].lineno
            return "".join(line for line in lines[node.lineno - 1 : end])
    return None
