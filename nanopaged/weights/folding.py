"""Loading changes some families' tensors, and each change saves the decoder a branch. GPT-2 and Phi-3 store q, k and v
as one matrix, Phi-3 gate and up as another: they are split. Gemma 3 stores a norm's weight minus 1, which is added.
Granite divides the logits: here the last norm's weight is divided.

**Partial rope** (Phi-4-mini): the first numbers of a head rotate, and a pair is number i of their first half and number
i of their second half. The kernels pair the halves of the whole head. Here the rows of q and k change places, which
leaves all products of q and k as they are:

    head_dim 8, of which 6 rotate    stored    a0 a1 a2 b0 b1 b2 c0 d0      pairs (a0, b0) (a1, b1) (a2, b2)
                                     here      a0 a1 a2 c0 b0 b1 b2 d0      the same, and (c0, d0) with the angle 0
"""
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from nanopaged import model
from nanopaged.rope import rotary_dim


def unmerge(tensors: Iterable[tuple[str, Tensor]], config: model.ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The tensors with their names, and the parts of config.merged in place of a merged one."""
    for name, tensor in tensors:
        module = name.split(".")[-2:][0]
        rows, dim = config.merged.get(module, {}), int(config.transposed and tensor.dim() == 2)
        if rows and tensor.shape[dim:dim + 1] == (sum(rows.values()),):
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
