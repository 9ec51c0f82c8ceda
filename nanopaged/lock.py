"""The engine's lock: steps are computed one at a time, and nothing changes beneath them.

Who computes steps in a loop takes the lock again before a thread that waits for it has even woken up, and keeps it out for
many steps. So those who want it between two steps put their names down, and steps wait until nobody has.

And who has the lock may be called away half-way. Ctrl-C waits until the lock is given back, but for sections that take
long. The garbage collector may close a stream, whose request is to be aborted then: that waits, too.
"""
import signal
import threading
import time
from contextlib import contextmanager
from typing import Callable, Iterator


class StepLock:
    """Reentrant: `with lock` does what it does with threading.RLock."""

    def __init__(self):
        self.lock = threading.RLock()
        self.owner: int | None = None  # the thread that has it
        self.depth = 0  # how many times
        self.arriving: set[int] = set()  # threads
        self.changes: list[Callable] = []  # for when it is given back
        self.interrupts = Interrupts()

    def __enter__(self):
        self.interrupts.hold()
        try:
            while not self.lock.acquire(timeout=0.1):
                self.interrupts.deliver()
        except BaseException:
            self.interrupts.release()
            raise
        self.owner = threading.get_ident()
        self.depth += 1

    def __exit__(self, *error):
        try:
            while self.depth == 1 and self.changes:
                self.changes.pop(0)()
        finally:
            self.depth -= 1
            self.owner = self.owner if self.depth else None
            self.lock.release()
            self.interrupts.release()

    def change(self, function: Callable) -> None:
        """Call it between two steps; if this thread has the lock, when it is given back."""
        if self.owner == threading.get_ident():
            self.changes.append(function)
        else:
            with self.between_steps():
                function()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """For who adds or aborts a request: waits for the step under way and no other."""
        thread = threading.get_ident()
        try:
            self.arriving.add(thread)
            with self:
                yield
        finally:
            self.arriving.discard(thread)

    @contextmanager
    def for_step(self) -> Iterator[None]:
        """For who computes a step, and does not have the lock yet."""
        while self.arriving:
            time.sleep(1e-5)
        with self:
            yield


class Interrupts:
    """Ctrl-C, held back in the main thread, which is the only one that it comes to."""

    def __init__(self):
        self.depth = 0
        self.handler: Callable | None = None  # whose turn it is afterwards; None: the program ignores it, or dies of it
        self.came: tuple | None = None  # what it is to get
        self.passes = False

    def hold(self) -> None:
        if threading.current_thread() is threading.main_thread():
            if not self.depth:
                self.came, self.passes, handler = None, False, signal.getsignal(signal.SIGINT)
                self.handler = handler if callable(handler) else None
                if self.handler:
                    signal.signal(signal.SIGINT, self._take)
            self.depth += 1

    def release(self) -> None:
        """What came meanwhile comes now."""
        if threading.current_thread() is threading.main_thread():
            self.depth -= 1
            if not self.depth and self.handler:
                signal.signal(signal.SIGINT, self.handler)
                self.deliver()

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """For a section that can be left at any point."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        try:
            self.passes = True
            self.deliver()
            yield
        finally:
            self.passes = False

    def _take(self, *arguments) -> None:
        self.came = arguments
        if self.passes:
            self.deliver()

    def deliver(self) -> None:
        came, self.came = self.came, None
        if came:
            self.handler(*came)
