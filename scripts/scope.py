"""Which tests concern a change, for about a minute in all: prints the test files, one a line, the longest first, and what of them can be left out
(`--deselect=`); with --c the C tests, as `make ctest CTESTS=` takes them. The change is the tree against a revision (default: the merge base with
main or its upstream), untracked files included. Knows names, not contents."""

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
    (r"^libbw24/cu/", ("cuda_resources",)),
    (r"^libbw24/cu/(op_)?attend", ("cuda_emulated",)),
    (r"^libbw24/cu/(op_)?(delta|gdn|fold|tf32)", ("cuda_emulated_delta",)),
    (r"^libbw24/cu/(lift|bus|split|op_experts_sum)", ("cuda_emulated_lift",)),
    (r"^libbw24/cu/(op_linear|op_gemm|gemm|unit|linear_)", ("cuda_emulated_linear",)),
    (r"^libbw24/cu/(op_experts|experts|mixture|moe|op_rout)", ("cuda_emulated_moe",)),
    (r"^libbw24/cu/(op_rows|rows|op_heads|heads|op_chain|chain|kv|value|op_perhead|perhead)", ("cuda_emulated_rows",)),
    (r"^libbw24/cu/(op_sample|sample|op_round|round)", ("draw",)),
    (r"^libbw24/cu/(device|launch|forward|float|bf16|op_float)", ("cuda_emulated_rows", "cuda_emulated_linear")),
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


C_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (  # pattern of a changed path -> names of C tests (tests/c/test_NAME.c)
    (r"^libbw24/(cpu|ref)/(attend|kv)", ("cpu_attend",)),
    (r"^libbw24/(ref/|cpu/(linear|vec|pack|v256))", ("cpu_linear", "ref_linear")),
    (r"^libbw24/formats/", ("formats", "cpu_linear", "ref_linear")),
    (r"^libbw24/(canon|types)\.", ("formats", "cpu_attend", "cpu_linear", "ref_linear")),
    (r"^libbw24/cu/", ("cuda_faults",)),
    (r"^libbw24/(list|lower|tensor|ops|build)", ("list",)),
    (r"^libbw24/sample", ("sample",)),
    (r"^libbw24/spill", ("spill", "split")),
    (r"^libbw24/cpu/(host|forward_moe)", ("split",)),
    (r"^libbw24/(run|state|internal|kv)\b", ("list", "spill")),
    (r"^tests/c/test_(\w+)\.c$", (r"\1",)),
)
SLOW = {  # the kernels of every instruction set take most of a minute: those of a set run where a file of it changed, and the machine's own always
    "test_numerics.py": {"test_every_kernel_is_the_reference[portable]": r"portable|vec\.h|tmpl",
                         "test_every_kernel_is_the_reference[avx2]": r"avx2|v256|vec\.h|tmpl"},
    "test_digests.py": {"test_digests[portable]": r"ref/|portable|vec\.h|tmpl|digests", "test_digests[avx2]": r"avx2|v256|vec\.h|tmpl|digests"},
    "test_docs_run.py": {"test_speculation_page_runs": r"spec|draft|round|docs/", "test_spilling_page_runs": r"spill|tier|docs/"},
}
LONGEST = {"test_numerics.py", "test_draft_build.py", "test_cuda_emulated.py", "test_distributions.py", "test_draw.py", "test_docs_run.py",
           "test_equalities.py"}


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


def c_tests_for(paths: list[str], available: list[str]) -> list[str]:
    """Names of `available` (such as cpu_attend) that the rules name for the paths."""
    names = {found.expand(test) for path in paths for pattern, tests in C_RULES if (found := re.match(pattern, path)) for test in tests}
    return [name for name in available if name in names]


def main(argv: list[str]) -> int:
    paths = changed(next((a for a in argv if a != "--c"), None))
    if "--c" in argv:
        print(" ".join(c_tests_for(paths, sorted(p.stem.removeprefix("test_") for p in (ROOT / "tests" / "c").glob("test_*.c")))))
        return 0
    available = sorted(p.name for p in (ROOT / "tests").glob("test_*.py"))
    chosen = sorted(tests_for(paths, available), key=lambda name: (name not in LONGEST, name))
    print("\n".join([*(f"tests/{name}" for name in chosen), *(f"--deselect={name}" for name in left_out(paths, chosen))]))
    print(f"scope: {len(chosen)} of {len(available)} test files concern the change", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
