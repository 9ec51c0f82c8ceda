"""What LLM's options ask for: a checkpoint, a runner for each pool, and an engine for each runner.

The parts are put together here, and an option replaces a part by one of nanopaged/features.
"""
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanopaged import engine, kernel, model
from nanopaged.device.choices import pick_devices, pick_kernels
from nanopaged.device.runner import Runner
from nanopaged.device.trial import allocate_pool
from nanopaged.options import default_feature, feature
from nanopaged.tiles import has_dependent_launch, widest_window
from nanopaged.weights.build import as_checkpoint, random_tensors, unmerge
from nanopaged.weights.checkpoint import find_on_disk, read_ordinary


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
        hub = feature("hub", f"model {str(model)!r}, which is no directory here,")
        path = hub.download(str(model), revision, check, without_weights, token, cache)
    return path


def make_runners(options: Any, config: model.ModelConfig, path: Path,
                 num_more_rows: int) -> tuple[list[Runner], list[int]]:
    """A runner for each pool, and the pools' numbers of blocks. With data_parallel_size there is one on each of the
    first GPUs, with the weights of the first; with tensor_parallel_size that of the first GPU, with a worker process
    for each other one."""
    num_ranks, fp8 = options.tensor_parallel_size, False
    choose_groups(options, config)
    if config.states:
        feature("kinds.recurrent", "a model with recurrent states").check(options)
    option = "tensor_parallel_size" if num_ranks > 1 else "data_parallel_size"
    devices = pick_devices(options.device, vars(options)[option], option)
    if config.fp8 and feature("fp8", "a checkpoint in FP8").keeps_blocks(options, config, devices):
        config.fp8, config.four_bits = None, "fp8"
    in_4_bits = config.four_bits or options.quantization == "int4"
    if config.fp8 and not in_4_bits or options.quantization == "fp8":
        fp8 = feature("fp8", "a checkpoint in FP8").keeps_8_bits(options.quantization, options.dtype, config, devices,
                                                                 num_ranks)
    runners: list[Runner] = []
    for device in devices[:1] if num_ranks > 1 else devices:
        kind, kernels, modules = pick_runner(options, device)
        if config.groups:
            kind = runner_class([feature("kinds.device", "a model with layers of several kinds").KindsRunner, kind])
        if config.states:
            kind = runner_class([feature("kinds.recurrent", "a model with recurrent states").StatesRunner, kind])
        if in_4_bits:
            modules = feature("four_bits", "a model in 4 bits").with_four_bits(options, config, modules, device, path)
        if fp8:
            modules = feature("fused", "quantization").with_fp8(modules)
        parts: Any = config, options, device, kernels, modules, fp8, num_more_rows
        if num_ranks > 1:
            runner = feature("tensor_parallel.workers", option).make_driver(kind, path, *parts)
        else:
            runner = kind(*parts)
        if runners:
            load(runner, options, as_checkpoint(runners[0].model.named_parameters(), config))
        else:
            load(runner, options, read(options, config, path, runner))
        runners.append(runner)
    return runners, [allocate_pool(runner, options.num_gpu_blocks_override or options.num_blocks,
                                   options.gpu_memory_utilization) for runner in runners]


def choose_groups(options: Any, config: model.ModelConfig) -> None:
    """Put layers of several kinds into groups (features/kinds)."""
    if config.layer_heads or config.kv_sharing:
        feature("kinds.device", "a model with heads of several sizes, or shared K and V,").choose(options, config)
    elif len(set(config.sliding_windows)) > 1:
        if kinds := default_feature("kinds.device", "a text that keeps all blocks of layers with a window,"):
            kinds.choose(options, config)


def pick_runner(options: Any, device: torch.device) -> tuple[type[Runner], kernel.Kernels, model.Modules]:
    """The plain runner, kernels and modules, or faster ones. (Attention in torch asks the device for lengths, which
    cannot be recorded.)"""
    runners, kernels, modules = list[type[Runner]](), pick_kernels(options.attention, device), model.PLAIN
    if kernels.in_triton:
        hopper = has_dependent_launch(device) and default_feature("hopper", "prefill on Hopper, which is slower,")
        kernels = hopper.with_prefill(kernels) if hopper else kernels
        if cascade := default_feature("cascade", "decode of a common beginning, which is slower,"):
            runners.append(cascade.CascadeRunner)
    if options.enforce_eager:
        return runner_class(runners), kernels, modules
    if last_layer := default_feature("last_layer", "the last layer, which computes all rows,"):
        modules = last_layer.MODULES
    if not kernels.in_triton:
        if rectangles := default_feature("rectangles", "attention of many sequences, which is slower,"):
            kernels = rectangles.KERNELS
    elif device.type == "cuda":
        if fused := default_feature("fused", "a step without small kernels, which is slower,"):
            modules = fused.MODULES
        if graphs := default_feature("graphs", "a step launched kernel by kernel, which is slower,"):
            runners.append(graphs.GraphRunner)
        if pick := default_feature("pick", "sampling in many kernels, which is slower,"):
            runners.append(pick.PickRunner)
    return runner_class(runners), kernels, modules


def runner_class(kinds: list[type[Runner]]) -> type[Runner]:
    """Runner itself, or a class that does what all these subclasses do."""
    return type("Runner", tuple(kinds), {}) if len(kinds) > 1 else kinds[0] if kinds else Runner


def read(options: Any, config: model.ModelConfig, path: Path, runner: Runner) -> Iterable[tuple[str, Tensor]]:
    """The tensors of the checkpoint, or random ones."""
    if options.load_format == "dummy":
        tensors: Iterable = random_tensors(config, runner.dtype, runner.device, options.seed)
    elif config.fp8:
        tensors = feature("fp8", "a checkpoint in FP8").read_weights(path, config.fp8, runner.fp8, runner.device)
    else:
        tensors = read_ordinary(path)
        if config.sinks:
            tensors = feature("gpt_oss", "a model with sinks").split_experts(tensors)
    if config.four_bits or options.quantization == "int4":
        tensors = feature("four_bits", "a model in 4 bits").read(tensors, runner)
    if runner.fp8:  # with the names that say which matrices are cut
        return feature("fp8", "quantization").in_fp8(unmerge(tensors, config), runner.device)
    return tensors


def load(runner: Runner, options: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Build the runner's model. Triton's kernels are compiled meanwhile."""
    if runner.kernels.in_triton and runner.device.type == "cuda":
        if warmup := default_feature("warmup", "a first request, which compiles,"):
            warmup.start(runner)
    runner.load(tensors)


def make_engines(options: Any, runners: list[Runner], pools: list[int]) -> tuple[list[engine.Engine], int]:
    """An engine for each runner, and the most tokens of a text. pools: their numbers of blocks"""
    engines, make_scheduler, make_manager, window = [], engine.Scheduler, None, 0
    config, block_size, given = runners[0].config, runners[0].block_size, options.max_model_len
    limit, size = config.max_position_embeddings, min(pools) * block_size
    if config.states:
        parts = feature("kinds.recurrent", "a model with recurrent states")
        make_manager, make_scheduler = parts.make_manager, parts.StatesScheduler
    elif config.groups:
        parts = feature("kinds.device", "a model with layers of several kinds")
        make_manager, size = parts.make_manager, parts.longest_text(options, runners[0], size)
    elif options.swap_space or widest_window(config):
        if swapping := default_feature("swapping", "a text that keeps the blocks behind a sliding window,"):
            window, make_manager = swapping.pick_window(runners[0], size), swapping.make_manager
    if given is not None and size < given and not window:
        raise ValueError(f"max_model_len {given} needs {engine.cdiv(given, block_size)} blocks of {block_size} tokens, "
                         f"and the pool has {min(pools)}; lower it or give the pool more memory")
    if options.speculative_config is not None:
        parts = feature("drafts", "speculative_config")
        make_scheduler = parts.DraftingScheduler
        for runner in runners:
            runner.step_input = parts.DraftInput
    for runner, num_blocks in zip(runners, pools):
        most_tokens = options.max_num_batched_tokens
        if make_manager and (window or options.swap_space or config.groups or config.states):
            manager = make_manager(options, runner, num_blocks, window)
            most_tokens = manager.most_tokens  # a step's, which have to fit beside a window
        else:
            manager = engine.BlockManager(num_blocks, block_size, options.enable_prefix_caching)
        scheduler = make_scheduler(manager, options.max_num_seqs, most_tokens)
        engines.append(engine.Engine(scheduler, runner, runner.lookahead))
    return engines, given or (limit if window else min(limit, size))
