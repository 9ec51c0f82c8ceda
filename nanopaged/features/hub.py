"""Open weights by name: the package `huggingface_hub` downloads a model of the Hugging Face Hub into its cache.

The cache is the one that all of the Hub's tools share, and HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE have their
usual meaning. A snapshot that has config.json and all the weights is used without a request to the Hub. A branch
therefore keeps the commit of its download; to get a newer commit, pass that commit as the revision.
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from nanopaged.weights.checkpoint import WEIGHT_FILES, find_weights, refuse_other_formats

TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model")
SETTINGS = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
            "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja", "merges.txt", *TOKENIZERS)


def download(repo_id: str, revision: str | None = None, check: Callable[[Path], object] | None = None,
             without_weights: bool = False, token: str | None = None, cache: str | Path | None = None) -> Path:
    """The snapshot directory of the model `repo_id` ("org/name") at a branch, tag or commit; "main" if none is given.
    Missing files are downloaded: settings, the tokenizer, and unless `without_weights` one set of weights.

    check: called with the snapshot directory when only config.json is there; an error that it raises ends the download
    token, cache: the token, and the cache, in place of those that the environment names
    Raises ValueError for what no download can mend, and the OSError that `_explained` makes of an error of the Hub.
    """
    try:
        from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
    except ImportError:
        raise ValueError(f"model {repo_id!r} is no directory here, and a model by name needs the package "
                         "huggingface_hub: pip install huggingface_hub") from None
    revision, cache = revision or "main", cache and Path(cache).expanduser()
    config = try_to_load_from_cache(repo_id, "config.json", cache_dir=cache, revision=revision)
    if isinstance(config, str) and _is_complete(Path(config).parent, without_weights):
        return Path(config).parent
    explained = _explained(repo_id, revision)
    names = explained(HfApi(token=token).list_repo_files)(repo_id, revision=revision)
    weights = [name for name in WEIGHT_FILES if name in names and not without_weights][:1]
    if "config.json" not in names or not weights and not without_weights:
        refuse_other_formats(f"model {repo_id!r}", names)
        raise FileNotFoundError(f"model {repo_id!r} lacks config.json, or has none of {', '.join(WEIGHT_FILES)}; pass "
                                "a model in that layout")
    fetch = explained(partial(snapshot_download, repo_id, revision=revision, cache_dir=cache, token=token))
    snapshot = Path(fetch(allow_patterns=["config.json"]))
    if check is not None:
        check(snapshot)
    fetch(allow_patterns=[*SETTINGS, *weights])
    if weights and weights[0].endswith(".json"):
        fetch(allow_patterns=[*find_weights(snapshot)[1]])
    return snapshot


def _is_complete(snapshot: Path, without_weights: bool) -> bool:
    if without_weights:
        return any((snapshot / name).is_file() for name in TOKENIZERS)
    first, shards = find_weights(snapshot)
    return bool(first) and all((snapshot / name).is_file() for name in shards)


@contextmanager
def _explained(repo_id: str, revision: str) -> Iterator[None]:
    """Make one sentence of an error of huggingface_hub."""
    from huggingface_hub import constants, errors
    model, hub = f"model {repo_id!r} at revision {revision!r}", constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError:
        raise PermissionError(f"{model} is gated; accept its terms at {hub}/{repo_id} and set HF_TOKEN to a token of "
                              "that account") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise FileNotFoundError(f"{model} is neither a directory here nor at {hub}; check the name, as Qwen/"
                                "Qwen3-0.6B, or, for a private model, set HF_TOKEN to a token with access") from None
    except errors.OfflineModeIsEnabled:
        raise FileNotFoundError(f"{model} is missing from the cache, or incomplete there, and HF_HUB_OFFLINE forbids a "
                                "download; unset HF_HUB_OFFLINE, or pass a local directory") from None
    except Exception as error:  # the HTTP client's, which depends on the version of huggingface_hub, or the disk's
        reason = " ".join(str(error.__cause__ or error).split())[:200].rstrip(".")
        raise ConnectionError(f"{model} cannot be downloaded from {hub} ({reason}); check network, HF_TOKEN and the "
                              "room in the cache, and start again: complete files are kept") from None
