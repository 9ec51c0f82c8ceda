"""The server's part of the command line: --serve, and what reads OpenAI's format."""
import os
from collections.abc import Callable
from typing import Any

from nanopaged.cli.main import given, option_name, renderer
from nanopaged.features.server.openai import Serving, make_reader
from nanopaged.features.server.tools import FORMATS, THINKERS
from nanopaged.inputs import check_choice
from nanopaged.options import feature


def prepare(args: Any) -> Callable[[Any], int]:
    """Bind the server's address. The result serves an LLM until the server is stopped; its exit code."""
    check_parsers(args)
    if args.api_key == "":
        raise ValueError("--api-key is empty, and everybody knows that key; give another one, or leave the option out")
    app, host = feature("server.app", "--serve"), args.host or "127.0.0.1"
    listener = app.bind(host, 8000 if args.port is None else args.port)
    key, names = args.api_key or os.environ.get("NANOPAGED_API_KEY"), (args.allowed_hosts or "").split(",")
    return lambda llm: app.serve(reader_of(args, llm), host, listener, key, names)


def check_parsers(args: Any) -> None:
    for name, known in (("tool_call_parser", FORMATS), ("reasoning_parser", THINKERS)):
        if vars(args)[name] is not None:
            check_choice(option_name(name), vars(args)[name], tuple(known))


def reader_of(args: Any, llm: Any) -> Serving:
    """What reads requests to this LLM."""
    options = given(args, ("served_model_name", "chat_template", "tool_call_parser", "reasoning_parser"))
    return make_reader(llm, args.model, render=renderer(args, llm), **options)
