#!/usr/bin/env bash
# All that is measured on a GPU, in under five minutes: correctness, kernels, an 8B-shaped model, handoff.
#
#   benchmarks/gpu/run.sh [--dry-run] [--steps "correctness kernels model handoff"] [--out FOLDER]
#
# Needs a clone and a Python with torch, triton, numpy and safetensors (PYTHON=…; .venv's if there is one); says
# at once what is missing. --dry-run takes toy shapes, and Triton's interpreter where there is no GPU. Rows, log
# and table stay in FOLDER. Exit status: 0; 1 something is wrong; 2 cannot run; 3 a step broke off.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

steps="correctness kernels model handoff"
toy=""
out=""
while (($#)); do
    case "$1" in
        --dry-run) toy="--toy" ;;
        --steps) steps="${2:?--steps needs names}"; shift ;;
        --out) out="${2:?--out needs a folder}"; shift ;;
        *) sed -n '2,9p' "$0" >&2; exit 2 ;;
    esac
    shift
done

python="${PYTHON:-}"
if [[ -z "$python" ]]; then
    python=python3
    [[ -x .venv/bin/python ]] && python=.venv/bin/python
fi
out="${out:-$(mktemp -d "${TMPDIR:-/tmp}/baton-gpu.XXXXXX")}"
mkdir -p "$out"
rm -f "$out"/*.jsonl "$out/run.log" "$out/table.md"
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE

"$python" -m benchmarks.gpu.needs || exit 2
if [[ -z "$toy" ]]; then
    "$python" - <<'END' || exit 2
import sys, torch
if not torch.cuda.is_available():
    sys.exit("torch sees no GPU here; --dry-run goes without")
name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
print(f"{name}, compute capability {major}.{minor}, CUDA {torch.version.cuda}")
END
fi

# seconds; together, with the starts of Python, less than five minutes
declare -A module=([correctness]=benchmarks.gpu.correctness [kernels]=benchmarks.kernels
    [model]=benchmarks.gpu.model [handoff]=benchmarks.gpu.handoff)
declare -A limit=([correctness]=100 [kernels]=80 [model]=70 [handoff]=30)
if [[ -n "$toy" ]]; then # the interpreter on a CPU, which others may use, too
    for step in "${!limit[@]}"; do limit[$step]=$((4 * limit[$step])); done
fi
statuses=()
for step in $steps; do
    [[ -n "${module[$step]:-}" ]] || { echo "no step is called $step" >&2; exit 2; }
done
for step in $steps; do
    started=$SECONDS
    echo "== $step, at most ${limit[$step]} s"
    timeout --kill-after=5 "${limit[$step]}" \
        "$python" -m "${module[$step]}" $toy --rows "$out/$step.jsonl" 2>&1 | tee -a "$out/run.log"
    status=${PIPESTATUS[0]}
    echo "== $step: status $status after $((SECONDS - started)) s"
    statuses+=("$step=$status")
done
echo
"$python" -m benchmarks.gpu.summary "$out" "${statuses[@]}"
status=$?
echo "rows, log and table: $out"
exit $status
