"""The command convert: a checkpoint directory becomes one GGUF file. Knows the words of the command line; the work is convert's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .cli_common import EXIT_OK, add_command, amount, progress_bar, say, show, write_json
from .errors import Bw24Error

EXAMPLES = """
bw24 convert Qwen3.5-9B model.gguf                  as the engine loads it: large float matrices become Q8_0
bw24 convert Qwen3.5-9B model.gguf --type Q4_K_M    smaller: Q4_K, with Q6_K where it counts
bw24 convert Qwen3.5-9B model.gguf --type keep      every weight in the type that the checkpoint has
"""


def add_commands(commands: Any) -> None:
    """Declare convert."""
    parser = add_command(commands, "convert", run_convert, "write a checkpoint directory of safetensors as a GGUF file", EXAMPLES, ("json",),
                         model=False)
    parser.add_argument("folder", metavar="DIR", help="directory with config.json and *.safetensors")
    parser.add_argument("out", metavar="OUT", help="the GGUF file to write")
    parser.add_argument("--type", dest="kind", default="auto", metavar="TYPE",
                        help="auto, keep, Q4_K_M, or a storage type for every matrix: F16, BF16, Q8_0, Q4_K ... (default: auto)")
    parser.add_argument("--name", metavar="TEXT", help="the model's name in the file (default: the directory's)")
    parser.add_argument("--force", action="store_true", help="replace OUT where it exists")


def run_convert(args: argparse.Namespace) -> int:
    """Exit code of `bw24 convert`."""
    from .convert import convert

    folder, out = Path(args.folder), Path(args.out)
    if out.exists() and not args.force:
        raise Bw24Error(f"{show(args.out, 4096)}: exists; --force replaces it")
    with progress_bar("convert", "B") as bar:
        report = convert(folder, out, args.kind, args.name, bar)
    if args.json:
        write_json({"file": str(out), "bytes": out.stat().st_size, "fallbacks": report.fallbacks,
                    "tensor_types": {name: {"tensors": n, "bytes": size} for name, (n, size) in report.types.items()}})
        return EXIT_OK
    if report.fallbacks:
        first = ", ".join(report.fallbacks[:3]) + (", ..." if len(report.fallbacks) > 3 else "")
        say(f"{len(report.fallbacks)} tensors have rows that {args.kind} cannot divide and got another type: {first}")
    say(f"{out}: {amount(out.stat().st_size)}; " + ", ".join(f"{n} tensors {name}" for name, (n, _) in report.types.items()))
    return EXIT_OK
