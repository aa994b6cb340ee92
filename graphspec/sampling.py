"""Position-keyed sampling: a token is a pure function of logits, parameters and the key (seed, position).

The token at absolute position p is argmax(processed logits / T + Gumbel(key at p)), which is an exact draw from the
softmax of the processed logits (Gumbel-max trick; Maddison et al. 2014, arXiv:1411.0030). Temperature 0 adds no noise
and *is* greedy. Because the noise depends on the key only, the text does not depend on k, drafter, depth or batch.

Every function here has static shapes and reads nothing back to the host.
"""

from __future__ import annotations

import torch

from graphspec.request import MAX_BOUNDED_TOP_K
from graphspec.state import SamplingRows, as_int32

SAMPLERS = ("greedy", "plain", "bounded", "sorted")

# What the noise is for. Distinct purposes have independent noise.
PURPOSE_TARGET = 0


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of MurmurHash3 (Appleby): a bijection of 32-bit integers, on int32 tensors with wrap-around."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * as_int32(0x85EBCA6B)
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * as_int32(0xC2B2AE35)
    return x ^ ((x >> 16) & 0xFFFF)


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise for `token_ids` (int32) under `keys` `[..., 2]` (int32); the two broadcast.

    The counter hash gives 31 bits m; u = (m + 1/2) / 2**31 lies strictly inside (0, 1), E = -log(1 - u) is a standard
    exponential and -log E the noise. Small E decide, and there u keeps all of its bits: the largest possible noise is
    log(2**32), 22.2, and two vocabulary entries collide with probability 2**-31.
    """
    word = _mix(_mix(token_ids * as_int32(0x9E3779B9) ^ keys[..., 0]) + keys[..., 1])
    u = ((word & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2.0**-31
    exponential = -torch.log1p(-u.clamp(max=1.0 - 2.0**-24))
    return -torch.log(exponential)


def position_keys(seed: torch.Tensor, positions: torch.Tensor, purpose: int) -> torch.Tensor:
    """Keys `[R, Q, 2]` (int32) from seeds `[R, 2]` and absolute positions `[R, Q]`."""
    where = _mix(positions.to(torch.int32) + as_int32(0x632BE5AB * (purpose + 1)))
    low = _mix(seed[:, :1] ^ where)
    high = _mix(seed[:, 1:] + where + as_int32(0x7F4A7C15))
    return torch.stack((_mix(low + high), _mix(low ^ _mix(high))), dim=-1)


def sample(logits: torch.Tensor, positions: torch.Tensor, params: SamplingRows, sampler: str) -> torch.Tensor:
    """Token ids `[R, Q]` drawn from `logits` `[R, Q, V]` for absolute `positions` `[R, Q]`.

    `sampler` names the kind of graph; it must serve every row (`request.sampler_kind`), and all kinds that serve a
    row give it the same token. Rows at temperature 0 take the first largest logit in every kind.
    """
    if sampler == "greedy":
        return logits.argmax(dim=-1)
    keys = position_keys(params.seed, positions, PURPOSE_TARGET).unsqueeze(-2)  # [R, Q, 1, 2]
    hot = (params.temperature > 0).view(-1, 1, 1)
    scaled = logits.float() / torch.where(hot, params.temperature.view(-1, 1, 1), 1.0)
    if sampler == "bounded":
        return _sample_bounded(scaled, keys, hot, params)
    vocabulary = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    if sampler == "sorted":
        ordered = scaled.sort(dim=-1, descending=True).values
        scaled = scaled.masked_fill(scaled < _threshold(ordered, params), float("-inf"))
    else:
        scaled = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + _log_min_p(params), float("-inf"))
    return (scaled + torch.where(hot, gumbel(keys, vocabulary), 0.0)).argmax(dim=-1)


def _sample_bounded(scaled: torch.Tensor, keys: torch.Tensor, hot: torch.Tensor, params: SamplingRows) -> torch.Tensor:
    """Hot rows draw from their most likely tokens, where noise is needed for these only.

    Twice as many candidates as the widest top-k: tokens that tie with the k-th survive too, as in the other kinds.
    """
    values, ids = scaled.topk(min(2 * MAX_BOUNDED_TOP_K, scaled.shape[-1]), dim=-1)
    scores = values + gumbel(keys, ids.to(torch.int32))
    scores = scores.masked_fill(values < _threshold(values, params), float("-inf"))
    # Equal scores go to the smallest id, as argmax over the vocabulary would have it.
    best = scores == scores.amax(dim=-1, keepdim=True)
    drawn = torch.where(best, ids, scaled.shape[-1]).amin(dim=-1)
    return torch.where(hot.squeeze(-1), drawn, scaled.argmax(dim=-1))


def _threshold(ordered: torch.Tensor, params: SamplingRows) -> torch.Tensor:
    """The smallest scaled logit `[R, Q, 1]` that survives top-k, then top-p, then min-p.

    `ordered` `[R, Q, M]` is descending and holds at least the k largest. Top-p keeps a token while the probability
    of the more likely ones is below p, so the most likely token always survives.
    """
    width = ordered.shape[-1]
    top_k = torch.where(params.top_k > 0, params.top_k, width).clamp(max=width).view(-1, 1, 1)
    rank = torch.arange(width, device=ordered.device)
    kept = ordered.masked_fill(rank >= top_k, float("-inf"))
    probabilities = kept.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = params.top_p.view(-1, 1, 1)
    keep = ((before < top_p) | (top_p >= 1.0)) & (rank < top_k)  # float32 sums may reach 1 before the last token
    keep &= ordered >= ordered[..., :1] + _log_min_p(params)
    last = keep.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    return ordered.gather(-1, last)


def _log_min_p(params: SamplingRows) -> torch.Tensor:
    return torch.log(params.min_p).view(-1, 1, 1)  # log 0 = -inf: off
