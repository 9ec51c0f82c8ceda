"""For all tests of nanopaged/: see helpers.py for what they import."""
import pytest

pytest.register_assert_rewrite("nanopaged.tests.helpers")
