"""A rank's part of a model on several GPUs (parallel.py): its settings, and what it reads of the checkpoint's tensors.

A matrix is split along its outputs (dimension 0) or its inputs (dimension 1). A part is a view of the mapped file, so a
process reads only that part. The vocabulary and the MLP are split into equal parts, the last ones padded with zeros.
"""
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopaged import model
from nanopaged.tiles import cdiv
from nanopaged.weights.build import checkpoint_tensors

SPLIT_DIMS = dict(embed_tokens=0, qkv_proj=0, o_proj=1, gate_up_proj=0, down_proj=1, lm_head=0)
PART_ALIGNMENT = 64  # a part of the vocabulary, or of the MLP, is a multiple of it


def split_config(config: model.ModelConfig, size: int) -> model.ModelConfig:
    """A rank's settings, with the whole vocabulary. ValueError: the heads cannot be split evenly."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    whole = "a model whose norms go over all heads of q and k (OLMo 2 and 3)" if config.all_heads_norm else "experts"
    if config.all_heads_norm or config.experts:
        raise ValueError(f"tensor_parallel_size {size} cannot split {whole}; use data_parallel_size, or one GPU")
    sizes = [n for n in range(1, heads + 1) if heads % n == 0 and 0 in (kv_heads % n, n % kv_heads)]
    if size not in sizes:
        raise ValueError(f"tensor_parallel_size {size} cannot split {heads} query heads and {kv_heads} kv heads "
                         f"evenly; sizes that can are {', '.join(map(str, sizes))}")
    return replace(config, num_heads=heads // size, num_kv_heads=max(1, kv_heads // size),
                   intermediate_size=padded_part(config.intermediate_size, size))


def padded_part(whole: int, size: int) -> int:
    return cdiv(cdiv(whole, size), PART_ALIGNMENT) * PART_ALIGNMENT


def find_cuts(whole: model.ModelConfig, rank: int, size: int,
              modules: model.Modules = model.PLAIN) -> Callable[[str, Tensor], Tensor]:
    """A function of a checkpoint's tensor, and of its name, that cuts out this rank's part. It raises ValueError for a
    tensor of another shape than config.json implies."""
    with torch.device("meta"):
        built = model.Transformer(whole, modules)
    origins = {theirs: (name.split(".")[-2], tensor.shape) for name, parameter in built.named_parameters()
               for theirs, tensor in checkpoint_tensors(name, parameter, whole).items()}

    def own_part(name: str, tensor: Tensor) -> Tensor:
        module, shape = origins[name]
        if tensor.shape != shape:
            raise ValueError(f"tensor {name} has shape {list(tensor.shape)}; config.json implies {list(shape)}")
        dim = SPLIT_DIMS.get(module)
        if dim is None or dim == 1 == shape[-1]:  # the same on all ranks; or an FP8 scale of each row
            return tensor
        if dim == tensor.dim():  # a bias, which is added once
            return torch.zeros_like(tensor) if rank else tensor
        first, length = rank * padded_part(shape[dim], size), padded_part(shape[dim], size)
        if module in ("qkv_proj", "o_proj"):  # with fewer kv heads than ranks, several have the same
            head, num_heads = whole.head_dim, shape[dim] // whole.head_dim
            first, length = rank * num_heads // size * head, max(1, num_heads // size) * head
        part = tensor.transpose(0, dim)[first:first + length].transpose(0, dim)
        missing = length - part.shape[dim]
        return F.pad(part, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing]) if missing else part

    return own_part
