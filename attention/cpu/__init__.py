"""Attention on the CPU: in C++, built on first use with the machine's compiler, or on torch ops alone."""
