"""The numeric program's hashes (tests/fixtures/digests.json, scripts/digests.py): the reference and every instruction set still give them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from bw24 import abi

SCRIPT = Path(__file__).parent.parent / "scripts" / "digests.py"
ADVICE = "the numeric program changed: if that was meant, run `python scripts/digests.py --write` and add a record to docs/decisions/; differing:"


@pytest.fixture(scope="module")
def digests():
    spec = importlib.util.spec_from_file_location("digests", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("backend", ["ref", "portable", "avx2", "avxvnni", "avx512vnni"])
def test_digests(digests, backend):
    isa = None if backend == "ref" else backend
    if isa and not abi.lib().bw24_isa_supported(isa.encode()):
        pytest.skip(f"this processor has no {isa}")
    wrong = digests.differences(digests.all_digests("cpu" if isa else "ref", isa), digests.stored())
    assert not wrong, f"{ADVICE} {wrong[:20]}"


def test_every_op_and_type_has_a_digest(digests):
    names = digests.stored()
    for op in abi.ops():
        # KV_APPEND is inside of ATTEND's cases, PICK_ROWS ends every case, HIDDEN copies the caller's rows
        assert op in ("KV_APPEND", "PICK_ROWS", "HIDDEN") or any(n.split()[0] == op for n in names), op
    for kind, *_ in abi.types().values():
        assert f"LINEAR {kind} 17x512" in names and f"EMBED {kind} 256" in names, kind
