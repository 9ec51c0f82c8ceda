"""The pool: K and V of all blocks on the device, and the host's pool of the blocks of preempted sequences (swapping).

The pool is one tensor [num_layers, 2 (K, V), num_blocks, block_size, num_kv_heads, head_dim]. A token takes 2 *
num_layers * num_kv_heads * head_dim numbers. In Llama-2-7B these are 2 * 32 * 32 * 128, in 16 bits 512 KiB, so 4,096
tokens take 2 GiB. In Llama-3.1-8B, where four query heads share a kv head, a token takes 128 KiB.

All layers of many blocks move at once. The host waits for no move: moves and steps run on the device in the order in
which they are launched.
"""
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from nanopaged.device import transfer
from nanopaged.scheduling.additions import SchedulerOutput
from nanopaged.weights.build import host_memory, memory_for

GIB = 2**30
MOST_BYTES_MOVED = 2**28  # of blocks at once: they pass through a copy


class Pool:
    """block_shape: of one layer's K, or V, of one block: (block_size, num_kv_heads, head_dim)"""
    blocks: Tensor  # the pool as bytes, for moving blocks of any type
    host: Tensor  # as bytes: [num_host_blocks, num_layers, 2, block_size, num_kv_heads, bytes of a head]

    def __init__(self, num_layers: int, block_shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device):
        self.num_layers, self.block_shape, self.dtype, self.device = num_layers, block_shape, dtype, device

    @property
    def block_bytes(self) -> int:
        """Of one block: K and V of block_size tokens in every layer."""
        return 2 * self.num_layers * math.prod(self.block_shape) * self.dtype.itemsize

    def allocate(self, num_blocks: int) -> Tensor:
        """Make the pool and return it. ValueError: too little memory."""
        pool = self._empty(num_blocks, self.num_layers, 2, num_blocks)
        self.blocks = pool.view(torch.uint8)
        return pool

    def one_block(self) -> Tensor:
        """One layer's K, or V, of a block of zeros, for steps that are tried before there is a pool."""
        return self._empty(1, 1).zero_()

    def _empty(self, num_blocks: int, *shape: int) -> Tensor:
        try:
            if self.device.type == "cpu" and num_blocks * self.block_bytes > host_memory():
                raise RuntimeError
            return torch.empty(*shape, *self.block_shape, dtype=self.dtype, device=self.device)
        except (RuntimeError, TypeError):  # torch.OutOfMemoryError is a RuntimeError; 10**20 blocks raise a TypeError
            raise ValueError(f"a pool of {num_blocks} blocks needs {num_blocks * self.block_bytes / GIB:.2f} GiB, "
                             f"which {self.device} does not have; lower num_blocks or block_size") from None

    def allocate_on_host(self, swap_space: float) -> int:
        """Memory on the host for the blocks of preempted sequences, swap_space GiB; its number of blocks. ValueError:
        too little memory."""
        num_blocks = int(swap_space * GIB) // self.block_bytes
        layers, kinds, _, *block = self.blocks.shape
        with memory_for(f"swap_space of {swap_space} GiB is more memory than the host has; lower swap_space",
                        num_blocks * self.block_bytes):
            self.host = torch.empty(num_blocks, layers, kinds, *block, dtype=torch.uint8,
                                    pin_memory=self.device.type == "cuda" and num_blocks > 0)
        return num_blocks

    def move(self, step: SchedulerOutput) -> None:
        """Moves to the host, then copies, then moves from the host: a block that a move or a copy has read may be the
        target of a later one."""
        for blocks, host_blocks in self._batches(step.swaps_out):
            gathered = self.blocks.index_select(2, self._send(blocks)).movedim(2, 0).contiguous()
            for i, host, count in consecutive(host_blocks):
                self.host[host:host + count].copy_(gathered[i:i + count], non_blocking=True)
        if step.copies:
            sources, copies = transfer.send(self.device, [list(blocks) for blocks in zip(*step.copies)])
            self.blocks.index_copy_(2, copies.long(), self.blocks.index_select(2, sources))
        for host_blocks, blocks in self._batches(step.swaps_in):
            gathered = torch.empty(len(blocks), *self.host.shape[1:], dtype=torch.uint8, device=self.device)
            for i, host, count in consecutive(host_blocks):
                gathered[i:i + count].copy_(self.host[host:host + count], non_blocking=True)
            self.blocks.index_copy_(2, self._send(blocks).long(), gathered.movedim(0, 2))

    def _batches(self, moves: list[tuple[int, int]]) -> Iterator[tuple[list[int], list[int]]]:
        """As many (source, target) as may move at once: sources, targets."""
        most = max(1, MOST_BYTES_MOVED // self.block_bytes)
        for start in range(0, len(moves), most):
            sources, targets = zip(*moves[start:start + most])
            yield list(sources), list(targets)

    def _send(self, blocks: list[int]) -> Tensor:
        return transfer.send(self.device, [blocks])[0]


def consecutive(numbers: list[int]) -> Iterator[tuple[int, int, int]]:
    """Stretches of consecutive numbers: (index, first number, count)."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield start, numbers[start], end - start
            start = end
