"""A rank's part of a model on several GPUs (parallel.py): its settings, and what it reads of the
checkpoint's tensors.

A matrix is split along its outputs (dimension 0) or its inputs (dimension 1). A part is a view of the mapped file, so a
process reads only that part. The vocabulary and the MLP are split into equal parts, the last ones padded with zeros.
"""
from collections.abc import Callable
from dataclasses import replace
from functools import partial

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
    if config.all_heads_norm:
        raise ValueError(f"tensor_parallel_size {size} cannot split a model whose norms go over all heads of q and k "
                         "(OLMo 2 and 3); use data_parallel_size, or one GPU")
    if config.experts:
        raise ValueError(f"tensor_parallel_size {size} cannot split experts; use data_parallel_size, or one GPU")

    def fits(size: int) -> bool:
        return config.num_heads % size == 0 and 0 in (config.num_kv_heads % size, size % config.num_kv_heads)

    if not fits(size):
        sizes = ", ".join(str(n) for n in range(1, config.num_heads + 1) if fits(n))
        raise ValueError(f"tensor_parallel_size {size} cannot split {config.num_heads} query heads and "
                         f"{config.num_kv_heads} kv heads evenly; sizes that can are {sizes}")
    return replace(config, num_heads=config.num_heads // size, num_kv_heads=max(1, config.num_kv_heads // size),
                   intermediate_size=padded_part(config.intermediate_size, size))


def padded_part(whole: int, size: int) -> int:
    return cdiv(cdiv(whole, size), PART_ALIGNMENT) * PART_ALIGNMENT


def find_cuts(whole: model.ModelConfig, config: model.ModelConfig, rank: int, size: int,
              modules: model.Modules = model.PLAIN) -> Callable[[str, Tensor], Tensor]:
    """A function of a checkpoint's tensor, and of its name, that cuts out this rank's part. It raises ValueError for a
    tensor of another shape than config.json implies."""
    with torch.device("meta"):
        models = model.Transformer(whole, modules), model.Transformer(config, modules)
    cuts: dict[str, tuple[torch.Size, Callable[[Tensor], Tensor]]] = {}
    for (name, parameter), (_, own) in zip(*(one.named_parameters() for one in models)):
        module, kind = name.split(".")[-2:]
        tensors = checkpoint_tensors(name, parameter, whole)
        parts = checkpoint_tensors(name, own, config).values()
        for i, ((theirs, tensor), part) in enumerate(zip(tensors.items(), parts)):
            dim = SPLIT_DIMS.get(module, 2)
            cut: Callable[[Tensor], Tensor] = Tensor.detach  # all of it
            if dim == 1 and kind == "bias" and rank:  # rank 0 adds it
                cut = torch.zeros_like
            elif dim < tensor.dim() and (dim, kind) != (1, "scale"):  # of a whole row's scale nothing is cut
                length, is_kv = part.shape[dim], module == "qkv_proj" and i > 0
                first = rank * whole.num_kv_heads // size * config.head_dim if is_kv else rank * length
                cut = partial(cut_out, dim, first, length)
            cuts[theirs] = tensor.shape, cut

    def own_part(name: str, tensor: Tensor) -> Tensor:
        shape, cut = cuts[name]
        if tensor.shape != shape:
            raise ValueError(f"tensor {name} has shape {list(tensor.shape)}; config.json implies {list(shape)}")
        return cut(tensor)

    return own_part


def cut_out(dim: int, first: int, length: int, tensor: Tensor) -> Tensor:
    """These rows, or columns (dim 1), padded with zeros."""
    first = min(first, tensor.shape[dim])
    part = tensor.narrow(dim, first, min(length, tensor.shape[dim] - first))
    missing = length - part.shape[dim]
    return F.pad(part, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing]) if missing else part
