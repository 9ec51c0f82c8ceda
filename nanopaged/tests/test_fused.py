"""The modules and functions that take the model's place on a GPU compute what its own do."""
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from model import ACTIVATIONS, activate
from nanopaged import LLM, SamplingParams, kernel
from nanopaged.features import fused as fused_module
from nanopaged.features.fused import fused_add_norm, num_partial_products, partial_products
from nanopaged.tests.helpers import (
    CUDA,
    DEVICE,
    GOLDEN,
    GREEDY,
    load,
    needs_gpu,
    needs_kernel,
    tokens_of,
    use_modules,
)
from nanopaged.tests.pretended import normalize, plain_kernels

CAN_HAVE_FEW_ROWS = fused_module.takes_rows(2, torch.bfloat16, torch.device(DEVICE))
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]  # the interpreter lies about bfloat16


def made(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_close(ours: torch.Tensor, exact: torch.Tensor, roundings: int = 1):
    """exact: in float64. The error may be some roundings of the largest number."""
    assert ours.shape == exact.shape
    error = (ours.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-9)
    assert error < roundings * 2 * torch.finfo(ours.dtype).eps + 2e-6, error


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["RMS norm", "layer norm"])
@pytest.mark.parametrize("count, num_gpus, size", [(0, 1, 80), (1, 1, 64), (2, 1, 7), (4, 2, 80), (0, 3, 33)])
def test_sum_and_norm(dtype, bias, count, num_gpus, size):
    torch.manual_seed(0)
    x = tuple(made(*[count] * (count > 0), 3, size, dtype=dtype) for _ in range(num_gpus))
    residual, weight, shift = made(3, size, dtype=dtype), made(size, dtype=dtype), made(size, dtype=dtype)
    out, total = fused_add_norm(x if num_gpus > 1 else x[0], residual, weight, shift if bias else None, 1e-5)
    exact = residual.double() + sum(part.double().sum(0) if count else part.double() for part in x)
    assert_close(total, exact)
    assert_close(out, normalize(total.double(), weight.double(), shift.double() if bias else None, 1e-5), 2)


@needs_kernel
def test_a_norm_with_weights_in_float32_rounds_once():
    """As transformers computes Gemma's and OLMo's norms."""
    torch.manual_seed(0)
    x, weight = made(3, 80, dtype=torch.float16), 1 + made(80, dtype=torch.float32)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    for out in (kernel.rms_norm(x, weight, 1e-6), fused_add_norm(x, torch.zeros_like(x), weight, None, 1e-6)[0]):
        assert out.dtype is torch.float16 and torch.allclose(out.double(), exact, rtol=5e-4, atol=1e-7)


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_and_product(dtype, gated, activation):
    x = made(2, 1100 * (2 if gated else 1), dtype=dtype)
    assert_close(fused_module.activate(x, activation, gated), activate(x.double(), activation, gated), 3)


@needs_kernel
@pytest.mark.parametrize("dtype, rows", [
    (dtype, rows) for dtype in TYPES for rows in (1, 2, 5, 8, 9, 16, 20, 64)
    if CUDA or dtype is TYPES[0] or rows in (1, 9)],
    ids=str)
@pytest.mark.parametrize("size_in, size_out, bias", [(5, 3, True), (64, 8, False), (1500, 6, True), (2048, 40, False)])
def test_product_of_few_rows(dtype, bias, rows, size_in, size_out):
    torch.manual_seed(0)
    x, weight = made(rows, size_in, dtype=dtype), made(size_out, size_in, dtype=dtype) / size_in ** 0.5
    shift = made(size_out, dtype=dtype)
    exact = x.double() @ weight.double().T + (shift.double() if bias else 0)
    shift = shift if bias else None
    assert_close(fused_module.few_rows_linear(x, weight, shift), exact)
    out = x.new_full((rows, size_out), torch.nan)
    assert fused_module.few_rows_linear(x, weight, shift, out) is out and out.isfinite().all()
    activation = ("silu", True) if size_out % 2 == 0 else ("relu", False)
    assert_close(fused_module.few_rows_linear(x, weight, shift, None, *activation),
                 activate(exact.to(dtype).double(), *activation), 4)
    for count in (4, 8) if rows > 1 and size_in % 8 == 0 else ():  # of a router there are many
        parts = fused_module.few_rows_linear(x, weight, shift, count=count)
        assert parts.shape == (count, rows, size_out)
        assert_close(parts.double().sum(0).to(dtype), exact, 4)


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_products_of_no_rows(dtype):
    """A step that samples nothing has no rows in the last layer; nor has the one that finds an fp8 cache's scales."""
    x, weight = made(0, 64, dtype=dtype), made(10, 64, dtype=dtype)
    assert fused_module.has_few_rows(x, weight) and fused_module.linear(x, weight).shape == (0, 10)
    assert fused_module.few_rows_linear(x, weight, None, None, "silu", True).shape == (0, 5)
    assert fused_module.few_rows_linear(x, weight, None, count=4).shape == (4, 0, 10)


@needs_gpu
def test_an_fp8_cache_beside_the_small_kernels():
    llm = load("qwen3", graphs=True, dtype="bfloat16", kv_cache_dtype="fp8")
    assert [len(tokens) for tokens in tokens_of(llm.generate([[3, 4, 5]], GREEDY))]


def test_which_products_have_few_rows():
    def chosen(rows, size_out, dtype=torch.bfloat16, count=1, size=1024):
        return fused_module.has_few_rows(torch.empty(rows, size, dtype=dtype), torch.empty(size_out, size), count)

    assert chosen(16, 2048) and chosen(2, 4096, size=9000) and chosen(2, 512, count=4, size=4096) and chosen(1, 8)
    assert chosen(64, 4096) and not chosen(65, 4096)
    assert not chosen(2, 512) and not chosen(2, 2048, size=2048) and not chosen(17, 2048)  # too few programs
    assert chosen(16, 2**17) and not chosen(17, 2**17)
    # A bias goes with partial products of few rows.
    x, weight = torch.empty(64, 4096, dtype=torch.bfloat16), torch.empty(2880, 4096, dtype=torch.bfloat16)
    assert [fused_module.split_of(x, weight, has_bias) for has_bias in (False, True)] == [(2, True)] * 2
    x = torch.empty(65, 4096, dtype=torch.bfloat16)
    assert [fused_module.split_of(x, weight, has_bias) for has_bias in (False, True)] == [(2, False), (1, False)]
    assert not chosen(2, 2048, torch.float32) and chosen(1, 2048, torch.float32)


@pytest.mark.parametrize("intermediate_size", [512, 8960])  # a row's sum goes over at most 1,024 numbers at a time
def test_fused_modules_compute_what_the_plain_ones_do(tmp_path, monkeypatch, intermediate_size):
    """On a GPU with the kernels and CUDA graphs. On a CPU the kernels' plain forms run in the same modules."""
    config = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(
        hidden_size=64, num_attention_heads=8, intermediate_size=intermediate_size, max_position_embeddings=512)))
    prompts = [[1, 2, 3], [4, 5], [7] * 300]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    cut = []  # numbers of rows
    monkeypatch.setattr(fused_module, "partial_products",
                        lambda x, *others: cut.append(len(x)) or partial_products(x, *others))
    if not CUDA:
        for patch in plain_kernels():
            monkeypatch.setattr(*patch)

    def run(fused):
        llm = LLM(str(tmp_path), load_format="dummy", dtype="float32", num_blocks=64, max_num_seqs=4,
                  enforce_eager=not fused)
        if fused and not CUDA:
            use_modules(llm, fused_module.MODULES)
        outputs = llm.generate(prompts, params) + [llm.generate(prompts[0], params)[0]]  # together, and a single row
        return [[next(iter(logprobs.items())) for logprobs in output.outputs[0].logprobs] for output in outputs]

    plain = run(False)
    assert not cut
    for ours, theirs in zip(run(True), plain):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [x.logprob for _, x in ours] == pytest.approx([x.logprob for _, x in theirs], abs=1e-3)
    assert (64 if CUDA else 3) in cut and max(cut) <= 256 and 1 not in cut  # three tokens are a step of 64 there


def test_partial_products_add_up_to_the_product():
    x, weight = torch.randn(7, 256), torch.randn(24, 256)
    for num_parts in (1, 2, 4):
        product = partial_products(x, weight, num_parts)
        assert product.shape == (num_parts, 7, 24)
        torch.testing.assert_close(product.sum(0), x @ weight.T, atol=1e-4, rtol=1e-4)


def test_which_products_are_split():
    def num_parts(rows, size_in, size_out, dtype=torch.bfloat16):
        x, weight = (torch.empty(n, size_in, dtype=dtype, device="meta") for n in (rows, size_out))
        return num_partial_products(x, weight)

    assert num_parts(8, 2048, 1024) == num_parts(256, 3072, 1024) == 4
    assert num_parts(8, 20480, 4096) == num_parts(64, 4096, 4096) == 2
    assert num_parts(257, 2048, 1024) == 1  # there are tiles enough
    assert num_parts(1, 2048, 1024) == num_parts(1, 12288, 4096) == 1  # has a function of its own
    assert num_parts(8, 2000, 1024) == 1  # four parts would not begin at multiples of 64
    # A part may be larger than the whole, and larger than float16's numbers.
    assert num_parts(8, 2048, 1024, torch.float16) == 1


@needs_gpu
def test_partial_products_are_as_exact_as_the_product():
    """In bfloat16 each partial product is rounded, where otherwise the product is: the error is of the same size."""
    x, weight = torch.randn(64, 3072, device="cuda"), torch.randn(1024, 3072, device="cuda")
    x, weight = x.bfloat16(), weight.bfloat16()
    exact = x.double() @ weight.double().T
    whole = (x @ weight.T).double() - exact
    parts = partial_products(x, weight, 4).double().sum(0) - exact
    assert parts.norm() < 1.3 * whole.norm()


@needs_kernel
@pytest.mark.parametrize("variant", ["qwen3", "gpt2"])
def test_what_a_warm_up_compiles(variant):
    """Each task runs, and there is one for each number of rows that has a form."""
    config = replace(load(variant).runner.config, hidden_size=2048, intermediate_size=8192)
    runner = SimpleNamespace(config=config, dtype=torch.bfloat16, device=torch.device(DEVICE), fp8=False, num_ranks=1,
                             modules=fused_module.MODULES)
    tasks = list(fused_module.kernel_forms(runner))
    for task in tasks:
        task()
    products = [task for task in tasks if task.func is fused_module.few_rows_linear]
    assert {len(task.args[0]) for task in products} == ({1, 2, 9, 17, 33} if CAN_HAVE_FEW_ROWS else {1})
    assert {task.func for task in tasks} == {fused_module.few_rows_linear, fused_module.activate, fused_add_norm}
