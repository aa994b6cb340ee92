"""Looking at captured graphs: what would not survive a capture, what a graph consists of, which graph every step of a
run replayed, and one page about all of it. Knows nothing of language models.
"""

from graphs.debug.coverage import Coverage, Stretch
from graphs.debug.dot import write_dot
from graphs.debug.functions import NamedFunction, guard_function, load_function
from graphs.debug.padding import BatchSize, batch_sizes
from graphs.debug.page import page
from graphs.debug.summary import GraphSummary, summarise

__all__ = [
    "BatchSize",
    "Coverage",
    "GraphSummary",
    "NamedFunction",
    "Stretch",
    "batch_sizes",
    "guard_function",
    "load_function",
    "page",
    "summarise",
    "write_dot",
]
