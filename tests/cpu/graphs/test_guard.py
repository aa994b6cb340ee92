"""CaptureGuard finds planted faults, with the line, and nothing in the engine's own step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode

from graphs import CaptureError, CaptureGuard, Finding, GraphKey, PersistentBuffers, record
from graphspec import Engine, EngineConfig
from graphspec.drafting import DraftInputs, Drafts
from graphspec.sampling.keyed_sampling import SAMPLERS

X = torch.arange(6.0)
FOREIGN = torch.ones(6)
KEPT: list[torch.Tensor] = []
COUNTER: Iterator[int] = iter(range(1, 1000))


def buffers() -> PersistentBuffers:
    made = PersistentBuffers()
    made.add("x", X, writer="test")
    return made


def reads_item() -> torch.Tensor:
    return X * X[0].item()  # planted


def reads_list() -> torch.Tensor:
    return X * len(X.tolist())  # planted


def branches() -> torch.Tensor:
    return X.abs() if X.sum() > 0 else X.neg()  # planted


def copies_to_host() -> torch.Tensor:
    return X.cpu() + 1  # planted


def masks_with_booleans() -> torch.Tensor:
    return X[X > 2].sum()  # planted


def finds_nonzero() -> torch.Tensor:
    return torch.nonzero(X).sum()  # planted


def finds_unique() -> torch.Tensor:
    return X + len(torch.unique(X))  # planted


def makes_constant() -> torch.Tensor:
    return X + torch.tensor([1.0])  # planted


def draws() -> torch.Tensor:
    return X + torch.rand(6)  # planted


def uses_foreign() -> torch.Tensor:
    return X + FOREIGN  # planted


def keeps() -> torch.Tensor:
    KEPT.append(X * 2)  # planted
    return X + 1


def counts() -> torch.Tensor:
    return X + float(next(COUNTER))  # planted


def alternates() -> torch.Tensor:
    return X.exp() if next(COUNTER) % 2 else X.log()  # planted


PLANTED: list[tuple[Callable[[], torch.Tensor], str]] = [
    (reads_item, "host read"),
    (reads_list, "host read"),
    (branches, "host read"),
    (copies_to_host, "host read"),
    (masks_with_booleans, "dynamic shape"),
    (finds_nonzero, "dynamic shape"),
    (finds_unique, "dynamic shape"),
    (makes_constant, "per-call constant"),
    (draws, "default generator"),
    (uses_foreign, "foreign tensor"),
    (keeps, "kept alive"),
    (counts, "Python value"),
    (alternates, "control flow"),
]


def line_of(fn: Callable[..., Any]) -> str:
    lines, start = inspect.getsourcelines(fn)
    return f"{__file__}:{start + next(i for i, line in enumerate(lines) if '# planted' in line)}"


@pytest.mark.parametrize(("fn", "kind"), PLANTED, ids=lambda v: getattr(v, "__name__", None))
def test_a_planted_fault_is_found_with_its_line(fn: Callable[[], torch.Tensor], kind: str) -> None:
    findings = CaptureGuard(buffers()).inspect(fn)
    assert [(f.kind, f.line) for f in findings if f.kind == kind] == [(kind, line_of(fn))], findings
    assert findings[0].remedy
    assert line_of(fn) in str(next(f for f in findings if f.kind == kind))


def test_a_clean_function_has_no_findings() -> None:
    weight = torch.randn(6, 6)

    def clean() -> torch.Tensor:
        mask = torch.arange(6) < 3
        return torch.where(mask, X @ weight, X.cumsum(0)).softmax(-1)

    assert CaptureGuard(buffers(), [weight]).inspect(clean) == []


@pytest.mark.parametrize("fn", [reads_item, branches, masks_with_booleans, finds_nonzero])
def test_recording_refuses_what_no_graph_can_hold_and_names_the_line(fn: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(CaptureError) as caught:
        record(fn)
    assert str(caught.value).startswith(line_of(fn))


def engine_findings(engine: Engine, key: GraphKey) -> list[Finding]:
    """What the guard says of the step that the engine captures for `key`, on padding rows."""
    runner = engine._runner
    guard = CaptureGuard(runner.decode_step.buffers, runner.constants())
    found: list[Finding] = []

    def work() -> None:
        runner.decode_step.fill_with_padding()
        found.extend(guard.inspect(lambda: runner.decode_step.step(key)))

    runner.on_stream(work)
    return found


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("k", "drafter"), [(0, "none"), (3, "ngram"), (3, "pool"), (3, "forced"), (2, "draft_model")])
def test_the_engines_own_step_is_clean(k: int, drafter: str, sampler: str) -> None:
    """Every sampler kind and drafter: no host read, no shape from data, nothing that changes between steps."""
    pool = {"drafter": "ngram", "ngram_pool": 100} if drafter == "pool" else {"drafter": drafter}
    config = EngineConfig(num_speculative_tokens=k, max_num_seqs=2, explain_acceptance=k > 0, **pool)
    with Engine(tiny_model(), config=config, draft_model=tiny_model() if drafter == "draft_model" else None) as engine:
        assert engine_findings(engine, GraphKey("decode", 2, k, k, sampler)) == []


def test_an_item_in_a_drafter_is_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(tiny_model(), config=EngineConfig(max_num_seqs=2)) as engine:
        drafter = engine._runner._iteration.drafter

        def propose(inputs: DraftInputs, num_draft: int) -> Drafts:
            return Drafts(inputs.history[:, :num_draft] * int(inputs.newest.max().item()), inputs.newest)  # planted

        monkeypatch.setattr(drafter, "propose", propose)
        findings = engine_findings(engine, GraphKey("decode", 2, 3, 3, "greedy"))
        assert ("host read", line_of(propose)) in [(f.kind, f.line) for f in findings]


def test_it_works_on_fake_cuda_tensors_without_a_gpu() -> None:
    """Nothing is computed; a host read has no value to give, so what comes after it is not seen."""
    with FakeTensorMode():
        x = torch.empty(6, device="cuda")
        made = PersistentBuffers()
        made.add("x", x, writer="test")

        def clean() -> torch.Tensor:
            return (x * 2).cumsum(0)

        def bad() -> torch.Tensor:
            noise = x + torch.rand(6, device="cuda")  # planted
            return noise * x.sum().item()

        def copies() -> torch.Tensor:
            return x.cpu() + 1  # planted

        guard = CaptureGuard(made)
        assert guard.inspect(clean) == []
        assert [f.kind for f in guard.inspect(bad)] == ["default generator", "host read"]
        assert guard.inspect(bad)[0].line == line_of(bad)
        assert ("host read", line_of(copies)) in [(f.kind, f.line) for f in guard.inspect(copies)]


def test_a_python_int_that_changes_per_step_is_found_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(tiny_model(), config=EngineConfig(max_num_seqs=2)) as engine:
        steps = iter(range(100))

        def propose(inputs: DraftInputs, num_draft: int) -> Drafts:
            return Drafts(inputs.history[:, :num_draft] * 0 + next(steps), inputs.newest)  # planted

        monkeypatch.setattr(engine._runner._iteration.drafter, "propose", propose)
        findings = engine_findings(engine, GraphKey("decode", 2, 3, 3, "greedy"))
        assert ("Python value", line_of(propose)) in [(f.kind, f.line) for f in findings]
