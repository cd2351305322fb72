#!/usr/bin/env bash
# Builds dist/: a wheel with the library and the demo model inside, a source archive, SHA256SUMS, NOTES.md; then tries the wheel in a fresh environment
# without a compiler. usage: scripts/release.sh [--dirty]   --dirty: try it out on a tree with changes; the archive holds the committed state
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
unset PYTHONPATH BW24_LIBRARY
[ -z "$(git status --porcelain --untracked-files=no)" ] || [ "${1:-}" = --dirty ] || { echo "release: the tree has changes that are not committed" >&2; exit 2; }
version=$($python -c 'import configparser; c = configparser.ConfigParser(); c.read("setup.cfg"); print(c["metadata"]["version"])')
notes=$(awk -v v="$version" '$0 ~ "^## .*" v {found = 1; print; next} /^## / {found = 0} found' CHANGELOG.md)
[ -n "$notes" ] || { echo "release: CHANGELOG.md has no section for $version" >&2; exit 2; }
rm -rf dist
mkdir -p dist
platform=$($python scripts/wheel_tag.py py/bw24/libbw24.so)
$python -m pip wheel --quiet --no-deps -w dist . --config-settings=--build-option=--plat-name="$platform"
wheel=$(ls dist/*.whl)
git archive --format=tar.gz --prefix="bw24-$version/" -o "dist/bw24-$version.tar.gz" HEAD
printf '%s\n' "$notes" > dist/NOTES.md

try=$(mktemp -d)
trap 'rm -rf "$try"' EXIT
$python -m venv "$try/venv"
"$try/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel"
(cd "$try" && env -i HOME="$try" PATH="$try/venv/bin" "$try/venv/bin/bw24" gen -m demo -n 16 -p "def add(a, b):") > "$try/out" 2> "$try/err" ||
    { cat "$try/err" >&2; echo "release: the wheel does not run" >&2; exit 1; }
[ -s "$try/out" ] || { echo "release: the wheel wrote nothing" >&2; exit 1; }
mkdir "$try/source"
tar -xzf "dist/bw24-$version.tar.gz" -C "$try/source"
make -s -C "$try/source/bw24-$version" lib CUDA=0 PYTHON="$python" > "$try/make.log" 2>&1 || { tail -20 "$try/make.log" >&2; echo "release: the source archive does not build" >&2; exit 1; }
(cd dist && sha256sum ./*.whl ./*.tar.gz > SHA256SUMS)
echo "release $version: $(cd dist && ls -1 | tr '\n' ' ')"
