"""The engine's lock: threads that call one engine, calls from within a step, and Ctrl-C.

Tests with the fixture `engine` count steps, not seconds. Its runner is a fake that gives every sequence token 5 and
takes a millisecond, in which other threads can run, as a GPU would.
"""
import contextlib
import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from itertools import count

import pytest

import nanopaged
from engine import Sampled
from nanopaged import SamplingParams
from nanopaged.api.lock import Interrupts
from nanopaged.tests.helpers import GREEDY, PROMPT, ROOT, check_books, load, shared, tokens_of


def tokens(count: int, **settings) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **settings)


@pytest.fixture(autouse=True)
def ctrl_c():
    """Comes, also in a job that a script has started with &, which ignores it. No line is traced after a test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    sys.settrace(None)
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def engine():
    """An LLM with a fake runner; engine.steps holds the sequences that sampled in each step."""
    llm = load(num_blocks=4096, max_num_seqs=512)
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

    with ThreadPoolExecutor() as pool:
        pool.submit(work), pool.submit(work)
        while len(engine.steps) < 10:
            time.sleep(0.001)
        yield engine
        stop.set()
    engine.scheduler.block_manager.check_idle()


def finish(llm, request_id):
    """The request's last output, from llm.step()."""
    output = None
    while llm.has_unfinished_requests():
        output = next((output for output in llm.step() if output.request_id == request_id), output)
    return output


# ---- Threads: nobody waits while others compute

def test_a_call_waits_for_a_step_or_two_and_not_for_the_loops_of_others(busy):
    """A short request returns with its last token, who adds or aborts gets his turn, and a beam search branches after
    each step. (The machine may keep a thread itself waiting for a few more.)"""
    for _ in range(5):
        request_id = busy.generate([[7, 8]], tokens(2))[0].request_id
        after = len(busy.steps)
        assert after - 1 - max(i for i in range(after) if request_id in busy.steps[i]) <= 3
        for call in (lambda: busy.add_request([1, 2], tokens(50)), lambda: busy.abort_request(request_id)):
            before = len(busy.steps)
            request_id = call()
            assert len(busy.steps) - before <= 5
    before = len(busy.steps)
    busy.beam_search([[1, 2]], nanopaged.BeamSearchParams(beam_width=2, max_tokens=30))
    assert len(busy.steps) - before <= 30 * 3


def test_streams_get_their_pieces_as_they_come(busy):
    gaps = []

    def read():
        last = len(busy.steps)
        for _ in busy.stream([1, 2], tokens(150)):
            gaps.append(len(busy.steps) - last)
            last = len(busy.steps)

    with ThreadPoolExecutor(16) as pool:
        for _ in range(16):
            pool.submit(read)
    # A thread that the system keeps from running for a while is late without the engine's doing.
    assert len(gaps) >= 16 * 140 and sorted(gaps)[len(gaps) * 99 // 100] <= 5


def test_a_slow_reader_holds_nobody_back(engine):
    slow = engine.stream([1, 2], tokens(42))
    next(slow)
    before = len(engine.steps)
    engine.generate([[3, 4]] * 3, tokens(40))
    assert len(engine.steps) - before <= 41
    assert len(list(slow)) <= 3  # the first of these pieces is all that came meanwhile


def test_all_prompts_of_a_call_are_added_at_once(busy):
    outputs = busy.generate([[i % 50] for i in range(400)], tokens(3))
    first = [next(i for i, ids in enumerate(busy.steps) if output.request_id in ids) for output in outputs]
    assert max(first) - min(first) <= 1


def test_requests_come_from_many_threads():
    llm, params = load(), tokens(12, temperature=0)
    expected = llm.generate(PROMPT, params)[0].outputs[0].text
    calls = [lambda: "".join(llm.stream(PROMPT, params)), lambda: llm.generate(PROMPT, params)[0].outputs[0].text,
             lambda: llm.abort_request(llm.add_request(PROMPT, tokens(500))) or expected]
    request_id = llm.add_request(PROMPT, tokens(30, temperature=0))
    with ThreadPoolExecutor(12) as pool:
        texts = [pool.submit(call) for call in calls * 4]
        output = finish(llm, request_id)  # what others' steps compute of it is reported here
    assert len(output.outputs[0].token_ids) == 30 and {text.result() for text in texts} == {expected}


# ---- From within a step: nothing changes beneath it

def test_a_call_from_within_a_step_is_refused():
    llm, greedy = load(num_blocks=64), tokens(8, temperature=0)
    expected = llm.generate("JULIET:", greedy)
    for call in (lambda: llm.generate([[9]], tokens(2)), lambda: next(llm.stream([9], tokens(2))), llm.step,
                 lambda: llm.add_request([9]),
                 lambda: llm.beam_search([[9]], nanopaged.BeamSearchParams(2, max_tokens=2))):
        params = replace(greedy, logits_processors=[lambda token_ids, logits, call=call: call() or logits])
        failed, other = llm.generate(["ROMEO:", "JULIET:"], [params, greedy])
        assert failed.outputs[0].finish_reason == "error"
        assert "from within one of its steps" in failed.outputs[0].stop_reason
        assert tokens_of([other]) == tokens_of(expected) and not llm.requests and not llm.scheduler.waiting
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


@pytest.mark.parametrize("when", [1, 2, 4])
def test_a_stream_that_is_collected_in_the_middle_of_a_step_waits_for_its_end(when):
    llm, params, calls = load(), tokens(12, temperature=0), count(1)
    gc.disable()  # it comes when it is called
    ring = [llm.stream([9, 8, 7], SamplingParams(max_tokens=40))]
    next(ring[0])
    ring.append(ring)
    manager, rid = llm.scheduler.block_manager, llm.add_request(PROMPT, params)
    register = manager.cache_full_blocks
    llm.step()
    ring = None
    manager.cache_full_blocks = lambda seq: (register(seq), next(calls) == when and gc.collect())
    output = finish(llm, rid)
    gc.enable()
    assert tokens_of([output]) == tokens_of(shared().generate(PROMPT, params))
    manager.check_idle()


# ---- Ctrl-C

def test_an_interrupt_comes_to_who_waits_for_another_thread():
    llm, held, done = load("llama2"), threading.Event(), threading.Event()

    def hold():
        with llm.lock:
            held.set()
            done.wait(20)

    with ThreadPoolExecutor() as pool:
        holder = pool.submit(hold)
        held.wait()
        # As a terminal does it: the signal comes to the process, and so to the main thread, which waits for the lock.
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6, 7]], GREEDY)
        assert holder.running()  # it still has the lock
        done.set()
    assert len(llm.generate([[5, 6, 7]], GREEDY)) == 1 and not llm.requests


def test_interrupts_while_waiting_for_the_gpu_and_after_each_step_lose_nothing():
    llm, interrupts = load("llama2", lookahead=1), [3, 5]
    rid, launch, output = llm.add_request([5, 6, 7], GREEDY), llm.runner.launch, None
    update = llm.scheduler.update
    llm.scheduler.update = lambda *args: (update(*args), signal.raise_signal(signal.SIGINT))[0]

    def interrupted(step):
        assert len(llm.engine.launched) <= 1
        read = launch(step)

        def reader():
            if interrupts and len(llm.requests[rid].sequences[0].token_ids) == interrupts[0]:
                interrupts.pop(0)
                raise KeyboardInterrupt
            return read()

        return reader

    llm.runner.launch = interrupted
    while llm.has_unfinished_requests():
        try:
            [output] = llm.step() or [output]
        except KeyboardInterrupt:
            check_books(llm.scheduler)
    assert not interrupts and output.finished
    assert tokens_of([output]) == tokens_of(shared("llama2").generate([[5, 6, 7]], GREEDY))


class Interrupter:
    """Sends Ctrl-C when a number of lines of the project has run. Where Ctrl-C is let through, it is raised there, and
    nothing is traced any more until `arm` is called again."""

    def __init__(self):
        self.num_lines = 0
        # These two set and restore the handler. Python looks for signals after calls, not at every line as here.
        self.left_out = {Interrupts.hold.__code__, Interrupts.release.__code__}

    def arm(self, num_lines):
        self.num_lines = num_lines
        sys.settrace(self.trace)

    def trace(self, frame, event, arg):
        name = frame.f_code.co_filename
        path = name.removeprefix(f"{ROOT}/")  # ROOT may contain a virtual environment
        is_ours = path.startswith("nanopaged/") and "/tests/" not in path or path == "engine.py"
        if not (is_ours or name == contextlib.__file__) or frame.f_code in self.left_out:
            return None
        if event == "line":
            self.num_lines -= 1
            if self.num_lines == 0:
                signal.raise_signal(signal.SIGINT)
        return self.trace


def interrupted_requests(llm, rng, num_lines):
    """Run requests of many kinds with llm.step(), and other calls beside them. Ctrl-C comes after a random number of
    lines, again and again. Returns the outputs of the requests, and how many interrupts there were."""
    interrupter, num_interrupts, ids = Interrupter(), 0, []
    greedy = dict(temperature=0, ignore_eos=True, max_tokens=12)
    settings = [greedy, dict(greedy, repetition_penalty=1.3, logprobs=1), dict(n=3, seed=5, max_tokens=10, stop="e"),
                dict(greedy, frequency_penalty=1.0, bad_words=[" the"], logit_bias={5: 2.0}),
                dict(seed=1, max_tokens=5), dict(greedy, prompt_logprobs=1, min_tokens=3)]
    if find_spec("llguidance"):
        settings += [dict(temperature=0, max_tokens=30, structured_outputs={"choice": ["the quick brown fox"]}),
                     dict(seed=3, max_tokens=12, structured_outputs={"regex": "[a-z ]+"}, presence_penalty=1.0)]
    for i, chosen in enumerate(settings):
        ids.append(llm.add_request(f"ROMEO: {'I' * i}", SamplingParams(**chosen)))
    requests = [llm.requests[request_id] for request_id in ids]
    calls = [lambda: list(llm.stream("KING:", SamplingParams(max_tokens=3))),
             lambda: llm.generate(["JULIET:", "KING:"], SamplingParams(max_tokens=3, presence_penalty=2.0)),
             lambda: llm.beam_search("KING:", nanopaged.BeamSearchParams(beam_width=2, max_tokens=3))]
    while llm.has_unfinished_requests():
        call = rng.choice([llm.step, llm.step, llm.step, *calls]) if num_lines else llm.step
        try:
            if num_lines and rng.random() < 0.6:  # the others make progress
                interrupter.arm(rng.randint(1, num_lines))
            call()
        except KeyboardInterrupt:
            num_interrupts += 1
        finally:
            sys.settrace(None)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        for one in llm.engines:
            check_books(one.scheduler)
        assert set(llm.requests) <= set(ids)  # what was interrupted has left nothing behind
        assert {seq.request_id for seq in llm.scheduler.running + llm.scheduler.waiting} <= set(ids)
    llm.scheduler.block_manager.check_idle()
    return [[(sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason)
             for sample in request.output().outputs] for request in requests], num_interrupts


@pytest.mark.parametrize("options", [{}, dict(lookahead=1), dict(lookahead=1, max_num_seqs=3, num_blocks=80),
                                     dict(lookahead=1, data_parallel_size=2, device="cpu")], ids=str)
def test_an_interrupt_at_any_line_changes_no_text(options, seeds=(5, 14, 15)):
    expected, total = interrupted_requests(shared(), None, 0)[0], 0
    llm = load(**options)
    for seed in seeds:
        outputs, num_interrupts = interrupted_requests(llm, random.Random(seed), 2000)
        total += num_interrupts
        assert outputs == expected
    assert total > 2 * len(seeds)


@pytest.mark.parametrize("call", [
    lambda llm: llm.generate([PROMPT] * 3, GREEDY), lambda llm: list(llm.stream(PROMPT, GREEDY)),
    lambda llm: llm.beam_search(PROMPT, nanopaged.BeamSearchParams(beam_width=3, max_tokens=20))],
    ids=["generate", "stream", "beam_search"])
def test_a_second_interrupt_while_the_first_is_cleaned_up_leaves_nothing_behind(call):
    """And the first one comes at once, in the middle of a step."""
    llm, interrupter, calls, went_on = load("llama2"), Interrupter(), count(), []
    forward = llm.runner.model.forward

    def interrupted(*args, **kwargs):
        if next(calls) == 1:
            interrupter.arm(num_lines)  # the second one
            signal.raise_signal(signal.SIGINT)
            went_on.append(num_lines)
        return forward(*args, **kwargs)

    llm.runner.model.forward = interrupted
    for num_lines in itertools.count(1, 3):
        calls = count()
        with pytest.raises(KeyboardInterrupt):
            call(llm)
        sys.settrace(None)
        assert not (llm.requests or llm.scheduler.running or llm.scheduler.waiting)
        llm.scheduler.block_manager.check_idle()
        if interrupter.num_lines > 0:  # the clean-up has fewer lines
            break
    assert num_lines > 50 and not went_on and signal.getsignal(signal.SIGINT) is signal.default_int_handler
