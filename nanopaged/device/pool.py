"""The pool: K and V of all blocks on the device.

The pool is one tensor [num_layers, 2 (K, V), num_blocks, block_size, num_kv_heads, head_dim]. A token takes 2 *
num_layers * num_kv_heads * head_dim numbers. In Llama-2-7B these are 2 * 32 * 32 * 128, in 16 bits 512 KiB, so 4,096
tokens take 2 GiB. In Llama-3.1-8B, where four query heads share a kv head, a token takes 128 KiB.
"""
import math

import torch
from torch import Tensor

from nanopaged import engine
from nanopaged.device import transfer
from nanopaged.weights.build import host_memory

GIB = 2**30
FP8 = torch.float8_e4m3fn  # of an fp8 cache


class Pool:
    """block_shape: of one layer's K, or V, of one block: (block_size, num_kv_heads, head_dim)"""
    blocks: Tensor  # the pool as bytes, for moving blocks of any type
    block_dim = 2  # of `blocks`

    def __init__(self, num_layers: int, block_shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device):
        self.num_layers, self.block_shape, self.dtype, self.device = num_layers, block_shape, dtype, device

    @property
    def block_bytes(self) -> int:
        """Of one block: K and V of block_size tokens in every layer."""
        return 2 * self.num_layers * math.prod(self.block_shape) * self.dtype.itemsize

    def num_blocks_in(self, memory: int) -> int:
        """Blocks that fit into so many bytes, beside what else the pool has."""
        return memory // self.block_bytes

    def allocate(self, num_blocks: int) -> Tensor:
        """Make the pool and return it. ValueError: too little memory."""
        pool = self._empty(num_blocks, self.num_layers, 2, num_blocks, *self.block_shape)
        self.blocks = pool.view(torch.uint8)
        return pool

    def shape_of(self, layer: int) -> tuple[int, int, int]:
        """The block_shape of this layer."""
        return self.block_shape

    def one_block(self, layer: int = 0) -> Tensor:
        """This layer's K, or V, of a block of zeros, for steps that are tried before there is a pool."""
        return torch.zeros(1, *self.shape_of(layer), dtype=self.dtype, device=self.device)

    def _empty(self, num_blocks: int, *shape: int) -> Tensor:
        try:
            if self.device.type == "cpu" and num_blocks * self.block_bytes > host_memory():
                raise RuntimeError
            return torch.empty(*shape, dtype=self.dtype, device=self.device)
        except (RuntimeError, TypeError):  # torch.OutOfMemoryError is a RuntimeError; 10**20 blocks raise a TypeError
            raise ValueError(f"a pool of {num_blocks} blocks needs {num_blocks * self.block_bytes / GIB:.2f} GiB, "
                             f"which {self.device} does not have; lower num_blocks or block_size") from None

    def move(self, step: engine.SchedulerOutput) -> None:
        """Make the copies that the step needs (copy-on-write), before its forward pass writes."""
        if step.copies:
            sources, copies = transfer.send(self.device, [list(blocks) for blocks in zip(*step.copies)])
            self.blocks.index_copy_(self.block_dim, copies.long(), self.blocks.index_select(self.block_dim, sources))
