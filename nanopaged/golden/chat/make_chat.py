"""What transformers makes of the chat templates that lie here, which are this project's own.

    python nanopaged/golden/chat/make_chat.py

Needs the package `transformers` (written with 5.23). expected.json gets, beside the conversations and the tools, the
`cases`: [template, conversation, arguments of apply_chat_template, the text], where an argument `tools` names a list
of tools; the `snippets`, templates of one line: [source, the text], rendered for one question; and the `checkpoints`:
[{file name: content}, tools, the text], what a tokenizer loaded from these files makes of it. Where transformers fails,
{"error": type} stands in the text's place, with the "message" if the template raised it. The clock stands at `now`.
nanopaged/tests/test_chat_template.py holds nanopaged/features/chat_template.py to it.
"""
import json
import shutil
import tempfile
from datetime import datetime
from pathlib import Path

import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent
TOKENIZER = HERE.parent / "tokenizers" / "qwen" / "tokenizer.json"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
NOW = datetime(2024, 7, 5, 9, 8, 7, 65)

WEATHER = {"type": "function", "function": {
    "name": "weather", "description": "The weather in a <city>, “now” & in °C", "parameters": {
        "type": "object", "required": ["city"], "properties": {
            "city": {"type": "string"}, "unit": {"enum": ["°C", "°F"]}}}}}
SEARCH = {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}
TOOLS = {"one": [WEATHER], "two": [WEATHER, SEARCH], "none": []}


def message(role: str, content, **more) -> dict:
    return {"role": role, "content": content, **more}


def call(name: str, arguments) -> dict:
    return {"type": "function", "id": "call0", "function": {"name": name, "arguments": arguments}}


SYSTEM, HELLO = message("system", " Be kind. "), message("user", "Hello, wörld! 你好")
ANSWER, MORE = message("assistant", "Hi.\n\nHow are you?"), message("user", "  Fine\n")
ONE, TWO = {"type": "text", "text": "one"}, {"type": "text", "text": "two "}
CONVERSATIONS = {
    "question": [HELLO],
    "system": [SYSTEM, HELLO],
    "turns": [HELLO, ANSWER, MORE],
    "system and turns": [SYSTEM, HELLO, ANSWER, MORE, message("assistant", "Good. ")],
    "thoughts": [HELLO, message("assistant", "<think>\nThey greet\n</think>\n\nHi."), MORE,
                 message("assistant", "<think>\nOf course\n</think>\n\nGood.")],
    "thoughts apart": [HELLO, message("assistant", "Hi.", reasoning_content="old"), MORE,
                       message("assistant", "Good.", reasoning="new")],
    "tool call": [HELLO, message("assistant", None, tool_calls=[call("weather", {"city": "Köln", "unit": "°C"})]),
                  message("tool", "12 °C")],
    "tool steps": [SYSTEM, HELLO, message("assistant", "Two of them.", reasoning_content="both\n", tool_calls=[
        call("weather", {"city": "Köln"}), call("search", '{"query": "a<b"}')]), message("tool", "12 °C"),
        message("tool", "nothing"), message("assistant", "<think>once more</think>", tool_calls=[
            call("search", {"query": "x", "n": 3})]), message("tool", "found", tool_call_id="call0")],
    "answered": [HELLO, message("assistant", "", tool_calls=[call("search", {"query": "x"})]), message("tool", "found"),
                 message("assistant", "It is x.")],
    "channels": [HELLO, message("assistant", "<|channel>thought\nThey greet<channel|>Hi."), MORE],
    "parts": [message("user", [ONE, TWO], name="Ann"), ANSWER],
    "parts last": [HELLO, message("assistant", [ONE, TWO])],
    "answer first": [ANSWER, HELLO],
    "only system": [SYSTEM],
    "empty": [message("user", ""), message("assistant", "")],
    "nulls": [message("user", "x", name=None, tool_calls=None)],
}

OPEN, DONE = {"add_generation_prompt": True}, {"add_generation_prompt": False}
GO_ON = {"add_generation_prompt": False, "continue_final_message": True}
COMMON = [("question", OPEN), ("question", DONE), ("system", OPEN), ("turns", OPEN), ("system and turns", DONE),
          ("system and turns", GO_ON), ("answer first", OPEN), ("only system", OPEN), ("empty", DONE), ("empty", GO_ON),
          ("nulls", OPEN)]
CASES = {
    "channels": [*COMMON[:-3], ("question", OPEN | {"enable_thinking": True, "tools": "two"}), ("channels", OPEN),
                 ("tool steps", OPEN | {"tools": "one"}), ("answered", DONE), ("parts", OPEN), ("parts last", DONE)],
    "thinking": [*COMMON, ("question", OPEN | {"enable_thinking": False}), ("turns", OPEN | {"enable_thinking": True}),
                 ("thoughts", OPEN), ("thoughts", DONE), ("thoughts", GO_ON), ("thoughts apart", DONE),
                 ("tool call", OPEN), ("tool call", GO_ON), ("tool steps", OPEN), ("answered", DONE),
                 ("question", OPEN | {"tools": "one"}), ("tool steps", OPEN | {"tools": "two"}),
                 ("tool call", OPEN | {"tools": "none"})],
    "dated": [*COMMON, ("question", OPEN | {"date_string": "26 Jul 2024"}), ("question", OPEN | {"tools": "one"}),
              ("only system", OPEN | {"tools": "one"}), ("tool call", OPEN | {"tools": "one"}), ("tool steps", OPEN),
              ("system", OPEN | {"tools": "two", "tools_in_user_message": False}),
              ("tool call", OPEN | {"builtin_tools": ["weather", "interpreter"]}),
              ("question", OPEN | {"custom_tools": [SEARCH]}), ("question", OPEN | {"bos_token": "<B>"})],
    "default_system": [*COMMON, ("tool call", OPEN)],
    "alternating": COMMON,
    "parts": [*COMMON, ("parts", OPEN), ("parts", GO_ON), ("parts last", DONE), ("parts last", GO_ON),
              ("thoughts apart", OPEN), ("tool call", OPEN)],
    "language": [("system and turns", OPEN), ("turns", DONE | {"stop_at": 2}),
                 ("turns", OPEN | {"tools": "one", "documents": [{"title": "t", "text": "x"}]})],
}

SNIPPETS = [
    "", "plain text\n", "text\n\n", "  {% if true %}\n  x\n  {% endif %}\n  y", "a {%- if true -%} b {%- endif -%} c",
    "{{ bos_token }}\n{{ sep_token }}", "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f %j %A %p %%') }}",
    "{{ messages }}", "{{ messages[0].items()|list }}", "{{ messages|tojson }}", "{{ [1, 2]|tojson(indent=none) }}",
    "{{ {'b': 'é', 'a': '\"'}|tojson(indent='\t') }}", "{{ 'a'|e }}{{ '<'|e }}", "{{ range(3)|sum }}",
    "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% generation %}{% for m in messages %}{{ m.role }}{% set x = 1 %}{% endfor %}{% endgeneration %}[{{ x }}]",
    "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}",
    "{% set ns = namespace(a=1) %}{% generation %}{% set ns.a = 2 %}{% endgeneration %}{{ ns.a }}",
    "{%- generation -%} x {%- endgeneration -%} y",
    "{% set ns = namespace({'b': 2}, a=1) %}{{ ns.a }}{{ ns.b }}{{ ns.c }}|{{ ns.c is defined }}",
    "{{ dict(a=1)['a'] }}{{ dict([('b', 2)]).b }}", "{{ '<' ~ messages[0].content|upper ~ '>' }}",
    "{{ missing }}|{{ missing is defined }}|{{ messages[9] }}",
    # What templates refuse, and what is wrong with them.
    "{{ raise_exception('No.') }}", "{{ raise_exception('Two\n lines & ' ~ messages[0].role) }}",
    "{% if %}", "{% for m in messages %}", "{{ messages[0]..role }}", "{% generation %}x", "{% do 1 %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 1|nothing }}",
    "{{ missing.attribute }}", "{{ messages[0].content.nothing() }}", "{{ missing() }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}",
    "{% include 'x' %}", "{{ strftime_now() }}", "{{ [missing]|tojson }}",
    # What the sandbox is for.
    "{{ messages.append(1) }}", "{{ messages[0].update({'a': 1}) }}", "{{ messages[0].pop('role') }}",
    "{{ range(100001) }}", "{{ range(10 ** 30) }}", "{% for i in range(2 ** 40) %}{% endfor %}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}", "{{ namespace(__class__=1) }}", "{{ namespace({'_a': 1}) }}",
    "{{ ''.__class__.__mro__ }}", "{{ ''['__class__']['__base__'] }}", "{{ (''|attr('__class__')).mro() }}",
    "{{ raise_exception.__globals__ }}", "{{ strftime_now.__code__.co_code }}", "{{ lipsum.__globals__['os'] }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}", "{{ namespace.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}", "{{ self._TemplateReference__context.eval_ctx.environment }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}", "{{ '{x.__class__.__mro__}'.format_map({'x': 1}) }}",
    "{% set f = ''.format %}{{ f.__self__.__class__.__mro__ }}",
    "{{ ['{0.__class__.__mro__}']|map('format', 1)|list }}",
    "{{ [1]|map(attribute='__class__.__mro__')|list }}", "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "{{ dict.__subclasses__() }}", "{{ dict.mro() }}", "{{ messages.__class__.append(messages, 1) }}",
]

PROBE = "{{ bos_token }},{{ eos_token }},{{ unk_token }},{{ pad_token }},{{ own_token }}"
FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "pad_token": None, "own_token": "<own>",
          "eos_token": {"__type": "AddedToken", "content": "</s>"} | FLAGS}
MAP = {"bos_token": "<M>", "unk_token": {"content": "<unk>"} | FLAGS}
DECODER = {"640": {"content": "<|endoftext|>", "special": True} | FLAGS}
NAMED = [{"name": "default", "template": "named default"}, {"name": "tool_use", "template": "named tools"}]
MORE_FILES = {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "more"}


def files(template: str | list | None = None) -> dict:
    return {"tokenizer_config.json": CONFIG | ({"chat_template": template} if template else {})}


CHECKPOINTS = [
    (files(PROBE), None), (files(PROBE) | {"special_tokens_map.json": MAP}, None),
    ({"tokenizer_config.json": CONFIG | {"chat_template": PROBE, "added_tokens_decoder": DECODER},
      "special_tokens_map.json": MAP}, None),
    (files(NAMED), None), (files(NAMED), [SEARCH]), (files(NAMED), []),
    (files(NAMED[1:]), None), (files(NAMED[1:]), [SEARCH]),
    (files("config") | {"chat_template.jinja": "file\n"}, None),
    (files(NAMED) | {"chat_template.jinja": "file"}, [SEARCH]),
    (files() | MORE_FILES, None), (files() | MORE_FILES, [SEARCH]),
    (files("config") | {"additional_chat_templates/tool_use.jinja": "more"}, None),
]


class StandingClock(datetime):
    @classmethod
    def now(cls):
        return NOW


def rendered(tokenizer, messages: list[dict], **arguments) -> str | dict:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    except Exception as error:
        kind = type(error).__name__
        return {"error": kind, "message": str(error)} if kind == "TemplateError" else {"error": kind}


def loaded_and_rendered(files: dict, tools: list[dict] | None) -> str | dict:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(TOKENIZER, folder)
        for name, content in files.items():
            file = Path(folder) / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return rendered(AutoTokenizer.from_pretrained(folder), [HELLO], tools=tools)


def main():
    chat_template_utils.datetime = StandingClock
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER), **SPECIAL_TOKENS)
    cases = []
    for name, table in CASES.items():
        source = (HERE / f"{name}.jinja").read_text(encoding="utf-8")
        for conversation, arguments in table:
            tools = {"tools": TOOLS[arguments["tools"]]} if "tools" in arguments else {}
            text = rendered(tokenizer, CONVERSATIONS[conversation], chat_template=source, **arguments | tools)
            cases.append([name, conversation, arguments, text])
    expected = {
        "transformers": transformers.__version__, "now": NOW.isoformat(), "special_tokens": SPECIAL_TOKENS,
        "tools": TOOLS, "conversations": CONVERSATIONS, "cases": cases,
        "snippets": [[source, rendered(tokenizer, [HELLO], chat_template=source)] for source in SNIPPETS],
        "checkpoints": [[files, tools, loaded_and_rendered(files, tools)] for files, tools in CHECKPOINTS],
    }
    (HERE / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=0), encoding="utf-8")


if __name__ == "__main__":
    main()
