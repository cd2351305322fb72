#!/bin/sh
# On a machine with an NVIDIA card: build, gates on tiny models, `bw24 report` (probe, kernel-check of both classes, gate and speed of the demo model),
# speed at real dimensions, and beside llama.cpp where its llama-bench is given. Writes OUT/*.jsonl, OUT/*.log and OUT/report.md.
# usage: scripts/gpu.sh OUT [short] [DIR of llama-bench]     short: one model, few widths (at most 3 minutes, of which the build takes most)
set -eu
out=${1:?usage: scripts/gpu.sh OUT [short] [DIR of llama-bench]}
shift
short=
if [ "${1:-}" = short ]; then short=1; shift; fi
peer=${1:-}
python=${PYTHON:-python3}
models=${TMPDIR:-/tmp}/bw24-gpu-models
began=$(date +%s)
said() { echo "[$(($(date +%s) - began)) s] $*"; }
mkdir -p "$out/gates" "$models"
rm -f "$out/gates"/*
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv > "$out/device.csv"
# shape, type of the layers: dense, hybrid, mixtures
list="qwen3-8b:Q4_K qwen3-8b:NVFP4 qwen3-8b:Q8_0 qwen3.5-9b:NVFP4 qwen3.6-35b-a3b:IQ4_XS gemma4-26b-a4b:Q4_0 gemma4-31b:Q4_K"
rows="1,2,3,4,5,6,7,8,9,12,16,32"
depths="128,4096,16384"
cold=--cold
if [ -n "$short" ]; then list="qwen3-8b:Q4_K"; rows="1,4,8"; depths="128,4096"; cold=; fi
synthesise() { $python scripts/synth_model.py "${1%%:*}" --type "${1##*:}" --head Q4_K -o "$2"; }
make -j"$(nproc)" lib CUDA=1 > "$out/make.log" 2>&1 || { tail -20 "$out/make.log" >&2; exit 1; }
said "built"
failed=0
export PYTHONPATH="py${PYTHONPATH:+:$PYTHONPATH}"
# the gates beside the report's kernel-check, most of whose time the plain reference takes
ls tests/fixtures/tiny/*.gguf | OUT=$out PY=$python xargs -P 4 -I{} sh -c '
    log=$OUT/gates/$(basename {} .gguf).log
    $PY -m bw24 gate {} --device cuda > "$log" 2>&1 || echo "gate: {} failed, see $log"' > "$out/gates.failed" &
gates=$!
$python -m bw24 report --device cuda -o "$out/report.md" || failed=1
wait $gates
if [ -s "$out/gates.failed" ]; then cat "$out/gates.failed"; failed=1; fi
said "gates of $(ls "$out/gates" | wc -l) tiny models; $(grep '^Verdict' "$out/report.md")"
for entry in $list; do
    file="$models/${entry%%:*}-${entry##*:}.gguf"
    synthesise "$entry" "$file"
    $python scripts/gpu_bench.py "$file" --rows "$rows" --depths "$depths" $cold -o "$out/speed.jsonl" || failed=1
    if [ -n "$peer" ]; then
        $python -m bw24 bench "$file" --device cuda --vs llama.cpp --peer-bin "$peer" --sizes 2048 --tokens 128 --json >> "$out/peer.jsonl" || failed=1
    fi
    rm -f "$file"
    said "${entry}"
done
exit $failed
