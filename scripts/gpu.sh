#!/bin/sh
# On a machine with an NVIDIA card: build, kernel-check, the gates on tiny models, speed at real dimensions. Writes OUT/*.jsonl and OUT/*.log.
# usage: scripts/gpu.sh OUT [short]     short: one model, few widths (about 90 seconds with 16 cores)
set -eu
out=${1:?usage: scripts/gpu.sh OUT [short]}
short=${2:-}
python=${PYTHON:-python3}
models=${TMPDIR:-/tmp}/bw24-gpu-models
mkdir -p "$out" "$models"
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv > "$out/device.csv"
make lib CUDA=1 > "$out/make.log" 2>&1 || { tail -20 "$out/make.log" >&2; exit 1; }
failed=0
export PYTHONPATH="py${PYTHONPATH:+:$PYTHONPATH}"
$python -m bw24 kernel-check --backend cuda > "$out/kernel-check.log" 2>&1 || failed=1
tail -3 "$out/kernel-check.log"
for m in tests/fixtures/tiny/*.gguf; do
    $python -m bw24 gate "$m" --backend cuda >> "$out/gate.log" 2>&1 || { failed=1; echo "gate: $m failed"; }
done
types="Q4_K NVFP4 Q8_0"
rows="1,2,3,4,5,6,7,8,9,12,16,32"
depths="128,4096,16384"
if [ -n "$short" ]; then types="Q4_K"; rows="1,4,8"; depths="128,4096"; fi
for t in $types; do
    $python scripts/synth_model.py qwen3-8b --type "$t" --head Q4_K -o "$models/8b-$t.gguf"
    $python scripts/gpu_bench.py "$models/8b-$t.gguf" --rows "$rows" --depths "$depths" -o "$out/speed.jsonl"
    rm -f "$models/8b-$t.gguf"
done
exit $failed
