"""Log-probabilities of tokens under the model's own logits, before anything changes them, and the most likely tokens.

On the device a position is one row of 32-bit integers, floats as their bits: rank, T ids, log-probability, T
log-probabilities. So it travels in one copy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from graphspec.records.launch import LogprobRows
from graphspec.records.sampling_params import MAX_LOGPROBS


def logprob_width(vocab_size: int) -> int:
    """Integers per position."""
    return 2 + 2 * min(MAX_LOGPROBS, vocab_size)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`[..., logprob_width]` (int32) for `tokens` `[...]` under `logits` `[..., V]`. Static shapes, capturable.

    (Not by `logsumexp`: torch shares the sum of a single row out among threads, which gives it other bits than the same
    row has beside others.)
    """
    ids = tokens.unsqueeze(-1)
    rank = (logits > logits.gather(-1, ids)).sum(dim=-1, keepdim=True, dtype=torch.int32) + 1
    top_ids = logits.topk(min(MAX_LOGPROBS, logits.shape[-1]), dim=-1).indices
    values = logits.float().log_softmax(dim=-1).gather(-1, torch.cat((ids, top_ids), dim=-1))
    return torch.cat((torch.cat((rank, top_ids), dim=-1).to(torch.int32), values.view(torch.int32)), dim=-1)


def read_logprobs(packed: npt.NDArray[np.int32]) -> LogprobRows:
    """Unpack `[..., logprob_width]` into arrays of their own."""
    half = packed.shape[-1] // 2
    integers, values = packed[..., :half].astype(np.int64), np.ascontiguousarray(packed[..., half:]).view(np.float32)
    return LogprobRows(values[..., 0].copy(), integers[..., 0], integers[..., 1:], values[..., 1:].copy())
