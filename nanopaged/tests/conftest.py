"""For all tests: see helpers.py for what they import."""
import os

import pytest

pytest.register_assert_rewrite("nanopaged.tests.helpers")

# A user's shell may set these, and packages read most of them when they are imported.
for name in list(os.environ):
    if (name in ("COLUMNS", "TRITON_INTERPRET") or name.startswith(("HF_", "HUGGING"))
            or name.lower().endswith("_proxy")):
        del os.environ[name]
