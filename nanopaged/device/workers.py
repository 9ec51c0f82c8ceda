"""The worker processes of an engine on several GPUs (parallel.py): rank 0's side, and what a worker runs.

    rank 0      send the step, launch it, wait for the answers | plan the next step ...
    worker      read the step, launch it, answer ------------->  wait for the next message

A message is a step's integers, an answer a line of JSON that says whether the step was launched. A worker ends when
rank 0 closes its pipe or dies. A thread of rank 0 looks after the workers. If one dies, or keeps rank 0 waiting for
too long, the thread kills all of them, so that whatever waits for them fails, and the engine ends with a sentence.
"""
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nanopaged import kernel
from nanopaged.device import parallel
from nanopaged.device.runner import Runner
from nanopaged.outputs import EngineDeadError
from nanopaged.weights.checkpoint import read_config, read_tensors
from nanopaged.weights.families import read_model_config

ROOT = Path(__file__).parents[2]  # where Python finds this package
START_SECONDS = 600  # that a worker may keep rank 0 waiting while the engine starts,
ANSWER_SECONDS = 60  # and afterwards
WATCH_SECONDS = 0.1
LAST_WORDS_SECONDS = 2  # for a worker that breaks a connection to say why


class Workers:
    """The processes of ranks 1 to size - 1, as rank 0 sees them."""

    def __init__(self, size: int, options: dict[str, Any]):
        self.folder = tempfile.mkdtemp(prefix="nanopaged-")
        self.processes: list[subprocess.Popen] = []
        self.lifelines: list[int] = []
        self.dead: Exception | None = None
        self.peers: parallel.Peers | None = None
        self.is_ready = self.is_waiting = False
        self.end = weakref.finalize(self, _stop, self.processes, self.lifelines, self.folder)
        for rank in range(1, size):
            read_end, write_end = os.pipe()
            self.lifelines.append(write_end)
            # A session of its own: Ctrl-C in the terminal reaches rank 0 only. What it prints goes to stderr.
            self.processes.append(subprocess.Popen(
                [sys.executable, "-m", "nanopaged.device.workers", str(read_end)], pass_fds=[read_end], cwd=ROOT,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True))
            os.close(read_end)
            self._write(rank, json.dumps(options | dict(rank=rank, size=size, folder=self.folder)).encode() + b"\n")
        threading.Thread(target=_watch, args=[weakref.ref(self)], daemon=True).start()

    def send(self, lists: list[list[int]]) -> None:
        message = pack(lists)
        for rank in range(1, len(self.processes) + 1):
            self._write(rank, message)

    def _write(self, rank: int, message: bytes) -> None:
        pipe: Any = self.processes[rank - 1].stdin
        view = memoryview(message)
        while view:
            view = view[pipe.write(view):]

    def wait(self) -> None:
        """Wait until every worker has launched the step. torch.OutOfMemoryError if one had too little memory."""
        with self.waiting():
            answers = [self._read(rank) for rank in range(1, len(self.processes) + 1)]
        for answer in answers:
            if answer.get("error") == "OutOfMemoryError":
                raise torch.OutOfMemoryError(answer["text"])

    def wait_until_ready(self) -> None:
        self.wait()
        self.is_ready = True
        shutil.rmtree(self.folder, ignore_errors=True)  # all have opened its files

    def _read(self, rank: int) -> dict[str, Any]:
        pipe: Any = self.processes[rank - 1].stdout
        line = b""
        while not line.endswith(b"\n"):
            if not (more := pipe.readline()):
                break
            line += more
        answer = json.loads(line or "{}")
        if not line or answer and answer["error"] != "OutOfMemoryError":
            self.fail(self._last_words(rank, answer))
            self.check()
        return answer

    def _last_words(self, rank: int, answer: dict[str, Any]) -> Exception:
        if answer.get("error") == "ValueError":
            return ValueError(answer["text"])
        process = self.processes[rank - 1]
        if answer:
            return EngineDeadError(f"worker {rank} of {len(self.processes) + 1} GPUs failed ({answer['error']}: {answer['text']}); make a new LLM")
        try:
            code = process.wait(LAST_WORDS_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        reason = f"was ended by signal {-code}" if code and code < 0 else f"ended with exit code {code}"
        return EngineDeadError(f"worker {rank} (process {process.pid}) {reason}; make a new LLM")

    # ---- when one is dead

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Rank 0 has nothing to do but to wait for the workers."""
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False

    @contextmanager
    def named(self) -> Iterator[None]:
        """Make of an error that a dead worker causes a sentence that names the worker."""
        self.check()
        try:
            yield
        except Exception as error:
            if not isinstance(error, (torch.OutOfMemoryError, ValueError)):
                self._find_dead()
            self.check()
            raise

    def _find_dead(self) -> None:
        """After an error of a connection: give the worker at its other end time to end."""
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while self.dead is None and time.monotonic() < deadline:
            for rank, process in enumerate(self.processes, 1):
                if process.poll() is not None:
                    self._read(rank)
            time.sleep(0.01)

    def check(self) -> None:
        """Raise the error that has ended the engine."""
        if self.dead is not None:
            raise self.dead.with_traceback(None)

    def fail(self, error: Exception) -> None:
        self.dead = self.dead or error
        for process in self.processes:
            process.kill()


def _watch(ref: "weakref.ref[Workers]") -> None:
    """Look after the workers, as long as the engine exists."""
    num_looks = 0  # while rank 0 waited. Looks are counted, not seconds: rank 0 may be stopped (Ctrl-Z)
    while (workers := ref()) is not None and workers.end.alive:
        num_looks = num_looks + 1 if workers.is_waiting else 0
        limit = ANSWER_SECONDS if workers.is_ready else START_SECONDS
        if workers.dead is None:
            for rank, process in enumerate(workers.processes, 1):
                if process.poll() is not None:
                    workers.fail(workers._last_words(rank, {}))
            if num_looks * WATCH_SECONDS > limit:
                hung = ", ".join(f"{rank} (process {one.pid})" for rank, one in enumerate(workers.processes, 1))
                workers.fail(EngineDeadError(f"worker {hung} has not answered for {limit} seconds; make a new LLM"))
        elif workers.peers is not None:
            workers.peers.release()
        is_dead = workers.dead is not None
        del workers
        time.sleep(0.001 if is_dead else WATCH_SECONDS)


def _stop(processes: list[subprocess.Popen], lifelines: list[int], folder: str) -> None:
    """Let the workers finish the steps that were sent, and end."""
    for process in processes:
        process.stdin.close()  # type: ignore[union-attr]
    for process in processes:
        try:
            process.wait(LAST_WORDS_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    for lifeline in lifelines:
        os.close(lifeline)
    shutil.rmtree(folder, ignore_errors=True)


def pack(lists: list[list[int]]) -> bytes:
    """Lists of integers as bytes: the number of integers that follow, the lists' lengths and a -1, then the lists."""
    numbers = array("i", [*map(len, lists), -1])
    for part in lists:
        numbers.extend(part)
    return array("i", [len(numbers)]).tobytes() + numbers.tobytes()


def unpack(message: bytes) -> list[list[int]]:
    numbers = array("i", message).tolist()
    start = numbers.index(-1) + 1
    lists = []
    for length in numbers[:start - 1]:
        lists.append(numbers[start:start + length])
        start += length
    return lists


def rank_class(role: type[parallel.ParallelRunner], base: type[Runner]) -> Any:
    """The runner of a rank: `base` with its additions."""
    return type(f"{role.__name__}{base.__name__}", (role, base), {})


def make_driver(base: type[Runner], config: Any, tensors: Any, size: int, path: Path, is_dummy: bool,
                pool: list, swap_space: float, *, device: torch.device, kernels: kernel.Kernels, **options: Any) -> Runner:
    """Start the workers, and make rank 0's runner. pool: the arguments of allocate_pool."""
    parallel.split_config(config, size)
    names = {kernel.TRITON: "triton", kernel.TORCH: "torch"}
    workers = Workers(size, dict(path=str(path.resolve()), is_dummy=is_dummy, device=device.type, base=base.__name__, pool=pool,
                                 swap_space=swap_space, kernels=names[kernels], threads=torch.get_num_threads() // size,
                                 options=options))
    with workers.named():
        workers.peers = parallel.join_peers(0, size, device, workers.folder)
        return rank_class(parallel.Driver, base)(config, tensors, peers=workers.peers, workers=workers, device=device,
                                                 kernels=kernels, **options)


def make_follower(given: dict[str, Any]) -> parallel.Follower:
    rank, path = given["rank"], Path(given["path"])
    base, device = Runner, torch.device(given["device"], rank if given["device"] == "cuda" else None)
    if given["base"] != "Runner":
        from nanopaged.device.graphs import GraphRunner as base
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, given["threads"]))
    peers = parallel.join_peers(rank, given["size"], device, given["folder"])
    kernels = kernel.TRITON if given["kernels"] == "triton" else kernel.TORCH
    tensors = None if given["is_dummy"] else read_tensors(path)
    runner = rank_class(parallel.Follower, base)(read_model_config(read_config(path)), tensors, peers=peers, device=device,
                                                 kernels=kernels, **given["options"])
    runner.allocate_pool(*given["pool"])
    runner.allocate_host_pool(given["swap_space"])
    return runner


def main() -> None:
    """A worker: make a part of the model, and launch the steps that rank 0 launches."""
    messages, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # what libraries print is no answer
    lifeline = int(sys.argv[1])  # the kernel sends SIGIO, which ends this process, when rank 0 is gone
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    try:
        runner = make_follower(json.loads(messages.readline()))
        answers.write(b"{}\n")
        while header := messages.read(4):
            message = messages.read(4 * array("i", header)[0])
            try:
                runner.follow(unpack(message))
                answers.write(b"{}\n")
            except torch.OutOfMemoryError as error:
                runner.release_memory()
                answers.write(_describe(error))
        if runner.device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        answers.write(_describe(error))
        os._exit(1)
    os._exit(0)  # without a word to the other ranks, which may be gone


def _describe(error: Exception) -> bytes:
    return json.dumps(dict(error=type(error).__name__, text=str(error)[:1000])).encode() + b"\n"


if __name__ == "__main__":
    main()
