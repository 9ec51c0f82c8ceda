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
from itertools import chain
from typing import Any, Callable, Iterator


class StepLock:
    """`with lock:` is for callers that need no step. Callers that compute steps wait until their result may be there,
    with `acquire(is_done)`, and release the lock between two steps if it `is_wanted` (Core.run_until).
    RuntimeError for a call from within a step (the lock is not reentrant), in a forked process, and once the LLM is
    closed. A thread waits at its **gate**, a locked lock of its own that opens when the thread has got `lock`:

        no thread has `lock`    acquire: enter a gate in `waiters`; _serve takes `lock`; _pass finds and opens the gate
        another thread has it   acquire: enter a gate; _serve finds `lock` taken; wait at the gate
                                the other's release: _pass opens the gate; `lock` stays locked, it changes hands
        waiters.pop(gate)       succeeds once: in _pass, then the thread has `lock`; or in acquire, then it gives up
        interrupts              are held from acquire to the release of the same thread, but for its wait at the gate
    """

    def __init__(self) -> None:
        self.process, self.is_closed = os.getpid(), False
        self.lock = threading.Lock()  # stays locked while threads pass it on
        self.owner: int | None = None  # the thread that holds it; each thread asks for itself only
        self.waiters: dict[Any, Callable[[], bool]] = {}  # gates, the oldest first -> whether the result has arrived
        self.deferred: deque[Callable[[], object]] = deque()
        self.interrupts = Interrupts()

    def acquire(self, is_done: Callable[[], bool] = lambda: True) -> None:
        """Wait until a thread passes the lock to this one; at once if none holds it. Ctrl-C ends the wait."""
        if self.process != os.getpid():
            raise RuntimeError(f"this LLM belongs to process {self.process}; the forked process {os.getpid()} lacks "
                               "its threads and its GPU; start processes by multiprocessing's method 'spawn', and make "
                               "an LLM in each")
        if self.owner == threading.get_ident():
            raise RuntimeError("the engine was called from within one of its steps (by a logits processor?); call it "
                               "when the step is done, or use another LLM")
        gate = threading.Lock()
        gate.acquire()
        self.interrupts.hold()
        try:
            self.waiters[gate] = is_done
            self._serve()
            with self.interrupts.let_through():
                gate.acquire()
            if self.is_closed:
                raise RuntimeError("this LLM was closed when its `with` block ended; make a new one")
            self.owner = threading.get_ident()
        except BaseException:
            if self.waiters.pop(gate, None):
                self.interrupts.release()
            else:  # this thread has got the lock
                self.release()
            raise

    def release(self, *error: object) -> None:
        try:
            self._pass()
        finally:
            self.interrupts.release()

    __enter__, __exit__ = acquire, release

    def _serve(self) -> None:
        """For a waiter or a deferred function that has just come: pass the lock if no thread holds it."""
        if (self.waiters or self.deferred) and self.lock.acquire(blocking=False):
            self.owner = threading.get_ident()
            self._pass()

    def _pass(self) -> None:
        """Call the deferred functions. Then pass the lock to the first thread that needs no step, or else to the first
        one, which computes the next step."""
        try:
            while self.deferred:
                self.deferred.popleft()()
        finally:
            self.owner, waiters = None, self.waiters.copy()
            ready = (gate for gate, is_done in waiters.items() if is_done())
            gate = next((gate for gate in chain(ready, waiters) if self.waiters.pop(gate, None)), None)
            if gate:
                gate.release()
            else:
                self.lock.release()
                self._serve()  # those that have come since `waiters` was copied

    @property
    def is_wanted(self) -> bool:
        """Whether others need the lock before the next step: deferred functions, or waiting threads without a step to
        compute."""
        return bool(self.deferred) or any(is_done() for is_done in self.waiters.copy().values())

    def defer(self, function: Callable[[], object]) -> None:
        """Have `function` called between two steps: at once if no thread holds the lock, otherwise by its holder. This
        method never waits, so the garbage collector may call it at any point, even inside this class."""
        self.deferred.append(function)
        with self.interrupts:
            self._serve()

    def change(self, function: Callable[[], object]) -> None:
        """Call `function` between two steps and wait for it; from within a step, defer it."""
        if self.owner == threading.get_ident():
            self.deferred.append(function)
        else:
            with self:
                function()


class Interrupts(threading.local):
    """`with interrupts:` delays Ctrl-C in the main thread, the only thread that receives signals. Each thread has its
    own values."""
    depth = 0  # nested calls of `hold`
    handler: Any = None  # the program's own; not callable: the program ignores Ctrl-C, or is killed by it
    pending: tuple[Any, ...] | None = None  # the arguments of a delayed signal
    passes = False  # in a section of `let_through`, which delays nothing

    def hold(self) -> None:
        """Delay signals until `release`. (The garbage collector may call both in the middle of either, see
        `StepLock.defer`. What it calls is not interrupted.)"""
        self.depth += 1
        try:
            if threading.current_thread() is threading.main_thread():
                handler = signal.getsignal(signal.SIGINT)
                if handler != self._take:
                    self.handler, self.pending, self.passes = handler, None, False
                    if callable(handler):
                        signal.signal(signal.SIGINT, self._take)
        except BaseException:  # Ctrl-C
            self.depth -= 1
            raise

    def release(self, *error: object) -> None:
        """Deliver the delayed signal, if there is one."""
        self.depth -= 1
        if not self.depth:
            if callable(self.handler):
                signal.signal(signal.SIGINT, self.handler)
            self.deliver()

    __enter__, __exit__ = hold, release

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """For a section that an exception may end at any point."""
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
        if self.pending:
            pending, self.pending = self.pending, None
            self.handler(*pending)
