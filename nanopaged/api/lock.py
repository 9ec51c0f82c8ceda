"""The engine's lock: one thread at a time computes steps, and all threads get their results as soon as these are there.

Threads call the engine at the same time. A caller whose result is not there computes a step, and that step serves all
requests, those of other threads too. So a caller that waits for the lock may find its result there when it gets it:

    queue            generate (2 of 9 tokens)    add_request    stream (a new token)
    after a step     the holder passes the lock to add_request, which wants no step, then to the stream, whose piece is there;
                     with neither in the queue the holder goes on and computes the next step

The lock is handed over, from its holder to a waiting thread, so a thread that computes steps in a loop cannot take it
again before the waiting threads have had their turn.

Two things must not happen while the engine's books are half-written. Ctrl-C waits until they are in order (see
`Interrupts`). An abort that comes from the garbage collector or from a logits processor, that is from within a step,
waits in a queue until the lock's holder carries it out (`defer`).
"""
import signal
import threading
from collections import deque
from contextlib import contextmanager
from typing import Callable, Iterator


class _Waiter:
    """A thread that waits for the lock. is_done: whether its result is there; None: it wants no step."""
    __slots__ = ("thread", "is_done", "gate")

    def __init__(self, thread: int, is_done: Callable[[], bool] | None):
        self.thread, self.is_done = thread, is_done
        self.gate = threading.Lock()
        self.gate.acquire()

    @property
    def wants_no_step(self) -> bool:
        return self.is_done is None or self.is_done()


class StepLock:
    """`with lock:` for a caller that wants no step, `with lock.turn(is_done):` for one that computes steps until
    is_done(). Not reentrant: RuntimeError for a call from within a step."""

    def __init__(self):
        self.owner: int | None = None  # the thread that has the lock
        self.waiters: deque[_Waiter] = deque()  # in the order of their arrival
        self.mutex = threading.Lock()  # guards the two above, for microseconds
        self.deferred: deque[Callable] = deque()
        self.interrupts = Interrupts()

    def acquire(self, is_done: Callable[[], bool] | None = None) -> None:
        thread = threading.get_ident()
        if self.owner == thread:
            raise RuntimeError("the engine was called from within one of its steps (by a logits processor?); call it when the "
                               "step is done, or use another LLM")
        waiter = _Waiter(thread, is_done)
        with self.mutex:
            if self.owner is None:
                self.owner = thread
                return
            self.waiters.append(waiter)
        try:
            with self.interrupts.let_through():
                waiter.gate.acquire()
        except BaseException:  # Ctrl-C
            with self.mutex:
                if self.owner != thread:
                    self.waiters.remove(waiter)
            if self.owner == thread:
                self.release()
            raise

    def release(self) -> None:
        try:
            while self.deferred:
                self.deferred.popleft()()
        finally:
            with self.mutex:
                waiter = next((waiter for waiter in self.waiters if waiter.wants_no_step), None)
                if waiter is None and self.waiters:
                    waiter = self.waiters[0]  # the oldest one computes the next step
                if waiter is not None:
                    self.waiters.remove(waiter)
                self.owner = waiter.thread if waiter else None
            if waiter is not None:
                waiter.gate.release()
            elif self.deferred:  # by the garbage collector, a moment ago
                self.carry_out()

    def __enter__(self) -> None:
        self.interrupts.hold()
        try:
            self.acquire()
        except BaseException:
            self.interrupts.release()
            raise

    def __exit__(self, *error) -> None:
        try:
            self.release()
        finally:
            self.interrupts.release()

    @contextmanager
    def turn(self, is_done: Callable[[], bool]) -> Iterator[None]:
        """The lock, for a caller that computes steps until is_done(); between two of them it calls `pass_on`."""
        self.interrupts.hold()
        try:
            self.acquire(is_done)
            try:
                yield
            finally:
                if self.owner == threading.get_ident():  # else Ctrl-C came while `pass_on` waited
                    self.release()
        finally:
            self.interrupts.release()

    def pass_on(self, is_done: Callable[[], bool]) -> None:
        """Between two steps: let Ctrl-C through, and give the lock to the waiting threads that want no step."""
        self.interrupts.deliver()
        if not (self.waiters or self.deferred):
            return
        with self.mutex:
            others_go_first = bool(self.deferred) or any(waiter.wants_no_step for waiter in self.waiters)
        if others_go_first:
            self.release()
            self.acquire(is_done)

    def defer(self, function: Callable) -> None:
        """Have `function` called between two steps: at once if no thread has the lock, else by its holder. Never waits, so
        the garbage collector may call this at any point, even within this class."""
        self.deferred.append(function)
        self.carry_out()

    def carry_out(self) -> None:
        if self.mutex.acquire(blocking=False):
            is_free = self.owner is None
            if is_free:
                self.owner = threading.get_ident()
            self.mutex.release()
            if is_free:
                self.release()

    def change(self, function: Callable) -> None:
        """Call `function` between two steps, and return when that is done; from within a step: defer it."""
        if self.owner == threading.get_ident():
            self.deferred.append(function)
        else:
            with self:
                function()


class Interrupts:
    """Ctrl-C, held back in the main thread, the only thread that receives signals."""

    def __init__(self):
        self.depth = 0
        self.handler: Callable | None = None  # the program's own; None: the program ignores Ctrl-C, or dies of it
        self.pending: tuple | None = None  # the arguments of a signal that was held back
        self.passes = False

    def hold(self) -> None:
        if threading.current_thread() is threading.main_thread():
            if not self.depth:
                self.pending, self.passes, handler = None, False, signal.getsignal(signal.SIGINT)
                self.handler = handler if callable(handler) else None
                if self.handler:
                    signal.signal(signal.SIGINT, self._take)
            self.depth += 1

    def release(self) -> None:
        """Deliver the signal that came meanwhile."""
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
        self.pending = arguments
        if self.passes:
            self.deliver()

    def deliver(self) -> None:
        """Call the program's handler, which raises KeyboardInterrupt unless the program has set another one."""
        if self.pending and threading.current_thread() is threading.main_thread():
            pending, self.pending = self.pending, None
            self.handler(*pending)
