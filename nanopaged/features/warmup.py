"""Compiling Triton's kernels ahead, so that the first request does not wait for the compiler.

Threads compile while the weights are loaded. Each form of a kernel that the model can need on this card is one task. A
task calls the function that launches the kernel with tensors of no rows or of padding: no work is done. Features with
kernels have a function kernel_forms(runner), which yields such tasks.
"""
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanopaged import model, tiles
from nanopaged.device.sampler import pick
from nanopaged.device.transfer import as_current
from nanopaged.options import feature
from nanopaged.tiles import DECODE_SIZES, MAX_DECODE_SIZE

MOST_THREADS = 8


def start(runner: Any) -> None:
    """Start compiling what the runner will launch; `runner.compiling` has the tasks."""
    runner.compiling = start_tasks([*attention_forms(runner), *feature_forms(runner)], runner.device)


def feature_forms(r: Any) -> Iterator[Callable[[], Any]]:
    """The kernels of the features that the runner has."""
    is_fused = r.modules.norm is not model.PLAIN.norm
    for name, is_there in {"cascade": getattr(r, "cascade", None), "fused": is_fused, "fp8": r.fp8,
                           "pick": r.pick is not pick, "fused_experts": is_fused and r.config.experts,
                           "kinds.slots": r.config.groups, "qwen3_5": is_fused and r.config.output_gate,
                           "delta_kernels": getattr(r, "state_kernels", None),
                           "four_bit_kernels": hasattr(r.modules.linear, "plan"), "gemma4": r.config.gemma4}.items():
        if is_there:
            yield from feature(name, "the model").kernel_forms(r)


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


def attention_forms(r: Any) -> Iterator[Callable[[], Any]]:
    """Chapter 1's kernels."""
    for config, cache in r.attention_shapes():
        yield from forms_of(r, config, cache)


def forms_of(r: Any, c: model.ModelConfig, cache: Tensor) -> Iterator[Callable[[], Any]]:
    """Of layers with these heads."""
    dtype, device = r.dtype, r.device
    group, most = c.num_heads // c.num_kv_heads, min(r.max_num_samples, MAX_DECODE_SIZE)
    make = partial(torch.zeros, device=device)
    norm = make(c.head_dim, dtype=torch.float32 if c.float32_norms else dtype) if c.qk_norm else None
    qkv, slots = make(0, c.num_heads + 2 * c.num_kv_heads, c.head_dim, dtype=dtype), make(0, dtype=torch.int32)
    for has_rope in {bool(c.ropes) and i >= 0 for i in c.layer_ropes or [0]}:
        yield partial(r.kernels.rotate_and_store, qkv, c.num_heads, make(0, c.head_dim) if has_rope else None,
                      norm, norm, c.norm_eps, cache, cache, slots)
    sizes: dict[tuple, tuple[int, int]] = {}  # of decode, one for each form
    for longest in (1, r.max_model_len):
        for count in (count for count in {most, *DECODE_SIZES} if count <= most):
            sharing = tiles.programs_per_context(count * c.num_kv_heads, tiles.split_bound(longest))
            config = tiles.decode_config(count * c.num_kv_heads, sharing, group, c.head_dim, dtype, cache.dtype,
                                         device)
            sizes[sharing == 1, sharing == tiles.split_bound(longest), *config.values()] = count, longest
    windows, query_tiles = set(c.sliding_windows or [0]), torch.full((1, 2), -1, dtype=torch.int32, device=device)
    prefills = [partial(attend_padding(r, 1, window, c, cache), max_query_len=2, max_seq_len=2, num_decodes=0,
                        query_tiles=query_tiles) for window in windows]
    # features/hopper.py has a kernel of one form for all windows, which the first of these compiles.
    yield from prefills if r.kernels.tokens_per_tile is tiles.tokens_per_tile else [partial(one_by_one, prefills)]
    for window in windows:
        for count, longest in sizes.values():
            yield partial(attend_padding(r, count, window, c, cache), max_query_len=1, max_seq_len=longest)


def attend_padding(r: Any, count: int, window: int = 0, config: model.ModelConfig | None = None,
                   cache: Tensor | None = None) -> Callable[..., Tensor]:
    """Attention of `count` sequences without tokens."""
    c, cache = (r.config, r.pool.one_block()) if config is None else (config, cache)
    make = partial(torch.zeros, dtype=torch.int32, device=r.device)
    q = make(max(2, count), c.num_heads, c.head_dim, dtype=r.dtype)
    sinks = make(c.num_heads, dtype=r.dtype) if c.sinks else None
    return partial(r.kernels.attention, q[:max(2, count)], cache, cache, r.rows.block_tables[:1].expand(count, -1),
                   make(count), make(count + 1), c.head_dim ** -0.5, sliding_window=window, sinks=sinks)


def one_by_one(tasks: Iterable[Callable[[], Any]]) -> None:
    for task in tasks:
        task()
