"""Open weights by name: the package `huggingface_hub` downloads a model of the Hugging Face Hub into its cache.

The cache is the one that all of the Hub's tools share, and HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE have their
usual meaning. A snapshot is complete if it has config.json, all the weights (every shard that an index names) and a
tokenizer. A complete snapshot is used without a request to the Hub. A branch therefore keeps the commit of its
download; to get a newer commit, pass that commit as the revision. A snapshot that lacks only the tokenizer is used if
the Hub cannot provide a tokenizer.
"""
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanopaged.weights.checkpoint import WEIGHT_FILES, find_weights, refuse_other_formats, stays_inside

SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
            "added_tokens.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
# The files of a tokenizer, in the order of preference: the first set that exists is downloaded.
TOKENIZERS: tuple[tuple[str, ...], ...] = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))


def download(repo_id: str, revision: str | None = None, check: Callable[[Path], object] | None = None,
             without_weights: bool = False, token: str | None = None, cache: str | Path | None = None) -> Path:
    """The snapshot directory of the model `repo_id` ("org/name") at a branch, tag or commit; "main" if none is given.
    Missing files are downloaded: settings, a tokenizer, one set of weights.

    check: a function of the snapshot directory, called after the download of config.json and before that of any larger
        file. An error that it raises ends the download.
    without_weights: download the settings and a tokenizer, if there is one
    token, cache: the token, and the cache, in place of those that the environment names

    Raises ValueError for what no download can mend, and the OSError that `_explained` makes of an error of the Hub.
    """
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        raise ValueError(f"model {repo_id!r} is no directory here, and a model by name needs the package "
                         "huggingface_hub: pip install huggingface_hub") from None
    revision = "main" if revision is None else revision
    if not isinstance(revision, str) or not stays_inside(revision):
        raise ValueError(f"revision {revision!r:.80} is malformed; expected the name of a branch or tag, or a commit")
    cache = None if cache is None else Path(cache).expanduser()
    config = try_to_load_from_cache(repo_id, "config.json", cache_dir=cache, revision=revision)
    cached = Path(config).parent if isinstance(config, str) else None
    if cached is None or not (without_weights or _has(cached, _weight_files(cached))):
        return _complete(repo_id, revision, check, without_weights, token, cache)
    if any(_has(cached, files) for files in TOKENIZERS):
        return cached
    try:  # it is the commit in the cache that is completed
        return _complete(repo_id, cached.name, check, without_weights, token, cache)
    except OSError as error:  # prompts of token ids need no tokenizer
        print(f"{repo_id}: going on without the tokenizer, which the cache lacks ({error})", file=sys.stderr)
        return cached


def _complete(repo_id: str, revision: str, check: Callable[[Path], object] | None, without_weights: bool,
              token: str | None, cache: Path | None) -> Path:
    """Download what the cache lacks: config.json, then the settings and a tokenizer, at last the weights."""
    from huggingface_hub import HfApi, snapshot_download

    @_explained(repo_id, revision)
    def fetch(patterns: list[str]) -> Path:
        return Path(snapshot_download(repo_id, revision=revision, cache_dir=cache, token=token,
                                      allow_patterns=patterns))

    with _explained(repo_id, revision):
        info = HfApi(token=token).model_info(repo_id, revision=revision)
    names = {file.rfilename for file in info.siblings or ()}
    first = next((name for name in WEIGHT_FILES if name in names), "")
    if "config.json" not in names or not first and not without_weights:
        refuse_other_formats(f"model {repo_id!r}", names)
        raise FileNotFoundError(f"model {repo_id!r} lacks config.json, or has none of {', '.join(WEIGHT_FILES)}; pass "
                                "a model in that layout")
    snapshot = fetch(["config.json"])
    if check is not None:
        check(snapshot)
    tokenizer = next((files for files in TOKENIZERS if names.issuperset(files)), ())
    index = [first] if first.endswith(".json") and not without_weights else []
    fetch([*SETTINGS, *tokenizer, *index])
    if not without_weights:
        files = _weight_files(snapshot) if index else [first]
        fetch(files)
        if missing := [name for name in files if not _has(snapshot, [name])]:
            raise FileNotFoundError(f"model {repo_id!r} lacks {missing[0]}, which its index names; pass a complete "
                                    "model")
    return snapshot


def _weight_files(directory: Path) -> list[str]:
    """The files that `read_tensors` reads in the directory: one file, or an index and its shards."""
    first, shards = find_weights(directory)
    return [first, *shards]


def _has(directory: Path, names: Iterable[str]) -> bool:
    return all((directory / name).is_file() for name in names)  # which "" is not


@contextmanager
def _explained(repo_id: str, revision: str) -> Iterator[None]:
    """Make one sentence of an error of huggingface_hub."""
    from huggingface_hub import constants, errors

    model, page = f"model {repo_id!r}", f"{constants.ENDPOINT}/{repo_id}"
    try:
        yield
    except errors.GatedRepoError:
        raise PermissionError(f"{model} is gated; accept its terms at {page} and set HF_TOKEN to a token of that "
                              "account") from None
    except errors.RevisionNotFoundError:
        raise FileNotFoundError(f"{model} has no revision {revision!r}; pass one that {page} lists") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        form = "" if "/" in repo_id else ", which has the form org/name, as Qwen/Qwen3-0.6B"
        raise FileNotFoundError(f"{model} is neither a directory here nor at {constants.ENDPOINT}; check the name{form}"
                                ", or, for a private model, set HF_TOKEN to a token with access") from None
    except errors.OfflineModeIsEnabled:
        raise FileNotFoundError(f"{model} at {revision!r} is missing from the cache {constants.HF_HUB_CACHE}, or "
                                "incomplete there, and HF_HUB_OFFLINE forbids a download; unset HF_HUB_OFFLINE, or "
                                "pass a local directory") from None
    except Exception as error:  # the HTTP client's, which depends on the version of huggingface_hub, or the disk's
        cause: Any = error.__cause__ or error
        reason = " ".join(str(cause).split())[:200].rstrip(".") or type(cause).__name__
        if isinstance(error, OSError) and error.filename is not None:
            raise OSError(f"cannot write to the cache {constants.HF_HUB_CACHE} ({error.strerror}); make room there, or "
                          "set HF_HUB_CACHE to another directory, and start again") from None
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status in (401, 403):
            raise PermissionError(f"{model} was refused ({reason}); check HF_TOKEN and the page {page}") from None
        raise ConnectionError(f"{model} cannot be downloaded from {constants.ENDPOINT} ({reason}); check network, "
                              "HF_ENDPOINT and proxy, and start again: complete files are kept") from None
