"""Capture and replay of static-shape device steps. Knows nothing of language models."""

from graphs.compile import check_compiler, compile_static
from graphs.key import BucketLadder, GraphKey
from graphs.stream import CpuStream, CudaStream, Event, Stream, StreamError, create_stream

__all__ = [
    "BucketLadder",
    "CpuStream",
    "CudaStream",
    "Event",
    "GraphKey",
    "Stream",
    "StreamError",
    "check_compiler",
    "compile_static",
    "create_stream",
]
