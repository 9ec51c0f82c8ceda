"""The three launches of a mixture of experts compute what its loop over experts does."""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanopaged.features import fused, fused_experts
from nanopaged.tests.helpers import CUDA, DEVICE, load, needs_gpu, needs_kernel, relative_error
from nanopaged.tests.pretended import PlainKernels, fp8_weight

TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]  # the interpreter lies about bfloat16


def problem(num_rows, size, inner, count, dtype=torch.float32, seed=0):
    """x, logits, gate_up, down of `fused_experts.mix_experts`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_rows, size), (num_rows, count), (count, 2 * inner, size), (count, size, inner)]
    x, logits, gate_up, down = (torch.randn(shape, generator=generator) for shape in shapes)
    logits = logits.argsort(1) / 4  # no two are equal
    return [part.to(dtype).to(DEVICE) for part in (x, logits, gate_up / size ** 0.5, down / inner ** 0.5)]


def exact(x, logits, gate_up, down, *switches, **more):
    """In float64, from the same rounded numbers. The plain form is the loop's of nanopaged/features/experts.py."""
    return PlainKernels.mix_experts(*(part.double() for part in (x, logits, gate_up, down)), *switches, **more)


@needs_kernel
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("num_rows, size, inner, count, top_k, normalized", [
    (1, 32, 24, 5, 3, True), (7, 33, 24, 5, 3, False), (8, 40, 80, 1, 1, True), (30, 64, 70, 7, 2, True),
    (300, 32, 16, 3, 3, False)])
def test_experts_in_triton(dtype, num_rows, size, inner, count, top_k, normalized):
    """Few and many tokens; sizes that no tile divides. With 300 tokens an expert has several tiles."""
    given = *problem(num_rows, size, inner, count, dtype), top_k, normalized, "silu"
    out = fused_experts.mix_experts(*given)
    assert out.shape == (top_k, num_rows, size) and out.dtype is dtype
    assert relative_error(out, exact(*given)) < (2e-6 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps)


@needs_kernel
@pytest.mark.parametrize("num_rows", [1, 5, 90])
def test_an_expert_that_all_tokens_share(num_rows):
    """It is the last one, and has a score of its own, the router's next column, also in partial products."""
    x, logits, gate_up, down = problem(num_rows, 32, 24, 6)
    logits = torch.cat([logits, torch.full_like(logits[:, :2], torch.nan)], 1)  # columns without a meaning
    given = gate_up, down, 2, True, "silu"
    expected = exact(x, logits, *given, has_shared=True)
    for one in (logits, torch.stack([logits - 1, torch.ones_like(logits)])):
        out = fused_experts.mix_experts(x, one, *given, has_shared=True)
        assert out.shape == (3, num_rows, 32) and relative_error(out, expected) < 2e-6


@needs_kernel
def test_tokens_that_all_choose_the_same_experts():
    x, _, *weights = problem(70, 32, 16, 6)
    logits = torch.tensor([0.0, 9, 1, 8, 7, 2], device=DEVICE).expand(70, -1).contiguous()
    given = x, logits, *weights, 3, True, "silu"
    assert relative_error(fused_experts.mix_experts(*given), exact(*given)) < 2e-6
    assert fused_experts.route_experts(logits, 6, 3, True)[1].tolist() == [0, 70, 0, 70, 70, 0]


@needs_kernel
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("is_biased", [True, False])
def test_sigmoids_and_a_bias_for_the_choice(normalized, is_biased):
    """LFM2's router. The bias changes who is chosen."""
    x, logits, *weights = problem(9, 32, 16, 6)
    bias = torch.tensor([-2.0, 0, 0, 0, 0, 2], device=DEVICE) if is_biased else None
    given = x, logits, *weights, 3, normalized, "silu"
    out = fused_experts.mix_experts(*given, sigmoid=1.5, expert_bias=bias)
    expected = PlainKernels.mix_experts(*(one.double() for one in given[:4]), *given[4:], sigmoid=1.5, expert_bias=bias)
    assert relative_error(out, expected) < 2e-6
    counts = fused_experts.route_experts(logits, 6, 3, normalized, False, 1.5, bias)[1]
    assert (counts[0], counts[5]) == (0, 9) or not is_biased
    assert counts.sum() == 27
    # So small that their sum is not 1.5:
    scores = fused_experts.route_experts(logits - 30, 6, 3, True, False, 1.5)[0].cpu()
    small = (logits.cpu() - 30).sigmoid().topk(3).values
    assert relative_error(scores.T, 1.5 * small / (small.sum(1, keepdim=True) + 1e-6)) < 1e-5


@needs_kernel
def test_rows_of_padding_may_hold_anything():
    x, logits, *weights = problem(20, 32, 16, 5)
    expected = fused_experts.mix_experts(x, logits, *weights, 3, True, "silu")
    x[3], x[9], logits[3], logits[9] = torch.nan, torch.inf, torch.nan, -torch.inf
    logits[10], logits[11, 2] = torch.inf, torch.nan
    out = fused_experts.mix_experts(x, logits, *weights, 3, True, "silu")
    others = [i for i in range(20) if i not in (3, 9, 10, 11)]
    out, expected = out[:, others], expected[:, others]
    # A token's place among those of its expert may differ, and some processors' matrix products depend on this.
    assert torch.equal(out, expected) if CUDA else relative_error(out, expected) < 1e-6
    assert fused_experts.route_experts(logits, 5, 3, True)[1].max() <= 20
    assert fused_experts.mix_experts(x[:0], logits[:0], *weights, 3, True, "silu").shape == (3, 0, 32)


@needs_gpu
@pytest.mark.parametrize("num_rows", [3, 16, 64, 1000])
def test_a_token_by_itself_and_among_others(num_rows):
    """Its result has the same bits."""
    x, logits, *weights = problem(num_rows, 256, 128, 16, torch.bfloat16)
    out = fused_experts.mix_experts(x, logits, *weights, 4, True, "silu")
    for i in (0, num_rows - 1):
        alone = fused_experts.mix_experts(x[i:i + 1], logits[i:i + 1], *weights, 4, True, "silu")
        assert torch.equal(alone[:, 0], out[:, i])


@needs_gpu
@pytest.mark.parametrize("num_rows", [1, 12, 600])
def test_weights_in_8_bits(num_rows):
    from nanopaged.features.fp8 import quantize
    x, logits, gate_up, down = problem(num_rows, 256, 128, 16, torch.bfloat16)
    (gate_up, gate_up_scale), (down, down_scale) = quantize(gate_up), quantize(down)
    out = fused_experts.mix_experts(x, logits, gate_up, down, 4, True, "silu", gate_up_scale, down_scale)
    meant = (fp8_weight(weight, scale) for weight, scale in ((gate_up, gate_up_scale), (down, down_scale)))
    assert relative_error(out, exact(x, logits, *meant, 4, True, "silu")) < 0.06  # x is cut, too


@pytest.mark.parametrize("memory", [64, 99, 163, 227])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn], ids=str)
def test_tiles_fit_the_shared_memory_of_any_card(memory, dtype):
    for num_rows in (1, 8, 64, 500, 8192):
        for gated in (False, True):
            form = fused_experts.experts_form(num_rows, 8, 128, gated, dtype, memory * 1024)
            rows = form["ROWS"] * (1 + gated) + form["COLUMNS"]
            assert rows * form["TILE"] * dtype.itemsize * form["STAGES"] <= memory * 1024


@needs_kernel
def test_counts_of_all_mixtures():
    """One tensor has them. In some layers the shared expert is among the experts, in others it is not."""
    torch.manual_seed(0)
    counts = fused_experts.Counts()
    counts.num_mixtures = 3
    for num_rows in (5, 1):
        logits = torch.randn(num_rows, 9, device=DEVICE)  # the last one is the shared expert's
        for i, has_shared in enumerate((False, True, False)):
            given = counts.of_mixture(i, logits, 8 + has_shared)
            routed = fused_experts.route_experts(logits, 8, 2, True, has_shared, counts=given)[1]
            expected = fused_experts.route_experts(logits, 8, 2, True, has_shared)[1]
            assert routed is given and torch.equal(routed, expected) and given.data_ptr() % 16 == 0


def test_parts_of_a_router():
    def num_parts(rows, size, dtype=torch.bfloat16):
        return fused_experts.num_router_parts(torch.empty(rows, size, dtype=dtype))

    assert num_parts(64, 2048) == 8 and num_parts(2, 2880) == 15 and num_parts(2, 1024) == 8
    assert num_parts(1, 2048) == num_parts(65, 2048) == num_parts(2, 192) == num_parts(2, 2000) == 1
    assert num_parts(2, 2048, torch.float16) == num_parts(2, 2048, torch.float32) == 1


@needs_kernel
@pytest.mark.parametrize("rows", [2, 9, 20, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_product_of_a_router(monkeypatch, rows, bias):
    monkeypatch.setattr(fused_experts, "num_router_parts", lambda x: 5)
    torch.manual_seed(0)
    router = fused_experts.RouterLinear(960, 40, bias).to(DEVICE)
    for parameter in router.parameters():
        parameter.data.normal_(std=0.03)
    x = torch.randn(rows, 960, device=DEVICE)
    with torch.no_grad():
        y = router(x)
        exact = torch.nn.functional.linear(x.double(), router.weight.double(), router.bias.double() if bias else None)
    assert y.shape == (5, rows, 40) and relative_error(y.double().sum(0), exact) < 1e-5


@needs_kernel
@pytest.mark.parametrize("variant", ["qwen3-moe", "qwen3.5-moe", "gpt-oss"])
def test_what_a_warm_up_compiles(variant):
    """Each task runs. The kernel that chooses experts has a form for each number of the router's partial products."""
    config = replace(load(variant).runner.config, hidden_size=2880)
    runner = SimpleNamespace(config=config, dtype=torch.bfloat16, device=torch.device(DEVICE), fp8=False,
                             modules=fused.MODULES)
    tasks = list(fused_experts.kernel_forms(runner))
    for task in tasks:
        task()
    forms = [task for task in tasks if task.func is fused_experts.route_experts]
    few = {15} if fused.takes_rows(2, torch.bfloat16, runner.device) else set()
    assert few | {1} <= {len(task.args[0]) for task in forms}
