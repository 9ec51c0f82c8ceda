"""A progress bar on stderr, drawn only if stderr is a terminal or a notebook's cell:

    [########............] 8/20 prompts, 0:12, 0:18 left, 1043 tokens/s
"""
import shutil
import sys
import time

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
        try:
            enabled = bool(enabled)
        except (RuntimeError, ValueError):  # an array
            raise ValueError(f"use_tqdm must be True or False, not {enabled!r:.80}") from None
        self.enabled = enabled and sys.stderr is not None and (
            sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel"))
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


def counted(count: int, noun: str) -> str:
    """1 block, or 2 blocks."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
