"""Messages to a prompt, by the checkpoint's own chat template, as `apply_chat_template` of transformers renders it.

A chat model was trained on conversations written down in one certain way, and its checkpoint says in which: the chat
template is a program in the Jinja language that turns a conversation into text.

    {% for message in messages %}{{ '<|' + message.role + '|>' + message.content + eos_token }}{% endfor %}

    [{"role": "user", "content": "Hi"}]  ->  <|user|>Hi</s>

It sees `messages`, `tools` (JSON schemas of functions that the model may call), `add_generation_prompt` (whether to end
where the model's answer begins), the special tokens by name, and any variable that the caller adds (`enable_thinking`).
The text comes with its special tokens written out, so encode it with `add_special_tokens=False`.

A template is code from strangers. It runs in jinja2's sandbox, on a copy of the messages: it can neither reach into
Python nor change anything, and a range has at most 100,000 items. A template that is merely slow is not stopped.
"""
import json
import re
from datetime import datetime
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from nanopaged.inputs import read_json

# What to say where load_chat_template finds none.
NO_CHAT_TEMPLATE = ("the checkpoint has no chat template, which would say how its model reads a conversation; pass one "
                    "as chat_template=, in Jinja, or give the prompt as text")
READS_PARTS = re.compile(r"""\.text\b|(['"])text\1""")  # part.text, part['text'], 'text' in part, attribute='text'
GIVEN = ("messages", "tools", "add_generation_prompt", "continue_final_message")  # to templates, not by their variables
MARK = "THE_MODEL_GOES_ON_HERE "  # a template that strips the message takes the space at its end


def load_chat_template(path: Path, source: str | None = None) -> "ChatTemplate | None":
    """The chat template of the checkpoint directory `path`, or `source` in its place; None if there is neither.

    chat_template.jinja comes first, with additional_chat_templates/NAME.jinja; then `chat_template` in
    tokenizer_config.json; then the older chat_template.json. Raises ValueError if one of them cannot be read.
    """
    path = Path(path)
    config = _read_json(path / "tokenizer_config.json")
    files = {file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")}
    if (path / "chat_template.jinja").exists():
        files["default"] = path / "chat_template.jinja"
    for found in (source, {name: file.read_text("utf-8") for name, file in files.items()} or None,
                  config.get("chat_template"), _read_json(path / "chat_template.json").get("chat_template")):
        if found is not None:
            return ChatTemplate(found, _special_tokens(path, config))
    return None


class ChatTemplate:
    """A Jinja template, or several by name: "tool_use", where there is one, for conversations with tools, and "default"
    for the others. `special_tokens`: {"bos_token": "<s>", ...}."""

    def __init__(self, source: str | dict[str, str] | list[dict], special_tokens: dict[str, str] | None = None):
        if isinstance(source, list):  # tokenizer_config.json's way to write {name: template}
            source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        self.templates = source if isinstance(source, dict) else {"default": source}
        self.special_tokens = special_tokens or {}
        if wrong := [template for template in self.templates.values() if not isinstance(template, str)]:
            raise ValueError("a chat template must be a string, or a list of {'name': ..., 'template': a string}, not "
                             f"{wrong[0]!r:.80}")

    def render(self, messages: list[dict], tools: list[dict] | None = None, add_generation_prompt: bool = True,
               continue_final_message: bool = False, variables: dict | None = None) -> str:
        """The prompt for a conversation: messages like {"role": "user", "content": "Hi"}, tools as JSON schemas.

        `content` may be a list of parts, {"type": "text", "text": ...}. A template that reads the text of parts gets
        them so; any other gets the texts joined by newlines, as in vLLM, where transformers hands it the list to print.
        With `continue_final_message` the prompt ends with the last message's text, for the model to go on with.
        `variables` of the template may be any but what is given otherwise. Raises ValueError for messages of another form,
        and if the template refuses them or fails.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message goes on with the last message and add_generation_prompt begins a "
                             "new one; set one of them to False")
        if taken := [name for name in variables or () if not isinstance(name, str) or name in GIVEN]:
            raise ValueError(f"a chat template's variables have strings as names, other than {', '.join(GIVEN)}, which are "
                             f"given otherwise; leave {taken[0]!r:.80} out")
        if not isinstance(messages, (list, tuple)) or not messages:
            raise ValueError("messages must be a list of at least one dict like {'role': 'user', 'content': 'Hello'}, "
                             f"not {messages!r:.80}")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise ValueError(f"tools must be a list of dicts, a function's JSON schema each, not {tools!r:.80}")
        name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise ValueError(f"there are chat templates named {', '.join(map(repr, self.templates))} and none named "
                             "'default'; pass one as chat_template=")
        source = self.templates[name]
        messages = [_read_message(f"message {i}", message, bool(READS_PARTS.search(source)))
                    for i, message in enumerate(messages)]
        text = _mark_end(messages[-1]) if continue_final_message else None
        prompt = _run(source, self.special_tokens | _plain("template variables", {"documents": None} | (variables or {})) | {
            "messages": messages, "tools": _plain("tools", tools), "add_generation_prompt": add_generation_prompt})
        return _cut_at_mark(prompt, text) if continue_final_message else prompt


def _read_message(name: str, message, keep_parts: bool) -> dict:
    """A copy in the form that templates expect. Raises ValueError if it is no message."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{name} must be a dict like {{'role': 'user', 'content': 'Hello'}}, not {message!r:.80}")
    message = {key: value for key, value in _plain(name, message).items() if value is not None}
    content = message.get("content")
    is_parts = isinstance(content, list) and content and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content)
    if not (isinstance(content, str) or is_parts or content is None and message.get("tool_calls")):
        raise ValueError(f"{name} must have as content a string or a list of {{'type': 'text', 'text': 'Hello'}}, or "
                         f"none but tool_calls, not {content!r:.80}")
    for call in message["tool_calls"] if isinstance(message.get("tool_calls"), list) else ():
        _read_arguments(name, call)
    if is_parts and not keep_parts:
        message["content"] = "\n".join(part["text"] for part in content)
    for key in ("reasoning_content", "thinking", "reasoning"):  # templates read it by the first name or the second
        if key in message:
            return {"thinking": message[key]} | message | {"reasoning_content": message[key]}
    return message


def _read_arguments(name: str, call) -> None:
    """Give a tool call its arguments as a dict, which templates expect; OpenAI's API has them as a JSON string."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and not isinstance(function.get("arguments"), (dict, list)):
        try:
            function["arguments"] = json.loads(function.get("arguments") or "{}")
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{name} has a tool call with the arguments {function['arguments']!r:.80}; give a dict or "
                             f"a string with a JSON object ({error})") from None


def _mark_end(message: dict) -> str:
    """Put the mark behind the last text of a message; the text as it was."""
    content = message.get("content")
    holder, key = (content[-1], "text") if isinstance(content, list) else (message, "content")
    if key not in holder:
        raise ValueError("continue_final_message needs text in the last message to go on with, and there is none")
    text, holder[key] = holder[key], holder[key] + MARK
    return text


def _cut_at_mark(prompt: str, text: str) -> str:
    end = prompt.rfind(MARK.strip())
    if end < 0 or text.strip() not in prompt:
        raise ValueError("continue_final_message needs a chat template that keeps the text of the last message, and "
                         "this one drops or changes it; end with a message that it keeps")
    return prompt[:end] if prompt.startswith(MARK, end) else prompt[:end].rstrip()


def _plain(name: str, value):
    """A copy made of JSON's types, so that no object with methods of its own gets into the sandbox."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be made of dicts, lists, strings, numbers, booleans and None: {error}") from None


class _Refusal(Exception):
    """A template called raise_exception."""


def _run(source: str, variables: dict) -> str:
    compiled = _compiler()
    try:
        return compiled(source).render(variables)
    except Exception as error:  # a program can fail in any way
        reason = f"{' '.join(str(error).split()):.400}"
        if isinstance(error, _Refusal):
            raise ValueError(f"the chat template refuses the conversation: {reason}") from None
        line = f" in line {error.lineno}" if hasattr(error, "lineno") else ""
        reason = f"{type(error).__name__}: {reason.rstrip('.').replace('. ', '; ')}"
        raise ValueError(f"the chat template fails{line} ({reason}); change the messages, or pass another template as "
                         "chat_template=") from None


@lru_cache
def _compiler():
    """A function that compiles templates in jinja2's sandbox, with what transformers adds to the language."""
    try:
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise ValueError("chat templates need the package jinja2, and it is missing; `pip install jinja2`") from None
    if tuple(map(int, re.findall(r"\d+", version("jinja2"))[:3])) < (3, 1, 6):
        raise ValueError(f"chat templates are code from strangers, and jinja2 {version('jinja2')} has known ways out "
                         "of its sandbox; `pip install --upgrade jinja2` gets 3.1.6 or newer")

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks what the model wrote, for those who train it. Here it is a scope like any other."""
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Namespace(jinja2.utils.Namespace):
        """Without names that Python itself may look up."""
        def __init__(self, /, *args, **attributes):
            super().__init__()
            for name, value in dict(*args, **attributes).items():
                self[name] = value

        def __setitem__(self, name, value):
            if str(name).startswith("_"):
                raise jinja2.sandbox.SecurityError(f"namespace attribute {name!r} begins with an underscore")
            super().__setitem__(name, value)

    def raise_exception(message):
        raise _Refusal(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):  # jinja2's escapes for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception, "strftime_now": lambda format: datetime.now().strftime(format),
        "namespace": Namespace, "dict": lambda *args, **items: dict(*args, **items)}  # not the type with its methods
    return lru_cache(maxsize=16)(environment.from_string)


def _special_tokens(path: Path, config: dict) -> dict[str, str]:
    """Name -> text. As in transformers, a tokenizer_config.json with added_tokens_decoder is complete by itself."""
    if "added_tokens_decoder" not in config:
        config = config | _read_json(path / "special_tokens_map.json")
    tokens = {name: token.get("content") if isinstance(token, dict) else token for name, token in config.items()}
    return {name: token for name, token in tokens.items() if name.endswith("_token") and isinstance(token, str)}


def _read_json(path: Path) -> dict:
    """The JSON object in a file, {} if there is no file."""
    return read_json(path) if path.exists() else {}
