"""Paged attention over block tables. Knows nothing of the engine."""

from attention.backend import AttentionBackend, AttentionSpec, create_backend
from attention.kv_cache import allocate_kv_cache, store_kv
from attention.reference import ReferenceBackend
from attention.types import AttnInputs, KVLayout

__all__ = [
    "AttentionBackend",
    "AttentionSpec",
    "AttnInputs",
    "KVLayout",
    "ReferenceBackend",
    "allocate_kv_cache",
    "create_backend",
    "store_kv",
]
