"""Weights of 4 bits: codes, and scales of groups of them.

A code names one of 16 numbers, and a weight is that number times the scale of its group. In **MXFP4**, which gpt-oss's
experts have, the numbers are those of e2m1 (a sign, two bits of exponent, one of mantissa). A group is 32 weights of a
row, and its scale is a power of two, stored as its exponent + 127:

    code      0    1    2    3    4    5    6    7    8 .. 15
    number    0   0.5   1   1.5   2    3    4    6    the same, negative

A matrix [out, in] is `weight` [out, in / 2] and `scale` [out, in / 32], both in bytes: a byte has the codes of two
neighbours in a row, the first one in its low half. A GPU keeps this: the loop of experts_kernel reads codes and scales,
and the compiler turns a tile into 16-bit numbers in registers, in front of the tensor cores. Elsewhere weights become
numbers of the engine's type while they are read (`widen`).
"""
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nanopaged import model
from nanopaged.device.choices import pick_dtype
from nanopaged.features import four_bit_experts

GROUP = 32  # weights that have one scale
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
LEAST_CAPABILITY = {torch.bfloat16: (8, 0), torch.float16: (8, 9)}  # of a GPU for which tl.dot_scaled compiles


def read_form(architecture: Any) -> str:
    """The name of the format. ValueError for a model that may have such matrices elsewhere than gpt-oss has them."""
    if architecture != "GptOssForCausalLM":
        raise ValueError(f"{architecture} in MXFP4 is not supported; of models in 4 bits gpt-oss is")
    return "mxfp4"


def with_four_bits(options: Any, config: model.ModelConfig, modules: model.Modules,
                   device: torch.device) -> model.Modules:
    """The modules, whose experts keep 4 bits where the kernel runs. Elsewhere a line on stderr says what that takes.
    ValueError: `quantization` asks for another type."""
    if options.quantization:
        raise ValueError(f"quantization {options.quantization!r} does not go with a checkpoint in MXFP4; leave it out")
    dtype, c, e = pick_dtype(options.dtype, config.torch_dtype, device), config, config.experts
    least = LEAST_CAPABILITY.get(dtype)
    if least and modules.norm is not model.PLAIN.norm and torch.cuda.get_device_capability(device) >= least:
        return modules._replace(mlp=FourBitMLP)
    size = c.num_layers * e["count"] * 3 * c.hidden_size * e["size"] / 2**30
    print(f"experts in MXFP4 are converted to {str(dtype).removeprefix('torch.')}: {size * dtype.itemsize:.1f} GiB "
          f"instead of {size * 17 / 32:.1f} (they keep 4 bits in bfloat16 on a GPU of compute capability 8.0 or more, "
          "without enforce_eager)", file=sys.stderr)
    return modules


# --------------------------------------------------------------------------------------------------
# Reading a checkpoint
# --------------------------------------------------------------------------------------------------

def read_weights(tensors: Iterable[tuple[str, Tensor]], keep: bool,
                 device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with a matrix in place of its blocks [out, groups, 16] and scales [out, groups]: in 4 bits if
    `keep`, else in float32. Ordinary matrices of experts are cut to 4 bits if `keep`. The first of two tensors waits
    for the other one, as a view of its mapped file. ValueError: the other one does not come, or does not fit."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        owner, _, kind = name.rpartition("_")
        if kind in ("blocks", "scales"):
            waiting.setdefault(owner, {})[kind] = tensor
            if len(waiting[owner]) == 2:
                pair = waiting.pop(owner)
                if pair["blocks"].shape != (*pair["scales"].shape, GROUP // 2):
                    raise ValueError(f"{owner} has blocks of the shape {list(pair['blocks'].shape)} and scales "
                                     f"{list(pair['scales'].shape)}; MXFP4 has [.., groups, 16] and [.., groups]")
                weight, scale = pair["blocks"].to(device).flatten(-2), pair["scales"].to(device)
                yield from as_tensors(owner, weight, scale) if keep else [(owner, widen(weight, scale))]
        elif keep and ".experts." in name and tensor.dim() == 2:
            yield from as_tensors(name, *cut(tensor.to(device)))
        else:
            yield name, tensor
    if waiting:
        owner, pair = waiting.popitem()
        given, absent = ("blocks", "scales") if "blocks" in pair else ("scales", "blocks")
        raise ValueError(f"the checkpoint has {owner}_{given} and lacks {owner}_{absent}; fetch it again")


def as_tensors(name: str, weight: Tensor, scale: Tensor) -> list[tuple[str, Tensor]]:
    weight, scale = four_bit_experts.order(weight, scale)
    return [(name, weight), (name.removesuffix("weight") + "scale", scale)]


def widen(weight: Tensor, scale: Tensor) -> Tensor:
    """The matrix in float32, [.., in]."""
    numbers = torch.tensor(E2M1 + [-number for number in E2M1], device=weight.device)
    codes = torch.stack([weight & 15, weight >> 4], -1).flatten(-2).long()
    return torch.ldexp(numbers[codes].unflatten(-1, (-1, GROUP)), scale.int()[..., None] - 127).flatten(-2)


def cut(x: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [.., in] in 4 bits, its numbers rounded to nearest: weight and scale."""
    groups, numbers = x.float().unflatten(-1, (-1, GROUP)), torch.tensor(E2M1, device=x.device)
    exponent = torch.frexp(groups.abs().amax(-1, keepdim=True))[1] - 3  # with it the largest is at least 4
    codes = torch.bucketize(torch.ldexp(groups.abs(), -exponent), (numbers[1:] + numbers[:-1]) / 2)
    low, high = (codes + 8 * (groups < 0)).byte().flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4, (exponent[..., 0] + 127).clamp(0, 254).byte()


# --------------------------------------------------------------------------------------------------
# On a GPU
# --------------------------------------------------------------------------------------------------

class FourBitLinear(nn.Module):
    """Where a matrix is. four_bit_experts.py computes the products."""

    def __init__(self, size_in: int, size_out: int, bias: bool) -> None:
        super().__init__()
        size = -(-size_in // 64) * 64
        self.weight, self.scale = (nn.Parameter(torch.empty(size_out, size, dtype=torch.uint8), requires_grad=False)
                                   for size in (size // 2, size // GROUP))
        self.bias = nn.Parameter(torch.empty(size_out)) if bias else None


class FourBitMLP(model.MLP):
    """An expert."""
    four_bits = four_bit_experts

    def __init__(self, config: model.ModelConfig, index: int, modules: model.Modules) -> None:
        super().__init__(config, index, modules._replace(linear=FourBitLinear, residual_linear=FourBitLinear))
