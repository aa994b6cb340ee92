"""How fast a decode step could be at best on this machine.

A step cannot be faster than reading what it must read at the bandwidth of the memory, nor than its multiplications at
the rate of the machine's matrix product; the later of the two is the bound. Both rates are measured here, once per
process. What a step must move:

    weights   every parameter once, for all rows and positions together, in the form in which the engine reads it:
              packed ones in half precision; of an input embedding that is not also the output head, only the rows of
              the tokens
    KV        read: the true context of every row, each layer's window at most; written: the new positions
    logits    written by the head and read by the sampler

and what it must compute: two operations per weight of a matrix and position, and attention's two products. A draft
model reads its weights once per draft. Weights of experts that are not chosen are counted too.

    x light         time of a step / its bound
    x plain light   time per emitted token / the bound of a token without speculation: below 1, speculation beats what
                    any engine could do without it
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from graphspec.engine.engine import Engine
from graphspec.models.packed_linears import PackedLinears
from graphspec.models.paged_model import PagedModel
from graphspec.records.launch import StepPlan, StepResult

PACKED_ITEM = 2  # bytes of a packed weight


@dataclass(frozen=True)
class Rates:
    """What the machine can do."""

    bytes_per_s: float  # reading a tensor much larger than any cache
    operations_per_s: float  # a large matrix product

    def seconds(self, work: Work) -> float:
        """The time that `work` takes at least."""
        return max(work.num_bytes / self.bytes_per_s, work.operations / self.operations_per_s)


@dataclass(frozen=True)
class Work:
    """What must be moved and computed."""

    weight_bytes: int = 0
    kv_bytes: int = 0
    logit_bytes: int = 0
    operations: int = 0

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.logit_bytes

    def __add__(self, other: Work) -> Work:
        return Work(
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.logit_bytes + other.logit_bytes,
            self.operations + other.operations,
        )


@dataclass(frozen=True)
class ModelWork:
    """What the steps of one model cost. Sizes in bytes, of tensors of one dtype."""

    weights: int  # that every step reads
    packed: int  # of these, what is read from packs
    matrix_elements: int  # of parameters that every position is multiplied with
    hidden: int  # one row of an input embedding of its own, 0 if it is the output head
    vocab_size: int
    itemsize: int
    kv_token: int  # K and V of one token in one layer
    head_elements: int  # query heads * head size
    windows: tuple[int | None, ...]  # per layer

    @staticmethod
    def of(module: nn.Module, packed: Collection[int] = ()) -> ModelWork:
        """Count a transformers causal LM, whose weights with the ids `packed` are read from packs; on the meta device
        too."""
        text: Any = module.config.get_text_config()  # type: ignore[operator, union-attr]
        embedding = module.get_input_embeddings().weight  # type: ignore[operator]
        head = module.get_output_embeddings().weight  # type: ignore[operator]
        parameters = list(module.parameters())
        own = 0 if head is embedding else embedding.numel()
        item, heads = head.element_size(), text.num_attention_heads
        in_packs = PACKED_ITEM * sum(p.numel() for p in parameters if id(p) in packed)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        return ModelWork(
            weights=sum(p.nbytes for p in parameters if id(p) not in packed) - own * item + in_packs,
            packed=in_packs,
            matrix_elements=sum(p.numel() for p in parameters if p.dim() > 1) - own,
            hidden=embedding.shape[1] * item if own else 0,
            vocab_size=text.vocab_size,
            itemsize=item,
            kv_token=2 * (getattr(text, "num_key_value_heads", None) or heads) * head_dim * item,
            head_elements=heads * head_dim,
            windows=_windows(text),
        )

    def step(self, rows: int, query_len: float, context: float, sampled: int | None = None) -> Work:
        """`rows` rows of `query_len` tokens, behind `context` tokens each (their means). Logits are those of `sampled`
        tokens, by default of all."""
        tokens = round(rows * query_len)
        num_logits = tokens if sampled is None else sampled
        visible = [context if window is None else min(context, window) for window in self.windows]
        # A row's queries share what they read; query i also sees the i new tokens before it, and itself.
        pairs = rows * sum(query_len * v + query_len * (query_len + 1) / 2 for v in visible)
        return Work(
            weight_bytes=self.weights + tokens * self.hidden,
            kv_bytes=int(rows * sum(v + 2 * query_len for v in visible) * self.kv_token),
            logit_bytes=2 * num_logits * self.vocab_size * self.itemsize,
            operations=int(2 * tokens * self.matrix_elements + 4 * self.head_elements * pairs),
        )


def _windows(text: Any) -> tuple[int | None, ...]:
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention" if window else ""] * text.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _work_of(model: PagedModel) -> ModelWork:
    mode = model.mode
    return ModelWork.of(model.module, {id(w) for w in mode.weights} if isinstance(mode, PackedLinears) else ())


class StepBound:
    """The bound of an engine's decode steps."""

    def __init__(self, rates: Rates, model: ModelWork, draft: ModelWork | None = None) -> None:
        self.rates, self.model, self._draft = rates, model, draft

    @staticmethod
    def of(rates: Rates, engine: Engine) -> StepBound:
        """With the draft model that the engine has, if it has one, and the packs it reads."""
        model, draft = engine._runner._model, engine._runner._draft
        return StepBound(rates, _work_of(model), None if draft is None else _work_of(draft))

    @property
    def counted(self) -> str:
        """A sentence on what a step reads of the model's weights."""
        model = self.model
        plain = (model.weights - model.packed) / 1e6
        return f"The bound counts {model.packed / 1e6:.1f} MB of packed weights and {plain:.1f} MB of others."

    @property
    def kv_token_bytes(self) -> int:
        """K and V of one token in all layers of the model."""
        return self.model.kv_token * len(self.model.windows)

    def work(self, rows: int, num_draft: int, context: float) -> Work:
        work = self.model.step(rows, 1 + num_draft, context)
        if self._draft is not None:
            for _ in range(num_draft):
                work += self._draft.step(rows, 1, context)
        return work

    def launch_seconds(self, plan: StepPlan, result: StepResult) -> float:
        """The bound of one launch as it was: its decode rows, and its chunks of prompts in the same pass."""
        work = Work()
        if plan.decode is not None and result.decode is not None:
            rows = len(plan.decode.slots)
            work = self.work(rows, plan.decode.num_draft, float(result.decode.computed.mean()))
        if plan.prefill is not None:
            lengths, starts = plan.prefill.lengths, plan.prefill.starts
            chunks = self.model.step(len(lengths), float(lengths.mean()), float(starts.mean()), len(lengths))
            work = replace(work + chunks, weight_bytes=max(work.weight_bytes, chunks.weight_bytes))
        return self.rates.seconds(work)

    def seconds(self, rows: int, num_draft: int, context: float) -> float:
        return self.rates.seconds(self.work(rows, num_draft, context))

    def ratios(self, seconds: float, rows: int, num_draft: int, context: float, emitted: float) -> dict[str, float]:
        """The fields that every benchmark of steps prints: `seconds` is a step in which each row emits `emitted`."""
        light, plain = self.seconds(rows, num_draft, context), self.seconds(rows, 0, context)
        return {"light_ms": 1e3 * light, "vs_light": seconds / light, "token_vs_plain_light": seconds / emitted / plain}


# The machine.


@functools.cache
def measured_rates(device: str, dtype: torch.dtype) -> Rates:
    """Measured on first use in a process. A busy machine gives low rates, and ratios that look better than they are."""
    cuda = device == "cuda"
    with torch.no_grad():
        return Rates(
            read_bandwidth(torch.device(device), 1 << (32 if cuda else 29)),
            matrix_rate(torch.device(device), dtype),
        )


def read_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second at which the device reads: the best of five sums over a large tensor."""
    data = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return num_bytes / _best(data.sum, device)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a square matrix product, two for each multiplication with its addition; the best of
    five of a size that takes long enough. (Where a processor lacks instructions for a dtype that is not large.)"""
    seconds, size = 0.0, 128
    while seconds < (3e-3 if device.type == "cuda" else 0.1) and size < 1 << 14:
        size *= 2
        a = torch.ones(size, size, dtype=dtype, device=device)
        seconds = seconds_of(partial(torch.mm, a, a), device, 1)
    return 2 * size**3 / _best(partial(torch.mm, a, a), device)


def _best(work: Callable[[], Any], device: torch.device) -> float:
    work()
    return min(seconds_of(work, device, 3 if device.type == "cuda" else 1) for _ in range(5))


def seconds_of(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Seconds of one call, on the device."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - started) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / repeats
