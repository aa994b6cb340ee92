"""Measure latency: of a step and its parts, of serving, of starting, of attention alone, of the host alone.

One file a subcommand. Each prints a table, or JSON lines that say where they come from.
"""
