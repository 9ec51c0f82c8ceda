"""What callers get back, and what it costs: nothing is converted twice. Work is counted, not time."""
import gc
import weakref

import pytest
import torch

from nanopaged import SamplingParams, outputs
from nanopaged.api.beam import BeamGroup
from nanopaged.api.request import _Sample
from nanopaged.device import logprobs
from nanopaged.outputs import token_logprobs
from nanopaged.sampling_params import BeamSearchParams
from nanopaged.tests.helpers import load


@pytest.fixture
def converted(monkeypatch):
    """The tokens whose log probabilities are made into objects."""
    made, original = [], outputs._logprob
    monkeypatch.setattr(outputs, "_logprob", lambda token, *args: made.append(token) or original(token, *args))
    return made


def run(llm, *request):
    llm.add_request(*request)
    while llm.has_unfinished_requests():
        for output in llm.step():
            pass
    return output


def test_log_probabilities_are_converted_once(converted):
    llm = load(num_blocks=64, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1, prompt_logprobs=2)
    output = run(llm, "ROMEO: " * 20, params)
    entries = [entry for entry in output.prompt_logprobs[1:] + output.outputs[0].logprobs]
    assert len(converted) == sum(map(len, entries))


def test_a_stream_converts_log_probabilities_once_and_at_its_end(converted):
    llm = load(num_blocks=64)
    stream = llm.stream("ROMEO:", SamplingParams(temperature=0, max_tokens=20, logprobs=1, ignore_eos=True))
    next(stream)
    assert not converted
    assert "".join(stream) and 20 <= len(converted) <= 40


def test_samples_that_have_not_changed_are_not_made_again(monkeypatch):
    made, original = [], _Sample.output
    monkeypatch.setattr(_Sample, "output", lambda self: made.append(self.index) or original(self))
    llm = load(num_blocks=256, max_num_seqs=4)
    output = run(llm, "ROMEO:", SamplingParams(n=40, seed=1, max_tokens=5, ignore_eos=True))
    assert len(made) == 40 + 40 * 5 - 4  # all at first, four of them with a token; then one for each token
    assert [sample.index for sample in output.outputs] == list(range(40))
    assert all(sample.finish_reason for sample in output.outputs)


def test_an_earlier_output_does_not_change():
    llm = load(num_blocks=64)
    llm.add_request("ROMEO:", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0))
    seen = []
    while llm.has_unfinished_requests():
        seen += llm.step()
    assert [len(output.outputs[0].token_ids) for output in seen] == [1, 2, 3]
    assert [len(output.outputs[0].logprobs) for output in seen] == [1, 2, 3]


def test_a_request_keeps_the_log_probabilities_that_it_wants(monkeypatch):
    """The request gets no more beside one that wants all of them, whether rows stay tensors or not."""
    kept = {}
    for many in (1024, 2):
        monkeypatch.setattr(logprobs, "MANY_LOGPROBS", many)
        llm = load(num_blocks=64)
        params = [SamplingParams(temperature=0, max_tokens=3, logprobs=n, prompt_logprobs=n) for n in (1, -1, 0)]
        ids = [llm.add_request("ROMEO:", p) for p in params]
        requests = [llm.requests[request_id] for request_id in ids]
        with llm._steps_until(lambda: not llm.requests):
            llm.unreported.clear()
        raw = [request.samples[0].new_logprobs + [*request.new_prompt_logprobs.values()] for request in requests]
        assert [{len(found[2]) for found in of_request} for of_request in raw] == [{1}, {llm.config.vocab_size}, {0}]
        outputs_of = [request.output() for request in requests]
        kept[many] = [[{token: (e.logprob, e.rank, e.decoded_token) for token, e in entry.items()}
                       for entry in output.prompt_logprobs[1:] + output.outputs[0].logprobs] for output in outputs_of]
    assert kept[2] == kept[1024]


def test_very_many_log_probabilities_are_made_when_they_are_looked_up(converted):
    ids = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    values = -torch.arange(5000) / 100.0
    place = ids.tolist().index(17)
    lazy = token_logprobs(17, (-place / 100, place + 1, ids, values), -1, None)
    plain = token_logprobs(17, (-place / 100, place + 1, ids.tolist(), values.tolist()), -1, None)
    converted.clear()
    assert lazy[17] == plain[17] and lazy[int(ids[3])] == plain[int(ids[3])]
    assert len(lazy) == 5000 and len(converted) == 2
    assert list(lazy) == list(plain) and lazy == plain and 5000 not in lazy


def test_the_engine_forgets_what_has_finished():
    llm = load(num_blocks=64)
    for params in (SamplingParams(max_tokens=3, logprobs=5), SamplingParams(max_tokens=3, repetition_penalty=1.2)):
        request_id = llm.add_request("ROMEO:", params)
        seq = weakref.ref(llm.requests[request_id].sequences[0])
        while llm.has_unfinished_requests():
            llm.step()
        gc.collect()
        assert seq() is None


def test_a_beam_step_makes_the_hypotheses_that_it_keeps(monkeypatch):
    width, made, original = 64, [], BeamGroup._beam
    monkeypatch.setattr(BeamGroup, "_beam", lambda self, *args: made.append(args) or original(self, *args))
    group = BeamGroup(BeamSearchParams(width, max_tokens=8), frozenset({0}), 8)
    group.extend([[(token, -token / 10) for token in range(1, group.num_candidates + 1)]])
    made.clear()
    group.extend([[(token, -token / 10) for token in range(group.num_candidates)] for _ in range(width)])
    assert len(group.live) == width and len(made) <= 3 * width


def test_a_plain_request_needs_no_logits_editor():
    llm = load(num_blocks=64)
    llm.generate("ROMEO:", SamplingParams(temperature=0.8, top_p=0.9, max_tokens=4))
    assert llm.runner.editor is None
    llm.generate("ROMEO:", SamplingParams(repetition_penalty=1.2, max_tokens=4))
    assert llm.runner.editor is not None
