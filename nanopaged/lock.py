"""The engine's lock: steps are computed one at a time, and nothing changes beneath them.

Who computes steps in a loop takes the lock again before a thread that waits for it has even woken up, and keeps it out for
many steps. So those who want it between two steps put their names down, and steps wait until nobody has.
"""
import threading
import time
from contextlib import contextmanager
from typing import Iterator


class StepLock:
    """Reentrant: `with lock` does what it does with threading.RLock."""

    def __init__(self):
        self.lock = threading.RLock()
        self.arriving: set[int] = set()  # threads

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *error):
        self.lock.release()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """For who adds or aborts a request: waits for the step under way and no other."""
        thread = threading.get_ident()
        self.arriving.add(thread)
        try:
            with self.lock:
                yield
        finally:
            self.arriving.discard(thread)

    @contextmanager
    def for_step(self) -> Iterator[None]:
        """For who computes a step, and does not have the lock yet."""
        while self.arriving:
            time.sleep(1e-5)
        with self.lock:
            yield
