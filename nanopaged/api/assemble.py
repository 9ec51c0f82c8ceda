"""What LLM's options ask for: a checkpoint, a runner for each pool, and an engine for each runner."""
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanopaged import engine, kernel, model
from nanopaged.device.choices import pick_devices, pick_fp8, pick_kernels, widest_window
from nanopaged.device.runner import Runner
from nanopaged.device.trial import allocate_pool
from nanopaged.features import last_layer
from nanopaged.features.fp8 import read_weights
from nanopaged.weights.build import as_checkpoint
from nanopaged.weights.checkpoint import find_on_disk


def find_checkpoint(model: str | Path, revision: str | None = None, check: Callable[[Path], object] | None = None,
                    without_weights: bool = False, token: str | None = None,
                    cache: str | Path | None = None) -> Path:
    """The directory of a checkpoint: a bundled name, a path, or a name on the Hub ("Qwen/Qwen3-0.6B").

    A name on the Hub is looked up in the cache of the Hugging Face tools, and otherwise downloaded into that cache, at
    `revision` (a branch, tag or commit). nanopaged/features/hub.py describes the download, its errors, and the other
    arguments. `find_on_disk` describes the errors of other models.
    """
    path = find_on_disk(model, revision)
    if path is None:
        from nanopaged.features.hub import download
        path = download(str(model), revision, check, without_weights, token, cache)
    return path


def make_runners(options: Any, config: model.ModelConfig, path: Path, drafting: Any) -> tuple[list[Runner], list[int]]:
    """A runner for each pool, and the pools' numbers of blocks. The runner is the plain one, or on CUDA the one with
    recorded steps. (Attention in torch asks the device for lengths, which cannot be recorded.) With data_parallel_size
    there is one on each of the first GPUs, with the weights of the first; with tensor_parallel_size that of the first
    GPU, with a worker process for each other one."""
    runners: list[Runner] = []
    num_ranks, is_eager = options.tensor_parallel_size, options.enforce_eager
    option = "tensor_parallel_size" if num_ranks > 1 else "data_parallel_size"
    devices = pick_devices(options.device, vars(options)[option], option)
    more = {name: vars(options)[name] for name in (
        "dtype", "seed", "block_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype", "warm_up",
        "disable_cascade_attn")}
    more["fp8"] = fp8 = pick_fp8(options.quantization, options.dtype, config, devices, num_ranks)
    more["max_model_len"] = options.max_model_len or config.max_position_embeddings
    more["max_num_drafts"] = drafting.most_in_step(options.max_num_seqs) if drafting else 0
    tensors = None if options.load_format == "dummy" else read_weights(path, config.fp8, fp8, devices[0])
    pool = options.num_gpu_blocks_override or options.num_blocks, options.gpu_memory_utilization
    for device in devices:
        runner_class, kernels = pick_runner(options.attention, device, is_eager)
        more |= dict(device=device, kernels=kernels)
        if num_ranks > 1:
            from nanopaged.features.tensor_parallel.workers import make_driver
            runners = [make_driver(runner_class, num_ranks, config, tensors, path, pool, options.swap_space, **more)]
            break
        if not (is_eager or runner_class.fused):
            more["modules"] = last_layer.MODULES
        if runners:
            tensors = as_checkpoint(runners[0].model.named_parameters(), config)
        runners.append(runner_class(config, tensors, **more))
    return runners, [allocate_pool(runner, *pool) for runner in runners]


def pick_runner(attention: str, device: Any, enforce_eager: bool) -> tuple[type[Runner], kernel.Kernels]:
    kernels, runner = pick_kernels(attention, device), Runner
    if kernels is kernel.TORCH and not enforce_eager:
        from nanopaged.features.rectangles import KERNELS as kernels
    if device.type == "cuda" and not enforce_eager and kernels is kernel.TRITON:
        from nanopaged.features.graphs import GraphRunner as runner
    return runner, kernels


def pick_window(config: model.ModelConfig, num_blocks: int, block_size: int,
                max_model_len: int | None) -> tuple[int, int]:
    """The sliding window, or 0, and the most tokens of a text."""
    limit, size = config.max_position_embeddings, num_blocks * block_size
    # Blocks that leave the window are freed only if the pool holds more than a window and a block; else texts must fit.
    window = widest_window(config.sliding_windows)
    window = window if window < size - block_size else 0
    if max_model_len is not None and size < max_model_len and not window:
        raise ValueError(f"max_model_len {max_model_len} needs {engine.cdiv(max_model_len, block_size)} blocks of "
                         f"{block_size} tokens, and the pool has {num_blocks}; lower it or give the pool more memory")
    return window, max_model_len or (limit if window else min(limit, size))


def make_engines(options: Any, runners: list[Runner], pools: list[int], window: int) -> list[engine.Engine]:
    """An engine for each runner. pools: their numbers of blocks"""
    engines, make_scheduler = [], engine.Scheduler
    if options.speculative_config is not None:
        from nanopaged.features.drafts import DraftingScheduler as make_scheduler
        from nanopaged.features.drafts import DraftInput
        for runner in runners:
            runner.step_input = DraftInput
    for runner, num_blocks in zip(runners, pools):
        given = num_blocks, runner.block_size, options.enable_prefix_caching
        most_tokens = options.max_num_batched_tokens
        if window or options.swap_space:
            from nanopaged.features.swapping import Swapping, swap
            manager: Any = Swapping(*given, window, swap(runner, options.swap_space), most_tokens)
            most_tokens = manager.most_tokens
        else:
            manager = engine.BlockManager(*given)
        scheduler = make_scheduler(manager, options.max_num_seqs, most_tokens)
        engines.append(engine.Engine(scheduler, runner, runner.lookahead))
    return engines
