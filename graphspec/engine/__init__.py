"""What users hold: `Engine`, `AsyncEngine`, the validation of requests, text, statistics. It joins scheduling, which
decides, and execution, which owns the device; only commands may import it. Start with `Engine.step` in engine.py.
"""
