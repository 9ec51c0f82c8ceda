"""Chat templates give, character for character, what `apply_chat_template` of Hugging Face transformers gives.

golden/chat holds templates that use what those of Qwen3, Llama 3.1 and SmolLM2 use, with what transformers made of them
(made by golden/chat/make_chat.py).
"""
import copy
import json
import re
import sys
from datetime import datetime
from types import SimpleNamespace

import pytest

from nanopaged.features import chat_template as chat
from nanopaged.features import sandbox
from nanopaged.features.chat_template import ChatTemplate, load_chat_template
from nanopaged.tests.helpers import GOLDEN, complaint, write_files

EXPECTED = json.loads((GOLDEN / "chat" / "expected.json").read_text(encoding="utf-8"))
QUESTION = EXPECTED["conversations"]["question"]
SHOW = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
TEXT = {"type": "text", "text": "a"}
CONTINUED = dict(add_generation_prompt=False, continue_final_message=True)
ENDLESS: list = []
ENDLESS.append(ENDLESS)


@pytest.fixture(autouse=True)
def standing_clock(monkeypatch):
    monkeypatch.setattr(sandbox, "datetime", SimpleNamespace(now=lambda: datetime.fromisoformat(EXPECTED["now"])))


def render(source: str, messages=QUESTION, tools=None, add_generation_prompt=True, continue_final_message=False,
           variables=None, is_request=False, **more) -> str:
    template = ChatTemplate(source, EXPECTED["special_tokens"])
    return template.render(messages, tools, add_generation_prompt, continue_final_message, variables or more,
                           is_request)


def source_of(name: str) -> str:
    return (GOLDEN / "chat" / f"{name}.jinja").read_text(encoding="utf-8")


def same(expected: str | dict, function, *arguments, **more) -> None:
    """The text that transformers gives, or a complaint that says as much as its error."""
    if isinstance(expected, str):
        assert function(*arguments, **more) == expected
        return
    message = complaint(function, *arguments, **more)
    if expected["error"] == "TemplateError":  # raise_exception: the template's own words
        assert message.endswith("refuses the conversation: " + " ".join(expected["message"].split()))
    else:
        assert f"({expected['error']}: " in message


@pytest.mark.parametrize("name", ["thinking", "dated", "default_system", "alternating", "parts", "language"])
def test_conversations_like_transformers(name):
    cases = [case[1:] for case in EXPECTED["cases"] if case[0] == name]
    assert cases
    for conversation, arguments, expected in cases:
        tools = {"tools": EXPECTED["tools"][arguments["tools"]]} if "tools" in arguments else {}
        same(expected, render, source_of(name), EXPECTED["conversations"][conversation], **arguments | tools)


def test_snippets_like_transformers():
    """The sandbox stops some: ways to Python's internals, changes to the messages, huge ranges."""
    for source, expected in EXPECTED["snippets"]:
        same(expected, render, source, add_generation_prompt=False)


@pytest.mark.parametrize("files, tools, expected", EXPECTED["checkpoints"])
def test_files_like_transformers(tmp_path, files, tools, expected):
    """Which file comes first, which of several templates is taken, and the special tokens by name."""
    template = load_chat_template(write_files(tmp_path, files))
    if isinstance(expected, dict):
        assert "none named 'default'" in complaint(template.render, QUESTION, tools=tools)
    else:
        assert template.render(QUESTION, tools=tools) == expected


def test_legacy_file_comes_last(tmp_path):
    assert load_chat_template(tmp_path) is None
    assert "chat_template=" in chat.NO_CHAT_TEMPLATE and ". " not in chat.NO_CHAT_TEMPLATE
    write_files(tmp_path, {"chat_template.json": {"chat_template": "legacy"}})
    for config, expected in (({"bos_token": "<s>"}, "legacy"), ({"chat_template": None}, "legacy"),
                             ({"chat_template": "config"}, "config")):
        write_files(tmp_path, {"tokenizer_config.json": config})
        assert load_chat_template(tmp_path).render(QUESTION) == expected


def test_own_template_with_the_checkpoints_special_tokens(tmp_path):
    write_files(tmp_path, {"tokenizer_config.json": {"chat_template": "config", "bos_token": {"content": "<s>"},
                                               "eos_token": None, "pad_token": 5, "add_bos_token": True}})
    template = load_chat_template(tmp_path, "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ add_bos_token }}")
    assert template.render(QUESTION) == "<s>|||"
    assert template.render(QUESTION, variables=dict(bos_token="<B>", eos_token="<E>")) == "<B>|<E>||"


def test_broken_files(tmp_path):
    for wrong, message in (
            ("{", "tokenizer_config.json is not valid JSON"), ([5], "tokenizer_config.json: expected a JSON object"),
            *(({"chat_template": template}, "must be a string")
              for template in (5, [{"name": "default"}], {"default": None}))):
        write_files(tmp_path, {"tokenizer_config.json": wrong})
        assert message in complaint(load_chat_template, tmp_path)
    write_files(tmp_path, {"tokenizer_config.json": {"chat_template": "a\n{% if %}"}})
    assert "fails in line 2 (TemplateSyntaxError" in complaint(load_chat_template(tmp_path).render, QUESTION)


def test_text_parts():
    """A template that reads the parts' texts gets the parts, and any other one a string."""
    parts = [{"role": "user", "content": [TEXT, TEXT | {"text": "b"}]}]
    joined = [{"role": "user", "content": "a\nb"}]
    for arguments in ({}, CONTINUED):
        assert render(source_of("thinking"), parts, **arguments) == render(source_of("thinking"), joined, **arguments)
    for reading, text in (("{% for part in messages[0].content %}{{ part.text }}{% endfor %}", "ab"),
                          ("{{ messages[0].content[0]['text'] ~ 'b' }}", "ab"),
                          ("{{ messages[0].content|map(attribute='text')|join }}", "ab"),
                          ("the text. {{ messages[0].content }}", "the text. a\nb")):
        assert render(reading, parts) == text


DEVELOPER, SYSTEM = {"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Be kind."}
BOTH = SYSTEM | {"content": "Be kind.\n\nBe brief."}


@pytest.mark.parametrize("given, expected", [
    ([DEVELOPER], [DEVELOPER | {"role": "system"}]), ([SYSTEM, DEVELOPER], [BOTH]), ([SYSTEM, SYSTEM], [SYSTEM] * 2),
    ([DEVELOPER, SYSTEM, DEVELOPER], [BOTH | {"content": "Be brief.\n\nBe kind.\n\nBe brief."}]),
    ([DEVELOPER, *QUESTION, DEVELOPER], [DEVELOPER | {"role": "system"}, *QUESTION, DEVELOPER | {"role": "system"}])])
def test_a_developers_message_is_a_system_message(given, expected):
    """Templates that do not know the role drop the message or refuse it, and many refuse a second system message."""
    assert render(SHOW, [*given, *QUESTION], is_request=True) == render(SHOW, [*expected, *QUESTION])
    as_it_is = SHOW + "{{ 'developer' }}"
    assert render(as_it_is, [SYSTEM, DEVELOPER], is_request=True) == render(as_it_is, [SYSTEM, DEVELOPER])


def test_a_developers_message_in_parts():
    for name, text in (("parts", "<turn system>(a)(\n\n)(Be kind.)</turn>"), ("thinking", "system\na\n\nBe kind.<")):
        assert text in render(source_of(name), [DEVELOPER | {"content": [TEXT]}, SYSTEM, *QUESTION], is_request=True)


def test_empty_lists_of_tools_and_calls_are_none():
    message = {"role": "assistant", "content": "x"}
    template = ChatTemplate({"default": "{{ tools }} {{ messages[1].tool_calls is defined }}", "tool_use": "tools"})
    assert template.render([*QUESTION, message | {"tool_calls": []}], [], is_request=True) == "None False"


def test_refusals_are_text():
    refusal = {"type": "refusal", "refusal": "a"}
    for content in ({"content": [refusal]}, {"content": None, "refusal": "a"}):
        assert render(SHOW, **assistant(**content)) == render(SHOW, **assistant(content="a"))
    assert "must have as content" in complaint(render, SHOW, **assistant(content=[refusal | {"refusal": 5}]))


def assistant(**message) -> dict:
    return dict(messages=[*QUESTION, {"role": "assistant"} | message])


@pytest.mark.parametrize("calls, expected", [
    *(([{"type": "function", "function": {"name": "f"} | function}], expected) for function, expected in (
        ({"arguments": '{"a": [1, "ö"]}'}, {"a": [1, "ö"]}), ({"arguments": {"a": 1}}, {"a": 1}),
        ({"arguments": ""}, {}), ({"arguments": None}, {}), ({}, {}))),
    *((calls, None) for calls in (["x"], "x", 5, [{"name": "f"}], [{"function": "f"}]))])
def test_arguments_of_tool_calls_are_dicts(calls, expected):
    """The API's form is a JSON string, which becomes a dict as in vLLM. Other forms are the template's matter."""
    shown = calls if expected is None else [calls[0] | {"function": {"name": "f", "arguments": expected}}]
    assert render("{{ messages[1].tool_calls }}", **assistant(content=None, tool_calls=calls)) == str(shown)


@pytest.mark.parametrize("arguments, part", [
    *((dict(messages=messages), "messages must be a list") for messages in ("Hello", QUESTION[0], None, [])),
    *((dict(messages=[*QUESTION, message]), "message 1 must be a dict") for message in (
        "Hello", {"content": "x"}, {"role": 1, "content": "x"}, QUESTION)),
    *((assistant(content=content), f"message 1 must have as content .* not {re.escape(repr(content))}") for content in (
        None, 5, {"text": "x"}, [], ["x"], [TEXT, {"type": "text"}], [{"type": "image_url", "image_url": "x"}])),
    (assistant(), "message 1 must have as content"), (assistant(content=None, tool_calls=[]), "not None"),
    *((assistant(content="x", extra=extra), "message 1 must be made of") for extra in (object(), print)),
    *((assistant(tool_calls=[{"function": {"arguments": arguments}}]), "message 1 has a tool call with the arguments "
       f"{re.escape(repr(arguments))}; give a dict or a string") for arguments in ("{", "a=1", 5)),
    *((dict(tools=tools), "tools must be a list") for tools in ([print], {"name": "f"})),
    (dict(tools=[{"endless": ENDLESS}]), "tools must be made of"), (dict(helper=print), "template variables must be"),
    *((dict(variables={name: True}), f"leave {name!r} out") for name in (*chat.GIVEN, 1)),
    (dict(continue_final_message=True), "set one of them to False"),
    *(({name: [1]}, rf"{name} must be True or False, not \[1\]")
      for name in ("add_generation_prompt", "continue_final_message"))])
def test_wrong_arguments(arguments, part):
    assert re.search(part, complaint(render, SHOW, **arguments))


def test_continuing_what_the_template_does_not_keep():
    for source in ("nothing", "{{ messages[-1].content|upper }}", "{{ messages[-1].content[:-9] }}"):
        assert "keeps the text" in complaint(render, source, **CONTINUED)
    assert "needs text" in complaint(render, SHOW, EXPECTED["conversations"]["tool call"][:2], **CONTINUED)


def test_what_is_given_stays_as_it_is():
    for messages in (EXPECTED["conversations"]["tool steps"][:-1], EXPECTED["conversations"]["parts last"]):
        before = copy.deepcopy(messages)
        render(source_of("parts"), messages, **CONTINUED)
        assert messages == before


def test_the_template_gets_plain_data_only():
    text = type("Text", (str,), dict(secret=lambda self: "secret"))("x")
    for source in ("{{ messages[0].name.secret() }}", "{{ variable.secret() }}"):
        message = complaint(render, source, [{"role": "user", "content": text, "name": text}], variable=text)
        assert "no attribute 'secret'" in message


@pytest.mark.parametrize("version, problem", [
    ("3.1.5", "jinja2 3.1.5 has known escapes"), ("2.11", "jinja2 2.11 has known escapes"), ("3.1.6", None),
    ("3.2.0rc1", None), ("4.0", None), (None, "pip install jinja2")])
def test_only_a_safe_jinja2(monkeypatch, version, problem):
    """The sandbox is not imported yet, as in a new process."""
    monkeypatch.delitem(sys.modules, "nanopaged.features.sandbox")
    monkeypatch.delattr("nanopaged.features.sandbox")
    for module in ("jinja2", "jinja2.ext", "jinja2.sandbox") if version is None else ():
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(chat, "version", lambda package: version or "4.0")
    chat._sandbox.cache_clear()
    try:
        assert problem in complaint(render, "x") if problem else render("x") == "x"
    finally:
        chat._sandbox.cache_clear()

