"""Swapping: the blocks of preempted sequences move to a pool on the host, and back to the device.

All layers of many blocks move at once. The host waits for no move: moves and steps run on the device in the order in
which they are launched.
"""
from typing import TYPE_CHECKING, Iterator

import torch
from torch import Tensor

from nanopaged.device.choices import GIB

if TYPE_CHECKING:
    from nanopaged.device.runner import Runner

MOST_BYTES_MOVED = 2**28  # of blocks at once: they are gathered in between


def allocate_on_host(runner: "Runner", swap_space: float) -> Tensor:
    """The host pool, block by block, as bytes: [num_host_blocks, num_layers, 2, block_size, num_kv_heads, bytes of a
    head]. ValueError: too little memory."""
    num_blocks = int(swap_space * GIB) // runner.block_bytes
    layers, kinds, _, *block = runner.pool.shape
    try:
        return torch.empty(num_blocks, layers, kinds, *block, dtype=torch.uint8,
                           pin_memory=runner.device.type == "cuda" and num_blocks > 0)
    except RuntimeError:
        raise ValueError(f"swap_space of {swap_space} GiB is more memory than the host has; lower swap_space") from None


def move_out(runner: "Runner", moves: list[tuple[int, int]]) -> None:
    """Copy blocks to the host, each (block, host block)."""
    most = max(1, MOST_BYTES_MOVED // runner.block_bytes)
    for start in range(0, len(moves), most):
        blocks, host_blocks = map(list, zip(*moves[start:start + most]))
        gathered = runner.pool.index_select(2, runner.send([blocks])[0]).movedim(2, 0).contiguous()
        for i, host, count in consecutive(host_blocks):
            runner.host_pool[host:host + count].copy_(gathered[i:i + count], non_blocking=True)


def move_in(runner: "Runner", moves: list[tuple[int, int]]) -> None:
    """Copy blocks from the host, each (host block, block)."""
    most = max(1, MOST_BYTES_MOVED // runner.block_bytes)
    for start in range(0, len(moves), most):
        host_blocks, blocks = map(list, zip(*moves[start:start + most]))
        gathered = torch.empty(len(blocks), *runner.host_pool.shape[1:], dtype=torch.uint8, device=runner.device)
        for i, host, count in consecutive(host_blocks):
            gathered[i:i + count].copy_(runner.host_pool[host:host + count], non_blocking=True)
        runner.pool.index_copy_(2, runner.send([blocks])[0].long(), gathered.movedim(0, 2))


def consecutive(numbers: list[int]) -> Iterator[tuple[int, int, int]]:
    """Stretches of consecutive numbers: (index, first number, count)."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield start, numbers[start], end - start
            start = end
