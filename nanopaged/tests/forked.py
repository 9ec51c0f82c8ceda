"""Workers that are forked from one process, which has imported torch once: starting Python for each takes two seconds.

`ForkedWorker` stands in for subprocess.Popen in tensor_parallel/workers.py. What is left behind when rank 0 ends is
tested with real processes.
"""
import os
import signal
import subprocess
import threading
from contextlib import nullcontext
from unittest.mock import Mock

import torch

import kernel
from nanopaged.api import assemble
from nanopaged.device import trial
from nanopaged.features.tensor_parallel import parallel, workers
from nanopaged.tests.helpers import if_there
from nanopaged.tests.pretended import fp8, plain_kernels
from nanopaged.tests.programs import CONTEXT

FAULT = ""  # the function below that workers call which start from now on


def run_out_of_memory():
    """In the middle of a forward pass."""
    parallel.RowParallel.forward = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))


def refuse_steps():
    parallel.Follower.follow = Mock(side_effect=KeyError("oops"))


def be_killed():
    parallel.Follower.follow = lambda self, lists: os.kill(os.getpid(), signal.SIGKILL)


def have_fewer_blocks():
    trial.choose_num_blocks = lambda runner, share: 17


def pretended():
    """Graphs and the small kernels on a CPU: (object, name, what to put there)."""
    from nanopaged.features import fused, graphs
    from nanopaged.tests.pretended import PretendedGraph, pretend_to_record
    grammar = if_there("grammar")
    recorded = [graphs.GraphRunner, grammar.Masks] if grammar else [graphs.GraphRunner]
    return [*((kind, "_static_step", pretend_to_record(kind._static_step)) for kind in recorded),
            *plain_kernels(), (torch.cuda, "CUDAGraph", PretendedGraph), (torch.cuda, "stream", nullcontext),
            (graphs, "TOKEN_SIZES", [4, 16, 32]), (graphs, "DECODE_SIZES", [1, 2, 4]), (fused, "MAX_SPLIT_ROWS", 8),
            (fused, "SPLIT_ALIGNMENT", 8), (parallel, "LOGITS_ROWS", 2),
            (assemble, "pick_runner", lambda *_: (graphs.GraphRunner, kernel.TORCH, fused.MODULES))]


def pretend_graphs():
    for patch in pretended():
        setattr(*patch)


def pretend_kernels():
    for patch in [*plain_kernels(), (fp8, "has_fp8_products", lambda device: True)]:
        setattr(*patch)


def on_one_gpu():
    """Two ranks on one GPU, which computes for their processes in turns: (object, name, what to put there)."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return [*((where, "pick_devices", lambda *_: [torch.device("cuda", 0)] * 2) for where in (assemble, workers)),
            (torch.cuda, "can_device_access_peer", lambda *_: True)]


def share_gpu():
    for patch in on_one_gpu():
        setattr(*patch)


def worker_on_this_gpu(command, **options):
    """subprocess.Popen, whose worker computes on the GPU of rank 0."""
    if command[0] != "sh":
        command[-1] = f"from {__name__} import share_gpu; share_gpu(); {command[-1]}"
    return subprocess.Popen(command, **options)


class ForkedWorker:
    """The part of subprocess.Popen that workers.py uses, and the guard as it is."""

    def __new__(cls, command, **options):
        return subprocess.Popen(command, **options) if command[0] == "sh" else super().__new__(cls)

    def __init__(self, command, stdin, process_group, **_):
        rank = int(command[-1].rpartition("(")[2][:-1])
        self.process = CONTEXT.Process(target=work, args=[stdin, process_group, rank, FAULT], daemon=True)
        self.process.start()
        self.pid, self.kill, self.lock = self.process.pid, self.process.kill, threading.Lock()

    def poll(self):
        with self.lock:  # a process ends for one of several threads that look at once
            self.returncode = self.process.exitcode
        return self.returncode

    def wait(self, timeout=10):
        with self.lock:
            self.process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("worker", timeout)
        return self.returncode


def work(link, process_group, rank, fault):
    """The process of a worker, with its end of a socket as stdin."""
    os.setpgid(0, process_group)
    os.dup2(link.detach(), 0)
    if fault:
        globals()[fault]()
    workers.main(rank)
