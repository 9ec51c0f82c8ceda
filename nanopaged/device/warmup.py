"""Compiling ahead on a CUDA device, so that the first request does not wait for a compiler.

A thread compiles Triton's kernels (`compile_kernels`) while the weights are loaded and torch's compiler is imported.
Then a few steps, whose attention does nothing, make torch compile the functions of fused.py (`finish`).
"""
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nanopaged import kernel
from nanopaged.device import memory

if TYPE_CHECKING:
    from nanopaged.device.runner import Runner

# Stands in for kernel.TRITON: attention that does nothing.
IDLE = kernel.Kernels(lambda qkv, num_heads, *_: qkv[:, :num_heads].contiguous(), lambda q, *_, **__: q)
# The numbers of sequences for which graphs.py records decode steps, beside the largest number. From 113 sequences on,
# at most an eighth of a recorded step is padding.
DECODE_SIZES = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 1024, 64)]
MAX_DECODE_SIZE = 1024  # decode steps of more sequences are not recorded


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A context manager, and a decorator, for sections in which torch's compiler works.

    Importing it and compiling with it create hundreds of thousands of objects, and hardly any is garbage. The collector
    examines the youngest objects after every few hundred allocations, and sometimes all objects. This takes a sixth of
    the compilation time.

    torch itself calls gc.collect() after a compilation and before it records a graph. Existing objects are therefore
    frozen, so that these calls skip them. (Afterwards, objects that a caller had frozen are no longer frozen.)
    """
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.freeze()  # the objects created meanwhile, too:
        gc.unfreeze()  # unfrozen objects join the oldest generation, which the collector seldom examines
        if enabled:
            gc.enable()


def compile_kernels(runner: "Runner") -> None:
    """Call every variant of Triton's kernels that a step may need, on sequences without tokens."""
    c, most = runner.config, min(runner.max_num_samples, MAX_DECODE_SIZE)
    make = partial(torch.zeros, device=runner.device)
    ints: dict[str, Any] = dict(dtype=torch.int32, device=runner.device)
    rows, cache = max(2, most), memory.one_block(runner)
    lens, starts, tiles = make(rows, **ints), make(rows + 1, **ints), torch.full((1, 2), -1, **ints)
    norm = make(c.head_dim, dtype=runner.dtype) if c.qk_norm else None
    q = kernel.TRITON.rotate_and_store(  # slots of -1: it writes no K and V
        make(rows, c.num_heads + 2 * c.num_kv_heads, c.head_dim, dtype=runner.dtype), c.num_heads,
        None if c.learned_positions else make(rows, c.head_dim), norm, norm, c.norm_eps, cache, cache, lens - 1)
    for window in set(c.sliding_windows or [0]):
        kernel.TRITON.attention(q[:2], cache, cache, runner.block_tables[:1], lens[:1], starts[:2], c.head_dim ** -0.5,
                                max_query_len=2, max_seq_len=2, sliding_window=window, num_decodes=0, query_tiles=tiles)
        for longest in (1, runner.max_model_len):
            for count in (count for count in {most, *DECODE_SIZES} if count <= most):
                kernel.TRITON.attention(q[:count], cache, cache, runner.block_tables[:count], lens[:count],
                                        starts[:count + 1], c.head_dim ** -0.5, max_query_len=1, max_seq_len=longest,
                                        sliding_window=window)


@no_garbage_collection()
@torch.inference_mode()
def finish(runner: "Runner") -> None:
    """Have torch compile the functions of fused.py, if the runner uses them, and wait for Triton's thread."""
    if runner.fused:
        no_cache = torch.empty(0)
        runner.kernels = IDLE
        runner.kv_cache = [(no_cache, no_cache, 1.0, 1.0)] * runner.config.num_layers
        # The largest step comes first: at a kernel's first call torch tries a few configurations and keeps the fastest.
        # Steps of one row and of few rows have kernels of their own.
        for query_lens in (*memory.largest_steps(runner), [1, 1], [1]):
            if len(query_lens) <= runner.max_num_samples:
                memory.peak_of(runner, query_lens)
        runner.kernels = kernel.TRITON
    if runner.compiled is not None:
        runner.compiled.result()
