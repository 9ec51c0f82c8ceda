"""Checks of user input: options, numbers, choices, prompts and JSON files. Each error is one sentence that names the
given value and the expected one."""
import difflib
import json
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, Callable, Mapping, NamedTuple, TypedDict, dataclass_transform


class TextPrompt(TypedDict):
    """A prompt as vLLM's examples write it."""
    prompt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt of token ids. The optional text appears in the output as its prompt."""
    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str  # keeps its blocks from prompts with another salt, or with none


PromptType = str | list[int] | TextPrompt | TokensPrompt

MOST_GPUS = 64  # of one engine
MOST_SEQS = 2**20  # of a step; each has a row in tensors on the device
MOST_TOKENS = 2**31 - 1  # of a step, a text or a block, and blocks of a pool: the device has int32
# Options of vLLM's LLM that are accepted without effect: with any value, or with a value that asks for nothing.
VLLM_OPTIONS = (
    "trust_remote_code", "disable_log_stats", "disable_custom_all_reduce", "compilation_config", "served_model_name",
    "async_scheduling", "distributed_executor_backend", "max_seq_len_to_capture")
VLLM_NEUTRAL: dict[str, tuple[Any, ...]] = dict(
    pipeline_parallel_size=(1,), enable_lora=(False, None), cpu_offload_gb=(0,),
    tokenizer_mode=("auto",), runner=("auto", "generate"), task=("auto", "generate"), kv_transfer_config=(None,),
    limit_mm_per_prompt=({}, None), mm_processor_kwargs=({}, None), logprobs_mode=("raw_logprobs",),
    enable_chunked_prefill=(True, None))


Kind = type | tuple[type, ...]


def always(value: Any) -> bool:
    """The range of a value that only has to be of its type."""
    return True


def between(kind: type, low: float, high: float) -> tuple[type, Callable[[Any], bool], str]:
    """`check_number`'s arguments for a number of this range."""
    noun = "a number" if kind is Real else "an integer"
    return kind, lambda x: low <= x <= high, f"{noun} from {low} to {high}"


class Option(NamedTuple):
    """An option of LLM and of the command line. Without `expected`, whoever uses the value checks it."""
    default: Any  # None may be given only where it is the default
    kind: type  # that the command line reads
    in_range: Callable[[Any], object] = always
    expected: str = ""  # in the sentence that refuses a value


def _choice(*choices: str) -> Option:
    return Option(choices[0], str, lambda x: x in choices, " or ".join(map(repr, choices)))


def _may_be_path(path: str | Path) -> bool:
    """Whether a file system can have this path."""
    return ("\0" not in str(path) and len(str(path)) < 2048
            and all(len(part.encode(errors="replace")) < 256 for part in Path(path).parts))


FLAG = Option(False, bool, always, "True or False")
COUNT = Option(None, *between(int, 1, MOST_TOKENS))
ACCEPTED: dict[type, Kind] = {float: (int, float), str: (str, Path)}  # by LLM
# LLM's docstring says what they are for, and the signature of LLM.__init__ repeats the defaults.
OPTIONS = dict(
    model=Option("shakespeare", str, always, "a directory or a name on the Hub"),
    revision=Option(None, str),
    tokenizer=Option(None, str, always, "a directory or a name on the Hub"),
    tokenizer_revision=Option(None, str),
    skip_tokenizer_init=FLAG,
    hf_token=Option(None, str, lambda x: isinstance(x, str) and x.isascii() and x.isprintable(),
                    "a token of the Hugging Face Hub, or None for the stored one"),
    download_dir=Option(None, str, _may_be_path, "a directory that can be made"),
    hf_overrides=Option(None, dict, always, "a dict of entries of config.json"),
    generation_config=_choice("auto", "vllm"),
    override_generation_config=Option(None, dict, always, "a dict of entries of generation_config.json"),
    warm_up=FLAG,
    max_logprobs=Option(20, int, lambda x: x >= -1, "an integer of at least 0, or -1 for any number"),
    load_format=_choice("auto", "dummy"),
    dtype=Option("auto", str),
    device=Option("auto", str),
    attention=Option("auto", str),
    kv_cache_dtype=_choice("auto", "fp8", "fp8_e4m3"),
    quantization=Option(None, str, lambda x: x == "fp8", "'fp8', or None for weights as they are stored"),
    block_size=COUNT,
    num_blocks=COUNT,
    num_gpu_blocks_override=COUNT,
    gpu_memory_utilization=Option(0.9, float, lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    swap_space=Option(0, float, lambda x: 0 <= x < 2**20, "a number of GiB, 0 for none"),
    enable_prefix_caching=FLAG._replace(default=True),
    disable_cascade_attn=FLAG._replace(default=None, expected="None, True or False"),
    max_model_len=COUNT,
    max_num_seqs=Option(256, *between(int, 1, MOST_SEQS)),
    max_num_batched_tokens=Option(8192, *between(int, 1, MOST_TOKENS)),
    scheduling_policy=_choice("fcfs", "priority"),
    data_parallel_size=Option(1, *between(int, 1, MOST_GPUS)),
    tensor_parallel_size=Option(1, *between(int, 1, MOST_GPUS)),
    speculative_config=Option(None, dict),
    enforce_eager=FLAG,
    seed=Option(0, int, lambda x: -2**63 <= x < 2**63, "an integer of at most 64 bits"))


def check_options(options: Mapping[str, Any], vllm_options: Mapping[str, Any]) -> None:
    """Raise ValueError for an unusable value, an unknown option, and one of vLLM that asks for a missing feature.
    options: those of OPTIONS, and maybe other names"""
    others = [name for name, value in vllm_options.items() if not is_one_of(value, VLLM_NEUTRAL.get(name, ()))]
    refuse_unknown("LLM has no option", others, [*OPTIONS, *VLLM_OPTIONS], "help(nanopaged.LLM) lists its options")
    for name, option in OPTIONS.items():
        if option.expected and (options[name] is not None or option.default is not None):
            check_number(name, options[name], ACCEPTED.get(option.kind, option.kind), option.in_range, option.expected)
    if options["num_blocks"] is not None and options["num_gpu_blocks_override"] is not None:
        raise ValueError("num_blocks and num_gpu_blocks_override are two names of one option; give one of them")
    data_parallel, tensor_parallel = options["data_parallel_size"], options["tensor_parallel_size"]
    if data_parallel > 1 < tensor_parallel:
        raise ValueError(f"data_parallel_size {data_parallel} and tensor_parallel_size {tensor_parallel} do not go "
                         "together; use one of them")


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
