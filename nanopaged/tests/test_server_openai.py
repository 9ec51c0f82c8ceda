"""OpenAI's API without HTTP: requests read and answers written. (test_batch.py has the batch format.)"""
import itertools
import json
import random
import sys
from functools import partial, reduce
from importlib.util import find_spec
from unittest.mock import Mock, call

import pytest

from engine import NO_TOKEN
from nanopaged import SamplingParams
from nanopaged.features.server.answers import CHAT, COMPLETIONS, ApiError
from nanopaged.features.server.openai import FIELDS, IGNORED, Serving, make_reader
from nanopaged.features.server.responses import RESPONSES, read_response
from nanopaged.tests.helpers import GOLDEN, shared
from nanopaged.tests.test_cli import TEMPLATE, assert_refused, run
from nanopaged.tests.test_server_tools import merge

PATHS = [COMPLETIONS, CHAT]
MINIMAL = {COMPLETIONS: {"prompt": "ROMEO:"}, CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
           "/tokenize": {}, "/detokenize": {}}
needs_grammar = pytest.mark.skipif(not find_spec("llguidance"), reason="structured outputs need llguidance; .ci/run "
                                   "installs it for its last part")
GREEDY = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def llm():
    return shared(device="cpu")


def render_with(llm, template, messages, tools=None, variables=None, **more):
    return llm.chat_prompt(messages, chat_template=template, chat_template_kwargs=variables, tools=tools, **more)


def serving_of(llm, **options) -> Serving:
    return Serving(llm, "bard", partial(render_with, llm, TEMPLATE), **options)


@pytest.fixture(scope="module")
def serving(llm):
    return serving_of(llm)


def read(serving, path=COMPLETIONS, **fields):
    return serving.read(path, MINIMAL[path] | fields)


def complete(serving, path=COMPLETIONS, **fields):
    """A call, and the outputs of its prompts."""
    call = read(serving, path, **fields)
    return call, [serving.llm.generate(prompt, call.params, use_tqdm=False)[0] for prompt in call.prompts]


def answer(serving, path=COMPLETIONS, **fields):
    call, outputs = complete(serving, path, **fields)
    return call.response(outputs)


def refusal(serving, path=COMPLETIONS, **fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(serving, path, **fields)
    return caught.value


# ---- Fields

def test_every_setting_reaches_the_sampling_parameters(serving):
    given = dict(n=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, stop=["a", "b"], stop_token_ids=[5],
                 ignore_eos=True, min_tokens=1, presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1,
                 logit_bias={"5": 1.0}, allowed_token_ids=[5, 6], bad_words=["x"], skip_special_tokens=False,
                 include_stop_str_in_output=True, max_tokens=9)
    for path in PATHS:
        params = read(serving, path, **given).params
        assert {name: getattr(params, name) for name in given} == given | {"logit_bias": {5: 1.0}}


def test_settings_that_are_not_given(serving, llm):
    assert read(serving).params.max_tokens == 16  # OpenAI's
    assert read(serving, CHAT).params.max_tokens is None
    assert read(serving, CHAT, max_completion_tokens=5, max_tokens=None).params.max_tokens == 5
    assert read(serving).params.temperature == llm.default_params["temperature"] == 0.8


def test_fields_that_ask_for_nothing_are_accepted_and_others_refused_by_name(serving):
    """What OpenAI's, vLLM's and LangChain's clients send without being asked."""
    neutral = dict(best_of=1, suffix="", use_beam_search=False, length_penalty=1.0, early_stopping=False, echo=False,
                   spaces_between_special_tokens=True, detokenize=True, functions=[], function_call="auto",
                   include_reasoning=True, documents=[], modalities=["text"], logits_processors=[])
    for path in PATHS:
        call, is_chat = read(serving, path, **neutral, **GREEDY, add_special_tokens=path == COMPLETIONS), path == CHAT
        assert call.params == read(serving, path, **GREEDY).params and not call.echo
        ignored = read(serving, path, **dict.fromkeys(IGNORED, "x"), suffix=None, **GREEDY)
        assert ignored.params == call.params
        for name, value in dict(best_of=3, use_beam_search=True, length_penalty=2, detokenize=False, functions=2,
                                add_special_tokens=is_chat, audio=2, lora=2, include_reasoning=2,
                                chat_template="{{ 1 }}", **{"x" * 10**6: 2, "echo" if is_chat else "tools": 2}).items():
            error = refusal(serving, path, **{name: value})
            assert error.status == 400 and name[:70] in str(error) and len(str(error)) < 200
        assert "operator" in str(refusal(serving, path, chat_template="{{ 1 }}"))


def test_errors_have_the_codes_that_clients_look_for(serving, llm):
    assert read(serving, model="bard").model == "bard"
    error = refusal(serving, model="gpt-4")
    assert error.status == 404 and "gpt-4" in str(error) and "bard" in str(error)
    assert error.body["error"]["code"] == "model_not_found"
    with pytest.raises(ValueError, match="This model's maximum context length is 1024 tokens") as caught:
        llm.read_request({"prompt_token_ids": [1] * 2000}, SamplingParams())
    error = ApiError.of(caught.value)
    assert error.status == 400 and error.body["error"]["code"] == "context_length_exceeded"


def test_what_a_client_makes_impossible_is_its_own_error(serving):
    for fields, reason, status in ((dict(allowed_token_ids=[5]), NO_TOKEN, 400), ({}, NO_TOKEN, 500),
                                   (dict(structured_outputs={"regex": "a"}), "the grammar failed: too large", 400),
                                   (dict(bad_words=["a"]), "the tokenizer failed: x", 500)):
        call, output = read(serving, **fields), complete(serving, max_tokens=1)[1][0]
        output.outputs[0].finish_reason, output.outputs[0].stop_reason = "error", reason
        for write in (partial(call.response, [output]), partial(call.events, 0, output)):
            assert pytest.raises(ApiError, write).value.status == status


def test_tokenize_and_detokenize(serving, llm):
    ids = llm.tokenizer.encode("ROMEO: é")
    found = serving.read("/tokenize", {"model": "bard", "prompt": "ROMEO: é"})
    assert found == dict(count=len(ids), max_model_len=1024, tokens=ids)
    assert serving.read("/detokenize", {"tokens": ids}) == {"prompt": "ROMEO: é"}
    [rendered] = read(serving, CHAT).prompts
    assert serving.read("/tokenize", MINIMAL[CHAT])["tokens"] == rendered["prompt_token_ids"]


def function(**fields) -> list[dict]:
    return [{"type": "function", "function": fields}]


@pytest.mark.parametrize("path, fields, word", [
    (COMPLETIONS, dict(n=129), "n must be an integer from 1 to 128"), (CHAT, dict(n=0), "n"),
    (COMPLETIONS, dict(logprobs=21), "logprobs"), (COMPLETIONS, dict(logprobs=True), "logprobs"),
    (CHAT, dict(logprobs=True, top_logprobs=21), "top_logprobs"), (CHAT, dict(top_logprobs=2), "logprobs"),
    (COMPLETIONS, dict(prompt_logprobs=-1), "prompt_logprobs"), (COMPLETIONS, dict(stop=["a"] * 17), "stop"),
    (COMPLETIONS, dict(prompt_logprobs=1, stream=True), "stream"), (COMPLETIONS, dict(stop=""), "stop"),
    *((COMPLETIONS, {name: value}, f"{name} has more than") for name, value in (
        ("stop", "a" * 10_000), ("bad_words", ["a" * 10_000]), ("logit_bias", {str(i): 1 for i in range(9999)}),
        ("structured_outputs", {"regex": "a" * 70_000}), ("response_format", {"schema": "y" * 70_000}))),
    (CHAT, dict(tools=[{"x": "y" * 300_000}]), "tools has more than"),
    *((COMPLETIONS, dict(response_format=value), "response_format") for value in (
        5, {"type": "xml"}, {"type": "json_schema", "schema": {}}, {"type": "json_object", "schema": 5})),
    (COMPLETIONS, dict(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}), "both"),
    (CHAT, dict(tool_choice="required", tools=function(name="f"), response_format={"type": "json_object"}), "both"),
    *((COMPLETIONS, dict(prompt=value), "prompt") for value in ([], None, [{"prompt": "x"}], 7)),
    (CHAT, dict(messages=reduce(lambda inner, _: [inner], range(9999), "a")), "recursion"),
    (CHAT, dict(messages=None), "messages"), (CHAT, dict(messages=[]), "messages"), (CHAT, dict(prompt="x"), "prompt"),
    (CHAT, dict(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "content"),
    *((CHAT, dict(tool_choice="required", tools=value), word) for value, word in (
        (None, "no function"), ([], "no function"), ([{"name": "f"}], "tool_choice must"),
        (function(name="f", parameters=5), "tool_choice must"), (function(name='f"'), "names of at most 64"))),
    (CHAT, dict(tool_choice={"type": "function"}, tools=[]), "tool_choice"),
    (CHAT, dict(tool_choice=function(name="g")[0], tools=function(name="f")), "'g'"),
    (COMPLETIONS, dict(stream_options={"include_usage": True}), "stream_options"),
    *((COMPLETIONS, dict(stream=True, stream_options=value), word) for value, word in (
        ({"continuous_usage_stats": 1}, "continuous_usage_stats"), ({"x": True}, "stream_options"),
        (5, "stream_options must be an object"))),
    (COMPLETIONS, dict(truncate_prompt_tokens=0), "truncate"), (COMPLETIONS, dict(stream="yes"), "stream"),
    (COMPLETIONS, dict(temperature="hot"), "temperature"), (COMPLETIONS, dict(max_tokens=0), "max_tokens"),
    (CHAT, dict(chat_template_kwargs=[1]), "chat_template_kwargs"),
    (CHAT, dict(chat_template_kwargs={"messages": []}), "messages"), ("/tokenize", {}, "prompt"),
    ("/detokenize", {"tokens": ["a"]}, "tokens"), ("/detokenize", {"tokens": [-1]}, "tokens")])
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
                llm.read_request(prompt, call.params, call.priority)
        except ApiError as error:
            assert error.status in (400, 404)
        except ValueError as error:
            assert str(error)


def test_a_schema_reaches_the_grammar(serving):
    person = {"type": "object", "properties": {"age": {"type": "integer"}}}
    named = {"name": "x", "strict": True, "schema": person}
    for schema, form in ((person, {"type": "json_schema", "json_schema": named}),
                         (person, {"type": "json_object", "schema": person}),  # llama.cpp's name
                         (person, {"type": "json_object", "value": person}),  # Hugging Face's
                         ({"type": "object"}, {"type": "json_object"})):
        assert read(serving, CHAT, response_format=form).params.structured_outputs.json == schema
    assert read(serving, CHAT, response_format={"type": "text"}).params.structured_outputs is None
    assert read(serving, structured_outputs={"regex": "a"}).params.structured_outputs.regex == "a"


def test_messages_tools_and_template_variables_are_rendered(llm):
    render = Mock(return_value={"prompt": "x", "prompt_token_ids": [1]})
    serving, messages, tools = Serving(llm, "bard", render), MINIMAL[CHAT]["messages"], function(name="f")
    for choice in ({}, {"tool_choice": "auto"}):
        read(serving, CHAT, tools=tools, **choice, chat_template_kwargs={"a": 1}, add_generation_prompt=False)
    read(serving, CHAT, tools=tools, tool_choice="none")
    with_tools = call(messages, tools, {"a": 1}, add_generation_prompt=False)
    assert render.mock_calls == [with_tools, with_tools, call(messages, None, {})]


HI, CALL_F = MINIMAL[CHAT]["messages"][0], {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def item(kind, **fields) -> dict:
    return {"type": kind, "status": "completed"} | fields


THOUGHT, F = item("reasoning", summary=[], content=[{"type": "reasoning_text", "text": "Hm."}]), item(
    "function_call", call_id="c", name="f", arguments="{}")
HELLO = item("message", role="assistant", content=[{"type": "output_text", "text": "Ay."}])


@pytest.mark.parametrize("items, messages", [
    ([item("function_call_output", call_id="c", output=[{"type": "input_text", "text": "Rain"}])],
     [{"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "Rain"}]}]),
    ([HELLO | {"content": [{"type": "refusal", "refusal": "No."}]}],
     [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}]),
    ([THOUGHT, F], [{"role": "assistant", "reasoning_content": "Hm.", "content": "", "tool_calls": [CALL_F]}]),
    ([item("reasoning", summary=[{"type": "summary_text", "text": "So."}]), THOUGHT, HELLO, F, HELLO],
     [{"role": "assistant", "reasoning_content": "So.\nHm.", "content": [{"type": "text", "text": "Ay."}],
       "tool_calls": [CALL_F]}, {"role": "assistant", "content": [{"type": "text", "text": "Ay."}]}]),
    ([THOUGHT, {"role": "user", "content": "x"}, item("reasoning", summary=[], encrypted_content="x")],
     [{"role": "assistant", "reasoning_content": "Hm.", "content": ""}, {"role": "user", "content": "x"}])])
def test_items_of_responses_are_messages_of_chats(serving, items, messages):
    found = read_response({"input": [HI, *items]})["messages"]
    assert found == [HI, *messages]
    [given], [rendered] = (serving.read(*request).prompts for request in (
        (RESPONSES, {"input": [HI, *items]}), (CHAT, {"messages": [HI, *messages]})))
    assert given == rendered


def test_instructions_and_a_developers_message_are_one(serving):
    brief = {"role": "developer", "content": "Be brief."}
    [found] = serving.read(RESPONSES, {"instructions": "Be kind.", "input": [brief, HI]}).prompts
    [expected] = read(serving, CHAT, messages=[{"role": "system", "content": "Be kind.\n\nBe brief."}, HI]).prompts
    assert found == expected
    [found] = read(serving, CHAT, messages=[{"role": "system", "content": "Be kind."}, brief, HI]).prompts
    assert found == expected


def test_empty_lists_of_tools_and_calls_count_as_absent(llm):
    source = "{{ tools }}{% for message in messages %}{{ message }}{% endfor %}"
    serving = Serving(llm, "bard", partial(render_with, llm, source))
    answer_of = {"role": "assistant", "content": "Ay."}
    for path in (CHAT, "/tokenize"):
        first, second = (serving.read(path, fields) for fields in (
            {"messages": [HI, answer_of | {"tool_calls": []}], "tools": []}, {"messages": [HI, answer_of]}))
        assert first == second if path == "/tokenize" else first.prompts == second.prompts


@pytest.mark.parametrize("name, value", [("instructions", "\ud83d"), ("tools", [{"x": float("nan")}]),
                                         ("text", {"x": json.loads("1e999")}), ("tool_choice", {"x": "\udc00"})])
def test_what_an_answer_cannot_repeat_is_refused_before_it_is_generated(serving, name, value):
    with pytest.raises(ApiError, match=f"{name} comes back in the answer") as caught:
        serving.read(RESPONSES, {"input": "Hi", name: value})
    assert caught.value.status == 400


def test_a_template_that_quotes_half_a_surrogate_pair(llm):
    serving = Serving(llm, "bard", partial(render_with, llm, "{{ raise_exception(messages[0].content) }}"))
    error = refusal(serving, CHAT, messages=[HI | {"content": "\ud83d"}])
    assert "\\ud83d" in str(error) and json.dumps(error.body, ensure_ascii=False).encode()


# ---- Tools and thoughts; test_server_tools.py has the formats

WEATHER = {"name": "weather", "parameters": {
    "type": "object", "required": ["at"], "properties": {
        "at": {"$ref": "#/$defs/Place"}, "properties": {"enum": [7]},
        "also": {"type": "array", "uniqueItems": True, "maxItems": 1, "items": {"const": 1}}},
    "$defs": {"Place": {"type": "object", "properties": {"city": {"enum": ["Rome", "Bath"]}}, "required": ["city"]}}}}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, {"name": "now", "description": "::="})]
CALL = '{"name": "now", "arguments": {"zone": 1}}'


def stream(serving, path=COMPLETIONS, every=1, **fields) -> list[dict]:
    """The events of a stream, for so many steps together."""
    llm, call, events = serving.llm, read(serving, path, stream=True, **fields), ""
    llm.add_request(call.prompts[0], call.params)
    for step in itertools.count(1):
        [output] = llm.step()
        if step % every == 0 or output.finished:
            events += call.events(0, output)
        if output.finished:
            break
    events += call.end([output])
    assert events.endswith("data: [DONE]\n\n") and events.count("[DONE]") == 1
    return parse(events)


def parse(events: str) -> list[dict]:
    lines = events.split("\n\n")
    assert lines.pop() == "" and all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def message_of(events: list[dict], index: int = 0) -> tuple[dict, str]:
    """The message and the finish_reason of a streamed chat."""
    found = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return merge(choice["delta"] for choice in found), found[-1]["finish_reason"]


@needs_grammar
@pytest.mark.parametrize("choice", ["required", "weather"])
def test_a_call_that_must_come_follows_the_functions_schema(serving, choice):
    named = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    fields = dict(tools=TOOLS, tool_choice=named, n=6, seed=2, max_tokens=80, temperature=1.0, stop=["name", "}"])
    found, events = answer(serving, CHAT, **fields)["choices"], stream(serving, CHAT, **fields)
    names = set()
    for choice_ in found:
        [call] = choice_["message"]["tool_calls"]
        assert call["type"] == "function" and call["id"].startswith("call_") and "index" not in call
        assert choice_["finish_reason"] == "tool_calls" and choice_["message"]["content"] is None
        arguments = json.loads(call["function"]["arguments"])
        names.add(call["function"]["name"])
        assert arguments == {} if call["function"]["name"] == "now" else arguments["at"]["city"] in ("Rome", "Bath")
        message, reason = message_of(events, choice_["index"])
        assert reason == "tool_calls" and message["content"] == ""
        assert message["tool_calls"] == [{"function": call["function"]}]
    assert names == ({"weather", "now"} if choice == "required" else {"weather"})


@needs_grammar
@pytest.mark.parametrize("address, reference, part", [
    ({}, "#/$defs/X", {}), ({}, "#name-KIND", {"$anchor": "name-KIND"}), ({"$id": 5}, "#/$defs/X", {}),
    *(({"$id": address}, reference, {}) for address in ("https://a.org/b/f.json", "https://a.org/b/f.json#")
      for reference in ("#/$defs/X", "f.json#/$defs/X", "https://a.org/b/f.json#/$defs/X")),
    ({"$id": "urn:f"}, "#/$defs/X", {}), ({"$id": "urn:f"}, "urn:f#/$defs/X", {}),
    ({"id": "https://a.org/f", "$schema": "http://json-schema.org/draft-04/schema#"}, "#/$defs/X", {}),
    ({"$id": "urn:f"}, "urn:part-KIND", {"$id": "urn:part-KIND", "$ref": "#/$defs/X", "$defs": {"X": {}}})])
def test_references_in_schemas_of_functions(serving, address, reference, part):
    """Two functions whose schemas have one address, and which refer to parts of their own. (The last part has an
    address, too.)"""
    from nanopaged.features.grammar import compiler_of

    def schema(kind):
        whole = {"type": "object", "properties": {"x": {"$ref": reference}}, "required": ["x"],
                 "$defs": {"X": {"type": "KIND"} | part}}
        return json.loads(json.dumps(whole | address).replace("KIND", kind))

    tools = function(name="f", parameters=schema("integer")) + function(name="g", parameters=schema("boolean"))
    params = read(serving, CHAT, tools=tools, tool_choice="required").params
    matcher = compiler_of(serving.llm).compile(params.structured_outputs).matcher
    for name, value in itertools.product("fg", ("1", "true")):
        tokens = serving.llm.tokenizer.encode('{"name":"%s","arguments":{"x":%s}}' % (name, value))
        fits = matcher.deep_copy().validate_tokens(tokens) == len(tokens)
        assert fits == ((name, value) in (("f", "1"), ("g", "true")))


@needs_grammar
def test_a_call_that_max_tokens_cuts(serving):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"x": {"type": "string", "minLength": 400}}, "required": ["x"]}}}]
    [choice] = answer(serving, CHAT, tools=tools, tool_choice="required", max_tokens=30)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"x":"')


@needs_grammar
@pytest.mark.parametrize("kind, text, content", [
    ("hermes", f"Ay.\n<tool_call>\n{CALL}\n</tool_call>", "Ay."), ("llama3_json", CALL, None),
    ("mistral", f"[TOOL_CALLS][{CALL}]", None), ("hermes", "Ay.", "Ay."), (None, CALL, CALL)])
def test_calls_that_the_model_writes(llm, kind, text, content):
    serving = serving_of(llm, tool_parser=kind)
    fields = dict(tools=TOOLS, structured_outputs={"choice": [text]}, max_tokens=99)
    [choice] = answer(serving, CHAT, **fields)["choices"]
    message, reason = message_of(stream(serving, CHAT, **fields))
    assert message["content"] == (content or "") and reason == choice["finish_reason"]
    assert choice["message"]["content"] == content and reason == ("stop" if content == text else "tool_calls")
    calls = [] if content == text else [{"name": "now", "arguments": '{"zone": 1}'}]
    for found in (choice["message"], message):
        assert [call["function"] for call in found.get("tool_calls", ())] == calls
    [choice] = answer(serving, CHAT, **fields | {"tool_choice": "none"})["choices"]
    assert choice["message"]["content"] == text and choice["finish_reason"] == "stop"
    params = read(serving, CHAT, tools=TOOLS).params
    assert params.skip_special_tokens is (kind is None)  # they may be those around a call


def test_thoughts_have_a_field_of_their_own(llm):
    def render(messages, tools=None, variables=None, **options):
        seen.append(variables)
        return llm.chat_prompt(messages, chat_template=TEMPLATE + end)

    seen, end = [], "<think>\n"
    serving = Serving(llm, "bard", render, reasoning_parser="qwen3")
    call, [output] = complete(serving, CHAT, max_tokens=3, reasoning_effort="low")
    output.outputs[0].text = "Hm.\n</think>\n\nHi."
    message = dict(role="assistant", content="Hi.", reasoning_content="Hm.")
    assert call.response([output])["choices"][0]["message"] == message
    assert message_of(parse(call.events(0, output)))[0] == message
    assert seen == [{"reasoning_effort": "low"}]
    template = TEMPLATE + "Reasoning: {{ reasoning_effort or 'medium' }}"  # in a prompt, and from /v1/responses
    rendered = Serving(llm, "bard", partial(render_with, llm, template))
    for path, fields, effort in ((CHAT, {}, "medium"), (CHAT, dict(reasoning_effort="high"), "high"), (
            CHAT, dict(chat_template_kwargs={"reasoning_effort": "low"}), "low"), (
            RESPONSES, dict(input="Hi", reasoning={"effort": "low"}), "low")):
        call = rendered.read(path, (MINIMAL[CHAT] if path == CHAT else {}) | fields)
        assert call.prompts[0]["prompt"].endswith(f"Reasoning: {effort}")
    call = read(serving, CHAT, structured_outputs={"choice": ["x"]})  # a grammar leaves no room for thoughts
    output.outputs[0].text = "x"
    assert call.response([output])["choices"][0]["message"] == {"role": "assistant", "content": "x"}
    end = ""  # then the answer does not begin with a thought
    assert read(serving, CHAT).response([output])["choices"][0]["message"] == {"role": "assistant", "content": "x"}


def test_channels_are_read_in_every_chat(llm):
    """Their marks are special tokens."""
    serving = serving_of(llm, tool_parser="openai", reasoning_parser="openai")
    call, [output] = complete(serving, CHAT, max_tokens=3)
    assert call.params.skip_special_tokens is False and read(serving).params.skip_special_tokens is True
    head = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    output.outputs[0].text = f"{head}<|channel|>final<|message|>Hi.<|return|>"
    message = dict(role="assistant", content="Hi.", reasoning_content="Hm.")
    assert call.response([output])["choices"][0]["message"] == message
    assert message_of(parse(call.events(0, output)))[0] == message
    output.outputs[0].text = head + ' to=functions.now<|channel|>commentary json<|message|>{"zone": 1}<|call|>'
    output.outputs[0].finish_reason = "stop"
    [choice] = call.response([output])["choices"]
    [called] = choice["message"]["tool_calls"]
    assert called["function"] == {"name": "now", "arguments": '{"zone": 1}'} and choice["finish_reason"] == "tool_calls"


def test_gemma_4_s_thoughts_are_read_in_every_chat(llm, monkeypatch):
    """Its template says so. Marks are special tokens, and a grammar begins behind the second one."""
    template = TEMPLATE + "{{ '<|tool_call>call:' if tools }}"
    serving = make_reader(llm, "bard", chat_template=template, render=partial(render_with, llm, template))
    assert (serving.tool_parser, serving.reasoning_parser) == ("gemma4", "gemma4")
    call, [output] = complete(serving, CHAT, max_tokens=3)
    assert call.params.skip_special_tokens is False and read(serving).params.skip_special_tokens is True
    output.outputs[0].text = "<|channel>thought\nHm.<channel|>Hi."
    message = dict(role="assistant", content="Hi.", reasoning_content="Hm.")
    assert call.response([output])["choices"][0]["message"] == message
    assert message_of(parse(call.events(0, output)))[0] == message
    call, [output] = complete(serving, CHAT, tools=TOOLS, max_tokens=3)
    output.outputs[0].text = "<|channel>thought\nHm.<channel|><|tool_call>call:now{zone:1}<tool_call|>"
    for choice in (call.response([output])["choices"][0], dict(message=message_of(parse(call.events(0, output)))[0])):
        assert choice["message"]["reasoning_content"] == "Hm."
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"zone": 1}'}
    monkeypatch.setattr(llm.tokenizer, "tokens", llm.tokenizer.tokens | {"<|channel>": 5, "<channel|>": 8})
    params = read(serving, CHAT, response_format={"type": "json_object"}).params
    assert params.structured_outputs.reasoning_token_ids == [5, 8]


def test_a_grammar_begins_in_the_final_channel(llm, monkeypatch):
    """Not that of a call that must be made: its text has no channels. Without these tokens a grammar begins at once."""
    def begin(**fields):
        structured = read(serving_of(llm, tool_parser="openai"), CHAT, **fields).params.structured_outputs
        return structured and structured.reasoning_token_ids

    fields = dict(response_format={"type": "json_object"})
    assert begin(**fields) is begin() is None
    encode, marks = llm.tokenizer.encode, {"<|channel|>": 5, "<|message|>": 8}
    monkeypatch.setattr(llm.tokenizer, "tokens", llm.tokenizer.tokens | marks)
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text, **how: [5, 17] if text == "<|channel|>final" else encode(
        text, **how))
    assert begin(**fields) == [[5, 17, 8]] and begin() is begin(tools=TOOLS[1:], tool_choice="required") is None


@needs_grammar
@pytest.mark.parametrize("opening, bias", [("<think>\n", {"</think>": 8}), ("", {"<think>": 20, "</think>": 26}),
                                           ("", {"<think>": -99}), ("<think>\n\n</think>\n\n", {"<think>": 99})])
def test_a_grammar_begins_when_the_thoughts_end(opening, bias):
    """The prompt opens them, the model may open them, or the prompt has ended them."""
    llm = shared(device="cpu", tokenizer=str(GOLDEN / "tokenizers" / "qwen"))  # it has their tokens
    serving = Serving(llm, "bard", partial(render_with, llm, TEMPLATE + opening), reasoning_parser="qwen3")
    bias = {llm.tokenizer.tokens[name]: number for name, number in bias.items()}
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    for more in ({"structured_outputs": {"choice": ['"yes"', '"no"']}}, {"response_format": schema},
                 {"tools": TOOLS[1:], "tool_choice": "required"}):
        fields = more | dict(seed=1, temperature=1, max_tokens=200, logit_bias=bias)
        [choice] = answer(serving, CHAT, **fields)["choices"]
        message, reason = message_of(stream(serving, CHAT, **fields))
        found, calls = choice["message"], choice["message"].get("tool_calls", ())
        assert bool(found.get("reasoning_content")) is (min(bias.values()) in (8, 20))
        assert message.get("reasoning_content") == found.get("reasoning_content")
        assert message["content"] == (found["content"] or "") and reason == choice["finish_reason"]
        assert found["content"] in (('"yes"', '"no"') if not calls else (None,)) and bool(calls) is ("tools" in more)
        assert reason == "stop" if not calls else json.loads(calls[0]["function"]["arguments"]) == {}


# ---- Answers

def test_a_completion_is_what_generate_gives(serving, llm):
    found = answer(serving, prompt=["ROMEO:", "JULIET:"], n=2, seed=1, max_tokens=5)
    expected = llm.generate(["ROMEO:", "JULIET:"], SamplingParams(n=2, seed=1, max_tokens=5, temperature=0.8))
    texts = [sample.text for output in expected for sample in output.outputs]
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in found["choices"]] == [
        (i, text, "length") for i, text in enumerate(texts)]
    assert found["object"] == "text_completion" and found["model"] == "bard" and found["id"].startswith("cmpl-")
    num_prompt = sum(len(output.prompt_token_ids) for output in expected)
    assert [*found["usage"].values()][:3] == [num_prompt, 20, num_prompt + 20]


def test_echo_and_log_probabilities_of_prompts(serving, llm):
    """The form of lm-evaluation-harness: ids of several texts; a token is greedy if it is the best."""
    prompts = [llm.tokenizer.encode(text) for text in ("ROMEO: But soft", "JULIET: Ay me, what now")]
    call, outputs = complete(serving, prompt=prompts, echo=True, logprobs=2, **GREEDY)
    choices = call.response(outputs)["choices"]
    for ids, choice, output in zip(prompts, choices, outputs):
        text, found = llm.tokenizer.decode(ids) + output.outputs[0].text, choice["logprobs"]
        assert choice["text"] == text == "".join(found["tokens"])
        own = [entry and entry[token] for token, entry in
               zip(ids + output.outputs[0].token_ids, output.prompt_logprobs + output.outputs[0].logprobs)]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is own[0] is None
        assert found["token_logprobs"][1:] == [logprob.logprob for logprob in own[1:]]
        assert all(2 <= len(top) <= 3 and (max(top.values()) == mine) is (logprob.rank == 1) for top, mine, logprob in
                   zip(found["top_logprobs"][1:], found["token_logprobs"][1:], own[1:]))
        assert all(text.startswith(token, offset) for token, offset in zip(found["tokens"], found["text_offset"]))
    for logprob in outputs[0].outputs[0].logprobs[0].values():
        logprob.logprob = float("-inf")
    assert "Infinity" not in json.dumps(call.response(outputs))  # which is no JSON


@pytest.mark.parametrize("logprobs", [None, 1])
def test_echo_without_new_tokens(serving, logprobs):
    fields = dict(prompt="ROMEO: But soft", echo=True, max_tokens=0, logprobs=logprobs)
    found = answer(serving, **fields)
    *events, last = stream(serving, **fields, stream_options={"include_usage": True})
    [choice] = found["choices"]
    assert choice["text"] == "".join(event["choices"][0]["text"] for event in events) == "ROMEO: But soft"
    assert choice["finish_reason"] == "length"
    assert not logprobs or "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert found["usage"]["completion_tokens"] == last["usage"]["completion_tokens"] == 0


def test_a_stream_echoes_its_prompt_once(serving, llm):
    half = llm.tokenizer.encode("é")[0]
    assert llm.tokenizer.decode([half]) == "\ufffd"
    options = {"include_usage": True}
    events = stream(serving, prompt="ROMEO:", echo=True, allowed_token_ids=[half], max_tokens=9, stream_options=options)
    texts = [event["choices"][0]["text"] for event in events if event["choices"]]
    assert "".join(texts).count("ROMEO") == 1 and all(texts[:-1])
    call, [output] = complete(serving)
    output.outputs[0].finish_reason = None
    assert call.events(0, output) != "" == call.events(0, output)  # no event where nothing is new


def test_bytes_and_offsets_of_halves_of_characters(serving, llm):
    ids = llm.tokenizer.encode("Où é 🎭.")
    assert any(llm.tokenizer.decode([token]) == "\ufffd" for token in ids)
    [choice] = answer(serving, prompt=ids, echo=True, logprobs=0, max_tokens=1)["choices"]
    data, table = b"", llm.tokenizer.token_bytes()
    for token, offset in zip(ids, choice["logprobs"]["text_offset"]):
        assert offset == len(data.decode("utf-8", "ignore"))
        data += table[token]
    fields = dict(logprobs=True, max_tokens=3, temperature=0)
    [choice] = answer(serving, CHAT, **fields, logit_bias={ids[1]: 100}, allowed_token_ids=[ids[1]])["choices"]
    assert {bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]} == {table[ids[1]]}


def test_token_ids_and_log_probabilities_of_a_prompt(serving, llm):
    ids, fields = llm.tokenizer.encode("ROMEO:"), dict(return_token_ids=True, seed=0, max_tokens=5)
    [output] = llm.generate("ROMEO:", SamplingParams(seed=0, max_tokens=5, temperature=0.8, prompt_logprobs=2))
    [choice] = answer(serving, prompt_logprobs=2, **fields)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, output.outputs[0].token_ids)
    first, second = json.loads(json.dumps(choice["prompt_logprobs"]))
    assert first is None and second[str(ids[1])] == vars(output.prompt_logprobs[1][ids[1]]) and len(second) in (2, 3)
    assert stream(serving, **fields)[0]["choices"][0]["prompt_token_ids"] == ids
    for found in (answer(serving, CHAT, **fields), stream(serving, CHAT, **fields)[0]):
        assert found["prompt_token_ids"] == read(serving, CHAT).prompts[0]["prompt_token_ids"]
    assert "prompt_token_ids" not in answer(serving)["choices"][0]


def test_prompts_are_truncated_from_the_left(serving, llm):
    ids = llm.tokenizer.encode("ROMEO: But soft, what light")
    for prompt in ("ROMEO: But soft, what light", ids):
        assert read(serving, prompt=prompt, truncate_prompt_tokens=3).prompts == [{"prompt_token_ids": ids[-3:]}]
    [prompt] = read(serving, prompt=[5] * 3000, truncate_prompt_tokens=-1, max_tokens=24, cache_salt="x").prompts
    assert prompt == {"prompt_token_ids": [5] * 1000, "cache_salt": "x"}
    [prompt] = read(serving, CHAT, truncate_prompt_tokens=2).prompts
    assert len(prompt["prompt_token_ids"]) == 2


def test_log_probabilities_of_a_chat(serving):
    [choice] = answer(serving, CHAT, logprobs=True, top_logprobs=3, temperature=0, max_tokens=4)["choices"]
    entries = choice["logprobs"]["content"]
    assert choice["message"] == {"role": "assistant", "content": "".join(entry["token"] for entry in entries)}
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"] and len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["token"] == entry["token"]  # greedy
        logprobs = [top["logprob"] for top in entry["top_logprobs"]]
        assert logprobs == sorted(logprobs, reverse=True) and entry["logprob"] == logprobs[0]


@pytest.mark.parametrize("every, so_far", [(1, False), (3, True)], ids=["each step", "merged, with the usage so far"])
@pytest.mark.parametrize("path", PATHS)
def test_a_stream_adds_up_to_the_answer(serving, path, every, so_far):
    fields = dict(n=4, seed=1, stop="er", max_tokens=40, temperature=1, return_token_ids=True)
    fields |= {"logprobs": 2, "echo": True} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
    whole, options = answer(serving, path, **fields), {"include_usage": True, "continuous_usage_stats": so_far}
    *parts, last = stream(serving, path, every, **fields, stream_options=options)
    counts = [part["usage"] and part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] if so_far else not any(counts)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert len(parts) < 4 * 40 / every + 8 and {choice["stop_reason"] for choice in whole["choices"]} == {"er", None}
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert all(part["id"] == last["id"] for part in parts)
        assert sum((part.get("token_ids", []) for part in mine), []) == choice["token_ids"]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert mine[-1]["stop_reason"] == choice["stop_reason"] and "er" not in choice.get("text", "")[len("ROMEO:"):]
        logprobs = [part["logprobs"] for part in mine if part["logprobs"]]
        if path == CHAT:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(part["delta"]["content"] for part in mine) == choice["message"]["content"]
            assert sum((found["content"] for found in logprobs), []) == choice["logprobs"]["content"]
        else:
            assert "".join(part["text"] for part in mine) == choice["text"]
            for key, values in choice["logprobs"].items():
                assert sum((found[key] for found in logprobs), []) == values, key


def test_only_requests_with_the_same_salt_share_cached_blocks(serving):
    prompt, cached = list(range(200, 240)), []
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {}):
        cached += answer(serving, prompt=prompt, **salt, **GREEDY)["usage"]["prompt_tokens_details"].values()
    assert cached == [0, 0, 0, 32, 32]


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_server_without_its_packages_is_one_sentence(monkeypatch, capsys, package):
    server = "nanopaged.features.server.app"
    for name in [name for name in sys.modules if name.partition(".")[0] == package or name == server]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert run("--serve", llm_class=None) == 2
    assert_refused(capsys.readouterr(), "pip install", package)
