"""What a text must fit: the settings of structured outputs. grammar.py enforces them. (This file needs no torch.)"""
from dataclasses import fields
from numbers import Integral
from typing import Any

from nanopaged.inputs import always, check_fields, check_kind, checked, refuse_unknown, settings
from nanopaged.sampling_params import FLAG, are_texts


def end_tokens(before: Any, end: Any) -> list:
    """The tokens before an end, and its own, which may be one or a list."""
    return [*before, *(end if isinstance(end, (list, tuple)) and end else [end])]


@settings
class StructuredOutputsParams:
    """What a text must fit; exactly one is given. The names are vLLM's.

    json: a JSON schema, as a dict or as text. The text is compact JSON, its properties in the schema's order
    regex: a regular expression for the whole text (Rust's syntax, without look-around and back-references)
    choice: texts, one of which is generated
    grammar: a context-free grammar, in GBNF (with ::=) or Lark's syntax
    json_object: True: any JSON object
    disable_additional_properties: an object with `properties` has no others, as in xgrammar, unless the schema gives
        additionalProperties. False: it may have others, as JSON Schema says. A schema with allOf stays open: its parts
        are parts of one object
    reasoning_token_ids: the token that ends the reasoning in front of the text, or the one that begins it and the one
        that ends it. With one, the text begins within the reasoning. With two it may begin with the first, or fit at
        once. The end may be a list: tokens in a row, but the last of them may come later. (The server sets it with
        --reasoning-parser, and for gpt-oss.)
    """
    json: str | dict | None = checked(None, (str, dict), always, "a JSON schema, as a dict or as text")
    regex: str | None = checked(None, str, always, "a string")
    choice: list[str] | None = checked(None, (list, tuple), lambda x: x and are_texts(x),
                                       "a list of strings that are not empty")
    grammar: str | None = checked(None, str, always, "a string")
    json_object: bool | None = checked(None, bool, always, "True")
    disable_additional_properties: bool = checked(True, *FLAG)
    reasoning_token_ids: list | None = checked(None, (list, tuple), lambda x: len(x) in (1, 2) and all(
        isinstance(token, Integral) and token >= 0 for token in end_tokens(x[:-1], x[-1])),
        "a list of one or two token ids")

    def __post_init__(self) -> None:
        check_fields(self)
        *structures, _, _ = fields(self)
        given = [each.name for each in structures if getattr(self, each.name) not in (None, False)]
        if len(given) != 1:
            raise ValueError("structured outputs are one of json, regex, choice, grammar and json_object, not "
                             f"{', '.join(given) or 'none of them'}")


def read(given: Any) -> StructuredOutputsParams:
    """What SamplingParams are given as structured_outputs."""
    if isinstance(given, dict):
        refuse_unknown("structured_outputs has no field", given, StructuredOutputsParams.__dataclass_fields__)
        return StructuredOutputsParams(**given)
    check_kind("structured_outputs", given, StructuredOutputsParams, "StructuredOutputsParams, or a dict of its fields")
    return given
