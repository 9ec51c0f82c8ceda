"""jinja2's sandbox for chat templates, with the extensions of transformers to the language (nanopaged/text/chat.py).

jinja2 itself keeps a template from Python's objects and from changes to its variables, and bounds a range. Here loops
and macros check the time, and products have a largest size. Importing this file needs jinja2.
"""
import json
import math
import threading
import time
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

MOST_IN_PRODUCT = 1_000_000  # characters, items or bits


class Refusal(Exception):
    """A template called raise_exception."""


class Generation(jinja2.ext.Extension):
    """{% generation %} marks the model's own text for training. Here it is a scope like any other."""
    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Namespace(jinja2.utils.Namespace):
    """A namespace that refuses names with a leading underscore, which Python itself may look up."""

    def __init__(self, /, *args: Any, **attributes: Any):
        super().__init__()
        for name, value in dict(*args, **attributes).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.sandbox.SecurityError(f"namespace attribute {name!r} begins with an underscore")
        super().__setitem__(name, value)


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox whose loops and macros check the time, and whose products have a largest size."""
    intercepted_binops = frozenset(["*", "**"])
    clock = threading.local()  # .end: the thread's time at which its rendering ends

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        tree = super()._parse(source, name, filename)
        found: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.Block)))
        for node in found:
            given: dict[str, Any] = dict(lineno=node.lineno, environment=self)
            check = nodes.Call(nodes.EnvironmentAttribute("check_time", **given), [], [], None, None, **given)
            node.body.insert(0, nodes.ExprStmt(check, **given))
            if getattr(node, "test", None) is not None:  # a loop that skips all passes
                node.test = nodes.And(check, node.test, **given)
        return tree

    def check_time(self) -> bool:
        if time.thread_time() > self.clock.end:
            raise TimeoutError("it computes for too long")
        return True

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
        else:  # a text or a list, so many times
            size = math.prod(x if isinstance(x, int) else len(x) if isinstance(x, (str, list, tuple)) else 0
                             for x in (left, right))
        if size > MOST_IN_PRODUCT:
            raise OverflowError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def raise_exception(message: str) -> None:
    raise Refusal(message)


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
           separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """JSON as transformers writes it; jinja2's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
environment.filters["tojson"] = tojson
environment.globals |= {
    "raise_exception": raise_exception, "strftime_now": lambda format: datetime.now().strftime(format),
    "namespace": Namespace, "dict": lambda *args, **items: dict(*args, **items)}  # hides the type and its methods
compile_template = lru_cache(maxsize=16)(environment.from_string)
