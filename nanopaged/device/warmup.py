"""Compiling ahead, on a CUDA device: the first request should not wait for a compiler.

Triton's kernels are compiled in a thread (`compile_kernels`), while weights are loaded and torch's compiler is imported.
What fused.py has torch compile is compiled by steps whose attention does nothing (`finish`).
"""
from functools import partial
from typing import TYPE_CHECKING

import torch

from nanopaged import kernel
from nanopaged.device import memory
from nanopaged.device.garbage import no_garbage_collection

if TYPE_CHECKING:
    from nanopaged.device.runner import Runner

# In place of kernel.TRITON: attention that does nothing.
IDLE = kernel.Kernels(lambda qkv, num_heads, *_: qkv[:, :num_heads].contiguous(), lambda q, *_, **__: q)
# Numbers of sequences for which decode steps are recorded (graphs.py), padded by an eighth at most from 113 on.
DECODE_SIZES = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 1024, 64)]


def compile_kernels(runner: "Runner") -> None:
    """Call Triton's kernels in each of their forms, with nothing to do."""
    c, most = runner.config, min(runner.max_num_seqs, 1024)
    make, ints = partial(torch.zeros, device=runner.device), dict(dtype=torch.int32, device=runner.device)
    rows, cache = max(2, most), memory.one_block(runner)
    lens, starts, tiles = make(rows, **ints), make(rows + 1, **ints), torch.full((1, 2), -1, **ints)
    norm = make(c.head_dim, dtype=runner.dtype) if c.qk_norm else None
    q = kernel.TRITON.rotate_and_store(  # slots of -1: nothing is written
        make(rows, c.num_heads + 2 * c.num_kv_heads, c.head_dim, dtype=runner.dtype), c.num_heads,
        None if c.learned_positions else make(rows, c.head_dim), norm, norm, c.norm_eps, cache, cache, lens - 1)
    for window in set(c.sliding_windows or [0]):
        kernel.TRITON.attention(q[:2], cache, cache, runner.block_tables[:1], lens[:1], starts[:2], c.head_dim ** -0.5,
                                max_query_len=2, max_seq_len=2, sliding_window=window, num_decodes=0, query_tiles=tiles)
        for longest in (1, runner.max_model_len):
            for count in (count for count in {most, *DECODE_SIZES} if count <= most):
                kernel.TRITON.attention(q[:count], cache, cache, runner.block_tables[:count], lens[:count], starts[:count + 1],
                                        c.head_dim ** -0.5, max_query_len=1, max_seq_len=longest, sliding_window=window)


@no_garbage_collection()
@torch.inference_mode()
def finish(runner: "Runner") -> None:
    """Compile what torch compiles, if anything, and wait for Triton's thread."""
    if runner.fused:
        runner.kernels, runner.kv_cache = IDLE, [(None, None, 1.0, 1.0)] * runner.config.num_layers
        # The largest first: torch tries a few shapes for a kernel, and keeps the best at its first call. One row and few rows
        # have kernels of their own.
        for query_lens in (*memory.largest_steps(runner), [1, 1], [1]):
            if len(query_lens) <= runner.max_num_seqs:
                memory.peak_of(runner, query_lens)
        runner.kernels = kernel.TRITON
    runner.compiled.result()
