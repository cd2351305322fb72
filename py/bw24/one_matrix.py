"""A model of one matrix, to time what a context does with it. Owns the model for the time of one call; knows no rate and no machine."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from . import abi


def seconds_of_step(ctx: Any, type_id: int, columns: int, rows: int, weights: np.ndarray, batch: int, seconds: float) -> float:
    """The shortest step of `batch` rows through a LINEAR of a matrix [rows x columns] of a storage type, of those that `seconds` have time for, at
    least one. weights: its bytes as a file has them. Raises Bw24Error."""
    lib, ffi = abi.lib(), abi.ffi
    m, kv = abi.new("bw24_model_params"), ffi.new("char[]", b"f16")
    m.max_rows, m.max_context, m.kv_full, m.kv_window = batch, 1 << 30, kv, kv
    model, seq = ffi.new("bw24_model **"), ffi.new("bw24_seq **")
    embed = np.random.default_rng(1).standard_normal(columns).astype(np.float32)
    text = f"BUF x {columns}\nBUF y {rows}\nBUF logits {rows}\nEMBED y=x w=e\nLINEAR y=y x=x w=m\nPICK_ROWS y=logits x=y\n"
    try:
        abi.check(lib.bw24_model_new(model, ctx, m))
        for name, kind, ne, data in ((b"e", 0, [columns, 1], embed), (b"m", type_id, [columns, rows], weights)):
            abi.check(lib.bw24_tensor_load(model[0], name, kind, 2, ffi.new("int64_t[]", ne), ffi.from_buffer(data), data.nbytes, 1.0, 0))
        abi.check(lib.bw24_list_set(model[0], b"trunk", text.encode()))
        for i in range(3):
            abi.check(lib.bw24_prepare(model[0], i))
        abi.check(lib.bw24_seq_new(seq, model[0]))
        taken, logits = ffi.new("bw24_row[]", batch), np.empty(rows, np.float32)
        for i in range(batch):
            taken[i].seq, taken[i].want = seq[0], i == batch - 1
        best, started = float("inf"), time.perf_counter()
        while time.perf_counter() < started + seconds or best == float("inf"):
            begun = time.perf_counter()
            abi.check(lib.bw24_step(model[0], taken, batch, ffi.cast("float *", ffi.from_buffer(logits))))
            best = min(best, time.perf_counter() - begun)
        return best
    finally:
        lib.bw24_seq_free(seq[0])
        lib.bw24_model_free(model[0])
