"""Fixtures shared by all tests: in-tree fixtures, and the big golden sets where BW24_GOLDENS names them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Directory of the in-tree test data."""
    return FIXTURES


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Directory of the full golden sets (`make test-full`); tests that need it skip without BW24_GOLDENS."""
    where = os.environ.get("BW24_GOLDENS")
    if not where:
        pytest.skip("BW24_GOLDENS is not set")
    return Path(where)
