"""Workers that are forked from one process, which has imported torch once: starting Python for each takes two seconds.

`ForkedWorker` stands in for subprocess.Popen in nanopaged/device/workers.py. What ends a worker, and what it leaves
behind, is tested with real processes.
"""
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import torch

from nanopaged.device import fused, graphs, parallel, trial, workers
from nanopaged.tests.helpers import blank_input, plain_kernels

FAULT = ""  # what workers that start from now on do wrong, see `FAULTS`


def run_out_of_memory(rows=20):
    """In the middle of a forward pass of more rows."""
    forward = parallel.RowParallelLinear.forward

    def small_card(self, x):
        if len(x) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, x)

    parallel.RowParallelLinear.forward = small_card


def refuse_steps():
    def follow(self, lists):
        raise KeyError("oops")
    parallel.Follower.follow = follow


def have_fewer_blocks():
    trial.choose_num_blocks = lambda runner, share: 17


def lack_memory():
    def choose(runner, share):
        raise ValueError("no memory is left for the KV pool")
    trial.choose_num_blocks = choose


class PretendedGraph:
    """A stand-in for a CUDA graph on a CPU: it computes the step again."""
    recording = None

    def pool(self):
        pass

    def capture_begin(self, *_, **__):
        PretendedGraph.recording = self

    def capture_end(self):
        PretendedGraph.recording = None

    def replay(self):
        for old, new in zip(self.outputs, self.step()):
            old.copy_(new)


def pretended():
    """Graphs and the small kernels on a CPU: (object, name, what to put there)."""
    def recorded(name):
        method = getattr(graphs.GraphRunner, name)

        def record(self, shape):
            if isinstance(shape, graphs.Shape) and PretendedGraph.recording:
                blank_input(self, shape)
            outputs = method(self, shape)
            if graph := PretendedGraph.recording:
                graph.step, graph.outputs = lambda: method(self, shape), outputs
            return outputs
        return record

    return [*((graphs.GraphRunner, name, recorded(name)) for name in ("_static_step", "_masked_step")),
            *plain_kernels(), (torch.cuda, "CUDAGraph", PretendedGraph), (torch.cuda, "stream", nullcontext),
            (graphs, "TOKEN_SIZES", [4, 16, 32]), (graphs, "DECODE_SIZES", [1, 2, 4]), (fused, "MAX_SPLIT_ROWS", 8),
            (fused, "SPLIT_ALIGNMENT", 8), (parallel, "LOGITS_ROWS", 2)]


def pretend_graphs():
    for owner, name, value in pretended():
        setattr(owner, name, value)


def pretend_kernels():
    for owner, name, value in plain_kernels():
        setattr(owner, name, value)


FAULTS = {f.__name__: f for f in (run_out_of_memory, refuse_steps, have_fewer_blocks, lack_memory, pretend_graphs,
                                  pretend_kernels)}


class ForkedWorker:
    """The part of subprocess.Popen that workers.py uses."""

    def __init__(self, args, **options):
        (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
        socket.send_fds(server(), [FAULT.encode().ljust(32)], [to_read, from_write])
        self.pid = int(server().recv(16))
        self.stdin, self.stdout, self.returncode = open(to_write, "wb"), open(from_read, "rb"), None
        os.close(to_read), os.close(from_write)

    def poll(self):
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            self.returncode = 0
        return self.returncode

    def wait(self, timeout=10):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.002)
        return self.returncode

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@cache
def server():
    """A connection to the process that forks. It ends when this process does."""
    ours, theirs = socket.socketpair()
    environment = os.environ | dict(PYTHONPATH=str(Path(__file__).parents[2]), OMP_NUM_THREADS="1")
    subprocess.Popen([sys.executable, "-m", "nanopaged.tests.forked", str(theirs.fileno())],
                     pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    return ours


def serve(connection):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        fault, fds, _, _ = socket.recv_fds(connection, 32, 2)
        if not fault:
            return
        if pid := os.fork():
            connection.send(str(pid).encode())
            for fd in fds:
                os.close(fd)
            continue
        connection.close()
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(fds[0], 0), os.dup2(fds[1], 1), os.close(fds[0]), os.close(fds[1])
        if name := fault.decode().strip():
            FAULTS[name]()
        workers.main()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
