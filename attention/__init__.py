"""Paged attention over block tables. Knows nothing of the engine."""

from attention.backend import AttentionBackend, AttentionShape, AttentionSpec, Planless, UnsupportedAttentionError
from attention.cpu.native_backend import NativeBackend
from attention.cpu.native_library import NoNativeError, native_library
from attention.cpu.torch_backend import CpuBackend
from attention.create import create_backend, flashinfer_backend
from attention.flashinfer.choice import ChoiceTable, read_lines
from attention.flashinfer.guards import Machine
from attention.kv_cache import allocate_kv_cache, store_kv
from attention.reference import ReferenceBackend
from attention.types import AttnInputs, Bucket, KVLayout

__all__ = [
    "AttentionBackend",
    "AttentionShape",
    "AttentionSpec",
    "AttnInputs",
    "Bucket",
    "ChoiceTable",
    "CpuBackend",
    "KVLayout",
    "Machine",
    "NativeBackend",
    "NoNativeError",
    "Planless",
    "ReferenceBackend",
    "UnsupportedAttentionError",
    "allocate_kv_cache",
    "create_backend",
    "flashinfer_backend",
    "native_library",
    "read_lines",
    "store_kv",
]
