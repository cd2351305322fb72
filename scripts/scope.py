"""Which test files concern a change: prints them, one a line, and what of them it can leave out (`--deselect=`), for about a minute in all. The
change is the tree against a revision (default: the merge base with main or its upstream), untracked files included. Knows names, not contents."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHOLE = ("digests", "equalities", "gate", "generate")
NUMERIC = ("numerics", *WHOLE)
RULES: tuple[tuple[str, tuple[str, ...]], ...] = (  # pattern of a changed path -> names of tests (test_NAME.py or test_NAME_*.py)
    (r"^libbw24/(ref|cpu|formats)/", NUMERIC),
    (r"^libbw24/[^/]+\.(c|h|def)$", (*WHOLE, "ops_mixed")),
    (r"^libbw24/(canon|rope|types|ops)\.", NUMERIC),
    (r"^libbw24/fault\.h$", ("faults",)),
    (r"^libbw24/sample", ("sampling", "distributions", "draw")),
    (r"^libbw24/(round|state)", ("speculation",)),
    (r"^libbw24/spill", ("spill", "tiers")),
    (r"^libbw24/cu/", ("cuda",)),
    (r"^py/bw24/arch/", ("arch_models", "goldens_tiny", "equalities")),
    (r"^py/bw24/(gguf|source|safetensors|st_)", ("gguf", "safetensors", "convert", "arch_models")),
    (r"^py/bw24/(tokenizer|chat|toolcalls|grammar)", ("tokenizer", "chat", "toolcalls", "grammar")),
    (r"^py/bw24/(server/|scheduler|jobs)", ("scheduler", "server_app", "server_clients")),
    (r"^py/bw24/draft/", ("draft",)),
    (r"^py/bw24/(speculate|generate|engine)", ("speculation", "generate", "equalities")),
    (r"^py/bw24/(cli|flags)", ("cli", "flags", "docs")),
    (r"^py/bw24/(hub|download|models|wheel)", ("hub",)),
    (r"^py/bw24/(bench|peer|records|replay)", ("bench", "records", "replay")),
    (r"^(README|docs/|research/|.*\.md$)", ("docs", "records")),
    (r"^scripts/", ("docs", "records", "perf_ci")),
    (r"^py/bw24/(\w+)\.py$", (r"\1",)),
    (r"^tests/test_(\w+)\.py$", (r"\1",)),
)


SLOW = {  # the kernels of every instruction set take most of a minute: those of a set run where a file of it changed, and the machine's own always
    "test_numerics.py": {"test_every_kernel_is_the_reference[portable]": r"portable|vec\.h|tmpl",
                         "test_every_kernel_is_the_reference[avx2]": r"avx2|v256|vec\.h|tmpl"},
}


def left_out(paths: list[str], chosen: list[str]) -> list[str]:
    """Tests of the chosen files that the change does not ask for, as pytest names them."""
    return [f"tests/{file}::{test}" for file in chosen for test, pattern in SLOW.get(file, {}).items()
            if not any(re.search(pattern, p) for p in paths)]


def changed(base: str | None) -> list[str]:
    """Paths that differ from `base`, and untracked ones."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    base = base or git("merge-base", "HEAD", "@{upstream}") or git("merge-base", "HEAD", "main") or "HEAD"
    if base == git("rev-parse", "HEAD"):
        base = "HEAD~1"  # nothing ahead: the last commit and what is not committed
    return sorted({*git("diff", "--name-only", base).splitlines(), *git("ls-files", "--others", "--exclude-standard").splitlines()})


def tests_for(paths: list[str], available: list[str]) -> list[str]:
    """Files of `available` (names such as test_gate.py) that the rules name for the paths."""
    names = set()
    for path in paths:
        for pattern, tests in RULES:
            if found := re.match(pattern, path):
                names |= {found.expand(test) for test in tests}
    return [file for file in available if any(re.fullmatch(rf"test_{re.escape(n)}(_\w+)?\.py", file) for n in names)]


def main() -> int:
    available = sorted(p.name for p in (ROOT / "tests").glob("test_*.py"))
    paths = changed(sys.argv[1] if len(sys.argv) > 1 else None)
    chosen = tests_for(paths, available)
    print("\n".join([*(f"tests/{name}" for name in chosen), *(f"--deselect={name}" for name in left_out(paths, chosen))]))
    print(f"scope: {len(chosen)} of {len(available)} test files concern the change", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
