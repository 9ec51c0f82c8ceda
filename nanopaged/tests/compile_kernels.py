"""Compile the kernels for given GPUs, without having one, and check that each configuration fits.

    python -m nanopaged.tests.compile_kernels 75 86 89 90      # every type and head size, two minutes
    python -m nanopaged.tests.compile_kernels --quick 90 75    # one type and head size

There are two query heads per kv head. Prints a line for each kernel: compute capability, configuration, shared memory.
Exit code 1 if one takes more shared memory than a block of that GPU can have.
"""
import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernel
from nanopaged import tiles
from nanopaged.features import (
    cascade,
    delta_kernels,
    four_bit_codes,
    four_bit_experts,
    four_bit_hopper,
    four_bit_kernels,
    four_bit_streams,
    four_bits,
    fused,
    fused_experts,
    gemma4,
    pick,
)
from nanopaged.features import hopper as hopper_file
from nanopaged.features.fp8 import quantize_rows_kernel
from nanopaged.features.kinds.slots import group_slots_kernel
from nanopaged.features.qwen3_5 import gate_output_kernel
from nanopaged.optional_triton import VARYING

SHARED_MEMORY = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB a block may use
INTEGERS = ("block_tables", "seq_lens", "query_start_loc", "work", "slot_mapping")
FLOATS = ("split_acc", "split_sums", "rotation")
# A form of the attention kernel: its phase, no_split and stages.
FORMS = (("decode", True, 3), ("prefill", True, 3), ("decode", True, 4), ("decode", False, 3),
         ("prefix", False, 3), ("suffix", False, 3))
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def compile_kernel(function, constants: dict, dtype: torch.dtype, capability: int, num_warps=4, num_stages=3,
                   fp8=False, make_source=ASTSource, maxnreg=None, **types):
    """The compiled kernel, with pointers and strides that are multiples of 16 where an engine's always are. types: of
    arguments whose names do not tell them."""
    names = function.arg_names
    constants = dict.fromkeys({"sinks"}.intersection(names) - types.keys()) | constants
    signature = {name: types.get(name) or _type_of(name, constants, TYPES[dtype]) for name in names}
    if fp8:
        signature |= dict(k_cache="*fp8e4nv", v_cache="*fp8e4nv")
    if "PDL" in names:
        constants = constants | dict(PDL=capability >= 90)
        signature["PDL"] = "constexpr"
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
               if signature[name][0] == "*" and name not in VARYING}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = make_source(function, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32),
                          options=dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True,
                                       maxnreg=maxnreg))


def _type_of(name: str, constants: dict, dtype: str) -> str:
    if name in constants:
        return "constexpr"
    if name in ("scale", "eps", "v_scale", "k_factor", "v_factor"):
        return "fp32"
    if name in INTEGERS:
        return "*i32"
    if name in FLOATS:
        return "*fp32"
    tensors = ("out", "q", "q_out", "k", "v", "qkv", "k_cache", "v_cache", "q_norm", "k_norm", "x", "residual", "total",
               "weight", "bias", "logits")
    return f"*{dtype}" if name in tensors else "i32"


def cache_strides(head_dim: int, block_size: int) -> tuple[tuple, tuple]:
    """Those of K and V in a cache of 8 kv heads."""
    return ((block_size * 8 * head_dim, 8 * head_dim, head_dim, 1),) * 2


def attention(phase: str, capability: int, dtype: torch.dtype, head_dim: int, group: int = 2, block_size: int = 64,
              window=0, no_split=True, fp8=False, stages=3, **sinks):
    """paged_attention_kernel as `paged_attention` would launch it, and the configuration it was given."""
    sizes = dtype.itemsize, SHARED_MEMORY[capability] * 1024, 1 if fp8 else dtype.itemsize
    config = tiles.tile_config("prefill" if phase == "prefill" else "decode", group, head_dim, *sizes, stages)
    if phase == "prefix":
        columns = cascade.MAX_PREFIX_COLUMNS
        config = config | dict(TILE_M=columns, num_stages=cascade.PREFIX_STAGES[columns])
    strides = cache_strides(head_dim, block_size)
    constants = tiles.kernel_constants(8, group, head_dim, block_size, window, dtype, *strides) | dict(
        ONE_SPLIT=phase == "prefix", TILE_M=config["TILE_M"], TILE_N=config["TILE_N"])
    function = kernel.paged_attention_kernel
    if phase in ("prefix", "suffix"):
        function, constants = cascade.cascade_kernel, constants | dict(PREFIX=phase == "prefix")
    else:
        constants |= dict(PREFILL=phase == "prefill", ONE_PROGRAM=no_split)
    compiled = compile_kernel(function, constants, dtype, capability, config["num_warps"], config["num_stages"], fp8,
                              **sinks)
    return compiled, config


def gluon_source(*arguments):
    from triton.experimental.gluon._runtime import GluonASTSource  # what Gluon's own tests compile with
    return GluonASTSource(*arguments)


def hopper(dtype: torch.dtype, head_dim: int, group: int, window: bool, **sinks):
    """The prefill kernel for Hopper alone."""
    padded = tiles.next_power_of_2(group)
    rows = [hopper_file.HOPPER_TILE_M // padded, padded, head_dim]
    block = [1, hopper_file.HOPPER_BLOCK_SIZE, 1, head_dim]
    types = {name: f"tensordesc<{TYPES[dtype]}{box},{hopper_file.gl.NVMMASharedLayout(128, 16, len(box))!r}>"
             for name, box in (("q_box", rows), ("k_box", block), ("v_box", block))}
    return compile_kernel(hopper_file.hopper_prefill_kernel, dict(GROUP=group, WINDOW=window), dtype, 90,
                          make_source=gluon_source, **types, **sinks)


def others(capability: int, dtype: torch.dtype, head_dim: int, window: int = 0):
    """Tasks that compile the smaller kernels."""
    constants = tiles.kernel_constants(8, 2, head_dim, 64, window, dtype, *cache_strides(head_dim, 64))
    merge = {name: constants[name] for name in ("HEAD_DIM", "DIM_PADDED", "WINDOW")}
    sinks = dict(sinks=f"*{TYPES[dtype]}")
    for more in ({}, sinks):
        yield partial(compile_kernel, kernel.merge_splits_kernel, merge | dict(TILE_N=64), dtype, capability, 1, **more)
    for phase in ("decode", "prefill"):
        yield partial(attention, phase, capability, dtype, 64, 8, window=window, **sinks)
    if capability == 90 and dtype is not torch.float32 and hopper_file.gl:
        yield partial(hopper, dtype, 64, 8, window > 0, **sinks)
    in_float32 = dict(q_norm="*fp32", k_norm="*fp32")  # as Gemma's weights of norms are
    for switches, types in ((dict(ROTATE=True, NORM=True), {}), (dict(ROTATE=True, NORM=True), in_float32),
                            (dict(ROTATE=False, NORM=False), {})):
        store = dict(BLOCK_SIZE=64, HEADS=16, KV_HEADS=8, HALF=head_dim // 2, HEADS_PADDED=16, KV_PADDED=8,
                     HALF_PADDED=constants["DIM_PADDED"] // 2, **switches)
        yield partial(compile_kernel, kernel.rotate_and_store_kernel, store, dtype, capability, **types)
    if capability >= 89:
        yield partial(compile_kernel, kernel.rotate_and_store_kernel, store, dtype, capability, fp8=True)
    for num_gpus, center, weight in ((1, False, dtype), (2, True, dtype), (1, False, torch.float32)):
        norm = dict(COUNT=4, SIZE=4096, PADDED=4096, CENTER=center)
        yield partial(compile_kernel, fused.fused_add_norm_kernel, norm, dtype, capability, 8,
                      parts=(f"*{TYPES[dtype]}",) * num_gpus, weight=f"*{TYPES[weight]}")
    for activation, gated in (("silu", True), ("gelu_new", False)):
        act = dict(ACTIVATION=activation, GATED=gated)
        yield partial(compile_kernel, fused.activate_kernel, act | dict(TILE=1024), dtype, capability)
        for is_fp8 in (False, True) if capability >= 89 else (False,):
            types = dict(weight="*fp8e4nv", scale="*fp32") if is_fp8 else dict(scale=f"*{TYPES[dtype]}")
            one_row = act | dict(SIZE=12288, ROWS=2, TILE=2048, BIAS=not gated)
            yield partial(compile_kernel, fused.one_row_kernel, one_row, dtype, capability, **types)
            if capability >= 90:  # see takes_rows
                of_x = dict(x="*fp8e4nv", x_scale="*fp32") if is_fp8 else dict(x_scale=f"*{TYPES[dtype]}")
                forms = [(padded, fused.few_rows_form(12288, padded, gated, is_fp8, dtype.itemsize))
                         for padded in ((64,) if is_fp8 else (16, 32, 64))]
                for padded, form in (*forms, *[(64, fused_experts.ROUTER_FORM)] * (not is_fp8 and not gated)):
                    few_rows = act | form | dict(SIZE=12288, PART=12288, PADDED=padded, BIAS=not gated)
                    yield partial(compile_kernel, fused.few_rows_kernel, few_rows, dtype, capability, **types, **of_x)
    if capability >= 89:
        sizes = dict(SIZE=12288, PADDED=16384)
        yield partial(compile_kernel, quantize_rows_kernel, sizes, dtype, capability, 16, out="*fp8e4nv",
                      scale="*fp32")
    routed = dict(counts="*i32", pairs="*i32", scores="*fp32")
    keeps = (capability // 10, capability % 10) >= four_bits.LEAST_CAPABILITY.get(dtype, (99, 0))
    for act, num_tokens in itertools.product(("swigluoai", ""), (1, 64)) if keeps else ():
        yield partial(experts, capability, dtype, act, num_tokens, "mxfp4", routed | dict(bias=f"*{TYPES[dtype]}"))
    for kind, act in itertools.product(("int4", "nvfp4", "fp8"), ("silu", "")) if keeps else ():
        yield partial(experts, capability, dtype, act, 1, kind, routed)
    for kind, group, scale in (("int4", 128, f"*{TYPES[dtype]}"), ("nvfp4", 16, "*u8"), ("mxfp4", 32, "*u8"),
                               ("fp8", 128, "*fp32")):
        yield from (partial(in_4_bits, capability, dtype, kind, group, scale, rows) for rows in (
            (1, 64, 256, 8192) if dtype.itemsize == 2 else (8192,)))
        if dtype is torch.bfloat16 and keeps and hopper_file.gl:
            yield from (partial(streams, capability, kind, group, scale, *row) for row in ((1, True), (16, False)))
        if dtype is torch.bfloat16 and capability == 90 and kind in ("int4", "nvfp4") and hopper_file.gl:
            yield partial(many_rows, kind, group, scale, *(128, True) if kind == "int4" else (256, False))
    route = dict(EXPERTS=40, COLUMNS=48, PADDED=64, TOP_K=6, CHOICES=8, NORMALIZED=True, COUNT=4)
    plain, scaled = dict(SIGMOID=0.0, bias=None, scale=None), dict(SIGMOID=0.0, bias=None)
    for shared, more, types in ((False, plain, {}), (True, plain, {}), (False, scaled, dict(scale=f"*{TYPES[dtype]}")),
                                (False, dict(SIGMOID=1.5, scale=None), dict(bias="*fp32"))):
        yield partial(compile_kernel, fused_experts.route_kernel, route | more | dict(
            SHARED=shared, ONE_TOKEN=not shared), dtype, capability, 1, **routed, **types)
    for act, num_tokens in itertools.product(("silu", ""), (1, 64, 8192)):
        for kind in (dtype, torch.float8_e4m3fn) if capability >= 89 else (dtype,):
            yield partial(experts, capability, dtype, act, num_tokens, kind, routed)
    yield partial(compile_kernel, gate_output_kernel, dict(SIZE=4096, TILE=1024), dtype, capability,
                  **dict.fromkeys(("o", "gate"), f"*{TYPES[dtype]}"))
    wide = dict(V_HEAD=20, BLOCK_SIZE=64, HEADS=16, KV_HEADS=4, HALF=256, HEADS_PADDED=16, KV_PADDED=4,
                HALF_PADDED=256)  # heads of 512 numbers
    for fp8 in (False, True) if capability >= 89 else (False,):
        yield partial(compile_kernel, gemma4.rotate_and_store_kernel, wide, dtype, capability, 8, fp8=fp8, **in_float32)
    yield partial(compile_kernel, gemma4.add_norms_kernel, dict(COUNT=2, SIZE=5376, PADDED=8192), dtype, capability, 16,
                  post="*fp32", weight="*fp32", scalar=f"*{TYPES[dtype]}")
    gather = dict(SIZE=8960, TILE=gemma4.GATHER_TILE)
    yield partial(compile_kernel, gemma4.gather_rows_kernel, gather, dtype, capability, table=f"*{TYPES[dtype]}",
                  ids="*i32")
    picked = dict(best="*fp32", at="*i32", out="*i64")
    integers = dict.fromkeys(("slots", "positions"), "*i32")
    yield partial(compile_kernel, group_slots_kernel, dict(BLOCK_SIZE=64, TILE=1024), dtype, capability, **integers)
    yield partial(compile_kernel, pick.pick_kernel, dict(TILE=2048), dtype, capability, temperature="*fp32",
                  seed="*i64", position="*i64", **picked)
    yield partial(compile_kernel, pick.best_of_tiles_kernel, dict(TILES=128), dtype, capability, 1, **picked)


def in_4_bits(capability: int, dtype: torch.dtype, kind: str, group: int, scale: str, num_rows: int):
    """A product with a matrix in 4 bits, or in FP8 blocks. Gated, integers have zeros."""
    memory, is_int = SHARED_MEMORY[capability] * 1024, kind == "int4"
    constants = dict(SIZE=12288, GROUPS=12288 // group, KIND=kind, ZEROS=is_int, ROW_SCALE=kind == "nvfp4")
    types = dict(weight="*u8", scale=scale, zero="*u8", row_scale="*fp32")
    if num_rows > four_bit_kernels.MOST_ROWS:
        constants |= dict(ROWS=32, TILE=four_bit_codes.TILE)
        compile_kernel(four_bit_codes.widen_kernel, constants, dtype, capability, **types)
        return
    for gated in (False, True):
        form = four_bit_kernels.few_rows_form(num_rows, gated, 3.0 if gated else 0.5, lambda slices: True, memory)
        warps, more = form.pop("num_warps"), dict(
            PART=3072, BIAS=not gated, GATED=gated, ACTIVATION="silu" if gated else "")
        compiled = compile_kernel(four_bit_kernels.few_rows_kernel, constants | form | more, dtype, capability, warps,
                                  **types)
        assert compiled.metadata.shared <= memory, (compiled.metadata.shared, form)


def streams(capability: int, kind: str, group: int, scale: str, num_rows: int, gated: bool):
    """Products of few rows in Gluon, and those of experts, as in `in_4_bits`, if they fit."""
    memory, is_int, act = SHARED_MEMORY[capability] * 1024, kind == "int4", "silu" if gated else ""
    types = dict(weight="*u8", scale=scale, zero="*u8", row_scale="*fp32", scores="*fp32", counts="*i32", pairs="*i32")
    scales = torch.empty(0, 2816 // group, dtype=dict(int4=torch.bfloat16, fp8=torch.float32, mxfp4=torch.uint8,
                                                      nvfp4=torch.float8_e4m3fn)[kind])
    common = dict(SIZE=2816, GROUPS=2816 // group, KIND=kind, ZEROS=is_int, ROW_SCALE=kind == "nvfp4", BIAS=not gated,
                  ACTIVATION=act)
    for function, form, constants in (
            (four_bit_streams.linear_kernel, four_bit_streams.form_of(num_rows, 99 + 999 * gated, 132),
             dict(PART=2816, GATED=gated)),
            (four_bit_streams.experts_kernel, four_bit_streams.experts_form(4 * num_rows, 4, 40, gated, 2816),
             dict(OUT=512, EXPERTS=40, PADDED=64))):
        with patch.object(tiles, "shared_memory", lambda _: memory):
            codes = torch.float8_e4m3fn if kind == "fp8" else torch.uint8
            if four_bit_streams.fits(form, scales, scales if is_int else None, codes, 2816, 2816):
                warps = form.pop("num_warps")
                compiled = compile_kernel(function, common | constants | form, torch.bfloat16, capability, warps,
                                          make_source=gluon_source, **types)
                assert compiled.metadata.shared <= memory, (compiled.metadata.shared, form)


def many_rows(kind: str, group: int, scale: str, columns: int, gated: bool):
    """Products of many rows in Gluon, for Hopper alone, as in `streams`."""
    count, gl, is_int, act = 1 + gated, four_bit_hopper.gl, kind == "int4", "silu" if gated else ""
    types = dict(x_box=f"tensordesc<bf16[{columns}, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>",
                 codes_box=f"tensordesc<i32[{count}, {64 // count}, 16],{gl.NVMMASharedLayout(64, 32, 3)!r}>",
                 scale=scale, zero="*u8", row_scale="*fp32")
    for form in four_bit_hopper.FORMS:
        if form.columns == columns:
            constants = dict(SIZE=2880, PART=2880, GROUPS=2880 // group, KIND=kind, ZEROS=is_int, BIAS=not gated,
                             ROW_SCALE=kind == "nvfp4", ACTIVATION=act, WARPGROUPS=form.WARPGROUPS, STAGES=form.STAGES,
                             REGISTERS=form.REGISTERS)
            compiled = compile_kernel(four_bit_hopper.many_rows_kernel, constants, torch.bfloat16, 90,
                                      make_source=gluon_source, **types)
            assert compiled.metadata.shared <= SHARED_MEMORY[90] * 1024, (compiled.metadata.shared, form)


def experts(capability: int, dtype: torch.dtype, act: str, num_tokens: int, kind: torch.dtype | str, types: dict):
    """experts_kernel as `experts_product` would launch it. kind: of the weights, or of codes"""
    memory, sizes = SHARED_MEMORY[capability] * 1024, dict(EXPERTS=40, PADDED=64, OUT=512, SIZE=1536, ACTIVATION=act)
    in_type, given = f"*{TYPES[dtype]}", isinstance(kind, str)
    form = fused_experts.experts_form(num_tokens, 6, 40, act != "", torch.uint8 if given else kind, memory,
                                      four_bit_experts.PRODUCTS if given else None)
    pointers = dict.fromkeys(("x_scale", "scale"), in_type)
    if given:
        pointers |= dict(weight="*u8", scale={"int4": in_type, "fp8": "*fp32"}.get(kind, "*u8"))
        pointers |= {"int4": dict(zero="*u8"), "nvfp4": dict(row_scale="*fp32")}.get(kind, {})
    elif kind is torch.float8_e4m3fn:
        pointers = dict(x="*fp8e4nv", weight="*fp8e4nv", x_scale="*fp32", scale="*fp32")
    warps, pointers = form.pop("num_warps"), pointers | types
    constants = sizes | form | dict(GROUPS=1536 // (128 if kind == "fp8" else 32), KIND=kind if given else "",
                                    **dict.fromkeys({"bias", "zero", "row_scale"} - pointers.keys()))
    compiled = compile_kernel(fused_experts.experts_kernel, constants, dtype, capability, warps, **pointers)
    assert compiled.metadata.shared <= memory, (compiled.metadata.shared, form)


def delta(capability: int, dtype: torch.dtype):
    """Tasks that compile the kernels of gated delta nets, as `delta_kernels.launches` launches them."""
    memory, chunk = SHARED_MEMORY[capability] * 1024, dict(CHUNK=delta_kernels.CHUNK)
    sizes = dict(RING=4, K_HEADS=16, V_HEADS=32, K_DIM=128, V_DIM=128)
    types = {name: f"*{TYPES[dtype]}" for name in (
        "z", "b", "a", "conv_weight", "mixed", "w", "u", "p", "q_out", "k_out", "w_out", "u_out", "p_out")}
    types |= dict.fromkeys(("A_log", "dt_bias", "norm_weight", "conv_state", "state", "total", "total_out"), "*fp32")
    types |= dict.fromkeys(("lens", "num_computed", "query_lens", "sources", "targets", "counts"), "*i32")
    scans = [delta_kernels.scan_form(columns, dtype, memory) for columns in (delta_kernels.WIDE, delta_kernels.NARROW)]
    forms = [*((delta_kernels.decode_kernel, sizes | dict(TARGETS=3 + num_drafts, SEVERAL=num_drafts > 0), {})
               for num_drafts in (0, 5)),
             (delta_kernels.conv_kernel, dict(TILE=512, RING=4, CHANNELS=8192, **chunk), {}),
             (delta_kernels.prepare_kernel, sizes | chunk, delta_kernels.prepare_form(dtype)),
             *((delta_kernels.scan_kernel, sizes | chunk | dict(TARGETS=3), form) for form in scans),
             (delta_kernels.norm_kernel, dict(V_HEADS=32, V_DIM=128, HEADS_PADDED=32, **chunk), {})]

    def compile_form(function, constants: dict, form: dict):
        options = {name: value for name, value in form.items() if name.islower()}
        options |= {name: kind for name, kind in types.items() if name in function.arg_names}
        constants = constants | {name: value for name, value in form.items() if name.isupper()}
        compiled = compile_kernel(function, constants, dtype, capability, **options)
        assert compiled.metadata.shared <= memory, (function, compiled.metadata.shared)

    yield from (partial(compile_form, *form) for form in forms)


def check(capability: int, dtype: torch.dtype, head_dim: int, fp8: bool, form: tuple) -> bool:
    """Compile a form of attention. Whether it is too large."""
    limit, (phase, no_split, stages) = SHARED_MEMORY[capability] * 1024, form
    compiled, config = attention(phase, capability, dtype, head_dim, no_split=no_split, fp8=fp8, stages=stages)
    shared = compiled.metadata.shared
    print(f"sm_{capability} {phase:7} {TYPES[dtype]}{' fp8 cache' * fp8} head_dim {head_dim:3}: "
          f"{shared / 1024:5.1f} of {limit // 1024} KiB  {config}"
          f"{'  TOO LARGE' if shared > limit else ''}", flush=True)
    return shared > limit


def check_hopper(dtype: torch.dtype, head_dim: int, group: int, window: bool) -> bool:
    """Compile a form of prefill for Hopper alone. Whether it is too large."""
    shared, limit = hopper(dtype, head_dim, group, window).metadata.shared, SHARED_MEMORY[90] * 1024
    print(f"sm_90 hopper  {TYPES[dtype]} head_dim {head_dim:3}{' window' * window}: {shared / 1024:5.1f} of "
          f"{limit // 1024} KiB  group {group}{'  TOO LARGE' if shared > limit else ''}", flush=True)
    return shared > limit


def main(capabilities: list[int], quick: bool) -> int:
    checks, tasks = [], []
    if 90 in capabilities and hopper_file.gl:
        forms = itertools.product((torch.float16, torch.bfloat16), (64, 128, 256), (1, 2, 7, 64), (False, True))
        some = [(torch.bfloat16, 128, 2, False), (torch.bfloat16, 256, 8, False), (torch.bfloat16, 256, 2, True)]
        checks += [partial(check_hopper, *form) for form in (some if quick else forms)]
    for capability in capabilities:
        # Older cards have no bfloat16: the engine uses float16 there.
        types = [dtype for dtype in TYPES if dtype is not torch.bfloat16 or capability >= 80]
        for dtype in types[-1:] if quick else types:
            has_fp8 = capability >= 89 and dtype is not torch.float32
            for head_dim in (128,) if quick else (64, 128, 256, 512):
                if head_dim == 512 and (capability < 80 or dtype is torch.float32):  # see `tile_config`
                    continue
                for form, fp8 in itertools.product(FORMS, (False, True) if has_fp8 else (False,)):
                    # What cascade.has_same_bits asks for.
                    if form[0] in ("prefix", "suffix") and (dtype.itemsize > 2 or fp8 or head_dim > 128
                                                            or capability < 80):
                        continue
                    if not quick or form in (FORMS if capability >= 80 and not fp8 else FORMS[:2]):
                        checks.append(partial(check, capability, dtype, head_dim, fp8, form))
            if not quick or capability >= 80:
                tasks += others(capability, dtype, 128, window=100 if quick else 0)
            if capability >= 80 and dtype is not torch.float32:
                tasks += delta(capability, dtype)
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(task) for task in checks + tasks]
        return int(any([future.result() for future in futures][:len(checks)]))


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:] if argument != "--quick"]
    sys.exit(main(numbers or [75, 86, 89, 90], "--quick" in sys.argv))
