#!/usr/bin/env bash
# The checks before a push, with the current Python and a build in place.
#   scripts/local_ci.sh [--fast]     lint, build, C tests, and the tests that concern the change (scripts/scope.py): about a minute
#   scripts/local_ci.sh --full       kernel-check, gates, speculation K=1..8, all tests with a budget of skips, every seeded fault: complete, half an hour
#   scripts/local_ci.sh --gpu        the same order on a machine with a card, short (scripts/gpu.sh)
#   scripts/local_ci.sh --perf ...   speed and acceptance against the last green revision (scripts/perf_ci.py; its options follow)
#   scripts/local_ci.sh --gpu-perf [DIR] ...   the same on a card with every published CUDA cell; models of random weights are written to DIR
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
mode=${1:---fast}
[ $# -eq 0 ] || shift
test_packages() { $python scripts/python_env.py installed test || $python -m pip install --quiet --disable-pip-version-check --editable '.[test]'; }
case $mode in
--fast)
    make lint
    make
    make ctest
    test_packages
    tests=$($python scripts/scope.py)
    [ -z "$tests" ] || $python -m pytest -q -x $tests
    ;;
--full)
    make lint
    make
    make ctest
    test_packages
    $python -m bw24 kernel-check
    $python -m bw24 gate demo --full
    $python -m bw24 gate
    mkdir -p build
    $python -m pytest -q tests --junitxml=build/tests.xml --deselect tests/test_faults.py::test_quick_faults
    $python scripts/skips.py build/tests.xml
    $python -m pytest -q tests/test_faults.py --faults -s
    ;;
--gpu)
    exec scripts/gpu.sh build/gpu short
    ;;
--gpu-perf)
    models=${1:-${TMPDIR:-/tmp}/bw24-gpu-models}
    [ $# -eq 0 ] || shift
    make -j"$(nproc)" lib CUDA=1
    exec $python scripts/perf_ci.py --backend cuda --published "$models" --make "$@"
    ;;
--perf)
    make
    exec $python scripts/perf_ci.py "$@"
    ;;
*)
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
