"""The machine code of the library: no approximate instruction, no transcendental of libm, no contraction where two roundings are meant."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from bw24 import abi

APPROXIMATE = re.compile(
    r"\b(v?rcp(ps|ss|14|28|ph|sh)\w*|v?rsqrt(ps|ss|14|28|ph|sh)\w*|vexp2p\w+"  # estimates
    r"|vdpbf16ps|tdp\w+|vf\w*[ps]h"  # formats whose units flush or round otherwise
    r"|fsin|fcos|fsincos|fptan|fpatan|f2xm1|fyl2x|fyl2xp1)\b"  # x87 transcendentals
)
LIBM = re.compile(
    r"^(exp|exp2|exp10|expm1|log|log2|log10|log1p|pow|sin|cos|tan|sincos|asin|acos|atan|atan2|sinh|cosh|tanh|asinh|acosh|atanh|erf|erfc|cbrt"
    r"|hypot|lgamma|tgamma)[fl]?$"
)
FUSED = re.compile(r"\bvf(n?m(add|sub)|maddsub|msubadd)\d*\w*")
PLAIN = ("ref_add", "ref_scale", "add", "scale")  # y = a + b and y = x * c: a fused operation here would be a contraction
MEANT = ("ref_norm", "ref_rope", "ref_dot_row_f32")


def tool(name: str) -> str:
    found = shutil.which(name)
    if not found:
        pytest.skip(f"no {name}")
    return found


@cache
def library() -> Path:
    """The file of the library under test."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        abi.lib()
        return Path(next(line.split()[-1] for line in maps if line.rstrip().endswith("libbw24.so")))


@cache
def functions() -> dict[str, list[str]]:
    """Function name -> its instructions; functions of one name (static ones of several files) together."""
    text = subprocess.run([tool("objdump"), "-d", "--no-show-raw-insn", library()], capture_output=True, text=True, check=True).stdout
    out: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        head = re.match(r"^[0-9a-f]+ <(.+)>:$", line)
        if head:
            name = head[1].split(".")[0]
            out.setdefault(name, [])
        elif "\t" in line:
            out[name].append(line.split("\t", 1)[1].strip())
    return out


def test_no_approximate_instruction():
    found = [f"{name}: {i}" for name, code in functions().items() for i in code if APPROXIMATE.match(i)]
    assert not found, found[:10]
    assert sum(map(len, functions().values())) > 20_000  # the disassembly is there


def test_the_patterns_find_what_they_name():
    for text in ("vrcpps ymm0", "rsqrtss xmm0", "vrcp14ps zmm0", "vrsqrt28pd zmm0", "fsin", "vdpbf16ps zmm0", "vfmadd213ph zmm0"):
        assert APPROXIMATE.match(text), text
    for text in ("vfmadd231ps %ymm0,%ymm1,%ymm2", "vfnmadd213ss", "vfmsub132pd"):
        assert FUSED.match(text) and not APPROXIMATE.match(text), text
    assert LIBM.match("expf") and LIBM.match("sincos") and not LIBM.match("fmaf") and not LIBM.match("exp2i")


def test_no_library_transcendental():
    text = subprocess.run([tool("nm"), "-D", "--undefined-only", library()], capture_output=True, text=True, check=True).stdout
    names = [line.split()[-1].split("@")[0] for line in text.splitlines()]
    assert "malloc" in names
    assert [n for n in names if LIBM.match(n)] == []


def test_no_start_up_code_that_sets_flush_to_zero():
    """gcc -ffast-math links a constructor that does; it stays in the process after the library is closed."""
    assert not [n for n in functions() if "fast_math" in n]


def test_no_contraction():
    code = functions()
    seen = [name for name in PLAIN if code.get(name)]
    assert "ref_add" in seen and "ref_scale" in seen
    for name in seen:
        assert not [i for i in code[name] if FUSED.match(i)], name


def test_fma_where_it_is_meant():
    """Fused operations, or calls of fma where the processor has none."""
    for name in MEANT:
        assert [i for i in functions()[name] if FUSED.match(i) or "fma" in i], name
