"""What this machine can do: memory, the bus to a card, a disk, and the int8 arithmetic that matrices run on. Figures to set a speed beside; the
device's own are the library's (bw24_probe_rates). Knows no model."""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from . import abi, check
from . import device as devices
from .errors import Bw24Error
from .one_matrix import seconds_of_step
from .tier_plan import disk_rate

COLUMNS, ROWS, BATCH = 4096, 4096, 256  # of the matrix that is timed, and rows of a step
DISK_BYTES = 1 << 30
RATES = ("read_gbps", "copy_gbps", "to_device_gbps", "from_device_gbps", "launch_us", "graph_node_us", "pdl_node_us", "barrier_us", "int8_tops",
         "bf16_tflops")


def rates(ctx: Any) -> dict[str, float]:
    """The figures that a context's device has, by name. Raises Bw24Error."""
    out = abi.new("bw24_rates")
    abi.check(abi.lib().bw24_probe_rates(ctx, out))
    return {name: round(getattr(out, name), 3) for name in RATES if getattr(out, name)}


def matrix_rate(ctx: Any, seconds: float = 0.4) -> float:
    """Tera-operations a second of a Q8_0 matrix [4096 x 4096] times 256 rows as a step computes it: quantising, int8 products and scales; a multiply
    and an add are two. Raises Bw24Error."""
    block = np.zeros((ROWS * COLUMNS // 32, 34), np.uint8)
    block[:, 1], block[:, 2:] = 0x20, np.random.default_rng(1).integers(0, 256, (len(block), 32), np.uint8)
    best = seconds_of_step(ctx, abi.type_id("Q8_0"), COLUMNS, ROWS, block, BATCH, seconds)
    return 2e-12 * ROWS * COLUMNS * BATCH / best


def disk(folder: Path, size: int = DISK_BYTES) -> dict[str, Any]:
    """Writing and reading a file of `size` bytes in `folder`, which is removed: write_gbps (to the disk, fsync), read_gbps (1 MiB at random places, 8
    threads), direct (False: past the page cache was refused, so the figure may be the cache's). Raises Bw24Error."""
    try:
        with NamedTemporaryFile(dir=folder, prefix="bw24-probe-") as file:
            stat = os.statvfs(folder)
            if stat.f_bavail * stat.f_frsize < 2 * size:
                raise Bw24Error(f"{folder}: the disk probe writes {size >> 20} MiB and wants as much again free")
            piece = np.random.default_rng(1).bytes(16 << 20)
            began = time.perf_counter()
            for _ in range(size // len(piece)):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            wrote = size / (time.perf_counter() - began)
            read, direct = disk_rate([Path(file.name)])
            return {"folder": str(folder), "write_gbps": round(wrote / 1e9, 3), "read_gbps": round(read / 1e9, 3), "direct": direct}
    except OSError as error:
        raise Bw24Error(f"{folder}: {error.strerror}") from None


def measure(device: str = "auto", backend: str = "auto", isa: str | None = None, threads: int | None = None,
            folder: Path | None = None) -> dict[str, Any]:
    """Everything, as one object: the chosen device's figures, `host` for the processor's memory where that is another place, `disk` for `folder`."""
    choice = devices.choose(device, backend, isa)
    with check.open_context(choice.backend, isa, threads) as ctx:
        out: dict[str, Any] = {"device": abi.ffi.string(abi.lib().bw24_device(ctx)).decode(), **rates(ctx)}
        out["matrix_tops"] = round(matrix_rate(ctx), 4)
    if choice.cuda:
        with check.open_context("cpu", None, threads) as ctx:
            host = rates(ctx)
            out["host"] = {"device": abi.ffi.string(abi.lib().bw24_device(ctx)).decode(), **host}
    if folder is not None:
        out["disk"] = disk(folder)
    return out
