"""Owns the device: stream, slot state, staging, captured graphs, and the decode step itself. It imports sampling,
drafting and models; the engine imports it. Start with `Iteration.decode` in iteration.py, which is one step, and
`Runner.launch` in runner.py, which sends it.
"""
