"""For all tests: see helpers.py for what they import."""
import pytest

pytest.register_assert_rewrite("nanopaged.tests.helpers")
