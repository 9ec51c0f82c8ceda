"""LLM for an event loop: a thread of its own computes the steps. (vLLM's name is AsyncLLM, too.)

    event loop      open        outputs ..  outputs ..                close
                        \\             ^ one wake-up per step              \\
    thread          ..   add | step | step | step | step | step | ..       abort | step | ..      asleep when idle

After a step the thread makes the outputs of those clients that wait for one. A client that reads slowly does not wait:
its next output has the text of all steps since. So nothing queues up for it, and an event loop that cannot keep up with
the engine gets fewer and longer pieces.

Python has one lock for both threads. Without a limit, 256 clients would keep the event loop busy for longer than a GPU
needs for a step, and the thread would wait for the lock before it could launch the next one. So a step serves as many
clients as the event loop can in a part of the step's time, those first that wait longest.
"""
import asyncio
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from nanopaged.api.core import Core
from nanopaged.api.request import Request
from nanopaged.features.server.answers import ApiError
from nanopaged.features.server.metrics import Metrics
from nanopaged.outputs import RequestOutput

EVENT_SECONDS = 50e-6  # of the event loop, for an event of one client
TURN = 1000  # later requests go before the first sample of a call that has several, 2,000 before the second, ..
CPU_TOKENS, CPU_TOKENS_BESIDE_TEXTS, CPU_GRAMMARS_BESIDE_TEXTS = 256, 16, 8  # in a step; a grammar takes 1 ms
# Parameters. With a smaller model on two cores torch's second thread would keep the event loop's waiting: the bundled
# model makes 1.04 to 1.19 times the events per second with one. On 16 cores it is faster with 4 threads than with one.
SMALL_MODEL, FEW_CORES = 2**24, 2
JOIN_SECONDS = 5  # for the thread to end; a step on a device that hangs never does


class Stream:
    """The requests of one client in the engine."""

    def __init__(self, requests: list[Request], in_parts: bool) -> None:
        self.requests, self.in_parts = requests, in_parts  # in_parts: outputs are wanted before all are finished
        self.num_sequences, self.arrival = sum(request.params.n for request in requests), time.monotonic()
        self.request_ids = [request.request_id for request in requests]

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)

    @property
    def has_news(self) -> bool:
        return any(request.has_news for request in self.requests)

    def take_news(self) -> dict[int, RequestOutput]:
        """Outputs that have something new, by the request's number."""
        return {number: request.output() for number, request in enumerate(self.requests) if request.has_news}


class AsyncLLM(threading.Thread):
    """A thread that computes steps while there are requests. What the event loop tells it is done by the holder of the
    core's lock, between two steps."""
    loop_share = 0.35  # of a step's time, for the event loop
    hang_seconds = 60  # of a step, which then counts as hanging

    def __init__(self, core: Core) -> None:
        super().__init__(name="engine", daemon=True)
        self.core, self.loop = core, asyncio.get_running_loop()
        self.has_work = threading.Event()
        self.arrivals: dict[Request, float] = {}  # with the lock: of requests without a token
        self.opened: set[Stream] = set()  # those within `open`; the event loop changes it, the thread copies it
        self.waiting: dict[Stream, asyncio.Future] = {}  # both threads': clients that wait, the longest first
        self.end_reason: ApiError | None = None  # of the thread: there will be no outputs any more
        self.failure: BaseException | None = None  # of the last step
        self.busy_since: float | None = None  # the end of the last step; None: nothing to compute
        self.is_stopped = False
        self.metrics = Metrics(core)
        size = sum(parameter.numel() for parameter in core.runner.model.parameters())
        if core.runner.device.type == "cpu" and size < SMALL_MODEL and torch.get_num_threads() <= FEW_CORES:
            if "OMP_NUM_THREADS" not in os.environ:
                torch.set_num_threads(1)

    # ---- in the event loop

    @contextmanager
    def open(self, stream: Stream) -> Iterator[None]:
        """The engine has the stream's requests meanwhile. Then the client has all outputs, or it is gone."""
        self.opened.add(stream)
        self._tell(self._add, stream)
        try:
            yield
        finally:
            self.opened.remove(stream)
            self.waiting.pop(stream, None)
            self._tell(self.core.abort, *stream.request_ids)
            self.metrics.finish_reasons.update(seq.finish_reason or "abort" for request in stream.requests
                                               for seq in request.sequences)

    def num_unfinished(self) -> int:
        """The samples under way, without those that only wait for their client to read them."""
        return sum(stream.num_sequences for stream in self.opened if not stream.finished)

    async def outputs(self, stream: Stream) -> dict[int, RequestOutput]:
        """Wait for outputs of the stream that have something new; by the request's number. If all are wanted at once,
        the result is empty, and `take_news` makes them, in any thread: log probabilities of long texts take a while.
        Raises ApiError once the engine has ended."""
        waiter = self.waiting[stream] = self.loop.create_future()
        if stream.finished:  # else the thread is awake, and `set` is slow
            self.has_work.set()
        news = {} if self.end_reason else await waiter
        if self.end_reason:
            raise self.end_reason
        return news

    def end(self, sentence: str = "the server is stopping") -> None:
        """Clients get this as an error, now and from now on, whatever the thread does."""
        self.end_reason = self.end_reason or ApiError(sentence, 503)
        self._deliver([(waiter, {}) for waiter in [*self.waiting.values()]])

    def stop(self) -> None:
        self.is_stopped = True
        self.has_work.set()
        self.join(JOIN_SECONDS)

    def problem(self) -> str:
        """Why there are no outputs, as a sentence, or an empty text."""
        seconds = time.monotonic() - since if (since := self.busy_since) else 0
        hangs = f"no step has ended for {seconds:.0f} seconds" if seconds > self.hang_seconds else ""
        return str(self.end_reason or hangs)

    def _tell(self, function: Callable, *arguments: Any) -> None:
        self.core.lock.deferred.append(partial(function, *arguments))  # `defer` itself might call it in this thread
        self.has_work.set()

    @staticmethod
    def _deliver(news: list[tuple[asyncio.Future | None, dict[int, RequestOutput]]]) -> None:
        for waiter, outputs in news:
            if waiter and not waiter.done():  # else the client is gone
                waiter.set_result(outputs)

    # ---- in the engine thread

    def run(self) -> None:
        try:
            while not self.is_stopped:
                if not self.core.requests:
                    self.busy_since = None
                    self.has_work.wait()
                self.has_work.clear()
                self.busy_since = self.busy_since or time.monotonic()
                try:
                    self._take_turn()
                except BaseException as failure:  # the GPU's, a library's, or a mistake of ours: requests have to end
                    traceback.print_exc()
                    self._fail(failure)
        finally:
            with suppress(RuntimeError):  # the loop is closed: the server was stopped by force
                self.loop.call_soon_threadsafe(self.end, "the engine has stopped")

    def _take_turn(self) -> None:
        """A step, and outputs for those that wait."""
        core, started = self.core, time.monotonic()
        self._limit_step()
        num_steps, num_tokens = core.num_steps, core.counts.num_generated_tokens
        with core.run_until(lambda: core.num_steps > num_steps or not core.requests):
            if core.num_steps > num_steps:
                self.failure = None
                self._measure(core.counts.num_generated_tokens - num_tokens)
        with core.lock:  # what the event loop told meanwhile is done: clients that began to wait get these outputs
            self._serve(time.monotonic() - started)

    def _limit_step(self) -> None:
        """On a CPU a step of 8,192 prompt tokens takes a second, and texts under way wait for its end. Beside texts, a
        step has few tokens of prompts and of calls with several samples, which come later in the order than others."""
        for one in self.core.engines if self.core.runners[0].device.type == "cpu" else ():
            texts = [seq for seq in one.scheduler.running if seq.num_tokens > seq.num_prompt_tokens]
            num_first = sum(not seq.order.delay for seq in texts)  # see `_add`
            has_grammars = any(seq.sampling.params.structured_outputs for seq in texts[num_first:])
            beside = CPU_GRAMMARS_BESIDE_TEXTS if has_grammars else CPU_TOKENS_BESIDE_TEXTS
            one.scheduler.max_num_batched_tokens = min(
                self.core.options.max_num_batched_tokens, num_first + (beside if texts else CPU_TOKENS))

    def _measure(self, num_tokens: int) -> None:
        """A step has ended, with this many new tokens."""
        now = time.monotonic()
        for request in [request for request in self.arrivals if request.has_news or request.finished]:
            arrival = self.arrivals.pop(request)
            if request.num_new_tokens:  # else it was aborted
                self.metrics.first_token.add(now - arrival)
                num_tokens -= 1
        if num_tokens > 0 and self.busy_since is not None:
            self.metrics.between_tokens.add(now - self.busy_since, num_tokens)
        self.busy_since = now

    def _serve(self, seconds: float) -> None:
        """Outputs for clients that wait, after a step of so many seconds."""
        ready = [stream for stream in [*self.waiting] if stream.has_news and (stream.in_parts or stream.finished)]
        if self.core.requests:
            del ready[16 + int(self.loop_share / EVENT_SECONDS * seconds):]
        news = []
        for stream in ready:
            news.append((self.waiting.pop(stream, None), stream.take_news() if stream.in_parts else {}))
            if stream.finished and not self.failure:
                self.metrics.whole.add(time.monotonic() - stream.arrival, len(stream.requests))
        if news:
            with suppress(RuntimeError):  # as in `run`
                self.loop.call_soon_threadsafe(self._deliver, news)

    def _fail(self, failure: BaseException) -> None:
        self.failure = failure
        with self.core.lock:
            for stream in [*self.opened]:
                self.core.abort(*stream.request_ids, reason="error", sentence=str(ApiError.of(failure)))
            self._serve(0)

    # ---- with the lock

    def _add(self, stream: Stream) -> None:
        number = int(stream.num_sequences > 1)
        for request in stream.requests:
            for seq in request.sequences:
                arrival, delay = seq.order.arrival, TURN * number
                seq.order = seq.order._replace(arrival=arrival + delay, delay=delay)
                number += 1
            self.core.add(request)
            self.arrivals[request] = stream.arrival
