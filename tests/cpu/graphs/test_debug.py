"""Looking at graphs that have nothing to do with a language model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from graphs import (
    BakedValue,
    BucketLadder,
    GraphKey,
    GraphStore,
    PersistentBuffers,
    RecordedProgram,
    capture,
    create_backend,
    record,
)
from graphs.debug import Coverage, Stretch, batch_sizes, guard_function, load_function, page, summarise, write_dot
from graphs.guard import Finding

CPU = torch.device("cpu")

Module = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Module:
    """Writes a module with the given text and returns its name, which is the test's own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"debugged_{abs(hash(request.node.name))}"

    def written(text: str) -> str:
        (tmp_path / f"{name}.py").write_text(f"import torch\nfrom graphs import PersistentBuffers\n{text}")
        return name

    return written


def test_a_function_is_guarded_by_its_name(module: Module) -> None:
    """BUFFERS and parameters of its module are known; other tensors are foreign."""
    name = module(
        "BUFFERS = PersistentBuffers()\nx = BUFFERS.add('x', torch.ones(3), writer='me')\n"
        "w, other = torch.nn.Parameter(torch.ones(3)), torch.ones(3)\n"
        "def right():\n    return x * w\n"
        "def wrong():\n    return x * other\n"
    )
    assert guard_function(f"{name}:right") == []
    (finding,) = guard_function(f"{name}:wrong")
    assert finding.kind == "foreign tensor"
    assert finding.line.endswith(f"{name}.py:9")
    assert list(load_function(f"{name}:right").buffers) == ["x"]


def test_a_function_that_is_not_there_is_named(module: Module) -> None:
    name = module("BUFFERS = 3\nstep = 4\ndef call():\n    pass\n")
    for wrong in ("step", ":step", "module:"):
        with pytest.raises(ValueError, match='a function is named "module:name"'):
            load_function(wrong)
    with pytest.raises(ValueError, match=r'there is no module "no_such\.module"'):
        load_function("no_such.module:step")
    with pytest.raises(ValueError, match='has no function "step"'):
        load_function(f"{name}:step")
    with pytest.raises(ValueError, match=r"must be graphs.PersistentBuffers, not int"):
        load_function(f"{name}:call")


def test_a_module_that_lacks_something_itself_says_so(module: Module) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load_function(f"{module('import no_such_dependency')}:step")


def small_graph() -> tuple[PersistentBuffers, Callable[[], torch.Tensor]]:
    buffers, weight = PersistentBuffers(), torch.ones(4, 4)
    x = buffers.allocate("x", (2, 4), torch.float32, CPU, writer="host")
    return buffers, lambda: torch.relu(torch.relu(x @ weight) + 0.5)


def test_a_graph_is_summarised_by_what_it_consists_of() -> None:
    buffers, step = small_graph()
    graph = capture(step, buffers, key="step", backend=create_backend(CPU))
    found = summarise(graph)
    assert (found.key, found.num_ops, found.buffer_bytes, found.outside_tensors) == ("step", 4, 32, 2)
    assert found.ops[0] == ("aten.relu.default", 2)
    assert found.modules == (("(step)", 4),)
    assert [what.split()[1] for what, _ in found.baked] == ["0.5"]
    assert all(str(Path(__file__)) in line for line, _ in found.lines)
    assert len(summarise(graph, top=1).ops) == 1
    text = "\n".join(found.lines_of_text())
    assert "     2  aten.relu.default" in text
    assert "num_ops           4" in text


def test_a_graph_that_knows_only_kernels_needs_a_record_beside_it() -> None:
    class Kernels:
        """A program as CUDA keeps it."""

        baked: tuple[BakedValue, ...] = ()
        pool_bytes = 7
        num_ops: int | None = None
        source = None

        def __init__(self, record: RecordedProgram) -> None:
            self.run = record.run

    buffers, step = small_graph()
    recorded, output = record(step)
    graph = capture(step, buffers, key="step", backend=lambda _: (Kernels(recorded), output))
    with pytest.raises(ValueError, match="only a record knows its ops"):
        summarise(graph)
    assert (summarise(graph, recorded).num_ops, summarise(graph, recorded).pool_bytes) == (4, 7)


def test_nodes_are_drawn_of_cuda_graphs_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='need a CUDA device, not "cpu"'):
        write_dot(tmp_path / "a.dot", lambda: torch.ones(1), CPU)
    assert not (tmp_path / "a.dot").exists()


def covered(*keys: GraphKey | str) -> Coverage:
    """Two replays of the graph of each key, then a step of the first one off graph."""
    buffers, step = small_graph()
    store = GraphStore(buffers, create_backend(CPU), lambda: None)
    for key in keys:
        store.capture(key, step)
        store.replay(key)
        store.replay(key)
    store.capture("never <used>", step)
    store.run_off_graph(keys[0], "too <late>", step)
    return Coverage.of(store)


def test_coverage_tells_the_steps_in_stretches() -> None:
    found = covered("a", "b")
    assert list(found.stretches()) == [
        Stretch(0, 2, "a", ""), Stretch(2, 2, "b", ""), Stretch(4, 1, "a", "too <late>")
    ]  # fmt: skip
    assert (found.num_on_graph, len(found.timeline), found.never_replayed) == (4, 5, ("never <used>",))
    assert (found.static_bytes, found.pool_bytes) == (32, 0)
    assert list(found.timeline_lines())[2] == "steps     4..4     a off graph: too <late>"
    heading, *lines = found.ledger_lines()
    assert heading.split()[:2] == ["key", "replays"]
    assert [line.split()[-5] for line in lines] == ["2", "2", "0"]
    assert list(Coverage((), (), ()).ledger_lines()) == [""]


def test_keys_of_graphs_are_shown_by_what_tells_them_apart() -> None:
    found = covered(GraphKey("decode", 4, 3, 3, "greedy"))
    assert next(found.timeline_lines()) == "steps     0..1     4 rows, k = 3, greedy replay"


def test_a_batch_knows_its_graph_and_its_padding() -> None:
    sizes = batch_sizes(BucketLadder((1, 2, 4)), 4, row_width=3)
    assert [(size.batch, size.rows, size.positions) for size in sizes] == [(1, 1, 3), (2, 2, 6), (3, 4, 12), (4, 4, 12)]
    assert [size.padding for size in sizes] == [0, 0, 0.25, 0]


def test_the_page_shows_all_of_it_and_escapes_it() -> None:
    finding = Finding("host read", "Tensor.item", "<file>:3", "the host reads a value")
    text = page("Graphs of <mine>", batch_sizes(BucketLadder((1, 4)), 4), covered("a<b"), [finding])
    assert "2 of 3 steps replayed a captured graph" in text
    escaped = ("Graphs of &lt;mine&gt;", "a&lt;b", "too &lt;late&gt;", "&lt;file&gt;:3")
    for shown in (*escaped, finding.remedy, "25 % padding"):
        assert shown in text
    assert "<mine>" not in text
    assert "http" not in text  # self-contained
    empty = page("t", [], Coverage((), (), ()), [])
    assert "none was captured" in empty
    assert "the guard found nothing" in empty
