"""Weights of 4 bits: codes, and scales of groups of them.

A code names one of 16 numbers, and a weight is that number times the scale of its group: neighbours in a row.
Checkpoints have this in many formats, and all become one layout while they are read. A matrix [out, in] is

    weight      [out, in / 2], bytes     the codes of two neighbours in a row, the first one in the low half; a GPU
                                         has them in another order (four_bit_codes.py)
    scale       [out, groups]            in its stored type, which tells what the codes are:
                  bytes                  MXFP4: e2m1, in groups of 32; a power of two, stored as its exponent + 127
                  e4m3                   NVFP4: e2m1, in groups of 16
                  16 or 32 bits          an integer: the code minus 8, or minus the group's zero
    zero        [out, groups], bytes     of asymmetric integers
    row_scale   [out, 1], float32        of NVFP4: the stored matrix's global scale, which each row of a merged matrix
                                         has for itself
    order       [in]                     with act-order (GPTQ, compressed-tensors) columns are sorted by group while
                                         they are read, and a product first brings x into the same order

    e2m1    code      0    1    2    3    4    5    6    7    8 .. 15
            number    0   0.5   1   1.5   2    3    4    6    the same, negative

A GPU keeps this, and four_bit_kernels.py computes the products. Elsewhere weights become numbers of the engine's type
while they are read (`widen`). The tensors themselves tell which matrices have 4 bits, and how large groups are, so
config.json's lists of layers are not read. Activations keep the engine's type.

Matrices in FP8 with scales of blocks of 128 x 128 go the same way: weight [out, in] e4m3, and scale [out, in / 128]
float32. The scale of a block is repeated for each of its rows, so matrices of any height can be merged. (fp8.py)
"""
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanopaged import model
from nanopaged.device.choices import pick_dtype
from nanopaged.device.pool import FP8
from nanopaged.features.four_bit_codes import TILE, Form, kept
from nanopaged.features.four_bit_experts import PRODUCTS
from nanopaged.features.four_bit_kernels import MLP4, ExpertsMLP4, Linear4, SplitLinear4, num_parts
from nanopaged.optional_triton import triton
from nanopaged.options import feature
from nanopaged.tiles import cdiv
from nanopaged.weights.build import PREFIXES, checkpoint_tensors, modules_for, unmerge
from nanopaged.weights.checkpoint import read_tensors

GROUP = 32  # weights of MXFP4 that have one scale
CUT_GROUPS = 128, 64, 32  # of quantization="int4": the first one that divides a row
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where 32 bits of AWQ have columns 0 to 7
EIGHTS = {"awq": -0x77777778, "gptq": 0x77777777, "gptq_v2": -0x77777778}  # eight zeros of symmetric integers
LEAST_CAPABILITY = {torch.bfloat16: (8, 0), torch.float16: (8, 0)}  # of a GPU, for experts
PACKED = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"  # formats of compressed-tensors
CODES = "weight_packed", "qweight", "weight"  # ends of tensors' names; and of those beside them
BESIDE = ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale", "weight_scale_2",
          "qzeros", "scales", "g_idx")
ROW_SCALES = {"nvfp4": ["weight_scale_2"], "nvfp4-pack-quantized": ["weight_global_scale"]}
SCALES = {torch.int32: [torch.float16, torch.bfloat16, torch.float32],  # by the type in which codes are stored
          torch.uint8: [torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn]}
Parts = dict[str, Tensor]  # a matrix as it is stored: the end of a name -> tensor


def read_form(architecture: Any, given: dict[str, Any]) -> str:
    """The name of the format in a config.json's quantization_config. ValueError for one that is not read here, and for
    MXFP4 as gpt-oss has it in another model."""
    method = given["quant_method"]
    if method == "mxfp4":
        if architecture != "GptOssForCausalLM":
            raise ValueError(f"{architecture} in MXFP4 is not supported; gpt-oss is, and others in "
                             "compressed-tensors' mxfp4-pack-quantized")
        return "mxfp4"
    try:
        form = {"awq": given.get("version", "gemm"), "gptq": given.get("checkpoint_format", "gptq"),
                "modelopt": given.get("quant_algo")}.get(method, given.get("format"))
        groups = given.get("config_groups", {}).values() if method == "compressed-tensors" else []
        bits = {group["weights"]["num_bits"] for group in groups} or {given.get("bits", given.get("w_bit"))}
        bits = {4} if str(form).lower() == "nvfp4" else bits
        known = dict(awq=["gemm"], gptq=["gptq", "gptq_v2"], modelopt=["nvfp4"]).get(method, PACKED)
        is_read = bits == {4} and str(form).lower() in known and not given.get("transform_config")
    except (AttributeError, KeyError, TypeError):  # config.json may hold anything
        form, bits, is_read = None, {"?"}, False
    if not is_read:
        raise ValueError(f"the checkpoint is quantised with {method.upper()} {str(form or '').upper()}, weights in "
                         f"{', '.join(map(str, bits))} bits; of weights in few bits those in 4 can be read, in AWQ "
                         f"(gemm), GPTQ (gptq, gptq_v2), modelopt (NVFP4) and compressed-tensors ({', '.join(PACKED)}, "
                         "without a transform_config)")
    return "awq" if method == "awq" else str(form).lower()


def with_four_bits(options: Any, config: model.ModelConfig, modules: model.Modules, device: torch.device,
                   path: Path) -> model.Modules:
    """The modules, whose matrices keep 4 bits where the kernels run. Elsewhere a line on stderr says what that takes.
    path: of the checkpoint. ValueError: the options do not go with 4 bits, or what `Plan` raises."""
    form = config.four_bits or (config.fp8 and "FP8")
    if options.quantization and form:
        raise ValueError(f"quantization {options.quantization!r} does not go with a checkpoint in {form.upper()}; "
                         "leave it out")
    dtype, c, e = pick_dtype(options.dtype, config.torch_dtype, device), config, config.experts
    kind, is_fast = str(dtype).removeprefix("torch."), modules.norm is not model.PLAIN.norm
    keeps_experts = is_fast and can_keep_experts(dtype, device)
    if form == "mxfp4":
        if keeps_experts:
            return modules._replace(mlp=FourBitMLP)
        size = c.num_layers * e["count"] * 3 * c.hidden_size * e["size"] / 2**30
        print(f"experts in MXFP4 are converted to {kind}: {size * dtype.itemsize:.1f} GiB instead of "
              f"{size * 17 / 32:.1f} (they keep 4 bits in 16-bit types on a GPU of compute capability 8.0 or more, "
              "without enforce_eager)", file=sys.stderr)
        return modules
    if options.tensor_parallel_size > 1:
        raise ValueError("matrices in 4 bits cannot be cut into the parts of several GPUs; leave out "
                         "tensor_parallel_size (data_parallel_size is possible)")
    plan = Plan(config, path if form and options.load_format != "dummy" else None, has_products(device), keeps_experts)
    plan.tell(kind, dtype.itemsize)
    split, mlp = (SplitLinear4, MLP4) if is_fast else (Linear4, modules.mlp)
    mlp = ExpertsMLP4 if any(".experts." in path for path, form in plan.forms.items() if form) else mlp
    return modules._replace(linear=Maker(plan, modules.linear, Linear4, device), mlp=mlp,
                            residual_linear=Maker(plan, modules.residual_linear, split, device))


def has_products(device: torch.device) -> bool:
    return device.type == "cuda" and triton is not None


def can_keep_experts(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether experts can keep 4 bits (four_bit_experts.py)."""
    least = LEAST_CAPABILITY.get(dtype)
    return bool(least) and torch.cuda.get_device_capability(device) >= least


# --------------------------------------------------------------------------------------------------
# Which matrices keep 4 bits
# --------------------------------------------------------------------------------------------------

class Matrix(NamedTuple):
    """Of a checkpoint."""
    size_out: int
    size_in: int
    form: Form


class Plan:
    """What becomes of each matrix in the layers. path: of a checkpoint in 4 bits; None: ordinary matrices are cut.
    is_able: the device keeps 4 bits; keeps_experts: experts do, too. ValueError: a matrix is not what its format
    says."""

    def __init__(self, config: model.ModelConfig, path: Path | None, is_able: bool, keeps_experts: bool) -> None:
        if config.transposed:
            raise ValueError("a model whose matrices are stored as [in, out] (GPT-2) is not supported in 4 bits")
        self.config, self.is_cut, self.linears = config, path is None, list[model.Linear]()
        self.codes = FP8 if config.four_bits == "fp8" else torch.uint8
        self.residual = list[bool]()  # whether a Linear's result is added to the residual stream
        plain = model.PLAIN._replace(linear=self.record, residual_linear=partial(self.record, residual=True))
        with torch.device("meta"):
            whole = model.Transformer(config, modules_for(config, plain))
        names = {id(module): name for name, module in whole.named_modules()}
        self.paths = [names.get(id(linear), "") for linear in self.linears]  # "": the model replaced the Linear
        self.next_path = itertools.cycle(self.paths)  # a Transformer makes its Linears in this order
        parts = {path: [bare(part) for part in checkpoint_tensors(f"{path}.weight", linear.weight, config)]
                 for path, linear in zip(self.paths, self.linears) if path}
        there = {bare(theirs) for name, one in whole.named_parameters() for theirs in checkpoint_tensors(
            name, one, config)} | {"lm_head"}  # and no vision tower, or layers that predict several tokens
        self.stored, self.others = read_stored(path, self.codes, there) if path else ({}, [])
        self.matrices = {name: describe(name, one, config.four_bits) for name, one in self.stored.items()}
        self.origins = {bare(part): name for name, one in self.matrices.items() for part, _ in unmerge(
            [(f"{name}.weight", torch.empty(one[:2], device="meta"))], config)}  # a part -> the matrix that it is in
        used = {origin for part, origin in self.origins.items() if part in there}
        self.stored, self.matrices = ({name: one for name, one in of.items() if name in used} for of in (
            self.stored, self.matrices))
        for path, linear in zip(self.paths, self.linears) if self.is_cut else ():
            if not path:
                continue
            size_out, size_in = linear.weight.shape
            group = next((group for group in CUT_GROUPS if not size_in % group), None)
            if group or self.codes is FP8:
                form = fp8_form(size_in) if self.codes is FP8 else Form(torch.float16, size_in // group)
                self.matrices[path] = Matrix(size_out, size_in, form)
                self.origins.update(dict.fromkeys(parts[path], path))
        self.forms = {path: self.common_form(names) if is_able else None for path, names in parts.items()}
        experts = [path for path in self.paths if ".experts." in path]
        first = {re.sub(r"experts\.\d+", "", path): self.forms[path] for path in reversed(experts)}  # of a layer
        if not keeps_experts or not all((form := self.forms[path]) and form.order is None
                                        and form == first[re.sub(r"experts\.\d+", "", path)] for path in experts):
            self.forms.update(dict.fromkeys(experts))
        self.kept = {self.origins[part] for path, form in self.forms.items() if form for part in parts[path]}

    def record(self, size_in: int, size_out: int, bias: bool, residual: bool = False) -> model.Linear:
        self.linears.append(model.Linear(size_in, size_out, bias))
        self.residual.append(residual)
        return self.linears[-1]

    def common_form(self, parts: list[str]) -> Form | None:
        """Of the parts of a merged matrix. None: one of them has not 4 bits, or has them in another form."""
        forms = [self.matrices[self.origins[part]].form if part in self.origins else None for part in parts]
        first, *others = ((form and form[:-1], form and form.order is not None and form.order.tolist())
                          for form in forms)
        return forms[0] if all(other == first for other in others) else None

    def shapes(self) -> set[tuple]:
        """Of what is kept, but by experts, each once: (rows, columns, whether there is a bias, form, whether the result
        is added to the residual stream, whether it is an MLP's first product)."""
        return {(*linear.weight.shape, linear.bias is not None, self.forms[path]._replace(order=None), residual,
                 path.endswith("gate_up_proj"))
                for path, linear, residual in zip(self.paths, self.linears, self.residual)
                if self.forms.get(path) and ".experts." not in path}

    def tell(self, kind: str, itemsize: int) -> None:
        """Lines on stderr: how matrices are cut, and which ones do not keep 4 bits."""
        if self.is_cut and not self.matrices:
            raise ValueError(f"quantization 'int4' cuts rows in groups of {CUT_GROUPS[-1]} numbers or more, and no "
                             "matrix of this model has such rows; leave it out")
        if self.is_cut and self.codes is not FP8:
            groups = sorted({one.size_in // one.form.num_groups for one in self.matrices.values()})
            print(f"matrices of the layers are cut to 4 bits, in groups of {' and '.join(map(str, groups))}; "
                  f"embeddings, lm_head{', router' * bool(self.config.experts)} are not", file=sys.stderr)
        if wide := {name: one for name, one in self.matrices.items() if name not in self.kept}:
            numbers = sum(one.size_out * one.size_in for one in wide.values())
            size = sum(one.size_out * one.form.num_groups * one.form.scale.itemsize for one in wide.values())
            bits = 8 if self.codes is FP8 else 4
            print(f"{len(wide)} matrices in {bits} bits are converted to {kind}, the first being {min(wide)}: "
                  f"{numbers * itemsize / 2**30:.1f} GiB instead of {(numbers * bits / 8 + size) / 2**30:.1f} (a GPU "
                  f"with Triton keeps {bits} bits, of experts in 16-bit types without enforce_eager; matrices that are "
                  "merged, such as q, k and v, must have one format, and so must a layer's experts, without act-order)",
                  file=sys.stderr)

    def read(self, tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """The model's tensors. tensors: ordinary ones, which are cut if nothing is stored"""
        for name, tensor in unmerge(tensors, self.config) if self.is_cut else self.others:
            origin = self.origins.get(bare(name)) if self.is_cut and name.endswith(".weight") else None
            if origin:
                one = self.matrices[origin]
                if self.codes is FP8:
                    weight, scale = feature("fp8", "a model in FP8").quantize(tensor.to(device))
                    parts = weight, scale.expand(-1, one.form.num_groups)
                else:
                    parts = cut_int4(tensor.to(device), one.size_in // one.form.num_groups)
                yield from self.given(name, origin, dict(zip(("weight", "scale"), parts)))
            else:
                yield name, tensor
        for name, parts in self.stored.items():
            parts = {end: part.to(device) for end, part in parts.items()}
            if self.codes is FP8:
                scale = feature("fp8", "a checkpoint in FP8").scale_of_rows(f"{name}.weight", parts["weight"],
                                                                            parts["weight_scale"])
                parts = dict(weight=parts["weight"], scale=scale.expand(-1, self.matrices[name].form.num_groups))
            else:
                parts = turn(parts, self.matrices[name].form, self.config.four_bits)
            yield from self.given(f"{name}.weight", name, parts)
        self.stored, self.others = {}, []  # or files stay mapped

    def given(self, name: str, origin: str, parts: Parts) -> Iterator[tuple[str, Tensor]]:
        """A matrix in our layout as tensors of the model."""
        if origin in self.kept:
            parts["weight"], parts["scale"] = kept(parts["weight"], parts["scale"])
            yield from ((name.removesuffix("weight") + kind, part) for kind, part in parts.items())
        else:
            wide, order = widen(**parts), self.matrices[origin].form.order
            yield name, wide if order is None else wide[:, order.argsort().to(wide.device)]


class Maker:
    """Makes a model's Linears: those that keep 4 bits, and others."""

    def __init__(self, plan: Plan, other: Any, kept: type[Linear4], device: torch.device) -> None:
        self.plan, self.other, self.kept, self.device = plan, other, kept, device

    def __call__(self, size_in: int, size_out: int, bias: bool) -> nn.Module:
        path = next(self.plan.next_path)
        form = self.plan.forms.get(path)
        if form is None:
            return self.other(size_in, size_out, bias=bias)
        order = None if form.order is None else form.order.to(self.device)
        kept = Linear4 if ".experts." in path else self.kept
        return kept(size_in, size_out, bias, form._replace(order=order))

    def counts(self) -> set[int]:
        """Numbers of partial products, for a warm-up."""
        return {num_parts(size_in, size_out, form) for size_out, size_in, bias, form, is_residual, _ in
                self.plan.shapes() if is_residual and not bias}


def bare(name: str) -> str:
    """A checkpoint's name without what stands in front of the decoder's own, and behind a module's."""
    return re.sub(f"^{PREFIXES}", "", name).removesuffix(".weight")


# --------------------------------------------------------------------------------------------------
# Formats
# --------------------------------------------------------------------------------------------------

def read_stored(path: Path, codes: torch.dtype, there: set[str]) -> tuple[dict[str, Parts], list[tuple[str, Tensor]]]:
    """The matrices in 4 bits, or in FP8, and the other tensors, as views of the mapped files. codes: the type of
    matrices that are stored as "weight"; there: names of the model's tensors. What begins like none of these, as a
    vision tower does, is left out. ValueError for other numbers of 8 bits."""
    stored, others = dict[str, Parts](), list[tuple[str, Tensor]]()
    beginnings = {name.partition(".")[0] for name in there}
    for name, tensor in read_tensors(path):
        owner, _, end = name.removesuffix("_inv").rpartition(".")
        if bare(name).partition(".")[0] not in beginnings:
            continue
        if end in (*CODES[:2], *BESIDE) or end == "weight" and tensor.dtype is codes and tensor.dim() == 2:
            stored.setdefault(owner, {})[end] = tensor
        elif tensor.itemsize == 1 and (end == "weight" or tensor.is_floating_point()):
            raise ValueError(f"tensor {name} {list(tensor.shape)} has the type {tensor.dtype}; beside matrices of "
                             f"{codes} only numbers of 16 and 32 bits can be read")
        else:
            others.append((name, tensor))
    return stored, others


def describe(name: str, parts: Parts, method: str | None) -> Matrix:
    """ValueError: a tensor is missing, or they do not fit together."""
    needed = ["scales", "qzeros"] if method in EIGHTS else ["weight_scale", *ROW_SCALES.get(method, [])]
    needed.insert(0, next((end for end in CODES if end in parts), CODES[2 if method == "fp8" else 0]))
    if absent := [end for end in needed if end not in parts]:
        raise ValueError(f"the checkpoint has {name}.{min(parts)} and lacks {name}.{absent[0]}; fetch it again")
    codes, scale, per_number = parts[needed[0]], parts[needed[1]], parts[needed[0]].itemsize * 2
    if method == "fp8":
        return Matrix(*codes.shape, fp8_form(codes.shape[1]))
    size_out, size_in = len(codes), codes.shape[1] * per_number
    if method in EIGHTS:  # stored as [in, out]
        size_out, size_in = (size_in, size_out) if method == "awq" else (codes.shape[1], size_out * per_number)
        scale = scale.T
    elif "weight_shape" in parts:
        size_out, size_in = parts["weight_shape"].tolist()
    zeros, g_idx = parts.get("qzeros", parts.get("weight_zero_point")), parts.get("g_idx", parts.get("weight_g_idx"))
    row_scales = [parts[end] for end in ("weight_global_scale", "weight_scale_2") if end in parts]
    num_groups = scale.shape[-1] if scale.dim() == 2 else 0
    group = size_in // max(1, num_groups)
    if num_groups * group != size_in or num_groups > 1 and (group < 16 or group & group - 1):
        raise ValueError(f"{name} has {num_groups} scales for {size_in} columns; a group must have a power of "
                         "two of columns, 16 at least, or a whole row")
    if (codes.numel() * per_number != size_out * size_in or scale.shape != (size_out, num_groups) or size_in % 2
            or scale.dtype not in SCALES.get(codes.dtype, [])
            or zeros is not None and zeros.numel() != cdiv(size_out, 8) * num_groups
            or g_idx is not None and g_idx.shape != (size_in,) or any(one.numel() != 1 for one in row_scales)):
        raise ValueError(f"{name} has codes {list(codes.shape)} of {codes.dtype} and scales {list(scale.shape)} of "
                         f"{scale.dtype}; these, or others beside them, are not of a matrix of {size_out} x {size_in} "
                         "in 4 bits; fetch the checkpoint again")
    order = None
    if g_idx is not None and not torch.equal(g_idx, every := torch.arange(size_in).to(g_idx) // group):
        order = g_idx.argsort(stable=True)
        if not torch.equal(g_idx[order], every):
            raise ValueError(f"the groups of {name}.g_idx have not {group} columns each; fetch the checkpoint again")
    has_zeros = zeros is not None and not (method in EIGHTS and bool((zeros == EIGHTS[method]).all()))
    kind = torch.uint8 if scale.dtype is torch.float8_e8m0fnu else scale.dtype
    return Matrix(size_out, size_in, Form(kind, num_groups, has_zeros, bool(row_scales), order=order))


def fp8_form(size_in: int) -> Form:
    return Form(torch.float32, cdiv(size_in, TILE), codes=FP8)


def turn(parts: Parts, form: Form, method: str | None) -> Parts:
    """A stored matrix in our layout."""
    codes = next(parts[end] for end in CODES if end in parts)
    zeros, scale = parts.get("qzeros", parts.get("weight_zero_point")), parts.get("scales", parts.get("weight_scale"))
    if method in EIGHTS:
        codes, zeros, scale = unpack(codes if method == "awq" else codes.T), unpack(zeros), scale.T
        if method == "awq":
            codes, zeros = (one.unflatten(1, (-1, 8))[..., AWQ_PLACES].flatten(1) for one in (codes, zeros))
            codes = codes.T
        zeros = (zeros + (method == "gptq") & 15).T  # older ones are stored minus 1
    else:
        codes, zeros = unpack(codes), None if zeros is None else unpack(zeros.T)[:, :len(codes)].T
    codes = codes if form.order is None else codes[:, form.order.to(codes.device)]
    result = dict(weight=pack(codes), scale=scale.view(form.scale))
    if form.has_zeros:
        result["zero"] = zeros
    if form.has_row_scale:
        factor = parts["weight_scale_2"] if method == "nvfp4" else 1 / parts["weight_global_scale"]
        result["row_scale"] = factor.float().reshape(1, 1).expand(len(codes), 1)
    return result


def unpack(x: Tensor) -> Tensor:
    """Codes [.., n], the first in the lowest bits, of bytes or wider integers."""
    x = x.contiguous().view(torch.uint8)
    return torch.stack([x & 15, x >> 4], -1).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """[.., in] -> [.., in / 2], bytes"""
    return codes[..., ::2] | codes[..., 1::2] << 4


def cut_int4(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """A matrix [.., in] as integers of 4 bits, rounded to nearest: weight and scale. The number of a group that is
    farthest from 0 becomes -8, of the 16 integers the one farthest from 0."""
    groups = x.float().unflatten(-1, (-1, group))
    scale = (groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8).half()
    codes = (groups / torch.where(scale == 0, 1, scale.float())).round().clamp(-8, 7) + 8
    return pack(codes.byte().flatten(-2)), scale[..., 0]


# --------------------------------------------------------------------------------------------------
# gpt-oss: reading
# --------------------------------------------------------------------------------------------------

def read(tensors: Iterable[tuple[str, Tensor]], runner: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the runner's model."""
    if plan := getattr(runner.modules.linear, "plan", None):
        return plan.read(tensors, runner.device)
    return read_weights(tensors, getattr(runner.modules.mlp, "four_bits", False), runner.device)


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
    return list(zip((name, name.removesuffix("weight") + "scale"), kept(weight, scale)))


def widen(weight: Tensor, scale: Tensor, zero: Tensor | None = None, row_scale: Tensor | None = None) -> Tensor:
    """The matrix in float32, [.., in]."""
    if weight.dtype is FP8:
        return weight.float() * scale.repeat_interleave(TILE, -1)[..., :weight.shape[-1]]
    is_integer = scale.is_floating_point() and scale.itemsize > 1
    table = torch.arange(-8.0, 8.0) if is_integer else torch.tensor(E2M1 + [-number for number in E2M1])
    numbers = table.to(weight.device)[unpack(weight).int()].unflatten(-1, (scale.shape[-1], -1))
    if zero is not None:
        numbers = numbers + (8 - zero.float()[..., None])
    if scale.dtype is torch.uint8:
        numbers = torch.ldexp(numbers, scale.int()[..., None] - 127).flatten(-2)
    else:
        numbers = (numbers * scale.float()[..., None]).flatten(-2)
    return numbers if row_scale is None else numbers * row_scale


def cut(x: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [.., in] in 4 bits, its numbers rounded to nearest: weight and scale."""
    groups, numbers = x.float().unflatten(-1, (-1, GROUP)), torch.tensor(E2M1, device=x.device)
    exponent = torch.frexp(groups.abs().amax(-1, keepdim=True))[1] - 3  # with it the largest is at least 4
    codes = torch.bucketize(torch.ldexp(groups.abs(), -exponent), (numbers[1:] + numbers[:-1]) / 2)
    return pack((codes + 8 * (groups < 0)).byte().flatten(-2)), (exponent[..., 0] + 127).clamp(0, 254).byte()


# --------------------------------------------------------------------------------------------------
# Experts on a GPU
# --------------------------------------------------------------------------------------------------

def make_linear(size_in: int, size_out: int, bias: bool) -> Linear4:
    return Linear4(size_in, size_out, bias, Form(torch.uint8, size_in // GROUP))


class FourBitMLP(model.MLP):
    """An expert."""
    four_bits = PRODUCTS

    def __init__(self, config: model.ModelConfig, index: int, modules: model.Modules) -> None:
        super().__init__(config, index, modules._replace(linear=make_linear, residual_linear=make_linear))
