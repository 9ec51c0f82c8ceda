"""Compiling Triton's kernels ahead, so that the first request does not wait for the compiler.

Threads compile while the weights are loaded. Each form of a kernel that the model can need on this card is one task. A
task calls the function that launches the kernel with tensors of no rows or of padding: no work is done.
"""
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanopaged import kernel, model, tiles
from nanopaged.device.pool import FP8
from nanopaged.device.transfer import as_current
from nanopaged.options import feature
from nanopaged.tiles import DECODE_SIZES, MAX_DECODE_SIZE

MOST_THREADS = 8


def start(runner: Any) -> None:
    """Start compiling what the runner will launch; `runner.compiling` has the tasks."""
    r = runner
    forms = [*attention_forms(r.config, r.dtype, r.pool.one_block(), r.rows.block_tables, r.max_num_samples,
                              r.max_model_len, bool(r.cascade), r.warm_up)]
    if r.modules.norm is not model.PLAIN.norm:  # features/fused.py
        forms += small_forms(r.config, r.dtype, r.device, r.num_ranks, r.fp8)
    runner.compiling = start_tasks(forms, runner.device)


def start_tasks(tasks: Iterable[Callable[[], Any]], device: torch.device) -> list[Future]:
    """Start compiling, several forms at a time. `result()` of each raises what failed."""
    def compile_one(task: Callable[[], Any]) -> None:
        with as_current(device):
            torch.zeros(1, device=device)  # CUDA's context becomes this thread's: Triton's boxes for TMA need one
            task()

    pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
    futures = [pool.submit(compile_one, task) for task in tasks]
    pool.shutdown(wait=False)
    return futures


def attention_forms(c: model.ModelConfig, dtype: torch.dtype, cache: Tensor, block_tables: Tensor,
                    max_num_samples: int, max_model_len: int, has_cascade: bool,
                    all_widths: bool) -> Iterator[Callable[[], Any]]:
    """Chapter 1's kernels. cache: a block of one layer's K or V; all_widths: of a cascade's tile, not the widest alone,
    which is tried at the start. Others are compiled at their first use, which takes half a second."""
    device, most = cache.device, min(max_num_samples, MAX_DECODE_SIZE)
    ints: dict[str, Any] = dict(dtype=torch.int32, device=device)
    make, rows = partial(torch.zeros, device=device), max(2, most)
    lens, starts, query_tiles = make(rows, **ints), make(rows + 1, **ints), torch.full((1, 2), -1, **ints)
    norm = make(c.head_dim, dtype=torch.float32 if c.float32_norms else dtype) if c.qk_norm else None
    qkv = make(0, c.num_heads + 2 * c.num_kv_heads, c.head_dim, dtype=dtype)
    for has_rope in {bool(c.ropes) and i >= 0 for i in c.layer_ropes or [0]}:
        yield partial(kernel.TRITON.rotate_and_store, qkv, c.num_heads, make(0, c.head_dim) if has_rope else None,
                      norm, norm, c.norm_eps, cache, cache, lens[:0])
    group, q = c.num_heads // c.num_kv_heads, make(rows, c.num_heads, c.head_dim, dtype=dtype)
    sizes: dict[tuple, tuple[int, int]] = {}  # of decode, one for each form
    for longest in (1, max_model_len):
        for count in (count for count in {most, *DECODE_SIZES} if count <= most):
            sharing = tiles.programs_per_context(count * c.num_kv_heads, tiles.split_bound(longest))
            config = tiles.decode_config(count * c.num_kv_heads, sharing, group, c.head_dim, dtype, cache.dtype,
                                         device)
            sizes[sharing == 1, sharing == tiles.split_bound(longest), *config.values()] = count, longest
    windows = set(c.sliding_windows or [0])
    attention = partial(kernel.TRITON.attention, k_cache=cache, v_cache=cache, scale=c.head_dim ** -0.5)
    prefills = [partial(attention, q[:2], block_tables=block_tables[:1], seq_lens=lens[:1], query_start_loc=starts[:2],
                        max_query_len=2, max_seq_len=2, num_decodes=0, query_tiles=query_tiles, sliding_window=window)
                for window in windows]
    # On Hopper the first one compiles a kernel that has one form for all windows.
    fits_hopper = tiles.fits_hopper(group, c.head_dim, cache.shape[1], dtype, cache.dtype, device)
    yield from [partial(_one_by_one, prefills)] if fits_hopper else prefills
    for window in windows:
        attend = partial(attention, sliding_window=window)
        for count, longest in sizes.values():
            yield partial(attend, q[:count], block_tables=block_tables[:count], seq_lens=lens[:count],
                          query_start_loc=starts[:count + 1], max_query_len=1, max_seq_len=longest)
        for columns in [*tiles.PREFIX_STAGES][0 if all_widths else -1:] if has_cascade else ():
            attend_together = [partial(
                attend, q[:count], block_tables=block_tables[:1].expand(count, -1), seq_lens=lens[:count],
                query_start_loc=starts[:count + 1], max_query_len=1, max_seq_len=max_model_len,
                cascade=(make(1, 4, **ints), lens[:count], columns)) for count in (2, rows)]
            yield partial(_one_by_one, attend_together)  # both have the same prefix launch


def _one_by_one(tasks: Iterable[Callable[[], Any]]) -> None:
    for task in tasks:
        task()


def small_forms(c: model.ModelConfig, dtype: torch.dtype, device: torch.device, num_ranks: int,
                fp8: bool = False) -> Iterator[Callable[[], Any]]:
    """The kernels between the products, and those of sampling. fp8: the layers' matrices are in 8 bits"""
    from nanopaged.features.fused import residual_products
    make = partial(torch.empty, dtype=dtype, device=device)

    def products(size: int, bias: bool, fp8: bool, count: int, *act: Any) -> Iterator[Callable[[], Any]]:
        weight, shift = make(0, size, dtype=FP8 if fp8 else dtype), make(1) if bias else None
        scale = make(0, 1, dtype=torch.float32) if fp8 else None
        for rows in (1, 2, 9, 17, 33) if fp8 else (1, 2, 9):  # one, up to 8, 16, 32, 64
            if kernel.takes_rows(rows, dtype, device, fp8):
                yield partial(kernel.few_rows_linear, make(rows, size), weight, shift, None, *act,
                              count=count if rows > 1 else 1, scale=scale)  # type: ignore[misc]

    residual, act = residual_products(c, FP8 if fp8 else dtype), (c.activation, c.gated_mlp)
    lm_head, qkv_proj = (c.hidden_size, False, 1, False), (c.hidden_size, c.qkv_bias, 1, fp8)
    for size, bias, count, form in {lm_head, qkv_proj, *((*product, fp8) for product in residual)}:
        yield from products(size, bias, form, count, "", False)
    yield from products(c.hidden_size, c.mlp_bias, fp8, 1, *act)
    for size in {c.hidden_size, *(size for size, _, _ in residual)} if fp8 else ():
        yield partial(kernel.quantize_rows, make(0, size))
    yield partial(kernel.activate, make(0, c.intermediate_size * (2 if c.gated_mlp else 1)), *act)
    weight = make(c.hidden_size, dtype=torch.float32 if c.float32_norms else dtype)
    for num_rows, count in itertools.product((1, kernel.MOST_FEW_ROWS + 1), {1, *(count for _, _, count in residual)}):
        yield partial(kernel.add_and_norm, (make(count, num_rows, c.hidden_size),) * num_ranks,
                      make(num_rows, c.hidden_size), weight, weight if c.norm == "layer" else None, c.norm_eps)
    temperature, seed = make(0, 2, dtype=torch.float32)[:, 0], make(0, 2, dtype=torch.int64)[:, 0]
    yield partial(kernel.pick, make(0, c.vocab_size), temperature, seed, make(0, dtype=torch.int64))
    if c.experts:
        yield from feature("experts", "a mixture of experts").kernel_forms(c, dtype, device, fp8)
