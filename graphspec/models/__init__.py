"""Transformers models on a paged KV cache: loading, the bridge from their attention to ours, packed weights,
vocabularies, the built-in model. It imports records only; drafting, execution and the engine import it. Start with
`PagedModel` in paged_model.py.
"""
