"""What is decided before the first step: device, types and kernels."""
import sys
import warnings

import torch

from nanopaged import kernel, model, tiles
from nanopaged.features.cascade import Cascade
from nanopaged.features.fp8 import FP8
from nanopaged.features.tensor_parallel.split import split_config
from nanopaged.inputs import check_choice, is_one_of
from nanopaged.optional_triton import triton
from nanopaged.weights.build import modules_for

ALIGNMENT = 16  # of the sizes of 8-bit products, in numbers


def pick_device(device: str) -> torch.device:
    if is_one_of(device, ("auto",)):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        picked = torch.device(device)
    except (RuntimeError, TypeError):
        picked = torch.device("meta")
    if picked.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', not {device!r:.80}")
    if picked.type == "cuda":
        if not torch.cuda.is_available() or (picked.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device {device!r} is not there: torch sees {torch.cuda.device_count()} CUDA device(s)")
        picked = torch.device("cuda", picked.index if picked.index is not None else torch.cuda.current_device())
    return picked


def pick_devices(device: str, count: int, option: str = "data_parallel_size") -> list[torch.device]:
    """The device; with a count above 1 the first GPUs, or that many times the CPU. option: where the count is from."""
    first = pick_device(device)
    if count == 1 or first.type == "cpu":
        return [first] * count
    if str(device) not in ("auto", "cuda"):
        raise ValueError(f"{option} {count} takes the first {count} GPUs, so device must be 'auto' or "
                         f"'cuda', not {device!r}; CUDA_VISIBLE_DEVICES chooses others")
    if count > torch.cuda.device_count():
        raise ValueError(f"{option} is {count}, and torch sees {torch.cuda.device_count()} CUDA device(s)")
    return [torch.device("cuda", index) for index in range(count)]


def pick_dtype(dtype: str, checkpoint_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    names = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    dtype = str(dtype).removeprefix("torch.")
    dtype = {"half": "float16", "float": "float32"}.get(dtype, dtype)
    if dtype != "auto" and dtype not in names:
        raise ValueError(f"dtype must be 'auto', {', '.join(map(repr, names))}, not {dtype!r:.80}")
    if dtype != "auto":
        return names[dtype]
    if device.type == "cpu":
        return torch.float32
    if checkpoint_dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16  # cards before Ampere
    return checkpoint_dtype


def pick_kv_dtype(kv_cache_dtype: str, dtype: torch.dtype, device: torch.device,
                  kernels: kernel.Kernels) -> torch.dtype:
    """The type of the cache's numbers: that of the model, or fp8."""
    if device.type == "cpu" and kernels is kernel.TRITON and (dtype is torch.bfloat16 or kv_cache_dtype != "auto"):
        raise ValueError("on a CPU the Triton kernel runs in Triton's interpreter, which computes bfloat16 and fp8 "
                         "wrongly; use attention='torch', or dtype 'float32' and kv_cache_dtype 'auto'")
    if kv_cache_dtype == "auto":
        return dtype
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError("kv_cache_dtype 'fp8' needs a GPU of compute capability 8.9 or more (an RTX 4090, L4 or "
                         "H100); use 'auto'")
    return FP8


def pick_fp8(quantization: str | None, dtype: str, config: model.ModelConfig, devices: list[torch.device],
             num_ranks: int) -> bool:
    """Whether matrices are kept in FP8, with a scale for each channel, and not in the engine's type, which a warning
    or a line on stderr explains. ValueError: the GPUs of one model cannot share matrices in FP8."""
    if not (quantization or config.fp8):
        return False
    if config.fp8 == "block" and not quantization:
        kind, size = pick_dtype(dtype, config.torch_dtype, devices[0]), matrices_size(config) / 2**30
        print(f"weights in FP8 blocks of 128 x 128 are converted to {str(kind).removeprefix('torch.')}: "
              f"{size * kind.itemsize:.1f} GiB instead of {size:.1f} (quantization='fp8' cuts them to 8 bits again, "
              "with a scale for each channel)", file=sys.stderr)
        return False
    c, is_able = split_config(config, num_ranks) if num_ranks > 1 else config, all(map(has_fp8_products, devices))
    sizes = c.intermediate_size, c.experts.get("size", 0), c.experts.get("shared_size", 0)
    wrong = [size for size in (c.hidden_size, c.num_heads * c.head_dim, *sizes) if size % ALIGNMENT]
    if is_able and not (wrong or c.head_dim * 2 % ALIGNMENT or c.transposed):
        return True
    if is_able and wrong and num_ranks > 1:
        raise ValueError(f"tensor_parallel_size {num_ranks} cuts matrices in FP8 into parts of {wrong[0]} columns, and "
                         f"parts must be multiples of {ALIGNMENT}; use data_parallel_size, or one GPU")
    warnings.warn(("FP8 weights are turned into the engine's type while they load, which takes 2 or 4 times the memory"
                   if config.fp8 else "quantization 'fp8' has no effect, and weights keep the engine's type") + (
        ": the model has matrices that 8-bit products cannot have" if is_able else
        ": products of 8 bits need Triton and a GPU of Nvidia of compute capability 8.9 or more"))
    return False


def has_fp8_products(device: torch.device) -> bool:
    """From Ada on. AMD's device type is "cuda", too, but torch.version.cuda is None there."""
    return (device.type == "cuda" and bool(torch.version.cuda) and triton is not None
            and torch.cuda.get_device_capability(device) >= (8, 9))


def matrices_size(config: model.ModelConfig) -> int:
    """How many numbers the layers' matrices have."""
    with torch.device("meta"):
        layers = model.Transformer(config, modules_for(config)).layers
    return sum(parameter.numel() for parameter in layers.parameters() if parameter.dim() == 2)


def pick_cascade(config: model.ModelConfig, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype,
                 kernels: kernel.Kernels, device: torch.device, disable: bool | None) -> Cascade | None:
    """Finds the blocks that decode reads once for several sequences. disable: None: where a text would get other bits;
    False: also there, if its tiles fit. None is returned, too, if attention is torch's or all layers have a window."""
    group = config.num_heads // config.num_kv_heads
    tile_n = tiles.decode_config(1, 2, group, config.head_dim, dtype, kv_dtype, device)["TILE_N"]
    fits = config.head_dim <= 128 and tiles.shared_memory(device) > tiles.LARGE_SHARED_MEMORY
    is_wanted = not disable and (disable is False and fits or tiles.has_same_bits(tile_n, dtype, kv_dtype, device))
    is_able = (kernels is kernel.TRITON and 2 * group <= tiles.MAX_PREFIX_COLUMNS
               and not widest_window(config.sliding_windows))
    return Cascade(block_size, tile_n, group) if is_able and is_wanted else None


def pick_kernels(attention: str, device: torch.device) -> kernel.Kernels:
    check_choice("attention", attention, ("auto", "triton", "torch"))
    if attention == "torch" or attention == "auto" and (device.type != "cuda" or triton is None):
        return kernel.TORCH
    kernel.require_triton(device)
    return kernel.TRITON


def widest_window(windows: list[int]) -> int:
    """The tokens that one token attends to, itself included, at most. windows: of each layer. 0: some has no window."""
    return max(windows) if windows and all(windows) else 0
