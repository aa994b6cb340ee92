"""Capture and replay of static-shape device steps. Knows nothing of language models."""

from graphs.audit import Audit
from graphs.buffers import BufferError, PersistentBuffers, TensorSpec
from graphs.capture import Backend, BakedValue, CapturedGraph, CaptureError, Contract, Output, capture
from graphs.checks import Difference, compare_replay, poison
from graphs.compile import RegionCompiler, check_compiler
from graphs.guard import CaptureGuard, Finding
from graphs.key import BucketLadder, GraphKey, GraphPlan
from graphs.recorded import RecordedProgram, record
from graphs.store import GraphStore, LedgerLine, create_backend
from graphs.stream import CpuStream, CudaStream, Event, Stream, StreamError, create_stream

__all__ = [
    "Audit",
    "Backend",
    "BakedValue",
    "BucketLadder",
    "BufferError",
    "CaptureError",
    "CaptureGuard",
    "CapturedGraph",
    "Contract",
    "CpuStream",
    "CudaStream",
    "Difference",
    "Event",
    "Finding",
    "GraphKey",
    "GraphPlan",
    "GraphStore",
    "LedgerLine",
    "Output",
    "PersistentBuffers",
    "RecordedProgram",
    "RegionCompiler",
    "Stream",
    "StreamError",
    "TensorSpec",
    "capture",
    "check_compiler",
    "compare_replay",
    "create_backend",
    "create_stream",
    "poison",
    "record",
]
