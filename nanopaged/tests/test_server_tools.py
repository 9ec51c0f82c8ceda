"""Thoughts, calls and content in the text of models, whole and in pieces of any size."""
import json
import time

import pytest

from nanopaged.features.server.tools import FORMATS, Reader, find_parser

CITY = {"city": "Paris }</tool_call>\n\"é\" [TOOL_CALLS]", "days": [1, {"a": None}]}
ARGUMENTS = json.dumps(CITY, ensure_ascii=False)
HERMES = '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'
CODER = "<tool_call>\n<function=%s>\n%s</function>\n</tool_call>"
LLAMA = '{"name": "weather", "parameters": %s}'
WEATHER, TIME = ("weather", CITY), ("time", {})
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "array"}, "exact": {"type": "boolean"}, "size": {"type": "integer"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "unit": {"enum": ["1", "2"]}}}}},
         {"type": "function", "function": {"name": "time"}}]


def merge(deltas) -> dict:
    """The message of a stream, as OpenAI's client puts it together."""
    message: dict = {"content": ""}
    for delta in deltas:
        for name in delta.keys() - {"tool_calls"}:
            message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function"
                calls.append({"id": call["id"], "function": {"name": call["function"]["name"], "arguments": ""}})
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    ids = [call.pop("id") for call in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    return message


def add_all(reader: Reader, pieces: list[str]) -> list[dict]:
    deltas = [reader.add(piece, ended=i == len(pieces)) for i, piece in enumerate(pieces, 1)]
    assert all(delta[name] or name == "content" for delta in deltas for name in delta)
    return deltas


def read(text: str, kind: str | None, thinks: bool | None = None,
         thinker: str | None = None) -> tuple[str, str, list]:
    """(thoughts, content, calls), the same in pieces of any size."""
    first, *others = [
        merge(add_all(Reader(kind, thinks, TOOLS, thinker),
                      [text[i:i + size] for i in range(0, len(text), size)] + [""]))
        for size in (1, 2, 3, 7, 50, len(text) + 1)]
    assert all(other == first for other in others)
    functions = [call["function"] for call in first.get("tool_calls", ())]
    return first.get("reasoning_content", ""), first["content"], [
        (function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("kind, text, content, calls", [
    ("hermes", HERMES % ARGUMENTS, "", [WEATHER]),
    ("hermes", f"I look.\n\n{HERMES % ARGUMENTS}\n{HERMES % '{}'}\n", "I look.", [WEATHER, ("weather", {})]),
    ("hermes", (HERMES % ARGUMENTS).removesuffix("\n</tool_call>"), "", [WEATHER]),  # its model ended there
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>' + HERMES % ARGUMENTS,
     '<tool_call>{"name": 5, "arguments": {}}</tool_call>', [WEATHER]),
    ("qwen3_coder", CODER % ("weather", "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in {
        "city": CITY["city"], "days": json.dumps(CITY["days"])}.items())), "", [WEATHER]),
    ("qwen3_coder", "I look.\n" + CODER % ("time", "") + "\n" + CODER % ("weather", "<parameter=city>\n12\n</parameter>"
     "\n<parameter=exact>\nTrue\n</parameter>\n<parameter=size>7</parameter>\n<parameter=note>\nnull\n</parameter>\n"
     "<parameter=unit>\n1\n</parameter>\n<parameter=more>\n{\n\n}\n</parameter>"), "I look.", [TIME, ("weather", {
         "city": "12", "exact": True, "size": 7, "note": None, "unit": "1", "more": "{\n\n}"})]),
    ("qwen3_coder", "<function=f>\n<parameter=x>\nif a</parameter> < 1:\n  b()\n</parameter>\n</function>", "", [
        ("f", {"x": "if a</parameter> < 1:\n  b()"})]),  # without the signs around it, and of no tool
    ("llama3_json", LLAMA % ARGUMENTS, "", [WEATHER]),
    ("llama3_json", f"<|python_tag|>{LLAMA % ARGUMENTS}; " + '{"name": "time", "parameters": {}}', "", [WEATHER, TIME]),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": %s}, {"name": "time", "arguments": {}}]' % ARGUMENTS,
     "", [WEATHER, TIME]),
    ("mistral", f"Well [TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time{{}}", "Well", [WEATHER, TIME]),
    ("forced", '{"name":"weather","arguments":%s}' % ARGUMENTS, "", [WEATHER]),
    ("openai", f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>", "", [WEATHER]),
    ("openai", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
     f"to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|><|start|>assistant to=functions.time"
     "<|channel|>commentary<|message|>{}", "I look.", [WEATHER, TIME]),
    *((kind, text, text, []) for kind, text in (  # no calls
        ("hermes", "a < b, <tool"), ("hermes", 'no\n<tool_call>\n{"name": "weather", "argu'),
        ("qwen3_coder", HERMES % ARGUMENTS), ("qwen3_coder", "<tool_call>\n<function=time>\n<parameter=x>\n1"),
        ("hermes", "<tool_call>\n[1]\n</tool_call> so\n"), ("hermes", "<tool_call>" + "[" * 5000),
        ("llama3_json", '{"answer": 42} is it'), ("llama3_json", "It is " + LLAMA % ARGUMENTS), ("llama3_json", "{x"),
        ("mistral", "[TOOL_CALLS]weather"), ("openai", "a <|start|>user <| b"), ("forced", '{"name":"we'),
        (None, "  plain <tool_call> \0\n")))])
def test_calls_in_the_formats_of_models(kind, text, content, calls):
    assert read(text, kind) == ("", content, calls)
    if kind not in ("forced", "openai"):
        assert read(f"<think>\nOh {{\n\n</think>\n\n{text}", kind, False) == ("Oh {", content.lstrip(), calls)


@pytest.mark.parametrize("text, thinks, thoughts, content", [
    ("<think>\n\n</think>\n\nHi", False, "", "Hi"), ("Hm.</think>Hi", True, "Hm.", "Hi"),
    ("Hm. </thin", True, "Hm. </thin", ""), ("Hi <think>x</think>", False, "", "Hi <think>x</think>"),
    ("<thi", False, "", "<thi"), ("\n Hi", False, "", "\n Hi"), ("a</think>b</think>", True, "a", "b</think>")])
def test_thoughts(text, thinks, thoughts, content):
    assert read(text, None, thinks) == (thoughts, content, [])


THOUGHT = "<|channel|>analysis<|message|>The <b>user</b> wants it.<|end|><|start|>assistant"


@pytest.mark.parametrize("text, thoughts, content, calls", [
    (f"{THOUGHT}<|channel|>final<|message|>Hi there.<|return|>", "The <b>user</b> wants it.", "Hi there.", []),
    (f"{THOUGHT} to=functions.time<|channel|>commentary json<|message|>{{}}<|call|>", "The <b>user</b> wants it.", "",
     [TIME]),
    (f"{THOUGHT}<|channel|>fin", "The <b>user</b> wants it.", "", []), (THOUGHT[:45], "The <b>user</b>", "", []),
    ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "print(1)", "", [])])
def test_channels(text, thoughts, content, calls):
    """gpt-oss's answers. One that ends in a head ends in front of it."""
    assert read(text, "openai") == (thoughts, content, calls)


GEMMA = '<|tool_call>call:weather{city:<|"|>%s<|"|>,days:[1,{a:null}]}<tool_call|>' % CITY["city"]


@pytest.mark.parametrize("text, thoughts, content, calls", [
    (GEMMA, "", "", [WEATHER]),
    (f"<|channel>thought\nIt may\n rain. <channel|>I look.\n{GEMMA}<|tool_call>call:time{{}}<tool_call|>",
     "It may\n rain.", "I look.", [WEATHER, TIME]),
    ("<|channel>thought\n<channel|>Hi.", "", "Hi.", []), ("<|channel>thought\nHm", "Hm", "", []),
    ('<|tool_call>call:f{<|"|>a b<|"|>:true,2:-1.5e3,c:{d:[<|"|>x,}<|"|>,no]},e:"\\u0041<"}<tool_call|>', "", "",
     [("f", {"a b": True, "2": -1500.0, "c": {"d": ["x,}", "no"]}, "e": "A<"})]),
    ("<|tool_call>call:f{a:[1}<tool_call|>", "", "<|tool_call>call:f{a:[1}<tool_call|>", []),
    ('I <|tool_call>call:f{a:<|"|>b', "", 'I <|tool_call>call:f{a:<|"|>b', [])])
def test_gemma_4(text, thoughts, content, calls):
    assert read(text, "gemma4", False, "gemma4") == (thoughts, content, calls)


def test_text_is_sent_as_it_comes():
    reader = Reader("hermes", False)
    assert [reader.add(text, ended=False)["content"] for text in ("Hel", "lo <tool", "box>")] == [
        "Hel", "lo", " <toolbox>"]
    assert Reader(None).add("", ended=True) == {"content": ""}  # so an empty answer is no null
    first, second, third = add_all(Reader("forced"), ['{"name":"f","arguments":{"x', '":1}}', ""])
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x'} and first["tool_calls"][0]["id"]
    assert second == {"tool_calls": [{"index": 0, "function": {"arguments": '":1}'}}]} and third == {}
    [delta] = filter(None, add_all(Reader("mistral"), ["[TOOL_CALLS]f{}", ""]))
    [call] = delta["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()  # as Mistral's templates want it


def test_a_long_call_takes_linear_time():
    reader, started = Reader("hermes"), time.perf_counter()
    reader.add('<tool_call>{"name": "f", "arguments": {"x": [', ended=False)
    coder = Reader("qwen3_coder")
    coder.add("<function=f>\n<parameter=x>\n", ended=False)
    for _ in range(20_000):
        reader.add('{"a": "}"}, ', ended=False)
        coder.add("a</parameter>\n", ended=False)
    for kind in FORMATS:
        assert Reader(kind).add(" " * 5000, ended=False) == {}
    assert time.perf_counter() - started < 5


def test_the_format_is_found_in_the_chat_template():
    templates = {"qwen3_coder": "{{ '<tool_call>\\n<function=' + name + '>\\n<parameter=' }}",
                 "hermes": "{{ '<tool_call>\\n' }}", "mistral": "{{ '[TOOL_CALLS]' }}",
                 "gemma4": "{{ '<|tool_call>call:' + name + '{' }}", "openai": "{{ '<|channel|>final' }}",
                 "llama3_json": '{"name": function name, "parameters": dictionary of argument name and its value}'}
    assert {name: find_parser(templates[name]) for name in FORMATS} == {name: name for name in FORMATS}
    assert find_parser("{{ messages }}") is None
