"""The processes of a model on several GPUs (parallel.py): what rank 0 knows of its workers, and what a worker runs.

    rank 0      sends a step (pickled lists of integers), launches it, reads the answers, plans the next step
    worker      reads it, launches it, answers with a line of JSON, and waits for the next

A worker ends when its pipe closes. A thread of rank 0 looks after the workers. If one is dead, or keeps rank 0 waiting
for too long, the thread kills all of them and lets the barriers under way end. Whatever waits for a worker then fails
or returns, and rank 0 raises EngineDeadError. If rank 0 is killed, the **guard**, a shell that waits for this, kills
the workers, also those that compute or are stopped (SIGSTOP), and removes the files.
"""
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from types import SimpleNamespace
from typing import Any

import torch

from nanopaged import model
from nanopaged.api.assemble import load, pick_runner, read
from nanopaged.device.choices import pick_dtype
from nanopaged.device.runner import Runner
from nanopaged.device.trial import allocate_pool
from nanopaged.features.fused import with_fp8
from nanopaged.features.graphs import GraphRunner
from nanopaged.features.swapping import swap
from nanopaged.features.tensor_parallel.parallel import Driver, Follower
from nanopaged.features.tensor_parallel.peers import START_SECONDS, Peers, join_peers
from nanopaged.features.tensor_parallel.split import split_config
from nanopaged.outputs import EngineDeadError

ROOT = Path(__file__).parents[3]  # where Python finds this package
ANSWER_SECONDS = 60  # that a worker may keep rank 0 waiting; while it starts, START_SECONDS
WATCH_SECONDS = 0.1
EXIT_SECONDS = 2  # for a worker to end, once its connections are closed
OUT_OF_MEMORY = "OutOfMemoryError"
GUARD = 'while read -r line; do workers=$line; done; kill -9 $workers; rm -rf "$1"'  # the last line has the process ids


class Waiting:
    """While rank 0 has nothing to do but to wait: `with waiting(rank):` for this worker, `with waiting():` for any."""
    count = 0  # odd in a wait, and each wait has its own
    ranks: tuple[int, ...] = ()

    @contextmanager
    def __call__(self, *ranks: int) -> Iterator[None]:
        self.ranks = ranks
        self.count += 1
        try:
            yield
        finally:
            self.count += 1


class Workers:
    """The processes of ranks 1 to size - 1, as rank 0 sees them. options: for `make_follower`."""
    is_ready = False  # all are made, and wait for steps
    dead = 0  # the rank of one that is dead, or has made rank 0 give up: then all have been killed
    error: Exception | None = None  # why

    def __init__(self, size: int, options: dict[str, Any]):
        self.folder = tempfile.mkdtemp(prefix="nanopaged-")
        # In sessions of their own: Ctrl-C in the terminal reaches rank 0 only.
        self.guard = subprocess.Popen(["sh", "-c", GUARD, "guard", self.folder], bufsize=0, stdin=PIPE,
                                      stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
        self.processes: dict[int, Popen] = {}
        self.joined: list[Peers] = []  # rank 0's, once it has them
        self.close = weakref.finalize(self, _close, self.processes, self.guard, self.folder, self.joined, os.getpid())
        self.waiting = Waiting()
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        for rank in range(1, size):
            self.processes[rank] = Popen([sys.executable, "-m", __spec__.name], cwd=ROOT, stdin=PIPE, stdout=PIPE,
                                         env=os.environ | dict(PYTHONPATH=path), start_new_session=True)
            _tell(self.guard, " ".join(str(process.pid) for process in self.processes.values()))
        threading.Thread(target=_watch, args=[weakref.ref(self)], daemon=True).start()
        for rank in self.processes:
            self._write(rank, pickle.dumps(options | dict(rank=rank, size=size, folder=self.folder)))

    def send(self, step: tuple) -> None:
        """Have a step launched."""
        message = pickle.dumps(step)
        for rank in self.processes:
            self._write(rank, message)

    def _write(self, rank: int, message: bytes) -> None:
        pipe: Any = self.processes[rank].stdin
        with self.waiting(rank):  # a worker that is stopped reads nothing, and the pipe holds 64 KiB
            pipe.write(message)
            pipe.flush()

    def wait(self) -> None:
        """Until every worker has launched what was sent. torch.OutOfMemoryError if one had too little memory for it."""
        for answer in [self._read(rank) for rank in self.processes]:
            if answer:
                raise torch.OutOfMemoryError(answer["text"])

    def wait_until_ready(self) -> None:
        self.wait()
        self.is_ready = True
        shutil.rmtree(self.folder, ignore_errors=True)  # all have opened its files

    def _read(self, rank: int) -> dict[str, Any]:
        """A worker's answer: empty, or that it was out of memory."""
        pipe: Any = self.processes[rank].stdout
        with self.waiting(rank):
            line = pipe.readline()
        answer = json.loads(line or "{}")
        if not line:
            self.fail(rank)
        elif answer.get("error", OUT_OF_MEMORY) != OUT_OF_MEMORY:
            self.fail(error=self._describe(rank, answer))
        self.check()
        return answer

    # ---- when one is dead

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Make of an error that a dead worker causes the sentence that names the worker."""
        self.check()
        try:
            yield
        except Exception as error:
            deadline = time.monotonic() + EXIT_SECONDS  # a connection is closed before its process ends
            while not isinstance(error, (ValueError, torch.OutOfMemoryError)) and time.monotonic() < deadline:
                self.check()
                time.sleep(0.01)
            self.check()
            if not self.is_ready:
                self.fail()  # there will be no engine: nothing to wait for
            raise

    def check(self) -> None:
        """Raise the error that has ended the engine, if one has."""
        if not self.dead:
            return
        for peers in self.joined:
            peers.drain()  # a barrier under way would keep this process from freeing memory
        if self.error is None:
            answers: Any = self.processes[self.dead].stdout
            self.error = self._describe(self.dead, json.loads([b"{}", *answers][-1]))
        raise self.error.with_traceback(None) from None

    def _describe(self, rank: int, answer: dict[str, Any]) -> Exception:
        if answer.get("error") == "ValueError" and not self.is_ready:
            return ValueError(answer["text"])
        process = self.processes[rank]
        if answer:
            reason = f"failed ({answer['error']}: {answer['text']})"
        else:
            code = process.wait()
            reason = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return EngineDeadError(f"worker {rank} (process {process.pid}) {reason}; make a new LLM")

    def fail(self, rank: int = 0, error: Exception | None = None) -> None:
        """Kill the workers, because the one of this rank is dead, or for this error."""
        self.error = self.error or error
        if not self.dead:
            if rank:
                with suppress(TimeoutExpired):  # its pipe is closed
                    self.processes[rank].wait(EXIT_SECONDS)
            self.dead = rank or 1
        for process in self.processes.values():
            process.kill()
        _tell(self.guard, "")


def _watch(ref: "weakref.ref[Workers]") -> None:
    """Look after the workers as long as the engine exists. Looks are counted, not seconds: while rank 0 is stopped
    (Ctrl-Z) nobody waits."""
    num_looks = last = 0
    while (workers := ref()) is not None and workers.close.alive:
        count = workers.waiting.count
        num_looks, last = num_looks + 1 if count % 2 and count == last else 0, count
        limit = ANSWER_SECONDS if workers.is_ready else START_SECONDS
        dead = [rank for rank, process in workers.processes.items() if process.poll() is not None]
        if workers.dead:
            for peers in workers.joined:
                peers.release()
        elif dead:
            workers.fail(dead[0])
        elif num_looks * WATCH_SECONDS > limit:
            late = workers.waiting.ranks or workers.processes
            names = " or ".join(f"worker {rank} (process {workers.processes[rank].pid})" for rank in late)
            workers.fail(error=EngineDeadError(f"{names} has not answered for {limit} seconds; make a new LLM"))
        pause = 0.001 if workers.dead else WATCH_SECONDS
        del workers
        time.sleep(pause)


def _tell(guard: Popen, workers: str) -> None:
    """Which processes the guard has to kill."""
    with suppress(OSError, ValueError):  # it is gone, or closed
        guard.stdin.write(f"{workers}\n".encode())  # type: ignore[union-attr]


def _close(processes: dict[int, Popen], guard: Popen, folder: str, joined: list[Peers], owner: int) -> None:
    """Let the workers compute what was sent, and end."""
    if os.getpid() != owner:  # a forked process ends, which has copies of the pipes
        return
    for process in processes.values():
        with suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
    for process in processes.values():
        try:
            process.wait(EXIT_SECONDS)
        except TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    for peers in joined:
        peers.drain()
    shutil.rmtree(folder, ignore_errors=True)
    _tell(guard, "")
    guard.stdin.close()  # type: ignore[union-attr]
    guard.wait()


# --------------------------------------------------------------------------------------------------
# The runners
# --------------------------------------------------------------------------------------------------

class GraphDriver(Driver, GraphRunner):
    pass


class GraphFollower(Follower, GraphRunner):
    pass


def make_driver(base: type[Runner], path: Path, config: model.ModelConfig, options: Any, device: torch.device,
                *parts: Any) -> Runner:
    """Start the workers and make rank 0's runner. parts: the runner's other arguments"""
    if sys.platform == "win32":
        raise ValueError("tensor_parallel_size needs Linux or macOS")
    split_config(config, size := options.tensor_parallel_size)  # ValueError
    theirs = SimpleNamespace(**vars(options) | dict(
        dtype=str(pick_dtype(options.dtype, config.torch_dtype, device)), speculative_config=None, hf_token=None))
    _, _, fp8, num_more_rows = parts
    workers = Workers(size, dict(config=vars(config), path=path.resolve(), device=device.type, options=theirs,
                                 threads=torch.get_num_threads(), fp8=fp8, num_more_rows=num_more_rows))
    with workers.explained():
        workers.wait()  # until Python has started
        workers.joined.append(peers := join_peers(0, size, device, workers.folder))
        peers.waiting = workers.waiting
        peers.connect()
        driver = GraphDriver if base is GraphRunner else Driver
        return driver(config, options, device, *parts, peers=peers, workers=workers)


def make_follower(rank: int, size: int, folder: str, config: dict[str, Any], path: Path, device: str, options: Any,
                  threads: int, fp8: bool, num_more_rows: int) -> Follower:
    """A worker's runner."""
    own_device = torch.device(device)
    if device == "cuda":
        own_device = torch.device("cuda", rank)
        torch.cuda.set_device(own_device)
    else:
        torch.set_num_threads(max(1, threads // size))
    peers = join_peers(rank, size, own_device, folder)
    peers.connect()
    whole = model.ModelConfig(**config)
    base, kernels, modules = pick_runner(options, own_device)
    runner = (GraphFollower if base is GraphRunner else Follower)(
        whole, options, own_device, kernels, with_fp8(modules) if fp8 else modules, fp8, num_more_rows, peers=peers)
    load(runner, options, read(options, whole, path, runner))
    allocate_pool(runner, options.num_gpu_blocks_override or options.num_blocks, options.gpu_memory_utilization)
    swap(runner, options.swap_space)
    return runner


def main() -> None:
    """A worker: make a part of the model, and launch the steps that rank 0 launches."""
    messages: Any = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # what libraries print is no answer
    warnings.simplefilter("ignore")  # rank 0 warns

    def answer(error: Exception | None = None) -> None:
        words = dict(error=type(error).__name__, text=str(error)[:1000]) if error else {}
        answers.write(json.dumps(words).encode() + b"\n")

    try:
        given = pickle.load(messages)
        answer()
        runner = make_follower(**given)
        answer()
        while messages.peek(1):
            step = pickle.load(messages)
            try:
                runner.follow(step)
                answer()
            except torch.OutOfMemoryError as error:
                if not runner.peers.catch_up():
                    raise
                torch.cuda.empty_cache()
                answer(error)
        if runner.device.type == "cuda":
            torch.cuda.synchronize()  # rank 0's last steps need this rank
    except Exception as error:
        answer(error)
        os._exit(1)
    os._exit(0)  # at once: rank 0 may be gone


if __name__ == "__main__":
    main()
