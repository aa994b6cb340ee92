"""Capture and replay of static-shape device steps. Knows nothing of language models."""

from graphs.buffers import BufferError, PersistentBuffers, TensorSpec
from graphs.capture import BakedValue, CapturedGraph, CaptureError, Contract, capture
from graphs.checks import Audit, Difference, compare_replay, poison
from graphs.compile import CompiledProgram, check_compiler, compile_static, keep_compiled
from graphs.guard import CaptureGuard, Finding
from graphs.key import BucketLadder, GraphKey
from graphs.recorded import RecordedProgram, record
from graphs.store import GraphStore, LedgerLine
from graphs.stream import CpuStream, CudaStream, Event, Stream, StreamError, create_stream

__all__ = [
    "Audit",
    "BakedValue",
    "BucketLadder",
    "BufferError",
    "CaptureError",
    "CaptureGuard",
    "CapturedGraph",
    "CompiledProgram",
    "Contract",
    "CpuStream",
    "CudaStream",
    "Difference",
    "Event",
    "Finding",
    "GraphKey",
    "GraphStore",
    "LedgerLine",
    "PersistentBuffers",
    "RecordedProgram",
    "Stream",
    "StreamError",
    "TensorSpec",
    "capture",
    "check_compiler",
    "compare_replay",
    "compile_static",
    "create_stream",
    "keep_compiled",
    "poison",
    "record",
]
