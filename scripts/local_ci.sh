#!/usr/bin/env bash
# The fast form of .ci/run, for the minute before a push: lint, build, C tests, and the Python tests that are quick.
# Uses the current Python; builds in place.
set -euo pipefail
cd "$(dirname "$0")/.."
make lint
make
make ctest
"${PYTHON:-python}" -m pytest -q -x tests
