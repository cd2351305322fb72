"""Storage formats against the reference packages' bytes (fixtures), independent formulas, and the numeric program in exact arithmetic."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
FORMATS = ROOT / "libbw24" / "formats"
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
QUANTISED = (
    "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ1_S IQ1_M IQ4_NL IQ4_XS MXFP4 NVFP4"
).split()
ENCODED = "F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4".split()
WRITTEN = [*ENCODED, "F32", "E4M3", "NVFP4"]
FORM = {n: "S1" for n in QUANTISED}
FORM |= {n: "S1M" for n in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")} | {"Q2_K": "S2M"}
FORM |= {n: "S2" for n in ("Q3_K", "Q6_K", "IQ2_XS", "IQ2_S", "IQ1_M", "NVFP4")}
FORM_NAMES = ["FLOAT", "S1", "S1M", "S2", "S2M"]
# relative RMS error of a Gaussian row after a round trip, in percent (the reference quantisers' figures)
ROUND_TRIP = {
    "Q8_0": 0.54, "Q6_K": 1.77, "Q5_K": 3.62, "Q5_1": 3.79, "Q5_0": 4.27, "Q4_K": 7.13, "IQ4_NL": 7.61, "IQ4_XS": 7.67, "Q4_1": 7.83,
    "Q4_0": 8.59, "NVFP4": 9.51, "MXFP4": 11.5, "F16": 0.021, "BF16": 0.17, "E4M3": 2.65,
}  # fmt: skip


class Group(ctypes.Structure):
    """bw_group."""

    _fields_ = [("q", ctypes.c_int8 * 32), ("s", ctypes.c_float * 2), ("m", ctypes.c_float * 2)]


class Info(ctypes.Structure):
    """bw_type_info; the codecs stay untyped pointers so that NULL is visible."""

    _fields_ = [
        ("name", ctypes.c_char_p), ("id", ctypes.c_int), ("block", ctypes.c_int), ("bytes", ctypes.c_int), ("form", ctypes.c_int),
        ("decode", ctypes.c_void_p), ("group", ctypes.c_void_p), ("encode", ctypes.c_void_p),
    ]  # fmt: skip


DECODE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
GROUP = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(Group))
ENCODE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class Library:
    """The C files of formats/ and the reference dot product, called on numpy arrays."""

    def __init__(self, path: Path):
        self.c = ctypes.CDLL(str(path))
        self.c.bw_type_by_name.restype = ctypes.POINTER(Info)
        self.c.bw_type_by_name.argtypes = [ctypes.c_char_p]
        for name, args in {"ref_dot_row": 5, "ref_dot_row_f32": 4}.items():
            f = getattr(self.c, name)
            f.restype = ctypes.c_float
            f.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64] + [ctypes.c_void_p] * (args - 3)
        self.c.ref_quant_row.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]

    def info(self, name: str) -> Info:
        """The row of types.def."""
        return self.c.bw_type_by_name(name.encode()).contents

    def decode(self, name: str, raw: np.ndarray) -> np.ndarray:
        """uint8 (blocks, bytes) -> f32 (blocks, block)."""
        t = self.info(name)
        raw = np.ascontiguousarray(raw, dtype=np.uint8).reshape(-1, t.bytes)
        out = np.empty((len(raw), t.block), np.float32)
        call = DECODE(t.decode)
        for i in range(len(raw)):
            call(raw.ctypes.data + i * t.bytes, out.ctypes.data + i * t.block * 4)
        return out

    def groups(self, name: str, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """uint8 (blocks, bytes) -> codes int8 (groups, 32), scales f32 (groups, 2), minima f32 (groups, 2)."""
        t = self.info(name)
        raw = np.ascontiguousarray(raw, dtype=np.uint8).reshape(-1, t.bytes)
        n = len(raw) * t.block // 32
        q, s, m = np.empty((n, 32), np.int8), np.empty((n, 2), np.float32), np.empty((n, 2), np.float32)
        call, one = GROUP(t.group), Group()
        for i in range(n):
            block, g = divmod(32 * i, t.block)
            call(raw.ctypes.data + block * t.bytes, g // 32, one)
            q[i], s[i], m[i] = one.q, one.s, one.m
        return q, s, m

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        """f32 values -> uint8 (blocks, bytes)."""
        t = self.info(name)
        x = np.ascontiguousarray(x, dtype=np.float32).reshape(-1)
        out = np.zeros((x.size // t.block, t.bytes), np.uint8)
        ENCODE(t.encode)(x.ctypes.data, out.ctypes.data, x.size)
        return out

    def quant_row(self, x: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
        """f32 row -> status, codes int8, scales f32 (groups)."""
        x = np.ascontiguousarray(x, dtype=np.float32)
        q, d = np.zeros(x.size, np.int8), np.zeros(x.size // 32, np.float32)
        return self.c.ref_quant_row(x.ctypes.data, x.size, q.ctypes.data, d.ctypes.data), q, d

    def dot(self, name: str, raw: np.ndarray, q: np.ndarray, d: np.ndarray) -> np.float32:
        """ref_dot_row."""
        raw = np.ascontiguousarray(raw)
        t = ctypes.addressof(self.info(name))
        return np.float32(self.c.ref_dot_row(t, raw.ctypes.data, q.size, q.ctypes.data, d.ctypes.data))

    def dot_f32(self, name: str, raw: np.ndarray, x: np.ndarray) -> np.float32:
        """ref_dot_row_f32."""
        raw, x = np.ascontiguousarray(raw), np.ascontiguousarray(x, dtype=np.float32)
        return np.float32(self.c.ref_dot_row_f32(ctypes.addressof(self.info(name)), raw.ctypes.data, x.size, x.ctypes.data))


@pytest.fixture(scope="session")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """formats/*.c and ref/dot.c, built alone."""
    cc = shutil.which("cc") or shutil.which("gcc")
    if not cc:
        pytest.skip("no C compiler")
    so = tmp_path_factory.mktemp("formats") / "formats.so"
    files = [*sorted(FORMATS.glob("*.c")), ROOT / "libbw24" / "ref" / "dot.c"]
    subprocess.run([cc, *FLAGS, "-o", str(so), *map(str, files), "-lm"], check=True)
    return Library(so)


@pytest.fixture(scope="session")
def decoded(fixtures: Path) -> dict[str, np.ndarray]:
    """TYPE_raw, TYPE_values."""
    return dict(np.load(fixtures / "formats" / "decode.npz"))


@pytest.fixture(scope="session")
def encoded(fixtures: Path) -> dict[str, np.ndarray]:
    """names, rows and TYPE, the bytes of every row."""
    return dict(np.load(fixtures / "formats" / "encode.npz"))


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits, signed zeros included, any NaN equal to any NaN."""
    return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))))


def sane_row(lib: Library, name: str, cols: int, rng: np.random.Generator) -> np.ndarray:
    """Bytes of a weight row with finite scales: an encoded Gaussian row, or random bytes whose f16 scales are small numbers."""
    t = lib.info(name)
    if t.encode:
        return lib.encode(name, rng.standard_normal(cols).astype(np.float32))
    raw = rng.integers(0, 256, (cols // t.block, t.bytes), dtype=np.uint8)
    if name == "IQ1_M":  # the f16 scale is the top nibble of four words; 0x2 as the last nibble means about 0.01
        raw[:, 55] = (raw[:, 55] & 15) | 0x20
    else:
        for at in {"Q2_K": [80, 82], "Q3_K": [108]}.get(name, [0]):
            raw[:, at : at + 2] = rng.uniform(0.005, 0.02, len(raw)).astype("<f2")[:, None].view(np.uint8)
    return raw


# ---- decode and group form


@pytest.mark.parametrize("name", ["F16", "BF16", *QUANTISED])
def test_decode_gives_the_reference_values(lib, decoded, name):
    assert same_values(lib.decode(name, decoded[f"{name}_raw"]), decoded[f"{name}_values"])


@pytest.mark.parametrize("name", QUANTISED)
def test_decode_of_many_random_blocks(lib, name):
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name]
    raw = np.random.default_rng(7).integers(0, 256, (1500, lib.info(name).bytes), dtype=np.uint8)
    if name == "NVFP4":
        raw[:, :4] &= 0x7F
    with np.errstate(all="ignore"):
        want = gguf.dequantize(raw, kind).astype(np.float32).reshape(len(raw), -1)
    assert same_values(lib.decode(name, raw), want)


def test_f32_is_copied(lib):
    raw = np.random.default_rng(1).integers(0, 256, (4000, 4), dtype=np.uint8)
    np.testing.assert_array_equal(lib.decode("F32", raw).view(np.uint8), raw)
    np.testing.assert_array_equal(lib.encode("F32", raw.view(np.float32)), raw)


@pytest.mark.parametrize("name", QUANTISED)
def test_group_form_is_the_value_in_one_rounding(lib, decoded, name):
    raw = np.concatenate([decoded[f"{name}_raw"], sane_row(lib, name, 2048, np.random.default_rng(3))])
    q, s, m = lib.groups(name, raw)
    values = lib.decode(name, raw).reshape(-1, 2, 16)
    assert FORM_NAMES[lib.info(name).form] == FORM[name]
    if FORM[name] in ("S1", "S1M"):
        assert np.array_equal(s[:, 0], s[:, 1], equal_nan=True) and np.array_equal(m[:, 0], m[:, 1], equal_nan=True)
    if FORM[name] in ("S1", "S2"):
        assert not m.view(np.uint32).any()
    finite = np.isfinite(s).all(1) & np.isfinite(m).all(1) & np.isfinite(values).all((1, 2))
    assert finite.sum() > len(finite) // 2
    q, s, m, values = q[finite].reshape(-1, 2, 16), s[finite], m[finite], values[finite]
    product = s.astype(np.float64)[:, :, None] * q
    assert np.array_equal(product, product.astype(np.float32))
    exact = product.astype(np.longdouble) + m[:, :, None]
    assert np.array_equal(exact.astype(np.float32), values)


def test_nvfp4_ignores_the_sign_of_a_scale(lib):
    raw = np.random.default_rng(5).integers(0, 256, (64, 36), dtype=np.uint8)
    raw[:5, 0] = [0x00, 0x7E, 0x7F, 0x80, 0xFF]
    masked = raw.copy()
    masked[:, :4] &= 0x7F
    values = lib.decode("NVFP4", raw)
    assert same_values(values, lib.decode("NVFP4", masked))
    assert not values[[0, 2, 3, 4], :16].any()
    assert np.abs(values[1, :16]).max() <= 448 * 6


def test_mxfp4_scales_are_exact_powers_of_two(lib):
    raw = np.zeros((256, 17), np.uint8)
    raw[:, 0] = np.arange(256)
    raw[:, 1] = 0x12  # codes 2 and 1: values 1 and 1/2
    values = lib.decode("MXFP4", raw)
    assert np.array_equal(values[:255, 0], np.ldexp(np.float32(1), np.arange(255) - 127))
    assert np.array_equal(values[:255, 16], values[:255, 0] / 2)


# ---- encoders


@pytest.mark.parametrize("name", ENCODED)
def test_encode_gives_the_reference_bytes(lib, encoded, name):
    wrong = []
    for label, row, want in zip(encoded["names"], encoded["rows"], encoded[name], strict=True):
        got = lib.encode(name, row)
        same = (got == want.reshape(got.shape)).all(1)
        if name == "MXFP4":  # the reference's exponent byte wraps below 2^-125; test_mxfp4_of_tiny_rows has the rule
            amax = np.abs(row).reshape(-1, 32).max(1)
            same |= (amax > 0) & (amax < 2.0**-125)
        if not same.all():
            wrong.append(str(label))
    assert wrong == []


@pytest.mark.parametrize("name", ENCODED)
def test_encode_of_many_rows(lib, name):
    libgguf, gguf = pytest.importorskip("libgguf"), pytest.importorskip("gguf")
    rng = np.random.default_rng(11)
    x = (rng.standard_normal((100, 256)) * np.exp2(rng.integers(-12, 3, (100, 1)))).astype(np.float32)
    encode = libgguf.store_rows if name in ("F16", "BF16") else libgguf.quantize_rows
    want = np.asarray(encode(x, gguf.GGMLQuantizationType[name])).view(np.uint8)
    np.testing.assert_array_equal(lib.encode(name, x).reshape(-1), want.reshape(-1))


@pytest.mark.parametrize("name", sorted(ROUND_TRIP))
def test_round_trip_error_of_gaussian_data(lib, name):
    x = np.random.default_rng(2).standard_normal(65536).astype(np.float32)
    back = lib.decode(name, lib.encode(name, x)).reshape(-1)
    error = 100 * np.sqrt(np.mean((back - x) ** 2) / np.mean(x**2))
    assert error == pytest.approx(ROUND_TRIP[name], rel=0.05)


@pytest.mark.parametrize("name", WRITTEN)
def test_zero_rows_stay_zero(lib, name):
    assert not lib.decode(name, lib.encode(name, np.zeros(512))).any()


def test_types_without_encoder(lib):
    assert [n for n in [*QUANTISED, "F32", "F16", "BF16", "E4M3"] if not lib.info(n).encode] == [n for n in QUANTISED if n not in WRITTEN]


@pytest.mark.parametrize("scale", [1e-38, 1e-39, 1e-40])
def test_mxfp4_of_tiny_rows(lib, scale):
    """Below 2^-125 the exponent byte stays 0 and every value is within half a step (2^-129) of its code, or saturates at 6."""
    x = (np.random.default_rng(4).uniform(-1, 1, 512) * scale).astype(np.float32)
    raw = lib.encode("MXFP4", x)
    assert not raw[:, 0].any()
    assert np.abs(lib.decode("MXFP4", raw).reshape(-1).astype(np.float64) - x).max() <= 2.0**-129


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest_even(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the entry of an ascending table nearest to x >= 0, an even index at ties; more than the last gives the last."""
    x = np.minimum(x.astype(np.float64), table[-1])
    gap = np.abs(x[..., None] - table)
    first = gap.argmin(-1)
    after = np.minimum(first + 1, len(table) - 1)
    tie = np.take_along_axis(gap, after[..., None], -1)[..., 0] == gap.min(-1)
    return np.where(tie & (first & 1 == 1), after, first)


def e4m3_values() -> np.ndarray:
    """The values of codes 0..126."""
    c = np.arange(127)
    return np.where(c < 8, c * 2.0**-9, (1 + (c & 7) / 8) * np.exp2((c >> 3) - 7.0))


def test_nvfp4_is_nearest_even_at_both_levels(lib, encoded):
    rng = np.random.default_rng(9)
    ties = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], (200, 64)) * rng.choice([-1, 1], (200, 64))
    rows = [*encoded["rows"], ties.reshape(-1)[:12800], rng.uniform(1400, 2800, 6400), rng.standard_normal(64000) * 100]
    for row in rows:
        x = np.asarray(row, np.float32).reshape(-1, 16)
        raw = lib.encode("NVFP4", x).reshape(-1, 36)
        scales = raw[:, :4].reshape(-1)
        want = nearest_even(np.abs(x).max(1) / np.float32(6), e4m3_values())
        np.testing.assert_array_equal(scales, want)
        scale = 2 * lib.groups("NVFP4", raw)[1].reshape(-1).astype(np.float64)
        y = np.divide(np.abs(x.astype(np.float64)), scale[:, None], out=np.zeros(x.shape), where=scale[:, None] > 0)
        code = nearest_even(y, E2M1)
        code = np.where((x < 0) & (code > 0), code | 8, code)
        pairs = raw[:, 4:].reshape(-1, 8)
        np.testing.assert_array_equal(np.concatenate([pairs & 15, pairs >> 4], 1), code)


# ---- scalars


def test_f16_and_bf16_of_any_pattern(lib):
    bits = np.random.default_rng(6).integers(0, 1 << 32, 200000, dtype=np.uint32)
    x = bits.view(np.float32)
    with np.errstate(all="ignore"):
        want = x.astype(np.float16)
    got = lib.encode("F16", x).reshape(-1).view(np.float16)
    assert np.array_equal(got.view(np.uint16)[~np.isnan(x)], want.view(np.uint16)[~np.isnan(x)]) and np.isnan(got[np.isnan(x)]).all()
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    got = lib.encode("BF16", x).reshape(-1).view(np.uint16)
    assert np.array_equal(got[~np.isnan(x)], rounded[~np.isnan(x)].astype(np.uint16))
    assert np.isnan((got[np.isnan(x)].astype(np.uint32) << 16).view(np.float32)).all()


def test_e4m3_table_and_rounding(lib):
    c = np.arange(256)
    m, e = c & 7, c >> 3 & 15
    want = np.where(e == 0, m * 2.0**-9, (1 + m / 8) * np.exp2(e - 7.0)) * np.where(c & 128, -1, 1)
    got = lib.decode("E4M3", c.astype(np.uint8)).reshape(-1)
    number = (c & 127) != 127
    assert np.array_equal(got[number], want[number]) and np.isnan(got[~number]).all() and np.signbit(got[128])
    x = np.random.default_rng(8).uniform(0, 500, 20000).astype(np.float32)
    x = np.concatenate([x, x * np.float32(2.0**-12), (want[:126] + want[1:127]) / 2]).astype(np.float32)
    np.testing.assert_array_equal(lib.encode("E4M3", x).reshape(-1), nearest_even(x, e4m3_values()))
    np.testing.assert_array_equal(lib.encode("E4M3", -x).reshape(-1), nearest_even(x, e4m3_values()) | 128)
    assert lib.encode("E4M3", np.array([np.inf, -np.inf, np.nan, 449])).reshape(-1).tolist() == [0x7E, 0xFE, 0x7F, 0x7E]


# ---- codebooks


def test_grids_are_the_packages_tables():
    """The committed table is what the script writes, and the script checks sums and digests of every codebook."""
    pytest.importorskip("gguf")
    spec = importlib.util.spec_from_file_location("make_grids", ROOT / "scripts" / "make_grids.py")
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    spec.loader.exec_module(module)
    sys.dont_write_bytecode = before
    assert module.render() == (FORMATS / "grids.c").read_text()
    with pytest.raises(ValueError, match="expected sum 1 "):
        module.check("grid", np.zeros(4), 1, "0" * 16)


# ---- the dot product of the numeric program


def to_f32(x: Fraction) -> np.float32:
    """Correctly rounded f32 of a rational: through f64 rounded to odd, so the second rounding is the only one that counts."""
    near = float(x)
    if Fraction(near) != x and not np.float64(near).view(np.int64) & 1:
        near = float(np.nextafter(near, np.inf if Fraction(near) < x else -np.inf))
    return np.float32(near)


def fma(a: np.float32, b: np.float32 | int, c: np.float32) -> np.float32:
    """a * b + c, rounded once."""
    return to_f32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def exact(d: np.float32, n: int) -> np.float32:
    """d * n, which must be a float."""
    product = Fraction(float(d)) * n
    assert Fraction(float(np.float32(float(product)))) == product
    return np.float32(float(product))


def add_group(form: str, s: np.ndarray, m: np.ndarray, d: np.float32, dots: list[int], sums: list[int], p: np.float32) -> np.float32:
    """p after a group by docs/numerics.md section 2."""
    if form in ("S1", "S1M"):
        p = fma(s[0], exact(d, sum(dots)), p)
        return p if form == "S1" else fma(m[0], exact(d, sum(sums)), p)
    for scale, n in [(s[0], dots[0]), (s[1], dots[1]), *([(m[0], sums[0]), (m[1], sums[1])] if form == "S2M" else [])]:
        p = fma(scale, exact(d, n), p)
    return p


@pytest.mark.parametrize("name", QUANTISED)
def test_dot_is_the_numeric_program(lib, name):
    rng = np.random.default_rng(12)
    block = lib.info(name).block
    for cols in (256, 512, 768) if block == 256 else (block, 256, 256 + block, 768 - block):
        raw = sane_row(lib, name, cols, rng)
        status, a, d = lib.quant_row(rng.standard_normal(cols))
        q, s, m = lib.groups(name, raw)
        assert status == 0
        prod = (q.astype(np.int64) * a.reshape(-1, 32)).reshape(-1, 2, 16).sum(2)
        total = a.astype(np.int64).reshape(-1, 2, 16).sum(2)
        y = np.float32(0)
        for first in range(0, cols // 32, 8):
            p = np.float32(0)
            for g in range(first, min(first + 8, cols // 32)):
                p = add_group(FORM[name], s[g], m[g], d[g], prod[g].tolist(), total[g].tolist(), p)
            y = y + p
        assert lib.dot(name, raw, a, d).view(np.uint32) == y.view(np.uint32)


@pytest.mark.parametrize("name", QUANTISED)
def test_dot_is_the_dot_of_the_decoded_values(lib, name):
    """Within 1e-6 of the f64 sum, relative to the sum of magnitudes: about 3 roundings a group and one a segment of 6e-8 each."""
    rng = np.random.default_rng(13)
    for cols in (256, 2048):
        raw = sane_row(lib, name, cols, rng)
        _, a, d = lib.quant_row(rng.standard_normal(cols))
        terms = lib.decode(name, raw).reshape(-1).astype(np.float64) * a * np.repeat(d.astype(np.float64), 32)
        assert abs(float(lib.dot(name, raw, a, d)) - terms.sum()) <= 1e-6 * np.abs(terms).sum()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "E4M3", "Q4_1", "Q6_K", "NVFP4"])
def test_dot_with_float_activations(lib, name):
    """Section 3: one fma a column in segments of 256; quantised types decode first."""
    rng = np.random.default_rng(14)
    for cols in (768,) if lib.info(name).block == 256 else (64, 320) if lib.info(name).block > 1 else (1, 31, 257, 300):
        raw = lib.encode(name, rng.standard_normal(cols).astype(np.float32))
        x = rng.standard_normal(cols).astype(np.float32)
        w = lib.decode(name, raw).reshape(-1)
        y = np.float32(0)
        for first in range(0, cols, 256):
            p = np.float32(0)
            for c in range(first, min(first + 256, cols)):
                p = fma(w[c], x[c], p)
            y = y + p
        assert lib.dot_f32(name, raw, x).view(np.uint32) == y.view(np.uint32)


def test_activation_rows(lib):
    rng = np.random.default_rng(15)
    x = (rng.standard_normal((64, 32)) * np.exp2(rng.integers(-90, 90, (64, 1)))).astype(np.float32)
    x[0], x[1], x[2] = 0, np.float32(2.0**-101), np.float32(2.0**-100)
    x[3] = np.nextafter(np.float32(2.0**100), np.float32(0)) * rng.choice([-1, 1], 32)
    x[4] = np.arange(-16, 16) / 2 * 7  # amax 127, scale 1: half-integer ties
    x[4, 0] = -127
    status, q, d = lib.quant_row(x.reshape(-1))
    amax = np.abs(x).max(1)
    tiny = amax < np.float32(2.0**-100)
    assert status == 0 and tiny.tolist()[:3] == [True, True, False]
    share = np.where(tiny, np.float32(1), amax) * np.float32(1 / 127)
    want = np.where(tiny, np.float32(0), ((share.view(np.uint32) + np.uint32(0xFFFFF)) & np.uint32(0xFFF00000)).view(np.float32))
    np.testing.assert_array_equal(d, want)
    assert d[4] == 1
    np.testing.assert_array_equal(np.ldexp(np.frexp(d)[0], 4) % 1, 0)  # four significant bits
    assert (d[~tiny] >= share[~tiny]).all() and (d[~tiny] <= share[~tiny] * 1.125).all()
    codes = np.where(tiny[:, None], 0, np.rint(x * (np.float32(1) / np.where(tiny, np.float32(1), want))[:, None]))
    np.testing.assert_array_equal(q.reshape(-1, 32), codes)
    assert np.abs(codes).max() == 127


def test_every_scale_has_room_for_its_codes(lib):
    """Largest magnitudes over one octave, scales of every mantissa and the floats about their steps: no code passes 127."""
    steps = np.float32(127) * np.float32(2.0**-7) * (1 + np.arange(8) / 8).astype(np.float32)
    bits = (steps.view(np.int32)[:, None] + np.arange(-4000, 4001)).reshape(-1)
    amax = np.concatenate([bits.astype(np.int32).view(np.float32), np.geomspace(1, 2, 50_001).astype(np.float32)])
    x = np.zeros((len(amax), 32), np.float32)
    x[:, 7] = -amax
    status, q, d = lib.quant_row(x.reshape(-1))
    codes = q.reshape(-1, 32)[:, 7].astype(int)
    assert status == 0 and codes.min() == -127 and codes.max() <= -112
    assert (np.abs(codes * d.astype(np.float64) + amax) <= 0.5001 * d).all() and len(np.unique(np.frexp(d)[0])) == 8


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 2.0**100, -(2.0**100)])
def test_activation_rows_that_have_no_scale(lib, bad):
    x = np.ones(96, np.float32)
    x[70] = bad
    assert lib.quant_row(x)[0] != 0
