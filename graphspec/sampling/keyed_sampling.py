"""Position-keyed sampling: a token is a pure function of logits, parameters and a key.

The key is (seed of the request, completion index, absolute position of the token, purpose).

The token at absolute position p is argmax(processed logits + T * Gumbel(key at p)), which is an exact draw from the
softmax of the processed logits at temperature T (Gumbel-max trick; Maddison et al. 2014, arXiv:1411.0030). Temperature
0 adds no noise and *is* greedy. Because the noise depends on the key only, the text does not depend on k, drafter,
depth or batch.

Every function here has static shapes and reads nothing back to the host. What touches the whole vocabulary works in
place and without masks where it can: on a CPU a sampled step costs what it writes, and a masked fill costs as much as
many additions (docs/LOG.md).
"""

from __future__ import annotations

import numpy as np
import torch

from graphspec.records.sampling_params import MAX_BOUNDED_TOP_K
from graphspec.sampling.rows import SamplingRows, as_int32

# How tokens are drawn; each serves what the ones before it serve. And every kind of graph, see `request.sampler_kind`.
BASES = ("greedy", "plain", "bounded", "sorted")
EXTRAS = ("+processors", "+logprobs", "+processors+logprobs")
SAMPLERS = (*BASES, *(base + extras for base in BASES[2:] for extras in EXTRAS))

# What the noise is for. Distinct purposes have independent noise.
PURPOSE_TARGET = 0

# Numbers in a block of logits on a CPU. A few blocks in flight fit into a cache of some megabytes.
BLOCK_NUMBERS = 8 * 49152

FLOAT32_MIN = torch.finfo(torch.float32).min


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of MurmurHash3 (Appleby), a bijection of 32-bit integers with wrap-around. In place, on int32."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= as_int32(0x85EBCA6B)
    x ^= (x >> 13).bitwise_and_(0x7FFFF)
    x *= as_int32(0xC2B2AE35)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise for `token_ids` (int32) under `keys` `[..., 2]` (int32); the two broadcast.

    The counter hash mix((mix(0x9E3779B9 token) xor key 0) + key 1), modulo 2**32, gives 31 low bits m. u = (m + 1/2) /
    2**31 lies strictly inside (0, 1), E = -log(1 - u) is a standard exponential and -log E the noise. Small E decide,
    and there u keeps all of its bits: the largest noise is log(2**32), 22.2, with the resolution of m + 1/2 below it.
    Towards 1, u is rounded to 24 bits and the noise ends at -2.8. Two tokens share a value with probability 2**-31.
    """
    return _noise(_mix(token_ids * as_int32(0x9E3779B9)), keys)


def _noise(token_words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`gumbel` of tokens that were mixed already."""
    word = _mix((token_words ^ keys[..., 0]).add_(keys[..., 1]))
    u = word.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(-(2.0**-31))  # negative from here on
    return u.clamp_(min=2.0**-24 - 1.0).log1p_().neg_().log_().neg_()


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
    return torch.stack((_mix(a + b), _mix(a ^ _mix(b))), dim=-1)  # the sum comes first: mixing b changes it


def sample(logits: torch.Tensor, positions: torch.Tensor, params: SamplingRows, base: str) -> torch.Tensor:
    """Token ids `[R, Q]` drawn from `logits` `[R, Q, V]` for absolute `positions` `[R, Q]`.

    `base` names how: "greedy", "plain" (noise), "bounded" (and top-k with what else, thresholds from the
    MAX_BOUNDED_TOP_K most likely tokens) or "sorted" (any top-p). It must serve every row (`request.sampler_kind`), and
    all that serve a row give it the same token. Rows at temperature 0 take the first largest logit in every kind.
    """
    if base == "greedy":
        return logits.argmax(dim=-1)
    logits = logits.float()
    keys = position_keys(params.seed, params.completion, positions, PURPOSE_TARGET).unsqueeze(-2)  # [R, Q, 1, 2]
    temperature = params.temperature.view(-1, 1, 1).expand(*positions.shape, 1)
    # A clamped threshold keeps -inf - -inf out of it.
    lowest = lowest_logit(logits, params, base).clamp(min=FLOAT32_MIN)
    if logits.device.type == "cpu":
        tokens: torch.Tensor = draw_in_blocks(logits, keys, temperature, lowest)
        return tokens
    return draw(logits, token_words(logits), keys, temperature, lowest)


def token_words(logits: torch.Tensor) -> torch.Tensor:
    """The ids of all tokens, mixed for `_noise`. [V]"""
    ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    return _mix(ids * as_int32(0x9E3779B9))


def draw(
    logits: torch.Tensor, words: torch.Tensor, keys: torch.Tensor, temperature: torch.Tensor, lowest: torch.Tensor
) -> torch.Tensor:
    """The token with the largest sum of logit and noise, of those whose logit is not below `lowest`. `logits`
    `[..., V]`, `words` `[V]`, `keys` `[..., 1, 2]`, `temperature` and `lowest` `[..., 1]` -> `[...]`."""
    scores = _noise(words, keys).mul_(temperature).add_(logits)
    # 0 for what survives the filters, -inf for the rest.
    barrier = torch.threshold_(logits - lowest, -1e-30, float("-inf")).clamp_(max=0.0)
    return scores.add_(barrier).argmax(dim=-1)


@torch.library.custom_op("graphspec::draw_in_blocks", mutates_args=())
def draw_in_blocks(
    logits: torch.Tensor, keys: torch.Tensor, temperature: torch.Tensor, lowest: torch.Tensor
) -> torch.Tensor:
    """`draw` for a CPU: a block of rows stays in the cache through its two dozen passes."""
    words, size = token_words(logits), logits.shape[-1]
    rows = logits.reshape(-1, size), keys.reshape(-1, 1, 2), temperature.reshape(-1, 1), lowest.reshape(-1, 1)
    blocks = zip(*(torch.split(own, max(1, BLOCK_NUMBERS // size)) for own in rows), strict=True)
    return torch.cat([draw(own, words, *given) for own, *given in blocks]).view(logits.shape[:-1])


@draw_in_blocks.register_fake
def _draw_in_blocks_shape(
    logits: torch.Tensor, keys: torch.Tensor, temperature: torch.Tensor, lowest: torch.Tensor
) -> torch.Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)


def lowest_logit(logits: torch.Tensor, params: SamplingRows, base: str) -> torch.Tensor:
    """The smallest logit `[R, Q, 1]` that survives top-k, then top-p, then min-p at the temperature of its row (1 for
    rows at 0, where the largest logit survives everything). -inf: all survive."""
    temperature = torch.where(params.temperature > 0, params.temperature, 1.0).view(-1, 1, 1)
    min_p = logits.amax(dim=-1, keepdim=True) + temperature * torch.log(params.min_p).view(-1, 1, 1)  # log 0: off
    if base == "plain":
        return min_p
    if base == "bounded":
        ordered = logits.topk(min(MAX_BOUNDED_TOP_K, logits.shape[-1]), dim=-1).values
    else:
        ordered = sort_descending(logits)
    width = ordered.shape[-1]
    top_k, top_p = params.top_k.to(torch.int64).view(-1, 1, 1), params.top_p.view(-1, 1, 1)
    last = (torch.where(top_k > 0, top_k, width).clamp(max=width) - 1).expand_as(min_p)
    # Top-p keeps a token while the probability of the more likely ones is below p. At p = 1 it is not asked: float32
    # sums may reach 1 before the last token.
    mass = (ordered - ordered[..., :1]).div_(temperature).exp_().cumsum(dim=-1)
    reached = torch.searchsorted(mass, top_p * mass.gather(-1, last))
    last = torch.where(top_p < 1.0, torch.minimum(reached, last), last)
    cut = torch.maximum(ordered.gather(-1, last), min_p)
    return torch.where(top_k > 0, cut, min_p) if base == "bounded" else cut


@torch.library.custom_op("graphspec::sort_descending", mutates_args=())
def sort_descending(x: torch.Tensor) -> torch.Tensor:
    """Values in descending order of the last dimension. On the CPU numpy's vectorised sort, which is many times faster
    than torch's since it keeps no indices."""
    return x.sort(dim=-1, descending=True).values


@sort_descending.register_kernel("cpu")
def _sort_descending_cpu(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sort(x.neg().numpy(), axis=-1)).neg_()


@sort_descending.register_fake
def _sort_descending_shape(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
