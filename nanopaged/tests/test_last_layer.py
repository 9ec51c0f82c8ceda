"""The last layer computes the rows that need logits, and no others."""
import pytest

from model import LastLayer, Layer
from nanopaged import LLM, SamplingParams
from nanopaged.features import last_layer
from nanopaged.features.last_layer import ShortLastLayer
from nanopaged.tests.helpers import GOLDEN, GREEDY, as_rows, load, use_modules


def test_the_rows_of_the_last_layer():
    """The drawing in last_layer.py: the MLP of the last layer computes the rows that need logits, the others all."""
    rows = {name: cells for name, *cells in as_rows(last_layer.__doc__, "token  ")}
    llm = load("qwen3", device="cpu", max_num_batched_tokens=8, enable_prefix_caching=False)
    decoder, batches, num_rows = llm.runner.model, [], []
    decoder.register_forward_pre_hook(lambda _, arguments: batches.append(arguments[0]))
    for layer in decoder.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, arguments: num_rows.append(len(arguments[0])))
    for prompt in ([1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]):
        llm.add_request(prompt, GREEDY)
        if prompt[0] == 1:
            llm.step()
    num_rows.clear()
    llm.step()
    names = [name[0] for name in rows["token"]]
    assert batches[1].query_start_loc.tolist() == [*map(names.index, "abc"), len(names)]
    needed = [i for i, mark in enumerate(rows["attention, MLP"][:8]) if mark == "x"]
    drawing = "logits_indices {} {}, sampling_places {} {} (A, B)"
    assert rows["attention, MLP"][8] == drawing.format(*needed, *batches[1].sampling_places)
    assert batches[1].logits_indices.tolist() == needed
    assert num_rows == [8] * (llm.config.num_layers - 1) + [len(needed)]


def test_the_last_layer_attends_only_for_what_samples():
    llm, rows = load("qwen3", device="cpu", max_num_batched_tokens=32, enable_prefix_caching=False), []
    kernels, layers = llm.runner.kernels, llm.config.num_layers

    def attention(q, *args, **kwargs):
        rows.append(len(q))
        return kernels.attention(q, *args, **kwargs)

    llm.runner.kernels = kernels._replace(attention=attention)
    for prompt_logprobs, expected in (
            (None, [32] * (layers - 1) + [8] * (layers - 1) + [1] + [1] * layers),
            # With logits for all: what samples is computed by itself all the same, so that its bits are.
            (0, [32] * layers + [8] * (layers - 1) + [1, 8] + [1] * layers)):
        rows.clear()
        llm.generate(list(range(40)), SamplingParams(max_tokens=2, prompt_logprobs=prompt_logprobs, ignore_eos=True))
        assert rows == expected
    rows.clear()
    for prompt in ([5], [6], [7, 8]):  # nor does it depend on how many others there are
        llm.add_request(prompt, SamplingParams(max_tokens=1))
    llm.step()
    assert rows == [4] * (layers - 1) + [3]


@pytest.mark.parametrize("max_num_batched_tokens", [8192, 7])
def test_the_last_layer_computes_what_the_plain_one_does(max_num_batched_tokens):
    params = [SamplingParams(temperature=0, max_tokens=6, logprobs=1, prompt_logprobs=wanted, ignore_eos=True)
              for wanted in (None, 2, None)]

    def run(skips):
        llm = load("qwen3", max_num_batched_tokens=max_num_batched_tokens, enforce_eager=True)
        if skips:
            use_modules(llm, last_layer.MODULES)
        outputs = llm.generate([[1, 2, 3], [4, 5, 6, 7, 8, 9], [7] * 30], params)
        found = [logprobs for output in outputs for logprobs in output.outputs[0].logprobs]
        found += outputs[1].prompt_logprobs[1:]
        return [[(token, entry.logprob) for token, entry in entries.items()] for entries in found]

    for ours, theirs in zip(run(True), run(False), strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [logprob for _, logprob in ours] == pytest.approx([logprob for _, logprob in theirs], abs=1e-4)


def test_enforce_eager_leaves_the_plain_layers():
    for enforce_eager, expected in ((True, LastLayer), (False, ShortLastLayer)):
        llm = LLM(str(GOLDEN / "qwen3"), device="cpu", num_blocks=8, enforce_eager=enforce_eager)
        assert type(llm.runner.model.layers[-1]) is expected and type(llm.runner.model.layers[0]) is Layer
