"""The generation loop, on an engine that answers from a script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specbench.engines.offline import Finished
from specbench.errors import InputError
from specbench.records import Message
from specbench.training import generate
from specbench.training.generate import Generator, chat_tokens, opening_tokens
from specbench.training.prompts import PromptSpec, iter_prompts
from specbench.training.responses import ResponseWriter, count_loop_tokens, read_responses


class Characters:
    """One token a character; the template marks turns."""

    chat_template = "yes"

    def apply_chat_template(self, chat: list[dict[str, str]], **options: Any) -> Any:
        text = "".join(f"<{turn['role']}>{turn['content']}</>" for turn in chat)
        if options.get("add_generation_prompt"):
            text += "<assistant>"
        return self.encode(text) if options.get("tokenize") else text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, token_ids))


class ScriptedEngine:
    """Finishes the oldest request in every step, with a text that depends on its id."""

    tokenizer = Characters()

    def __init__(self, answer: str = "answer to {}", max_model_len: int = 4000) -> None:
        self.answer = answer
        self.max_model_len = max_model_len
        self.queue: list[str] = []
        self.prompts: dict[str, str] = {}
        self.max_waiting = 0
        self.fail_after: int | None = None

    def add(
        self, request_id: str, token_ids: list[int], *, temperature: float, max_tokens: int
    ) -> None:
        self.queue.append(request_id)
        self.prompts.setdefault(request_id, self.tokenizer.decode(token_ids))
        self.max_waiting = max(self.max_waiting, len(self.queue))

    def step(self) -> Iterator[Finished]:
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                raise KeyboardInterrupt
        request_id = self.queue.pop(0)
        yield Finished(request_id, [ord(c) for c in self.answer.format(request_id)], True)


def generate_all(
    folder: Path,
    prompts: Iterable[PromptSpec],
    num_tokens: int | None = None,
    engine: ScriptedEngine | None = None,
    stream: str = "outside-set",
) -> tuple[ScriptedEngine, ResponseWriter, Generator]:
    engine = engine or ScriptedEngine()
    writer = ResponseWriter(folder, stream=stream, model="default", fingerprint="f")
    generator = Generator(engine, writer, prompts, seed=5, batch_size=8)  # type: ignore[arg-type]
    generator.run(num_tokens, lambda tokens, prompts: None)
    return engine, writer, generator


def run(folder: Path, num_tokens: int, engine: ScriptedEngine | None = None) -> ScriptedEngine:
    return generate_all(folder, iter_prompts(5), num_tokens, engine, "5")[0]


def conversation(name: str, *turns: str, temperature: float = 0.0) -> PromptSpec:
    return PromptSpec(
        name, "set", "test", (Message("user", turns[0]),), temperature, 50, later_turns=turns[1:]
    )


def test_it_stops_at_the_wanted_number_of_tokens_with_a_full_batch(tmp_path: Path) -> None:
    engine = run(tmp_path, 3000)
    frame = read_responses(tmp_path)
    total = int(frame["response_token_ids"].list.len().sum())
    assert 3000 <= total < 3100
    # A follow-up may join while the batch is full.
    assert 8 <= engine.max_waiting <= 10


def test_prompts_the_target_writes_are_then_answered(tmp_path: Path) -> None:
    run(tmp_path, 3000)
    rows = list(read_responses(tmp_path).iter_rows(named=True))
    own = [
        row for row in rows if row["source"] == "chat-self" and not row["prompt_id"].endswith("+")
    ]
    assert own
    for row in own:
        text = Characters().decode(row["prompt_token_ids"])
        assert text == f"<user>answer to {row['prompt_id']}</><assistant>"


def test_a_second_run_adds_and_repeats_nothing(tmp_path: Path) -> None:
    run(tmp_path, 2000)
    before = set(read_responses(tmp_path)["prompt_id"])
    run(tmp_path, 4000)
    after = read_responses(tmp_path)["prompt_id"].to_list()
    assert before < set(after)
    firsts = [prompt_id for prompt_id in after if not prompt_id.endswith("+")]
    assert len(firsts) == len(set(firsts))


def test_an_interrupted_run_keeps_what_was_finished(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    engine.fail_after = 40
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 100_000, engine)
    assert len(read_responses(tmp_path)) > 20


def test_a_prompt_the_target_breaks_off_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "MIN_PROMPT_TOKENS", 10_000)
    run(tmp_path, 2000)
    assert "chat-self" not in set(read_responses(tmp_path)["source"])


def test_the_opening_ends_where_the_users_text_begins() -> None:
    assert Characters().decode(opening_tokens(Characters())) == "<user>"


def test_a_model_without_chat_template_is_refused() -> None:
    tokenizer = Characters()
    tokenizer.chat_template = None  # type: ignore[assignment]
    with pytest.raises(InputError, match="chat template"):
        chat_tokens(tokenizer, (Message("user", "hello"),))


def test_a_finite_set_is_answered_whole_and_then_ends(tmp_path: Path) -> None:
    prompts = [conversation(f"p{index}", "Hello?") for index in range(20)]
    _, _, generator = generate_all(tmp_path, prompts)
    frame = read_responses(tmp_path)
    assert sorted(frame["prompt_id"]) == sorted(prompt.prompt_id for prompt in prompts)
    assert set(frame["split"]) == {"test"}
    assert generator.num_finished == 20


def test_later_turns_follow_with_the_models_own_answers(tmp_path: Path) -> None:
    generate_all(tmp_path, [conversation("p", "one", "two", "three")])
    texts = {
        row["prompt_id"]: Characters().decode(row["prompt_token_ids"])
        for row in read_responses(tmp_path).iter_rows(named=True)
    }
    assert set(texts) == {"p", "p+", "p++"}
    assert texts["p++"] == (
        "<user>one</><assistant>answer to p</><user>two</><assistant>answer to p+</>"
        "<user>three</><assistant>"
    )


def test_a_repeated_call_asks_nothing_again(tmp_path: Path) -> None:
    prompts = [conversation("p", "one", "two"), conversation("q", "one")]
    generate_all(tmp_path, prompts)
    engine, _, generator = generate_all(tmp_path, prompts)
    assert engine.prompts == {}
    assert generator.num_finished == 2


def test_a_conversation_cut_off_in_the_middle_is_completed(tmp_path: Path) -> None:
    generate_all(tmp_path, [conversation("p", "one")])
    engine, _, _ = generate_all(tmp_path, [conversation("p", "one", "two")])
    assert set(engine.prompts) == {"p", "p+"}
    assert read_responses(tmp_path)["prompt_id"].to_list() == ["p", "p+"]


def test_loops_are_cut_and_counted(tmp_path: Path) -> None:
    looping = ScriptedEngine(answer="a beginning" + "xy" * 20)
    _, writer, _ = generate_all(tmp_path, [conversation("p", "one")], engine=looping)
    row = read_responses(tmp_path).row(0, named=True)
    assert Characters().decode(row["response_token_ids"]) == "a beginningxy"
    assert writer.num_loop_tokens == 38
    assert count_loop_tokens(tmp_path) == {"outside-set": 38}


def test_answers_too_short_to_use_are_remembered(tmp_path: Path) -> None:
    prompts = [conversation("p", "one"), conversation("q", "two")]
    generate_all(tmp_path, prompts, engine=ScriptedEngine(answer="short"))
    engine, writer, _ = generate_all(tmp_path, prompts)
    assert engine.prompts == {}
    assert writer.num_tokens == 0


def test_a_prompt_too_long_for_the_target_is_left_out(tmp_path: Path) -> None:
    prompts = [conversation("long", "x" * 500), conversation("short", "one")]
    engine = ScriptedEngine(max_model_len=200)
    _, _, generator = generate_all(tmp_path, prompts, engine=engine)
    assert read_responses(tmp_path)["prompt_id"].to_list() == ["short"]
    assert generator.num_finished == 2


def test_a_target_without_room_for_any_prompt_ends_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="do not fit"):
        run(tmp_path, 1000, ScriptedEngine(max_model_len=40))
