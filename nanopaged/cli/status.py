"""What the command line says on stderr about a run: the progress while it lasts, and the status line at its end."""
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

from nanopaged.outputs import RequestMetrics, RequestOutput
from nanopaged.progress import ProgressBar, counted


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fold(line: str) -> str:
    return textwrap.fill(line, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


class Progress:
    """Runs requests to their end and counts what the engine does meanwhile.

    bar: is drawn after the steps
    done: the number of units of the bar that are done, and more for its line (default: the finished requests)
    """

    def __init__(self, llm: Any, bar: ProgressBar | None = None, done: Callable[[], tuple[int, str]] | None = None):
        self.llm = llm
        self.pool = llm.scheduler.block_manager
        self.bar = bar or ProgressBar(None, enabled=False)
        self.num_finished = self.num_new = 0  # requests that have ended, and their new tokens
        self.num_cut = 0  # texts that max_model_len ended
        self.done = done or (lambda: (self.num_finished, ""))
        self.started = time.perf_counter()
        self.first: float | None = None  # the time of the first output
        self.before = self._counts()
        llm.counts.most_blocks_held = self.pool.num_blocks - self.pool.num_free_blocks
        self.metrics = llm.drafting and RequestMetrics()

    def run(self, requests: Iterable[tuple], refuse: Callable[[Any, ValueError], object] | None = None
            ) -> Generator[tuple[Any, RequestOutput], None, None]:
        """Run requests, each (key, prompt, sampling parameters, priority), and yield (key, output) as they finish.

        At most max_num_seqs requests wait in the scheduler besides those that run; the others are read later. A request
        that can never run goes to refuse(key, error), or raises ValueError. Closing this generator aborts the
        unfinished requests. Several threads may run requests of one LLM, each with its own Progress.
        """
        unread, llm, scheduler = iter(requests), self.llm, self.llm.scheduler
        keys: dict[Any, Any] = {}  # Request -> key
        try:
            while True:
                while not keys or len(scheduler.waiting) < scheduler.max_num_seqs:
                    if (given := next(unread, None)) is None:
                        break
                    key, *arguments = given
                    try:
                        request = llm.read_request(*arguments)
                    except ValueError as error:
                        if refuse is None:
                            raise
                        refuse(key, error)
                        continue
                    keys[request] = key
                    with llm.lock:
                        llm.add(request)
                if not keys:
                    return
                num_steps = llm.num_steps
                with llm.run_until(lambda: llm.num_steps > num_steps):
                    finished = [request for request in keys if request.finished]
                if not self.first and any(request.has_news for request in keys):
                    self.note_text()
                if self.bar.due:
                    num_done, more = self.done()
                    self.bar.update(num_done, self._counts()[2] - self.before[2], more)
                for request in finished:
                    output = request.output()
                    self.note_end(output)
                    yield keys.pop(request), output
        finally:
            self.bar.clear()
            for request in keys:
                llm.abort_request(request.request_id)

    def note_text(self) -> None:
        self.first = self.first or time.perf_counter()

    def note_end(self, output: RequestOutput) -> None:
        self.num_finished += 1
        for sample in output.outputs:
            self.num_new += len(sample.token_ids)
            self.num_cut += (sample.finish_reason == "length" and
                             len(output.prompt_token_ids) + len(sample.token_ids) == self.llm.max_model_len)
        if output.metrics:
            self.metrics += output.metrics

    def _counts(self) -> tuple[int, int, int]:
        counts = self.llm.counts
        return counts.num_prompt_tokens, counts.num_cached_tokens, counts.num_generated_tokens

    def report(self, start: str = "", after_first: bool = False, end: str = "") -> str:
        """The status line, of at most 100 columns. A longer one goes on in a second line.

        after_first: the speed leaves out the first token, whose time is that of the prompt
        """
        num_prompt, num_cached, _ = (now - before for now, before in zip(self._counts(), self.before))
        since = self.first if after_first and self.first else self.started
        rate = max(0, self.num_new - after_first) / max(time.perf_counter() - since, 1e-9)
        parts = [start, f"{counted(num_prompt, 'token' if start else 'prompt token')} ({num_cached} cached)",
                 f"first token {self.first - self.started:.2f} s" if self.first else "",
                 f"{self.num_new} new at {rate:.0f}/s",
                 f"{self.metrics.mean_acceptance_length:.2f} tokens per step with drafts" if self.metrics else "",
                 f"{most}/{self.pool.num_blocks} blocks" if (most := self.llm.counts.most_blocks_held) else "",
                 end]
        return fold(", ".join(filter(None, parts))) + (f"\n{fold(self._limit())}" if self.num_cut else "")

    def _limit(self) -> str:
        """What ended texts before their time."""
        texts = "the text" if self.num_cut == self.num_finished == 1 else f"{self.num_cut} texts"
        most = self.llm.max_model_len
        if most == self.llm.config.max_position_embeddings:
            return f"the model's limit of {most} tokens ended {texts}"
        if self.llm.limited_by == "option":
            return f"max_model_len {most} ended {texts}; raise --max-model-len"
        num_blocks = most // self.pool.block_size  # of the smallest pool
        pool = f"the pool of {counted(num_blocks, 'block')}"
        return f"{pool} ended {texts}; raise --num-blocks or --gpu-memory-utilization"
