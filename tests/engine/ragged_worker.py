"""Drafts of one engine in this process, taken where no client sees them; prints JSON.

In a process of its own because an engine in the test's process would leave its threads,
environment and replaced kernels behind.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from specbench.policies import DraftBudget

NUM_STEPS = 6
NUM_PROMPT_TOKENS = (40, 75, 20, 110)
Drafts = list[list[int]]


class Bench:
    """The engine, and the decisions that a test takes in the policy's place."""

    def __init__(self) -> None:
        from vllm import EngineArgs, LLMEngine

        from specbench.engines.arguments import engine_arguments, set_process_environment
        from specbench.engines.config import EngineConfig
        from specbench.engines.model_cache import resolve_drafter, resolve_model

        config = EngineConfig(
            model=None, drafter=None, max_num_seqs=4, dtype="float32", log_file=Path(os.devnull)
        )
        target = resolve_model(None)
        set_process_environment(config, on_cpu=True)
        drafter = resolve_drafter(None, target)
        arguments = engine_arguments(config, target, drafter, on_cpu=True)
        arguments["enable_prefix_caching"] = False
        self.engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
        core = self.engine.engine_core.engine_core
        self.runner: Any = core.model_executor.driver_worker.worker.model_runner
        core.use_spec_decode = True
        self.speculator: Any = self.runner.speculator
        self.runner.set_policy("forespark:7")
        self.policy: Any = self.runner.policy
        self.step = -1
        self.num_requests = 0

    def decide(self, lengths: Any, *, verify: bool) -> None:
        """Draft ``lengths(step, num_reqs)`` in every step; verify all of it or nothing."""
        self.policy.draft_lengths = lambda survival, capacity, budget: self._lengths(
            lengths, capacity
        )
        self.policy.draft_budget = lambda batch, costs: DraftBudget(
            int(self._lengths(lengths, batch.capacity).sum())
        )
        if verify:
            self.policy.verify_budget = lambda batch, costs: int(batch.capacity.sum())
        else:
            self.policy.verify_budget = lambda batch, costs: 0

    def _lengths(self, lengths: Any, capacity: torch.Tensor) -> torch.Tensor:
        wanted = torch.tensor(lengths(self.step, len(capacity)), dtype=torch.int32)
        return torch.minimum(wanted, capacity.to(torch.int32))

    def run(self, after_propose: Any, label: str) -> None:
        """Serve the four prompts for some steps; calls back after every drafting."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        generator = torch.Generator().manual_seed(0)
        stock = type(self.speculator).propose
        self.step = -1

        def propose(input_batch: Any, *args: Any, **options: Any) -> Any:
            self.step += 1
            drafts = stock(self.speculator, input_batch, *args, **options)
            after_propose(self, input_batch, args, options)
            return drafts

        self.speculator.propose = propose
        for i, length in enumerate(NUM_PROMPT_TOKENS):
            tokens = torch.randint(300, 8000, (length,), generator=generator).tolist()
            params = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True)
            prompt = TokensPrompt(prompt_token_ids=tokens)
            self.engine.add_request(f"{label}-{i}", prompt, params)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        del self.speculator.propose

    def drafts(self, num_reqs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and confidences of whole blocks, as they lie in the speculator."""
        tokens = self.speculator.draft_tokens[:num_reqs].clone()
        return tokens, self.speculator.draft_token_confidence_probs[:num_reqs].clone()


def whole_blocks(bench: Bench) -> dict[str, Any]:
    """Ragged drafting of whole blocks beside vLLM's own, in every step."""
    found: dict[str, Any] = {"equal": [], "difference": []}

    def compare(bench: Bench, batch: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

        tokens, confidence = bench.drafts(batch.num_reqs)
        DSparkSpeculator.propose(bench.speculator, batch, *args, **options)
        expected, expected_confidence = bench.drafts(batch.num_reqs)
        found["equal"] += (tokens == expected).flatten().tolist()
        found["difference"].append(float((confidence - expected_confidence).abs().max()))

    bench.decide(lambda step, n: [7] * n, verify=True)
    bench.run(compare, "whole")
    return found


def one_by_one(bench: Bench) -> dict[str, Any]:
    """Drafts of unequal lengths beside those of every request by itself."""
    lengths = ([3, 0, 7, 1], [0, 0, 2, 5], [7, 6, 0, 0], [1, 1, 1, 1], [0, 4, 0, 2])
    found: dict[str, Any] = {"equal": [], "difference": []}

    def compare(bench: Bench, batch: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        from specbench.vllm_plugin.ragged_drafting import Verdicts

        n = batch.num_reqs
        drafted = torch.tensor(lengths[bench.step % len(lengths)][:n], dtype=torch.int32)
        tokens, confidence = bench.drafts(n)
        named = dict(zip(("metadata", "slots", "last", "aux"), args, strict=False))
        for request in range(n):
            alone = torch.where(torch.arange(n) == request, drafted, 0)
            length = int(alone.sum())
            if not length:
                continue
            verdicts = Verdicts(*args[4:10])
            rows = bench.speculator.context_rows(batch, named["aux"], verdicts)
            bench.speculator.store_contexts(rows)
            bench.speculator.draft_ragged(batch, alone, length)
            expected, expected_confidence = bench.drafts(n)
            row = (request, slice(0, length))
            found["equal"] += (tokens[row] == expected[row]).tolist()
            difference = (confidence[row] - expected_confidence[row]).abs().max()
            found["difference"].append(float(difference))

    bench.decide(lambda step, n: lengths[step % len(lengths)][:n], verify=True)
    bench.run(compare, "alone")
    return found


def after_skipping(bench: Bench) -> dict[str, Any]:
    """Drafts of the last step, with and without drafting in the steps before it."""
    last: list[Drafts] = []

    def keep(bench: Bench, batch: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if bench.step == NUM_STEPS - 2:
            last.append(bench.drafts(batch.num_reqs)[0].tolist())

    bench.decide(lambda step, n: [7] * n, verify=False)
    bench.run(keep, "drafting")
    bench.decide(lambda step, n: [7 if step == NUM_STEPS - 2 else 0] * n, verify=False)
    bench.run(keep, "skipping")
    return {"without": last[0], "with": last[1]}


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    bench = Bench()
    results = {run.__name__: run(bench) for run in (whole_blocks, one_by_one, after_skipping)}
    print(json.dumps(results))


if __name__ == "__main__":
    sys.exit(main())
