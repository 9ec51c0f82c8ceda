"""OpenAI's API without HTTP: requests read, answers written, and prompt files in the batch format."""
import json
import random
import sys

import pytest

from nanopaged import SamplingParams
from nanopaged.api.answers import CHAT, COMPLETIONS, ApiError
from nanopaged.api.openai import FIELDS, IGNORED, Serving
from nanopaged.tests.helpers import shared
from nanopaged.tests.test_cli import TEMPLATE, assert_refused, run

PATHS = [COMPLETIONS, CHAT]
MINIMAL = {COMPLETIONS: {"prompt": "ROMEO:"}, CHAT: {"messages": [{"role": "user", "content": "Hi"}]}}
GREEDY = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def llm():
    return shared(device="cpu")


@pytest.fixture(scope="module")
def serving(llm):
    def render(messages, tools=None, variables=None, **options):
        return llm.chat_prompt(messages, chat_template=TEMPLATE, chat_template_kwargs=variables, tools=tools, **options)
    return Serving(llm, "bard", render)


def read(serving, path=COMPLETIONS, **fields):
    return serving.read(path, MINIMAL[path] | fields)


def answer(serving, path=COMPLETIONS, **fields):
    call = read(serving, path, **fields)
    outputs = [serving.llm.generate(prompt, call.params, use_tqdm=False)[0] for prompt in call.prompts]
    return call.response(outputs)


def refusal(serving, path=COMPLETIONS, **fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(serving, path, **fields)
    return caught.value


# --------------------------------------------------------------------------------------------------
# Fields
# --------------------------------------------------------------------------------------------------

def test_every_setting_reaches_the_sampling_parameters(serving):
    given = dict(n=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, stop=["a", "b"], stop_token_ids=[5],
                 ignore_eos=True, min_tokens=1, presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1,
                 logit_bias={"5": 1.0}, allowed_token_ids=[5, 6], bad_words=["x"], skip_special_tokens=False,
                 include_stop_str_in_output=True, max_tokens=9)
    for path in PATHS:
        params = read(serving, path, **given).params
        assert {name: getattr(params, name) for name in given} == given | {"logit_bias": {5: 1.0}}


def test_the_length_without_max_tokens_is_openais(serving):
    assert read(serving).params.max_tokens == 16
    assert read(serving, CHAT).params.max_tokens is None
    assert read(serving, CHAT, max_completion_tokens=5, max_tokens=None).params.max_tokens == 5


def test_a_request_without_settings_has_the_checkpoints(serving, llm):
    assert read(serving).params.temperature == llm.default_params["temperature"] == 0.8


@pytest.mark.parametrize("prompt, expected", [
    ("Hi", [{"prompt": "Hi"}]), (["Hi", "Ho"], [{"prompt": "Hi"}, {"prompt": "Ho"}]),
    ([1, 2], [{"prompt_token_ids": [1, 2]}]),
    ([[1], [2, 3]], [{"prompt_token_ids": [1]}, {"prompt_token_ids": [2, 3]}])])
def test_the_four_forms_of_prompts(serving, prompt, expected):
    assert read(serving, prompt=prompt).prompts == expected


def test_fields_without_a_meaning_are_ignored_and_others_refused_by_name(serving):
    for path in PATHS:
        ignored = read(serving, path, **dict.fromkeys(IGNORED, "x"), suffix=None, **GREEDY)
        assert ignored.params == read(serving, path, **GREEDY).params
        for name in ("best_of", "functions", "audio", "lora", "x" * 10**6):
            error = refusal(serving, path, **{name: 1})
            assert error.status == 400 and name[:70] in str(error) and len(str(error)) < 200
        error = refusal(serving, path, chat_template="{{ 1 }}")
        assert "chat_template" in str(error) and "operator" in str(error)


def test_another_model_is_not_found(serving):
    assert read(serving, model="bard").model == "bard"
    error = refusal(serving, model="gpt-4")
    assert error.status == 404 and "gpt-4" in str(error) and "bard" in str(error)


@pytest.mark.parametrize("path, fields, word", [
    (COMPLETIONS, dict(n=129), "n"), (CHAT, dict(n=0), "n"), (COMPLETIONS, dict(logprobs=21), "logprobs"),
    (COMPLETIONS, dict(logprobs=-1), "logprobs"), (COMPLETIONS, dict(logprobs=True), "logprobs"),
    (CHAT, dict(logprobs=True, top_logprobs=21), "top_logprobs"), (CHAT, dict(top_logprobs=2), "logprobs"),
    (COMPLETIONS, dict(stop=["a"] * 17), "stop"), (COMPLETIONS, dict(stop="a" * 10_000), "stop"),
    (COMPLETIONS, dict(stop=""), "stop"), (COMPLETIONS, dict(bad_words=["a" * 10_000]), "bad_words"),
    (COMPLETIONS, dict(logit_bias={str(i): 1 for i in range(9999)}), "logit_bias"),
    (COMPLETIONS, dict(structured_outputs={"regex": "a" * 70_000}), "structured_outputs"),
    (COMPLETIONS, dict(response_format={"type": "json_schema", "json_schema": {"schema": {"x": "y" * 70_000}}}),
     "response_format"),
    (COMPLETIONS, dict(response_format={"type": "xml"}), "response_format"),
    (COMPLETIONS, dict(response_format={"type": "json_schema", "schema": {}}), "json_schema"),
    (COMPLETIONS, dict(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}), "both"),
    (COMPLETIONS, dict(prompt=[]), "prompt"), (COMPLETIONS, dict(prompt=None), "prompt"),
    (COMPLETIONS, dict(prompt=[{"prompt": "x"}]), "prompt"), (COMPLETIONS, dict(prompt=7), "prompt"),
    (CHAT, dict(messages=None), "messages"), (CHAT, dict(messages=[]), "messages"),
    (CHAT, dict(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "content"),
    (CHAT, dict(tool_choice="required", tools=[]), "tool_choice"),
    (CHAT, dict(tool_choice={"type": "function"}, tools=[]), "tool_choice"), (CHAT, dict(prompt="x"), "prompt"),
    (COMPLETIONS, dict(messages=[]), "messages"), (COMPLETIONS, dict(stream="yes"), "stream"),
    (COMPLETIONS, dict(stream_options={"include_usage": True}), "stream_options"),
    (COMPLETIONS, dict(stream=True, stream_options={"x": True}), "stream_options"),
    (COMPLETIONS, dict(temperature="hot"), "temperature"), (COMPLETIONS, dict(max_tokens=0), "max_tokens"),
    (CHAT, dict(chat_template_kwargs=[1]), "chat_template_kwargs"),
    (CHAT, dict(chat_template_kwargs={"messages": []}), "messages")])
def test_what_is_refused_with_a_sentence(serving, path, fields, word):
    error = refusal(serving, path, **fields)
    assert error.status == 400 and word in str(error) and len(str(error)) < 300
    assert error.body == {"error": dict(message=str(error), type="invalid_request_error", param=None, code=400)}


def test_any_json_in_any_field_is_read_or_refused(serving, llm):
    """Nothing but ApiError; what is read must also be a request that the engine takes or refuses."""
    rng, values = random.Random(0), [0, -1, 1, 2**70, -0.5, 1e308, float("nan"), True, False, "", "a", [], [1], ["a"],
                                     [[]], [None], {}, {"a": 1}, {"type": "text"}, {"json_object": True}, [[1], "a"]]
    for _ in range(1500):
        path = rng.choice(PATHS)
        names = rng.sample(sorted(FIELDS[path]), rng.randint(1, 3))
        try:
            call = read(serving, path, **{name: rng.choice(values) for name in names})
            for prompt in call.prompts:
                llm._read_request(prompt, call.params, call.priority)
        except ApiError as error:
            assert error.status in (400, 404)
        except ValueError as error:
            assert str(error)


def test_a_schema_reaches_the_grammar(serving):
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert read(serving, response_format=form).params.structured_outputs.json == schema
    assert read(serving, CHAT, response_format={"type": "json_object"}).params.structured_outputs.json == schema
    assert read(serving, CHAT, response_format={"type": "text"}).params.structured_outputs is None
    assert read(serving, structured_outputs={"regex": "a"}).params.structured_outputs.regex == "a"


def test_messages_tools_and_template_variables_are_rendered(llm):
    seen = []

    def render(messages, tools, variables, **options):
        seen.append((messages, tools, variables, options))
        return {"prompt": "x", "prompt_token_ids": [1]}

    serving, tools = Serving(llm, "bard", render), [{"type": "function", "function": {"name": "f"}}]
    messages = MINIMAL[CHAT]["messages"]
    for choice in ({}, {"tool_choice": "auto"}):
        read(serving, CHAT, tools=tools, **choice, chat_template_kwargs={"a": 1}, add_generation_prompt=False)
    read(serving, CHAT, tools=tools, tool_choice="none")
    assert seen == [(messages, tools, {"a": 1}, {"add_generation_prompt": False})] * 2 + [(messages, None, {}, {})]


# --------------------------------------------------------------------------------------------------
# Answers
# --------------------------------------------------------------------------------------------------

def test_a_completion_is_what_generate_gives(serving, llm):
    found = answer(serving, prompt=["ROMEO:", "JULIET:"], n=2, seed=1, max_tokens=5)
    expected = llm.generate(["ROMEO:", "JULIET:"], SamplingParams(n=2, seed=1, max_tokens=5, temperature=0.8))
    texts = [sample.text for output in expected for sample in output.outputs]
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in found["choices"]] == [
        (i, text, "length") for i, text in enumerate(texts)]
    assert found["object"] == "text_completion" and found["model"] == "bard" and found["id"].startswith("cmpl-")
    num_prompt = sum(len(output.prompt_token_ids) for output in expected)
    assert {name: found["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} == dict(
        prompt_tokens=num_prompt, completion_tokens=20, total_tokens=num_prompt + 20)


def test_usage_counts_cached_tokens(serving):
    prompt = list(range(100, 140))
    answer(serving, prompt=prompt)
    assert answer(serving, prompt=prompt)["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


def test_echo_and_log_probabilities_of_a_prompt(serving, llm):
    ids = llm.tokenizer.encode("ROMEO: But soft")
    [choice] = answer(serving, prompt=ids, echo=True, logprobs=2, **GREEDY)["choices"]
    [output] = llm.generate([ids], SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=2))
    text, found = llm.tokenizer.decode(ids) + output.outputs[0].text, choice["logprobs"]
    assert choice["text"] == text == "".join(found["tokens"])
    own = [entry and entry[token].logprob for token, entry in
           zip(ids + output.outputs[0].token_ids, output.prompt_logprobs + output.outputs[0].logprobs)]
    assert found["token_logprobs"] == own and own[0] is None is found["top_logprobs"][0]
    assert all(2 <= len(top) <= 3 and max(top.values()) >= logprob
               for top, logprob in zip(found["top_logprobs"][1:], own[1:]))
    assert all(text.startswith(token, offset) for token, offset in zip(found["tokens"], found["text_offset"]))


def test_log_probabilities_of_a_chat(serving):
    [choice] = answer(serving, CHAT, logprobs=True, top_logprobs=3, temperature=0, max_tokens=4)["choices"]
    entries = choice["logprobs"]["content"]
    assert choice["message"] == {"role": "assistant", "content": "".join(entry["token"] for entry in entries)}
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"] and len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["token"] == entry["token"]  # greedy
        logprobs = [top["logprob"] for top in entry["top_logprobs"]]
        assert logprobs == sorted(logprobs, reverse=True) and entry["logprob"] == logprobs[0]


def test_minus_infinity_is_json(serving):
    call = read(serving, logprobs=1, logit_bias={"5": 1}, allowed_token_ids=[5])
    [output] = serving.llm.generate(call.prompts, call.params)
    for found in output.outputs[0].logprobs:
        for logprob in found.values():
            logprob.logprob = float("-inf")
    assert "Infinity" not in json.dumps(call.response([output]))


def test_a_text_that_went_wrong_is_an_error(serving):
    call = read(serving)
    [output] = serving.llm.generate(call.prompts, call.params)
    output.outputs[0].finish_reason, output.outputs[0].stop_reason = "error", "NaN"
    for write in (lambda: call.response([output]), lambda: call.events(0, output)):
        with pytest.raises(ApiError, match="NaN") as caught:
            write()
        assert caught.value.status == 500


def parse(events: str) -> list[dict]:
    lines = events.split("\n\n")
    assert lines.pop() == "" and all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


@pytest.mark.parametrize("every", [1, 3], ids=["each step", "merged"])
@pytest.mark.parametrize("path", PATHS)
def test_a_stream_adds_up_to_the_answer(serving, llm, path, every):
    fields = dict(n=2, seed=5, max_tokens=12, temperature=1, logprobs=2 if path == COMPLETIONS else True)
    fields |= {"echo": True} if path == COMPLETIONS else {"top_logprobs": 2}
    whole = answer(serving, path, **fields)
    call = read(serving, path, **fields, stream=True, stream_options={"include_usage": True})
    request_id, events, steps = llm.add_request(call.prompts[0], call.params), "", 0
    while llm.has_unfinished_requests():
        [output] = llm.step()
        steps += 1
        if steps % every == 0 or output.finished:
            events += call.events(0, output)
    assert output.request_id == request_id
    events += call.end([output])
    assert events.endswith("data: [DONE]\n\n") and events.count("[DONE]") == 1
    *parts, last = parse(events)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert len(parts) < 2 * 12 or every == 1
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert all(part["usage"] is None and part["id"] == call.id for part in parts)
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + ["length"]
        logprobs = [part["logprobs"] for part in mine if part["logprobs"]]
        if path == CHAT:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(part["delta"]["content"] for part in mine) == choice["message"]["content"]
            assert sum((found["content"] for found in logprobs), []) == choice["logprobs"]["content"]
        else:
            assert "".join(part["text"] for part in mine) == choice["text"]
            for key, values in choice["logprobs"].items():
                assert sum((found[key] for found in logprobs), []) == values, key


def test_a_stream_sends_no_half_character_and_no_stop_string(serving, llm):
    call = read(serving, prompt="ROMEO:", stream=True, stop="is", seed=1, max_tokens=40, n=4, temperature=1)
    llm.add_request(call.prompts[0], call.params)
    events = ""
    while llm.has_unfinished_requests():
        events += "".join(call.events(0, output) for output in llm.step())
    ended = [part["choices"][0] for part in parse(events) if part["choices"][0]["finish_reason"]]
    assert len(ended) == 4 and any(choice["stop_reason"] == "is" for choice in ended)
    for index in range(4):
        text = "".join(part["choices"][0]["text"] for part in parse(events) if part["choices"][0]["index"] == index)
        assert "is" not in text


# --------------------------------------------------------------------------------------------------
# Salts
# --------------------------------------------------------------------------------------------------

def test_only_requests_with_the_same_salt_share_cached_blocks(serving, llm):
    prompt, cached = list(range(200, 240)), []
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {}):
        call = read(serving, prompt=prompt, **salt, **GREEDY)
        [output] = llm.generate(call.prompts, call.params)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 0, 32, 32]
    assert "cache_salt" in str(pytest.raises(ValueError, llm.generate, {"prompt": "x", "cache_salt": 5}).value)


def test_salts_hold_at_the_same_time_and_after_a_preemption():
    from nanopaged.tests.helpers import check_books, load
    llm = load(device="cpu", block_size=4, num_blocks=16, max_model_len=40)
    prompt = list(range(200, 216))
    for salt in "abab":
        llm.add_request({"prompt_token_ids": prompt, "cache_salt": salt},
                        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    outputs = {}
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step()}
        check_books(llm.scheduler)
        for seq in llm.scheduler.running:
            for other in llm.scheduler.running:
                assert seq.root == other.root or not set(seq.block_table) & set(other.block_table)
    assert llm.scheduler.num_preemptions > 0
    assert len({tuple(output.outputs[0].token_ids) for output in outputs.values()}) == 1


# --------------------------------------------------------------------------------------------------
# The batch format
# --------------------------------------------------------------------------------------------------

def test_a_prompt_file_in_openais_batch_format(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    post = dict(method="POST", url=COMPLETIONS)
    lines = [dict(post, custom_id="a", body=dict(model="bard", prompt=["ROMEO:", "JULIET:"], **GREEDY)),
             dict(post, custom_id="b", body=dict(model="bard", prompt="ROMEO:", frobnicate=1)),
             dict(post, custom_id="c", body=dict(prompt=["ROMEO:", [5000]])),
             dict(post, custom_id="d", url=CHAT, body=dict(MINIMAL[CHAT], max_tokens=3)),
             dict(post, custom_id="e", url="/v1/embeddings", body={}),
             dict(post, custom_id="f", body=dict(prompt="x", stream=True)),
             dict(prompt="ROMEO:", max_tokens=2)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    command = ["--prompts", "in.jsonl", "--output", "out.jsonl", "--chat-template", "chat.jinja", "--served-model-name",
               "bard", "--num-blocks", "128"]
    assert run(*command) == 1
    results = {found["line"]: found for found in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert [results[line].get("custom_id") for line in range(1, 8)] == [*"abcdef", None]
    body = results[1]["response"]["body"]
    expected = shared(device="cpu").generate(["ROMEO:", "JULIET:"], SamplingParams(temperature=0, max_tokens=6))
    assert [choice["text"] for choice in body["choices"]] == [output.outputs[0].text for output in expected]
    assert results[1]["error"] is None and results[1]["response"]["status_code"] == 200 and results[1]["id"]
    assert results[4]["response"]["body"]["choices"][0]["message"]["content"]
    for line, word in ((2, "frobnicate"), (3, "5000"), (5, "/v1/embeddings"), (6, "stream")):
        assert results[line]["response"]["status_code"] == 400 and word in results[line]["error"]["message"]
    assert results[7]["outputs"][0]["num_tokens"] == 2
    assert capsys.readouterr().err.count("line 3:") == 1
    before = (tmp_path / "out.jsonl").read_text()
    assert run(*command) == 1 and "7 of them done before, 4 bad" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == before


def test_a_batch_without_an_output_file_is_printed(tmp_path, capsys):
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(dict(method="POST", url=COMPLETIONS, body=dict(prompt="ROMEO:", echo=True, **GREEDY))))
    assert run("--prompts", str(file), "--num-blocks", "128") == 0
    assert "=== line 1 [0]\nROMEO:" in capsys.readouterr().out


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_server_without_its_packages_is_one_sentence(monkeypatch, capsys, package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package or name == "nanopaged.api.server"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert run("--serve", llm_class=None) == 2
    assert_refused(capsys.readouterr(), "pip install", package)
