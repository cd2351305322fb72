"""Random weights as ready-made blocks: valid codes, finite scales, values close to N(0, sigma^2). Knows blocks, not models or files.

Each maker returns uint8 [blocks, bytes per block]. Codes come from a normal distribution, rounded and clipped as a quantiser would leave
them; scales vary by a tenth from block to block. Nothing is quantised, so a gigabyte costs no more than its copying.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
FP4_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
POOL_BYTES = 4 << 20  # beyond every core's L2, so that a generated file has no more locality than its own size gives it


def _codes(rng: np.random.Generator, shape: tuple[int, ...], centre: float, spread: float, low: int, high: int) -> np.ndarray:
    """Integer codes round(centre + spread * N(0,1)) in [low, high], as int16."""
    return np.clip(np.rint(centre + spread * rng.standard_normal(shape, np.float32)), low, high).astype(np.int16)


def _scales(rng: np.random.Generator, shape: tuple[int, ...], middle: float) -> np.ndarray:
    return (middle * rng.uniform(0.9, 1.1, shape)).astype(np.float32)


def _f16(values: np.ndarray) -> np.ndarray:
    """f32 [n] or [n, k] as little-endian half bytes uint8 [n, 2k]."""
    return np.ascontiguousarray(values.reshape(len(values), -1).astype("<f2")).view(np.uint8)


def _halves(codes: np.ndarray) -> np.ndarray:
    """4-bit codes [..., 2m] in split-half order: element e in the low nibble of byte e, element m + e in the high one. uint8 [..., m]."""
    half = codes.shape[-1] // 2
    codes = codes.astype(np.uint8)
    return (codes[..., :half] & 15) | ((codes[..., half:] & 15) << 4)


def _bits(flags: np.ndarray) -> np.ndarray:
    """Bits [n, 32] as a little-endian u32, uint8 [n, 4]."""
    return np.packbits(flags.astype(np.uint8), axis=1, bitorder="little")


def _simple(bits: int, with_min: bool) -> Callable[[np.random.Generator, int, float], np.ndarray]:
    """Maker for Q4_0, Q4_1, Q5_0, Q5_1: value d (q - 2^(bits-1)), or d q + m with m = -d (2^bits - 1) / 2."""
    top, spread = (1 << bits) - 1, 2.7 if bits == 4 else 5.4

    def make(rng: np.random.Generator, n: int, sigma: float) -> np.ndarray:
        q = _codes(rng, (n, 32), top / 2 if with_min else (top + 1) / 2, spread, 0, top)
        d = _scales(rng, (n, 1), sigma / spread)
        parts = [_f16(d)]
        if with_min:
            parts.append(_f16(-d * (top / 2)))
        if bits == 5:
            parts.append(_bits(q >> 4))
        return np.concatenate([*parts, _halves(q)], axis=1)

    return make


def _q8_0(rng: np.random.Generator, n: int, sigma: float) -> np.ndarray:
    q = _codes(rng, (n, 32), 0, 40, -127, 127).astype(np.int8)
    return np.concatenate([_f16(_scales(rng, (n, 1), sigma / 40)), q.view(np.uint8)], axis=1)


def _six_bit(scales: np.ndarray, mins: np.ndarray) -> np.ndarray:
    """Eight 6-bit scales and eight 6-bit mins, uint8 [n, 12] in the K-quants' packing."""
    s, m = scales.astype(np.uint8), mins.astype(np.uint8)
    low = s[:, :4] | ((s[:, 4:] >> 4) << 6)
    middle = m[:, :4] | ((m[:, 4:] >> 4) << 6)
    return np.concatenate([low, middle, (s[:, 4:] & 15) | ((m[:, 4:] & 15) << 4)], axis=1)


def _k_min(bits: int) -> Callable[[np.random.Generator, int, float], np.ndarray]:
    """Maker for Q4_K and Q5_K: value d sc q - dmin m; with m = sc and dmin = d (2^bits - 1) / 2 the groups are centred."""
    top, spread = (1 << bits) - 1, 2.7 if bits == 4 else 5.4

    def make(rng: np.random.Generator, n: int, sigma: float) -> np.ndarray:
        q = _codes(rng, (n, 8, 32), top / 2, spread, 0, top)
        sc = rng.integers(40, 64, (n, 8))
        d = _scales(rng, (n, 1), sigma / (spread * 51.5))
        pairs = q.reshape(n, 4, 64)
        parts = [_f16(d), _f16(d * (top / 2)), _six_bit(sc, sc)]
        if bits == 5:
            parts.append(np.bitwise_or.reduce((q >> 4).astype(np.uint8) << np.arange(8, dtype=np.uint8)[None, :, None], axis=1))
        return np.concatenate([*parts, _halves(pairs).reshape(n, 128)], axis=1)

    return make


def _q6_k(rng: np.random.Generator, n: int, sigma: float) -> np.ndarray:
    q = _codes(rng, (n, 2, 4, 32), 32, 10.8, 0, 63).astype(np.uint8)  # [block, half, quarter of the half, element]
    sc = rng.integers(80, 128, (n, 16)).astype(np.int8)
    low = (q[:, :, :2] & 15) | ((q[:, :, 2:] & 15) << 4)
    high = q[:, :, 0] >> 4 | (q[:, :, 1] >> 4) << 2 | (q[:, :, 2] >> 4) << 4 | (q[:, :, 3] >> 4) << 6
    d = _scales(rng, (n, 1), sigma / (10.8 * 103.5))
    return np.concatenate([low.reshape(n, 128), high.reshape(n, 64), sc.view(np.uint8), _f16(d)], axis=1)


def _nearest(levels: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, values).astype(np.int16)


def _iq4_nl(rng: np.random.Generator, n: int, sigma: float) -> np.ndarray:
    q = _nearest(IQ4_LEVELS, 46 * rng.standard_normal((n, 32), np.float32))
    return np.concatenate([_f16(_scales(rng, (n, 1), sigma / 46)), _halves(q)], axis=1)


def _iq4_xs(rng: np.random.Generator, n: int, sigma: float) -> np.ndarray:
    q = _nearest(IQ4_LEVELS, 46 * rng.standard_normal((n, 8, 32), np.float32))
    ls = rng.integers(48, 64, (n, 8))  # stored 6-bit scale; its value is ls - 32
    high = np.bitwise_or.reduce((ls >> 4).astype(np.uint16) << (2 * np.arange(8, dtype=np.uint16)), axis=1).astype("<u2")
    low = (ls[:, 0::2] & 15) | ((ls[:, 1::2] & 15) << 4)
    d = _scales(rng, (n, 1), sigma / (46 * 23.5))
    return np.concatenate([_f16(d), high.view(np.uint8).reshape(n, 2), low.astype(np.uint8), _halves(q).reshape(n, 128)], axis=1)


def _fp4(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """E2M1 codes of values around N(0, 2^2): sign in bit 3."""
    x = 2 * rng.standard_normal(shape, np.float32)
    return _nearest(FP4_LEVELS, np.abs(x)) | np.where(x < 0, 8, 0).astype(np.int16)


def _nvfp4(rng: np.random.Generator, n: int, sigma: float) -> np.ndarray:
    """Scales 1 to 1.875 (bytes 0x38 to 0x3F, mean 1.4375); the tensor's own `.scale` (nvfp4_scale) brings sigma in."""
    scales = rng.integers(0x38, 0x40, (n, 4)).astype(np.uint8)
    return np.concatenate([scales, _halves(_fp4(rng, (n, 4, 16))).reshape(n, 32)], axis=1)


def nvfp4_scale(sigma: float) -> float:
    """Per-tensor factor that gives NVFP4 blocks of this module the standard deviation sigma."""
    return sigma / (2 * 1.4375)


def _mxfp4(rng: np.random.Generator, n: int, sigma: float) -> np.ndarray:
    exponent = np.full((n, 1), int(np.clip(127 + np.rint(np.log2(sigma / 2)), 1, 254)), np.uint8)
    return np.concatenate([exponent, _halves(_fp4(rng, (n, 32)))], axis=1)


def _f32(rng: np.random.Generator, n: int, sigma: float) -> np.ndarray:
    return (sigma * rng.standard_normal((n, 1), np.float32)).astype("<f4").view(np.uint8)


def _half(rng: np.random.Generator, n: int, sigma: float) -> np.ndarray:
    return _f16(sigma * rng.standard_normal((n, 1), np.float32))


def _bf16(rng: np.random.Generator, n: int, sigma: float) -> np.ndarray:
    return np.ascontiguousarray(_f32(rng, n, sigma)[:, 2:])


MAKERS: dict[str, Callable[[np.random.Generator, int, float], np.ndarray]] = {
    "F32": _f32, "F16": _half, "BF16": _bf16, "Q8_0": _q8_0, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "NVFP4": _nvfp4,
    "MXFP4": _mxfp4, "Q4_0": _simple(4, False), "Q4_1": _simple(4, True), "Q5_0": _simple(5, False), "Q5_1": _simple(5, True),
    "Q4_K": _k_min(4), "Q5_K": _k_min(5),
}


def _prime_below(n: int) -> int:
    while n > 3 and any(n % k == 0 for k in range(2, int(n**0.5) + 1)):
        n -= 1
    return n


def pool(type_name: str, block_bytes: int, sigma: float, seed: int, pool_bytes: int = POOL_BYTES) -> np.ndarray:
    """About `pool_bytes` of random blocks, uint8 [n, block_bytes].

    n is prime: rows cut from the repeated pool differ until n of them have passed, whatever the row's length.
    """
    rng = np.random.default_rng([seed, *type_name.encode(), int(sigma * 2**40)])
    blocks = MAKERS[type_name](rng, _prime_below(max(pool_bytes // block_bytes, 3)), sigma)
    assert blocks.shape[1] == block_bytes and blocks.dtype == np.uint8, (type_name, blocks.shape)
    return np.ascontiguousarray(blocks)
