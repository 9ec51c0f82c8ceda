"""Threads that call one engine: nobody waits while others compute, and nothing changes beneath a step.

Steps are counted, not seconds: the runner is a fake that gives every sequence token 5 and takes a millisecond, as a GPU
would, in which other threads can run.
"""
import threading
import time

import pytest

from nanopaged import LLM, BeamSearchParams, SamplingParams
from engine import Sampled


def tokens(count: int, **settings) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **settings)


@pytest.fixture
def engine():
    """An LLM with a fake runner; engine.steps holds the sequences that sampled in each step."""
    llm = LLM(dtype="float32", num_blocks=4096, max_num_seqs=512)
    llm.steps = []

    def launch(step):
        llm.steps.append([seq.request_id for seq in step.sampled])
        time.sleep(0.001)
        logprobs = [(-1.0, 1, [5, 6, 7], [-1.0, -1.5, -2.0])] * len(step.sampled)
        return lambda: Sampled([5] * len(step.sampled), logprobs, [])

    llm.runner.launch = launch
    return llm


@pytest.fixture
def busy(engine):
    """The engine, while two threads generate."""
    stop = threading.Event()

    def work():
        while not stop.is_set():
            engine.generate([[1, 2, 3]], tokens(50))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    while len(engine.steps) < 10:
        time.sleep(0.001)
    yield engine
    stop.set()
    for thread in threads:
        thread.join()
    engine.scheduler.block_manager.check_idle()


def test_a_short_request_returns_with_its_last_token(busy):
    for _ in range(10):
        before = len(busy.steps)
        request_id = busy.generate([[7, 8]], tokens(2))[0].request_id
        after = len(busy.steps)
        last = max(i for i in range(before, after) if request_id in busy.steps[i])
        assert after - 1 - last <= 3


def test_streams_get_their_pieces_as_they_come(busy):
    pieces, gaps = [], []

    def read():
        count, last = 0, len(busy.steps)
        for _ in busy.stream([1, 2], tokens(150)):
            gaps.append(len(busy.steps) - last)
            count, last = count + 1, len(busy.steps)
        pieces.append(count)

    threads = [threading.Thread(target=read) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pieces) == 16 and min(pieces) >= 140
    # A thread that the system keeps from running for a while is late without the engine's doing.
    assert sorted(gaps)[len(gaps) * 99 // 100] <= 5


def test_a_beam_search_branches_after_each_step(busy):
    before = len(busy.steps)
    busy.beam_search([[1, 2]], BeamSearchParams(beam_width=2, max_tokens=30))
    assert len(busy.steps) - before <= 30 * 3


def test_a_slow_reader_holds_nobody_back(engine):
    slow = engine.stream([1, 2], tokens(42))
    next(slow)
    before = len(engine.steps)
    engine.generate([[3, 4]] * 3, tokens(40))
    assert len(engine.steps) - before <= 41
    assert len(list(slow)) <= 3  # the first of these pieces is all that came meanwhile


def test_all_prompts_of_a_call_are_added_at_once(busy):
    before = len(busy.steps)
    outputs = busy.generate([[i % 50] for i in range(400)], tokens(3))
    first = [next(i for i in range(before, len(busy.steps)) if output.request_id in busy.steps[i]) for output in outputs]
    assert max(first) - min(first) <= 1


def test_threads_share_their_steps(engine):
    barrier = threading.Barrier(64)

    def work():
        barrier.wait()
        engine.generate([[1, 2]], tokens(40))

    threads = [threading.Thread(target=work) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(engine.steps) <= 64 * 40 / 10  # one alone takes 40 steps, and some begin later


@pytest.mark.parametrize("call", [
    lambda llm: llm.generate([[9]], tokens(2)), lambda llm: next(llm.stream([9], tokens(2))), lambda llm: llm.step(),
    lambda llm: llm.add_request([9]), lambda llm: llm.beam_search([[9]], BeamSearchParams(2, max_tokens=2))],
    ids=["generate", "stream", "step", "add_request", "beam_search"])
def test_a_call_from_within_a_step_is_refused(call):
    llm = LLM(dtype="float32", num_blocks=64)
    expected = llm.generate(["ROMEO:", "JULIET:"], tokens(8, temperature=0))

    def process(token_ids, logits):
        call(llm)
        return logits

    params = [tokens(8, temperature=0, logits_processors=[process]), tokens(8, temperature=0)]
    failed, other = llm.generate(["ROMEO:", "JULIET:"], params)
    assert failed.outputs[0].finish_reason == "error" and "from within one of its steps" in failed.outputs[0].stop_reason
    assert other.outputs[0].text == expected[1].outputs[0].text
    assert not llm.requests and not llm.scheduler.waiting
    llm.scheduler.block_manager.check_idle()


def test_an_abort_from_within_a_step_waits_for_its_end(engine):
    launch = engine.runner.launch
    request_id = engine.add_request([1, 2], tokens(50))

    def abort(step):
        engine.abort_request(request_id)
        assert request_id in engine.requests
        return launch(step)

    engine.runner.launch = abort
    engine.step()
    assert request_id not in engine.requests and not engine.scheduler.running
    engine.scheduler.block_manager.check_idle()


def test_a_tokenizer_that_fails_ends_its_request_and_no_other(engine):
    class Failing:
        def add(self, ids):
            raise KeyError("a broken vocabulary")

    ids = [engine.add_request([1, 2], tokens(4, stop="x")), engine.add_request([1, 3], tokens(4))]
    engine.requests[ids[0]].samples[0].detokenizer = Failing()
    results = {}
    while engine.has_unfinished_requests():
        results |= {output.request_id: output.outputs[0] for output in engine.step()}
    assert results[ids[0]].finish_reason == "error" and "a broken vocabulary" in results[ids[0]].stop_reason
    assert results[ids[1]].finish_reason == "length"
