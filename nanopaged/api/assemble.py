"""What LLM's options ask for: a checkpoint, a runner for each pool, and an engine for each runner."""
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanopaged import engine, kernel, model
from nanopaged.device import last_layer
from nanopaged.device.choices import pick_devices, pick_fp8, pick_kernels
from nanopaged.device.runner import Runner
from nanopaged.scheduling.additions import BlockManager, Engine, Scheduler
from nanopaged.scheduling.recovery import RecoveringEngine
from nanopaged.scheduling.swapping import Swapping
from nanopaged.scheduling.window import widest_window
from nanopaged.weights.checkpoint import find_on_disk
from nanopaged.weights.fp8 import read_weights, with_warning
from nanopaged.weights.split import as_checkpoint


def find_checkpoint(model: str | Path, revision: str | None = None, check: Callable[[Path], object] | None = None,
                    without_weights: bool = False, token: str | None = None,
                    cache: str | Path | None = None) -> Path:
    """The directory of a checkpoint: a bundled name, a path, or a name on the Hub ("Qwen/Qwen3-0.6B").

    A name on the Hub is looked up in the cache of the Hugging Face tools, and otherwise downloaded into that cache, at
    `revision` (a branch, tag or commit). nanopaged/weights/hub.py describes the download, its errors, and the other
    arguments. `find_on_disk` describes the errors of other models.
    """
    path = find_on_disk(model, revision)
    if path is None:
        from nanopaged.weights.hub import download
        path = download(str(model), revision, check, without_weights, token, cache)
    return path


def make_runners(device: str, data_parallel_size: int, tensor_parallel_size: int, attention: str, enforce_eager: bool,
                 config: model.ModelConfig, path: Path, is_dummy: bool, pool: tuple, swap_space: float,
                 quantization: str | None, **options: Any) -> list[Runner]:
    """A runner for each pool: the plain one, or on CUDA the one with recorded steps. (Attention in torch asks the
    device for lengths, which cannot be recorded.) With data_parallel_size one on each of the first GPUs, with the
    weights of the first; with tensor_parallel_size that of the first GPU, with a worker process for each other one.

    pool: the arguments of trial.allocate_pool
    """
    runners: list[Runner] = []
    by_option = {"tensor_parallel_size": tensor_parallel_size, "data_parallel_size": data_parallel_size}
    option = max(by_option, key=by_option.__getitem__)
    devices = pick_devices(device, by_option[option], option)
    options["fp8"] = fp8 = pick_fp8(quantization, config, devices, tensor_parallel_size)
    tensors = None if is_dummy else read_weights(path, config.fp8, fp8)
    if tensors and config.fp8 and fp8:
        tensors = with_warning(tensors)
    for picked in devices:
        runner_class, kernels = pick_runner(attention, picked, enforce_eager)
        options |= dict(device=picked, kernels=kernels)
        if tensor_parallel_size > 1:
            from nanopaged.device.workers import make_driver
            return [make_driver(runner_class, tensor_parallel_size, config, tensors, path, pool, swap_space, **options)]
        if not (enforce_eager or runner_class.fused):
            options["modules"] = last_layer.MODULES
        if runners:
            tensors = as_checkpoint(runners[0].model.named_parameters(), config)
        runners.append(runner_class(config, tensors, **options))
    return runners


def pick_runner(attention: str, device: Any, enforce_eager: bool) -> tuple[type[Runner], kernel.Kernels]:
    kernels, runner = pick_kernels(attention, device), Runner
    if kernels is kernel.TORCH and not enforce_eager:
        from nanopaged.device.rectangles import KERNELS as kernels
    if device.type == "cuda" and not enforce_eager and kernels is kernel.TRITON:
        from nanopaged.device.graphs import GraphRunner as runner
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


def make_engines(runners: list[Runner], pools: list[int], enable_prefix_caching: bool, window: int, swap_space: float,
                 *limits: int) -> list[Engine]:
    """An engine for each runner. pools: their numbers of blocks; limits: max_num_seqs and max_num_batched_tokens"""
    managers = []
    for runner, num_blocks in zip(runners, pools):
        num_host_blocks = runner.allocate_host_pool(swap_space)
        given = num_blocks, runner.block_size, enable_prefix_caching
        is_plain = not (window or num_host_blocks)
        managers.append(BlockManager(*given) if is_plain else Swapping(*given, window, num_host_blocks))
    if len(managers) == 1:
        schedulers: list[Any] = [Scheduler(managers[0], *limits)]
    else:
        from nanopaged.scheduling.data_parallel import make_schedulers
        # Schedulers refer to each other, and what they refer to lives until the garbage collector comes by.
        schedulers = make_schedulers(managers, [weakref.proxy(runner) for runner in runners], *limits)
    return [RecoveringEngine(scheduler, runner, runner.lookahead) for scheduler, runner in zip(schedulers, runners)]
