"""FP8 checkpoints: each weight is multiplied by its scale while it is read, and is an ordinary one from then on.

A checkpoint stores beside a matrix the scale by which it was divided, named like the weight with "_scale" or
"_scale_inv" at the end. Despite the second name both multiply: weight = stored * scale. The tensors' types tell which
weights are FP8, so config.json's lists of layers are not read. Nor are the scales of activations (input_scale,
activation_scale), because activations keep the engine's type.
"""
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanopaged.tiles import cdiv
from nanopaged.weights.checkpoint import read_tensors

BLOCK = [128, 128]  # rows and columns that share a scale, in all published checkpoints that have blocks
FORMATS = ("fp8", None), ("compressed-tensors", "float-quantized"), ("compressed-tensors", "naive-quantized")


def require_fp8(quantization: Any) -> None:
    """Raise ValueError if a config.json's quantization_config says anything else than what `read_weights` reads."""
    given = quantization if isinstance(quantization, dict) else {"quant_method": quantization}
    try:
        is_fp8 = ((given["quant_method"], given.get("format")) in FORMATS and given.get("fmt", "e4m3") == "e4m3"
                  and given.get("weight_block_size") in (None, BLOCK) and not given.get("transform_config"))
        for weights in [group["weights"] for group in given.get("config_groups", {}).values()]:
            is_fp8 &= (weights["num_bits"], weights["type"]) == (8, "float")
            is_fp8 &= weights["strategy"] in ("tensor", "channel", "block")
            is_fp8 &= weights.get("block_structure") in (None, BLOCK)
    except (AttributeError, KeyError, TypeError):  # config.json may hold anything
        is_fp8 = False
    if not is_fp8:
        words = " ".join(str(given[key]).upper() for key in ("quant_method", "format", "fmt") if given.get(key))
        raise ValueError(f"the checkpoint is quantised with {words or 'an unnamed method':.80}; use one with float32, "
                         "float16 or bfloat16 weights, or with FP8 weights (e4m3, a scale for each tensor, channel or "
                         "block of 128 x 128; quant_method 'fp8', or 'compressed-tensors' with 'float-quantized')")


def read_weights(path: Path, is_fp8: bool) -> Iterator[tuple[str, Tensor]]:
    """`read_tensors`, with FP8 weights times their scales in float32. is_fp8: whether config.json says FP8.

    A weight and its scale come in any order, and may be in different shards. The first one waits for the other as a
    view of its mapped file, so the system can take back the memory of all that wait. Iterating raises ValueError for a
    scale that is missing or impossible, and for tensors that are not what config.json says."""
    waiting: dict[str, dict[str, Tensor]] = {}  # the weight's name -> "weight" or "scale" -> tensor
    found = False
    for name, tensor in read_tensors(path):
        owner = name.removesuffix("_inv").removesuffix("_scale") if "weight_scale" in name else name
        kind = "weight" if owner == name else "scale"
        if kind == "weight" and not (tensor.is_floating_point() and tensor.itemsize == 1):
            yield name, tensor
            continue
        if kind == "weight" and not (is_fp8 and tensor.dtype == torch.float8_e4m3fn and tensor.dim() == 2):
            raise ValueError(f"tensor {name} {list(tensor.shape)} has the type {tensor.dtype}; of 8-bit numbers only "
                             "matrices of float8_e4m3fn can be read, with a quantization_config in config.json")
        waiting.setdefault(owner, {})[kind] = tensor
        if len(waiting[owner]) == 2:
            found = True
            yield owner, multiply(owner, **waiting.pop(owner))
    if is_fp8 and waiting:
        name, pair = waiting.popitem()
        given, absent = ("a scale", "FP8 numbers") if "scale" in pair else ("FP8 numbers", f"a scale ({name}_scale)")
        raise ValueError(f"tensor {name} has {given} and lacks {absent}; fetch the checkpoint again, or use another")
    if is_fp8 and not found:
        raise ValueError("config.json says that weights are FP8, and no tensor is; if they are ordinary weights, pass "
                         "hf_overrides={'quantization_config': None}, or delete that entry of config.json")


def multiply(name: str, weight: Tensor, scale: Tensor) -> Tensor:
    """The stored weight [out, in] times its scale, in float32. ValueError: the scale is impossible."""
    rows, grid = len(weight), [cdiv(*sizes) for sizes in zip(weight.shape, BLOCK)]
    if list(scale.shape) not in ([], [1], [1, 1], [rows], [rows, 1], grid) or not scale.is_floating_point():
        raise ValueError(f"the scale of {name} has the type {scale.dtype} and the shape {list(scale.shape)}; a weight "
                         f"{list(weight.shape)} needs floating-point numbers of the shape [1], [{rows}, 1] (a number "
                         f"for each row) or {grid} (for each block of 128 x 128)")
    product, scale = weight.float(), scale.float()
    if not (scale.isfinite() & (scale > 0)).all():
        raise ValueError(f"the scale of {name} has numbers that are not above 0, or not finite; fetch the checkpoint "
                         "again, or use another")
    if list(scale.shape) != grid:
        return product.mul_(scale.reshape(-1, 1))
    for part, row in zip(product.split(BLOCK[0]), scale.repeat_interleave(BLOCK[1], 1)[:, :weight.shape[1]]):
        part *= row
    return product
