"""For all tests: see helpers.py for what they import."""
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("nanopaged.tests.helpers")

# Tests that compile most on a GPU. First those whose turn comes early in the suite.
COMPILING = (
    "test_replayed_steps", "test_fused_functions_compute_what_the_plain_ones_do", "test_outputs_of_replayed_steps",
    "test_replayed_steps_over_an_fp8_cache", "test_replayed_steps_wait_for_the_masks",
    "test_attention_equals_float64", "test_attention_over_an_fp8_cache", "test_attention_does_not_depend_on_the_batch",
    "test_cache_strides_are_read", "test_logits_equal_transformers", "test_greedy_continuations_equal_transformers",
    "test_the_triton_path_equals_transformers", "test_half_precision_on_the_gpu",
    "test_outputs_do_not_depend_on_how_the_work_is_cut", "test_beam_search_equals_transformers",
    "test_swapping_changes_no_output", "test_settings_do_what_they_say", "test_settings_mean_the_same_in_any_batch",
    "test_a_request_draws_the_same_numbers_in_any_batch", "test_log_probabilities_equal_a_plain_log_softmax",
    "test_sample_j_equals_a_request_of_its_own_with_seed_s_plus_j")
IS_AHEAD = "NANOPAGED_TESTS_AHEAD"  # an environment variable of the processes that run them ahead


def pytest_collection_finish(session):
    """For the whole suite on a GPU, run these tests in several processes while the others run. What they compile is in
    the caches of Triton and of torch's compiler, on disk, when their turn comes. Nobody reads their results there."""
    def name(item):
        return getattr(item, "originalname", item.name)

    items = sorted((item for item in session.items if name(item) in COMPILING),
                   key=lambda item: COMPILING.index(name(item)))
    session.ahead = []
    if torch.cuda.is_available() and len(items) > 50 and IS_AHEAD not in os.environ \
            and not session.config.option.collectonly:
        # torch's compiler would choose another folder for kernels that are compiled after its own.
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
        count = min(8, os.cpu_count() or 1)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        for first in range(count):
            session.ahead.append(subprocess.Popen(
                [*command, *(item.nodeid for item in items[first::count])], cwd=session.config.rootpath,
                env=os.environ | {IS_AHEAD: "1"}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL))
        if name(session.items[0]) in COMPILING:  # no other tests come first
            with suppress(subprocess.TimeoutExpired):
                for process in session.ahead:
                    process.wait(timeout=120)


def pytest_sessionfinish(session):
    for process in getattr(session, "ahead", ()):
        process.kill()
        process.wait()
