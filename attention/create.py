from attention.backend import AttentionBackend, AttentionShape
from attention.reference import ReferenceBackend
def create_backend(name: str, shape: AttentionShape) -> AttentionBackend:
    if name in ("auto", "reference"):
        return ReferenceBackend()
    raise ValueError(f'unknown attention backend "{name}": use "auto" or "reference"')
