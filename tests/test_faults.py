"""Can the gates fail? Builds of the library that are wrong on purpose (libbw24/fault.h), each run through every gate: at least the gates named
below turn red. `pytest tests/test_faults.py --faults -s` (make test-faults) runs each through the gates that must see it, `--faults-table` through
every gate, and prints who catches what; without them a few run, each through one gate.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from bw24 import abi

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 400  # seconds of one gate; a fault that hangs counts as caught
BEST = next((i for i in ("avx512vnni", "avxvnni", "avx2") if abi.lib().bw24_isa_supported(i.encode()) == 1), "portable")

GATES = {
    "kernel-check": ("test_numerics.py", "-k", f"every_kernel and {BEST}"),
    "digests": ("test_digests.py", "-k", f"test_digests and {BEST}"),
    "equalities": ("test_equalities.py",),
    "goldens": ("test_goldens_tiny.py", "-k", "not full"),
    "sampler": ("test_sampling.py",),
    "distributions": ("test_distributions.py", "-k", "exact"),
    "control-word": ("test_fpenv.py",),
    "spill": ("test_spill.py", "-k", "any_budget and hy_v3"),
    "bw24-gate": ("test_gate.py", "-k", "tiny_model"),
    "speculation": ("test_speculation.py", "-k", "planned"),
    "perf-ci": ("test_perf_ci.py", "-k", "library"),
}


@dataclass(frozen=True)
class Fault:
    """What is wrong, and the gates that must see it."""

    what: str
    caught_by: tuple[str, ...]


FAULTS = {
    1: Fault("EMBED: the last value is not scaled", ("kernel-check", "digests")),
    2: Fault("NORM: eps is 0.1 % too small", ("kernel-check", "digests")),
    3: Fault("LINEAR: the last row of a step of more than 32 is left out", ("kernel-check", "equalities", "bw24-gate")),
    4: Fault("LINEAR: the tensor's scale is lost", ("kernel-check",)),
    5: Fault("GLU: the fused form takes the other activation", ("kernel-check", "equalities", "goldens")),
    6: Fault("ROPE: every position is one too high", ("kernel-check", "digests", "equalities")),
    7: Fault("KV_APPEND: odd positions overwrite the one before", ("kernel-check", "digests", "equalities", "goldens")),
    8: Fault("ATTEND: the window is one key short", ("kernel-check", "digests", "equalities", "goldens")),
    9: Fault("SOFTCAP: the cap is a millionth too high", ("kernel-check", "digests")),
    10: Fault("PICK_ROWS: wanted rows are taken for neighbours", ("kernel-check", "equalities")),
    11: Fault("ADD: the last value is left out", ("kernel-check", "digests", "equalities")),
    12: Fault("cache: a page shared by two sequences is written without a copy", ("equalities", "bw24-gate")),
    13: Fault("rollback: pages past the end are kept, though others share them", ("equalities",)),
    14: Fault("cut: a continued prompt starts one position late", ("equalities", "bw24-gate")),
    15: Fault("threads: later ranges lose their last item", ("kernel-check", "digests", "equalities", "bw24-gate")),
    16: Fault("sampler: two neighbouring positions share a draw", ("sampler", "digests")),
    17: Fault("environment: the caller's rounding and flush-to-zero stay in force", ("control-word",)),
    18: Fault("faults: Inf and NaN at quantisation go unreported", ("kernel-check", "equalities")),
    19: Fault("EXPERTS: two roundings where one fma is meant", ("kernel-check", "digests")),
    20: Fault("ROUTE: the selection bias is ignored", ("kernel-check", "digests")),
    21: Fault("CONV: the state kept is one row too old", ("kernel-check", "digests", "equalities")),
    22: Fault("rollback of folded state: the first logged row is missing", ("equalities",)),
    23: Fault("ROUTE: the selection bias goes into the weights", ("kernel-check", "digests")),
    24: Fault("experts in files: the down matrix is the neighbour's", ("spill",)),
    25: Fault("experts in files: computed before they are read", ("spill",)),
    30: Fault("rejection: acceptance without the sums of the masses", ("distributions",)),
    31: Fault("rejection: acceptance and residual share a variate", ("distributions",)),
    32: Fault("rejection: the draft's penalties are forgotten at the judgement", ("distributions",)),
    33: Fault("rejection: the residual forgets the draft's masses", ("distributions",)),
    34: Fault("sampler: the last survivor of the filters is left out", ("distributions", "sampler")),
    41: Fault("speculation: half of each hidden row is lost on its way to the drafter", ("perf-ci",)),
    42: Fault("every step takes 0.2 ms longer", ("perf-ci",)),
    43: Fault("rounds in one go: every draft follows the first one", ("speculation",)),
}
# gate, and which of its tests
QUICK = {3: ("equalities", "every_isa"), 12: ("equalities", "fork"), 16: ("sampler", "definition"), 41: ("perf-ci", "acceptance")}


def build(number: int) -> Path:
    """The library with fault `number`. Only the file that holds it is compiled; the other objects are the ordinary build's."""
    if not shutil.which("make") or not (ROOT / "Makefile").is_file():
        pytest.skip("no make, or no source tree")
    flags = ROOT / "build" / "obj" / "flags"
    cuda = int(flags.is_file() and "-DBW24_CUDA" in flags.read_text(encoding="utf-8"))  # as the objects that are there
    command = ["make", "-s", "lib", f"FAULT={number}", f"CUDA={cuda}", f"PYTHON={sys.executable}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found = list(ROOT.glob(f"build/*/fault{number}/libbw24.so"))
    assert len(found) == 1, found
    return found[0]


def turns_red(gate: str, library: Path, tests: str | None = None) -> bool:
    """Whether a gate (or those of its `tests`) fails on a library: by a test, a crash or a hang. A gate that cannot run at all is an error."""
    file, *select = GATES[gate]
    if tests:
        select = ["-k", tests]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--library", library, ROOT / "tests" / file, *select]
    try:
        code = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False).returncode
    except subprocess.TimeoutExpired:
        return True
    assert code in (0, 1) or code < 0 or code > 128, f"{gate} did not run: exit code {code}"
    return code != 0


def library_file() -> Path:
    """The file of the library under test."""
    abi.lib()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return Path(next(line.split()[-1] for line in maps if line.rstrip().endswith("libbw24.so")))


def table(results: dict[int, dict[str, bool]]) -> str:
    """A line a fault; blank: that gate was not asked."""
    lines = [" | ".join(("fault", *GATES))]
    word = {True: "caught", False: "missed", None: ""}
    for number, red in results.items():
        lines.append(" | ".join((f"{number} {FAULTS[number].what}", *(word[red.get(g)] for g in GATES))))
    return "\n".join(lines)


def seeded() -> dict[int, str]:
    """Fault number -> file, from the sources."""
    out = {}
    for path in sorted((ROOT / "libbw24").rglob("*.c")):
        for number in re.findall(r"BW_SEEDED\((\d+),", path.read_text(encoding="utf-8")):
            assert int(number) not in out, f"fault {number} stands twice"
            out[int(number)] = path.name
    return out


def test_the_list_is_the_sources():
    if not (ROOT / "libbw24" / "fault.h").is_file():
        pytest.skip("no source tree")
    assert set(seeded()) == set(FAULTS) and len(FAULTS) >= 12


def test_every_gate_must_see_a_fault():
    assert {gate for fault in FAULTS.values() for gate in fault.caught_by} == set(GATES)


@pytest.mark.parametrize("number", QUICK)
def test_quick_faults(number):
    gate, tests = QUICK[number]
    assert turns_red(gate, build(number), tests), FAULTS[number].what


def test_every_fault_is_caught(pytestconfig):
    every_gate = pytestconfig.getoption("--faults-table")
    if not every_gate and not pytestconfig.getoption("--faults"):
        pytest.skip("--faults runs all of them")
    ordinary, libraries = library_file(), {number: build(number) for number in FAULTS}
    pairs = [(0, gate) for gate in GATES] + [(n, gate) for n, fault in FAULTS.items() for gate in (GATES if every_gate else fault.caught_by)]
    libraries[0] = ordinary
    # most of a gate's time is one thread's, the plain reference's; speed is judged alone
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 4)) as pool:
        beside = [pair for pair in pairs if pair[1] != "perf-ci"]
        red = dict(zip(beside, pool.map(lambda pair: turns_red(pair[1], libraries[pair[0]]), beside), strict=True))
    red |= {pair: turns_red(pair[1], libraries[pair[0]]) for pair in pairs if pair[1] == "perf-ci"}
    for gate in GATES:
        assert not red[0, gate], f"{gate} is red without a fault, so it shows nothing"
    results = {n: {gate: red[n, gate] for gate in GATES if (n, gate) in red} for n in FAULTS}
    problems = [f"fault {n} ({fault.what}) was missed by {', '.join(missed)}" for n, fault in FAULTS.items()
                if (missed := [gate for gate in fault.caught_by if not results[n][gate]])]
    print("\n" + table(results))
    assert not problems, problems
