"""The DSpark drafter with a length for every request, in place of whole blocks, or none.

Shapes depend on the number of requests and of drafted tokens, which the host knows. How
the tokens are spread over the requests lies on the device and is never read back there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import prepare_dflash_inputs
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from specbench.vllm_plugin.context_backlog import ContextRows


class Verdicts(NamedTuple):
    """What the sampler left of a step; shapes as in vLLM's propose."""

    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor
    next_prefill_tokens: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor


class _Rows(NamedTuple):
    """The drafted tokens as rows of one batch, request by request.

    Attributes:
        request: [num_tokens] which request a row belongs to, in batch order.
        position: [num_tokens] its position in the request's block.
        start: [num_reqs + 1] first row of each request.
    """

    request: torch.Tensor
    position: torch.Tensor
    start: torch.Tensor


class RaggedDSparkSpeculator(DSparkSpeculator):  # type: ignore[misc]
    """Adds drafting by lengths, which needs all contexts stored that came before."""

    def why_not_ragged(self) -> str:
        """What keeps this drafter from drafting by lengths; empty if nothing does."""
        if not self.sample_from_anchor:
            return "its blocks start with a token that is not drafted"
        if self._draft_topk is not None:
            return "it samples from few candidates only"
        if self.dp_size > 1 or self.dcp_size > 1 or self.pcp_manager is not None:
            return "it runs data or context parallel"
        return ""

    @torch.inference_mode()
    def context_rows(
        self, input_batch: Any, aux_hidden_states: list[torch.Tensor], verdicts: Verdicts
    ) -> ContextRows:
        """The step's tokens as contexts to store; also lays out whole blocks behind them."""
        num_reqs, num_tokens = input_batch.num_reqs, input_batch.num_tokens
        tables = self.block_tables
        for i, group in enumerate(self.draft_kv_cache_group_ids):
            prepare_dflash_inputs(
                self.input_buffers,
                tables.slot_mappings[group],
                self.context_positions,
                self._context_slot_mappings[i],
                self.sample_indices,
                self.sample_pos,
                self.sample_idx_mapping,
                self.temperature,
                self.seeds,
                input_batch,
                *verdicts,
                tables.input_block_tables[group],
                tables.block_sizes[group],
                tables.cp_rank,
                self.dcp_size,
                tables.cp_interleave,
                self.parallel_drafting_token_id,
                self.num_query_per_req,
                self.num_speculative_steps,
                self.max_num_reqs,
                self.max_num_tokens,
                self.max_model_len,
                self.sample_from_anchor,
            )
        owners = torch.repeat_interleave(
            input_batch.idx_mapping[:num_reqs].long(),
            input_batch.query_start_loc[: num_reqs + 1].diff(),
            output_size=num_tokens,
        )
        return ContextRows(
            torch.cat([states[:num_tokens] for states in aux_hidden_states], dim=-1),
            self.context_positions[:num_tokens],
            self._context_slot_mappings[:, :num_tokens],
            owners,
        )

    @torch.inference_mode()
    def store_contexts(self, rows: ContextRows) -> None:
        """Store keys and values of these tokens for later drafts to attend to."""
        num_tokens = rows.positions.shape[0]
        self.hidden_states[:num_tokens].copy_(self.model.combine_hidden_states(rows.features))
        self.context_positions[:num_tokens].copy_(rows.positions)
        self._context_slot_mappings[:, :num_tokens].copy_(rows.slots)
        self._precompute_context_kv(0, num_tokens)

    @torch.inference_mode()
    def draft_ragged(self, input_batch: Any, lengths: torch.Tensor, budget: int) -> None:
        """Draft ``lengths`` tokens; contexts were stored, and whole blocks laid out.

        Fills draft tokens and confidences; what lies beyond a request's length is undefined.

        Args:
            input_batch: of the step.
            lengths: [num_reqs] int on the device, each at most the block.
            budget: their sum, at least 1.
        """
        num_reqs = lengths.shape[0]
        rows = _rows(lengths, budget)
        self._lay_out(rows, lengths)
        self.draft_max_seq_len = min(
            int(input_batch.seq_lens_cpu_upper_bound[:num_reqs].max()) + self.num_query_per_req,
            self.max_model_len,
        )
        metadata = self._build_attn_metadata(
            num_reqs=num_reqs,
            batch_desc=BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.NONE, num_tokens=budget, num_reqs=None
            ),
            query_start_loc_np=self._stand_in_offsets(num_reqs, budget),
            seq_lens_cpu_upper_bound=input_batch.seq_lens_cpu_upper_bound,
            step=self.num_query_per_req,
            causal=self._group_causal,
        )
        slots = build_slot_mappings_by_layer(
            self.block_tables.slot_mappings[:, :budget], self.kv_cache_config
        )
        self._prepare_eplb_forward(budget)
        hidden = self._run_model(budget, metadata, slots, None)
        self._sample_rows(hidden, rows, lengths)

    def _lay_out(self, rows: _Rows, lengths: torch.Tensor) -> None:
        """Close up the rows of the whole blocks that :meth:`context_rows` laid out."""
        num_reqs, budget = lengths.shape[0], rows.request.shape[0]
        block, buffers = self.num_query_per_req, self.input_buffers
        whole = rows.request * block + rows.position
        anchors = buffers.positions[: num_reqs * block : block]
        seq_lens = (anchors + lengths).clamp(max=self.max_model_len)
        buffers.seq_lens[:num_reqs] = seq_lens.to(buffers.seq_lens.dtype)
        for buffer in (buffers.input_ids, buffers.positions):
            buffer[:budget] = buffer[whole]
        for group in self.draft_kv_cache_group_ids:
            slots = self.block_tables.slot_mappings[group]
            slots[:budget] = slots[whole]
            slots[budget : num_reqs * block].fill_(PAD_SLOT_ID)
        buffers.query_start_loc[: num_reqs + 1] = rows.start.to(buffers.query_start_loc.dtype)
        buffers.query_start_loc[num_reqs + 1 :].fill_(budget)

    def _stand_in_offsets(self, num_reqs: int, budget: int) -> np.ndarray:
        """[num_reqs + 1] for the host, which does not know the lengths.

        Their sum and the longest query are right, as if the first requests drafted whole
        blocks; attention reads each request's own offsets from the device.
        """
        block = int(self.num_query_per_req)
        return np.minimum(np.arange(num_reqs + 1, dtype=np.int32) * block, np.int32(budget))

    def _sample_rows(self, hidden: torch.Tensor, rows: _Rows, lengths: torch.Tensor) -> None:
        """Sample position by position, each with the Markov bias of the token before."""
        num_reqs, budget = lengths.shape[0], rows.request.shape[0]
        logits = self.model.compute_draft_logits(hidden)
        slots = self.sample_idx_mapping[: num_reqs * self.num_speculative_steps]
        sample_pos = self.sample_pos[: num_reqs * self.num_speculative_steps]
        # Longest first: those that draft beyond a position are the first rows of the order.
        order = torch.argsort(lengths, descending=True, stable=True)
        previous = self.input_buffers.input_ids[rows.start[:-1].clamp(max=budget - 1)][order]
        embeds = None
        for position, count in enumerate(self._counts(lengths, budget)):
            requests = order[:count]
            embed = self.model.markov_embed(previous[:count])
            if embeds is None:
                embeds = embed.new_zeros(num_reqs, self.num_speculative_steps, embed.shape[1])
            embeds[requests, position] = embed
            # A count may be too high; rows of requests that end before are of no use then.
            own = (rows.start[requests] + position).clamp(max=budget - 1)
            cell = requests * self.num_speculative_steps + position
            previous = self._sample_logits(
                logits[own] + self.model.markov_bias(embed), slots[cell], sample_pos[cell], position
            )
            self.draft_tokens[requests, position] = previous
        if self.use_confidence_head and embeds is not None:
            cells = (rows.request, rows.position)
            confidence = self.model.compute_confidence(hidden, embeds[cells])
            probs = self.draft_token_confidence_probs
            probs[cells] = confidence.view(-1).to(probs.dtype)

    def _counts(self, lengths: torch.Tensor, budget: int) -> list[int]:
        """How many requests to sample at each position: those that draft beyond it, or more.

        Exact where lengths lie in host memory. Elsewhere as many as could: requests that
        draft more than i tokens have at least i + 1 of the budget each.
        """
        if lengths.device.type == "cpu":
            longer = lengths[None, :] > torch.arange(self.num_speculative_steps)[:, None]
            counts = longer.sum(dim=1).tolist()
        else:
            num_reqs = lengths.shape[0]
            counts = [min(num_reqs, budget // (i + 1)) for i in range(self.num_speculative_steps)]
        return [count for count in counts if count]


def _rows(lengths: torch.Tensor, budget: int) -> _Rows:
    """Rows of a batch of ``budget`` tokens; no host read."""
    device = lengths.device
    start = torch.nn.functional.pad(lengths.long().cumsum(0), (1, 0))
    request = torch.repeat_interleave(
        torch.arange(lengths.shape[0], device=device), lengths.long(), output_size=budget
    )
    position = torch.arange(budget, device=device) - start[request]
    return _Rows(request, position, start)
