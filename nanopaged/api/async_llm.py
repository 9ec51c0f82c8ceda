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
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nanopaged.api.answers import ApiError
from nanopaged.api.request import Request
from nanopaged.outputs import RequestOutput

LOOP_SHARE = 0.35  # of a step's time, for the event loop
EVENT_SECONDS = 50e-6  # of the event loop, for an event of one client


class Stream:
    """The requests of one client in the engine."""

    def __init__(self, requests: list[Request], in_parts: bool) -> None:
        self.requests, self.in_parts = requests, in_parts  # in_parts: outputs are wanted before all are finished
        self.num_sequences = sum(request.params.n for request in requests)
        self.latest: dict[int, RequestOutput] = {}  # by the request's number
        self.is_taken = False  # these are all, and finished
        self.waiter: asyncio.Future | None = None  # None: the client does not wait for outputs
        self.failure: Exception | None = None

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)

    @property
    def has_news(self) -> bool:
        return any(request.has_news for request in self.requests) if self.in_parts else self.finished

    def take_news(self) -> dict[int, RequestOutput]:
        """Outputs that have something new, by the request's number."""
        news = {}
        for number, request in enumerate(self.requests):
            if request.has_news:
                request.has_news = False
                news[number] = request.output()
        self.latest |= news
        self.is_taken = self.finished
        return news


class AsyncLLM(threading.Thread):
    """A thread that computes steps while there are requests. What the event loop tells it is done between two steps."""

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="engine", daemon=True)
        self.llm, self.loop = llm, loop
        self.commands: deque[tuple[Callable, tuple]] = deque()
        self.has_commands = threading.Event()
        self.streams: dict[Stream, None] = {}  # the engine thread's: those in the engine
        self.num_sequences = 0  # the event loop's: of the streams that are not closed
        self.finish_reasons: Counter[str] = Counter()
        self.failure: Exception | None = None  # of the last step
        self.is_stopped = False

    # ---- in the event loop

    def open(self, stream: Stream) -> None:
        self.num_sequences += stream.num_sequences
        self._tell(self._add, stream)

    async def outputs(self, stream: Stream) -> dict[int, RequestOutput]:
        """Wait for outputs of the stream that have something new; by the request's number. If all are wanted at once,
        the result is empty, and `take_news` makes them, in any thread: log probabilities of long texts take a while."""
        waiter = self.loop.create_future()
        self._tell(self._wait, stream, waiter)
        return await waiter

    def close(self, stream: Stream) -> None:
        """The client has all outputs, or it is gone."""
        self.num_sequences -= stream.num_sequences
        if not stream.is_taken:
            self._tell(self._abort, stream)

    def stop(self) -> None:
        self.is_stopped = True
        self.has_commands.set()
        self.join()

    def _tell(self, function: Callable, *arguments: Any) -> None:
        self.commands.append((function, arguments))
        if not self.has_commands.is_set():  # `set` is much slower
            self.has_commands.set()

    @staticmethod
    def _deliver(news: list[tuple[asyncio.Future, Any]]) -> None:
        for waiter, result in news:
            if waiter.done():  # the client is gone
                continue
            if isinstance(result, Exception):
                waiter.set_exception(result)
            else:
                waiter.set_result(result)

    def metrics(self) -> str:
        """Counts in Prometheus' text format, with vLLM's names. Cached blocks are held or free."""
        scheduler, pool = self.llm.scheduler, self.llm.scheduler.block_manager
        num_held = pool.num_blocks - pool.num_free_blocks
        num_cached = sum(len(manager.key_of_block) for manager in getattr(pool, "managers", [pool]))
        finished: dict[str, float] = {f'finished_reason="{reason}"': count
                                      for reason, count in sorted(self.finish_reasons.items())}
        states: dict[str, float] = {'state="held"': num_held, 'state="free"': pool.num_free_blocks,
                                    'state="cached"': num_cached}
        values: list[tuple[str, str, dict[str, float]]] = [
            ("gauge", "num_requests_running", {"": len(scheduler.running)}),
            ("gauge", "num_requests_waiting", {"": len(scheduler.waiting)}),
            ("gauge", "kv_cache_usage_perc", {"": num_held / pool.num_blocks}),
            ("gauge", "num_blocks", states),
            ("counter", "prefix_cache_queries_total", {"": pool.num_prompt_tokens}),
            ("counter", "prefix_cache_hits_total", {"": pool.num_cached_tokens}),
            ("counter", "prompt_tokens_total", {"": pool.num_prompt_tokens}),
            ("counter", "generation_tokens_total", {"": scheduler.num_generated_tokens}),
            ("counter", "num_preemptions_total", {"": scheduler.num_preemptions}),
            ("counter", "request_success_total", finished)]
        if self.llm.drafting:
            drafts = self.llm.drafting.metrics
            values += [("counter", "spec_decode_num_drafts_total", {"": drafts.num_draft_steps}),
                       ("counter", "spec_decode_num_draft_tokens_total", {"": drafts.num_draft_tokens}),
                       ("counter", "spec_decode_num_accepted_tokens_total", {"": drafts.num_accepted_tokens})]
        lines = []
        for kind, name, counts in values:
            lines.append(f"# TYPE nanopaged:{name} {kind}")
            lines += [f"nanopaged:{name}{'{' * bool(label)}{label}{'}' * bool(label)} {count}"
                      for label, count in counts.items()]
        return "\n".join(lines) + "\n"

    # ---- in the engine thread

    def run(self) -> None:
        while not self.is_stopped:
            self.has_commands.clear()
            if not (self.commands or self.llm.requests):
                self.has_commands.wait()
            started = time.perf_counter()
            try:
                with self.llm.lock:
                    self._obey()
                    if self.llm.requests:
                        self.llm._step()
                        self.failure = None
                        self._obey()  # clients that began to wait during this step get its outputs
            except Exception as failure:  # the GPU's, or a mistake of ours: the requests under way have to end
                traceback.print_exc()
                self._fail(failure)
            ready = [stream for stream in self.streams
                     if stream.waiter is not None and (stream.has_news or stream.failure)]
            if self.llm.requests:
                del ready[16 + int(LOOP_SHARE / EVENT_SECONDS * (time.perf_counter() - started)):]
            news = [self._take(stream) for stream in ready]
            if news:
                with suppress(RuntimeError):  # the loop is closed: the server was stopped by force
                    self.loop.call_soon_threadsafe(self._deliver, news)
        self._fail(ApiError("the server is stopping", 503))

    def _obey(self) -> None:
        while self.commands:
            function, arguments = self.commands.popleft()
            function(*arguments)

    def _add(self, stream: Stream) -> None:
        self.streams[stream] = None
        for request in stream.requests:
            self.llm._add(request)

    def _wait(self, stream: Stream, waiter: asyncio.Future) -> None:
        stream.waiter = waiter

    def _abort(self, stream: Stream) -> None:
        self.streams.pop(stream, None)
        self.llm._abort(*(request.request_id for request in stream.requests))

    def _fail(self, failure: Exception) -> None:
        self.failure = failure
        for stream in self.streams:
            stream.failure = failure
            with self.llm.lock:
                self.llm._abort(*(request.request_id for request in stream.requests))

    def _take(self, stream: Stream) -> tuple[asyncio.Future, Any]:
        """The future of a client that waits, and its outputs, or why there will be none."""
        waiter, stream.waiter = stream.waiter, None
        assert waiter is not None
        try:
            if stream.failure is not None:
                raise stream.failure
            news = stream.take_news() if stream.in_parts else {}
        except Exception as failure:  # a step's, or that of a tokenizer
            stream.failure = failure
            return waiter, ApiError.of(failure, 500)
        del self.streams[stream]
        if not stream.finished:
            self.streams[stream] = None  # behind those that wait longer
        else:
            self.finish_reasons.update(str(seq.finish_reason) for request in stream.requests
                                       for seq in request.sequences)
        return waiter, news
