"""Attention on the GPU through FlashInfer, whose import is deferred: everything here but the kernels runs without it.
Which backend serves a decode step is decided in choice.py; guards.py says what FlashInfer can do and on what machine.
"""
