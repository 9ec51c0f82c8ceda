"""Buffers that all ranks of a model on several GPUs can read (parallel.py says what for).

Where the GPUs read each other's memory, this is torch's symmetric memory: a rank writes its own buffer, joins a barrier
of 3 microseconds, and reads the buffers of all ranks where they are. Elsewhere a collective copies the buffers of all
ranks to each: NCCL's, or on CPUs a message through the workers' sockets.
"""
import ctypes
import itertools
import math
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

Exchange = Callable[[Any], list]  # gives each rank the values that all ranks have given (workers.py)


class Peers:
    """The ranks of an engine, on CPUs."""
    can_record = True  # what joins them, in CUDA graphs

    def __init__(self, rank: int, size: int, device: torch.device, exchange: Exchange):
        self.rank, self.size, self.device, self.exchange = rank, size, device, exchange
        self.connect()

    def connect(self) -> None:
        """connect: before the first buffer. release: a peer has died, let end what waits for it on this device. drain:
        let end everything there, whose memory is to be freed. (On CPUs messages end with their sockets.)"""

    release = drain = connect

    def allocate(self, count: int, dtype: torch.dtype) -> list[Tensor]:
        """A buffer for each rank. In place of those that cannot be read stands this rank's."""
        return [torch.empty(count, dtype=dtype, device=self.device)] * self.size

    def gather(self, buffers: list[Tensor], count: int) -> list[Tensor]:
        """The first `count` numbers of all ranks' buffers."""
        own, parts = buffers[0][:count], buffers[0].new_empty(self.size, count)
        self.collect(own, parts)
        return list(parts)

    def collect(self, own: Tensor, parts: Tensor) -> None:
        """Copy `own` of each rank into `parts` of all."""
        sent = b"".join(self.exchange(ctypes.string_at(own.data_ptr(), own.nbytes)))
        ctypes.memmove(parts.data_ptr(), sent, len(sent))


class ExchangeStore(dist.Store):
    """Where torch's symmetric memory tells the ranks of each other: each sets a key that ends with its rank, and gets
    those of all. (torch counts the keys in each process. A second engine's rank 0 is ahead of its new workers.)"""
    exchange: Exchange

    def set(self, key: str, value: Any) -> None:
        self.values = self.exchange(value)

    def get(self, key: str) -> bytes:
        return self.values[int(key.rpartition("/")[2])]

    def add(self, key: str, amount: int) -> int:
        return sum(self.exchange(amount))

    def wait(self, *_: Any) -> None:
        """`set` has waited for all."""


class GpuPeers(Peers):
    """GPUs that read each other's memory."""

    def connect(self) -> None:
        # Symmetric memory finds its group by a name, and the name stands in a backend, which has nothing else to do.
        # (A group of torch's public functions would be a part of the program's default group.)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        self.name, store = f"nanopaged-{time.monotonic_ns()}", ExchangeStore()
        store.exchange = self.exchange
        group: Any = dist.ProcessGroup(store, self.rank, self.size)
        group._register_backend(torch.device("cpu"), group.BackendType.GLOO, gloo(dist.HashStore(), 0, 1, options))
        group._set_group_name(self.name)
        _register_process_group(self.name, group)
        _SymmetricMemory.set_group_info(self.name, self.rank, self.size, store)  # later versions ask the group
        self.kept = group, store  # torch keeps neither
        self.handles: list[Any] = []
        self.side_stream = torch.cuda.Stream(self.device)
        self.signals = torch.tensor([[0] * self.size, [1] * self.size], dtype=torch.int32, device=self.device)

    def allocate(self, count: int, dtype: torch.dtype) -> list[Tensor]:
        own = _SymmetricMemory.empty_strided_p2p((count,), (1,), dtype, self.device)
        self.handles.append(handle := _SymmetricMemory.rendezvous(own, self.name))
        return [own if rank == self.rank else handle.get_buffer(rank, (count,), dtype) for rank in range(self.size)]

    def gather(self, buffers: list[Tensor], count: int) -> list[Tensor]:
        self.handles[0].barrier(channel=0)
        return [buffer[:count] for buffer in buffers]

    def release(self) -> None:
        """A 1 at place s of rank r's pad: s has joined the barrier, and r has not seen this. A rank waits for 0 at its
        place on each peer's pad, writes 1 there, waits for 1 on its own pad, and writes 0 there. Do the peers' part: 0
        on their pads, 1 on ours, as copies, because no new kernel can be loaded while the barrier's waits."""
        with torch.cuda.stream(self.side_stream):
            for rank in range(self.size if self.handles else 0):
                pad = self.handles[0].get_signal_pad(rank, (self.size,), torch.int32)
                pad.copy_(self.signals[int(rank == self.rank)], non_blocking=True)

    def drain(self) -> None:
        while not torch.cuda.current_stream(self.device).query():
            self.release()


class NcclPeers(Peers):
    """GPUs that cannot read each other's memory."""
    can_record = False  # NCCL would not end before the graphs

    def connect(self) -> None:
        # Else a thread of torch reads the store every second, also when rank 0 is gone, and ends too late.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(days=365)  # rank 0 looks after the workers, and may be stopped (Ctrl-Z)
        self.group = nccl(self._make_store(), self.rank, self.size, options)
        self.gather([torch.zeros(1, device=self.device)], 1)  # NCCL connects when it is first used
        self.exchange(None)

    def _make_store(self) -> dist.Store:
        """Where NCCL's ranks find each other: in rank 0's memory, behind a port that only this machine reaches. (A
        FileStore opens its path once more when it is freed, and an error there ends the process.)"""
        listener = socket.create_server(("127.0.0.1", 0)) if self.rank == 0 else None
        port = self.exchange(listener and listener.getsockname()[1])[0]
        return dist.TCPStore("127.0.0.1", port, is_master=self.rank == 0, wait_for_workers=False,
                             master_listen_fd=listener and listener.detach())

    def collect(self, own: Tensor, parts: Tensor) -> None:
        self.group._allgather_base(parts, own).wait()

    def release(self) -> None:
        group, self.group = self.group, None
        if group:
            group.abort()

    drain = release


def join_peers(rank: int, size: int, device: torch.device, exchange: Exchange) -> Peers:
    if device.type == "cpu":
        return Peers(rank, size, device, exchange)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # not every machine that offers it can do it
    can_read = all(itertools.starmap(torch.cuda.can_device_access_peer, itertools.permutations(range(size), 2)))
    return (GpuPeers if can_read else NcclPeers)(rank, size, device, exchange)


class SharedBuffer:
    """A buffer of `count` numbers on each rank, to use in any shape."""

    def __init__(self, peers: Peers, count: int, dtype: torch.dtype):
        self.peers, self.buffers = peers, peers.allocate(count, dtype)

    def own(self, *shape: int) -> Tensor:  # to write
        return self.buffers[self.peers.rank][:math.prod(shape)].view(shape)

    def all(self, *shape: int) -> list[Tensor]:
        """The buffers of all ranks, to read. Each rank calls this when it has launched the writing of its own."""
        return [part.view(shape) for part in self.peers.gather(self.buffers, math.prod(shape))]

    def sum(self, *shape: int) -> Tensor:
        return reduce(torch.add, self.all(*shape))  # in the order of ranks: all have the same bits
