"""A model with its weights, in the memory of a device."""
import math
import os
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from nanopaged import model
from nanopaged.rope import make_rope_table
from nanopaged.weights.folding import fold, unmerge


def build_model(config: model.ModelConfig, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype,
                device: torch.device | str, num_positions: int, modules: model.Modules = model.PLAIN,
                *part: Callable[[str, Tensor], Tensor]) -> model.Transformer:
    """A Transformer with a checkpoint's tensors, for texts of num_positions tokens. Each is copied by itself, so memory
    holds the weights once. ValueError: too little memory, or the arguments of `model.load_weights` do not fit."""
    with torch.device("meta"):  # shapes without memory
        built = model.Transformer(config, modules)
    types = {parameter: torch.float32 if name.endswith(".scale") else parameter.dtype if parameter.itemsize == 1
             else dtype for name, parameter in built.named_parameters()}
    size = sum(parameter.numel() * kind.itemsize for parameter, kind in types.items())
    is_cuda = torch.device(device).type == "cuda"
    free = f"{torch.cuda.mem_get_info(device)[0] / 2**30:.1f} GiB free" if is_cuda else "less free memory"
    try:  # Module.to_empty does the same, but imports sympy for it: a quarter of a second
        if not is_cuda and size > host_memory():
            raise RuntimeError
        built._apply(lambda parameter: torch.empty(parameter.shape, dtype=types[parameter], device=device))
    except RuntimeError:  # torch.OutOfMemoryError is a RuntimeError
        raise ValueError(f"the weights take {size / 2**30:.1f} GiB, and {device} has {free}; "
                         "use a smaller model or dtype") from None
    model.load_weights(built, unmerge(tensors, config), *part)
    for name, parameter in built.named_parameters():
        parameter.data = fold(name, parameter.data, config)
    built.rope_tables = [make_rope_table(rope, config.head_dim, num_positions).to(device) for rope in config.ropes]
    return built.eval().requires_grad_(False)


def host_memory() -> float:
    """Bytes. Linux gives out more memory than it has, and ends the process that writes to it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
