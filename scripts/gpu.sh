#!/bin/sh
# On a machine with an NVIDIA card: build, probe, kernel-check, the gates on tiny models, speed at real dimensions, and beside llama.cpp where its
# llama-bench is given. Writes OUT/*.jsonl and OUT/*.log.
# usage: scripts/gpu.sh OUT [short] [DIR of llama-bench]     short: one model, few widths (about 90 seconds with 16 cores)
set -eu
out=${1:?usage: scripts/gpu.sh OUT [short] [DIR of llama-bench]}
shift
short=
if [ "${1:-}" = short ]; then short=1; shift; fi
peer=${1:-}
python=${PYTHON:-python3}
models=${TMPDIR:-/tmp}/bw24-gpu-models
mkdir -p "$out" "$models"
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv > "$out/device.csv"
make lib CUDA=1 > "$out/make.log" 2>&1 || { tail -20 "$out/make.log" >&2; exit 1; }
failed=0
export PYTHONPATH="py${PYTHONPATH:+:$PYTHONPATH}"
$python -m bw24 probe --device cuda --json > "$out/probe.jsonl"
$python -m bw24 kernel-check --device cuda > "$out/kernel-check.log" 2>&1 || failed=1
tail -3 "$out/kernel-check.log"
for m in tests/fixtures/tiny/*.gguf; do
    $python -m bw24 gate "$m" --device cuda >> "$out/gate.log" 2>&1 || { failed=1; echo "gate: $m failed"; }
done
# shape, type of the layers, cut: dense, hybrid, mixtures
list="qwen3-8b:Q4_K qwen3-8b:NVFP4 qwen3-8b:Q8_0 qwen3.5-9b:NVFP4 qwen3.6-35b-a3b:IQ4_XS gemma4-26b-a4b:Q4_0 gemma4-31b:Q4_K"
rows="1,2,3,4,5,6,7,8,9,12,16,32"
depths="128,4096,16384"
if [ -n "$short" ]; then list="qwen3-8b:Q4_K"; rows="1,4,8"; depths="128,4096"; fi
for entry in $list; do
    shape=${entry%%:*}; type=${entry##*:}
    file="$models/$shape-$type.gguf"
    $python scripts/synth_model.py "$shape" --type "$type" --head Q4_K -o "$file"
    $python scripts/gpu_bench.py "$file" --rows "$rows" --depths "$depths" --cold -o "$out/speed.jsonl" || failed=1
    if [ -n "$peer" ]; then
        $python -m bw24 bench "$file" --device cuda --vs llama.cpp --peer-bin "$peer" --sizes 2048 --tokens 128 --json >> "$out/peer.jsonl" || failed=1
    fi
    rm -f "$file"
done
exit $failed
