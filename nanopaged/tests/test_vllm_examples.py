"""vLLM's offline examples with the import changed: the same calls, and what they print held to what it should be.

A function stands in for the download of the model (test_hub.py has that). It is the bundled one, with OPT's small
tokenizer, which puts </s> in front of a text.
"""
import ast
import io
import json
import math
import os
import re
import runpy
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import nanopaged
from nanopaged import LLM, RequestOutput, SamplingParams, TextPrompt
from nanopaged.api import core
from nanopaged.tests.helpers import BUNDLED, GOLDEN, complaint, write_files
from nanopaged.tests.test_cli import Screen
from nanopaged.text.tokenizer import load_tokenizer

OPT = "facebook/opt-125m"
TOKENIZER = load_tokenizer(GOLDEN / "tokenizers" / "opt")
PROMPTS = ["Hello, my name is", "The president of the United States is", "The capital of France is",
           "The future of AI is"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory):
    """The tests are about the calls, so a CPU will do."""
    folder = write_files(tmp_path_factory.mktemp("model"), {
        "config.json": (BUNDLED / "config.json").read_text(),
        "generation_config.json": {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
        "chat_template.jinja":
            "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}"
            "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
    }, [BUNDLED / "model.safetensors", *(GOLDEN / "tokenizers" / "opt").iterdir()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanopaged.features.hub.download", lambda *_: folder)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model=OPT)


def first(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def check(outputs: list[RequestOutput], prompts: list[str] = PROMPTS, max_tokens: int = 16) -> None:
    """The outputs come in the order of the prompts, each with a text of that many tokens, as every example expects."""
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert isinstance(output, RequestOutput) and output.finished and isinstance(output.request_id, str)
        assert output.prompt_token_ids == TOKENIZER.encode(output.prompt)
        (completion,) = output.outputs
        assert completion.index == 0 and completion.text == TOKENIZER.decode(completion.token_ids, True)
        assert completion.logprobs is completion.cumulative_logprob is completion.stop_reason is None
        if completion.finish_reason != "stop":
            assert completion.finish_reason == "length" and len(completion.token_ids) == max_tokens
    assert len({output.request_id for output in outputs}) == len(outputs)


# ---- Generation

def test_basic(llm):
    check(llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95)))
    check(llm.generate(PROMPTS[0]), PROMPTS[:1])
    check(llm.generate(TextPrompt(prompt=PROMPTS[0])), PROMPTS[:1])
    check(llm.generate({"prompt": PROMPTS[0], "prompt_token_ids": None}), PROMPTS[:1])
    assert llm.generate([]) == []


def test_the_checkpoints_defaults(llm):
    """The default is generation_config="auto", as in vLLM."""
    sampling_params = llm.get_default_sampling_params()
    assert sampling_params == SamplingParams(temperature=0.6, top_p=0.9)  # of generation_config.json
    sampling_params.max_tokens = 20
    sampling_params.top_k = 30
    check(llm.generate(PROMPTS, sampling_params), max_tokens=20)
    assert LLM(model=OPT, generation_config="vllm").get_default_sampling_params() == SamplingParams()
    other = LLM(model=OPT, override_generation_config={"temperature": 0.3, "max_new_tokens": 7})
    assert other.get_default_sampling_params(seed=1) == SamplingParams(temperature=0.3, top_p=0.9, max_tokens=7, seed=1)
    check(other.generate(PROMPTS), max_tokens=7)
    check(other.generate(PROMPTS, SamplingParams()))  # these are settings


def test_a_second_run_gives_the_same_texts():
    texts = [first(LLM(model=OPT, seed=seed).generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95)))
             for seed in (42, 42, 43)]
    assert texts[0] == texts[1] != texts[2] and len(set(texts[0])) == len(PROMPTS)


def test_beam_search(llm):
    """vLLM's beams are sequences, whose tokens and text begin with the prompt (test_beam.py has their scores)."""
    params = nanopaged.BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True, temperature=0.0,
                                        length_penalty=1.0)
    for output in llm.beam_search([{"prompt_token_ids": TOKENIZER.encode(PROMPTS[0])}, {"prompt": PROMPTS[0]}], params):
        assert len(output.sequences) == 4
        for sequence, sample in zip(output.sequences, output.outputs, strict=True):
            assert sequence.tokens == output.prompt_token_ids + sample.token_ids
            assert sequence.text == TOKENIZER.decode(sequence.tokens, True) == PROMPTS[0] + sample.text
            assert sequence.finish_reason in (None, "length")  # vLLM leaves it open


# ---- Chat

CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How"},
    {"role": "user", "content": "Write an essay about the importance of higher education."},
]
TURNS = [f"{message['role']}: {message['content']}" for message in CONVERSATION]


def test_chat(llm):
    text = "".join(f"</s>{turn}" for turn in TURNS) + "</s>assistant: "
    (output,) = llm.chat(CONVERSATION, GREEDY, use_tqdm=False)
    assert output.prompt == text
    assert output.prompt_token_ids == TOKENIZER.encode(text, add_special_tokens=False)  # one </s> in front, not two
    assert first(llm.generate({"prompt_token_ids": output.prompt_token_ids}, GREEDY)) == first([output])
    outputs = llm.chat(messages=[CONVERSATION[:2], CONVERSATION], sampling_params=[GREEDY, GREEDY], use_tqdm=True,
                         chat_template_content_format="auto")
    assert [one.prompt.count("</s>") for one in outputs] == [3, 5] and first(outputs)[1:] == first([output])
    assert "must be 'auto', not 'openai'" in complaint(
        llm.chat, CONVERSATION, GREEDY, chat_template_content_format="openai")
    (output,) = llm.chat(CONVERSATION[:3], GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt == "".join(f"</s>{turn}" for turn in TURNS[:3])


@pytest.mark.parametrize("more, end", [
    ({}, ""), ({"chat_template_kwargs": {"enable_thinking": False}}, "<think></think>")])
def test_another_template_with_tools_and_variables(llm, more, end):
    """Qwen3's thinking is switched off in this way."""
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    template = ("{{ tools | tojson }}\n{% for message in messages %}{{ message.role }}"
                "{{ '(' + message.tool_call_id + ')' if message.tool_call_id }}: {{ message.content }}\n{% endfor %}"
                "{{ '' if enable_thinking is not defined or enable_thinking else '<think></think>' }}")
    messages = [*CONVERSATION, {"role": "tool", "content": "It is 85 degrees.", "tool_call_id": "a1"}]
    outputs = llm.chat([messages] * 2, GREEDY, tools=tools, chat_template=template, **more)
    turns = [json.dumps(tools), *TURNS, "tool(a1): It is 85 degrees.", end]
    assert [output.prompt for output in outputs] == ["\n".join(turns)] * 2


# ---- What else vLLM's calls carry

def test_engine_options_of_vllm():
    llm = LLM(model=OPT, num_gpu_blocks_override=100, max_model_len=256, enforce_eager=True, max_num_batched_tokens=64,
              tokenizer=OPT, tokenizer_mode="auto", revision=None, tokenizer_revision=None, dtype=torch.float32,
              tensor_parallel_size=1, trust_remote_code=True, disable_log_stats=False, enable_chunked_prefill=True,
              quantization=None, pipeline_parallel_size=1, cpu_offload_gb=0, disable_custom_all_reduce=True,
              max_logprobs=20, limit_mm_per_prompt={}, mm_processor_kwargs=None, kv_transfer_config=None,
              logprobs_mode="raw_logprobs", hf_token=None, download_dir=None, override_generation_config={},
              gpu_memory_utilization=0.4)
    check(llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95)))
    assert llm.scheduler.block_manager.num_blocks == 100


@pytest.mark.parametrize("method", ["encode", "embed", "classify", "score", "reward"])
def test_methods_for_pooling_models_get_a_sentence(method, llm):
    assert re.search(f"{method}.* pooling model", complaint(getattr(llm, method), PROMPTS, PROMPTS, use_tqdm=False))


def test_use_tqdm(monkeypatch, llm):
    """A bar is drawn on a terminal and in a notebook's cell, and gone at the end. By default beam_search has none."""
    cell = type("OutStream", (io.StringIO,), dict(__module__="ipykernel.iostream"))
    beams = nanopaged.BeamSearchParams(beam_width=2, max_tokens=3)

    def drawn(call, *args, stderr=Screen, **how) -> str:
        monkeypatch.setattr(sys, "stderr", stderr())
        call(*args, **how)
        return sys.stderr.getvalue()

    for call, *args, default in ((llm.generate, PROMPTS, GREEDY, True), (llm.beam_search, PROMPTS, beams, False),
                                 (llm.chat, [CONVERSATION] * 4, GREEDY, True)):
        for stderr in (Screen, cell):
            bar = drawn(call, *args, use_tqdm=True, stderr=stderr)
            assert re.match(r"\r\[\.{20}\] 0/4 prompts, \d:\d\d, \d+ tokens/s", bar) and bar.endswith(" \r")
        assert bool(drawn(call, *args)) is default and drawn(call, *args, use_tqdm=False) == ""
        assert drawn(call, *args, stderr=io.StringIO) == ""


def test_numpy():
    """Prompts and priorities may be numpy's."""
    numpy = pytest.importorskip("numpy")
    llm = LLM(model=OPT, scheduling_policy="priority")
    prompts = [[2, 50, 70], [2, 60, 80], [2, 90, 100]]
    texts, arrays = first(llm.generate(prompts, GREEDY)), [*numpy.array(prompts)]
    for given in (numpy.array(prompts), arrays, [list(array) for array in arrays], torch.tensor(prompts),
                  [{"prompt_token_ids": array} for array in arrays], [numpy.uint16(prompt) for prompt in prompts]):
        outputs = llm.generate(given, GREEDY, priority=numpy.arange(3))
        assert first(outputs) == texts
        assert {type(token) for output in outputs for token in output.prompt_token_ids} == {int}
    assert first(llm.generate(arrays[0], GREEDY)) == first(llm.generate(list(arrays[0]), GREEDY)) == texts[:1]
    assert llm.generate([numpy.array(PROMPTS[0])], GREEDY)[0].prompt == PROMPTS[0]
    llm.add_request(arrays[0], GREEDY, priority=numpy.int32(-2))
    (seq,) = llm.scheduler.waiting
    assert seq.order.priority == -2 and type(seq.order.priority) is int
    for given in (numpy.array([1.5, 2]), numpy.array(5), numpy.array([True]), [numpy.float32(5)], numpy.array([[[5]]]),
                  {"prompt_token_ids": numpy.array(PROMPTS[0])}):
        assert "prompt" in complaint(llm.generate, given, GREEDY)
    assert "priority must be an integer" in complaint(llm.add_request, PROMPTS[0], GREEDY, priority=numpy.float32(2))
    assert llm.generate(PROMPTS, GREEDY, use_tqdm=numpy.bool_(True))


def test_keywords_of_generate():
    llm = LLM(model=OPT, scheduling_policy="priority", max_num_seqs=1)
    served = []
    params = [SamplingParams(temperature=0, max_tokens=1,
                             logits_processors=[lambda ids, logits, i=i: served.append(i) or logits])
              for i in range(4)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=None, priority=[2, 0, 3, 1])
    check(outputs, max_tokens=1)
    assert served == [1, 3, 0, 2]
    for name, value in (("priority", [1]), ("lora_request", object())):
        assert name in complaint(llm.generate, PROMPTS, params, **{name: value})
    for priority in ("high", None, math.nan, 1.5):
        assert "priority must be an integer" in complaint(llm.add_request, PROMPTS[0], GREEDY, priority=priority)


def test_a_tokenizer_from_elsewhere(tmp_path, llm):
    """As save_pretrained writes it: without a config.json."""
    files = [GOLDEN / "tokenizers" / "opt" / name for name in ("vocab.json", "merges.txt", "tokenizer_config.json")]
    folder = write_files(tmp_path, {"chat_template.jinja": "{{ messages[0].content }}"}, files)
    bare = write_files(tmp_path / "bare", {"config.json": (BUNDLED / "config.json").read_text()},
                       [BUNDLED / "model.safetensors"])
    other = LLM(model=bare, tokenizer=str(folder))
    outputs = other.generate(PROMPTS, GREEDY)
    check(outputs, max_tokens=8)
    assert first(outputs) == first(llm.generate(PROMPTS, GREEDY))
    assert other.chat(CONVERSATION[1:], GREEDY)[0].prompt_token_ids == TOKENIZER.encode("Hello")[1:]


def test_tokens_alone(llm):
    ids = TOKENIZER.encode(PROMPTS[0])
    expected = llm.generate([ids], GREEDY)[0].outputs[0].token_ids
    bare = LLM(model=OPT, skip_tokenizer_init=True)
    for engine, settings in ((bare, GREEDY), (llm, SamplingParams(**vars(GREEDY) | {"detokenize": False}))):
        (output,) = engine.generate([{"prompt_token_ids": ids}], settings)
        assert output.outputs[0].token_ids == expected and output.outputs[0].text == "" and output.prompt is None
    for call in (bare.get_tokenizer, lambda: bare.generate(PROMPTS[0], GREEDY)):
        assert "token ids" in complaint(call)


# ---- vLLM's own files

def test_modules_have_the_names_that_scripts_import():
    for module, names in (("sampling_params", "SamplingParams BeamSearchParams StructuredOutputsParams"),
                          ("outputs", "RequestOutput"), ("inputs", "TokensPrompt TextPrompt PromptType")):
        for name in names.split():
            assert getattr(import_module(f"nanopaged.{module}"), name) is getattr(import_module("nanopaged"), name)
    from nanopaged.outputs import CompletionOutput, Logprob  # noqa: F401


CLEANUP = "cleanup_dist_env_and_memory"  # has another home than vllm's: the README says what to import


def reason_not_to_run(file: Path, folder: Path) -> str | None:
    """Run an example with its import statements changed. None, or the reason why it does not run."""
    source = file.read_text(encoding="utf-8").replace(f"from vllm.distributed import {CLEANUP}",
                                                      f"from gc import collect as {CLEANUP}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and re.match(r"(import|from) vllm\b", ast.unparse(node)):
            try:
                exec(re.sub("^(import|from) vllm", r"\1 nanopaged", ast.unparse(node)), {})
            except ImportError:
                return ast.unparse(node)
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
    config = json.loads((BUNDLED / "config.json").read_text()) | {"max_position_embeddings": 32768}
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = write_files(tmp_path / "model", {"config.json": config, "chat_template.jinja": template}, BUNDLED.iterdir())
    monkeypatch.setattr(core, "find_checkpoint", lambda *args, **options: model)
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
    readme = (BUNDLED.parent / "README.md").read_text(encoding="utf-8")
    assert {name for name in reasons if f"`{name}`" in readme} == runs
