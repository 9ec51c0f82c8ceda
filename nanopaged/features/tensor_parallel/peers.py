"""Buffers that all ranks of a model on several GPUs can read (parallel.py says what for).

A rank writes its own buffer, joins a barrier, and then reads the buffers of all ranks where they are:

    GpuPeers     GPUs that read each other's memory over NVLink: torch's symmetric memory, a barrier of 3 microseconds
    NcclPeers    GPUs that cannot: NCCL copies the buffers
    Peers        CPUs: files that all ranks map, and gloo's barrier
"""
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import reduce
from typing import Any, ContextManager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

START_SECONDS = 600  # for all ranks to find each other, and for a worker to load its weights (workers.py)
FOREVER = timedelta(days=365)  # a barrier waits that long: rank 0 looks after the workers, and may be stopped (Ctrl-Z)
DRAIN_SECONDS = 10
ALIGNMENT = 64  # numbers, of a buffer's size


class Peers:
    """The ranks of an engine. barriers_left: how many this rank still has to join in this step; None: unknown."""
    waiting: Callable[[], ContextManager] = nullcontext  # while this process waits for others: rank 0 notes it

    def __init__(self, rank: int, size: int, device: torch.device, folder: str):
        self.rank, self.size, self.device, self.folder = rank, size, device, folder
        self.barriers_left: int | None = 0
        self.num_buffers = 0
        self.store = dist.FileStore(f"{folder}/store", size)
        backend: Any = dist.ProcessGroupGloo  # by itself: the program may have a default process group of its own
        options = backend._Options()
        options._timeout = timedelta(seconds=START_SECONDS)
        options._devices = [backend.create_device(hostname="127.0.0.1")]
        self.gloo = backend(dist.PrefixStore("gloo", self.store), rank, size, options)

    def connect(self) -> None:
        """Once on each rank, before anything else."""

    def share(self, size: int, dtype: torch.dtype) -> "SharedBuffer":
        """A buffer of `size` numbers on each rank."""
        self.num_buffers += 1
        return SharedBuffer(self, self._map(-(-size // ALIGNMENT) * ALIGNMENT, dtype))

    def _map(self, size: int, dtype: torch.dtype) -> list[Tensor]:
        self.barrier()  # after the store's folder is there for all
        name = f"{self.folder}/{self.num_buffers}"
        self._reserve(f"{name}.{self.rank}", size * dtype.itemsize)
        own = torch.from_file(f"{name}.{self.rank}", shared=True, size=size, dtype=dtype)
        self.barrier()
        return [own if rank == self.rank else torch.from_file(f"{name}.{rank}", shared=True, size=size, dtype=dtype)
                for rank in range(self.size)]

    @staticmethod
    def _reserve(path: str, num_bytes: int) -> None:
        """Make the file in its full size: a write into a mapped file on a full disk would kill the process (SIGBUS)."""
        try:
            with open(path, "wb") as file:
                if hasattr(os, "posix_fallocate"):  # not on macOS
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            raise ValueError(f"the buffers of tensor_parallel_size need {num_bytes:,} bytes in {os.path.dirname(path)} "
                             f"({error.strerror}); set TMPDIR to a folder with more room") from None

    def barrier(self) -> None:
        options: Any = dist.BarrierOptions()
        options.timeout = FOREVER
        with self.waiting():
            self.gloo.barrier(options).wait()

    def gather(self, parts: list[Tensor], count: int) -> list[Tensor]:
        """The first `count` numbers of all ranks' buffers. All ranks have launched the writing of theirs."""
        if self.barriers_left is not None:
            self.barriers_left -= 1
        self.barrier()
        return [part[:count] for part in parts]

    def catch_up(self) -> bool:
        """This rank's step has failed: join its other barriers, so that the other ranks can finish the step. Returns
        False if their number is not known."""
        left, self.barriers_left = self.barriers_left, None
        for _ in range(left or 0):
            self.barrier()
        return left is not None

    def agree(self, numbers: Sequence[float], largest: bool) -> list[float]:
        """The largest, or smallest, of all ranks' numbers, one by one."""
        tensor, options = torch.tensor(numbers, dtype=torch.float64), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN  # type: ignore[assignment]
        options.timeout = FOREVER
        self.gloo.allreduce([tensor], options).wait()
        return tensor.tolist()

    def note_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        """A graph was recorded that joins barriers."""

    def release(self) -> None:
        """A peer has died: let barriers under way end. gloo's end by themselves."""

    def drain(self) -> None:
        """Let everything under way end."""


class ExchangeStore(dist.Store):
    """Where symmetric memory leaves what the other ranks of a group need, by keys such as "CUDASymmetricMemory/17/0":
    the 18th exchange, of rank 0. torch counts over all groups of a process. An earlier engine would put rank 0's count
    ahead of its new workers', and no rank would find another's key. So here each group counts its own."""

    def __init__(self, store: dist.Store):
        super().__init__()
        self.store, self.numbers, self.is_closed = store, dict[str, int](), False

    def _key(self, key: str) -> str:
        name, _, rank = key.rpartition("/")
        return f"symmetric/{self.numbers.setdefault(name, len(self.numbers))}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self.store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.store.get(self._key(key))

    def add(self, key: str, amount: int) -> int:
        return self.store.add(self._key(key), amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        while not self.store.check([self._key(key) for key in keys]):
            if self.is_closed:
                raise RuntimeError("a peer has died")
            time.sleep(0.001)


class GpuPeers(Peers):
    """GPUs that read each other's memory."""

    def __init__(self, rank: int, size: int, device: torch.device, folder: str):
        super().__init__(rank, size, device, folder)
        self.exchanges = ExchangeStore(self.store)
        # Symmetric memory knows its group by a name, which no other engine of this process may have.
        group: Any = dist.ProcessGroup(self.exchanges, rank, size)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.gloo)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._set_group_name(folder)
        group._set_group_desc("nanopaged")
        register: Any = _register_process_group
        register(folder, group)
        self.group = group  # the registry does not keep it
        weakref.finalize(self, _unregister_process_group, folder)  # type: ignore[arg-type]
        _SymmetricMemory.set_group_info(folder, rank, size, self.exchanges)
        self.handles: list[Any] = []
        self.side_stream = torch.cuda.Stream(device)
        self.signals = torch.arange(2, dtype=torch.int32, device=device)

    def _map(self, size: int, dtype: torch.dtype) -> list[Tensor]:
        own = _SymmetricMemory.empty_strided_p2p((size,), (1,), dtype, self.device)
        with self.waiting():
            self.handles.append(handle := _SymmetricMemory.rendezvous(own, self.folder))
        return [own if rank == self.rank else handle.get_buffer(rank, (size,), dtype) for rank in range(self.size)]

    def barrier(self) -> None:
        self.handles[0].barrier(channel=0)

    def release(self) -> None:
        """In a barrier a rank writes 1 at its place on each peer's pad, and the peer, having seen this, writes 0 there.
        For each peer, do the peer's part: reset our 1 on its pad, and set its 1 on ours. Both are copies, because a new
        kernel could not be loaded while the barrier's kernel waits."""
        self.exchanges.is_closed = True
        if self.handles:
            with torch.cuda.stream(self.side_stream):
                for peer in (peer for peer in range(self.size) if peer != self.rank):
                    for pad, place, signal in ((peer, self.rank, 0), (self.rank, peer, 1)):
                        pad_tensor = self.handles[0].get_signal_pad(pad, (self.size,), torch.int32)
                        pad_tensor[place:place + 1].copy_(self.signals[signal:signal + 1], non_blocking=True)

    def drain(self) -> None:
        deadline = time.monotonic() + DRAIN_SECONDS
        while not torch.cuda.current_stream(self.device).query() and time.monotonic() < deadline:
            self.release()


class NcclPeers(Peers):
    """GPUs that cannot read each other's memory."""

    def __init__(self, rank: int, size: int, device: torch.device, folder: str):
        super().__init__(rank, size, device, folder)
        # The store's file is removed when all ranks are ready. A thread of torch would look there every second whether
        # a rank asks for a dump. It would wait for the file, and the group could not end before the thread.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        backend: Any = dist.ProcessGroupNCCL
        options = backend.Options()
        options._timeout = FOREVER
        self.nccl = backend(dist.PrefixStore("nccl", self.store), rank, size, options)
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.aborting: threading.Thread | None = None

    def connect(self) -> None:
        self.barrier()  # gloo's, which ends if a peer dies
        self.gather([torch.zeros(1, device=self.device)], 1)  # NCCL connects when it is first used, by the store's file

    def _map(self, size: int, dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty(size, dtype=dtype, device=self.device)] * self.size

    def gather(self, parts: list[Tensor], count: int) -> list[Tensor]:
        gathered = parts[0].new_empty(self.size * count)
        self.nccl._allgather_base(gathered, parts[0][:count]).wait()
        return list(gathered.chunk(self.size))

    def catch_up(self) -> bool:
        return False  # the others wait for numbers, not for a barrier

    def note_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graphs.append(graph)

    def release(self) -> None:
        """`abort` ends what is under way, and returns when no recorded graph uses NCCL any more: not in this call."""
        if self.aborting is None:
            self.aborting = threading.Thread(target=self.nccl.abort, daemon=True)
            self.aborting.start()

    def drain(self) -> None:
        """End NCCL in any case: it would end with this object, and wait for graphs that may live longer."""
        self.release()
        for graph in self.graphs:
            graph.reset()
        self.graphs.clear()
        self.aborting.join(DRAIN_SECONDS)  # type: ignore[union-attr]


def join_peers(rank: int, size: int, device: torch.device, folder: str) -> Peers:
    if device.type == "cpu":
        return Peers(rank, size, device, folder)
    # Not every machine that offers multicast can do it. Both libraries read their setting when they first need it.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    can_read = all(torch.cuda.can_device_access_peer(a, b) for a in range(size) for b in range(size) if a != b)
    return (GpuPeers if can_read else NcclPeers)(rank, size, device, folder)


class SharedBuffer:
    """A buffer on each rank, in any shape. parts: one after the other, in the order of ranks."""

    def __init__(self, peers: Peers, parts: list[Tensor]):
        self.peers, self.parts = peers, parts

    def own(self, *shape: int) -> Tensor:
        """This rank's buffer, to write."""
        return self.parts[self.peers.rank][:math.prod(shape)].view(shape)

    def all(self, *shape: int) -> list[Tensor]:
        """All ranks' buffers, to read, after a barrier."""
        return [part.view(shape) for part in self.peers.gather(self.parts, math.prod(shape))]

    def sum(self, *shape: int) -> Tensor:
        return reduce(torch.add, self.all(*shape))  # in the order of ranks: all have the same bits
