"""Weights of 4 bits for make_models.py: random matrices in each published format, and back, for the reference.

Those of compressed-tensors are written and read by that package (0.20); `weight_g_idx` was of its older versions, and
is added to what it writes. AWQ and GPTQ follow AutoAWQ's and AutoGPTQ's modules (WQLinear_GEMM, QuantLinear), which are loops over columns.
"""
import re

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationScheme

SHIFTS = 4 * torch.arange(8)
AWQ_COLUMNS = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # of eight, in the order of their bits


def scheme_of(quantization, name):
    """The scheme of a Linear, None for one that stays as it is; the format; whether columns have another order."""
    if name == "lm_head" or name in quantization.get("ignore", []):
        return None, "", False
    groups = quantization["config_groups"].values()
    group = next(group for group in groups for target in group["targets"]
                 if target == "Linear" or re.match(target.removeprefix("re:"), name))
    scheme = QuantizationScheme(targets=group["targets"], weights=group["weights"] | {"actorder": None})
    return scheme, quantization["format"], group["weights"]["actorder"] == "group"


def quantize(quantization, weights):
    """The tensors of a checkpoint, with the layers' matrices in 4 bits."""
    result = {}
    for name, weight in weights.items():
        path = name.removesuffix(".weight")
        if not path.endswith(("_proj")) or weight.dim() != 2 or not name.endswith(".weight"):
            result[name] = weight
            continue
        if quantization["quant_method"] == "compressed-tensors":
            parts = compressed(quantization, path, weight)
        else:
            parts = awq_or_gptq(quantization, weight)
        result |= {f"{path}.{end}": part.contiguous() for end, part in parts.items()}
    return result


def qparams(groups, symmetric):
    """Scales, and integers that stand for 0, of groups [.., columns]: of 16 integers from 0."""
    low, high = groups.amin(-1), groups.amax(-1)
    if symmetric:
        scale = torch.maximum(-low, high) / 7.5
        return scale, torch.full_like(scale, 8)
    scale = (high - low) / 15
    return scale, (-low / scale).round().clamp(0, 15)


def compressed(quantization, path, weight):
    scheme, form, has_order = scheme_of(quantization, path)
    if scheme is None:
        return {"weight": weight}
    args, more = scheme.weights, {}
    order, g_idx = shuffled(weight.shape[1], args.group_size, has_order)
    groups = weight.float()[:, order].unflatten(1, (-1, args.group_size or weight.shape[1]))
    if form == "pack-quantized":
        scale, zero = qparams(groups, args.symmetric)
        scale, more["weight_zero_point"] = scale.to(weight.dtype), (zero - 8).to(torch.int8)
    elif form == "nvfp4-pack-quantized":
        scale = groups.abs().amax(-1) / 6
        more["weight_global_scale"] = 448 / scale.max().reshape(1)
        scale = (scale * more["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    else:
        scale = 2 ** (groups.abs().amax(-1) / 6).log2().ceil()
    parts = {"weight": weight.float(), "weight_scale": scale, **more}
    parts = BaseCompressor.get_value_from_registry(form).compress(parts, scheme)
    if has_order:
        codes = (weight.float() / scale.float()[:, g_idx] + zero[:, g_idx]).round().clamp(0, 15) - 8
        parts |= {"weight_packed": pack_to_int32(codes.to(torch.int8), 4), "weight_g_idx": g_idx.int()}
    return parts


def shuffled(size, group_size, has_order):
    """Columns in the order of their groups, and the group of each column. q, k and v, with the same inputs, have the
    same order."""
    groups = torch.arange(size) // (group_size or size)
    if not has_order:
        return torch.arange(size), groups
    order = torch.randperm(size, generator=torch.Generator().manual_seed(size))
    return order, groups[order.argsort()]


def awq_or_gptq(quantization, weight):
    """AWQ: [in, out / 8] and GPTQ: [in / 8, out], both with scales and zeros [groups, out]."""
    size, is_awq = quantization["group_size"], quantization["quant_method"] == "awq"
    weight, (order, groups) = weight.float(), shuffled(weight.shape[1], size, quantization.get("desc_act", False))
    scale, zero = qparams(weight[:, order].unflatten(1, (-1, size)), quantization.get("sym", False))
    scale = scale.half()
    codes = (weight / scale.float()[:, groups] + zero[:, groups]).round().clamp(0, 15).int()
    if is_awq:
        pack = lambda x: (x.unflatten(1, (-1, 8))[..., AWQ_COLUMNS] << SHIFTS).sum(-1).int()
        return {"qweight": pack(codes.T.contiguous()), "qzeros": pack(zero.T.int().contiguous()), "scales": scale.T}
    stored = zero.int() - int(quantization["checkpoint_format"] == "gptq")
    return {"qweight": (codes.T.unflatten(0, (-1, 8)) << SHIFTS[:, None]).sum(1).int(), "scales": scale.T,
            "qzeros": ((stored.T & 15).unflatten(1, (-1, 8)) << SHIFTS).sum(-1).int(), "g_idx": groups.int()}


def dequantize(quantization, tensors):
    """The tensors, with matrices in float32."""
    parts, result = {}, {}
    for name, tensor in tensors.items():
        owner, _, end = name.rpartition(".")
        if end in ("weight", "bias") or "_proj" not in name:
            result[name] = tensor.float()
        else:
            parts.setdefault(owner, {})[end] = tensor
    for name, one in parts.items():
        if "qweight" not in one:
            result[f"{name}.weight"] = decompressed(quantization, name, one)
            continue
        zeros, scales = (one["qzeros"][..., None] >> SHIFTS) & 15, one["scales"].float()
        if quantization["quant_method"] == "awq":
            codes, zeros = ((one["qweight"][..., None] >> SHIFTS & 15)[..., AWQ_COLUMNS.argsort()].flatten(1),
                            zeros[..., AWQ_COLUMNS.argsort()].flatten(1))
            g_idx = torch.arange(len(codes)) // quantization["group_size"]
        else:
            codes, zeros = ((one["qweight"][:, None] >> SHIFTS[:, None]) & 15).flatten(0, 1), zeros.flatten(1)
            zeros = zeros + int(quantization["checkpoint_format"] == "gptq") & 15
            g_idx = one["g_idx"].long()
        result[f"{name}.weight"] = ((codes - zeros[g_idx]) * scales[g_idx]).T
    return result


def decompressed(quantization, name, parts):
    scheme, form, has_order = scheme_of(quantization, name)
    args, scale, (rows, columns) = scheme.weights, parts["weight_scale"], parts["weight_packed"].shape
    if has_order:
        g_idx = parts["weight_g_idx"].long()
        codes = unpack_from_int32(parts["weight_packed"], 4, parts["weight_shape"])
        zero = unpack_from_int32(parts["weight_zero_point"], 4, scale.shape, packed_dim=0)
        return (codes - zero[:, g_idx]).float() * scale.float()[:, g_idx]
    compressor = BaseCompressor.get_value_from_registry(form)
    theirs = compressor.decompress(parts, scheme)["weight"].float()
    if form == "pack-quantized":
        ours = compressor.decompress(parts | {"weight_scale": scale.float()}, scheme)["weight"]
    else:
        codes = unpack_fp4_from_uint8(parts["weight_packed"], rows, 2 * columns, dtype=torch.float32)
        scale = 2.0 ** (scale.float() - 127) if form == "mxfp4-pack-quantized" else scale.float()
        ours = codes * scale.repeat_interleave(args.group_size, 1) / parts.get("weight_global_scale", 1)
    if not torch.allclose(ours, theirs, rtol=2**-7, atol=1e-6):  # theirs is rounded to bfloat16
        raise ValueError(f"{name}: compressed-tensors has other weights")
    return ours
