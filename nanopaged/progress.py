"""A progress bar on stderr, drawn where stderr is a terminal:

    [########............] 8/20 prompts, 0:12, 0:18 left, 1043 tokens/s
"""
import shutil
import sys
import time

INTERVAL = 0.1  # seconds between two drawings


class ProgressBar:
    """One line that is drawn again and again. `clear` takes it away; whatever else is printed needs that first.

    total: how many there are; None: unknown, so neither bar nor remaining time can be given
    enabled: False: nothing is ever drawn
    unit: what is counted
    num_before: how many of them were done before the start; these do not count for the remaining time
    """

    def __init__(self, total: int | None, enabled: bool = True, unit: str = "prompts", num_before: int = 0):
        self.total, self.unit, self.num_before = total, unit, num_before
        self.enabled = bool(enabled) and sys.stderr is not None and sys.stderr.isatty()
        self.started, self.drawn = time.perf_counter(), 0.0  # drawn: when; 0: the line is empty

    @property
    def due(self) -> bool:
        """Whether it is time for an update, so that callers need not count for nothing."""
        return self.enabled and time.perf_counter() - self.drawn >= INTERVAL

    def update(self, num_done: int, num_tokens: int, more: str = "") -> None:
        """Draw the line: how many are done, and the new tokens since the start."""
        self.drawn = time.perf_counter()
        elapsed, bar, of, left = self.drawn - self.started, "", "", ""
        if self.total:
            bar, of = f"[{'#' * (20 * num_done // self.total):.<20}] ", f"/{self.total}"
            if num_done > self.num_before:
                seconds = elapsed * (self.total - num_done) / (num_done - self.num_before)
                left = f", {_clock(seconds)} left"
        rate = num_tokens / max(elapsed, 1e-9)
        more = f", {more}" * bool(more)
        line = f"{bar}{num_done}{of} {self.unit}, {_clock(elapsed)}{left}, {rate:.0f} tokens/s{more}"
        columns = shutil.get_terminal_size().columns - 1  # in the last one some terminals begin a new line
        print(f"\r{line[:columns]}\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self.drawn = 0.0


def _clock(seconds: float) -> str:
    """1:02:03, or 2:03."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
