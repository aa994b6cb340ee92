"""Several backends as one: each decode bucket has its own, and prefill has its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from attention.backend import AttentionBackend, AttentionSpec
from attention.flashinfer.choice import Choice
from attention.types import AttnInputs, Bucket


class PerBucket:
    """Sends every call to the backend of its bucket. A backend is created with the first bucket that uses it."""

    def __init__(
        self,
        choose: Callable[[Bucket], Choice],
        create: Callable[[str], AttentionBackend],
        prefill: AttentionBackend,
    ) -> None:
        self._choose, self._create, self._prefill = choose, create, prefill
        self._backends: dict[str, AttentionBackend] = {}
        self._by_bucket: dict[Bucket, AttentionBackend] = {}

    @property
    def name(self) -> str:
        return "+".join(self._backends) or "unplanned"

    def plan(self, buckets: Sequence[Bucket], block_tables: torch.Tensor) -> None:
        chosen: dict[str, list[Bucket]] = {}
        for bucket in buckets:
            chosen.setdefault(self._choose(bucket).backend, []).append(bucket)
        for name, its_buckets in chosen.items():
            backend = self._backends[name] = self._create(name)
            backend.plan(its_buckets, block_tables)
            self._by_bucket.update(dict.fromkeys(its_buckets, backend))

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return {name: tensor for backend in self._backends.values() for name, tensor in backend.buffers().items()}

    def plan_prefill(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start: torch.Tensor) -> None:
        self._prefill.plan_prefill(block_tables, seq_lens, query_start)

    def prepare(self, inputs: AttnInputs) -> None:
        self._of(inputs).prepare(inputs)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        inputs: AttnInputs,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        return self._of(inputs).attend(query, key, value, kv_cache, inputs, spec)

    def _of(self, inputs: AttnInputs) -> AttentionBackend:
        if not inputs.query_len:
            return self._prefill
        return self._by_bucket[Bucket(inputs.seq_lens.shape[0], inputs.query_len)]
