"""What the CUDA kernels take, from the compiler's reports beside the objects (`make cuda-objects BUILD=build/cuda`): no spill to local memory,
at most 99 KB of shared memory a block on sm_120a, a bounded number of kernels, machine code for every target that was asked for. Skips where nothing
was built."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_KERNELS = 150  # all that there are, and more there may not be
SHARED_LEAST = 99 * 1024
# LINEAR of few rows: registers are bounded so that two blocks fit a multiprocessor, which costs some kernels a few words; never more than these bytes
# (k_linear_small, k_linear_stream; k_chain, whose 24 warps leave 80 registers a thread).
# k_leave has an array of facts of one round on its stack and runs once a round.
MAY_SPILL = {"k_linear_small": 40, "k_linear_stream": 64, "7k_chainE": 8, "k_leave": 120}
SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")


@cache
def reports() -> dict[Path, str]:
    """Report of each CUDA source, from the build that has one for all of them: the one for sm_120a, else any."""
    sources = sorted((ROOT / "libbw24" / "cu").glob("*.cu"))
    found = []
    for folder in (ROOT / "build").glob("*/libbw24/cu"):
        texts = {folder / f"{s.name}.o": p.read_text() for s in sources if (p := folder / f"{s.name}.ptxas").is_file()}
        if len(texts) == len(sources) and all(o.is_file() for o in texts):
            found.append(texts)
    return max(found, key=lambda t: "sm_120a" in "".join(t.values()), default={})


def kernels() -> Iterator[tuple[str, str, str]]:
    """(target, kernel, the lines about it) of the reports."""
    for text in reports().values():
        parts = ENTRY.split(text)
        for i in range(1, len(parts), 3):
            yield parts[i + 1], parts[i], parts[i + 2]


@pytest.fixture(autouse=True)
def built():
    if not reports():
        pytest.skip("no CUDA objects: make cuda-objects CUDA=1 CUARCH='90a 120a' BUILD=build/cuda")


def test_no_kernel_spills_on_sm_120a():
    """Also no stack: an array that lands there is read from memory. sm_90a may spill the few bytes that its larger blocks cost."""
    seen, spilled = 0, []
    for target, name, text in kernels():
        if target != "sm_120a":
            continue
        seen += 1
        found = SPILL.search(text)
        allowed = next((n for part, n in MAY_SPILL.items() if part in name), 0)
        if found and any(int(n) > allowed for n in found.groups()):
            spilled.append(f"{name}: {found[0]}")
    if not seen:
        pytest.skip("the CUDA objects have no code for sm_120a")
    assert not spilled, "\n".join(spilled)


def test_shared_memory_fits_the_smallest_card():
    """Static memory by the report; what launches add is held to the same limit where it is asked for: SHARED_LEAST in the sources."""
    for target, name, text in kernels():
        if found := re.search(r"(\d+) bytes smem", text):
            assert int(found[1]) <= 48 * 1024, f"{name} for {target}"
    assert f"SHARED_LEAST = {SHARED_LEAST // 1024} * 1024" in (ROOT / "libbw24" / "cu" / "launch.h").read_text()
    for source in ("attend_kernels.cuh", "attend_fast.cu"):
        assert "sizeof(S) <= SHARED_LEAST" in (ROOT / "libbw24" / "cu" / source).read_text()


def test_number_of_kernels():
    by_target: dict[str, set[str]] = {}
    for target, name, _ in kernels():
        by_target.setdefault(target, set()).add(name)
    for target, names in by_target.items():
        assert 0 < len(names) <= MOST_KERNELS, f"{len(names)} kernels for {target}"


def images(data: bytes) -> Iterator[tuple[int, int]]:
    """(kind, architecture) of every image in the fat binaries of an object: a header (magic, version, size of itself, size of what follows), then
    images (kind: 1 PTX, 2 machine code; version; size of this header; size of the image; ...; architecture at byte 28)."""
    at = 0
    while (at := data.find(b"\x50\xed\x55\xba", at)) >= 0:
        header, length = struct.unpack_from("<HQ", data, at + 6)
        image, end = at + header, at + header + length
        at = end
        while image < end:
            kind, _, own, size = struct.unpack_from("<HHIQ", data, image)
            yield kind, struct.unpack_from("<I", data, image + 28)[0]
            image += own + size


def test_machine_code_for_every_target():
    for path, text in reports().items():
        asked = {int(re.sub(r"\D", "", target)) for _, target in ENTRY.findall(text)}
        if not asked:
            continue  # host code only
        found = [a for k, a in images(path.read_bytes()) if k == 2]
        assert set(found) == asked, f"{path.name}: machine code for {sorted(set(found))}, asked for {sorted(asked)}"
