"""Matrices in 4 bits: formats of checkpoints, cutting, and products that read codes. (gpt-oss: test_four_bits.py)"""
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import model
from nanopaged import SamplingParams
from nanopaged.features import (
    four_bit_codes,
    four_bit_experts,
    four_bit_hopper,
    four_bit_kernels,
    four_bit_streams,
    four_bits,
    fused,
    fused_experts,
    graphs,
)
from nanopaged.features.four_bit_codes import order_codes
from nanopaged.features.four_bits import cut_int4, widen
from nanopaged.optional_triton import INTERPRETED
from nanopaged.tests.gluon_on_a_cpu import put_gluon
from nanopaged.tests.helpers import (
    BUNDLED,
    CUDA,
    DEVICE,
    GOLDEN,
    GREEDY,
    assert_golden,
    complaint,
    expectations,
    load,
    needs_gpu,
    needs_kernel,
    prompt_logits,
    relative_error,
    rewritten,
    tokens_of,
)
from nanopaged.tests.hopper_on_a_cpu import put_hopper
from nanopaged.tests.pretended import PlainKernels, plain_kernels, widen_words
from nanopaged.tests.test_graphs import record_graphs
from nanopaged.weights.build import build_model, random_tensors
from nanopaged.weights.checkpoint import read_config, read_tensors
from nanopaged.weights.families import read_model_config

FORMATS = sorted(f"int4/{path.parent.name}" for path in (GOLDEN / "int4").glob("*/config.json"))
TYPES = [torch.float16, *([torch.bfloat16] if CUDA else [torch.float32])]  # the interpreter lies about bfloat16
PACKED = dict(quant_method="compressed-tensors", format="pack-quantized")
QWEN3 = read_config(GOLDEN / "qwen3")


def plain_linear(x, weight, scale, zero, row_scale, bias=None, activation="", gated=False, count=1):
    """`four_bit_kernels.linear` in plain torch."""
    wide = widen_words(weight, scale, zero, row_scale, x.shape[1]).to(x.dtype)
    y = F.linear(x, wide, bias) if count == 1 else fused.partial_products(x, wide, count)
    return model.activate(y, activation, gated) if activation else y


def keep(monkeypatch, llm, path, modules=fused.MODULES, tensors=None, **options):
    """Give the engine a model that keeps 4 bits, as on a GPU; the kernels are pretended on a CPU."""
    for patch in [*plain_kernels(), (four_bit_kernels, "linear", plain_linear),
                  (four_bits, "has_products", lambda device: True),
                  (four_bits, "can_keep_experts", lambda *_: True)]:
        monkeypatch.setattr(*patch)
    r = llm.runner
    for name, value in options.items():
        setattr(r.options, name, value)
    r.modules = four_bits.with_four_bits(r.options, r.config, modules, r.device, path)
    tensors = four_bits.read(tensors or read_tensors(path), r)
    r.model = build_model(r.config, tensors, r.dtype, r.device, r.max_model_len, r.modules)
    return {name: (str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in r.model.named_parameters()}


# ---- Formats

@pytest.mark.parametrize("variant", FORMATS)
def test_texts_of_each_format(variant, monkeypatch, capfd):
    """On a CPU, and where 4 bits are kept."""
    llm = load(variant, device="cpu", num_blocks=12, block_size=8, max_num_batched_tokens=16)
    assert " matrices in 4 bits are converted to float32, the first being model.layers.0." in capfd.readouterr().err
    assert_golden(llm, variant)
    kept = keep(monkeypatch, llm, GOLDEN / variant)
    for lookahead in (0, 1):  # then with prefix hits
        llm.engine.lookahead = lookahead
        assert_golden(llm, variant, times=2)
    assert llm.counts.num_preemptions > 4 or llm.config.states
    assert any(kind == "uint8" for kind, _ in kept.values())
    assert not llm.config.experts or llm.runner.model.layers[0].mlp.whole["gate_up_proj.weight"].dtype is torch.uint8


def test_partial_products_that_norms_get(monkeypatch):
    """The warm-up compiles norms for as many as a matrix in 4 bits has, which may be others than fused.py's."""
    monkeypatch.setattr(four_bit_kernels, "FEWEST_COLUMNS", 128)
    llm = load("qwen3", device="cpu", num_blocks=64, quantization="int4", load_format="dummy", hf_overrides=dict(
        intermediate_size=256))
    assert fused.partial_counts(llm.runner) == {1, 4}
    keep(monkeypatch, llm, None, quantization="int4", load_format="dummy", tensors=random_tensors(
        llm.config, torch.float32, llm.runner.device, seed=0))
    assert llm.runner.model.layers[0].mlp.down_proj.count == 2 and fused.partial_counts(llm.runner) == {1, 2, 4}


def test_a_shared_expert_with_another_order_of_columns(monkeypatch, tmp_path):
    """It is no expert among the others, which have none."""
    path = rewritten(tmp_path, "int4/compressed-moe", lambda tensors: tensors | {
        f"model.layers.0.mlp.shared_expert.{name}.weight_g_idx": torch.arange(64).int() % 2
        for name in ("gate_proj", "up_proj")})
    llm = load(path, device="cpu", num_blocks=64)
    texts = tokens_of(llm.generate([[1, 2, 3], [5] * 20], GREEDY))
    keep(monkeypatch, llm, Path(path))
    assert tokens_of(llm.generate([[1, 2, 3], [5] * 20], GREEDY)) == texts


def test_what_is_kept(monkeypatch, capfd):
    """Groups of each layer; k_proj and another o_proj are ordinary, so q and v are not kept either."""
    kept = keep(monkeypatch, load("int4/compressed", device="cpu", num_blocks=64), GOLDEN / "int4/compressed")
    assert {name: one for name, one in kept.items() if "layers.0" in name and "norm" not in name} == {
        "layers.0.qkv_proj.weight": ("float32", [256, 64]),
        "layers.0.o_proj.weight": ("uint8", [64, 64]), "layers.0.o_proj.scale": ("bfloat16", [64, 4]),
        "layers.0.mlp.gate_up_proj.weight": ("uint8", [192, 32]),
        "layers.0.mlp.gate_up_proj.scale": ("bfloat16", [192, 2]),
        "layers.0.mlp.down_proj.weight": ("uint8", [64, 48]), "layers.0.mlp.down_proj.scale": ("bfloat16", [64, 1])}
    assert kept["layers.1.o_proj.weight"] == ("float32", [64, 128])
    assert "\n2 matrices in 4 bits are converted to float32, the first being model.layers.0.self_attn.q_proj" in (
        capfd.readouterr().err)
    kept = keep(monkeypatch, load("int4/nvfp4", device="cpu", num_blocks=64), GOLDEN / "int4/nvfp4")
    assert kept["layers.0.qkv_proj.scale"] == ("float8_e4m3fn", [128, 4])
    assert kept["layers.0.qkv_proj.row_scale"] == ("float32", [128, 1])
    kept = keep(monkeypatch, llm := load("int4/compressed-moe", device="cpu", num_blocks=64),
                GOLDEN / "int4/compressed-moe")
    first, second = (layer.mlp for layer in llm.runner.model.layers)
    assert {name: list(one.shape) for name, one in first.whole.items() if "down" in name} == {
        "down_proj.weight": [5, 64, 16], "down_proj.scale": [5, 64, 1], "down_proj.zero": [5, 64, 1]}
    assert second.whole["down_proj.weight"].shape == (4, 64, 16)  # the shared expert is no longer the fifth
    assert kept["layers.1.mlp.shared.down_proj.weight"] == ("float32", [64, 32])
    assert next(fused_experts.kernel_forms(llm.runner)).args[4] is False  # nor is it in the warm-up
    kept = keep(monkeypatch, load("int4/gptq", device="cpu", num_blocks=64), GOLDEN / "int4/gptq")
    assert kept["layers.1.qkv_proj.zero"] == ("uint8", [128, 2])


@pytest.mark.parametrize("variant", ["int4/compressed-asym", "int4/mxfp4"])
def test_recorded_steps(variant, monkeypatch):
    """On a CPU pretended ones, and pretended kernels. The tokens of samples, too."""
    monkeypatch.setattr(graphs, "TOKEN_SIZES", [16, 32])
    monkeypatch.setattr(graphs, "DECODE_SIZES", [1, 2])
    llm = load(variant, graphs=True, max_num_seqs=8, max_num_batched_tokens=40)
    if not CUDA:
        keep(monkeypatch, llm, GOLDEN / variant)
    replayed = record_graphs(llm, monkeypatch)
    params = SamplingParams(n=2, seed=3, max_tokens=12, ignore_eos=True)
    first, second = (tokens_of(llm.generate([[1, 2, 3]] * 3, params)) for _ in range(2))
    assert_golden(llm, variant, times=2)
    assert first == second and {shape.num_tiles > 0 for shape in replayed} == {True, False}


def test_another_order_of_columns_in_a_part(monkeypatch, tmp_path, capfd):
    path = rewritten(tmp_path, "int4/gptq", lambda tensors: tensors | {
        name: tensor[torch.randperm(len(tensor))] for name, tensor in tensors.items() if "k_proj.g_idx" in name})
    llm = load(path, device="cpu", num_blocks=64)
    kept = keep(monkeypatch, llm, path)
    assert {one for name, (one, _) in kept.items() if name.endswith("qkv_proj.weight")} == {"float32"}
    assert {one for name, (one, _) in kept.items() if name.endswith("gate_up_proj.weight")} == {"uint8"}


def as_v2(name, tensor):
    """GPTQ with zeros as they are."""
    return {name: (tensor.view(torch.uint8) + 0x11).view(torch.int32) if name.endswith("qzeros") else tensor}


def as_modelopt(name, tensor):
    name = name.replace("weight_packed", "weight")
    return {name.replace("weight_global_scale", "weight_scale_2"): 1 / tensor if "global" in name else tensor}


@pytest.mark.parametrize("variant, quantization, change", [
    ("int4/gptq", dict(checkpoint_format="gptq_v2", quant_method="gptq", bits=4), as_v2),
    ("int4/nvfp4", dict(quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head"]), as_modelopt)])
def test_other_names_of_the_same(variant, quantization, change, tmp_path):
    path = rewritten(tmp_path, variant, lambda tensors: {
        new: one for name, tensor in tensors.items() for new, one in change(name, tensor).items()})
    llm = load(path, device="cpu", num_blocks=64, hf_overrides=dict(quantization_config=quantization))
    assert_golden(llm, variant)


@pytest.mark.parametrize("name, tensor", [
    ("visual.blocks.0.mlp.weight_packed", torch.zeros(3, 5, dtype=torch.int32)),  # without scales
    ("vision_tower.encoder.layers.0.fc1.weight", torch.zeros(3, 5).to(torch.float8_e4m3fn))])
def test_matrices_of_a_vision_tower_are_left_alone(name, tensor, tmp_path):
    path = rewritten(tmp_path, "int4/compressed", lambda tensors: tensors | {f"model.{name}": tensor})
    assert_golden(load(path, device="cpu", num_blocks=64), "int4/compressed")


def test_symmetric_gptq_has_no_zeros():
    parts = dict(qweight=torch.randint(-2**31, 2**31 - 1, (8, 16), dtype=torch.int32), scales=torch.rand(2, 16),
                 qzeros=torch.full((2, 2), 0x77777777, dtype=torch.int32), g_idx=torch.arange(64) // 32)
    form = four_bits.describe("x", parts, "gptq").form
    assert (form.has_zeros, form.order) == (False, None)
    assert four_bits.turn(parts, form, "gptq").keys() == {"weight", "scale"}
    assert four_bits.describe("x", parts, "gptq_v2").form.has_zeros


@pytest.mark.parametrize("variant, end, change, sentence", [
    ("awq", "layers.1.mlp.down_proj.scales", lambda x: {}, "has model.layers.1.mlp.down_proj.qweight and lacks m"),
    ("nvfp4", "k_proj.weight_global_scale", lambda x: {"weight_global_scale": x[:0]}, "not of a matrix of 32 x 64"),
    ("nvfp4", "v_proj.weight_global_scale", lambda _: {}, "lacks model.layers.0.self_attn.v_proj.weight_global_scale"),
    ("mxfp4", "q_proj.weight_scale", lambda x: {"weight_scale": x.half()}, "are not of a matrix of 128 x 64"),
    ("awq", "o_proj.qzeros", lambda x: {"qzeros": x[1:]}, "not of a matrix of 64 x 64"),
    ("compressed", "down_proj.weight_packed", lambda x: {"weight_packed": x.repeat(1, 2)}, "of a matrix of 64 x 96"),
    ("compressed-asym", "down_proj.weight_scale", lambda x: {"weight_scale": x[:, :2]}, "has 2 scales for 96 columns"),
    ("gptq", "o_proj.g_idx", lambda x: {"g_idx": x * 0}, "the groups of model.layers.0.self_attn.o_proj.g_idx have n"),
    ("mxfp4", "lm_head.weight", lambda x: {"weight": x.to(torch.float8_e4m3fn)}, "tensor lm_head.weight .* has the ")])
def test_tensors_that_do_not_fit(variant, end, change, sentence, tmp_path):
    path = rewritten(tmp_path, f"int4/{variant}", lambda tensors: {
        new: one for name, tensor in tensors.items() for new, one in (
            {f"{name.rpartition('.')[0]}.{key}": value for key, value in change(tensor).items()}
            if name.endswith(end) else {name: tensor}).items()})
    with pytest.raises(ValueError, match=sentence):
        load(path, device="cpu", num_blocks=64)


@pytest.mark.parametrize("quantization, sentence", [
    (dict(quant_method="gptq", bits=8), "with GPTQ GPTQ, weights in 8 bits; of weights in few bits those in 4"),
    (dict(quant_method="gptq", bits=3, checkpoint_format="gptq_v2"), "with GPTQ GPTQ_V2, weights in 3 bits;"),
    (dict(quant_method="gptq", bits=4, checkpoint_format="marlin"), "with GPTQ MARLIN"),
    (dict(quant_method="awq", bits=4, version="gemv"), "with AWQ GEMV, weights in 4 bits;"),
    (dict(quant_method="modelopt", quant_algo="FP8"), "MODELOPT FP8, weights in None"),
    (dict(quant_method="awq"), "in None bits"),
    (PACKED | dict(config_groups={"x": {"weights": dict(num_bits=2)}}), "TENSORS PACK-QUANTIZED, weights in 2 bits"),
    (PACKED | dict(config_groups=[]), r"weights in \? bits"),
    (dict(quant_method="exl2", bits=4.0), "quantised with EXL2; use one with float32, float16 or bfloat16 weig"),
    (dict(quant_method="bitsandbytes", load_in_4bit=True), "quantised with BITSANDBYTES; use one with")], ids=str)
def test_formats_that_are_not_read(quantization, sentence):
    assert re.search(sentence, complaint(read_model_config, QWEN3 | dict(quantization_config=quantization)))


def test_options_that_do_not_go_with_4_bits():
    refused = {"leave it out": dict(quantization="int4"), "matrices in 4 bits cannot be cut into": dict(
        tensor_parallel_size=2)}
    for sentence, options in refused.items():
        assert sentence in complaint(load, "int4/awq", device="cpu", **options)
    assert "stored as [in, out]" in complaint(load, "gpt2", device="cpu", quantization="int4")
    assert "must be 'fp8', 'int4', or None" in complaint(load, "qwen3", device="cpu", quantization="int8")


# ---- Cutting

def test_an_ordinary_checkpoint_is_cut(monkeypatch, capfd):
    llm = load("shakespeare", device="cpu", num_blocks=64, quantization="int4")
    err = capfd.readouterr().err
    assert "matrices of the layers are cut to 4 bits, in groups of 64 and 128; embeddings, lm_head are not" in err
    assert "24 matrices in 4 bits are converted to float32, the first being layers.0.mlp.down_proj: 0.0 GiB" in err
    plain, cut = ((tensors := dict(one.runner.model.named_parameters()))["layers.0.qkv_proj.weight"] for one in (
        load("shakespeare", device="cpu", num_blocks=64), llm))
    assert tensors["embed_tokens.weight"].shape == (1024, 256)
    assert torch.equal(cut, widen(*cut_int4(plain, 128))) and 0.01 < relative_error(cut, plain) < 0.12
    text = llm.generate("ROMEO:", GREEDY)[0].outputs[0].token_ids
    monkeypatch.setattr(four_bit_kernels, "FEWEST_COLUMNS", 0)  # partial products
    kept = keep(monkeypatch, llm, BUNDLED, quantization="int4")
    assert llm.runner.model.layers[0].o_proj.count == 2
    assert kept["layers.5.mlp.down_proj.scale"] == ("float16", [256, 9])
    assert llm.generate("ROMEO:", GREEDY)[0].outputs[0].token_ids == text


def test_experts_are_cut(monkeypatch, capfd):
    options = dict(load_format="dummy", quantization="int4", hf_overrides=dict(moe_intermediate_size=32))
    llm = load("qwen3-moe", device="cpu", num_blocks=64, **options)
    assert "in groups of 32 and 64; embeddings, lm_head, router are not" in capfd.readouterr().err
    texts = tokens_of(llm.generate([[1, 2, 3], [5] * 20], GREEDY))
    kept = keep(monkeypatch, llm, None, quantization="int4", load_format="dummy", tensors=random_tensors(
        llm.config, torch.float32, llm.runner.device, seed=0))
    assert "uint8" in {kind for name, (kind, _) in kept.items() if ".experts.0." in name}
    assert tokens_of(llm.generate([[1, 2, 3], [5] * 20], GREEDY)) == texts


def test_perplexity_of_the_bundled_model(monkeypatch):
    """On a part of the text that it was not trained on. `pytest -s` prints it."""
    monkeypatch.setattr(four_bits, "CUT_GROUPS", (64,))
    perplexities = []
    for quantization in (None, "int4"):
        llm = load("shakespeare", device="cpu", num_blocks=1000, quantization=quantization)
        ids = llm.get_tokenizer().encode((BUNDLED / "held_out.txt").read_text())
        outputs = llm.generate([ids[i:i + 256] for i in range(0, len(ids), 256)],
                               SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        logprobs = [one.logprob for output in outputs for found in output.prompt_logprobs[1:] for one in found.values()]
        perplexities.append(math.exp(-sum(logprobs) / len(logprobs)))
    plain, cut = perplexities
    print(f"perplexity {plain:.3f}, with matrices in 4 bits in groups of 64 {cut:.3f}: {cut / plain:.4f} of it")
    assert 0.99 < cut / plain < 1.01


def test_integers_that_4_bits_have_stay():
    codes, scale = torch.randint(-7, 8, (5, 3, 64)).float(), torch.randn(5, 3, 1).half().float()
    codes[:, :, 7], codes[2, 1] = -8, 0
    assert torch.equal(widen(*cut_int4((codes * scale).flatten(1), 64)), (codes * scale).flatten(1))


# ---- Products

def random_matrix(size_out: int, size_in: int, kind: str, group: int, dtype: torch.dtype) -> list[Tensor | None]:
    shape, zero = (size_out, math.ceil(size_in / group)), None
    if kind == "fp8":  # zeros, denormal numbers and negative ones among them
        codes = torch.randint(256, (size_out, size_in)).byte()
        codes[codes & 127 == 127] = 3  # is no number
        scale = torch.rand(math.ceil(size_out / 128), shape[1]).repeat_interleave(128, 0)[:size_out] / 256
        return [codes.view(torch.float8_e4m3fn).to(DEVICE), scale.to(DEVICE), None, None]
    if kind == "mxfp4":
        scale, row_scale = torch.randint(118, 124, shape).byte(), None
    elif kind == "nvfp4":
        scale, row_scale = (torch.rand(shape) * 400).to(torch.float8_e4m3fn), torch.rand(size_out, 1) / 4000
    else:
        scale, row_scale = torch.randn(shape).to(dtype) / 16, None
        zero = torch.randint(16, shape).byte() if kind == "zeros" else None
    parts = torch.randint(256, (size_out, size_in // 2)).byte(), scale, zero, row_scale
    return [None if one is None else one.to(DEVICE) for one in parts]


def in_order(weight: Tensor, scale: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    return [order_codes(weight, scale), scale, *others]


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, size_out, size_in, kind, group, bias, act, count", [
    (1, 40, 256, "int4", 128, True, (), 1), (3, 33, 96, "int4", 32, False, (), 1),
    (9, 40, 80, "int4", 80, False, (), 1),
    (2, 72, 192, "zeros", 64, True, ("silu", True), 1), (1, 32, 512, "zeros", 128, False, (), 4),
    (5, 40, 160, "nvfp4", 16, False, ("gelu_new", False), 1), (2, 68, 96, "nvfp4", 16, True, ("silu", True), 1),
    (17, 34, 160, "mxfp4", 32, False, (), 1), (65, 40, 96, "int4", 32, True, (), 1),
    (1, 140, 256, "fp8", 128, True, (), 1), (3, 36, 200, "fp8", 128, True, ("silu", True), 1),
    (2, 32, 512, "fp8", 128, False, (), 4), (33, 34, 160, "fp8", 128, False, (), 1),
    (66, 40, 160, "fp8", 128, False, (), 1), (70, 40, 96, "nvfp4", 16, False, (), 1)])
def test_a_product_reads_4_bits(monkeypatch, dtype, rows, size_out, size_in, kind, group, bias, act, count):
    """Sizes are no powers of two; the last two have many rows. In float32 the error is small, too."""
    monkeypatch.setattr(four_bit_kernels, "has_few_rows", lambda x, *_: len(x) <= 64)
    torch.manual_seed(0)
    parts = random_matrix(size_out, size_in, kind, group, dtype)
    x = (torch.randn(rows, size_in) / size_in ** 0.5).to(dtype).to(DEVICE)
    shift = torch.randn(size_out).to(dtype).to(DEVICE) if bias else None
    y = four_bit_kernels.linear(x, *in_order(*parts), shift, *act, count=count)
    exact = F.linear(x.double(), widen(*parts).double(), None if shift is None else shift.double())
    exact = model.activate(exact, *act) if act else exact
    assert y.dtype is dtype and y.shape[:-2] == ((count,) if count > 1 else ())
    assert relative_error(y.double().sum(0) if count > 1 else y, exact) < 4 * torch.finfo(dtype).eps


@needs_kernel
@pytest.mark.parametrize("kind, group", [("int4", 96), ("zeros", 32), ("nvfp4", 16), ("mxfp4", 32), ("fp8", 128)])
def test_widening_in_one_launch(kind, group):
    size = 168 if kind == "fp8" else 96
    parts = random_matrix(70, size, kind, group, torch.float16)
    wide = four_bit_codes.widen(size, torch.float32, *in_order(*parts))
    assert torch.allclose(wide, widen(*parts), rtol=1e-6)
    assert torch.equal(widen_words(*in_order(*parts), size), widen(*parts))


@needs_kernel
@pytest.mark.parametrize("kind, group, num_rows", [("zeros", 64, 3), ("nvfp4", 16, 3), ("int4", 32, 200),
                                                   ("fp8", 128, 3)])
def test_experts_in_each_kind(kind, group, num_rows):
    """In float16, beside float64 with the same weights; many tokens have their matrices widened."""
    torch.manual_seed(0)
    count, size, inner, top_k = 3, 64, 64, 2
    x, logits = (torch.randn(num_rows, n).half().to(DEVICE) for n in (size, count))
    logits = (logits.argsort(1) / 4).half()  # no two are equal
    parts = [random_matrix(count * rows, columns, kind, group, torch.float16) for rows, columns in (
        (2 * inner, size), (size, inner))]
    wide = [widen(*one).double().unflatten(0, (count, -1)) / 4 for one in parts]
    exact = PlainKernels.mix_experts(x.double(), logits.double(), *wide, top_k, True, "silu")
    weights, kept = [], []
    for weight, scale, zero, row_scale in parts:
        weight, *others = (None if one is None else one.unflatten(0, (count, -1)) for one in (
            order_codes(weight, scale), scale if kind == "nvfp4" else scale / 4, zero,
            None if row_scale is None else row_scale / 4))
        weights.append(weight), kept.append(others)
    out = fused_experts.mix_experts(x, logits, *weights, top_k, True, "silu", *kept,
                                    four_bits=four_bit_experts.PRODUCTS)
    assert relative_error(out, exact) < 4 * torch.finfo(torch.float16).eps


@needs_gpu
@pytest.mark.parametrize("variant", FORMATS)
def test_a_gpu_keeps_4_bits(variant):
    prompts, _, logits = expectations(variant)
    for options in (dict(graphs=True), dict(enforce_eager=True)):
        llm = load(variant, dtype="bfloat16", enable_prefix_caching=False, **options)
        assert any(one.dtype is torch.uint8 for one in llm.runner.model.parameters())
        errors = [relative_error(*row) for row in zip(prompt_logits(llm, prompts[1].tolist()), logits[1].to(DEVICE))]
        assert sorted(errors)[len(errors) // 2] < 0.05
        assert len(llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids) == 24


@needs_gpu
@pytest.mark.parametrize("kind, group", [("int4", 128), ("zeros", 64), ("zeros", 16), ("nvfp4", 16), ("mxfp4", 32),
                                         ("fp8", 128)])
@pytest.mark.parametrize("num_rows", [1, 8, 16, 33, 64, 65, 300])
def test_large_products(kind, group, num_rows):
    """In bfloat16, beside float64 with the same weights; each form's shared memory fits."""
    parts = random_matrix(4096, 4096, kind, group, torch.float16)
    x = torch.randn(num_rows, 4096, device=DEVICE).bfloat16()
    exact = x.double() @ widen(*parts).double().T
    weight, scale, *others = in_order(*parts)
    for count in (1, 2) if four_bit_kernels.has_few_rows(x, weight, scale) else (1,):
        y = four_bit_kernels.linear(x, weight, scale, *others, count=count)
        assert relative_error(y.double().sum(0) if count > 1 else y.double(), exact) < 0.02


@needs_gpu
@pytest.mark.parametrize("kind, group, size", [("int4", 128, 640), ("int4", 1280, 1280), ("int4", 64, 2880),
                                               ("zeros", 32, 2880), ("nvfp4", 16, 640), ("mxfp4", 32, 2880)])
def test_many_rows_on_hopper(kind, group, size):
    """Results that fill no tile, more of them than there are programs, and partial products."""
    torch.manual_seed(0)
    for num_rows, size_out, count, act in ((65, 200, 1, ("silu", True)), (300, 9000, 1, ("gelu_new", False)),
                                           (128, 72, 5, ())):
        if size % (count * 128):
            continue
        weight, scale, *others = parts = random_matrix(size_out, size, kind, group, torch.float16)
        x = torch.randn(num_rows, size, device=DEVICE).bfloat16()
        if not four_bit_hopper.takes(x, weight, scale, count):
            pytest.skip("needs Hopper, and Gluon")
        bias = torch.randn(size_out, device=DEVICE).bfloat16() if count == 1 else None
        y = four_bit_hopper.linear(x, *in_order(*parts), bias, *act, count=count)
        exact = x.double() @ widen(*parts).double().T + (0 if bias is None else bias)
        exact = model.activate(exact, *act) if act else exact
        assert relative_error(y.double().sum(0) if count > 1 else y.double(), exact) < 0.02


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("form", four_bit_hopper.FORMS)
@pytest.mark.parametrize("kind, group, size", [("int4", 128, 640), ("int4", 384, 384), ("zeros", 64, 320),
                                               ("nvfp4", 16, 160), ("mxfp4", 32, 96)])
def test_many_rows_in_gluon(monkeypatch, form, kind, group, size):
    """One program computes all results, one tile after the other, some of which are partial products."""
    torch.manual_seed(0)
    gluon = put_hopper(monkeypatch, four_bit_hopper, ["words_layout", "groups_layout", "_half_of_codes"],
                       four_bit_streams)
    monkeypatch.setattr(four_bit_hopper, "form_of", lambda *_: form)
    for num_rows, size_out, count, act in ((form.columns + 2, 100, 1, ("silu", True)), (70, 200, 1, ()),
                                           (65, 40, 5 if size == 640 else 1, ())):
        weight, scale, *others = random_matrix(size_out, size, kind, group, torch.float16)
        parts = weight, simple(scale), *others
        x, bias = torch.randn(num_rows, size), torch.randn(size_out) if count == 1 else None
        y = four_bit_hopper.linear(x, *in_order(*parts), bias, *act, count=count)
        exact = x.double() @ widen(*parts).double().T + (0 if bias is None else bias)
        exact = model.activate(exact, *act) if act else exact
        assert relative_error(y.double().sum(0) if count > 1 else y.double(), exact) < 1e-5
    assert gluon.launches == 3


# ---- Products of few rows in Gluon

@pytest.mark.parametrize("kind, group, size, part, fits", [
    ("int4", 128, 4096, 4096, True), ("int4", 4096, 4096, 4096, True), ("int4", 16, 4096, 4096, False),
    ("zeros", 64, 4096, 2048, True), ("nvfp4", 16, 4096, 4096, True), ("mxfp4", 32, 2880, 2880, True),
    ("fp8", 128, 2880, 2880, True), ("int4", 40, 40, 40, False), ("zeros", 32, 65536, 65536, False),
    ("zeros", 128, 29568, 29568, False)])
def test_what_the_kernels_in_gluon_take(monkeypatch, kind, group, size, part, fits):
    """They know some sizes of groups, and all scales of a program must have room in shared memory and registers."""
    monkeypatch.setattr(four_bit_streams.tiles, "shared_memory", lambda _: 227 * 1024)
    scale = torch.empty(0, math.ceil(size / group), dtype=dict(
        mxfp4=torch.uint8, nvfp4=torch.float8_e4m3fn, fp8=torch.float32).get(kind, torch.float16))
    codes, zero = torch.float8_e4m3fn if kind == "fp8" else torch.uint8, scale if kind == "zeros" else None
    for form in (four_bit_streams.form_of(1, 9999, 132), four_bit_streams.experts_form(64, 4, 32, True, size)):
        assert four_bit_streams.fits(form, scale, zero, codes, size, part) == fits
    assert not four_bit_streams.takes(torch.empty(1, size, dtype=torch.bfloat16))  # on a CPU
    assert not four_bit_streams.experts_form(112, 4, 32, True, size)  # 14 tokens for each expert


def test_a_triton_without_gluon(monkeypatch):
    """Products then take the plain kernel, after a warning."""
    monkeypatch.setattr(four_bit_streams, "gl", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    four_bit_streams.is_there.cache_clear()
    try:
        with pytest.warns(UserWarning, match="few rows are multiplied .* in a kernel of plain Triton"):
            assert not four_bit_streams.is_there(torch.device("cpu"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
        four_bit_streams.is_there.cache_clear()
        assert not four_bit_streams.is_there(torch.device("cpu"))
    finally:
        four_bit_streams.is_there.cache_clear()


def simple(scale: Tensor) -> Tensor:
    """Scales of the same shape whose products with codes bfloat16 has exactly."""
    return scale if scale.dtype is not torch.float16 else (torch.randint(2, 4, scale.shape) / 64).half()


@pytest.fixture(params=["late", "early"])
def in_gluon(request, monkeypatch):
    """The kernels run in the interpreter, in float32. Copies arrive as late as they may, or at once."""
    if not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(four_bit_streams, "takes", lambda x: True)
    monkeypatch.setattr(four_bit_streams.tiles, "shared_memory", lambda _: 227 * 1024)
    return put_gluon(monkeypatch, four_bit_streams, ["linear_kernel", "experts_kernel"],
                     ["words_layout", "groups_layout", "_columns", "_shares", "_copies"], request.param == "early")


@pytest.mark.parametrize("kind, group", [("int4", 128), ("int4", 64), ("int4", 1280), ("zeros", 128), ("zeros", 32),
                                         ("nvfp4", 16), ("mxfp4", 32), ("fp8", 128)])
def test_products_in_gluon(in_gluon, kind, group):
    """Of one and of more tiles of the inner dimension, the last one of which has fewer columns."""
    torch.manual_seed(0)
    for rows, size_out, size, num_tiles, count, act in (
            (1, 40, 1280, 1, 1, ()), (11, 40, 1280, 999, 1, ("silu", True)), (8, 33, 1280, 999, 2, ()),
            (3, 40, group if kind == "int4" else 128, 999, 1, ())):
        weight, scale, *others = random_matrix(size_out, size, kind, min(group, size), torch.float16)
        parts = weight, simple(scale), *others
        x, bias = torch.randn(rows, size), torch.randn(size_out)
        form = four_bit_streams.form_of(rows, num_tiles, 132)
        assert four_bit_streams.fits(form, parts[1], parts[2], weight.dtype, size, size // count)
        y = four_bit_streams.linear(x, *in_order(*parts), bias if count == 1 else None, *act, count=count, form=form)
        exact = x.double() @ widen(*parts).double().T + (bias if count == 1 else 0)
        exact = model.activate(exact, *act) if act else exact
        assert relative_error(y.double() if count == 1 else y.double().sum(0), exact) < 1e-5


@pytest.mark.parametrize("kind, group", [("int4", 64), ("zeros", 128), ("nvfp4", 16), ("mxfp4", 32), ("fp8", 128)])
@pytest.mark.parametrize("num_rows", [1, 6, 20])
def test_experts_in_gluon(in_gluon, kind, group, num_rows):
    """One expert has more tokens than a program has columns."""
    torch.manual_seed(0)
    count, size, inner, top_k = 6, 384, 128, 2
    x, logits = torch.randn(num_rows, size), torch.randn(num_rows, count)
    logits[:, 3] = 9
    biases = [torch.randn(count, n) / 4 for n in (2 * inner, size)]
    weights, kept, wide = [], [], []
    for rows, columns in ((2 * inner, size), (size, inner)):
        weight, scale, *others = random_matrix(count * rows, columns, kind, group, torch.float16)
        parts = weight, simple(scale), *others
        wide.append(widen(*parts).unflatten(0, (count, -1)).double())
        weight, *others = (None if one is None else one.unflatten(0, (count, -1)) for one in in_order(*parts))
        weights.append(weight), kept.append(others)
    exact = PlainKernels.mix_experts(x.double(), logits.double(), *wide, top_k, True, "silu",
                                     biases=[one.double() for one in biases])
    out = fused_experts.mix_experts(x, logits, *weights, top_k, True, "silu", *kept, biases=biases,
                                    four_bits=four_bit_experts.PRODUCTS)
    assert relative_error(out.double(), exact) < 1e-5 and in_gluon.launches == 2


@needs_gpu
@pytest.mark.parametrize("kind, group", [("int4", 64), ("zeros", 64), ("zeros", 16), ("nvfp4", 16), ("mxfp4", 32),
                                         ("fp8", 128)])
@pytest.mark.parametrize("num_rows", [1, 8, 20])
def test_experts_of_few_tokens(monkeypatch, kind, group, num_rows):
    """In bfloat16, beside float64 with the same weights, by both kernels. Sizes are no multiples of a tile."""
    torch.manual_seed(0)
    count, size, inner, top_k = 12, 2880, 320, 3
    x, logits = (torch.randn(num_rows, n).bfloat16().to(DEVICE) for n in (size, count))
    logits = (logits.argsort(1) / 4).bfloat16()  # no two are equal
    biases = [(torch.randn(count, n) / 4).bfloat16().to(DEVICE) for n in (2 * inner, size)]
    parts = [random_matrix(count * rows, columns, kind, group, torch.float16) for rows, columns in (
        (2 * inner, size), (size, inner))]
    wide = [widen(*one).double().unflatten(0, (count, -1)) for one in parts]
    exact = PlainKernels.mix_experts(x.double(), logits.double(), *wide, top_k, True, "silu",
                                     biases=[one.double() for one in biases])
    weights, *kept = zip(*([None if part is None else part.unflatten(0, (count, -1)) for part in in_order(*one)]
                           for one in parts))
    calls = []
    for takes in (four_bit_streams.takes, lambda _: False):
        monkeypatch.setattr(four_bit_streams, "takes", lambda one: calls.append(takes(one)) or calls[-1])
        out = fused_experts.mix_experts(x, logits, *weights, top_k, True, "silu", *zip(*kept), biases=biases,
                                        four_bits=four_bit_experts.PRODUCTS)
        assert relative_error(out.double(), exact) < 0.02
    assert calls == [torch.cuda.get_device_capability() >= (8, 0)] * 2 + [False] * 2


@needs_gpu
@pytest.mark.parametrize("kind, group", [("int4", 128), ("zeros", 32), ("nvfp4", 16), ("fp8", 128)])
def test_rows_do_not_depend_on_others(kind, group):
    """Up to 16 rows have the same bits, in whatever company."""
    parts = in_order(*random_matrix(4096 + 40, 2048 + 96, kind, 2144 if group == 128 and kind == "int4" else group,
                                    torch.float16))
    x = torch.randn(16, 2048 + 96, device=DEVICE).bfloat16()
    rows = four_bit_kernels.linear(x, *parts)
    for few in (1, 3, 8):
        assert torch.equal(four_bit_kernels.linear(x[:few], *parts), rows[:few])
