"""Runs of many requests, and the bar that is drawn meanwhile on stderr, if that is a terminal or a notebook's cell:

    [########............] 8/20 prompts, 0:12, 0:18 left, 1043 tokens/s
"""
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

from nanopaged.cli.main import conclude, given, settings_of
from nanopaged.cli.status import Progress, counted
from nanopaged.inputs import wants_bar
from nanopaged.options import feature
from nanopaged.outputs import RequestOutput

INTERVAL = 0.1  # seconds between two drawings


class ProgressBar:
    """One line that is redrawn at every update. Call `clear` before other output to remove the line. Blanks cover what
    is left of a longer line, because neither a notebook nor a dumb terminal knows the sequence that erases it.

    total: the number of units; None if unknown, and then the line has neither bar nor remaining time
    enabled: False draws nothing
    unit: the name of a counted unit
    num_before: units done before the start; they do not count for the remaining time
    """

    def __init__(self, total: int | None, enabled: bool = True, unit: str = "prompt", num_before: int = 0):
        self.total = total
        self.unit = unit
        self.num_before = num_before
        self.enabled = wants_bar(enabled)
        self.started = time.perf_counter()
        self.drawn = 0.0  # the time of the last drawing; 0: the line is empty
        self.width = 0  # of the line, in characters

    @property
    def due(self) -> bool:
        """Whether the interval between two drawings is over. Callers compute an update's numbers only then."""
        return self.enabled and time.perf_counter() - self.drawn >= INTERVAL

    def update(self, num_done: int, num_tokens: int, more: str = "") -> None:
        """Draw the line: the number of units done, and the speed from the number of new tokens since the start."""
        self.drawn = time.perf_counter()
        elapsed = self.drawn - self.started
        done, left = counted(num_done, self.unit), ""
        if self.total:
            done = f"[{'#' * (20 * num_done // self.total):.<20}] {num_done}/{counted(self.total, self.unit)}"
            if num_done > self.num_before:
                left = _clock(elapsed * (self.total - num_done) / (num_done - self.num_before)) + " left"
        rate = f"{num_tokens / max(elapsed, 1e-9):.0f} tokens/s"
        columns = shutil.get_terminal_size().columns - 1  # some terminals begin a new line at the last column
        line = ", ".join(filter(None, [done, _clock(elapsed), left, rate, more]))[:columns]
        self._print(f"\r{line:{self.width}}")
        self.width = len(line)

    def clear(self) -> None:
        if self.drawn:
            self._print(f"\r{'':{self.width}}\r")
            self.drawn = 0.0
            self.width = 0

    def _print(self, text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    """1:02:03, or 2:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def watch(llm: Any, requests: list[Any], is_done: Callable[[], bool]) -> None:
    """Compute steps until is_done(), with a bar for these requests, which have been added."""
    bar = ProgressBar(len(requests))
    try:
        while not is_done():
            with llm.run_until(lambda: bar.due or is_done()):
                if bar.due:
                    bar.update(sum(request.finished for request in requests),
                               sum(request.num_new_tokens for request in requests))
    finally:
        bar.clear()


class Runs(Progress):
    """Runs requests to their end, and counts what the engine does meanwhile.

    bar: is drawn after the steps
    done: the number of units of the bar that are done, and more for its line (default: the finished requests)
    """

    def __init__(self, llm: Any, bar: ProgressBar | None = None, done: Callable[[], tuple[int, str]] | None = None):
        super().__init__(llm)
        self.bar = bar or ProgressBar(None, enabled=False)
        self.done = done or (lambda: (self.num_finished, ""))

    def run(self, requests: Iterable[tuple], refuse: Callable[[Any, ValueError], object] | None = None
            ) -> Generator[tuple[Any, RequestOutput], None, None]:
        """Run requests, each (key, prompt, sampling parameters, priority), and yield (key, output) as they finish.

        At most max_num_seqs requests wait in the scheduler besides those that run; the others are read later. A request
        that can never run goes to refuse(key, error), or raises ValueError. Closing this generator aborts the
        unfinished requests. Several threads may run requests of one LLM, each with its own Runs.
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


# --------------------------------------------------------------------------------------------------
# The command line: several prompts, samples or beams, or a trace
# --------------------------------------------------------------------------------------------------

def prepare(args: Any) -> Callable[..., int]:
    """Prepare a run that prints its texts when all are done. The result takes the LLM, and what makes prompts of the
    texts that were given; the exit code."""
    search, shows_bar = None, not args.prints_steps
    if args.beam_width is not None:
        options = given(args, ("beam_width", "length_penalty", "ignore_eos"))
        search = feature("beam", "--beam-width").BeamSearchParams(max_tokens=args.max_tokens or 256, **options)

    def act(llm: Any, render: Callable[[str], Any] = str, read: Callable | None = None) -> int:
        params, prompts = settings_of(args, llm), [*map(render, args.prompt)]
        progress = Runs(llm, ProgressBar(len(prompts), shows_bar))
        if search:
            outputs = llm.beam_search(prompts, search, use_tqdm=shows_bar)
            for output in outputs:
                progress.note_end(output)
                for one in output.outputs if read else ():  # `read` wants special tokens, which its text lacks
                    ids = one.token_ids[:-1] if one.finish_reason == "stop" else one.token_ids
                    one.text = llm.tokenizer.decode(ids, skip_special_tokens=False)
        else:
            outputs = [output for _, output in sorted(progress.run((i, prompt, params, 0)
                                                                   for i, prompt in enumerate(prompts)))]
        return print_all(args.prompt, outputs, progress, read)

    return act


def print_all(titles: list[str], outputs: list[RequestOutput], progress: Progress, read: Callable | None = None) -> int:
    """Several texts, each under its prompt; the exit code. read: see `stream` in cli/main.py"""
    several, samples = any(len(output.outputs) > 1 for output in outputs), []
    for title, output in zip(titles, outputs):
        for sample in output.outputs:
            number = f" [{sample.index}]" * several
            score = "" if sample.score is None else f" score {sample.score:.4f}"
            text = "".join(read((one for one in [sample.text]), shows_thoughts=False)) if read else sample.text
            print(f"=== {title!r}{number}{score}\n{text}\n")
            samples.append((f"{title!r:.80}{number}", sample))
    return conclude(progress, samples, start=counted(len(titles), "prompt"))
