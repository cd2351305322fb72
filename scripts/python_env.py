"""What the Makefile asks of the interpreter and of git. Knows no compiler and no model.

check              exits 1 with the line to type where packages cannot be installed (an externally managed interpreter, a Python too old)
installed [EXTRA]  exits 0 when this checkout is installed here, editable, nothing in setup.cfg changed since, and the extra's packages are there
revision           prints the git revision of the C sources' checkout, with + where they differ from it
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def check() -> int:
    if sys.version_info < (3, 10):  # noqa: UP036  (this file runs before pip can say it)
        print(f"bw24 needs Python 3.10 or newer, found {sys.version.split()[0]} at {sys.executable}", file=sys.stderr)
        return 1
    in_venv = sys.prefix != sys.base_prefix
    if not in_venv and (Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED").exists():
        print(
            f"{sys.executable} belongs to the operating system, which manages its packages. Type this, then make again:\n"
            "  python3 -m venv .venv && . .venv/bin/activate",
            file=sys.stderr,
        )
        return 1
    return 0


def installed(extra: str = "") -> int:
    try:
        package = importlib.metadata.distribution("bw24")
        where = json.loads(package.read_text("direct_url.json") or "{}")
        record = next(f.locate() for f in package.files or [] if f.name == "RECORD")
        newest = max((ROOT / name).stat().st_mtime for name in ("setup.cfg", "pyproject.toml"))
        same = where.get("url") == ROOT.as_uri() and where.get("dir_info", {}).get("editable", False)
        for requirement in package.requires or []:
            name, _, marker = requirement.partition(";")
            if extra and f"'{extra}'" in marker.replace('"', "'"):
                importlib.metadata.distribution(re.split(r"[^\w.-]", name.strip())[0])
        return 0 if same and Path(record).stat().st_mtime >= newest else 1
    except (importlib.metadata.PackageNotFoundError, StopIteration, OSError, ValueError):
        return 1


def revision() -> int:
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("diff", "--quiet", "HEAD", "--", "libbw24").returncode != 0
    except OSError:
        head = None
    print(head.stdout.strip() + ("+" if changed else "") if head and head.returncode == 0 else "unknown")
    return 0


if __name__ == "__main__":
    jobs = {"check": check, "installed": installed, "revision": revision}
    if len(sys.argv) < 2 or sys.argv[1] not in jobs:
        sys.exit(f"usage: python_env.py {'|'.join(jobs)} [extra]")
    sys.exit(jobs[sys.argv[1]](*sys.argv[2:]))
