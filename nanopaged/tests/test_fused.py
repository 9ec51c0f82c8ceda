"""The modules and functions that take the model's place on a GPU compute what its own do."""
import json

import pytest
import torch

from model import Layer, activate
from nanopaged import LLM, SamplingParams
from nanopaged.device import fused as fused_module
from nanopaged.device.fused import add_partials_and_norm, compile_rows, fuse, num_partial_products, partial_products
from nanopaged.device.last_layer import LastLayer, skip_rows_without_logits
from nanopaged.device.logits import add_bias, penalise
from nanopaged.device.sampler import pick
from nanopaged.tests.helpers import CUDA, GOLDEN, compiles, load, needs_gpu


@pytest.mark.parametrize("intermediate_size", [512, 8960])  # a row's sum goes over at most 1,024 numbers at a time
@compiles
def test_fused_functions_compute_what_the_plain_ones_do(tmp_path, monkeypatch, intermediate_size):
    """On a GPU torch.compile compiles the functions, and CUDA graphs record the fused modules. On a CPU the same
    functions run without being compiled."""
    config = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(
        hidden_size=64, num_attention_heads=8, intermediate_size=intermediate_size, max_position_embeddings=512)))
    prompts = [[1, 2, 3], [4, 5], [7] * 300]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    cut = []  # numbers of rows
    monkeypatch.setattr(fused_module, "partial_products",
                        lambda x, *others: cut.append(len(x)) or partial_products(x, *others))
    if not CUDA:
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)

    def run(fused):
        llm = LLM(str(tmp_path), load_format="dummy", dtype="float32", num_blocks=64, max_num_seqs=4,
                  enforce_eager=not fused)
        if fused and not CUDA:
            fuse(llm.runner.model)
        outputs = llm.generate(prompts, params) + [llm.generate(prompts[0], params)[0]]  # together, and a single row
        return [[next(iter(logprobs.items())) for logprobs in output.outputs[0].logprobs] for output in outputs]

    plain = run(False)
    assert not cut
    for ours, theirs in zip(run(True), plain):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [x.logprob for _, x in ours] == pytest.approx([x.logprob for _, x in theirs], abs=1e-3)
    assert (64 if CUDA else 3) in cut and max(cut) <= 256 and 1 not in cut  # three tokens are a step of 64 there


@pytest.mark.parametrize("max_num_batched_tokens", [8192, 7])
def test_the_last_layer_computes_what_the_plain_one_does(max_num_batched_tokens):
    params = [SamplingParams(temperature=0, max_tokens=6, logprobs=1, prompt_logprobs=wanted, ignore_eos=True)
              for wanted in (None, 2, None)]

    def run(skips):
        llm = load("qwen3", max_num_batched_tokens=max_num_batched_tokens, enforce_eager=True)
        if skips:
            skip_rows_without_logits(llm.runner.model)
        outputs = llm.generate([[1, 2, 3], [4, 5, 6, 7, 8, 9], [7] * 30], params)
        found = [logprobs for output in outputs for logprobs in output.outputs[0].logprobs]
        found += outputs[1].prompt_logprobs[1:]
        return [[(token, entry.logprob) for token, entry in entries.items()] for entries in found]

    for ours, theirs in zip(run(True), run(False), strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [logprob for _, logprob in ours] == pytest.approx([logprob for _, logprob in theirs], abs=1e-4)


def test_enforce_eager_leaves_the_plain_layers():
    for enforce_eager, expected in ((True, Layer), (False, LastLayer)):
        llm = LLM(str(GOLDEN / "qwen3"), device="cpu", num_blocks=8, enforce_eager=enforce_eager)
        assert type(llm.runner.model.layers[-1]) is expected and type(llm.runner.model.layers[0]) is Layer


def test_compiled_functions_get_rows(monkeypatch):
    """torch would compile them once more for no rows, as a step has them in which no row needs logits."""
    rows = []

    def compiled(function, **_):
        return lambda x, *others: rows.append(x.shape[-2]) or function(x, *others)

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch._dynamo, "maybe_mark_dynamic", lambda *_: None)
    llm = LLM(str(GOLDEN / "qwen3"), device="cpu", num_blocks=8, max_num_batched_tokens=8)
    fuse(llm.runner.model)
    llm.generate(list(range(1, 20)), SamplingParams(max_tokens=1))  # 8, 8 and 3 tokens
    assert {8, 3, 1} == set(rows)


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
    assert num_parts(1, 20480, 4096) == num_parts(64, 4096, 4096) == 2
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


def test_a_second_model_is_compiled_for_its_own_sizes(monkeypatch):
    graphs, compile = [], torch.compile

    def compiler(graph, _):
        inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        graphs.append({tuple(size if type(size) is int else "rows" for size in x.shape)
                       for x in inputs if torch.is_tensor(x)})
        return graph

    monkeypatch.setattr(torch, "compile",
                        lambda function, dynamic, options: compile(function, dynamic=dynamic, backend=compiler))
    for width, eps in ((64, 1e-6), (96, 1e-5)):
        norm, activation = compile_rows(add_partials_and_norm, 2), compile_rows(activate, 1)
        draw, bias, penalties = compile_rows(pick, 4), compile_rows(add_bias, 3), compile_rows(penalise, 4)
        for rows in (5, 9):  # as many rows as one likes
            x, whole = torch.randn(rows, width), torch.ones(rows, dtype=torch.int64)
            weight = torch.nn.Parameter(torch.ones(width))
            norm(x, x + 1, weight, None, eps)
            activation(x, "silu", True)
            draw(x, whole.float(), whole, whole)
            bias(x, whole, x)
            penalties(x, whole, x.int(), torch.ones(rows, 5, dtype=torch.int32))
        # Nothing but the number of rows varies. (eps would be a tensor, too, of shape ().)
        assert graphs == [{("rows", width), (width,)}, {("rows", width)}, {("rows", width), ("rows",)},
                          {("rows", width), ("rows",)}, {("rows", width), ("rows",), ("rows", 5)}]
        graphs.clear()
