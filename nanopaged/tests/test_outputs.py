"""What callers get back, and what it costs: nothing is converted twice. Work is counted, not time."""
import gc
import weakref
from unittest.mock import Mock

import pytest

from nanopaged import SamplingParams
from nanopaged.api.request import _Sample
from nanopaged.outputs import Logprob, token_logprobs
from nanopaged.tests.helpers import GREEDY, complaint, load


def steps(llm, *request):
    """The outputs of a request, step by step."""
    llm.add_request(*request)
    while llm.has_unfinished_requests():
        yield from llm.step()


def test_log_probabilities_are_converted_once():
    """Each output has the objects of the output before it, which does not change."""
    llm = load(num_blocks=64, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1, prompt_logprobs=2)
    outputs = list(steps(llm, "ROMEO: " * 20, params))
    assert len(outputs) >= 20
    for earlier, later in zip(outputs, outputs[1:]):
        assert all(a is b for a, b in zip(earlier.outputs[0].logprobs, later.outputs[0].logprobs))
        assert all(a is b for a, b in zip(earlier.prompt_logprobs, later.prompt_logprobs) if a)
    samples = [output.outputs[0] for output in outputs[-20:]]
    assert [(len(sample.logprobs), len(sample.token_ids)) for sample in samples] == [(n, n) for n in range(1, 21)]


def test_a_token_is_decoded_once_for_all_positions():
    decoded, order = [], [3, 1, 0, 2]
    tokenizer = Mock(decode=lambda ids, skip_special_tokens: (
        decoded.extend(ids) or ("" if skip_special_tokens else f"<{ids[0]}>")))
    for token in (1, 2):
        found = token_logprobs(token, (-order.index(token) / 8, order.index(token) + 1, order, [0, -1/8, -2/8, -3/8]),
                               tokenizer)
        assert list(found) == [token, *(best for best in order if best != token)]
        assert found == {best: Logprob(-i / 8, i + 1, f"<{best}>") for i, best in enumerate(order)}
    assert sorted(decoded) == [0, 1, 2, 3]
    assert token_logprobs(7, (-1.0, 9, [], []), None) == {7: Logprob(-1.0, 9, None)}


def test_samples_that_have_not_changed_are_not_made_again(monkeypatch):
    made, original = [], _Sample.output
    monkeypatch.setattr(_Sample, "output", lambda self: made.append(self.index) or original(self))
    llm = load(num_blocks=256, max_num_seqs=4)
    *_, output = steps(llm, "ROMEO:", SamplingParams(n=40, seed=1, max_tokens=5, ignore_eos=True))
    assert len(made) == 40 + 40 * 5 - 1  # all at first, one of them with a token; then one for each token
    assert [sample.index for sample in output.outputs] == list(range(40))
    assert all(sample.finish_reason for sample in output.outputs)
    request = llm.requests[llm.add_request("ROMEO:", GREEDY)]
    assert request.output().outputs[0].finish_reason is None
    llm.abort_request(request.request_id)
    assert request.output().outputs[0].finish_reason == "abort"


def test_a_request_keeps_the_log_probabilities_that_it_wants():
    """The request gets no more beside one that wants all of them."""
    llm = load(num_blocks=64)
    params = [SamplingParams(temperature=0, max_tokens=3, logprobs=n, prompt_logprobs=n) for n in (1, -1, 0, 5)]
    ids = [llm.add_request("ROMEO:", p) for p in params]
    requests = [llm.requests[request_id] for request_id in ids]
    with llm.run_until(lambda: not llm.requests):
        llm.unreported.clear()
    for request, count in zip(requests, (1, llm.config.vocab_size, 0, 5)):
        raw = request.samples[0].new_logprobs + [*request.new_prompt_logprobs.values()]
        assert {len(found[2]) for found in raw} == {len(found[3]) for found in raw} == {count}
    entries = [output.prompt_logprobs[1:] + output.outputs[0].logprobs
               for output in (request.output() for request in requests)]
    for some, every in zip(entries[0] + entries[2] + entries[3], entries[1] * 3):
        assert some.items() <= every.items() and set(list(every)[:len(some) - 1]) <= set(some)


@pytest.mark.parametrize("most", [0, 3, 20, -1])
def test_max_logprobs_bounds_what_a_request_may_ask_for(most):
    llm = load(num_blocks=64, max_logprobs=most)
    for name in ("logprobs", "prompt_logprobs"):
        for count in (-1, 0, most, 60 if most < 0 else 0):
            [output] = llm.generate([[1, 2]], SamplingParams(max_tokens=1, **{name: count}))
            [entry] = output.outputs[0].logprobs or output.prompt_logprobs[1:]
            assert len(entry) in ({llm.config.vocab_size} if count < 0 else {count, count + 1})
        if most >= 0:
            message = complaint(llm.generate, [[1, 2]], SamplingParams(max_tokens=1, **{name: most + 1}))
            assert message == (f"{name} must be at most max_logprobs {most}, or -1 for all tokens, not {most + 1}; "
                               "make the LLM with a larger max_logprobs")
    assert not llm.requests


def test_the_engine_forgets_what_has_finished():
    llm = load(num_blocks=64)
    for settings in (dict(logprobs=5), dict(repetition_penalty=1.2)):
        stream = steps(llm, "ROMEO:", SamplingParams(max_tokens=3, **settings))
        seq = weakref.ref(llm.requests[next(stream).request_id].sequences[0])
        assert list(stream)[-1].finished
        gc.collect()
        assert seq() is None

