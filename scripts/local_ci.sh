#!/usr/bin/env bash
# The checks before a push, with the current Python and a build in place.
#   scripts/local_ci.sh [--fast]     lint, build, and the C tests, kernels and tests that concern the change (scripts/scope.py): a minute at most
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
step() { printf '\n== %s (%ds)\n' "$*" "$SECONDS"; }
case $mode in
--fast)
    make lint
    make
    test_packages
    mkdir -p build/fast
    rm -f build/fast/*
    tests=$($python scripts/scope.py)
    files=$(grep -v '^--' <<< "$tests" || true)
    leave=$(grep '^--' <<< "$tests" || true)
    checked=
    if grep -q test_numerics <<< "$files"; then  # beside the tests: most of its time is the plain reference's, on one thread
        isa=$($python -m bw24 --version | sed 's/.*, \(.*\))/\1/')
        leave="$leave --deselect=tests/test_numerics.py::test_every_kernel_is_the_reference[$isa]"
        $python -m bw24 kernel-check --device cpu > build/fast/kernel-check.log 2>&1 &
        checked=$!
    fi
    ctests=$($python scripts/scope.py --c)
    [ -z "$ctests" ] || make -j"$(nproc)" ctest CTESTS="$ctests"
    # a process a file, as many at once as there are cores
    export LEAVE="$leave" PYTHON_TESTS="$python"
    status=0
    [ -z "$files" ] || xargs -P "$(nproc)" -I{} bash -c '
        log=build/fast/$(basename {}).log
        $PYTHON_TESTS -m pytest -q -x -p no:cacheprovider {} $LEAVE > "$log" 2>&1 && { echo "{}: $(tail -1 "$log")"; exit; }
        code=$?
        [ $code = 5 ] || { tail -40 "$log"; exit 1; }' <<< "$files" || status=1
    [ -z "$checked" ] || wait $checked || status=1
    [ -z "$checked" ] || tail -2 build/fast/kernel-check.log
    exit $status
    ;;
--full)
    step "lint, build, C tests"
    make lint
    make
    make -j"$(nproc)" ctest
    test_packages
    step "kernel-check"
    $python -m bw24 kernel-check
    step "gates"
    $python -m bw24 gate demo --full
    $python -m bw24 gate
    step "tests"
    mkdir -p build
    isa=$($python -m bw24 --version | sed 's/.*, \(.*\))/\1/')  # whose kernels kernel-check has just compared
    $python -m pytest -q tests --junitxml=build/tests.xml --deselect tests/test_faults.py::test_quick_faults \
        --deselect "tests/test_numerics.py::test_every_kernel_is_the_reference[$isa]"
    $python scripts/skips.py build/tests.xml
    step "seeded faults"
    $python -m pytest -q tests/test_faults.py --faults -s --deselect tests/test_faults.py::test_quick_faults
    step "all green"
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
