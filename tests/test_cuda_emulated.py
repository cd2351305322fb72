"""ATTEND's CUDA kernels without a card: their sources, compiled for the CPU over an emulation of blocks and warps (tests/cuda/emulate.h), give the
plain kernel's bits. What stands in PTX is replaced by what it means; everything else is the text that the card runs. Skips without CUDA's headers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CU = ROOT / "libbw24" / "cu"
SOURCES = ("device", "kv", "unit", "attend", "op_linear", "attend_piece", "bf16", "op_attend", "op_attend_many", "op_attend_few", "attend_team",
           "op_attend_deep", "op_attend_team", "early", "heads", "op_heads", "op_attend_short", "op_attend_heads", "op_attend_gated", "op_attend_any",
           "op_attend_merge", "op_attend_fast", "op_attend_shared")
BARRIERS = """inline void bar_init(uint64_t *b, int n) { emu::bar_init(b, n); }
inline void bar_arrive(uint64_t *b) { emu::bar_arrive(b); }
inline void bar_fence() {}
inline void bar_issued(uint64_t *) {}
inline void bar_issued_by_warp(uint64_t *) {}
inline void bar_expect(uint64_t *b, int n) { emu::bar_expect(b, n); }
inline void bar_wait(uint64_t *b, int parity) { emu::bar_wait(b, parity); }
inline bool bar_test(uint64_t *b, int parity) { return emu::bar_test(b, parity); }
inline void bulk_copy(void *to, const void *from, int n, uint64_t *b) { emu::bulk_copy(to, from, n, b); }
inline void bulk_copy_once(void *to, const void *from, int n, uint64_t *b) { emu::bulk_copy(to, from, n, b); }
inline void mma32(int *c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    emu::mma_s8(c, a, b);
}
"""
END = "} // namespace bw\n#endif\n"
MATRICES = """inline void ldsm(uint32_t (&r)[4], const void *at) { emu::load_matrices(r, at, false); }
inline void ldsm_t(uint32_t (&r)[4], const void *at) { emu::load_matrices(r, at, true); }
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { emu::mma_bf16(c, a, b0, b1); }
"""


def headers() -> Path | None:
    """The folder of CUDA's headers, beside the compiler or in its usual place."""
    found = shutil.which("nvcc")
    homes = [Path(found).resolve().parent.parent] if found else []
    homes += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"))]
    return next((h / "include" for h in homes if (h / "include" / "cuda_fp8.h").is_file()), None)


def between(text: str, begin: str, end: str, new: str) -> str:
    """`text` with what stands from `begin` up to `end` replaced."""
    return text[: text.index(begin)] + new + text[text.index(end) :]


def emulated(name: str) -> str:
    """A source with its PTX replaced."""
    text = (CU / f"{name}.cuh").read_text(encoding="utf-8").replace('"../canon.h"', f'"{ROOT / "libbw24" / "canon.h"}"')
    text = text.replace("extern __shared__ __align__(16) uint8_t raw[];", "uint8_t *raw = emu::shared;").replace("__grid_constant__ ", "")
    if name == "device":
        text = re.sub(r'asm volatile\("cp\.async\.c[ag]\.[^\n]*,(\d+);"[^\n]*', r"memcpy(dst, src, \1);", text)
        text = re.sub(r'#if __CUDA_ARCH__ >= 900\n *asm volatile\("griddepcontrol\.wait[^\n]*\n#endif', "if (emu::at_wait) emu::at_wait();", text)
    elif name == "unit":
        text = re.sub(r'uint32_t v;\n    asm\("prmt.*?return v;', "return emu::prmt(a, b, sel);", text, flags=re.S)
        text = re.sub(r'asm volatile\("ld\.global[^\n]*', "abort();", text)
        text = text[: text.index("\nstruct ")] + "\n" + END  # the units of weights are not needed
    elif name == "op_linear":
        text = text[: text.index("__device__ __forceinline__ uint32_t smem_at")] + BARRIERS + END
    elif name == "op_attend_few":
        text = re.sub(r'asm volatile\("bar\.sync[^\n]*', "emu::bar_team(slot, team * 32);", text)
    elif name == "early":
        text = re.sub(r'asm volatile\("ld\.relaxed[^\n]*', "v = *p;", text)
        text = re.sub(r'asm volatile\("" : [^\n]*?\); return v;', "return v;", text)
    elif name == "op_attend_gated":
        text = re.sub(r'asm volatile\("cp\.async\.mbarrier[^\n]*', "emu::bar_arrive(b);", text)
    elif name == "bf16":
        text = between(text, "__device__ __forceinline__ void ldsm(", "__device__ __forceinline__ uint32_t bf16x2", MATRICES)
    elif name == "op_attend_fast":
        text = re.sub(r'float y; asm\("ex2[^\n]*', "return exp2f(x); }", text)
    return re.sub(r'asm volatile\("(fence|cp\.async)[^\n]*?;\s*\n', ";\n", text)


def compiler_words(folder: Path) -> list[str]:
    """How a program over the sources in `folder` is compiled; skips where it cannot be. -O1: twice as fast to compile as -O2 and as fast to run."""
    include, compiler = headers(), shutil.which("g++")
    if include is None or compiler is None:
        pytest.skip("no CUDA headers or no g++")
    if "fma" not in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"):
        pytest.skip("this processor has no fma")
    return [compiler, "-std=c++17", "-O1", "-mfma", "-ffp-contract=off", "-w", f"-I{include}", f"-I{folder}", f"-I{ROOT / 'tests' / 'cuda'}"]


def with_case(text: str, case: int) -> str:
    """A program's text with one case of its main: most of a compilation is the kernels of the others."""
    parts = re.split(r"(?m)^(?=    (?:case \d+|default):)", text)
    kept = [p for p in parts if not p.startswith("    case ") or p.startswith(f"    case {case}:")]
    assert len(kept) < len(parts) and any(p.startswith("    case ") for p in kept)
    return "".join(kept)


def compiled(folder: Path, program: str, case: int | None = None) -> Path:
    """tests/cuda/PROGRAM.cpp over the sources in `folder`; `case`: with this one alone."""
    out, source = folder / program, ROOT / "tests" / "cuda" / f"{program}.cpp"
    if case is not None:
        text, source = with_case(source.read_text(encoding="utf-8"), case), folder / f"{program}.cpp"
        source.write_text(text, encoding="utf-8")
    done = subprocess.run([*compiler_words(folder), str(source), "-o", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def build(folder: Path, fault: tuple[str, str] | None = None, case: int | None = None) -> Path:
    """The program; `fault`: a text of the sources that is left out, and its file; `case`: as compiled's."""
    for name in SOURCES:
        text = emulated(name)
        if fault and fault[0] == name:
            assert fault[1] in text
            text = text.replace(fault[1], "")
        (folder / f"{name}.cuh").write_text(text, encoding="utf-8")
    return compiled(folder, "attend", case)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("case", (0, 1, 2, 3, 4, 7, 10, 11))
def test_attend_has_the_plain_kernels_bits(program, case):
    done = subprocess.run([str(program), str(case)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == {2: 44, 3: 12, 7: 54, 10: 18, 11: 6}.get(case, 9)  # float formats have kernels of their own


def test_a_gated_layer_in_one_launch_has_the_plain_kernels_bits(program):
    """Heads, ATTEND and GATE; and GATE in the launch that folds the pieces."""
    done = subprocess.run([str(program), "6"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 16


def test_heads_and_a_short_context_in_one_launch_have_the_plain_kernels_bits(program):
    done = subprocess.run([str(program), "9"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 21


def test_heads_that_others_read_too_early_are_seen(tmp_path):
    program = build(tmp_path, ("op_attend_heads", "__syncthreads(); /* the query is there, and the step's keys and values */"), 9)
    done = subprocess.run([str(program), "9", "first"], capture_output=True, text=True)
    assert done.returncode == 1 and "FAIL heads and ATTEND" in done.stdout


def test_keys_that_are_values_have_the_plain_kernels_bits(program):
    done = subprocess.run([str(program), "5"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 12


def test_many_rows_have_the_plain_kernels_bits(program):
    """Tiles whose queries see different parts of a piece."""
    done = subprocess.run([str(program), "8"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 5


@pytest.mark.parametrize(("name", "after", "case"), [
    ("op_attend_many", "weights and factors are there, K and queries are free", 3),
    ("op_attend_many", "V is free, at last weights too", 3),
    ("op_attend", "p and, where it was read as it is, V are free", 0),
])
def test_a_missing_barrier_is_seen(tmp_path, name, after, case):
    """Without it a warp writes over weights that another still reads."""
    program = build(tmp_path, (name, f"__syncthreads(); /* {after} */"), case)
    done = subprocess.run([str(program), str(case), "first"], capture_output=True, text=True)
    assert done.returncode == 1 and "FAIL many rows" in done.stdout


@pytest.mark.parametrize("after", ["scores are there, K and what the piece before used are free", "weights are there"])
def test_a_missing_barrier_of_a_team_is_seen(tmp_path, after):
    program = build(tmp_path, ("op_attend_team", f"team_sync(team, TEAM_WARPS); /* {after} */"), 3)
    done = subprocess.run([str(program), "3", "first"], capture_output=True, text=True)
    assert done.returncode == 1 and "FAIL few rows" in done.stdout


def test_a_missing_wait_of_a_row_at_depth_is_seen(tmp_path):
    """Weights are taken before they are there."""
    program = build(tmp_path, ("op_attend_deep", "bar_wait(&sh.deep.handed[DEEP_STAGES - 1][buffer], c / DEEP_BUFFERS & 1);"), 11)
    done = subprocess.run([str(program), "11", "first"], capture_output=True, text=True)
    assert done.returncode == 1 and "FAIL few rows" in done.stdout


def test_keys_of_the_step_read_too_early_by_teams_are_seen(tmp_path):
    """They read pages before the dependency wait, but none that the step itself writes."""
    program = build(tmp_path, ("op_attend_team", " && (b + 1) * PIECE <= t.fresh"), 3)
    done = subprocess.run([str(program), "3", "first"], capture_output=True, text=True)
    assert done.returncode == 1 and "FAIL few rows" in done.stdout


def test_keys_of_the_step_read_too_early_are_seen(tmp_path):
    """Pages are read before the dependency wait; what the step itself appends has to be read again after it."""
    again = "few_fresh(sh, i, t.pages[c] + t.head, from, min((int)PIECE, sh.hi[t.queries - 1] - c * PIECE), threadIdx.x, S::THREADS);"
    program = build(tmp_path, ("op_attend_few", again), 3)
    done = subprocess.run([str(program), "3", "first"], capture_output=True, text=True)
    assert done.returncode == 1 and "FAIL few rows" in done.stdout
