"""Facts of the GGUF container that reader and writer share: value types, tensor types, names made safe for messages. Knows neither."""

from __future__ import annotations

import json
import re

import numpy as np

# tensor type id -> (name, values per block, bytes per block). Removed ids (4, 5, 31-33, 36-38) are absent.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}
TYPE_IDS: dict[str, int] = {name: type_id for type_id, (name, _, _) in TYPES.items()}

UINT32, INT32, BOOL, STRING, ARRAY, UINT64, INT64 = 4, 5, 7, 8, 9, 10, 11
KIND_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")
KIND_IDS = {name: kind for kind, name in enumerate(KIND_NAMES)}
NUMPY_KINDS = {kind: np.dtype(code) for kind, code in {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8"}.items()}
INT_RANGES = {0: (0, 2**8 - 1), 1: (-(2**7), 2**7 - 1), 2: (0, 2**16 - 1), 3: (-(2**15), 2**15 - 1), UINT32: (0, 2**32 - 1),
              INT32: (-(2**31), 2**31 - 1), UINT64: (0, 2**64 - 1), INT64: (-(2**63), 2**63 - 1)}

_PLAIN = re.compile(r"[A-Za-z0-9_.\-]+|[!-~ ]*/[!-~ ]*")


def quote(text: str, limit: int = 96) -> str:
    """Text from a file, made safe for one line of a terminal or log: names and paths plain, anything else escaped ASCII; cut at `limit`."""
    if len(text) > limit:
        text = text[:limit] + "..."
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
