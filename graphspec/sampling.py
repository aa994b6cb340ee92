"""Position-keyed sampling: a token is a pure function of logits, parameters and a key.

The key is (seed of the request, completion index, absolute position of the token, purpose).

The token at absolute position p is argmax(processed logits / T + Gumbel(key at p)), which is an exact draw from the
softmax of the processed logits (Gumbel-max trick; Maddison et al. 2014, arXiv:1411.0030). Temperature 0 adds no noise
and *is* greedy. Because the noise depends on the key only, the text does not depend on k, drafter, depth or batch.

Every function here has static shapes and reads nothing back to the host.
"""

from __future__ import annotations

import torch

from graphspec.request import MAX_BOUNDED_TOP_K
from graphspec.state import SamplingRows, as_int32

# How tokens are drawn; each serves what the ones before it serve. And every kind of graph, see `request.sampler_kind`.
BASES = ("greedy", "plain", "bounded", "sorted")
EXTRAS = ("+processors", "+logprobs", "+processors+logprobs")
SAMPLERS = (*BASES, *(base + extras for base in BASES[2:] for extras in EXTRAS))

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
    log(2**32), 22.2, in steps of one part in 2 m + 1; towards 1, u is rounded to 24 bits and the noise ends at -2.8.
    Two vocabulary entries collide with probability 2**-31.
    """
    word = _mix(_mix(token_ids * as_int32(0x9E3779B9) ^ keys[..., 0]) + keys[..., 1])
    u = ((word & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2.0**-31
    exponential = -torch.log1p(-u.clamp(max=1.0 - 2.0**-24))
    return -torch.log(exponential)


def position_keys(seed: torch.Tensor, completion: torch.Tensor, positions: torch.Tensor, purpose: int) -> torch.Tensor:
    """Keys `[R, Q, 2]` (int32) from seeds `[R, 2]`, completion indices `[R]` and absolute positions `[R, Q]`.

    With mix the finaliser above, all modulo 2**32: the index moves both words of the seed, low by xor with
    mix(0x9E3779B9 index), high by adding mix(0x85EBCA6B index), which is nothing for index 0. where = mix(position +
    0x632BE5AB (purpose + 1)), a = mix(low xor where), b = mix(high + where + 0x7F4A7C15); the key is
    (mix(a + b), mix(a xor mix(b))). Integers only, so it is the same on every device.
    """
    index = completion.unsqueeze(1)
    low = seed[:, :1] ^ _mix(index * as_int32(0x9E3779B9))
    high = seed[:, 1:] + _mix(index * as_int32(0x85EBCA6B))
    where = _mix(positions.to(torch.int32) + as_int32(0x632BE5AB * (purpose + 1)))
    a, b = _mix(low ^ where), _mix(high + where + as_int32(0x7F4A7C15))
    return torch.stack((_mix(a + b), _mix(a ^ _mix(b))), dim=-1)


def sample(logits: torch.Tensor, positions: torch.Tensor, params: SamplingRows, base: str) -> torch.Tensor:
    """Token ids `[R, Q]` drawn from `logits` `[R, Q, V]` for absolute `positions` `[R, Q]`.

    `base` names how: "greedy", "plain" (noise), "bounded" (and top-k with what else, thresholds from the
    MAX_BOUNDED_TOP_K most likely tokens) or "sorted" (any top-p). It must serve every row (`request.sampler_kind`), and
    all that serve a row give it the same token. Rows at temperature 0 take the first largest logit in every kind.
    """
    if base == "greedy":
        return logits.argmax(dim=-1)
    hot = (params.temperature > 0).view(-1, 1, 1)
    scaled = logits.float() / torch.where(hot, params.temperature.view(-1, 1, 1), 1.0)
    threshold = scaled.amax(dim=-1, keepdim=True) + _log_min_p(params)
    if base == "sorted":
        threshold = _threshold(scaled.sort(dim=-1, descending=True).values, params)
    elif base == "bounded":
        most_likely = scaled.topk(min(MAX_BOUNDED_TOP_K, scaled.shape[-1]), dim=-1).values
        threshold = torch.where((params.top_k > 0).view(-1, 1, 1), _threshold(most_likely, params), threshold)
    scaled = scaled.masked_fill(scaled < threshold, float("-inf"))
    keys = position_keys(params.seed, params.completion, positions, PURPOSE_TARGET).unsqueeze(-2)  # [R, Q, 1, 2]
    vocabulary = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    return (scaled + torch.where(hot, gumbel(keys, vocabulary), 0.0)).argmax(dim=-1)


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
