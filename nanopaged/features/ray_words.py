"""NAME=VALUE words, the options of the commands that Ray runs (ray_data.py, ray_serve.py)."""
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from nanopaged.inputs import refuse_unknown
from nanopaged.options import OPTIONS


def read_words(words: Mapping[str, Any], others: Collection[str], texts: Collection[str] = ()) -> dict[str, Any]:
    """Options of LLM, and others, from the NAME=VALUE words of a command that has no flags. ValueError for an unknown
    name. Values are JSON, but for options that are texts and the others named in `texts`."""
    refuse_unknown("there is no option", words, [*OPTIONS, *others, *texts], "help(nanopaged.LLM) lists those of LLM")
    options = dict(words)
    for name, value in words.items():
        if isinstance(value, str) and name not in texts and (name in others or OPTIONS[name].kind is not str):
            with suppress(ValueError):  # whoever uses the value refuses it
                options[name] = json.loads(value)
    return options
