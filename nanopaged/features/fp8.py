"""Weights in FP8 (e4m3): 8 bits each, and a scale by which they were divided.

A checkpoint stores beside a matrix the scale by which it was divided, named like the weight with "_scale" or
"_scale_inv" at the end. Despite the second name both multiply: weight = stored * scale. The tensors' types tell which
weights are FP8, so config.json's lists of layers are not read. Nor are the scales of activations (input_scale,
activation_scale): activations have the engine's type, or 8 bits with a scale for each token.

On a card with 8-bit products (`keeps_8_bits`) matrices keep their 8 bits, and the tensor `scale` [out, 1] has a row
for each row of the weight: both are merged, and split over GPUs, by the same rows. Where blocks of 128 x 128 have
scales, four_bits.py keeps the bits, on one GPU (`keeps_blocks`). Elsewhere, and in embeddings and lm_head, each weight
is multiplied by its scale while it is read.
"""
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanopaged import kernel, model, tiles
from nanopaged.device.choices import pick_dtype
from nanopaged.device.pool import FP8
from nanopaged.optional_triton import jit, launch_options, tl, triton
from nanopaged.options import default_feature
from nanopaged.tiles import cdiv
from nanopaged.weights.build import PREFIXES, modules_for
from nanopaged.weights.checkpoint import read_tensors

ALIGNMENT = 16  # of the sizes of 8-bit products, in numbers
LARGEST, SMALLEST = 448, 1e-30  # of FP8's numbers; a row's largest number counts at least so much, for rows of zeros
# Of the decoder: a vision tower has layers, too. Routers of experts and convolutions, which are small, keep their type.
SMALL = r"gate|shared_expert_gate|router(\.layer)?|conv1d|conv\.conv"
IN_A_LAYER = re.compile(rf"{PREFIXES}layers\.\d+\.(?!(.*\.)?({SMALL})\.).*\.weight$")
BLOCK = [128, 128]  # rows and columns that share a scale, in all published checkpoints that have blocks
FORMATS = ("fp8", None), ("compressed-tensors", "float-quantized"), ("compressed-tensors", "naive-quantized")


def read_form(quantization: Any) -> str:
    """What a config.json's quantization_config has a scale for, a "channel" (or all of them) or a "block". ValueError
    if it says anything else than what `read_weights` reads."""
    given = quantization if isinstance(quantization, dict) else {"quant_method": quantization}
    try:
        strategies = [given.get("weight_block_size") and "block"]
        is_fp8 = ((given["quant_method"], given.get("format")) in FORMATS and given.get("fmt", "e4m3") == "e4m3"
                  and given.get("weight_block_size") in (None, BLOCK) and not given.get("transform_config"))
        for weights in [group["weights"] for group in given.get("config_groups", {}).values()]:
            is_fp8 &= (weights["num_bits"], weights["type"]) == (8, "float")
            is_fp8 &= weights["strategy"] in ("tensor", "channel", "block")
            is_fp8 &= weights.get("block_structure") in (None, BLOCK, "128x128")  # older ones have a string
            strategies.append(weights["strategy"])
    except (AttributeError, KeyError, TypeError):  # config.json may hold anything
        is_fp8 = False
    if not is_fp8:
        words = " ".join(str(given[key]).upper() for key in ("quant_method", "format", "fmt") if given.get(key))
        raise ValueError(f"the checkpoint is quantised with {words or 'an unnamed method':.80}; use one with float32, "
                         "float16 or bfloat16 weights, with weights in 4 bits (AWQ, GPTQ, NVFP4, compressed-tensors' "
                         "pack-quantized), or with FP8 weights (e4m3, a scale for each tensor, channel or "
                         "block of 128 x 128; quant_method 'fp8', or 'compressed-tensors' with 'float-quantized')")
    return "block" if "block" in strategies else "channel"


def keeps_blocks(options: Any, config: model.ModelConfig, devices: list[torch.device]) -> bool:
    """Whether four_bits.py reads the checkpoint, and matrices in blocks stay as they are stored."""
    is_able = config.fp8 == "block" and not options.quantization and options.tensor_parallel_size == 1
    four_bits = is_able and default_feature("four_bits", "a matrix in FP8 blocks, which is converted,")
    return bool(four_bits) and all(map(four_bits.has_products, devices))


def keeps_8_bits(quantization: str | None, dtype: str, config: model.ModelConfig, devices: list[torch.device],
                 num_ranks: int) -> bool:
    """Whether matrices are kept in FP8, with a scale for each channel, and not in the engine's type, which a warning
    or a line on stderr explains. ValueError: the GPUs of one model cannot share matrices in FP8."""
    if config.fp8 == "block" and not quantization:
        kind, size = pick_dtype(dtype, config.torch_dtype, devices[0]), matrices_size(config) / 2**30
        print(f"weights in FP8 blocks of 128 x 128 are converted to {str(kind).removeprefix('torch.')}: "
              f"{size * kind.itemsize:.1f} GiB instead of {size:.1f} (they keep 8 bits on a GPU with Triton, without "
              "tensor_parallel_size; quantization='fp8' cuts them again, with a scale for each channel)",
              file=sys.stderr)
        return False
    c, is_able = config, all(map(has_fp8_products, devices))
    if num_ranks > 1:
        from nanopaged.features.tensor_parallel.split import split_config
        c = split_config(config, num_ranks)
    sizes = c.intermediate_size, c.experts.get("size", 0), c.experts.get("shared_size", 0)
    sizes = *sizes, *(sum(parts.values()) for module, parts in c.parts.items() if module != "router")
    wrong = [size for size in (c.hidden_size, c.num_heads * c.head_dim, *sizes) if size % ALIGNMENT]
    if is_able and not (wrong or c.head_dim * 2 % ALIGNMENT or c.transposed):
        return True
    if is_able and wrong and num_ranks > 1:
        raise ValueError(f"tensor_parallel_size {num_ranks} cuts matrices in FP8 into parts of {wrong[0]} columns, and "
                         f"parts must be multiples of {ALIGNMENT}; use data_parallel_size, or one GPU")
    warnings.warn(("FP8 weights are turned into the engine's type while they load, which takes 2 or 4 times the memory"
                   if config.fp8 else "quantization 'fp8' has no effect, and weights keep the engine's type") + (
        ": the model has matrices that 8-bit products cannot have" if is_able else
        ": products of 8 bits need Triton and a GPU of Nvidia of compute capability 8.9 or more"))
    return False


def has_fp8_products(device: torch.device) -> bool:
    """From Ada on. AMD's device type is "cuda", too, but torch.version.cuda is None there."""
    return (device.type == "cuda" and bool(torch.version.cuda) and triton is not None
            and torch.cuda.get_device_capability(device) >= (8, 9))


def matrices_size(config: model.ModelConfig) -> int:
    """How many numbers the layers' matrices have."""
    with torch.device("meta"):
        layers = model.Transformer(config, modules_for(config)).layers
    return sum(parameter.numel() for parameter in layers.parameters() if parameter.dim() == 2)


def read_weights(path: Path, form: str | None, keep: bool = False,
                 device: torch.device | str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """`read_tensors`, with FP8 weights times their scales in float32, which the device computes. form: what `read_form`
    says; None: config.json does not say FP8. keep: matrices stay in 8 bits, each with its scale [out, 1] as a tensor
    behind it, but not where blocks have scales

    A weight and its scale come in any order, and may be in different shards. The first one waits for the other as a
    view of its mapped file, so the system can take back the memory of all that wait. Iterating raises ValueError for a
    scale that is missing or impossible, and for tensors that are not what config.json says. A warning at the end names
    matrices that are not stored in FP8, and that `in_fp8` will cut."""
    waiting: dict[str, dict[str, Tensor]] = {}  # the weight's name -> "weight" or "scale" -> tensor
    found, ordinary = False, list[str]()
    for name, tensor in read_tensors(path):
        owner = name.removesuffix("_inv").removesuffix("_scale") if "weight_scale" in name else name
        kind = "weight" if owner == name else "scale"
        if kind == "weight" and not (tensor.is_floating_point() and tensor.itemsize == 1):
            ordinary += [name] * is_ordinary(name, tensor)
            yield name, tensor
            continue
        if kind == "weight" and not (form and tensor.dtype == torch.float8_e4m3fn and tensor.dim() == 2):
            raise ValueError(f"tensor {name} {list(tensor.shape)} has the type {tensor.dtype}; of 8-bit numbers only "
                             "matrices of float8_e4m3fn can be read, with a quantization_config in config.json")
        waiting.setdefault(owner, {})[kind] = tensor
        if len(waiting[owner]) == 2:
            found, pair = True, waiting.pop(owner)
            if keep and form != "block" and IN_A_LAYER.match(owner):
                yield from as_tensors(owner, pair["weight"], scale_of_rows(owner, **pair))
            else:
                yield owner, multiply(owner, pair["weight"].to(device), pair["scale"])
    if form and waiting:
        name, pair = waiting.popitem()
        given, absent = ("a scale", "FP8 numbers") if "scale" in pair else ("FP8 numbers", f"a scale ({name}_scale)")
        raise ValueError(f"tensor {name} has {given} and lacks {absent}; fetch the checkpoint again, or use another")
    if form and not found:
        raise ValueError("config.json says that weights are FP8, and no tensor is; if they are ordinary weights, pass "
                         "hf_overrides={'quantization_config': None}, or delete that entry of config.json")
    if form and keep and ordinary:
        warnings.warn(f"{len(ordinary)} matrices of the FP8 checkpoint are stored in 16 or 32 bits and are cut to FP8, "
                      f"the first being {ordinary[0]}")


def scale_of_rows(name: str, weight: Tensor, scale: Tensor) -> Tensor:
    """The stored scale in float32, with a row for each of the weight's: [out, 1], or for blocks [out, cdiv(in, 128)].
    ValueError: it is impossible."""
    rows, grid = len(weight), [cdiv(*sizes) for sizes in zip(weight.shape, BLOCK)]
    if list(scale.shape) not in ([], [1], [1, 1], [rows], [rows, 1], grid) or not scale.is_floating_point():
        raise ValueError(f"the scale of {name} has the type {scale.dtype} and the shape {list(scale.shape)}; a weight "
                         f"{list(weight.shape)} needs floating-point numbers of the shape [1], [{rows}, 1] (a number "
                         f"for each row) or {grid} (for each block of 128 x 128)")
    scale = scale.float()
    if not (scale.isfinite() & (scale > 0)).all():
        raise ValueError(f"the scale of {name} has numbers that are not above 0, or not finite; fetch the checkpoint "
                         "again, or use another")
    return (scale.repeat_interleave(BLOCK[0], 0)[:rows] if list(scale.shape) == grid else
            scale.reshape(-1, 1).expand(rows, 1))


def multiply(name: str, weight: Tensor, scale: Tensor) -> Tensor:
    """The stored weight [out, in] times its scale, in float32."""
    product, scale = weight.float(), scale_of_rows(name, weight, scale).to(weight.device)
    for i, part in enumerate(product.split(BLOCK[1], 1)):
        part *= scale[:, i % scale.shape[1], None]
    return product


def as_tensors(name: str, weight: Tensor, scale: Tensor) -> list[tuple[str, Tensor]]:
    return [(name, weight), (name.removesuffix("weight") + "scale", scale)]


def in_fp8(tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The tensors; ordinary matrices are cut to 8 bits on the device."""
    for name, tensor in tensors:
        if is_ordinary(name, tensor):
            yield from as_tensors(name, *quantize(tensor.to(device)))
        else:
            yield name, tensor


def is_ordinary(name: str, tensor: Tensor) -> bool:
    is_matrix = tensor.dim() in (2, 3) and tensor.is_floating_point() and tensor.itemsize > 1
    return is_matrix and bool(IN_A_LAYER.match(name))


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [.., size] as FP8 numbers and their scale [.., 1], with which the largest number of a row becomes 448."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=SMALLEST) / LARGEST
    return (x / scale).to(FP8), scale


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize` of a matrix in one launch."""
    (num_rows, size), padded = x.shape, tiles.next_power_of_2(x.shape[1])
    out, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(num_rows, 1, dtype=torch.float32)
    quantize_rows_kernel[(num_rows,)](x, out, scale, SIZE=size, PADDED=padded, num_warps=min(16, max(4, padded // 512)),
                                      **launch_options(x.device))
    return out, scale


def kernel_forms(r: Any) -> Iterator[Callable[[], Any]]:
    """For warmup.py."""
    c = r.config
    for size in {c.hidden_size, c.num_heads * c.head_dim, c.intermediate_size}:
        yield partial(quantize_rows, torch.empty(0, size, dtype=r.dtype, device=r.device))


@jit
def quantize_rows_kernel(x, out, scale, SIZE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr):
    """Grid (row,)."""
    i, row = tl.arange(0, PADDED), tl.program_id(0).to(tl.int64)
    kernel.wait_for_previous_kernel(PDL)
    numbers = tl.load(x + row * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    factor = tl.maximum(tl.max(tl.abs(numbers), 0), 1e-30) / 448.0
    tl.store(scale + row, factor)
    tl.store(out + row * SIZE + i, (numbers / factor).to(out.dtype.element_ty), mask=i < SIZE)
