"""What the tests of linear_eval share."""

from __future__ import annotations

import pytest

from tests.helpers.data.digits import write_digits


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Class folders of handwritten digits, for one module; it may add a cache."""
    return write_digits(tmp_path_factory.mktemp("digits"))
