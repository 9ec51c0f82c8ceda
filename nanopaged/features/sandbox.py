"""jinja2's sandbox with the extensions of transformers for chat templates. Importing this file needs jinja2."""
import json
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2.ext
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    """{% generation %} marks the model's own text for training. Here it is a scope like any other."""
    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


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


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
           separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """JSON as transformers writes it; jinja2's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
environment.filters["tojson"] = tojson
environment.globals |= {
    "raise_exception": raise_exception, "strftime_now": lambda format: datetime.now().strftime(format),
    "namespace": Namespace, "dict": lambda *args, **items: dict(*args, **items)}  # hides the type and its methods
compile_template = lru_cache(maxsize=16)(environment.from_string)
