"""The engine's lock: one thread at a time computes steps, and every thread gets its result after the step that made it.

Several threads call the engine at the same time. A caller that has no result yet computes a step, and the step serves
all requests, also those of other threads. A waiting caller may therefore have its result already when it gets the lock:

    waiting threads    generate (2 of 9 tokens)    add_request    stream (a new token)
    after a step       the holder passes the lock to add_request, which needs no step, and then to stream, whose token
                       has arrived; if no such thread waits, the holder computes the next step

The holder passes the lock directly to a waiting thread. A thread that computes steps in a loop therefore cannot
re-acquire the lock before the waiting threads have had their turn.

The engine's state must not be interrupted or changed in the middle of a step. Ctrl-C is therefore delayed until the
state is consistent (see `Interrupts`). An abort may come from within a step: from the garbage collector, or from a
logits processor. Such an abort is queued until the lock's holder executes it (`defer`).
"""
import os
import signal
import threading
from collections import deque
from contextlib import contextmanager
from typing import Any, Callable, Iterator


class _Waiter:
    """A thread that waits for the lock. is_done: tells whether its result has arrived; None: it needs no step."""
    __slots__ = ("thread", "is_done", "gate")

    def __init__(self, thread: int, is_done: Callable[[], bool] | None) -> None:
        self.thread, self.is_done = thread, is_done
        self.gate = threading.Lock()  # released when the thread gets the engine's lock
        self.gate.acquire()

    @property
    def needs_no_step(self) -> bool:
        return self.is_done is None or self.is_done()


class StepLock:
    """`with lock:` is for callers that need no step, `with lock.turn(is_done):` for callers that compute steps until
    is_done(). RuntimeError for a call from within a step (the lock is not reentrant), in a forked process, and once the
    LLM is closed."""

    def __init__(self) -> None:
        self.process, self.is_closed = os.getpid(), False
        self.owner: int | None = None  # the thread that holds the lock
        self.waiters: deque[_Waiter] = deque()  # in the order of arrival
        self.mutex = threading.Lock()  # guards `owner` and `waiters`, for microseconds
        self.deferred: deque[Callable[[], object]] = deque()
        self.interrupts = Interrupts()

    def acquire(self, is_done: Callable[[], bool] | None = None) -> None:
        thread = threading.get_ident()
        if self.process != os.getpid():
            raise RuntimeError(f"this LLM belongs to process {self.process}; the forked process {os.getpid()} lacks "
                               "its threads and its GPU; start processes by multiprocessing's method 'spawn', and make "
                               "an LLM in each")
        if self.owner == thread:
            raise RuntimeError("the engine was called from within one of its steps (by a logits processor?); call it "
                               "when the step is done, or use another LLM")
        waiter = _Waiter(thread, is_done)
        with self.mutex:
            is_free = self.owner is None
            if is_free:
                self.owner = thread
            else:
                self.waiters.append(waiter)
        if not is_free:
            self._wait(waiter)
        if self.is_closed:
            self.release()
            raise RuntimeError("this LLM was closed when its `with` block ended; make a new one")

    def _wait(self, waiter: _Waiter) -> None:
        try:
            with self.interrupts.let_through():
                waiter.gate.acquire()
        except BaseException:  # Ctrl-C
            with self.mutex:
                if self.owner != waiter.thread:
                    self.waiters.remove(waiter)
            if self.owner == waiter.thread:
                self.release()
            raise

    def release(self) -> None:
        try:
            while self.deferred:
                self.deferred.popleft()()
        finally:
            with self.mutex:
                waiter = next((waiter for waiter in self.waiters if waiter.needs_no_step), None)
                if waiter is None and self.waiters:
                    waiter = self.waiters[0]  # the oldest waiter computes the next step
                if waiter is not None:
                    self.waiters.remove(waiter)
                self.owner = waiter.thread if waiter else None
            if waiter is not None:
                waiter.gate.release()
            elif self.deferred:  # the garbage collector has just added one
                self.carry_out()

    def __enter__(self) -> None:
        self.interrupts.hold()
        try:
            self.acquire()
        except BaseException:
            self.interrupts.release()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self.release()
        finally:
            self.interrupts.release()

    @contextmanager
    def turn(self, is_done: Callable[[], bool]) -> Iterator[None]:
        """Hold the lock to compute steps until is_done(). Between two steps the caller calls `pass_on`."""
        with self.interrupts.held():
            self.acquire(is_done)
            try:
                yield
            finally:
                if self.owner == threading.get_ident():  # otherwise Ctrl-C arrived while `pass_on` waited
                    self.release()

    def pass_on(self, is_done: Callable[[], bool]) -> None:
        """Between two steps: deliver Ctrl-C, and pass the lock to the waiting threads that need no step."""
        self.interrupts.deliver()
        if not (self.waiters or self.deferred):
            return
        with self.mutex:
            others_go_first = bool(self.deferred) or any(waiter.needs_no_step for waiter in self.waiters)
        if others_go_first:
            self.release()
            self.acquire(is_done)

    def defer(self, function: Callable[[], object]) -> None:
        """Have `function` called between two steps: at once if no thread holds the lock, otherwise by its holder. This
        method never waits, so the garbage collector may call it at any point, even inside this class."""
        self.deferred.append(function)
        self.carry_out()

    def carry_out(self) -> None:
        """Call the deferred functions if no thread holds the lock."""
        with self.interrupts.held():
            if self.mutex.acquire(blocking=False):
                is_free = self.owner is None
                if is_free:
                    self.owner = threading.get_ident()
                self.mutex.release()
                if is_free:
                    self.release()

    def change(self, function: Callable[[], object]) -> None:
        """Call `function` between two steps and wait for it; from within a step, defer it."""
        if self.owner == threading.get_ident():
            self.deferred.append(function)
        else:
            with self:
                function()


class Interrupts:
    """Delays Ctrl-C in the main thread, the only thread that receives signals."""

    def __init__(self) -> None:
        self.depth = 0  # nested calls of `hold`
        self.handler: Callable | None = None  # the program's own; None: the program ignores Ctrl-C or is killed by it
        self.pending: tuple[Any, ...] | None = None  # the arguments of a delayed signal
        self.passes = False  # in a section of `let_through`, which delays nothing

    def hold(self) -> None:
        """Delay signals until `release`. (The garbage collector may call both in the middle of either, see
        `StepLock.defer`. Then `depth` is above 0, and they do nothing.)"""
        if threading.current_thread() is threading.main_thread():
            self.depth += 1
            try:
                if self.depth == 1:
                    self.pending, self.passes = None, False
                    handler = signal.getsignal(signal.SIGINT)
                    self.handler = handler if callable(handler) else None
                    if self.handler:
                        signal.signal(signal.SIGINT, self._take)
            except BaseException:  # Ctrl-C
                self.depth -= 1
                raise

    def release(self) -> None:
        """Deliver the delayed signal, if there is one."""
        if threading.current_thread() is threading.main_thread():
            try:
                if self.depth == 1 and self.handler:
                    signal.signal(signal.SIGINT, self.handler)
            finally:
                self.depth -= 1
            if not self.depth:
                self.deliver()

    @contextmanager
    def held(self) -> Iterator[None]:
        self.hold()
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """For a section that an exception may end at any point."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        try:
            self.passes = True
            self.deliver()
            yield
        finally:
            self.passes = False

    def _take(self, *arguments: Any) -> None:
        self.pending = arguments
        if self.passes:
            self.passes = False  # the section ends here, though its `finally` may run later
            self.deliver()

    def deliver(self) -> None:
        """Call the program's handler for the delayed signal. Python's default handler raises KeyboardInterrupt."""
        if self.pending and self.handler and threading.current_thread() is threading.main_thread():
            pending, self.pending = self.pending, None
            self.handler(*pending)
