"""Experts in MXFP4: checkpoints that have them, and products that read them. (Tests of logits, texts, drafts, kinds and
cascades go over all golden checkpoints.)"""
import pytest
import torch

from nanopaged.features import four_bit_experts, four_bits, fused, fused_experts, gpt_oss
from nanopaged.features.four_bit_codes import order_codes
from nanopaged.tests.helpers import (
    CUDA,
    DEVICE,
    GOLDEN,
    GREEDY,
    ROOT,
    assert_golden,
    complaint,
    expectations,
    load,
    needs_gpu,
    needs_kernel,
    prompt_logits,
    relative_error,
    rewritten,
)
from nanopaged.tests.pretended import PlainKernels, plain_kernels
from nanopaged.tests.programs import run_program
from nanopaged.weights.build import build_model
from nanopaged.weights.checkpoint import read_config, read_tensors
from nanopaged.weights.families import read_model_config

MXFP4 = "gpt-oss-mxfp4"
TYPES = [torch.float16, *([torch.bfloat16] if CUDA else [])]  # the interpreter lies about bfloat16


# ---- Reading

def test_what_config_json_says():
    config = read_config(GOLDEN / "gpt-oss")
    assert read_model_config(config).four_bits is None
    assert read_model_config(config | dict(quantization_config={"quant_method": "mxfp4"})).four_bits == "mxfp4"
    qwen = read_config(GOLDEN / "qwen3") | dict(quantization_config={"quant_method": "mxfp4"})
    assert "Qwen3ForCausalLM in MXFP4 is not supported" in complaint(read_model_config, qwen)


def test_a_cpu_widens_and_says_so(capfd):
    load(MXFP4, device="cpu", num_blocks=64)
    assert "experts in MXFP4 are converted to float32: " in capfd.readouterr().err
    assert "quantization 'fp8' does not go with a checkpoint in MXFP4" in complaint(
        load, MXFP4, device="cpu", quantization="fp8")


@pytest.mark.parametrize("change, sentence", [
    (lambda name, one: {} if name.endswith("down_proj_scales") else {name: one}, "_blocks and lacks model.*_sca"),
    (lambda name, one: {name: one[..., :1]} if name.endswith("gate_up_proj_scales") else {name: one}, "has blocks of")])
def test_tensors_that_do_not_fit(tmp_path, change, sentence):
    path = rewritten(tmp_path, MXFP4, lambda tensors: {
        new: one for name, tensor in tensors.items() for new, one in change(name, tensor).items()})
    with pytest.raises(ValueError, match=sentence):
        load(path, device="cpu", num_blocks=64)


def test_shards_may_part_codes_and_scales(tmp_path):
    path = rewritten(tmp_path, MXFP4, lambda tensors: dict(sorted(tensors.items(), key=lambda pair: pair[0][::-1])))
    assert_golden(load(path, device="cpu", num_blocks=64), MXFP4)


# ---- Experts that keep 4 bits

def test_texts_of_experts_in_4_bits(monkeypatch):
    """On a CPU the kernels are pretended."""
    llm = load(MXFP4, device="cpu", enforce_eager=True)
    for patch in plain_kernels():
        monkeypatch.setattr(*patch)
    r, modules = llm.runner, fused.MODULES._replace(mlp=four_bits.FourBitMLP)
    tensors = four_bits.read_weights(gpt_oss.split_experts(read_tensors(GOLDEN / MXFP4)), True, r.device)
    r.model = build_model(r.config, tensors, r.dtype, r.device, r.max_model_len, modules)
    whole = r.model.layers[1].mlp.whole
    assert {name: (one.dtype, list(one.shape)) for name, one in whole.items() if "gate_up" in name} == {
        "gate_up_proj.weight": (torch.uint8, [5, 64, 48]), "gate_up_proj.scale": (torch.uint8, [5, 64, 3]),
        "gate_up_proj.bias": (torch.float32, [5, 64])}
    assert_golden(llm, MXFP4)


@needs_gpu
def test_a_gpu_keeps_4_bits():
    prompts, _, logits = expectations(MXFP4)
    llm = load(MXFP4, graphs=True, dtype="bfloat16", enable_prefix_caching=False)
    assert llm.runner.model.layers[0].mlp.whole["down_proj.weight"].dtype is torch.uint8
    errors = [relative_error(*row) for row in zip(prompt_logits(llm, prompts[1].tolist()), logits[1].to(DEVICE))]
    assert sorted(errors)[len(errors) // 2] < 0.05
    assert len(llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids) == 24
    dummy = load(MXFP4, graphs=True, dtype="bfloat16", load_format="dummy")
    assert len(dummy.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids) == 24


def test_cutting_keeps_numbers_that_4_bits_have():
    weight, scale = torch.randint(256, (7, 48)).byte(), torch.randint(100, 140, (7, 3)).byte()
    weight[:, ::16] |= 7  # so that each group's largest number is 6 or -6, as when it was cut
    numbers = four_bits.widen(weight, scale)
    assert torch.equal(four_bits.widen(*four_bits.cut(numbers)), numbers)
    assert relative_error(four_bits.widen(*four_bits.cut(x := torch.randn(64, 256))), x) < 0.13


def test_the_order_of_codes():
    codes = torch.randint(16, (3, 70))
    integers, e2m1 = (order_codes(four_bits.pack(codes.byte()), torch.empty(0, dtype=kind)).view(torch.int32)
                      for kind in (torch.float16, torch.uint8))
    assert integers.shape == e2m1.shape == (3, 12)
    places = [15, 8, 7, 6], [19, 12, 11, 10], [9, 2, 1, 0], [13, 14, 5, 4]  # of s e e m of pairs 0 to 3
    for column in range(70):
        block, i, t, which = column // 32, column // 8 % 4, column % 8 // 2, column % 2
        assert torch.equal(integers[:, 4 * block + t] >> 16 * which + 4 * i & 15, codes[:, column])
        for bit, place in zip((3, 2, 1, 0), places[i]):
            assert torch.equal(e2m1[:, 4 * block + t] >> (place + 16 * which) % 32 & 1, codes[:, column] >> bit & 1)


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("num_rows, size, inner, count, top_k", [
    (1, 96, 64, 5, 3), (7, 64, 96, 4, 2), (30, 160, 32, 5, 2), (200, 64, 64, 3, 2)])
def test_the_product_reads_4_bits(dtype, num_rows, size, inner, count, top_k):
    """Beside experts in 16 bits, and in float64. Sizes are no powers of two, and some numbers are clamped."""
    torch.manual_seed(0)
    shapes = (num_rows, size), (num_rows, count), (count, 2 * inner), (count, size)
    x, logits, *biases = (torch.randn(shape).to(dtype).to(DEVICE) for shape in shapes)
    logits = (logits.argsort(1) / 4).to(dtype)  # no two are equal
    cut = [four_bits.cut(torch.randn(*shape, device=DEVICE) * factor) for shape, factor in (
        ((count, 2 * inner, size), 4 / size ** 0.5), ((count, size, inner), 1 / inner ** 0.5))]
    weights, scales = zip(*((order_codes(weight, scale), (scale, None, None)) for weight, scale in cut))
    wide = [four_bits.widen(*pair).double() for pair in cut]
    exact = PlainKernels.mix_experts(x.double(), logits.double(), *wide, top_k, True, "swigluoai",
                                     biases=[bias.double() for bias in biases])
    for kept, more in ((weights, scales), ([one.to(dtype) for one in wide], ())):
        out = fused_experts.mix_experts(x, logits, *kept, top_k, True, "swigluoai", *more, biases=biases,
                                        four_bits=four_bit_experts.PRODUCTS if more else None)
        assert relative_error(out, exact) < 4 * torch.finfo(dtype).eps


@needs_gpu
@pytest.mark.parametrize("num_rows", [3, 64, 500])
def test_a_token_by_itself_and_among_others(num_rows):
    """Its result is the same but for last bits: other numbers of tokens have other kernels."""
    x, logits = torch.randn(num_rows, 256, device=DEVICE).bfloat16(), torch.randn(num_rows, 16, device=DEVICE)
    cut = [four_bits.cut(torch.randn(*shape, device=DEVICE) / 16) for shape in ((16, 256, 256), (16, 256, 128))]
    weights, scales = zip(*((order_codes(weight, scale), (scale, None, None)) for weight, scale in cut))
    options = dict(four_bits=four_bit_experts.PRODUCTS)
    out = fused_experts.mix_experts(x, logits.bfloat16(), *weights, 4, True, "swigluoai", *scales, **options)
    for i in (0, num_rows - 1):
        one = x[i:i + 1], logits[i:i + 1].bfloat16()
        alone = fused_experts.mix_experts(*one, *weights, 4, True, "swigluoai", *scales, **options)
        assert relative_error(alone[:, 0], out[:, i]) < 2 * torch.finfo(torch.bfloat16).eps


def test_a_machine_without_triton():
    program = ("import sys; sys.modules['triton'] = None; from nanopaged import LLM;"
               "print(LLM(sys.argv[1], device='cpu', num_blocks=16).generate([[5, 6, 7]])[0].outputs[0].token_ids)")
    run = run_program(program, str(GOLDEN / "gpt-oss-mxfp4"), cwd=ROOT)
    assert run.returncode == 0 and run.stdout.startswith("["), run.stderr
