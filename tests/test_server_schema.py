"""schemathesis against /openapi.json: whatever the document allows, and much that it does not, gets an answer of a documented form, never a 5xx."""

from __future__ import annotations

import subprocess
import sys

import pytest

from serving import Server
from tiny_model import write_tiny

pytest.importorskip("schemathesis")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_what_the_document_describes(tmp_path):
    server = Server(write_tiny(tmp_path / "tiny.gguf", context=512), log=tmp_path / "log").wait()
    try:
        words = ["run", server.url + "/openapi.json", "--checks", CHECKS, "--phases", "fuzzing", "--max-examples", "25", "--seed", "24", "--no-color",
                 "--generation-database", "none"]
        done = subprocess.run([sys.executable, "-m", "schemathesis.cli", *words], capture_output=True, text=True, timeout=240, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
        assert "11 passed" in done.stdout, done.stdout[-2000:]
        assert server.get("/health")[0] == 200
    finally:
        assert server.stop() == 0
