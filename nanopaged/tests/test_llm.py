"""LLM: prompts and options in, outputs out."""
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import reduce
from itertools import count, zip_longest

import pytest
import torch

import nanopaged
from nanopaged import LLM, SamplingParams, optional_triton
from nanopaged.options import OPTIONS
from nanopaged.tests.helpers import GREEDY, PROMPT, complaint, freed_at_once, load, needs, shared, tokens_of
from nanopaged.tiles import widest_window

# ---- Requests

def test_an_end_token_ends_a_text_unless_it_is_ignored():
    """Some files config.json have an eos_token_id of -1, which no model has. (test_paged.py has other ends.)"""
    llm, params = load("shakespeare"), dict(temperature=0, max_tokens=9, min_tokens=3)
    ids = tokens_of(llm.generate(PROMPT, SamplingParams(**params)))[0]
    at = next(i for i in range(3, 9) if ids.index(ids[i]) == i)  # a token that is new there
    llm.eos_token_ids = {-1, ids[at]}
    for is_ignored, expected in ((False, (ids[:at + 1], "stop", None)), (True, (ids, "length", None))):
        sample = llm.generate(PROMPT, SamplingParams(**params, ignore_eos=is_ignored))[0].outputs[0]
        assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == expected
    assert load("llama3").eos_token_ids == {2, 5, 7}  # of both config files


def test_a_request_that_can_never_fit_is_refused_and_the_rest_go_on():
    llm = load("llama2", num_blocks=4)
    rid = llm.add_request([5, 6, 7], GREEDY)
    with pytest.raises(ValueError, match="the prompt has 64 tokens.*max_model_len 64"):
        llm.add_request([1] * 64, GREEDY)
    with pytest.raises(ValueError):
        llm.generate([[1, 2, 3], [1] * 64], GREEDY)
    assert list(llm.requests) == [rid]
    fills_the_pool = llm.generate([1] * 60, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    assert len(tokens_of(fills_the_pool)[0]) == 4
    while llm.has_unfinished_requests():
        llm.step()
    assert llm.scheduler.block_manager.num_free_blocks == 4


def test_streamed_pieces_join_to_the_text():
    llm = load()
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40)
    pieces = list(llm.stream("ROMEO:", params))
    whole = llm.generate("ROMEO:", params)[0].outputs[0].text
    assert len(pieces) > 10 and "".join(pieces) == whole
    streams = [llm.stream("ROMEO:", params) for _ in range(2)]  # in turns: either's steps finish the other, too
    assert ["".join(column) for column in zip(*zip_longest(*streams, fillvalue=""))] == [whole] * 2
    stream = llm.stream("ROMEO:", params)
    next(stream)
    stream.close()  # a reader who leaves
    assert llm.scheduler.block_manager.num_free_blocks == llm.scheduler.block_manager.num_blocks


@pytest.mark.parametrize("count, longest", [(0, 30), (3, 10), (-1, 1)])
def test_many_log_probabilities_of_a_prompt_are_computed_in_small_chunks(count, longest):
    """The log probabilities of all tokens take as much memory as many steps."""
    llm = load()
    llm.prompt_logprobs_values = 30
    launch, seen = llm.runner.launch, []
    llm.runner.launch = lambda step: seen.append(max(step.num_tokens)) or launch(step)
    [output] = llm.generate([list(range(40))], SamplingParams(max_tokens=2, prompt_logprobs=count, temperature=0))
    assert max(seen) == longest and len(output.prompt_logprobs) == 40


def test_dummy_weights_need_a_config_alone(tmp_path):
    (tmp_path / "config.json").write_text((shared("qwen3").path / "config.json").read_text())
    llm = load(tmp_path, load_format="dummy", num_blocks=64)
    assert len(llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids) == 24
    with pytest.raises(ValueError, match="token ids"):
        llm.generate("text", GREEDY)
    for model in (tmp_path, "./no/such"):
        with pytest.raises(FileNotFoundError, match=str(model)):
            load(model, num_blocks=64)


# ---- Bad input

DEEP = reduce(lambda inner, _: [inner], range(10_000), "a")


@pytest.mark.parametrize("prompt, message", [
    ("", "the prompt is empty"), ([], "the prompt is empty"), ([1, -1], "token id -1"), ([10**6], "token id 1000000"),
    (5, "prompts are a string"), ([1.5], "a prompt is a string or a list of token ids"),
    ([[True]], "a list of token ids"),
    ({"text": "a"}, "no key 'text'; there are prompt_token_ids, prompt, cache_salt"),
    ({"prompt_token_ids": "abc"}, "a list of token ids, not 'abc'"),
    ({"prompt": 5}, "a string, not 5"), ({"prompt": "a", "multi_modal_data": 1}, "no key 'multi_modal_data'; "),
    ([None], "not None"), ("a" * 5000, "max_model_len"),
    (DEEP, "a list of token ids, not a deeply nested list"),
    ({"prompt": "a", "cache_salt": DEEP}, "cache_salt must be a string that is not empty, not a deeply nested list"),
])
def test_bad_prompts_get_a_sentence(prompt, message):
    llm = shared()
    with pytest.raises(ValueError, match=message):
        llm.generate([prompt] if prompt == [] else prompt, GREEDY)
    assert not llm.has_unfinished_requests()
    assert llm.scheduler.block_manager.num_free_blocks == llm.scheduler.block_manager.num_blocks


@pytest.mark.parametrize("call, message", [
    (lambda llm: llm.generate("a", "x"), "sampling_params must be SamplingParams, not 'x'"),
    (lambda llm: llm.generate("a", [{}]), "sampling_params must be SamplingParams, not {}"),
    (lambda llm: llm.add_request("a", [GREEDY]), "must be SamplingParams"),
    (lambda llm: llm.add_request("a", priority=5), "0, unless scheduling_policy is 'priority', not 5"),
    (lambda llm: llm.generate("a", priority=3), "a list with one for each"),
    (lambda llm: llm.generate(["a", "b"], priority=[0, "x"]), "priority must be"),
    (lambda llm: llm.beam_search("a", None), "params must be BeamSearchParams, not None"),
    (lambda llm: llm.beam_search("a", GREEDY), "params must be BeamSearchParams"),
    (lambda llm: llm.chat({"role": "user", "content": "a"}), "a conversation is a list of messages"),
    (lambda llm: llm.chat([{"role": "user", "content": "a"}], chat_template=["x"]),
     r"chat_template must be a Jinja template, not \['x'\]"),
    (lambda llm: llm.chat([{"role": "user", "content": "a"}], chat_template="x", chat_template_kwargs="y"),
     "kwargs must be a dict .*, not 'y'"),
    (lambda llm: llm.abort_request([llm.add_request("a", GREEDY)]), "request_id must be what add_request returned"),
    (lambda llm: llm.generate("a", "x" * 1000), "^.{1,200}$"),  # a sentence, whatever was given
    (lambda llm: list(llm.stream("a", SamplingParams(n=2))), "stream yields one text, and n is 2"),
    (lambda llm: llm.generate("a", use_tqdm=torch.ones(2)), "use_tqdm must be True or False, not "),
    (lambda llm: llm.beam_search("a", nanopaged.BeamSearchParams(2), use_tqdm=torch.ones(2)),
     "use_tqdm must be True or False, "),
])
def test_calls_with_the_wrong_things_get_a_sentence(call, message):
    llm = shared()
    with pytest.raises(ValueError, match=message):
        call(llm)
    for request_id in list(llm.requests):
        llm.abort_request(request_id)
    assert not llm.has_unfinished_requests() and llm.generate(PROMPT, SamplingParams(max_tokens=2))[0].finished
    llm.scheduler.block_manager.check_idle()


@pytest.mark.parametrize("options", [dict(dtype="bfloat16"), dict(kv_cache_dtype="fp8")])
def test_what_tritons_interpreter_computes_wrongly_is_refused(options):
    if optional_triton.INTERPRETED:
        with pytest.raises(ValueError, match="interpreter, which computes bfloat16 and fp8 wrongly; use attention="):
            LLM("shakespeare", device="cpu", attention="triton", **options)
    assert LLM("shakespeare", device="cpu", attention="torch", num_blocks=8, **options).generate([[1, 2]])


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.expected])
def test_a_value_that_an_option_does_not_take_is_refused(name):
    """An array compares itself element by element."""
    values = dict(seed=[-2**63 - 1, 2**63], hf_token=["two\nlines", "\u00e9"], download_dir=["a" * 300, "\0"],
                  swap_space=[2**20], gpu_memory_utilization=[0, 1.01], max_logprobs=[-2, 1.5, "5", True],
                  block_size=[0, 2**31], max_num_seqs=[0, 2**20 + 1], enforce_eager=["x"])
    default = [] if OPTIONS[name].default is None else [None]
    for value in [[], object, torch.ones(2), *values.get(name, []), *default]:
        assert complaint(LLM, **{name: value}) == f"{name} must be {OPTIONS[name].expected}, not {value!r:.80}"


@pytest.mark.parametrize("options, message", [
    *((dict([(name, value)]), f"{name} must be") for name, values in dict(
        dtype=["int8", "", "Float32"], device=["tpu", "", "cuda:x", torch.ones(2)],
        attention=["flash", torch.ones(2)]).items() for value in values), (dict(max_model_len=1025), "more than the"),
    (dict(device="cuda:99"), "device 'cuda:99' is not there"),
    (dict(max_model_len=500, num_blocks=3), "needs 32 blocks of 16 tokens, and the pool has 3"),
    (dict(block_size=2**31 - 1), "or block_size"), (dict(num_blocks=9, num_gpu_blocks_override=8), "give one of them"),
    (dict(override_generation_config={"top_n": 1}), "top_n"),
    (dict(override_generation_config={"temperature": "hot"}), "temperature must be a number from 0 to 1e6, not 'hot'"),
    (dict(hf_overrides={"num_attention_heads": "many"}), "heads"),
    *((dict([(name, value)]), name) for name, value in (  # nanopaged lacks what vLLM has
        ("tensor_parallel_size", 3), ("data_parallel_size", 10_000), ("pipeline_parallel_size", 2),
        ("quantization", "awq"), ("enable_lora", True), ("speculative_config", {"model": "ngram"}),
        ("cpu_offload_gb", 4), ("tokenizer_mode", "mistral"), ("runner", "pooling"),
        ("logprobs_mode", "processed_logits"), ("limit_mm_per_prompt", {"image": 2}))),
    *((dict([(name, 1)]), f"LLM has no option {name!r}; {advice}") for name, advice in (
        ("max_num_seq", "did you mean 'max_num_seqs'?"), ("trust_remote_codes", "did you mean 'trust_remote_code'?"),
        ("quux", "help(nanopaged.LLM) lists its options")))])
def test_bad_engine_options_get_a_sentence(options, message):
    assert message in complaint(LLM, **dict(block_size=16, enforce_eager=True, device="cpu") | options)


def test_hf_overrides_replace_entries_of_the_config():
    window = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}
    llm = LLM(hf_overrides=window, device="cpu", num_blocks=20)
    assert [widest_window(one.config) for one in (llm, LLM(device="cpu", num_blocks=20))] == [24, 0]


# ---- The life of an engine

@needs("beam", "logprobs", "samples")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_gets_a_sentence(tmp_path):
    llm = load("llama2", num_blocks=64)
    calls = [lambda: llm.generate(PROMPT), lambda: next(llm.stream(PROMPT)), lambda: llm.add_request(PROMPT), llm.step,
             lambda: llm.beam_search(PROMPT, nanopaged.BeamSearchParams(2, max_tokens=2)), llm.reset_prefix_cache]
    if not (pid := os.fork()):
        with (tmp_path / "said").open("w") as file:
            for call in (*calls, llm.__exit__):  # it may end there, inside a `with` block, without an error
                try:
                    call()
                except RuntimeError as error:
                    print(error, file=file)
        os._exit(0)
    os.waitpid(pid, 0)
    sentences = (tmp_path / "said").read_text().splitlines()
    assert len(sentences) == len(calls)
    assert all(f"forked process {pid}" in line and "spawn" in line for line in sentences)
    assert llm.generate(PROMPT, GREEDY)[0].finished


def test_the_prefix_cache_can_be_emptied():
    prompt = "To be, or not to be, that is the question: Whether"
    for options in ({}, dict(data_parallel_size=2, device="cpu")):
        llm = load(**options)
        llm.generate(prompt)
        rid = llm.add_request(prompt)
        llm.step()
        assert llm.reset_prefix_cache() is False
        llm.abort_request(rid)
        assert llm.reset_prefix_cache() is True
        output = llm.generate(prompt)[0]
        assert output.num_cached_tokens == 0 < len(output.prompt_token_ids) // 16


def test_the_prefix_cache_is_not_emptied_under_a_request_on_the_host():
    llm, answers = load("llama2", num_blocks=6, block_size=4, swap_space=0.01), Counter()
    for token, length in ((5, 8), (6, 12)):
        llm.add_request([token] * 8, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
    while llm.has_unfinished_requests():
        llm.step()
        answers[tuple(seq.status.name for seq in llm.scheduler.waiting), llm.reset_prefix_cache()] += 1
    assert answers.keys() == {((), False), (("SWAPPED",), False), ((), True)} and answers[(), True] == 1


def test_an_engine_in_a_with_block_is_freed_at_its_end():
    block = ExitStack()
    llm = block.enter_context(load())
    stream = llm.stream("ROMEO:", GREEDY)
    next(stream)
    llm.add_request([5, 6, 7], GREEDY)
    llm.step()
    with freed_at_once(llm.runner, llm.runner.model, llm.engine):
        block.close()
    assert not llm.requests and llm.scheduler.block_manager.num_free_blocks == llm.scheduler.block_manager.num_blocks
    for call in (lambda: llm.generate([5, 6, 7]), llm.step, lambda: next(stream), lambda: llm.add_request([5, 6, 7]),
                 lambda: llm.beam_search([5, 6, 7], nanopaged.BeamSearchParams(2)),
                 *(lambda settings=settings: llm.generate([5, 6, 7], SamplingParams(**settings)) for settings in (
                     dict(min_tokens=1), dict(presence_penalty=1), dict(n=2), dict(prompt_logprobs=1)))):
        with pytest.raises(RuntimeError, match="was closed"):
            call()


def test_a_thread_that_searches_when_the_engine_is_closed_gets_the_sentence():
    with ThreadPoolExecutor() as pool, pytest.raises(RuntimeError, match="was closed"):
        with load("llama2", num_blocks=64) as llm:
            params = nanopaged.BeamSearchParams(2, max_tokens=20)
            search = pool.submit(lambda: [llm.beam_search(PROMPT, params) for _ in count()])
            while not (llm.num_steps or search.done()):
                time.sleep(0.001)
        search.result(30)


def test_what_an_engine_shows_of_itself():
    llm = load("llama2", num_blocks=64, max_num_batched_tokens=128)
    assert repr(llm) == (f"LLM('{llm.path}': float32 on {llm.runner.device}, 64 blocks of 16 tokens, "
                         f"max_model_len {llm.max_model_len}, max_num_seqs 64, max_num_batched_tokens 128)")
