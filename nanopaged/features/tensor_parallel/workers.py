"""The processes of a model on several GPUs (parallel.py): what rank 0 knows of its workers, and what a worker runs.

Rank 0 tells its workers each step, pickled, through a socket for each. A worker says when it has launched the step, and
rank 0 hears this before it sends the next one. What the ranks have to agree on goes through the same sockets, and on
CPUs each sum, too (`exchange`). A worker that says nothing for too long, or that has died, ends the engine: rank 0
kills all workers, and raises EngineDeadError. A thread looks for those that have died, because rank 0 may be waiting
for its GPU. If rank 0 itself is killed, the **guard**, a shell that waits for this, kills the workers.
"""
import os
import pickle
import socket
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from types import SimpleNamespace
from typing import Any

import torch

from nanopaged.api.assemble import make_runners
from nanopaged.device.choices import pick_devices
from nanopaged.features.tensor_parallel.parallel import Driver, Follower, on_top_of
from nanopaged.features.tensor_parallel.peers import Peers, join_peers
from nanopaged.features.tensor_parallel.split import split_config
from nanopaged.options import feature
from nanopaged.outputs import EngineDeadError

ROOT = Path(__file__).parents[3]  # where Python finds this package
START_SECONDS = 600  # that a worker may keep rank 0 waiting while it loads its weights
ANSWER_SECONDS = 60  # and later
EXIT_SECONDS = 2  # for a process to end, once its socket is closed
GUARD = "read -r _; kill -9 0"  # itself and the workers: its process group, which Ctrl-C in a terminal does not reach
joined: Peers | None = None  # in the process of a worker: with the other ranks


class Workers:
    """The processes of ranks 1 to size - 1, as rank 0 sees them. given: for `make_runners`"""
    are_busy = True  # each will say that it has loaded its weights, or that it has launched a step
    peers: Peers | None = None  # rank 0's

    def __init__(self, size: int, *given: Any):
        self.owner, self.failed, self.closed = os.getpid(), threading.Event(), threading.Event()
        self.errors: dict[int, Exception | None] = {}  # of ranks. The first one has ended the engine
        self.guard = Popen(["sh", "-c", GUARD], stdin=PIPE, process_group=0)
        self.processes, self.sockets = dict[int, Any](), dict[int, Any]()
        for rank in range(1, size):
            self.sockets[rank], theirs = socket.socketpair()
            self.sockets[rank].settimeout(START_SECONDS)
            with theirs:
                command = [sys.executable, "-Wignore", "-c", f"from {__name__} import main; main({rank})"]
                self.processes[rank] = Popen(command, cwd=ROOT, stdin=theirs, stdout=2, process_group=self.guard.pid)
        self.files = {rank: one.makefile("rb") for rank, one in self.sockets.items()}
        threading.Thread(target=self._watch, daemon=True).start()
        self._tell(given)

    def _tell(self, message: Any) -> None:
        for rank, one in self.sockets.items():
            try:
                one.sendall(pickle.dumps(message))
            except TimeoutError:
                self._end(rank, f"has not answered for {one.gettimeout():g} seconds")
            except OSError:
                pass  # it has died, and `_read` tells why

    def _read(self, rank: int) -> Any:
        """The worker's next message. If it has died, raises why."""
        try:
            message = pickle.load(self.files[rank])
        except TimeoutError:
            self._end(rank, f"has not answered for {self.sockets[rank].gettimeout():g} seconds")
        except (EOFError, OSError, pickle.UnpicklingError):
            code = self.processes[rank].wait()  # its socket was closed a little earlier
            self._end(rank, f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}")
        if isinstance(message, Exception):
            self._fail(rank, message)
            self.check()
        return message

    def _end(self, rank: int, reason: str) -> None:
        pid = self.processes[rank].pid
        self._fail(rank, EngineDeadError(f"worker {rank} (process {pid}) {reason}; make a new LLM"))
        self.check()

    def hear(self) -> None:
        """Wait until all workers are ready, or have launched the last step."""
        self.check()
        if self.are_busy:
            for rank, one in self.sockets.items():
                self._read(rank)
                one.settimeout(ANSWER_SECONDS)
            self.are_busy = False

    def send(self, step: tuple) -> None:
        """Have a step launched."""
        self.hear()
        self._tell(step)
        self.are_busy = True

    def exchange(self, value: Any) -> list:
        """The values of all ranks, in the order of ranks, when all have given theirs."""
        values = [value, *map(self._read, self.processes)]
        self._tell(values)
        return values

    def _fail(self, rank: int, error: Exception | None = None) -> None:
        """Kill all workers, because the one of this rank has died, or for this error."""
        self.errors[rank] = error or self.errors.get(rank)
        self.failed.set()
        for process in self.processes.values():
            process.kill()

    def check(self) -> None:
        """Raise what has ended the engine, if something has."""
        while self.failed.is_set():
            rank, error = [*self.errors.items()][0]
            if error:
                self.close()
                raise type(error)(*error.args) from None  # a copy: a traceback would keep the engine in memory
            self._read(rank)

    def give_up(self, error: Exception) -> None:
        """Rank 0 has failed in a step, perhaps because a worker has died, which the thread sees a little later."""
        if not isinstance(error, EngineDeadError):
            self.failed.wait(EXIT_SECONDS)
        self._fail(0, EngineDeadError(f"rank 0 failed in a step ({error!r:.300}); make a new LLM"))
        self.check()

    def _watch(self) -> None:
        """Look for workers that have died, as long as the engine exists."""
        while not self.closed.wait(0.02):
            for rank, process in self.processes.items():
                if process.poll() is not None:
                    self._fail(rank)
            if self.failed.is_set() and (peers := self.peers):
                peers.release()

    def close(self) -> None:
        """End the workers, and what waits for them on this rank's GPU."""
        if os.getpid() != self.owner or self.closed.is_set():  # a forked process ends, which has copies of the sockets
            return
        for rank, process in self.processes.items():
            self.files[rank].close(), self.sockets[rank].close()
            with suppress(TimeoutExpired):
                process.wait(EXIT_SECONDS)
            process.kill()
            process.wait()
        self.guard.communicate()
        self.closed.set()
        if self.peers:
            self.peers.drain()
        self.peers = None


def make_driver(base: Any, path: Path, config: Any, options: Any, device: torch.device, *parts: Any) -> Any:
    """Start the workers and make rank 0's runner. parts: the runner's other arguments. In a worker: make its runner"""
    if joined:
        return on_top_of(base, Follower, joined, config, options, joined.device, *parts)
    if sys.platform == "win32":
        raise ValueError("tensor_parallel_size needs Linux or macOS")
    split_config(config, size := options.tensor_parallel_size)  # ValueError
    theirs = SimpleNamespace(**vars(options) | dict(device=device.type, speculative_config=None))
    workers = Workers(size, theirs, config, path.resolve(), parts[-1])
    try:
        workers.peers = join_peers(0, size, device, workers.exchange)
        driver = on_top_of(base, Driver, workers.peers, config, options, device, *parts)
    except BaseException:
        workers.close()
        raise
    driver.workers = workers
    weakref.finalize(driver, workers.close)
    return driver


def main(rank: int) -> None:
    """A worker: make a part of the model, and launch the steps that rank 0 launches."""
    global joined
    link, step = socket.socket(fileno=0), None
    messages = link.makefile("rb")

    def exchange(value: Any) -> Any:
        link.sendall(pickle.dumps(value))
        return pickle.load(messages)

    try:
        options, *given = pickle.load(messages)
        device = pick_devices(options.device, options.tensor_parallel_size)[rank]
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.set_num_threads(max(1, torch.get_num_threads() // options.tensor_parallel_size))
        joined = join_peers(rank, options.tensor_parallel_size, device, exchange)
        (runner,), _ = make_runners(options, *given)
        if options.swap_space:
            feature("swapping", "swap_space").swap(runner, options.swap_space)
        while step := exchange(None):
            runner.follow(step)
    except (EOFError, ConnectionError):
        os._exit(0)  # rank 0 has closed the socket, or is gone
    except Exception as error:
        with suppress(OSError):
            link.sendall(pickle.dumps(error if type(error) is ValueError and step is None else EngineDeadError(
                f"worker {rank} (process {os.getpid()}) failed ({error!r:.1000}); make a new LLM")))
        os._exit(1)
