"""A model with its weights, in the memory of a device.

Loading changes some families' tensors, and each change saves the decoder a branch. GPT-2 and Phi-3 store q, k and v
as one matrix, Phi-3 gate and up as another: they are split. Gemma 3 stores a norm's weight minus 1, which is added.
Granite divides the logits: here the last norm's weight is divided. Its mixtures of experts store the matrices of all
experts as one tensor, which is split.

**Partial rope** (Phi-4-mini): the first numbers of a head rotate, and a pair is number i of their first half and number
i of their second half. The kernels pair the halves of the whole head. Here the rows of q and k change places, which
leaves all products of q and k as they are:

    head_dim 8, of which 6 rotate    stored    a0 a1 a2 b0 b1 b2 c0 d0      pairs (a0, b0) (a1, b1) (a2, b2)
                                     here      a0 a1 a2 c0 b0 b1 b2 d0      the same, and (c0, d0) with the angle 0
"""
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nanopaged import model
from nanopaged.options import feature
from nanopaged.rope import make_rope_table, rotary_dim


def build_model(config: model.ModelConfig, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype,
                device: torch.device | str, num_positions: int, modules: model.Modules = model.PLAIN,
                *part: Callable[[str, Tensor], Tensor]) -> model.Transformer:
    """A Transformer with a checkpoint's tensors, for texts of num_positions tokens. Each is copied by itself, so memory
    holds the weights once. ValueError: too little memory, or the arguments of `model.load_weights` do not fit."""
    with torch.device("meta"):  # shapes without memory
        built = model.Transformer(config, modules_for(config, modules))
    types = {parameter: torch.float32 if name.endswith(".scale") else parameter.dtype if parameter.itemsize == 1
             else dtype for name, parameter in built.named_parameters()}
    size = sum(parameter.numel() * kind.itemsize for parameter, kind in types.items())
    is_cuda = torch.device(device).type == "cuda"
    free = f"{torch.cuda.mem_get_info(device)[0] / 2**30:.1f} GiB free, less" if is_cuda else "less free memory"
    table_size = num_positions * config.head_dim * 4 * len(config.ropes)
    with memory_for(f"rope's angles of {num_positions} positions take {table_size / 2**30:.1f} GiB, and more while "
                    "they are computed, which the host does not have; lower max_model_len", table_size):
        built.rope_tables = [make_rope_table(rope, config.head_dim, num_positions).to(device) for rope in config.ropes]
    with memory_for(f"the weights take {size / 2**30:.1f} GiB, and {device} has {free} than loading them takes; use a "
                    "smaller model or dtype", 0 if is_cuda else size):
        # Module.to_empty does the same, but imports sympy for it: a quarter of a second
        built._apply(lambda parameter: torch.empty(parameter.shape, dtype=types[parameter], device=device))
        model.load_weights(built, unmerge(tensors, config), *part)
        for name, parameter in built.named_parameters():
            parameter.data = fold(name, parameter.data, config)
    return built.eval().requires_grad_(False)


def modules_for(config: model.ModelConfig, modules: model.Modules = model.PLAIN) -> model.Modules:
    """The modules; for a mixture of experts with its MLPs."""
    if config.experts:
        return feature("experts", "a mixture of experts").with_experts(modules)
    return modules


def unmerge(tensors: Iterable[tuple[str, Tensor]], config: model.ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The tensors with their names, and the parts of config.merged in place of a merged one. A merged tensor of three
    dimensions has the matrices of all experts."""
    for name, tensor in tensors:
        module = next((module for module in config.merged if f".{module}." in f".{name}"), "")
        rows, dim = config.merged.get(module, {}), int(config.transposed and tensor.dim() == 2)
        if rows and tensor.dim() == 3:
            whole = enumerate(tensor)
            yield from unmerge(((name.replace(module, f"experts.{i}.{module}"), one) for i, one in whole), config)
        elif rows and tensor.shape[dim:dim + 1] == (sum(rows.values()),):
            parts = tensor.split([*rows.values()], dim)
            yield from ((name.replace(module, part), one) for part, one in zip(rows, parts))
        else:
            yield name, tensor


@torch.no_grad()
def fold(name: str, weight: Tensor, config: model.ModelConfig, back: bool = False) -> Tensor:
    """The decoder's parameter `name`, made of the checkpoint's; back: the checkpoint's, made of the decoder's."""
    if name.endswith("norm.weight"):
        weight = weight.float() if config.float32_norms else weight
        scale = config.logits_scaling if name == "norm.weight" else 1.0
        if (scale, config.norm_offset) != (1, 0):
            weight = weight * scale - config.norm_offset if back else (weight + config.norm_offset) / scale
    size = rotary_dim(config.ropes[0], config.head_dim) if config.ropes else config.head_dim
    if size < config.head_dim and "qkv_proj" in name:
        half, pairs = config.head_dim // 2, size // 2
        order = torch.tensor([*range(pairs), *range(size, half + pairs), *range(pairs, size),
                              *range(half + pairs, config.head_dim)], device=weight.device)
        kind = weight.dtype
        heads = weight.view(torch.uint8 if kind.itemsize == 1 else kind).unflatten(0, (-1, config.head_dim))
        q_and_k, v = heads.tensor_split([config.num_heads + config.num_kv_heads])
        weight = torch.cat([q_and_k.index_select(1, order.argsort() if back else order), v]).flatten(0, 1).view(kind)
    return weight


def random_tensors(config: model.ModelConfig, dtype: torch.dtype, device: torch.device,
                   seed: int) -> Iterator[tuple[str, Tensor]]:
    """Random weights, as a checkpoint's tensors. They are the same on any number of GPUs."""
    with torch.device("meta"):
        whole = model.Transformer(config, modules_for(config))
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in whole.named_parameters():
        weight = torch.ones(parameter.shape, dtype=dtype, device=device)
        if "norm.weight" not in name:
            weight.normal_(std=0.02, generator=generator)
        yield from as_checkpoint([(name, weight)], config)


def as_checkpoint(parameters: Iterable[tuple[str, Tensor]], config: model.ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """A Transformer's parameters as a checkpoint's tensors."""
    for name, parameter in parameters:
        for theirs, rows in model.checkpoint_tensors(name, fold(name, parameter, config, back=True), config).items():
            is_transposed = config.transposed and rows.dim() == 2 and name.startswith("layers.")
            yield theirs, rows.T if is_transposed else rows


@contextmanager
def memory_for(sentence: str, size: float = 0) -> Iterator[None]:
    """Raises ValueError with this sentence if the host has less than `size` bytes, or if memory runs out inside."""
    try:
        if size > host_memory():
            raise MemoryError
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError; on a CPU it is a plain one
        if isinstance(error, RuntimeError) and not re.search("(out of|allocate|enough) memory", str(error)):
            raise
        raise ValueError(sentence) from None


def host_memory() -> float:
    """Bytes. Linux gives out more memory than it has, and ends the process that writes to it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
