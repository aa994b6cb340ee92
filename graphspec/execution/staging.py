"""The host side of a launch: pinned arrays that the scheduler's plan is written to and the answer read from.

A set of arrays belongs to one launch from the moment it is filled until its answer has been taken, so there are
depth + 2 of them, used in turn:

    depth 1     host    fill A  fill B  read A  fill C  read B  fill A ...
                device          [ A ]   [ B ]           [ C ]

While the host fills C, A has been answered and B is running. Rewriting a set whose launch is still in flight would
feed the device a mixture of two steps: `StagingRing.take` asserts that it cannot happen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from graphs import Event
from graphspec.execution.iteration import OUTPUT_HEADER, DecodeInputs, PrefillInputs
from graphspec.records.acceptance import RejectionRows
from graphspec.records.launch import DecodeRows, PrefillRows, RowResults
from graphspec.sampling.logprobs import read_logprobs


class StagingSizes(NamedTuple):
    max_rows: int
    max_prefill_tokens: int
    table_width: int
    num_draft: int
    scratch_slot: int
    scratch_page: int
    logprob_width: int = 0  # integers per position
    rejection_width: int = 0  # integers behind the tokens of a decode row


class StagedStep:
    """Host arrays of one launch, as torch tensors (pinned for CUDA) and numpy views of the same memory."""

    def __init__(self, sizes: StagingSizes, pin: bool) -> None:
        self._sizes = sizes

        def host(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pin)

        rows, tokens, width = sizes.max_rows, sizes.max_prefill_tokens, sizes.table_width
        self._decode = DecodeInputs(host(rows), host(rows, width, dtype=torch.int32))
        self._prefill = PrefillInputs(
            token_slots=host(tokens),
            token_rows=host(tokens),
            positions=host(tokens),
            query_start=host(rows + 1, dtype=torch.int32),
            seq_lens=host(rows, dtype=torch.int32),
            row_slots=host(rows),
            block_tables=host(rows, width, dtype=torch.int32),
            scored=host(tokens),
        )
        positions = 1 + sizes.num_draft
        self.decode_output = host(rows, OUTPUT_HEADER + positions + sizes.rejection_width, dtype=torch.int32)
        self.decode_logprobs = host(rows, positions * sizes.logprob_width, dtype=torch.int32)
        self.prefill_output = host(rows, OUTPUT_HEADER + 1, dtype=torch.int32)
        self.prefill_logprobs = host(rows, sizes.logprob_width, dtype=torch.int32)
        self.prompt_logprobs = host(tokens, sizes.logprob_width, dtype=torch.int32)
        self._decode_view = _numpy_views(self._decode)
        self._prefill_view = _numpy_views(self._prefill)
        self.width = positions  # tokens of a decode row
        self.event: Event | None = None
        self.captured = False  # the launch captured its graph first

    def fill_decode(self, rows: DecodeRows, bucket: int) -> DecodeInputs:
        """Write the rows and pad them to `bucket` with rows on the scratch slot and page. Returns `[bucket]` views."""
        count, view = len(rows.slots), self._decode_view
        view["row_slots"][:count] = rows.slots
        view["row_slots"][count:bucket] = self._sizes.scratch_slot
        view["block_tables"][:count] = rows.page_table
        view["block_tables"][count:bucket] = self._sizes.scratch_page
        return DecodeInputs(*(t[:bucket] for t in self._decode))

    def fill_prefill(self, rows: PrefillRows) -> PrefillInputs:
        """Write the packed chunks. Chunks that are not final are given the scratch slot: they sample nothing."""
        count, total, view = len(rows.slots), int(rows.lengths.sum()), self._prefill_view
        ends = rows.lengths.cumsum()
        row_of_token = np.repeat(np.arange(count), rows.lengths)
        view["token_rows"][:total] = row_of_token
        view["token_slots"][:total] = rows.slots[row_of_token]
        view["positions"][:total] = np.arange(total) - (ends - rows.lengths - rows.starts)[row_of_token]
        view["query_start"][0] = 0
        view["query_start"][1 : count + 1] = ends
        view["seq_lens"][:count] = rows.starts + rows.lengths
        view["row_slots"][:count] = np.where(rows.final, rows.slots, self._sizes.scratch_slot)
        view["block_tables"][:count] = rows.page_table
        scored = np.flatnonzero(view["positions"][:total] < rows.scored_to[row_of_token])
        view["scored"][: len(scored)] = scored
        lengths = (total, total, total, count + 1, count, count, count, len(scored))
        return PrefillInputs(*(t[:n] for t, n in zip(self._prefill, lengths, strict=True)))


def _numpy_views(inputs: DecodeInputs | PrefillInputs) -> dict[str, npt.NDArray[Any]]:
    return {name: tensor.numpy() for name, tensor in inputs._asdict().items()}


class StagingRing:
    """depth + 2 sets of host arrays, taken in turn."""

    def __init__(self, sizes: StagingSizes, depth: int, pin: bool) -> None:
        self._sets = [StagedStep(sizes, pin) for _ in range(depth + 2)]
        self._next = 0

    def take(self) -> StagedStep:
        staged = self._sets[self._next]
        self._next = (self._next + 1) % len(self._sets)
        assert staged.event is None or staged.event.query(), "staging set reused while its launch is in flight"
        return staged


def read_rows(output: torch.Tensor, count: int, width: int, logprobs: torch.Tensor | None = None) -> RowResults:
    """Copy the first `count` output rows, of `width` tokens, out of a staging set, with their `logprobs`. The launch
    must be over."""
    raw = output[:count].numpy()
    rows = raw.astype(np.int64)
    tokens, rest = rows[:, OUTPUT_HEADER : OUTPUT_HEADER + width], rows[:, OUTPUT_HEADER + width :]
    read = None if logprobs is None else read_logprobs(logprobs[:count].view(*tokens.shape, -1).numpy())
    rejections = None
    if rest.shape[1]:
        gaps = np.ascontiguousarray(raw[:, OUTPUT_HEADER + width + 1]).view(np.float32)
        rejections = RejectionRows(rest[:, 0], gaps, rest[:, 2] > 0)
    emitted, healthy, computed, matching = rows[:, :OUTPUT_HEADER].T
    return RowResults(emitted, healthy, computed, matching, tokens, read, rejections)
