"""Footguns of graph capture: each test shows what naive capture does, and that this package catches or prevents it.

Capture bakes addresses, Python values and control flow. The recorded backend bakes the same things as CUDA, so these
hold without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from graphs import (
    Audit,
    BucketLadder,
    BufferError,
    CapturedGraph,
    CaptureError,
    GraphPlan,
    GraphStore,
    PersistentBuffers,
    capture,
    compare_replay,
    poison,
    record,
)
from graphs.bindings import binding
from graphs.capture import Output

CPU = torch.device("cpu")


def static(**tensors: torch.Tensor) -> PersistentBuffers:
    buffers = PersistentBuffers()
    for name, tensor in tensors.items():
        buffers.add(name, tensor, writer="host")
    return buffers


def graph_of(fn: Callable[[], Output], buffers: PersistentBuffers) -> CapturedGraph:
    return capture(fn, buffers, key="test", backend=record)


def test_a_python_scalar_is_baked_and_listed() -> None:
    """Naive: the graph keeps adding the 3 of the capture. Here the contract lists it, with its line."""
    scale = [3.0]
    x = torch.ones(4)
    graph = graph_of(lambda: x * scale[0], static(x=x))
    scale[0] = 5.0
    assert graph.replay().tolist() == [3.0] * 4  # type: ignore[union-attr]
    assert [(b.op, b.value) for b in graph.contract.baked] == [("aten.mul.Tensor", 3.0)]
    assert __file__ in graph.contract.baked[0].line
    assert str(compare_replay(graph)).startswith("aten.mul.Tensor differs")


def test_changed_contents_are_followed_and_a_changed_address_is_caught() -> None:
    """Naive: a graph replayed after reallocation reads freed memory."""
    x = torch.ones(4)
    buffers = static(x=x)
    graph = graph_of(lambda: buffers["x"] + 1, buffers)
    x.fill_(6)
    assert graph.replay().tolist() == [7.0] * 4  # type: ignore[union-attr]
    with pytest.raises(BufferError, match='"x" cannot be replaced'):
        buffers.replace("x", torch.zeros(4))
    x.set_(torch.zeros(4))  # type: ignore[call-overload]
    with pytest.raises(BufferError, match='"x" moved from 0x'):
        graph.replay()


def test_a_resized_or_retyped_buffer_is_caught() -> None:
    x = torch.ones(8)
    buffers = static(x=x)
    graph = graph_of(lambda: x.sum(), buffers)
    x.resize_(4)
    with pytest.raises(BufferError, match=r'shape of "x" was \(8,\) and is \(4,\)'):
        graph.replay()


def test_buffers_are_closed_by_the_first_capture() -> None:
    buffers = static(x=torch.ones(1))
    graph_of(lambda: buffers["x"] + 1, buffers)
    with pytest.raises(BufferError, match="after the first capture"):
        buffers.add("y", torch.ones(1), writer="host")
    with pytest.raises(BufferError, match='a buffer "x" already'):
        static(x=torch.ones(1)).add("x", torch.ones(1), writer="host")


def test_outputs_of_a_replay_do_not_change_the_outputs_copied_before() -> None:
    """Naive on CUDA: the next replay overwrites the output. The rule is to copy it out first; a copy stays."""
    x = torch.ones(2)
    graph = graph_of(lambda: x * 2, static(x=x))
    kept = graph.replay().clone()  # type: ignore[union-attr]
    x.fill_(5)
    graph.replay()
    assert kept.tolist() == [2.0, 2.0]


def test_an_output_that_is_an_input_is_the_input() -> None:
    """Aliasing: in-place updates of a buffer that is also returned accumulate over replays, as on CUDA."""
    x = torch.zeros(2)
    graph = graph_of(lambda: x.add_(1), static(x=x))
    assert x.tolist() == [1.0, 1.0]  # capturing ran it
    out = graph.replay()
    assert out is x
    assert x.tolist() == [2.0, 2.0]


def test_in_place_on_a_view_reaches_the_base() -> None:
    x = torch.zeros(3, 2)

    def fn() -> torch.Tensor:
        x[1].add_(1)
        x.view(-1)[4:].mul_(2).add_(1)
        return x * 1

    graph = graph_of(fn, static(x=x))
    x.zero_()
    assert graph.replay().tolist() == [[0, 0], [1, 1], [1, 1]]  # type: ignore[union-attr]
    assert compare_replay(graph) is None


def test_a_constant_that_is_written_is_made_anew_in_every_replay() -> None:
    """A record folds `zeros` only if nothing writes to it; else the second replay would start from the first's sum."""
    x = torch.ones(3)

    def fn() -> torch.Tensor:
        total = torch.zeros(3)
        total.add_(x)
        return total

    graph = graph_of(fn, static(x=x))
    assert graph.replay().tolist() == graph.replay().tolist() == [1.0] * 3  # type: ignore[union-attr]


def test_control_flow_is_frozen_and_the_difference_is_named() -> None:
    flag = [True]
    x = torch.ones(3)

    def fn() -> torch.Tensor:
        return x.exp() if flag[0] else x.sin()

    graph = graph_of(fn, static(x=x))
    flag[0] = False
    assert torch.equal(graph.replay(), x.exp())  # type: ignore[arg-type]
    assert "control flow before aten.exp" in str(compare_replay(graph))


def test_dtype_and_dict_order_follow_the_capture() -> None:
    tables = {"a": torch.ones(2), "b": torch.full((2,), 2.0)}
    x = torch.ones(2)

    def fn() -> torch.Tensor:
        out = x
        for table in tables.values():
            out = out * 2 + table
        return out.to(torch.float64)

    graph = graph_of(fn, static(x=x))
    first = graph.replay().clone()  # type: ignore[union-attr]
    tables["a"], tables["b"] = tables["b"], tables["a"]
    assert torch.equal(graph.replay(), first)  # type: ignore[arg-type]
    assert compare_replay(graph) is not None
    assert graph.contract.outputs[0].dtype == torch.float64


def test_compare_replay_names_the_first_op_that_differs_and_restores_the_buffers() -> None:
    x, wrong = torch.ones(3), torch.zeros(3)

    def fn() -> torch.Tensor:
        x.mul_(3)
        y = x + wrong
        return y * 2

    buffers = static(x=x)
    graph = graph_of(fn, buffers)
    assert compare_replay(graph) is None
    wrong = torch.full((3,), 7.0)
    x.fill_(1)
    assert str(compare_replay(graph)).startswith("aten.add.Tensor differs, at " + __file__)
    assert x.tolist() == [1.0] * 3


def test_an_item_cannot_be_recorded() -> None:
    x = torch.ones(3)
    with pytest.raises(CaptureError, match=r"test_graphs.py:\d+: aten._local_scalar_dense"):
        graph_of(lambda: x * x[0].item(), static(x=x))


def padded_sum(x: torch.Tensor, pages: torch.Tensor, leak: bool) -> Callable[[], torch.Tensor]:
    """Rows 0 and 1 are real, row 2 is padding; with `leak` the padding row writes page 0."""

    def fn() -> torch.Tensor:
        pages.index_copy_(0, torch.tensor([1, 2, 0 if leak else 3]), x)
        return x.sum(-1) + pages[:3].sum() * 0

    return fn


@pytest.mark.parametrize("leak", [False, True])
def test_poison_finds_a_padding_row_that_writes_a_real_page(leak: bool) -> None:
    x, pages = torch.randn(3, 4), torch.zeros(4, 4)
    buffers = static(x=x, pages=pages)
    graph = graph_of(padded_sum(x, pages, leak), buffers)
    found = poison(graph, {"x": 2, "pages": 3}, lambda out: [out[0][:2]])
    assert bool(found) == leak
    if leak:
        wrote = f'buffer "pages", written by aten.index_copy_.default at {__file__}:'
        assert any(wrote in finding for finding in found)
        assert "NaN in padding changes output 0" in found


def test_audit_names_a_second_writer_and_a_read_before_the_writer() -> None:
    buffers = PersistentBuffers()
    x = buffers.add("x", torch.zeros(3), writer="staging", every_step=True)
    y = buffers.add("y", torch.zeros(3), writer="step")

    def play(order: list[str]) -> list[str]:
        def staging() -> None:
            x.fill_(1)

        def step() -> None:
            y.copy_(x)

        def intruder() -> None:
            y.view(-1)[0] += 1

        parts: dict[str, Any] = {"staging": staging, "step": step, "intruder": intruder}
        with Audit(buffers) as audit:
            for name in order:
                with buffers.writing(name):
                    parts[name]()
        return [finding.split(": ", 1)[1] for finding in audit.findings]

    assert play(["staging", "step"]) == []
    assert play(["step", "staging"]) == ['"x" is read before staging has written it in this step']
    assert play(["staging", "step", "intruder"]) == ['"y" is written by intruder, its writer is step']


def test_canaries_find_a_write_past_the_end() -> None:
    buffers = PersistentBuffers()
    x = buffers.allocate("x", (4, 3), torch.int32, CPU, writer="host")
    y = buffers.allocate("y", (5,), torch.float32, CPU, writer="host")
    x.fill_(-1)
    y.fill_(float("nan"))
    buffers.check_canaries()
    torch.as_strided(x, (13,), (1,), x.storage_offset())[12] = 7
    with pytest.raises(BufferError, match='past the ends of "x"'):
        buffers.check_canaries()


def test_the_store_counts_replays_and_steps_off_graph_with_reasons() -> None:
    x = torch.zeros(2)
    prepared = []
    store = GraphStore(static(x=x), record, lambda: prepared.append(x.zero_()))
    store.capture("a", lambda: x + 1)
    store.capture("b", lambda: x + 2)
    assert len(prepared) == 4  # before and after each capture
    x.fill_(1)
    assert store.replay("a").tolist() == [2.0, 2.0]  # type: ignore[union-attr]
    store.run_off_graph("c", "eager_mode", lambda: x + 1)
    assert list(store.timeline) == [("a", ""), ("c", "eager_mode")]
    assert store.num_replays == 1
    assert store.never_replayed() == ["b"]
    assert dict(store.off_graph) == {"eager_mode": 1}
    assert [(line.key, line.num_replays, line.num_ops) for line in store.ledger()] == [("a", 1, 1), ("b", 0, 1)]


def test_two_graphs_that_share_live_outputs_are_reported_with_the_line() -> None:
    """Naive on CUDA: graphs of one pool share memory, so the second replay overwrites the first's output."""
    x = torch.ones(2)
    buffers = static(x=x)
    first = capture(lambda: x * 2, buffers, key="first", backend=record)
    second = capture(lambda: x * 3, buffers, key="second", backend=record)
    with Audit(buffers) as audit:
        a = first.replay()
        kept = a.clone()  # type: ignore[union-attr]
        b = second.replay()
        good = kept + b  # type: ignore[operator]
        assert audit.findings == []
        bad = a + b  # type: ignore[operator]
    assert torch.equal(good, bad)  # type: ignore[arg-type]  # on the CPU nothing is overwritten; the rule is the same
    (finding,) = audit.findings
    assert finding.startswith(f"{__file__}:")
    assert finding.endswith("the output of graph first is used after graph second ran: copy it out before")
    first.replay()
    assert len(audit.findings) == 1  # nobody listens any more


def test_a_difference_names_the_module() -> None:
    last = torch.nn.Linear(3, 2)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.Tanh(), last))
    x = torch.ones(1, 3)
    graph = graph_of(lambda: model(x), static(x=x))
    assert compare_replay(graph) is None
    last.bias = torch.nn.Parameter(torch.full((2,), 7.0))
    assert "aten.addmm.default in Sequential.1.1 differs" in str(compare_replay(graph))


@pytest.mark.parametrize(
    ("rungs", "sentence"),
    [
        ((1, 2, 4), "no graph holds 5, 6 rows: the last rung must be 6, not 4"),
        ((1, 6, 8, 9), "no batch reaches the rungs 8, 9: at most 6 rows run"),
        ((2, 1, 6), "ascending positive rungs"),
    ],
)
def test_holes_and_unreachable_rungs_fail_with_the_list(rungs: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        GraphPlan(BucketLadder(rungs), 6, ((0, 3), (3, 3)), ("greedy",))


def test_a_plan_finds_keys_that_were_not_captured_and_captured_ones_that_nobody_asks_for() -> None:
    plan = GraphPlan(BucketLadder((1, 3, 6)), 6, ((0, 3), (3, 3)), ("greedy", "plain"))
    keys = plan.all_keys()
    assert len(keys) == len(set(keys)) == 12
    assert [key.rows for key in keys] == sorted((key.rows for key in keys), reverse=True)
    plan.check(keys)
    with pytest.raises(ValueError, match=r"no graph was captured for GraphKey\(kind='decode', rows=3, num_draft=3"):
        plan.check([key for key in keys if key != plan.key(2, 3, 3, "plain")])
    with pytest.raises(ValueError, match=r"no step can ask for the graphs GraphKey\(kind='decode', rows=4"):
        plan.check([*keys, keys[0]._replace(rows=4)])


A = torch.ops.aten
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any], bool]] = [
    (A.mul.Tensor, (torch.ones(2, 3), torch.ones(3)), {}, True),
    (A.mul.Tensor, (torch.ones(2, 3), 2.5), {}, True),
    (A.mul.Scalar, (torch.ones(2, 3), 2.5), {}, False),  # torch.mul makes a tensor of the number
    (A.add.Tensor, (torch.ones(2, 3), torch.ones(3)), {"alpha": 2}, True),
    (A.sum.dim_IntList, (torch.ones(2, 3), [1], True), {}, True),
    (A.max.dim, (torch.ones(2, 3), 1), {}, True),
    (A.view.default, (torch.ones(2, 3), [3, 2]), {}, True),
    (A.split_with_sizes.default, (torch.ones(2, 3), [1, 2], 1), {}, True),
    (A.index_put_.default, (torch.ones(2, 3), [torch.tensor([1])], torch.ones(3)), {}, True),
    (A.silu.default, (torch.ones(2, 3),), {}, True),
    (A.full.default, ([2, 3], 1.5), {"dtype": torch.float64, "device": torch.device("cpu")}, False),  # adds more
    (A.slice.Tensor, (torch.ones(2, 3), 1, 0, 2), {}, False),  # has no name in Python
]


@pytest.mark.parametrize(("op", "args", "kwargs", "found"), CALLS, ids=lambda value: str(value)[:24])
def test_a_binding_calls_the_very_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: bool) -> None:
    before = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, args)
    bound = binding(op, args, kwargs)
    assert (bound is not op) == found
    for a, b in zip(tree_leaves(args), tree_leaves(before), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b  # finding it computes nothing
    for a, b in zip(tree_leaves(bound(*args, **kwargs)), tree_leaves(op(*before, **kwargs)), strict=True):
        assert torch.equal(a, b)
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())
