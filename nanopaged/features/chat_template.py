"""From messages to a prompt, by the checkpoint's own chat template, as `apply_chat_template` of transformers does.

A chat model was trained on conversations in one text format. Its checkpoint holds a chat template, a program in the
Jinja language that writes a conversation in this format.

    {% for message in messages %}{{ '<|' + message.role + '|>' + message.content + eos_token }}{% endfor %}

    [{"role": "user", "content": "Hi"}]  ->  <|user|>Hi</s>

The template has these variables: `messages`, `tools` (JSON schemas of functions that the model may call),
`add_generation_prompt` (True: end the prompt at the place where the model's answer begins), the special tokens by name,
and the variables that the caller adds (`enable_thinking`). The rendered text contains its special tokens, so encode it
with `add_special_tokens=False`.

A template is untrusted code. It runs in jinja2's sandbox (nanopaged/features/sandbox.py), on a copy of the messages. It
can neither reach Python's objects nor change the caller's, and a range has at most 100,000 items. Its time and memory
have no limit: whoever picks the model picks the template.
"""
import json
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import Any

from nanopaged.inputs import as_python, check_kind, check_number, read_json
from nanopaged.options import feature
from nanopaged.text.byte_level import Tokenizer
from nanopaged.text.tokenizer import read_tokenizer_config, special_tokens

# The error of a chat request if load_chat_template returns None.
NO_CHAT_TEMPLATE = ("the checkpoint has no chat template, and cannot chat; load one that can, such as Qwen/Qwen3-0.6B, "
                    "or pass a template as chat_template=, in Jinja")
READS_PARTS = re.compile(r"""\.text\b|(['"])text\1""")  # part.text, part['text'], 'text' in part, attribute='text'
NAMES_DEVELOPER = re.compile(r"""(['"])developer\1""")
GIVEN = ("messages", "tools", "add_generation_prompt", "continue_final_message")  # reserved names of variables
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
PADDING = {"padding", "truncation", "max_length", "return_tensors"}  # transformers' options, no template's variables
BEYOND = "the tokenizer of an LLM has no {}; AutoTokenizer.from_pretrained(llm.tokenizer_path) of transformers has more"
MARK = "THE_MODEL_GOES_ON_HERE "  # if a template strips the message, the space at the mark's end disappears


def load_chat_template(path: Path, source: str | None = None) -> "ChatTemplate | None":
    """The chat template in `source`, otherwise that of the checkpoint directory `path`; None if both are missing.

    chat_template.jinja comes first, with additional_chat_templates/NAME.jinja. Then comes `chat_template` in
    tokenizer_config.json, and last the older chat_template.json.
    """
    path = Path(path)
    config = read_tokenizer_config(path)
    files = {file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")}
    if (path / "chat_template.jinja").exists():
        files["default"] = path / "chat_template.jinja"
    for found in (source, {name: file.read_text("utf-8") for name, file in files.items()} or None,
                  config.get("chat_template"), read_json(path / "chat_template.json", {}).get("chat_template")):
        if found is not None:
            return ChatTemplate(found, special_tokens(config))
    return None


class ChatTemplate:
    """A Jinja template, or several by name: "tool_use" (optional) for conversations with tools, "default" for others.

    special_tokens: {"bos_token": "<s>", ...}
    """

    def __init__(self, source: Any, special_tokens: dict[str, str] | None = None):
        if isinstance(source, list):  # tokenizer_config.json writes {name: template} as a list of dicts
            source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        self.templates: dict[str, str] = source if isinstance(source, dict) else {"default": source}
        self.special_tokens = special_tokens or {}
        if wrong := [template for template in self.templates.values() if not isinstance(template, str)]:
            raise ValueError("a chat template must be a string, or a list of {'name': ..., 'template': a string}, not "
                             f"{wrong[0]!r:.80}")

    def render(self, messages: list[dict], tools: list[dict] | None = None, add_generation_prompt: bool = True,
               continue_final_message: bool = False, variables: dict[str, Any] | None = None,
               is_request: bool = False) -> str:
        """The prompt for a conversation: messages like {"role": "user", "content": "Hi"}, tools as JSON schemas.

        `content` may be a list of parts, {"type": "text", "text": ...}. A template that reads the text of parts gets
        the list. Any other template gets the texts joined by newlines, as in vLLM; transformers passes the list, which
        such a template prints. With `continue_final_message` the prompt ends with the last message's text, and the
        model continues this text. `variables` are further variables of the template; the names in GIVEN are reserved.
        With `is_request` the messages are those of OpenAI's API, where empty `tools` and `tool_calls` mean none, and
        the role "developer" is that of the system message (`_read_developers`). transformers passes both on.
        """
        check_kind("add_generation_prompt", add_generation_prompt, bool, "True or False")
        check_kind("continue_final_message", continue_final_message, bool, "True or False")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message continues the last message and add_generation_prompt begins a new "
                             "one; set one of them to False")
        if taken := [name for name in variables or () if not isinstance(name, str) or name in GIVEN]:
            raise ValueError("the names of a chat template's variables are strings other than the reserved "
                             f"{', '.join(GIVEN)}; leave {taken[0]!r:.80} out")
        check_number("messages", messages, (list, tuple), len,
                     "a list of at least one dict like {'role': 'user', 'content': 'Hello'}")
        check_number("tools", tools, (list, NoneType), lambda x: all(isinstance(tool, dict) for tool in x),
                     "a list of dicts, each the JSON schema of a function")
        if is_request:
            tools = tools or None
        name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise ValueError(f"there are chat templates named {', '.join(map(repr, self.templates))} and none named "
                             "'default'; pass a template as chat_template=")
        source = self.templates[name]
        messages = [_read_message(f"message {i}", message, bool(READS_PARTS.search(source)))
                    for i, message in enumerate(messages)]
        if is_request:
            messages = _read_developers(messages, "developer" if NAMES_DEVELOPER.search(source) else "system")
        given = {"messages": messages, "tools": _plain("tools", tools), "add_generation_prompt": add_generation_prompt}
        given |= _plain("template variables", {"documents": None} | (variables or {}))
        text = _mark_end(messages[-1]) if continue_final_message else ""
        prompt = _run(source, self.special_tokens | given)
        return _cut_at_mark(prompt, text) if continue_final_message else prompt


class ScriptTokenizer:
    """What `LLM.get_tokenizer` gives to scripts, as transformers has it: encode, decode, apply_chat_template and the
    special tokens (eos_token, eos_token_id ..; None: there is none) of the checkpoint in the directory `path`."""
    __slots__ = ("tokenizer", "path", "encode", *SPECIAL_TOKENS, *(f"{name}_id" for name in SPECIAL_TOKENS))

    def __init__(self, tokenizer: Tokenizer, path: Path):
        self.tokenizer, self.path, self.encode = tokenizer, path, tokenizer.encode
        special, names = special_tokens(read_tokenizer_config(path)), {i: name for name, i in tokenizer.tokens.items()}
        for name in SPECIAL_TOKENS:
            token_id = getattr(tokenizer, f"{name}_id", tokenizer.tokens.get(special.get(name, "")))
            setattr(self, f"{name}_id", token_id)
            setattr(self, name, names.get(token_id))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(BEYOND.format(name))

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of ids in a list, an array or a tensor, or of a single one."""
        ids = as_python(ids)
        return self.tokenizer.decode([ids] if isinstance(ids, int) else ids, skip_special_tokens)

    def apply_chat_template(self, conversation: list[dict], tools: list[dict] | None = None, *,
                            chat_template: str | None = None, add_generation_prompt: bool = False,
                            continue_final_message: bool = False, tokenize: bool = True, return_dict: bool = True,
                            **variables: Any) -> Any:
        """The prompt as {"input_ids": .., "attention_mask": ..}, with return_dict=False as ids, with tokenize=False as
        text. `ChatTemplate.render` describes the arguments."""
        if beyond := PADDING & variables.keys():
            raise ValueError(BEYOND.format(min(beyond)))
        if (template := load_chat_template(self.path, chat_template)) is None:
            raise ValueError(NO_CHAT_TEMPLATE)
        text = template.render(conversation, tools, add_generation_prompt, continue_final_message, variables)
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids


def _read_message(name: str, message: Any, keep_parts: bool) -> dict[str, Any]:
    """A copy of a message in the form that templates expect. Raises ValueError if `message` has another form."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{name} must be a dict like {{'role': 'user', 'content': 'Hello'}}, not {message!r:.80}")
    message = {key: value for key, value in _plain(name, message).items() if value is not None}
    content = message.get("content", message.get("refusal"))  # a model that refuses may say so in another field
    if isinstance(content, list):
        content = [{"type": "text", "text": part.get("refusal")} if isinstance(part, dict)
                   and part.get("type") == "refusal" else part for part in content]
    if content is not None:
        message["content"] = content
    is_parts = isinstance(content, list) and content and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content)
    if not (isinstance(content, str) or is_parts or content is None and message.get("tool_calls")):
        raise ValueError(f"{name} must have as content a string or a list of {{'type': 'text', 'text': 'Hello'}}, or "
                         f"have tool_calls and no content, not {content!r:.80}")
    for call in message["tool_calls"] if isinstance(message.get("tool_calls"), list) else ():
        _read_arguments(name, call)
    if is_parts and not keep_parts:
        message["content"] = "\n".join(part["text"] for part in content)
    for key in ("reasoning_content", "thinking", "reasoning"):  # templates read the first name or the second
        if key in message:
            return {"thinking": message[key]} | message | {"reasoning_content": message[key]}
    return message


def _read_developers(messages: list[dict], role: str) -> list[dict]:
    """Messages of the API, without empty tool_calls, and those of a developer with `role`, which the template knows.
    Many templates take one system message, the first. So a developer's and its neighbour of the same role are one
    message with both texts; several system messages that the client wrote stay."""
    read: list[dict] = []
    for message in messages:
        if message.get("tool_calls") == []:
            del message["tool_calls"]
        before = read[-1] if read else {"role": ""}
        roles = {before["role"], message["role"]}
        if "developer" in roles and roles <= {"developer", role} and "content" in before and "content" in message:
            before |= {"role": "developer", "content": _join(before["content"], message["content"])}
        else:
            read.append(message)
    return [message | {"role": role} if message["role"] == "developer" else message for message in read]


def _join(first: str | list, second: str | list) -> str | list:
    """Two contents as one, with an empty line between them."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    texts = [[{"type": "text", "text": part}] if isinstance(part, str) else part for part in (first, "\n\n", second)]
    return sum(texts, [])


def _read_arguments(name: str, call: Any) -> None:
    """Make the arguments of a tool call a dict, which templates expect; OpenAI's API gives a JSON string."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and not isinstance(function.get("arguments"), (dict, list)):
        try:
            function["arguments"] = json.loads(function.get("arguments") or "{}")
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{name} has a tool call with the arguments {function['arguments']!r:.80}; give a dict or "
                             f"a string with a JSON object ({error})") from None


def _mark_end(message: dict[str, Any]) -> str:
    """Append the mark to the last text of a message. Returns the text without the mark."""
    content = message.get("content")
    holder, key = (content[-1], "text") if isinstance(content, list) else (message, "content")
    if key not in holder:
        raise ValueError("continue_final_message needs text to continue in the last message, which has none")
    text, holder[key] = holder[key], holder[key] + MARK
    return text


def _cut_at_mark(prompt: str, text: str) -> str:
    """The prompt up to the mark, which follows `text`."""
    end = prompt.rfind(MARK.strip())
    if end < 0 or text.strip() not in prompt:
        raise ValueError("continue_final_message needs a chat template that keeps the text of the last message, and "
                         "this one drops or changes that text; end with a message that the template keeps")
    return prompt[:end] if prompt.startswith(MARK, end) else prompt[:end].rstrip()


def _plain(name: str, value: Any) -> Any:
    """A copy made of JSON's types. No object with methods of its own may enter the sandbox."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be made of dicts, lists, strings, numbers, booleans and None: {error}") from None


def _run(source: str, variables: dict[str, Any]) -> str:
    """Render the template. ValueError if it refuses the conversation or fails."""
    compile_template = _sandbox().compile_template
    try:
        return compile_template(source).render(variables)
    except Exception as error:  # a template is a program and can raise any exception
        reason = f"{' '.join(str(error).split()):.400}"
        if type(error).__name__ == "TemplateError":  # of raise_exception
            raise ValueError(f"the chat template refuses the conversation: {reason}") from None
        line = f" in line {error.lineno}" if hasattr(error, "lineno") else ""
        reason = f"{type(error).__name__}: {reason.rstrip('.').replace('. ', '; ')}"
        raise ValueError(f"the chat template fails{line} ({reason}); change the messages, or pass another template as "
                         "chat_template=") from None


@cache
def _sandbox() -> Any:
    """The file that needs jinja2, if a safe version is installed."""
    try:
        import jinja2  # noqa: F401
        found = version("jinja2")
    except ImportError:
        raise ValueError("chat templates need the package jinja2, which is missing; `pip install jinja2`") from None
    if tuple(map(int, re.findall(r"\d+", found)[:3])) < (3, 1, 6):
        raise ValueError(f"chat templates are untrusted code, and the sandbox of jinja2 {found} has known escapes; "
                         "`pip install --upgrade jinja2` gets 3.1.6 or newer")
    return feature("sandbox", "a chat")
