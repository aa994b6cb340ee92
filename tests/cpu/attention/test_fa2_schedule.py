"""The FA2 schedule recomputed on the device: FlashInfer's real planner plans once, and the kernel's index arithmetic,
emulated, finds every partial result written exactly once and the result equal to dense attention."""

from __future__ import annotations

import itertools
import random
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from emulated_fa2 import Emulation, Heads, HostPlanner, dense, host_plan

from attention.flashinfer.planner import PlanInfo, Problem, Schedule, cta_tile_q
from graphs import PersistentBuffers, RegionCompiler, capture, create_backend

CAN_COMPILE = shutil.which("g++") is not None and (Path(sysconfig.get_path("include")) / "Python.h").exists()
needs_compiler = pytest.mark.skipif(not CAN_COMPILE, reason="needs g++ and the Python headers")
LONGEST = 2000
WORST = 1e-5


def emulate(schedule: Schedule, lens: list[int], seed: int = 0) -> tuple[float, torch.Tensor]:
    """The largest error against dense float64 (infinite for a NaN) and how often each partial result was written."""
    problem, generator = schedule.problem, torch.Generator().manual_seed(seed)
    query = torch.randn(problem.rows, problem.query_len, problem.group, 8, generator=generator)
    key, value = (torch.randn(problem.rows, max(lens), 8, generator=generator) for _ in range(2))
    emulation = Emulation(schedule, lens)
    out = emulation.run(query, key * 0.5, value)
    error = (out - dense(query, key * 0.5, value, lens, problem.window)).abs()
    return float(error.nan_to_num(nan=float("inf")).max()), emulation.writes


def assert_exact(schedule: Schedule, lens: list[int], seed: int = 0) -> None:
    error, writes = emulate(schedule, lens, seed)
    used = int(schedule.o_indptr[-1])
    assert writes[:used].tolist() == [1] * used
    assert not writes[used:].any()
    assert error < WORST


def random_lens(rng: random.Random, rows: int, query_len: int, longest: int = LONGEST) -> list[int]:
    """Padding rows, page edges, one long row among short ones, and anything."""
    kinds = (query_len, 16, 17, 128, 129, longest, rng.randint(query_len, 40), rng.randint(query_len, longest))
    return [max(query_len, rng.choice(kinds)) for _ in range(rows)]


@pytest.mark.flashinfer
@pytest.mark.parametrize("window", [None, 1, 40, 700])
def test_one_plan_serves_every_length_through_the_device_planner(host_planner: HostPlanner, window: int | None) -> None:
    rng = random.Random(window)
    for _ in range(12):
        rows, query_len = rng.choice((1, 2, 3, 7, 16, 33, 64)), rng.choice((1, 2, 4, 6, 9))
        problem = Problem(rows, query_len, rng.choice((1, 4, 8)), rng.choice((8, 16, 48, 128)), window)
        schedule = host_plan(host_planner, [LONGEST] * rows, problem)
        if not schedule.info.split_kv:  # the tiles alone fill the grid
            assert problem.tiles(schedule.info.cta_tile_q) * rows >= 33
            continue
        baked = schedule.info
        for seed in range(6):
            lens = random_lens(rng, rows, query_len)
            schedule.write(torch.tensor(lens, dtype=torch.int32))
            schedule.check(torch.tensor(lens))
            assert_exact(schedule, lens, seed)
        again = host_plan(host_planner, random_lens(rng, rows, query_len), problem)
        assert again.info == baked  # grid, tile and offsets do not depend on lengths


@pytest.mark.flashinfer
@pytest.mark.parametrize("window", [None, 100])
def test_a_host_plan_of_the_true_lengths_is_exact_and_passes_the_same_check(
    host_planner: HostPlanner, window: int | None
) -> None:
    rng = random.Random(3)
    for rows, query_len in ((4, 4), (1, 8), (16, 1), (9, 5)):
        problem = Problem(rows, query_len, 4, 16, window)
        lens = random_lens(rng, rows, query_len)
        schedule = host_plan(host_planner, lens, problem)
        schedule.check(torch.tensor(lens))
        assert_exact(schedule, lens)


@pytest.mark.flashinfer
def test_the_tile_rule_is_the_planners(host_planner: HostPlanner) -> None:
    for query_len, group in itertools.product((1, 2, 5, 9, 17, 40), (1, 3, 4, 8)):
        for head_dim in (64, 128, 256):
            heads = Heads(num_heads=8 * group, head_dim=head_dim)
            info = host_plan(host_planner, [100, 100], Problem(2, query_len, group, 16, None), heads).info
            assert info.cta_tile_q == cta_tile_q(query_len * group, head_dim)


@pytest.mark.flashinfer
def test_the_chunk_is_close_to_the_one_the_host_would_choose(host_planner: HostPlanner) -> None:
    """The host searches all multiples of a page, the device 32 candidates."""
    rng = random.Random(11)
    for _ in range(60):
        rows, query_len = rng.choice((1, 2, 5, 16, 30, 32)), rng.choice((1, 4))
        problem = Problem(rows, query_len, 4, 16, None)
        lens = random_lens(rng, rows, query_len)
        schedule = host_plan(host_planner, lens, problem)
        chosen = int(schedule.chunk)
        schedule.write(torch.tensor(lens, dtype=torch.int32))
        assert int(schedule.chunk) <= chosen + max(lens) / 31 + 128


UPPER, FEWER_CHUNKS, SAME_CHUNKS = [2000, 300, 1500, 40], [1000, 290, 700, 33], [1997, 297, 1497, 37]


@pytest.mark.flashinfer
def test_an_upper_bound_is_enough_for_one_query_token_only(host_planner: HostPlanner) -> None:
    """The reason this planner exists, and the proof that these tests can fail."""
    single, several = (Problem(4, query_len, 4, 16, None) for query_len in (1, 4))
    assert emulate(host_plan(host_planner, UPPER, single), FEWER_CHUNKS)[0] < WORST
    assert emulate(host_plan(host_planner, UPPER, several), SAME_CHUNKS)[0] < WORST
    error, writes = emulate(host_plan(host_planner, UPPER, several), FEWER_CHUNKS)
    assert error > 0.1
    assert int(writes.max()) > 1
    assert emulate(host_plan(host_planner, UPPER, several, fixed_split_size=32), FEWER_CHUNKS)[0] > 0.1
    # A lower bound drops tokens even for one.
    assert emulate(host_plan(host_planner, UPPER, single), [2400, 310, 1600, 60])[0] > 1e-3


@pytest.mark.flashinfer
@pytest.mark.parametrize("window", [None, 50])
def test_without_a_split_one_plan_serves_every_length(host_planner: HostPlanner, window: int | None) -> None:
    rng = random.Random(4)
    for rows, query_len in ((4, 4), (40, 6), (3, 1)):
        problem = Problem(rows, query_len, 4, 16, window)
        for _ in range(4):
            schedule = host_plan(host_planner, [64] * rows, problem, disable_split_kv=True)
            lens = random_lens(rng, rows, query_len)
            real = rows * problem.tiles(schedule.info.cta_tile_q)
            if schedule.info.block_valid_mask_offset == 0 and real < schedule.info.padded_batch_size:
                with pytest.raises(AssertionError, match="works on row"):  # before 0.7.4 the tail of the grid
                    emulate(schedule, lens)  # reads what was there
                for indices in (schedule.request, schedule.q_tile, schedule.kv_tile):
                    indices[real:] = 0  # from a zeroed workspace: row 0 once more
            assert emulate(schedule, lens)[0] < WORST


def plan_info(blocks: int, problem: Problem, tile: int) -> tuple[PlanInfo, torch.Tensor]:
    """A plan vector laid out by hand, for tests without FlashInfer."""
    sizes = (4 * blocks, 4 * blocks, 4 * blocks, 4 * (problem.rows * problem.query_len + 1), 4 * (problem.rows + 1), 4)
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // 16) * 16)
    numbers = (blocks, problem.rows * problem.query_len, 0, tile, *starts[:6], 0, 0, starts[6], 1, 1)
    info = PlanInfo._make(numbers)
    return info, torch.zeros(starts[6] + -(-blocks // 16) * 16, dtype=torch.uint8)


@pytest.mark.parametrize("window", [None, 1, 300])
def test_random_lengths_on_hand_made_plans(window: int | None) -> None:
    rng = random.Random(7)
    for seed in range(60):
        rows, query_len, group = rng.randint(1, 40), rng.randint(1, 9), rng.choice((1, 3, 4))
        problem = Problem(rows, query_len, group, rng.choice((1, 16, 24, 256)), window)
        tile = rng.choice((16, 64))
        blocks = rows * problem.tiles(tile) + rng.choice((0, 1, 7, 60))
        schedule = Schedule(*plan_info(blocks, problem, tile), problem)
        for _ in range(3):
            lens = random_lens(rng, rows, query_len, longest=50_000)
            schedule.write(torch.tensor(lens, dtype=torch.int32))
            schedule.check(torch.tensor(lens))
        lens = random_lens(rng, rows, query_len, longest=500)
        schedule.write(torch.tensor(lens, dtype=torch.int32))
        assert_exact(schedule, lens, seed)


def test_the_check_finds_every_kind_of_wrong_schedule() -> None:
    problem, lens = Problem(3, 4, 4, 16, None), torch.tensor([500, 4, 900])
    for name in ("request", "q_tile", "kv_tile", "o_indptr", "merge_indptr", "chunk", "valid"):
        schedule = Schedule(*plan_info(30, problem, 16), problem)
        schedule.write(lens)
        schedule.check(lens)
        getattr(schedule, name)[0] ^= 1
        with pytest.raises((AssertionError, ValueError)):
            schedule.check(lens)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiler)])
def test_the_schedule_is_captured_once_and_follows_new_lengths(compiled: bool) -> None:
    problem = Problem(3, 4, 4, 16, None)
    schedule = Schedule(*plan_info(30, problem, 16), problem)
    buffers = PersistentBuffers()
    lens = buffers.add("lens", torch.tensor([4, 4, 4], dtype=torch.int32), writer="host")

    def step() -> torch.Tensor:
        schedule.write(lens)
        return schedule.chunk

    backend = create_backend(torch.device("cpu"), RegionCompiler() if compiled else None)
    graph = capture(step, buffers, key="schedule", backend=backend)
    for new in ([2000, 5, 90], [4, 4, 4], [129, 128, 2999]):
        lens.copy_(torch.tensor(new))
        graph.replay()
        schedule.check(torch.tensor(new))
