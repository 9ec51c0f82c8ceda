"""Checks of user input: options, numbers, choices, prompts and JSON files. Each error is one sentence that names the
given value and the expected one."""
import difflib
import json
from numbers import Integral
from pathlib import Path
from types import NoneType
from typing import Any, Callable, Iterable, TypedDict


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
# Options of vLLM's LLM that have no effect here, with the values that are accepted. None: any value is accepted.
VLLM_OPTIONS: dict[str, tuple[Any, ...] | None] = dict(
    pipeline_parallel_size=(1,), quantization=(None,),
    enable_lora=(False, None), cpu_offload_gb=(0,), tokenizer_mode=("auto",),
    runner=("auto", "generate"), task=("auto", "generate"), kv_transfer_config=(None,),
    limit_mm_per_prompt=({}, None), mm_processor_kwargs=({}, None), logprobs_mode=("raw_logprobs",),
    enable_chunked_prefill=(True, None), trust_remote_code=None, disable_log_stats=None, disable_custom_all_reduce=None,
    max_logprobs=None, compilation_config=None, served_model_name=None, async_scheduling=None,
    distributed_executor_backend=None, max_seq_len_to_capture=None)


def check_options(vllm_options: dict[str, Any], known: Iterable[str], *, model: Any, tokenizer: Any, max_num_seqs: Any,
                  max_num_batched_tokens: Any, block_size: Any, max_model_len: Any, num_blocks: Any,
                  num_gpu_blocks_override: Any, load_format: Any, generation_config: Any, kv_cache_dtype: Any,
                  scheduling_policy: Any, gpu_memory_utilization: Any, swap_space: Any, seed: Any,
                  enable_prefix_caching: Any, enforce_eager: Any, skip_tokenizer_init: Any,
                  data_parallel_size: Any, tensor_parallel_size: Any, hf_overrides: Any, hf_token: Any,
                  download_dir: Any, override_generation_config: Any) -> None:
    """Raise ValueError for an option of LLM with an unusable value. known: the names of LLM's own options"""
    check_vllm_options(vllm_options, known)
    check_kind("model", model, (str, Path), "a directory or a name on the Hub")
    check_kind("tokenizer", tokenizer, (str, Path, NoneType), "a directory or a name on the Hub")
    check_kind("hf_overrides", hf_overrides, (dict, NoneType), "a dict of entries of config.json")
    check_kind("override_generation_config", override_generation_config, (dict, NoneType),
               "a dict of entries of generation_config.json")
    check_number("hf_token", hf_token, (str, NoneType), lambda x: x is None or x.isascii() and x.isprintable(),
                 "a token of the Hugging Face Hub, or None for the stored one")
    check_number("download_dir", download_dir, (str, Path, NoneType), lambda x: x is None or _may_be_path(x),
                 "a directory that can be made")
    if num_blocks is not None and num_gpu_blocks_override is not None:
        raise ValueError("num_blocks and num_gpu_blocks_override are two names of one option; give one of them")
    sizes = dict(block_size=block_size, max_model_len=max_model_len, num_blocks=num_blocks,
                 num_gpu_blocks_override=num_gpu_blocks_override)  # None: LLM chooses the size
    sizes = {name: (size, MOST_TOKENS) for name, size in sizes.items() if size is not None}
    sizes |= dict(max_num_seqs=(max_num_seqs, MOST_SEQS), max_num_batched_tokens=(max_num_batched_tokens, MOST_TOKENS),
                  data_parallel_size=(data_parallel_size, MOST_GPUS),
                  tensor_parallel_size=(tensor_parallel_size, MOST_GPUS))
    for name, (size, most) in sizes.items():
        check_number(name, size, int, lambda x: 1 <= x <= most, f"an integer from 1 to {most}")
    if data_parallel_size > 1 < tensor_parallel_size:
        raise ValueError(f"data_parallel_size {data_parallel_size} and tensor_parallel_size {tensor_parallel_size} do "
                         "not go together; use one of them")
    check_choice("load_format", load_format, ("auto", "dummy"))
    check_choice("generation_config", generation_config, ("auto", "vllm"))
    check_choice("kv_cache_dtype", kv_cache_dtype, ("auto", "fp8", "fp8_e4m3"))
    check_choice("scheduling_policy", scheduling_policy, ("fcfs", "priority"))
    for name, value in (("enable_prefix_caching", enable_prefix_caching), ("enforce_eager", enforce_eager),
                        ("skip_tokenizer_init", skip_tokenizer_init)):
        check_kind(name, value, bool, "True or False")
    check_number("gpu_memory_utilization", gpu_memory_utilization, (int, float), lambda x: 0 < x <= 1,
                 "a number above 0 and at most 1")
    check_number("swap_space", swap_space, (int, float), lambda x: 0 <= x < 2**20, "a number of GiB, 0 for none")
    check_number("seed", seed, int, lambda x: -2**63 <= x < 2**63, "an integer of at most 64 bits")


def _may_be_path(path: str | Path) -> bool:
    """Whether a file system can have this path."""
    return ("\0" not in str(path) and len(str(path)) < 2048
            and all(len(part.encode(errors="replace")) < 256 for part in Path(path).parts))


def check_vllm_options(options: dict[str, Any], known: Iterable[str]) -> None:
    """Raise ValueError for an unknown option, and for an option of vLLM that nanopaged does not support."""
    for name, value in options.items():
        if name not in VLLM_OPTIONS:
            near = difflib.get_close_matches(name, [*known, *VLLM_OPTIONS], 1)
            advice = f"did you mean {near[0]!r}?" if near else "help(nanopaged.LLM) lists its options"
            raise ValueError(f"LLM has no option {name!r}; {advice}")
        accepted = VLLM_OPTIONS[name]
        if accepted is not None and not is_one_of(value, accepted):
            raise ValueError(f"nanopaged cannot do {name}={value!r:.80}, which vLLM may support; leave the option out")


Kind = type | tuple[type, ...]


def check_kind(name: str, value: Any, kind: Kind, expected: str) -> None:
    """Raise ValueError unless the value is of this type, or of one of these types. A bool is not a number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} must be {expected}, not {value!r:.80}")


def check_number(name: str, value: Any, kind: Kind, in_range: Callable[[Any], object], expected: str) -> None:
    """`check_kind`, and raise ValueError unless the value is in range. NaN fails every comparison and so this check."""
    check_kind(name, value, kind, expected)
    if not in_range(value):
        raise ValueError(f"{name} must be {expected}, not {value!r:.80}")


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
    """A prompt as (text or None, token ids).

    Raises ValueError for a prompt that can never run: an empty one, one that is too long, or one with ids outside of
    the vocabulary.
    """
    if isinstance(prompt, dict):
        keys = {"prompt", "prompt_token_ids"}
        if not prompt.keys() & keys:
            raise ValueError(f"a prompt given as a dict has the key 'prompt' or 'prompt_token_ids', not {list(prompt)}")
        if unknown := [key for key in prompt if key not in keys | {"cache_salt"} and prompt[key] is not None]:
            raise ValueError("a prompt given as a dict has the keys 'prompt', 'prompt_token_ids' and 'cache_salt'; "
                             f"leave {unknown[0]!r} out")
        text = prompt.get("prompt")
        token_ids = as_python(prompt.get("prompt_token_ids"))
        if text is not None and not isinstance(text, str):
            raise ValueError(f"the key 'prompt' holds a string, not {text!r:.80}")
        if isinstance(token_ids, str):
            raise ValueError(f"the key 'prompt_token_ids' holds a list of token ids, not {token_ids!r:.80}")
        prompt = text if token_ids is None else token_ids
    else:
        prompt = as_python(prompt)
        text = prompt if isinstance(prompt, str) else None
    if isinstance(prompt, str):
        token_ids = get_tokenizer().encode(text)
    elif isinstance(prompt, (list, tuple)) and _are_integers(set(map(type, prompt))):
        token_ids = list(map(int, prompt))  # numpy's integers become Python's
    else:
        raise ValueError(f"a prompt is a string or a list of token ids, not {prompt!r:.80}")
    if not token_ids:
        raise ValueError("the prompt is empty; give at least one token")
    if len(token_ids) >= max_model_len:
        raise ValueError(f"This model's maximum context length is {max_model_len} tokens, and the prompt has "
                         f"{len(token_ids)} tokens: with at least one new token that is more than max_model_len "
                         f"{max_model_len}; shorten the prompt")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise ValueError(f"the prompt has token id {wrong}; the model's ids are 0 to {vocab_size - 1}")
    return text, token_ids


def read_cache_salt(prompt: Any) -> str | None:
    """The cache_salt of a prompt given as a dict: only prompts with the same one share blocks of the prefix cache."""
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if salt is not None:
        check_number("cache_salt", salt, str, lambda x: x, "a string that is not empty")
    return salt


def _are_integers(kinds: set[type]) -> bool:
    return all(issubclass(kind, Integral) and kind is not bool for kind in kinds)


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's file. Raises FileNotFoundError or ValueError, in one sentence."""
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
    """Raise ValueError if the file is a git-lfs pointer: a clone made without git-lfs has these in place of weights.
    OSError if it cannot be read."""
    try:
        with file.open("rb") as f:
            begin = f.read(23)
    except OSError as error:
        raise type(error)(f"{file} cannot be read ({error.strerror}); pass a checkpoint with files that can") from None
    if begin == b"version https://git-lfs":
        raise ValueError(f"{file} is a git-lfs pointer, not the file; run `git lfs pull` in the clone")
