#!/usr/bin/env bash
# Run everything that one GPU can run in a few minutes, and write records to keep.
#
#   tests/benchmarks/card.sh FOLDER [SECONDS]
#
# In this order: a description of the machine, a smoke test of every engine, the times of operators, a snapshot and its diagnosis,
# scripts compared with their dry runs, the matrix of one card (with both edges of this card's capacity), the tests for GPUs, and a
# summary of the records. It ends within SECONDS (570); call it again with the same FOLDER to continue. It uses the machine's own
# torch and transformers. WHEELS names a folder with wheels of packages that are missing, and PYTHON an interpreter other than
# python3. BACKEND=cpu or simulate tries the script on a machine without a GPU. MATRIX names another matrix than the one for a card
# of this size (one-80gb, one-140gb).
set -uo pipefail

folder=${1:?usage: tests/benchmarks/card.sh FOLDER [SECONDS]}
limit=${2:-570}
python=${PYTHON:-python3}
backend=${BACKEND:-cuda}
mebibytes=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -1)
matrix=${MATRIX:-$( ((${mebibytes:-150000} < 100000)) && echo one-80gb || echo one-140gb)}
root=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
mkdir -p "$folder" && folder=$(cd "$folder" && pwd) || exit 4
log="$folder/log.txt"
worst=0

left() { echo $((limit - SECONDS)); }

# Run one step within the time that is left, print how long it took, and remember the worst exit code.
step() {
    local name=$1 most=$2 began=$SECONDS code
    shift 2
    ((most > $(left) - 20)) && most=$(($(left) - 20))
    if ((most < 5)); then
        echo "== $name: no time left" | tee -a "$log"
        worst=$((worst > 5 ? worst : 5))
        return
    fi
    timeout --signal=INT --kill-after=15 "$most" "$@" 2>&1 | tee -a "$log"
    code=${PIPESTATUS[0]}
    echo "== $name: exit $code after $((SECONDS - began)) s" | tee -a "$log"
    ((code > worst)) && worst=$code
}

if [[ -n ${WHEELS:-} ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl || exit 4
    export PYTHONPATH="$PYTHONPATH:$site"
fi

zeroplan=("$python" -m zeroplan)
step "machine" 60 bash -c "nvidia-smi 2>/dev/null; $python -c 'import sys, torch, transformers; print(sys.version); print(
\"torch\", torch.__version__, \"CUDA\", torch.version.cuda, \"cuDNN\", torch.backends.cudnn.version(), \"transformers\", transformers.__version__)'"
step "smoke" 150 "${zeroplan[@]}" verify --matrix "$root/tests/on_gpus/smoke.toml" --backend "$backend" --record-dir "$folder"
if [[ $backend == cuda && ! -s $folder/operators.csv ]]; then
    cd "$root" || exit 4
    step "operators" 90 "$python" -m tests.on_gpus.card_operators "$folder/operators.csv"
fi
if [[ $backend == cuda && -z $(ls "$folder"/*.snapshot.pickle 2>/dev/null) ]]; then
    job=(--model gpt2 --gpus 8 --stage 3 --seq-len 512)
    step "snapshot" 60 "${zeroplan[@]}" verify "${job[@]}" --backend cuda --as-rank 0 --snapshot "$folder" --record-dir "$folder"
    compgen -G "$folder/*.snapshot.pickle" >/dev/null && step "diagnose" 60 "${zeroplan[@]}" diagnose "$folder"/*.snapshot.pickle "${job[@]}"
fi
if [[ $backend == cuda ]]; then
    cd "$root" || exit 4
    step "scripts" 240 "$python" -m tests.on_gpus.card_scripts "$folder/scripts"
fi
step "matrix" 3600 "${zeroplan[@]}" verify --matrix "$matrix" --backend "$backend" --record-dir "$folder"
if [[ $backend == cuda ]] && "$python" -c 'import pytest' >/dev/null 2>&1; then
    step "tests" 200 "$python" -m pytest -q -p no:cacheprovider "$root/tests/verify/backends/test_on_gpus.py"
fi
if [[ $backend == cuda ]]; then
    cd "$root" || exit 4
    step "complete" 60 "$python" -m tests.on_gpus.gpu_check "$folder"/*.jsonl
    step "figures" 60 bash -c "$python -m tests.on_gpus.calibrate '$folder'/*.jsonl > '$folder/figures.toml'"
fi
exit "$worst"
