"""The engine for asyncio programs: one loop thread steps it, coroutines iterate over their own output."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self

from graphspec.engine.engine import Engine
from graphspec.engine.input_processor import Prompt
from graphspec.records.config import EngineConfig
from graphspec.records.outputs import StepOutput
from graphspec.records.sampling_params import SamplingParams


@dataclass(frozen=True, eq=False)
class _Subscription:
    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[StepOutput | BaseException]


class AsyncEngine:
    """Owns `engine`, which nothing else may use until `close`.

    At most `max_pending` requests are unfinished at once; `generate` waits for its turn before it submits another.
    All methods may be called from any thread or event loop, `generate` from one event loop at a time.
    """

    def __init__(self, engine: Engine, max_pending: int = 1024) -> None:
        if max_pending < 1:
            raise ValueError(f"max_pending must be positive, got {max_pending}")
        self._engine = engine
        self._pending = asyncio.Semaphore(max_pending)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._subscriptions: dict[str, _Subscription] = {}
        self._encode_lock, self._failure_lock = threading.Lock(), threading.Lock()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="graphspec-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_pretrained(cls, model: str, config: EngineConfig | None = None, max_pending: int = 1024) -> AsyncEngine:
        """See `Engine.from_pretrained`."""
        return cls(Engine.from_pretrained(model, config), max_pending)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0, cache_salt: str = ""
    ) -> AsyncIterator[StepOutput]:
        """Yield the outputs of one request as they become known. Leaving the iteration early, or cancelling the task,
        aborts the request. Raises what `Engine.add_request` raises, and RuntimeError if the engine failed or closed."""
        async with self._pending:
            token_ids = await asyncio.to_thread(self._encode, prompt)
            own = _Subscription(asyncio.get_running_loop(), asyncio.Queue())
            submitted: Future[str] = Future()

            def submit() -> None:
                try:
                    self._check_running()  # it may have failed since this was sent
                    request_id = self._engine.add_request(token_ids, params, priority=priority, cache_salt=cache_salt)
                    self._subscriptions[request_id] = own
                    submitted.set_result(request_id)
                except Exception as caught:
                    submitted.set_exception(caught)

            self._send(submit)
            waiting = asyncio.wrap_future(submitted)
            try:
                request_id = await asyncio.shield(waiting)
            except asyncio.CancelledError:
                submitted.add_done_callback(self._abort_submitted)
                raise
            finished = False
            try:
                while not finished:
                    output = await own.outputs.get()
                    if isinstance(output, BaseException):
                        finished = True
                        raise RuntimeError(f"the engine stopped: {output}") from output
                    finished = output.finished
                    yield output
            finally:
                if not finished:
                    self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """End a request. Its last output has finish reason "abort". Unknown ids are ignored."""

        def command() -> None:
            self._engine.abort(request_id)

        self._commands.put(command)

    def _abort_submitted(self, submitted: Future[str]) -> None:
        if submitted.exception() is None:
            self.abort(submitted.result())

    def close(self) -> None:
        """Stop the loop thread and close the engine; unfinished requests end with an error. May be called twice."""
        self._commands.put(None)
        self._thread.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.close)

    def _encode(self, prompt: Prompt) -> list[int]:
        with self._encode_lock:  # tokenizers are not thread-safe
            return self._engine.encode(prompt)

    def _send(self, command: Callable[[], None]) -> None:
        with self._failure_lock:
            self._check_running()
            self._commands.put(command)

    def _check_running(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine stopped: {self._failure}") from self._failure

    # The loop thread. Only it touches the engine.

    def _run(self) -> None:
        failure: BaseException = RuntimeError("it was closed")
        try:
            while self._run_commands():
                self._deliver(self._engine.step())
        except BaseException as caught:
            failure = caught
        with self._failure_lock:
            self._failure = failure
        while not self._commands.empty():  # a request that was sent too late must be refused, or it waits for ever
            if (command := self._commands.get()) is not None:
                command()
        for own in self._subscriptions.values():
            own.loop.call_soon_threadsafe(own.outputs.put_nowait, failure)
        self._engine.close()

    def _run_commands(self) -> bool:
        """Run the commands that came in; wait for one if there is nothing to step. False once `close` was called."""
        if not self._engine.has_unfinished_requests() and self._commands.empty():
            self._engine.drain()
        while not self._commands.empty() or not self._engine.has_unfinished_requests():
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _deliver(self, outputs: list[StepOutput]) -> None:
        """Hand outputs to their event loops, with one wake-up per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Subscription, StepOutput]]] = defaultdict(list)
        for output in outputs:
            own = self._subscriptions.get(output.request_id)
            if own is not None:
                by_loop[own.loop].append((own, output))
            if output.finished:
                self._subscriptions.pop(output.request_id, None)
        for loop, items in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put_all, items)


def _put_all(items: list[tuple[_Subscription, StepOutput]]) -> None:
    for own, output in items:
        own.outputs.put_nowait(output)
