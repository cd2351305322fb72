"""Fixtures shared by all tests: in-tree fixtures, and the big golden sets where BW24_GOLDENS names them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bw24 import abi
from bw24.models import resolve
from bw24.source import Model, open_model

FIXTURES = Path(__file__).parent / "fixtures"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--library", help="test this build of libbw24.so instead of the one beside the package")
    parser.addoption("--faults", action="store_true", help="test_faults.py: every seeded fault through the gates that must see it")
    parser.addoption("--faults-table", action="store_true", help="the same with every gate, for the table of research/faults.md")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--library")
    if path:
        handle = abi.lib(path)
        abi.lib = lambda path=None: handle


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Directory of the in-tree test data."""
    return FIXTURES


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """The demo model, open; a module with another one defines its own."""
    with open_model(resolve("demo").path) as opened:
        yield opened


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Directory of the full golden sets (`make test-full`); tests that need it skip without BW24_GOLDENS."""
    where = os.environ.get("BW24_GOLDENS")
    if not where:
        pytest.skip("BW24_GOLDENS is not set")
    return Path(where)


@pytest.fixture(scope="session")
def test_models() -> Path:
    """Directory of the real models' files; tests that need it skip without BW24_TEST_MODELS."""
    where = os.environ.get("BW24_TEST_MODELS")
    if not where:
        pytest.skip("BW24_TEST_MODELS is not set")
    return Path(where)
