"""The command probe. It prints; the measuring is done in the library and in probe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .cli_common import EXIT_OK, add_command, write, write_json

EXAMPLES = """
bw24 probe                                the device that would compute, its memory and units
bw24 probe --dir ~/.cache/bw24            the disk that models lie on, too (writes 1 GiB there and removes it)
bw24 probe --device cpu --threads 8 --json
"""
LINES = (  # key, what a person reads, unit
    ("read_gbps", "memory, reading", "GB/s"), ("copy_gbps", "memory, copying (both ways counted)", "GB/s"),
    ("to_device_gbps", "bus, to the card", "GB/s"), ("from_device_gbps", "bus, from the card", "GB/s"),
    ("launch_us", "an empty kernel, launched", "us"), ("graph_node_us", "the same in a graph", "us"),
    ("pdl_node_us", "the same with programmatic edges", "us"), ("barrier_us", "all blocks meeting", "us"),
    ("int8_tops", "int8 matrix units (mma.sync)", "Tops/s"), ("bf16_tflops", "bf16 matrix units (mma.sync)", "Tflop/s"),
    ("matrix_tops", "a Q8_0 matrix times 256 rows", "Tops/s"),
)


def add_commands(commands: Any) -> None:
    """Declare probe."""
    parser = add_command(commands, "probe", run_probe, "measure what this machine can do: memory, card, bus, disk", EXAMPLES,
                         ("device", "backend", "isa", "threads", "json"), model=False)
    parser.add_argument("--dir", metavar="DIR", type=lambda text: Path(text).expanduser(), help="measure the disk under this folder as well")


def run_probe(args: argparse.Namespace) -> int:
    """Exit code of `bw24 probe`."""
    from . import probe

    found = probe.measure(args.device, args.backend, args.isa, args.threads, args.dir)
    if args.json:
        write_json(found)
        return EXIT_OK
    write(f"{found['device']}\n" + "".join(f"  {text:<38} {found[key]:>9.3g} {unit}\n" for key, text, unit in LINES if key in found))
    if host := found.get("host"):
        write(f"{host['device']}\n" + "".join(f"  {text:<38} {host[key]:>9.3g} {unit}\n" for key, text, unit in LINES if key in host))
    if disk := found.get("disk"):
        how = "" if disk["direct"] else " (perhaps the page cache's: reading past it was refused)"
        write(f"disk under {disk['folder']}\n  {'writing, to the disk':<38} {disk['write_gbps']:>9.3g} GB/s\n"
              f"  {'reading 1 MiB at random':<38} {disk['read_gbps']:>9.3g} GB/s{how}\n")
    return EXIT_OK
