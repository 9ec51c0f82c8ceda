"""What goes wrong in a step ends what it must and nothing else, and leaves a usable engine."""
import math
import threading
from contextlib import suppress
from itertools import count
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock, patch

import pytest
import torch

import nanopaged
from nanopaged import SamplingParams
from nanopaged.tests.helpers import GREEDY, PROMPT, check_books, let_fail, load, needs, rewritten, shared, tokens_of

# ---- Requests that fail

def finished(llm):
    """Request id -> the last output of its sample, from llm.step()."""
    results = {}
    while llm.has_unfinished_requests():
        results |= {output.request_id: output.outputs[0] for output in llm.step()}
    return results


@pytest.mark.parametrize("process, words", [
    (lambda logits: logits * math.nan, "not a number"), (lambda logits: {}["oops"], "KeyError('oops')")],
    ids=["nan", "error"])
def test_broken_logits_end_that_request_and_not_the_batch(process, words):
    """A token that was not drawn has no log probability either."""
    llm, broken = load(), [lambda ids, logits: process(logits) if len(ids) == 3 else logits]
    params = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, logits_processors=processors)
              for processors in (None, broken, None)]
    well, failed, other = (output.outputs[0] for output in llm.generate([PROMPT] * 3, params))
    assert well.finish_reason == "length" and well.token_ids == other.token_ids and len(well.token_ids) == 8
    assert failed.finish_reason == "error" and words in failed.stop_reason
    assert failed.token_ids == well.token_ids[:3] and failed.logprobs == well.logprobs[:3]
    total = sum(entry[token].logprob for entry, token in zip(failed.logprobs, failed.token_ids))
    assert failed.cumulative_logprob == pytest.approx(total)
    llm.scheduler.block_manager.check_idle()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])  # fp8 takes its scales from what the weights compute
def test_broken_weights_end_every_request_and_the_engine_goes_on(tmp_path, kv_cache_dtype):
    path = rewritten(tmp_path, "qwen3", lambda tensors: {name: tensor * math.nan for name, tensor in tensors.items()})
    llm = load(path, kv_cache_dtype=kv_cache_dtype, lookahead=1)
    for _ in range(2):
        assert [output.outputs[0].finish_reason for output in llm.generate([PROMPT] * 3, GREEDY)] == ["error"] * 3
    beam = llm.beam_search(PROMPT, nanopaged.BeamSearchParams(beam_width=2, max_tokens=4))[0].outputs[0]
    assert beam.finish_reason == "error" and "not a number" in beam.stop_reason
    with pytest.raises(RuntimeError, match="not a number"):
        list(llm.stream(PROMPT))
    llm.scheduler.block_manager.check_idle()


class Panic(BaseException):
    """As the package pyo3 makes one of a panic in Rust."""


def panic(*_):
    raise Panic("in Rust")


def break_detokenizer(llm, prompt, add):
    """Give the text of this prompt, as token ids, a detokenizer with this `add`."""
    make = llm.tokenizer.detokenizer
    llm.tokenizer.detokenizer = lambda skip=True, ids=(): (
        SimpleNamespace(add=add) if ids == prompt else make(skip, ids))


@pytest.mark.parametrize("settings", [{}, dict(stop="zzz")], ids=["at the end", "at each token"])
def test_a_detokenizer_that_fails_ends_its_request_and_no_other(settings):
    params = [SamplingParams(temperature=0, max_tokens=8, **settings), SamplingParams(temperature=0, max_tokens=2)]
    expected = shared().generate(["ROMEO:", "JULIET:"], params[::-1])
    llm = load()
    break_detokenizer(llm, llm.tokenizer.encode("JULIET:"), panic)
    ids = [llm.add_request(prompt, p) for prompt, p in zip(("JULIET:", "ROMEO:"), params)]
    results = finished(llm)
    again = [output.outputs[0] for output in llm.generate(["JULIET:", "ROMEO:"], params)]
    for failed, well in ([results[i] for i in ids], again):
        assert failed.finish_reason == "error" and "in Rust" in failed.stop_reason
        assert well.text == expected[0].outputs[0].text and well.finish_reason == "length"
    with pytest.raises(RuntimeError, match="in Rust"):
        list(llm.stream("JULIET:", params[0]))
    assert not llm.requests
    llm.scheduler.block_manager.check_idle()


def test_a_detokenizer_that_fails_while_another_thread_plans_a_step():
    """`generate` reads its outputs without the lock. The other thread's sequence is in no queue, and has blocks."""
    llm, planning, has_failed = load(), threading.Event(), threading.Event()
    long = PROMPT * 3
    expected = llm.generate([long], GREEDY)  # its blocks are in the prefix cache now
    others: list = []
    thread = threading.Thread(target=lambda: others.extend(llm.generate([long], GREEDY)))
    run = llm.scheduler.run

    def fail(ids):
        llm.scheduler.run = lambda seq: planning.set() or has_failed.wait(30) and run(seq)
        thread.start()
        assert planning.wait(30)
        panic()

    break_detokenizer(llm, PROMPT, fail)
    try:
        failed = llm.generate([PROMPT], GREEDY)[0].outputs[0]
    finally:
        has_failed.set()
        thread.join(30)
    assert failed.finish_reason == "error" and "in Rust" in failed.stop_reason
    assert tokens_of(others) == tokens_of(expected)


@pytest.mark.parametrize("method", ["on_token", "fill_mask"])
def test_a_grammar_that_panics_ends_its_request_and_no_other(method):
    from nanopaged.features.grammar import GrammarSequence, Masks
    llm = load()
    ids = [llm.add_request(prompt, GREEDY) for prompt in ("JULIET:", "ROMEO:")]
    grammar = dict(fill_mask=lambda address, drafts: 0, on_token=lambda seq, token, _: [token]) | {method: panic}
    seq = llm.requests[ids[0]].sequences[0]
    seq.__class__ = GrammarSequence
    llm.runner.use(Masks)
    seq.grammar = SimpleNamespace(eos_token_ids=[0], **grammar)
    results = finished(llm)
    assert results[ids[0]].finish_reason == "error" and "in Rust" in results[ids[0]].stop_reason
    assert tokens_of(shared().generate("ROMEO:", GREEDY)) == [results[ids[1]].token_ids]


@pytest.mark.parametrize("name, value", [("n", 0), ("max_tokens", -5), ("temperature", "x"), ("logprobs", "x")])
def test_settings_that_were_changed_after_their_check(name, value):
    """They are checked again when a request is made of them, and a later change has no effect on it."""
    llm, params = load("llama2"), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    rid = llm.add_request([5, 6, 7], params)
    setattr(params, name, value)
    with pytest.raises(ValueError, match=f"{name} must be .*{value}"):
        llm.add_request([5, 6, 7], params)
    assert len(finished(llm)[rid].token_ids) == 4


# ---- Steps that fail

def test_an_error_inside_a_step_leaves_a_usable_engine():
    llm, numbers = load("llama2"), count()
    let_fail(llm.runner, RuntimeError("the device fell off"), lambda step: next(numbers) == 2)
    with pytest.raises(RuntimeError, match="fell off"):
        llm.generate([[5, 6, 7], [8] * 40], GREEDY)
    assert not llm.has_unfinished_requests()
    check_books(llm.scheduler)
    llm.scheduler.block_manager.check_idle()
    assert tokens_of(llm.generate([[5, 6, 7]], GREEDY)) == tokens_of(shared("llama2").generate([[5, 6, 7]], GREEDY))


@needs("recovery")
@pytest.mark.parametrize("is_computed", [False, True])
@pytest.mark.parametrize("fails_at", [5, 7, 9])
def test_a_step_that_fails_leaves_the_settings_alone(fails_at, is_computed):
    """A sequence that waits out the failed step has a token that the host has not seen, and penalties count this token
    all the same. They do not count the failed step's own token, which no output has."""
    def run(fails_at, lookahead):
        llm = load("llama3", block_size=4, max_num_batched_tokens=8, scheduling_policy="priority", num_blocks=75,
                   lookahead=lookahead)
        launch, numbers = llm.runner.launch, count(1)

        def fail(step):
            fails = next(numbers) == fails_at
            read = launch(step) if is_computed or not fails else None
            if fails:
                raise torch.OutOfMemoryError("for once")
            return read

        llm.runner.launch = fail
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, frequency_penalty=2.0,
                                presence_penalty=1.0, allowed_token_ids=list(range(20, 26)))
        rid = llm.add_request([5, 6, 7], params)
        for i in count():
            if i == 4:  # a request that takes whole steps for itself
                llm.add_request(list(range(60, 100)), SamplingParams(temperature=0, max_tokens=1), priority=-1)
            for output in llm.step():
                if output.request_id == rid and output.finished:
                    return output.outputs[0].token_ids

    assert run(fails_at, lookahead=1) == run(fails_at, lookahead=0) == run(0, lookahead=0)


def test_a_token_that_is_drawn_again_counts_once():
    """With a grammar a step is sampled when it is read, or by the next launch, and again if that fails."""
    pytest.importorskip("llguidance", reason="structured outputs need it; .ci/run installs it for its last part")
    params = SamplingParams(temperature=0, max_tokens=8, frequency_penalty=2.0,
                            structured_outputs=nanopaged.StructuredOutputsParams(regex="[a-d]{9}"))
    llm = load()
    expected = tokens_of(llm.generate(PROMPT, params))
    llm.runner.rows.last_tokens = table = Mock(wraps=llm.runner.rows.last_tokens)
    table.index_copy_.side_effect = [DEFAULT, torch.OutOfMemoryError("for once"), *[DEFAULT] * 30]
    rid = llm.add_request(PROMPT, params)
    results = {}
    while llm.has_unfinished_requests():
        with suppress(torch.OutOfMemoryError):
            results |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
    assert [results[rid]] == expected


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_two_steps_that_are_read_at_once_lose_nothing(error):
    """A reading that fails, or Ctrl-C while it waits: the next call reads a sequence's last two steps."""
    llm, errors, outputs = load("llama2", lookahead=1), [error], []
    llm.add_request(PROMPT, SamplingParams(max_tokens=4, logprobs=1, ignore_eos=True))
    for _ in range(3):
        llm.step()
    step, read = llm.engine.launched[0]

    def flaky():
        if errors:
            raise errors.pop()
        return read()

    llm.engine.launched[0] = step, flaky
    with pytest.raises(error):
        llm.step()
    while llm.has_unfinished_requests():
        outputs += llm.step()
    sample = outputs[-1].outputs[0]
    assert len(sample.token_ids) == len(sample.logprobs) == 4


def test_a_call_that_only_reads_has_done_something():
    """Else beams would give up their blocks, although the step that was read has their candidates."""
    llm = load("llama2", lookahead=0)
    llm.add_request(PROMPT, SamplingParams(max_tokens=1))
    assert llm.engine.launch() and llm.engine.step() and not llm.engine.step()


# ---- Memory and blocks

def test_a_step_out_of_memory_is_tried_again_with_less_and_the_token_budget_grows_back(capsys):
    from nanopaged.features.recovery import STEPS_UNTIL_REGROWTH
    llm, is_short = load("llama2", max_num_batched_tokens=64), True
    expected = tokens_of(llm.generate([PROMPT] * 5, GREEDY))
    let_fail(llm.runner, torch.OutOfMemoryError("CUDA out of memory"),
             lambda step: is_short and sum(step.num_tokens) > 20)
    assert tokens_of(llm.generate([PROMPT] * 5, GREEDY)) == expected
    assert "at most 16 tokens" in capsys.readouterr().err and llm.scheduler.max_num_batched_tokens == 16
    llm.scheduler.block_manager.check_idle()
    is_short = False
    for _ in range(2):
        llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=STEPS_UNTIL_REGROWTH + 10, ignore_eos=True))
    assert llm.scheduler.max_num_batched_tokens == 64


@needs("recovery")
def test_an_interrupt_in_the_clean_up_of_a_step_out_of_memory_is_not_lost():
    llm = load("llama2", lookahead=1)
    read = Mock(side_effect=KeyboardInterrupt)  # the tokens of the step before
    with patch.object(llm.runner, "launch", side_effect=[read, torch.OutOfMemoryError("CUDA out of memory")]), \
            pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPT, GREEDY)
    assert tokens_of(llm.generate([PROMPT], GREEDY)) == tokens_of(shared("llama2").generate([PROMPT], GREEDY))


def test_a_leak_is_noticed_whatever_ends_the_last_request():
    for end in (lambda llm: llm.abort_request(llm.add_request(PROMPT)), lambda llm: llm.stream(PROMPT).close(),
                lambda llm: llm.beam_search(PROMPT, nanopaged.BeamSearchParams(beam_width=2, max_tokens=2))):
        llm = load()
        llm.engine.lookahead = 0  # else a step may be under way when a request ends, and the books are checked after it
        stream = llm.stream(PROMPT)
        llm.scheduler.block_manager.free_queue.popitem()
        with pytest.raises(RuntimeError, match="1 blocks"):
            end(llm)
            next(stream), stream.close()
