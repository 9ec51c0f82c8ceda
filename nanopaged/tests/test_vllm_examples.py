"""vLLM's offline examples with the import changed: the same calls, and what they print held to what it should be.

The models bear the names that the examples use, and a function stands in for their download (test_hub.py has that).
They are tiny: models of nanopaged/golden, with the outputs that transformers computes from them, and the bundled one.
"""
import ast
import io
import json
import os
import re
import runpy
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nanopaged import LLM, BeamSearchParams, RequestOutput, SamplingParams, StructuredOutputsParams
from nanopaged.api import llm as api
from nanopaged.tests.helpers import BUNDLED, GOLDEN, complaint, expectations
from nanopaged.weights import hub
from nanopaged.weights.checkpoint import read_safetensors

OPT, LLAMA, QWEN = "facebook/opt-125m", "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-0.6B"
MAX_POSITIONS = 2048  # the goldens have 72 or 128; positions behind those change nothing before them


# --------------------------------------------------------------------------------------------------
# Models by name, with a tokenizer of 200 tokens
# --------------------------------------------------------------------------------------------------

# OPT's special tokens (its files do not call <s> special), the characters of ASCII, and as many syllables as have room.
# The tests cut texts without the code under test: no two syllables overlap, so the longest token is the right one.
MERGES = [(consonant, vowel) for consonant in "bcdfghjklmnpqrstvwxyz" for vowel in "aeiou"]
TOKENS = ["<s>", "<pad>", "</s>", "<unk>", " ", "\n", *map(chr, range(33, 127)), *map("".join, MERGES)][:200]
BYTES = {" ": "\u0120", "\n": "\u010a"}  # as byte-level tokenizers write them
LONGEST_FIRST = re.compile("|".join(map(re.escape, sorted(TOKENS, key=len, reverse=True))))
TEMPLATE = ("{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}"
            "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")


def encode(text: str) -> list[int]:
    return [TOKENS.index(token) for token in LONGEST_FIRST.findall(text)]


def decode(ids: list[int]) -> str:
    return "".join(TOKENS[i] for i in ids if i not in (1, 2, 3))


def write_tokenizer(folder: Path) -> None:
    """vocab.json and merges.txt, as OPT has them."""
    (folder / "vocab.json").write_text(json.dumps({BYTES.get(token, token): i for i, token in enumerate(TOKENS)}))
    merges = [" ".join(pair) for pair in MERGES if "".join(pair) in TOKENS]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    config = GOLDEN / "tokenizers" / "opt" / "tokenizer_config.json"
    (folder / "tokenizer_config.json").write_text(config.read_text())


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory):
    """A folder for each model. The tests are about the calls, so a CPU will do."""
    folder = tmp_path_factory.mktemp("hub")
    for name, golden in ((OPT, "opt"), (LLAMA, "llama3")):
        (folder / name).mkdir(parents=True)
        config = json.loads((GOLDEN / golden / "config.json").read_text()) | {"max_position_embeddings": MAX_POSITIONS}
        (folder / name / "config.json").write_text(json.dumps(config))
        write_tokenizer(folder / name)

    # In the files that are on the Hub: no safetensors, no tokenizer.json.
    weights = dict(read_safetensors(GOLDEN / "opt" / "model.safetensors"))
    name = "model.decoder.embed_positions.weight"
    num_missing = MAX_POSITIONS + 2 - len(weights[name])
    rest = torch.randn(num_missing, weights[name].shape[1], generator=torch.Generator().manual_seed(0))
    torch.save(weights | {name: torch.cat([weights[name], rest.half() / 2])}, folder / OPT / "pytorch_model.bin")

    (folder / LLAMA / "model.safetensors").symlink_to(GOLDEN / "llama3" / "model.safetensors")
    (folder / LLAMA / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.9}')
    (folder / LLAMA / "chat_template.jinja").write_text(TEMPLATE)
    (folder / QWEN).parent.mkdir()
    (folder / QWEN).symlink_to(BUNDLED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "download", lambda name, *_: folder / name)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


def expected(variant: str) -> list[tuple[list[int], list[int], torch.Tensor]]:
    """(prompt, greedy continuation, logits of the prompt), as transformers has them."""
    prompts, continuations, logits = expectations(variant)
    return [(prompt.tolist(), ids.tolist(), rows) for prompt, ids, rows in zip(prompts, continuations, logits)]


def first(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


# --------------------------------------------------------------------------------------------------
# Basic generation
# --------------------------------------------------------------------------------------------------

PROMPTS = ["Hello, my name is", "The president of the United States is", "The capital of France is",
           "The future of AI is"]


def check(outputs: list[RequestOutput], prompts: list[str], max_tokens: int = 16) -> None:
    """The outputs come in the order of the prompts, each with a text of that many tokens, as every example expects."""
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert isinstance(output, RequestOutput) and output.finished and isinstance(output.request_id, str)
        assert output.prompt_token_ids == [2] + encode(output.prompt)
        (completion,) = output.outputs
        assert completion.index == 0 and completion.text == decode(completion.token_ids)
        assert completion.logprobs is completion.cumulative_logprob is completion.stop_reason is None
        if completion.finish_reason != "stop":  # the model is random, and may well say that it is done
            assert completion.finish_reason == "length" and len(completion.token_ids) == max_tokens
    assert len({output.request_id for output in outputs}) == len(outputs)


def test_basic():
    llm = LLM(model="facebook/opt-125m")
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    outputs = llm.generate(PROMPTS, sampling_params)
    check(outputs, PROMPTS)
    check(llm.generate("Hello, my name is"), PROMPTS[:1])


def test_text_to_text():
    """The weights of the bundled model give transformers' text, and not only its tokens."""
    llm = LLM(model="Qwen/Qwen3-0.6B", max_model_len=256)
    tokenizer = llm.get_tokenizer()
    cases = expected("shakespeare")
    prompts = [tokenizer.decode(prompt) for prompt, _, _ in cases]
    assert "To be, or not to be" in prompts
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40))
    assert [output.prompt_token_ids for output in outputs] == [prompt for prompt, _, _ in cases]
    assert first(outputs) == [tokenizer.decode(continuation[:40]) for _, continuation, _ in cases]


def test_the_checkpoints_defaults():
    """The default is generation_config="auto", as in vLLM."""
    llm = LLM(model="meta-llama/Llama-3.2-1B-Instruct")
    sampling_params = llm.get_default_sampling_params()
    assert sampling_params == SamplingParams(temperature=0.6, top_p=0.9)  # of generation_config.json
    sampling_params.max_tokens = 20
    sampling_params.temperature = 0.5
    sampling_params.top_k = 30
    check(llm.generate(PROMPTS, sampling_params), PROMPTS, max_tokens=20)


@pytest.mark.parametrize("options, settings", [
    (dict(generation_config="auto"), dict(temperature=0.6, top_p=0.9)), (dict(generation_config="vllm"), {}),
    (dict(override_generation_config={"temperature": 0.3, "max_new_tokens": 7}),
     dict(temperature=0.3, top_p=0.9, max_tokens=7)),
    (dict(generation_config="vllm", override_generation_config={"temperature": 0.3}), dict(temperature=0.3))])
def test_options_change_the_checkpoints_defaults(options, settings):
    assert LLM(model=LLAMA, **options).get_default_sampling_params() == SamplingParams(**settings)
    with pytest.raises(ValueError, match="temperature must be a number from 0 to 1e6, not 'hot'"):
        LLM(model=LLAMA, override_generation_config={"temperature": "hot"})


def test_a_second_run_gives_the_same_texts():
    sampling_params, texts = SamplingParams(temperature=0.8, top_p=0.95), []
    for seed in (42, 42, 43):
        llm = LLM(model="facebook/opt-125m", seed=seed)
        texts.append(first(llm.generate(PROMPTS, sampling_params)))
    assert texts[0] == texts[1] != texts[2] and len(set(texts[0])) == len(PROMPTS)


def test_settings_for_each_prompt():
    """The prompts and settings of vLLM's engine example."""
    prompts = ["A robot may not injure a human being", "To be or not to be,", "What is the meaning of life?", "Hello"]
    sampling_params = [
        SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1),
        SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2),
        SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1),
        SamplingParams(n=3, temperature=0.8, stop=["\n", "a"], max_tokens=200)]
    outputs = LLM(model="facebook/opt-125m").generate(prompts, sampling_params)
    assert [output.prompt for output in outputs] == prompts
    assert [[completion.index for completion in output.outputs] for output in outputs] == [[0], [0], [0, 1], [0, 1, 2]]
    assert [output.prompt_logprobs is None for output in outputs] == [False, True, True, True]
    assert outputs[2].outputs[0].text != outputs[2].outputs[1].text
    for completion in outputs[3].outputs:
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 200
        assert completion.stop_reason in ("\n", "a", None)
        assert not {"\n", "a"} & set(completion.text)
    assert any(completion.stop_reason for completion in outputs[3].outputs)


# --------------------------------------------------------------------------------------------------
# Chat
# --------------------------------------------------------------------------------------------------

CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about the importance of higher education."},
]
CONVERSATION_TEXT = "</s>" + "".join(f"{message['role']}: {message['content']}</s>" for message in CONVERSATION)
CONVERSATION_TEXT += "assistant: "


def test_chat():
    llm = LLM(model="meta-llama/Llama-3.2-1B-Instruct")
    sampling_params = SamplingParams(temperature=0, max_tokens=16)
    (output,) = llm.chat(CONVERSATION, sampling_params, use_tqdm=False)
    assert output.prompt == CONVERSATION_TEXT
    assert output.prompt_token_ids == encode(CONVERSATION_TEXT)  # one </s> in front, not two
    assert output.outputs[0].text == decode(output.outputs[0].token_ids) != ""
    assert first(llm.chat(CONVERSATION, sampling_params=sampling_params)) == first([output])
    assert first(llm.generate({"prompt_token_ids": output.prompt_token_ids}, sampling_params)) == first([output])
    conversations = [CONVERSATION for _ in range(10)]
    outputs = llm.chat(conversations, sampling_params, use_tqdm=True, chat_template_content_format="auto")
    assert [output.prompt for output in outputs] == [CONVERSATION_TEXT] * 10 and first(outputs) == first([output]) * 10
    conversations = [CONVERSATION[:2], CONVERSATION]
    outputs = llm.chat(messages=conversations, sampling_params=[sampling_params, sampling_params], use_tqdm=False)
    assert [one.prompt.count("</s>") for one in outputs] == [3, 5] and first(outputs)[1:] == first([output])
    with pytest.raises(ValueError, match="chat_template_content_format must be 'auto', not 'openai'"):
        llm.chat(CONVERSATION, sampling_params, chat_template_content_format="openai")


def test_chat_with_another_template():
    chat_template = "{% for message in messages %}{{ message.role + ': ' + message.content }}\n{% endfor %}"
    llm = LLM(model="meta-llama/Llama-3.2-1B-Instruct")
    outputs = llm.chat([CONVERSATION] * 2, llm.get_default_sampling_params(), chat_template=chat_template)
    text = "".join(f"{message['role']}: {message['content']}\n" for message in CONVERSATION)
    assert [output.prompt for output in outputs] == [text] * 2
    assert outputs[0].prompt_token_ids == encode(text)


def test_chat_that_continues_the_last_message():
    llm = LLM(model="meta-llama/Llama-3.2-1B-Instruct")
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello! How"}]
    (output,) = llm.chat(messages, SamplingParams(max_tokens=4), add_generation_prompt=False,
                         continue_final_message=True)
    assert output.prompt == "</s>user: Hello</s>assistant: Hello! How"


def test_chat_with_tools():
    tools = [{"type": "function", "function": {"name": "get_current_weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
    template = ("{% if tools %}{{ tools | tojson }}\n{% endif %}{% for message in messages %}{{ message.role }}"
                "{{ '(' + message.tool_call_id + ')' if message.tool_call_id }}: {{ message.content }}\n{% endfor %}")
    llm = LLM(model="meta-llama/Llama-3.2-1B-Instruct")
    sampling_params = SamplingParams(max_tokens=32, temperature=0.0)
    messages = [{"role": "user", "content": "What is the temperature in Dallas?"}]
    outputs = llm.chat(messages, sampling_params=sampling_params, tools=tools, chat_template=template)
    question = json.dumps(tools) + "\nuser: What is the temperature in Dallas?\n"
    assert outputs[0].prompt == question
    output = outputs[0].outputs[0].text.strip()
    messages.append({"role": "assistant", "content": output})
    messages.append({"role": "tool", "content": "It is 85 degrees.", "tool_call_id": "a1b2c3d4e"})
    outputs = llm.chat(messages, sampling_params, tools=tools, chat_template=template)
    assert outputs[0].prompt == question + f"assistant: {output}\ntool(a1b2c3d4e): It is 85 degrees.\n"
    # The first turn is cached.
    assert outputs[0].num_cached_tokens >= len(encode(question)) // 16 * 16


@pytest.mark.parametrize("kwargs, end", [(None, ""), ({"enable_thinking": True}, ""),
                                         ({"enable_thinking": False}, "<think></think>")])
def test_chat_template_kwargs(kwargs, end):
    """Qwen3's thinking is switched off in this way."""
    template = ("{{ messages[0].content }}"
                "{{ '' if enable_thinking is not defined or enable_thinking else '<think></think>' }}")
    (output,) = LLM(model="Qwen/Qwen3-0.6B").chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=1),
                                                  chat_template=template, chat_template_kwargs=kwargs)
    assert output.prompt == "Hello" + end


# --------------------------------------------------------------------------------------------------
# Beam search
# --------------------------------------------------------------------------------------------------

def beam_case(model: str, beam_width: int) -> dict:
    """A case in which no text ends early, so that vLLM and transformers agree on what is best."""
    cases = json.loads((GOLDEN / "beam" / "expected.json").read_text())["cases"]
    (case,) = [case for case in cases
               if case["model"] == model and case["beam_width"] == beam_width and not case["eos_token_ids"]]
    return case


def test_beam_search():
    """vLLM's beams are sequences, whose tokens and text begin with the prompt."""
    llm, case = LLM(model="facebook/opt-125m"), beam_case("opt", 4)
    prompt = case["prompt_token_ids"]
    params = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True, temperature=0.0, length_penalty=1.0)
    outputs = llm.beam_search([{"prompt_token_ids": prompt}, {"prompt": decode(prompt[1:])}], params)
    assert [output.prompt for output in outputs] == [None, decode(prompt[1:])]
    assert outputs[1].sequences[0].text == outputs[1].prompt + outputs[1].outputs[0].text
    for sequence, sample, beam in zip(outputs[0].sequences, outputs[0].outputs, case["expected"], strict=True):
        assert sequence.tokens == prompt + beam["token_ids"] and sample.token_ids == beam["token_ids"]
        assert sequence.text == decode(sequence.tokens) == decode(prompt) + sample.text
        assert sequence.cum_logprob == pytest.approx(beam["cumulative_logprob"], abs=1e-4)
        assert sequence.finish_reason in (None, "length")  # vLLM leaves it open


# --------------------------------------------------------------------------------------------------
# Prefix caching
# --------------------------------------------------------------------------------------------------

PREFIX = ("You are an expert school principal, skilled in managing faculty and staff. Draft ten questions for a first "
          "grade Head Teacher. Based on this information, fulfill the following paragraph: ")


def test_prefix_caching():
    generating_prompts = [PREFIX + prompt for prompt in PROMPTS]
    sampling_params = SamplingParams(temperature=0.0)
    regular_llm = LLM(model="facebook/opt-125m", gpu_memory_utilization=0.4, enable_prefix_caching=False)
    regular = regular_llm.generate(generating_prompts, sampling_params)
    check(regular, generating_prompts)
    assert [output.num_cached_tokens for output in regular] == [0] * 4

    prefix_cached_llm = LLM(model="facebook/opt-125m", enable_prefix_caching=True, gpu_memory_utilization=0.4)
    (warm_up,) = prefix_cached_llm.generate(generating_prompts[0], sampling_params)
    cached = prefix_cached_llm.generate(generating_prompts, sampling_params)
    assert warm_up.num_cached_tokens == 0 and first(cached) == first(regular)
    for output in cached[1:]:
        assert output.num_cached_tokens == (1 + len(encode(PREFIX))) // 16 * 16


# --------------------------------------------------------------------------------------------------
# Token ids
# --------------------------------------------------------------------------------------------------

def test_prompts_of_token_ids():
    from nanopaged import TextPrompt, TokensPrompt
    llm = LLM(model="facebook/opt-125m")
    sampling_params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    ids, continuations, _ = zip(*expected("opt"))
    for prompts in ([TokensPrompt(prompt_token_ids=prompt) for prompt in ids],
                    [{"prompt_token_ids": prompt} for prompt in ids], list(ids)):
        outputs = llm.generate(prompts=prompts, sampling_params=sampling_params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == list(continuations)
        assert [(output.prompt, output.prompt_token_ids) for output in outputs] == [(None, prompt) for prompt in ids]
        assert first(outputs) == list(map(decode, continuations))
        assert first(llm.generate(prompts[0], sampling_params)) == first(outputs)[:1]
    (output,) = llm.generate(TextPrompt(prompt=PROMPTS[0]), sampling_params)
    assert output.prompt == PROMPTS[0] and output.prompt_token_ids == [2] + encode(PROMPTS[0])


# --------------------------------------------------------------------------------------------------
# What else vLLM's calls carry
# --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [
    dict(tensor_parallel_size=1), dict(trust_remote_code=True), dict(disable_log_stats=False),
    dict(enable_chunked_prefill=True),
    dict(enforce_eager=True, max_num_seqs=4, max_num_batched_tokens=64, block_size=16), dict(dtype="half"),
    dict(dtype=torch.float32),
    dict(tokenizer="facebook/opt-125m", tokenizer_mode="auto", revision=None, tokenizer_revision=None),
    dict(num_gpu_blocks_override=100, max_model_len=256),
    dict(quantization=None, pipeline_parallel_size=1, cpu_offload_gb=0, disable_custom_all_reduce=True,
         max_logprobs=20),
    dict(limit_mm_per_prompt={}, mm_processor_kwargs=None, kv_transfer_config=None, logprobs_mode="raw_logprobs",
         hf_token=None, download_dir=None, override_generation_config={}),
], ids=lambda options: " ".join(options))
def test_engine_options_of_vllm(options):
    llm = LLM(model="facebook/opt-125m", **options)
    check(llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95)), PROMPTS)
    if "num_gpu_blocks_override" in options:
        assert llm.scheduler.block_manager.num_blocks == 100


class Array:
    """Compares itself element by element, as an array of numpy."""
    def __eq__(self, other):
        return torch.ones(2)


@pytest.mark.parametrize("option, value", [
    ("tensor_parallel_size", 3), ("pipeline_parallel_size", 2), ("quantization", "awq"), ("enable_lora", True),
    ("speculative_config", {"model": "ngram"}), ("cpu_offload_gb", 4), ("tokenizer_mode", "mistral"),
    ("runner", "pooling"), ("logprobs_mode", "processed_logits"), ("limit_mm_per_prompt", {"image": 2}),
    ("quantization", torch.ones(2)), ("load_format", torch.ones(2)), ("hf_token", True), ("download_dir", 5),
    ("override_generation_config", ["temperature"]), ("override_generation_config", {"top_n": 1}),
    ("hf_token", "a\nb"), ("download_dir", "d" * 300),
    *((name, Array()) for name in ("device", "attention", "num_blocks", "scheduling_policy")),
    ("data_parallel_size", 10_000), ("max_num_seqs", 10**9), ("max_num_batched_tokens", 10**18),
])
def test_what_nanopaged_lacks_gets_a_sentence(option, value):
    assert option in complaint(LLM, model="facebook/opt-125m", **{option: value})


@pytest.mark.parametrize("option, near", [
    ("max_num_seq", "'max_num_seqs'"), ("gpu_memory_utilisation", "'gpu_memory_utilization'"),
    ("tensor_parallel", "'tensor_parallel_size'"), ("trust_remote_codes", "'trust_remote_code'"), ("quux", None)])
def test_an_unknown_option_names_the_nearest(option, near):
    advice = f"did you mean {near}?" if near else "help(nanopaged.LLM) lists its options"
    with pytest.raises(ValueError, match=re.escape(f"LLM has no option {option!r}; {advice}")):
        LLM(**{option: 1})


@pytest.mark.parametrize("method", ["encode", "embed", "classify", "score", "reward"])
def test_methods_for_pooling_models_get_a_sentence(method):
    llm = LLM(model="facebook/opt-125m")
    assert re.search(f"{method}.* pooling model", complaint(getattr(llm, method), PROMPTS, PROMPTS, use_tqdm=False))


def test_structured_outputs():
    sampling_params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
    if find_spec("llguidance"):
        llm = LLM(model="Qwen/Qwen3-0.6B")
        assert llm.generate(PROMPTS[0], sampling_params)[0].outputs[0].text in ("Positive", "Negative")
    with pytest.raises(ValueError, match="guided_decoding .* use structured_outputs"):
        SamplingParams(guided_decoding={"choice": ["Positive", "Negative"]})


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_use_tqdm(monkeypatch):
    """A bar is drawn on a terminal, and is gone at the end. The bar is the default of generate and chat, not of
    beam_search."""
    llm, beams = LLM(model="meta-llama/Llama-3.2-1B-Instruct"), BeamSearchParams(beam_width=2, max_tokens=3)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)

    def drawn(call, *args, stderr=Terminal, **how) -> str:
        monkeypatch.setattr(sys, "stderr", stderr())
        call(*args, **how)
        return sys.stderr.getvalue()

    for call, *args, default in ((llm.generate, PROMPTS, params, True), (llm.chat, [CONVERSATION] * 4, params, True),
                                 (llm.beam_search, PROMPTS, beams, False)):
        bar = drawn(call, *args, use_tqdm=True)
        assert re.match(r"\r\[\.{20}\] 0/4 prompts, \d:\d\d, \d+ tokens/s", bar) and bar.endswith(" \r")
        assert bool(drawn(call, *args)) is default and drawn(call, *args, use_tqdm=False) == ""
        assert drawn(call, *args, stderr=io.StringIO) == ""


def test_numpy():
    """Prompts and priorities may be numpy's."""
    numpy = pytest.importorskip("numpy")
    llm = LLM(model="facebook/opt-125m", scheduling_policy="priority")
    params, text = SamplingParams(temperature=0, max_tokens=4), "Hello, my name is"
    prompts = [[2, 50, 70], [2, 60, 80], [2, 90, 100]]
    texts = first(llm.generate(prompts, params))
    arrays = [numpy.array(prompt) for prompt in prompts]
    for given in (numpy.array(prompts), arrays, [list(array) for array in arrays], torch.tensor(prompts),
                  [{"prompt_token_ids": array} for array in arrays], [numpy.uint16(prompt) for prompt in prompts]):
        outputs = llm.generate(given, params, priority=numpy.arange(3))
        assert first(outputs) == texts
        assert {type(token) for output in outputs for token in output.prompt_token_ids} == {int}
    assert first(llm.generate(arrays[0], params)) == first(llm.generate(list(arrays[0]), params)) == texts[:1]
    assert first(llm.generate([numpy.array(text)], params)) == first(llm.generate(text, params))
    llm.add_request(arrays[0], params, priority=numpy.int32(-2))
    (seq,) = llm.scheduler.waiting
    assert seq.order[0] == -2 and type(seq.order[0]) is int
    for given in (numpy.array([1.5, 2]), numpy.array(5), numpy.array([True]), [numpy.float32(5)], numpy.array([[[5]]])):
        with pytest.raises(ValueError, match="prompt"):
            llm.generate(given, params)
    with pytest.raises(ValueError, match="'prompt_token_ids' holds a list of token ids, not 'Hello, "):
        llm.generate({"prompt_token_ids": numpy.array(text)}, params)
    with pytest.raises(ValueError, match="priority must be an integer"):
        llm.add_request(PROMPTS[0], params, priority=numpy.float32(2))


def test_keywords_of_generate():
    llm = LLM(model="facebook/opt-125m", scheduling_policy="priority", max_num_seqs=1)
    served = []
    params = [SamplingParams(temperature=0, max_tokens=1,
                             logits_processors=[lambda ids, logits, i=i: served.append(i) or logits])
              for i in range(4)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=None, priority=[2, 0, 3, 1])
    check(outputs, PROMPTS, max_tokens=1)
    assert served == [1, 3, 0, 2]
    with pytest.raises(ValueError, match="priority"):
        llm.generate(PROMPTS, params, priority=[1])
    with pytest.raises(ValueError, match="lora_request"):
        llm.generate(PROMPTS, params, lora_request=object())


def test_tokenizers(tmp_path):
    llm = LLM(model="facebook/opt-125m")
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(PROMPTS[0])
    assert ids == [2] + encode(PROMPTS[0]) and tokenizer.decode(ids[1:]) == PROMPTS[0]
    assert tokenizer.eos_token_id == 2

    # A tokenizer that lies somewhere else, as save_pretrained writes it: without a config.json.
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "bare").mkdir()
    for file in llm.path.iterdir():
        if file.name in ("config.json", "pytorch_model.bin"):
            (tmp_path / "bare" / file.name).symlink_to(file)
    params = SamplingParams(temperature=0)
    other = LLM(model=str(tmp_path / "bare"), tokenizer=str(tmp_path))
    outputs = other.generate(PROMPTS, params)
    check(outputs, PROMPTS)
    assert first(outputs) == first(llm.generate(PROMPTS, params))
    assert other.chat([{"role": "user", "content": "Hello"}], params)[0].prompt_token_ids == encode("Hello")


def test_tokens_alone():
    prompt, continuation, _ = expected("opt")[1]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    llm = LLM(model="facebook/opt-125m", skip_tokenizer_init=True)
    for engine, settings in ((llm, params), (LLM(model=OPT), SamplingParams(**vars(params) | {"detokenize": False}))):
        (output,) = engine.generate([{"prompt_token_ids": prompt}], settings)
        assert output.outputs[0].token_ids == continuation and output.outputs[0].text == ""
    with pytest.raises(ValueError, match="token ids"):
        llm.generate(PROMPTS[0], params)


# --------------------------------------------------------------------------------------------------
# vLLM's own files
# --------------------------------------------------------------------------------------------------

def test_modules_have_the_names_that_scripts_import():
    for module, names in (("sampling_params", "SamplingParams BeamSearchParams StructuredOutputsParams"),
                          ("outputs", "RequestOutput"), ("inputs", "TokensPrompt TextPrompt PromptType")):
        for name in names.split():
            assert getattr(import_module(f"nanopaged.{module}"), name) is getattr(import_module("nanopaged"), name)
    from nanopaged.outputs import CompletionOutput, Logprob  # noqa: F401


def missing_import(source: str) -> str | None:
    """The first import from vllm of a script that nanopaged cannot serve under its own name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "vllm" for alias in node.names):
            return ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            try:
                module = import_module(node.module.replace("vllm", "nanopaged", 1))
            except ImportError:
                return ast.unparse(node)
            if not all(hasattr(module, alias.name) for alias in node.names):
                return ast.unparse(node)
    return None


# A name that has another home than vllm's: what the README says to import.
CLEANUP = "from vllm.distributed import cleanup_dist_env_and_memory"
OUR_CLEANUP = "from gc import collect as cleanup_dist_env_and_memory"


def reason_not_to_run(file: Path, folder: Path) -> str | None:
    """Run an example with its import statements changed. None, or the reason why it does not run."""
    source = file.read_text(encoding="utf-8").replace(CLEANUP, OUR_CLEANUP)
    if missing := missing_import(source):
        return missing
    changed = folder / file.name
    changed.write_text(re.sub(r"^(\s*from )vllm(?=[. ])", r"\1nanopaged", source, flags=re.M))
    try:
        runpy.run_path(str(changed), run_name="__main__")
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error!s:.100}"
    return None


@pytest.mark.skipif("NANOPAGED_VLLM_EXAMPLES" not in os.environ, reason="NANOPAGED_VLLM_EXAMPLES, the directory "
                    "`examples` of vLLM's source, is not set")
def test_files_of_vllms_examples(tmp_path, monkeypatch, capfd):
    """Prints which of vLLM's offline examples run with their imports changed only; the README names them. The bundled
    model stands in for theirs, with a chat template and as many positions as the prompts want: the calls are tried."""
    root = Path(os.environ["NANOPAGED_VLLM_EXAMPLES"])
    model = tmp_path / "model"
    model.mkdir()
    for file in BUNDLED.iterdir():
        (model / file.name).symlink_to(file)
    (model / "config.json").unlink()
    config = json.loads((BUNDLED / "config.json").read_text()) | {"max_position_embeddings": 32768}
    (model / "config.json").write_text(json.dumps(config))
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    monkeypatch.setattr(api, "find_checkpoint", lambda *args, **options: model)
    monkeypatch.setattr(sys, "argv", ["example.py"])
    monkeypatch.chdir(tmp_path)
    files = [file for file in sorted(root.rglob("*.py")) if "offline" in str(file)
             and re.search(r"^\s*from vllm\b", file.read_text(encoding="utf-8"), re.M)]
    reasons = {str(file.relative_to(root)): reason_not_to_run(file, tmp_path) for file in files}
    runs = {name for name, reason in reasons.items() if reason is None}
    capfd.readouterr()
    with capfd.disabled():
        print("", *(f"{'no: ' + reason if reason else 'runs':<70.70} {name}" for name, reason in reasons.items()),
              sep="\n")
    readme = (BUNDLED.parents[1] / "README.md").read_text(encoding="utf-8")
    assert {name for name in reasons if f"`{name}`" in readme} == runs
