"""Paged attention over block tables. Knows nothing of the engine."""

from attention.backend import AttentionBackend, AttentionShape, AttentionSpec, Planless, UnsupportedAttentionError
from attention.kv_cache import allocate_kv_cache, store_kv
from attention.reference import ReferenceBackend
from attention.create import create_backend
from attention.types import AttnInputs, Bucket, KVLayout

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
