"""What users hand in, checked: numbers, choices, prompts, JSON files. Every complaint is one sentence, and names what was given."""
import json
from numbers import Integral
from pathlib import Path
from typing import Callable, TypedDict


class TextPrompt(TypedDict):
    """A prompt as vLLM's examples write it."""
    prompt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt of token ids, and the text that they came from, if somebody wants to see it in the output."""
    prompt_token_ids: list[int]
    prompt: str


# Options of vLLM's LLM that mean nothing here, with the values that ask for nothing; None: any value.
VLLM_OPTIONS = dict(
    tensor_parallel_size=(1,), pipeline_parallel_size=(1,), data_parallel_size=(1,), quantization=(None,), enable_lora=(False, None),
    speculative_config=(None,), cpu_offload_gb=(0,), tokenizer_mode=("auto",), tokenizer_revision=(None,), runner=("auto", "generate"),
    task=("auto", "generate"), hf_overrides=(None, {}), enable_chunked_prefill=(True, None), trust_remote_code=None,
    disable_log_stats=None, disable_custom_all_reduce=None, max_logprobs=None, download_dir=(None,), compilation_config=None,
    served_model_name=None, async_scheduling=None, distributed_executor_backend=None, max_seq_len_to_capture=None)


def check_options(vllm_options: dict, *, model, tokenizer, max_num_seqs, max_num_batched_tokens, block_size, max_model_len,
                  num_blocks, num_gpu_blocks_override, load_format, generation_config, kv_cache_dtype, scheduling_policy,
                  gpu_memory_utilization, swap_space, seed, enable_prefix_caching, enforce_eager, skip_tokenizer_init) -> None:
    """ValueError for what LLM cannot be given."""
    check_vllm_options(vllm_options)
    check_kind("model", model, (str, Path), "a directory or a name on the Hub")
    if tokenizer is not None:
        check_kind("tokenizer", tokenizer, (str, Path), "a directory or a name on the Hub")
    if None not in (num_blocks, num_gpu_blocks_override):
        raise ValueError("num_blocks and num_gpu_blocks_override are one thing; give one of them")
    sizes = dict(block_size=block_size, max_model_len=max_model_len, num_blocks=num_blocks,
                 num_gpu_blocks_override=num_gpu_blocks_override)  # None: what fits
    sizes = {name: size for name, size in sizes.items() if size is not None}
    sizes |= dict(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    for name, size in sizes.items():
        check_number(name, size, int, lambda x: x >= 1, "an integer of at least 1")
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


def check_vllm_options(options: dict) -> None:
    """ValueError for what neither nanopaged nor vLLM knows, and for what vLLM does and nanopaged does not."""
    for name, value in options.items():
        if name not in VLLM_OPTIONS:
            raise ValueError(f"LLM has no option {name!r}; help(nanopaged.LLM) lists those that it has")
        harmless = VLLM_OPTIONS[name]
        if harmless is not None and value not in harmless:
            raise ValueError(f"nanopaged cannot do {name}={value!r}, which vLLM may; leave it out")


def check_kind(name: str, value, kind, expected: str) -> None:
    """ValueError unless value is of that kind, a type or several. True is no number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} must be {expected}, not {value!r:.80}")


def check_number(name: str, value, kind, in_range: Callable, expected: str) -> None:
    """The same, and in range. NaN fails every comparison, so it fails here too."""
    check_kind(name, value, kind, expected)
    if not in_range(value):
        raise ValueError(f"{name} must be {expected}, not {value!r:.80}")


def check_choice(name: str, value, choices: tuple) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, not {value!r:.80}")


def as_python(value):
    """An array of numpy or torch as a list, a number of theirs as Python's own; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def as_list(prompts) -> list:
    """One prompt, or several? A list of integers is one prompt of token ids."""
    prompts = as_python(prompts)
    is_list = isinstance(prompts, (list, tuple))
    if isinstance(prompts, (str, dict)) or is_list and prompts and isinstance(prompts[0], Integral):
        return [prompts]
    if not is_list:
        raise ValueError(f"prompts are a string, a list of token ids, a dict, or a list of these, not {prompts!r:.80}")
    return list(prompts)


def read_prompt(prompt, get_tokenizer: Callable, vocab_size: int, max_model_len: int) -> tuple[str | None, list[int]]:
    """A prompt as (text or None, token ids). ValueError if it can never run: empty, too long, or with ids that the model
    does not have."""
    if isinstance(prompt, dict):
        keys = {"prompt", "prompt_token_ids"}
        if not prompt.keys() & keys:
            raise ValueError(f"a prompt given as a dict has the key 'prompt' or 'prompt_token_ids', not {list(prompt)}")
        if unknown := [key for key in prompt if key not in keys and prompt[key] is not None]:
            raise ValueError(f"a prompt given as a dict has the keys 'prompt' and 'prompt_token_ids'; leave {unknown[0]!r} out")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise ValueError(f"the key 'prompt' holds a string, not {text!r:.80}")
        if isinstance(token_ids, str):
            raise ValueError(f"the key 'prompt_token_ids' holds a list of token ids, not {token_ids!r:.80}")
        prompt = text if token_ids is None else token_ids
    else:
        text = prompt if isinstance(prompt, str) else None
    prompt = as_python(prompt)
    if isinstance(prompt, str):
        token_ids = get_tokenizer().encode(text)
    elif isinstance(prompt, (list, tuple)) and _are_integers(set(map(type, prompt))):
        token_ids = list(map(int, prompt))  # numpy's integers become Python's
    else:
        raise ValueError(f"a prompt is a string or a list of token ids, not {prompt!r:.80}")
    if not token_ids:
        raise ValueError("the prompt is empty; give at least one token")
    if len(token_ids) >= max_model_len:
        raise ValueError(f"the prompt has {len(token_ids)} tokens, and with at least one new token that is more than "
                         f"max_model_len {max_model_len}; shorten it")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise ValueError(f"the prompt has token id {wrong}; the model's ids are 0 to {vocab_size - 1}")
    return text, token_ids


def _are_integers(kinds: set[type]) -> bool:
    return all(issubclass(kind, Integral) and kind is not bool for kind in kinds)


def read_json(file: Path) -> dict:
    """The JSON object in a file of a checkpoint. FileNotFoundError, or ValueError in one sentence."""
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
    """Cloning from the Hub without git-lfs leaves a few lines of text where the weights should be."""
    with file.open("rb") as f:
        if f.read(23) == b"version https://git-lfs":
            raise ValueError(f"{file} is a git-lfs pointer, not the file; run `git lfs pull` in the clone")
