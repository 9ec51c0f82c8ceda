"""Thoughts, calls of tools and content in a model's text, told apart while the text comes.

    thoughts      <think>The user wants ..</think>                     in front of what follows
    hermes        <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>           Hermes and Qwen
    qwen3_coder   <tool_call>                                          Qwen3-Coder, Qwen3.5
                  <function=f>
                  <parameter=x>
                  1
                  </parameter>
                  </function>
                  </tool_call>
    llama3_json   {"name": "f", "parameters": {"x": 1}}; {"name": ..                    Llama 3
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, ..]                Mistral, and newer:
                  [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS] ..
    openai        <|channel|>analysis<|message|>The user wants ..<|end|><|start|>assistant to=functions.f
                  <|channel|>commentary json<|message|>{"x": 1}<|call|>                 gpt-oss; "final" is content
    gemma4        <|tool_call>call:f{x:1,city:<|"|>Oslo<|"|>}<tool_call|>               Gemma 4, whose thoughts stand in
                  <|channel>thought .. <channel|>
    forced        {"name":"f","arguments":{"x":1}}                     by a grammar: tool_choice "required", or a name

The names are vLLM's. A call in a format of models is sent when it is complete: until then it may turn out to be
none, and what is no call stays text. The arguments of a forced call, and of one of gpt-oss's, are sent as they come.
In qwen3_coder's form values are plain text: the tool's schema tells which are strings, and others are read as JSON.
"""
import json
import uuid
from typing import Any
from urllib.parse import urldefrag, urljoin

import regex

SPACES = r"(?<!\s)\s*+"  # from the first of them on, without backtracking: many spaces take linear time
THINKERS = ("deepseek_r1", "gemma4", "openai", "qwen3")  # the models with thoughts; gpt-oss has its own form
FORMATS = {  # name -> a part of the chat templates of its models; a call up to its JSON, with its name; a call's end
    "qwen3_coder": ("<parameter=", rf"{SPACES}(?:<tool_call>\s*+)?+<function=([\w.-]+)>\s*", r"\s*</tool_call>"),
    "hermes": ("<tool_call>", rf"{SPACES}<tool_call>\s*()", r"\s*</tool_call>"),
    "mistral": ("[TOOL_CALLS]", rf"{SPACES}\[TOOL_CALLS\]\s*([\w.-]*)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*", ""),
    "llama3_json": ("dictionary of argument name", rf"{SPACES};?+\s*+(?:<\|python_tag\|>)?+\s*+()(?={{)", ""),
    "gemma4": ("<|tool_call>call:", rf"{SPACES}<\|tool_call>\s*+call:\s*+([\w.-]+)\s*(?={{)", r"\s*<tool_call\|>"),
    # A message's head, with the name of a function in one of two places, and its end. (The prompt begins the first.)
    "openai": ("<|channel|>", r"\s*+(?:<\|start\|>)?+(?:assistant)?+\s*+(?:to=(?P<to>[\w.-]+))?+\s*+<\|channel\|>"
               r"(?P<channel>\w+)\s*+(?:to=(?P<to>[\w.-]+))?+[^<]*+(?:<\|constrain\|>)?+[^<]*+<\|message\|>",
               r"<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)")}
NO_CALLS = "", "(?!)", ""  # a pattern that matches nothing
PARAMETER = r"<parameter=([^>\n]+)>\n?+(.*?)\n?</parameter>\s*+(?=<parameter=|</function>)"
PARAMETERS = regex.compile(rf"(?>{PARAMETER})*+</function>", regex.DOTALL)
PYTHON = {"True": True, "False": False, "None": None}  # as its template writes them
# Of Gemma 4's arguments: a string between its marks or as in JSON, a mark, or a word
GEMMA_TOKEN = regex.compile(r'\s*+(?:<\|"\|>(?P<text>.*?)<\|"\|>|(?P<json>"(?:[^"\\]|\\.)*+")|(?P<mark>[][{},:])|'
                            r'(?P<word>[^][{},:"<\s][^][{},:<]*+))', regex.DOTALL)
LITERAL = regex.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
FORCED = regex.compile(r'\{"name":"([\w-]+)","arguments":')
NAME = regex.compile("[A-Za-z0-9_-]{1,64}")
# Schemas of tools have keywords that llguidance does not know, "uniqueItems" for example: these bind nothing.
LENIENT = {"lenient": True, "coerce_one_of": True, "whitespace_flexible": False}
NO_PARAMETERS = {"type": "object", "properties": {}}


def thought_marks(thinker: str | None) -> tuple[str, str, str]:
    """The tokens around this model's thoughts, and a word behind the first one."""
    return ("<|channel>", "<channel|>", "thought") if thinker == "gemma4" else ("<think>", "</think>", "")


def find_parser(template: str) -> str | None:
    """The format of the calls that a model with this chat template writes."""
    return next((name for name, (sign, *_) in FORMATS.items() if sign in template), None)


def read_tools(body: dict[str, Any]) -> tuple[list | None, dict | None]:
    """The tools of a request that the model may call, and the JSON schema of a call that it must make."""
    tools, choice = body.get("tools"), body.get("tool_choice", "auto")
    if choice in ("none", "auto"):
        return (tools if choice == "auto" else None), None
    try:
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or NO_PARAMETERS
                   for tool in tools or ()}
        names = list(schemas) if choice == "required" else [choice["function"]["name"]]
        if not all(NAME.fullmatch(name) and isinstance(schema, dict) for name, schema in schemas.items()):
            raise TypeError
    except (TypeError, KeyError, AttributeError):
        raise ValueError("tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': "
                         "..}}, and tools a list of {'type': 'function', 'function': {'name': .., 'parameters': {..}}} "
                         "with names of at most 64 letters, digits, _ and -") from None
    if not schemas or names[0] not in schemas:
        raise ValueError(f"tool_choice asks for {choice!r:.80}, and tools has {', '.join(schemas) or 'no function'}")
    calls, places = [], {}
    for name in names:
        # A function's schema refers to parts of itself, from the root, and now it is not the root. It loses its own
        # address, from which references would start, and which schemas of several functions may have in common.
        schema = dict(schemas[name])
        old, address = schema.pop("id", ""), schema.pop("$id", "")  # "id" in draft 4
        places[name] = move_references(schema, str(address or old).rstrip("#"), f"#/$defs/{name}")
        fields = {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}}
        calls.append({"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False})
    return tools, {"x-guidance": LENIENT, "$defs": places, "anyOf": calls}


def move_references(part: Any, address: str, place: str) -> Any:
    """A part of a JSON schema, whose references to the schema at this address start from this place instead. Parts with
    an address of their own stay as they are."""
    if isinstance(part, list):
        return [move_references(one, address, place) for one in part]
    if not isinstance(part, dict) or isinstance(part.get("$id"), str):
        return part
    moved = {key: move_references(value, address, place) for key, value in part.items()}
    if isinstance(part.get("$ref"), str):
        target, pointer = urldefrag(urljoin(address, part["$ref"]))
        if target in ("", address) and pointer[:1] in ("", "/"):  # others are names ($anchor)
            moved["$ref"] = place + pointer
    return moved


class Reader:
    """Takes the text of one answer as it comes, and gives back what OpenAI's deltas say.

    kind: a name in FORMATS, "forced", or None if there are no calls
    thinks: True: the text begins within a thought; False: it may begin with one; None: there are none, or no more
    tools: what the model may call, as in a request
    thinker: a name in THINKERS
    """

    def __init__(self, kind: str | None, thinks: bool | None = None, tools: list | None = None,
                 thinker: str | None = None):
        self.kind, self.thinks, self.tools = kind, thinks, tools
        begin, end, word = thought_marks(thinker)
        self.thinking = rf"\A\s*+{regex.escape(begin)}{word}\s*"
        self.thought = rf"{SPACES}{regex.escape(end)}\s*"
        self.held = ""  # text that is not sent yet: more may come that belongs to it
        self.num_calls = self.next_try = 0
        self.channel: str | None = None  # of the message that the text is in: a delta's key; None: it is in none

    def add(self, text: str, ended: bool) -> dict[str, Any]:
        """What came with this text. ended: no more will come."""
        if self.kind is self.thinks is None:
            return {"content": text}
        self.held += text
        delta: dict[str, Any] = {"reasoning_content": "", "content": "", "tool_calls": []}
        if self.thinks is False:
            text, begin = self._take_until(self.thinking, ended)
            self.held = text + (self.held[begin.end():] if begin else self.held)
            self.thinks = None if text else begin is not None
        if self.thinks:
            delta["reasoning_content"], end = self._take_until(self.thought, ended)
            if end:
                self.held, self.thinks = self.held.removeprefix(end[0]), None
        if self.thinks is None:
            read = {"forced": self._read_forced, "openai": self._read_channels}.get(self.kind or "", self._read)
            read(delta, ended)
        return {name: value for name, value in delta.items() if value}

    def _take_until(self, pattern: str, ended: bool) -> tuple[str, Any]:
        """Take the held text in front of a match, or of what may become one. None for a match that may get longer."""
        match = regex.search(pattern, self.held, partial=not ended)
        start = match.start() if match else len(self.held)
        text, self.held = self.held[:start], self.held[start:]
        is_whole = match and not match.partial and (ended or match[0] != self.held)
        return text, match if is_whole else None

    def _read(self, delta: dict[str, Any], ended: bool) -> None:
        """Content and complete calls."""
        while self.held and not (self.num_calls and self.held.isspace()):
            _, begin, close = FORMATS.get(self.kind or "", NO_CALLS)
            text, match = self._take_until(begin, ended)
            delta["content"] += text
            if self.kind == "llama3_json" and text:
                self.kind = None  # a call has no text in front
                continue
            if not match or not ended and len(self.held) < self.next_try:
                return
            try:
                calls, end = self._parse(match, close, ended)
            except (ValueError, RecursionError):  # no JSON, or not all of it
                if not ended:
                    self.next_try = len(self.held) * 51 // 50 + 1  # so all tries together take linear time
                    return
                calls, end = [], len(self.held)
            delta["content"] += "" if calls else self.held[:end]
            delta["tool_calls"] += [self._call(name, json.dumps(found, ensure_ascii=False)) for name, found in calls]
            self.held, self.next_try = self.held[end:], 0

    def _parse(self, begin: Any, close: str, ended: bool) -> tuple[list[tuple[Any, Any]], int]:
        """The calls in front of the held text, none if that is other JSON, and where they end."""
        if self.kind == "qwen3_coder":
            value, end = self._read_parameters(begin[1], len(begin[0]))
        elif self.kind == "gemma4":
            value, end = self._read_gemma(len(begin[0]))
        else:
            value, end = json.JSONDecoder().raw_decode(self.held, len(begin[0]))
        if not (closed := regex.compile(close).match(self.held, end)) and not ended:
            raise ValueError
        value = {"name": begin[1], "arguments": value} if begin[1] else value
        calls = [(call.get("name"), call.get("arguments", call.get("parameters"))) if isinstance(call, dict) else (0, 0)
                 for call in (value if isinstance(value, list) else [value])]
        are_calls = all([*map(type, call)] == [str, dict] for call in calls)
        return calls if are_calls else [], closed.end() if closed else end

    def _read_parameters(self, name: str, start: int) -> tuple[dict[str, Any], int]:
        """The arguments that the held text has from here on, and where they end. ValueError: not all of them."""
        match = PARAMETERS.match(self.held, start)
        if not match:
            raise ValueError
        return {key: self._read_value(name, key, text) for key, text in zip(*match.allcaptures()[1:])}, match.end()

    def _read_gemma(self, start: int) -> tuple[Any, int]:
        """The arguments that the held text has from here on, and where they end. ValueError: not all of them."""
        parts, depth, end = list[str](), 0, start
        while depth or not parts:
            if not (token := GEMMA_TOKEN.match(self.held, end)):
                raise ValueError
            kind, end = token.lastgroup, token.end()
            part = token[kind].rstrip() if kind == "word" else token[kind]
            if kind == "mark":
                depth += (part in "{[") - (part in "}]")
                if part == ":" and parts[-1][:1] != '"':  # a key without marks
                    parts[-1] = json.dumps(parts[-1])
            parts.append(json.dumps(part) if kind == "text" or kind == "word" and not LITERAL.fullmatch(part) and (
                self.held[end:end + 1] != ":") else part)
        return json.loads("".join(parts), strict=False), end

    def _read_value(self, function: str, parameter: str, text: str) -> Any:
        """As the tool's schema wants it: a string if it may be one, else what the text says in JSON."""
        try:
            [schema] = [tool["function"]["parameters"]["properties"][parameter] for tool in self.tools or ()
                        if tool["function"]["name"] == function]
            types = [one.get("type", "string" if "enum" in one else "") for one in schema.get("anyOf", [schema])]
            types = [name for given in types for name in ([given] if isinstance(given, str) else given)]
            if "string" in types and not ("null" in types and text in ("null", "None")):
                return text
            return PYTHON[text] if text in PYTHON else json.loads(text)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):  # no such schema, or no JSON
            return text

    def _read_channels(self, delta: dict[str, Any], ended: bool) -> None:
        """gpt-oss's messages. Those to functions are calls, and text outside of messages is content. A head that the
        answer ends in is neither."""
        _, head, end = FORMATS["openai"]
        while self.held:
            text, match = self._take_until(end, ended) if self.channel else self._take_until(head, False)
            if self.channel == "tool_calls":
                self._add_arguments(delta["tool_calls"], text)
            else:
                delta[self.channel or "content"] += text
            if not match:
                return
            self.held = self.held[len(match[0]):]
            self.channel = None if self.channel else self._channel_of(match, delta)

    def _channel_of(self, head: Any, delta: dict[str, Any]) -> str:
        """Where the text of a message with this head goes. (Other tools than functions are the model's own.)"""
        if (head["to"] or "").startswith("functions."):
            delta["tool_calls"].append(self._call(head["to"].removeprefix("functions."), ""))
            return "tool_calls"
        return "reasoning_content" if head["channel"] == "analysis" or head["to"] else "content"

    def _add_arguments(self, calls: list[dict[str, Any]], text: str) -> None:
        """Text of the last call's arguments."""
        if text and not calls:
            calls.append({"index": self.num_calls - 1, "function": {"arguments": ""}})
        if text:
            calls[-1]["function"]["arguments"] += text

    def _read_forced(self, delta: dict[str, Any], ended: bool) -> None:
        if not self.num_calls and (match := FORCED.match(self.held)):
            delta["tool_calls"], self.held = [self._call(match[1], "")], self.held[match.end():]
        if self.num_calls:
            text = self.held.removesuffix("}")  # the last brace closes what is around the arguments
            self.held = self.held[len(text):]
            self._add_arguments(delta["tool_calls"], text)
        elif ended:
            delta["content"] = self.held

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        self.num_calls += 1
        number = uuid.uuid4().hex
        return {"index": self.num_calls - 1, "id": number[:9] if self.kind == "mistral" else f"call_{number}",
                "type": "function", "function": {"name": name, "arguments": arguments}}  # Mistral's templates want 9
