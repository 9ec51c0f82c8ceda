"""Checks of user input: numbers, choices, prompts and JSON files. Each error is one sentence that names the
given value and the expected one."""
import difflib
import json
import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import IO, Any, Callable, TypedDict, dataclass_transform


class TextPrompt(TypedDict):
    """A prompt as vLLM's examples write it."""
    prompt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt of token ids. The optional text appears in the output as its prompt."""
    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str  # keeps its blocks from prompts with another salt, or with none


PromptType = str | list[int] | TextPrompt | TokensPrompt

MOST_TOKENS = 2**31 - 1  # of a step, a text or a block, and blocks of a pool: the device has int32
Kind = type | tuple[type, ...]


def always(value: Any) -> bool:
    """The range of a value that only has to be of its type."""
    return True


def between(kind: type, low: float, high: float) -> tuple[type, Callable[[Any], bool], str]:
    """`check_number`'s arguments for a number of this range."""
    noun = "a number" if kind is Real else "an integer"
    return kind, lambda x: low <= x <= high, f"{noun} from {low} to {high}"


def refuse_unknown(what: str, names: Iterable[Any], known: Collection[str], otherwise: str = "") -> None:
    """Raise ValueError for the first name that is not among the known ones.

    what: "LLM has no option", the beginning of the sentence, which goes on with the nearest known name
    otherwise: its end where no name is near; without it, all known names
    """
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            advice = f"did you mean {near[0]!r}?" if near else otherwise or f"there are {', '.join(known)}"
            raise ValueError(f"{what} {shown(name)}; {advice}")


def shown(value: Any) -> str:
    """The beginning of a value, for a sentence that refuses it."""
    try:
        return f"{value!r:.80}"
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


def check_kind(name: str, value: Any, kind: Kind, expected: str) -> None:
    """`check_number` of a value that only has to be of its type."""
    check_number(name, value, kind, always, expected)


def check_number(name: str, value: Any, kind: Kind, in_range: Callable[[Any], object], expected: str) -> Any:
    """Raise ValueError unless the value is of this type, or of one of these types, and None or in range. A bool is not
    a number, and NaN fails every comparison. Returns the value, a number as one of Python's: numpy's numbers overflow
    in comparisons and sums, where uint8(200) + 57 is 1."""
    is_bool = isinstance(value, bool)
    is_right = isinstance(value, kind) and not (is_bool and isinstance(1, kind))
    if is_right and isinstance(value, Real) and not is_bool:
        with suppress(OverflowError):  # a huge fraction, which is outside of every range
            value = int(value) if isinstance(value, Integral) else float(value)
    if not is_right or value is not None and not in_range(value):
        raise ValueError(f"{name} must be {expected}, not {shown(value)}")
    return value


def wants_bar(use_tqdm: Any) -> bool:
    """Whether a progress bar is drawn: only on a terminal or in a notebook's cell."""
    try:
        is_wanted = bool(use_tqdm)
    except (RuntimeError, ValueError):  # an array
        raise ValueError(f"use_tqdm must be True or False, not {use_tqdm!r:.80}") from None
    return is_wanted and sys.stderr is not None and (
        sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel"))


def checked(default: Any, *check: Any) -> Any:
    """A dataclass's field that `check_fields` checks. check: what check_number takes: type, range (None is in it), the
    words for both"""
    return field(default=default, metadata={"check": check})


@dataclass_transform(field_specifiers=(checked,))
def settings(cls: type) -> Any:
    """A dataclass that refuses unknown names as LLM does."""
    init = (made := dataclass(cls)).__init__

    @wraps(init)
    def refuse_or_init(self: Any, *args: Any, **given: Any) -> None:
        refuse_unknown(f"{cls.__name__} has no setting", given, made.__dataclass_fields__,
                       f"help(nanopaged.{cls.__name__}) lists its settings")
        init(self, *args, **given)

    made.__init__ = refuse_or_init
    return made


def check_fields(settings: Any) -> None:
    """`check_number` of a dataclass's fields, whose numbers become Python's own. None is accepted as a default only."""
    for each in fields(settings):
        value, check = getattr(settings, each.name), each.metadata.get("check")
        if check and (value is not None or each.default is not None):
            setattr(settings, each.name, check_number(each.name, value, *check))


def is_one_of(value: Any, choices: tuple[Any, ...]) -> bool:
    """Whether the value is among the choices. (An array compares itself element by element.)"""
    return isinstance(value, (str, int, float, dict, NoneType)) and value in choices


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if not is_one_of(value, choices):
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, not {value!r:.80}")


def as_python(value: Any) -> Any:
    """An array of numpy or torch as a list, their number as Python's number; any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def as_list(prompts: Any) -> list[Any]:
    """The prompts as a list. A list of integers is a single prompt of token ids."""
    prompts = as_python(prompts)
    is_list = isinstance(prompts, (list, tuple))
    if isinstance(prompts, (str, dict)) or is_list and prompts and isinstance(prompts[0], Integral):
        return [prompts]
    if not is_list:
        raise ValueError(f"prompts are a string, a list of token ids, a dict, or a list of these, not {prompts!r:.80}")
    return list(prompts)


def read_prompt(prompt: Any, get_tokenizer: Callable[[], Any], vocab_size: int,
                max_model_len: int) -> tuple[str | None, list[int]]:
    """A prompt as (text or None, token ids). ValueError if it can never run."""
    if not isinstance(prompt, dict):
        prompt = as_python(prompt)
        prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    keys = [key for key, value in prompt.items() if value is not None]
    refuse_unknown("a prompt given as a dict has no key", keys, TokensPrompt.__annotations__)
    text, token_ids = prompt.get("prompt"), as_python(prompt.get("prompt_token_ids"))
    check_kind("the key 'prompt'", text, (str, NoneType), "a string")
    if token_ids is None and text is not None:
        token_ids = get_tokenizer().encode(text)
    elif isinstance(token_ids, (list, tuple)) and all(
            issubclass(kind, Integral) and kind is not bool for kind in set(map(type, token_ids))):
        token_ids = list(map(int, token_ids))  # numpy's integers become Python's
    else:
        raise ValueError(f"a prompt is a string or a list of token ids, not {shown(token_ids)}")
    if not token_ids:
        raise ValueError("the prompt is empty; give at least one token")
    if len(token_ids) >= max_model_len:
        raise ValueError(f"This model's maximum context length is {max_model_len} tokens, and the prompt has "
                         f"{len(token_ids)} tokens: with at least one new token that is more than max_model_len "
                         f"{max_model_len}; shorten the prompt")
    if wrong := [token for token in token_ids if not 0 <= token < vocab_size]:
        raise ValueError(f"the prompt has token id {wrong[0]}; the model's ids are 0 to {vocab_size - 1}")
    return text, token_ids


def read_cache_salt(prompt: Any) -> str | None:
    """The cache_salt of a prompt given as a dict: only prompts with the same one share blocks of the prefix cache."""
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    return check_number("cache_salt", salt, (str, NoneType), bool, "a string that is not empty")


def open_file(option: str, path: str, mode: str) -> IO:
    """The open file. ValueError in one sentence, which names the command line's option, if that fails."""
    try:
        return open(path, mode)
    except OSError as error:
        raise ValueError(f"{option} {path!r} cannot be opened: {error.strerror or error}") from None


def read_json(file: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object in a checkpoint's file, or the default, if one is given, where the file does not exist."""
    if default is not None and not file.exists():
        return default
    if not file.is_file():
        raise FileNotFoundError(f"no {file.name} in {file.parent}")
    refuse_git_lfs_pointer(file)
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, found a {type(value).__name__}; fetch it again")
    return value


def refuse_git_lfs_pointer(file: Path) -> None:
    """Raise ValueError if the file is a git-lfs pointer: a clone made without git-lfs has these in place of weights."""
    try:
        with file.open("rb") as f:
            begin = f.read(23)
    except OSError as error:
        raise type(error)(f"{file} cannot be read ({error.strerror}); pass a checkpoint with files that can") from None
    if begin == b"version https://git-lfs":
        raise ValueError(f"{file} is a git-lfs pointer, not the file; run `git lfs pull` in the clone")
