#!/usr/bin/env bash
# Everything that a machine with an NVIDIA GPU is asked, by one command; docs/gpu.md has the questions and the answers.
#
#   worker/cuda/gpu.sh pack [DIR]         here: build and strip what travels (default target/gpu): cox, and two test binaries
#   worker/cuda/gpu.sh run [DIR] [OUT]    there: every step with a time limit; what it printed in OUT/NN-name.txt, a table in OUT/steps.txt
#
# ONLY="tests 3b" runs steps whose names contain one of these words; without it all of them. A step that fails or hangs does not keep
# the next one from running. The repository (fixtures, configs) is where this script lies. Nothing is downloaded.
set -uo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

pack() {
    set -e
    cd "$repository"
    mkdir -p "$1"
    # The path of the binary whose message has this in it.
    built() { sed -n "s/.*\"executable\":\"\([^\"]*$1[^\"]*\)\".*/\1/p" | tail -1; }
    local tests
    tests=$(cargo test --locked -p coxswain-cuda --no-run --message-format=json)
    install -m 755 "$(built '\/coxswain_cuda-' <<<"$tests")" "$1/operations"
    install -m 755 "$(built '\/gpu-' <<<"$tests")" "$1/gpu"
    install -m 755 "$(cargo build --release --locked -p coxswain --features cuda --message-format=json | built '\/cox')" "$1/cox"
    strip "$1/operations" "$1/gpu" "$1/cox"
    xz -T0 -6 -f "$1/operations" "$1/gpu" "$1/cox"
    ls -l "$1"
}

# The libraries of a Python environment with PyTorch, where the system has none of its own.
find_libraries() {
    local site
    export CUDA_PATH=${CUDA_PATH:-/usr/local/cuda}
    ldconfig -p | grep -q libnvrtc && ldconfig -p | grep -q libnccl && return
    site=$(python3 -c 'import site; print(site.getsitepackages()[0])' 2>/dev/null)/nvidia
    [ -d "$site" ] || return 0
    LD_LIBRARY_PATH=$(find "$site" -name 'lib*.so*' -printf '%h\n' | sort -u | paste -sd:):${LD_LIBRARY_PATH:-}
    export LD_LIBRARY_PATH
    # PyTorch's wheels have no headers for tensor cores (crt/); those of nvidia-cuda-crt lie beside them.
    local header
    header=$(find "$site" -path '*/crt/mma.h' | head -1)
    [ -f "$CUDA_PATH/include/crt/mma.h" ] || [ -z "$header" ] || export CUDA_PATH=${header%/include/*}
}

# step NAME SECONDS COMMAND..: runs it, keeps what it says, and goes on.
number=0
step() {
    local name=$1 limit=$2 began code file
    shift 2
    number=$((number + 1))
    wanted "$name" || return 0
    file=$(printf '%s/%02d-%s.txt' "$out" "$number" "$name")
    began=$SECONDS
    timeout --kill-after=10 "$limit" "$@" >"$file" 2>&1 </dev/null
    code=$?
    printf '%2d %-24s exit %3d %5d s of %d\n' "$number" "$name" "$code" $((SECONDS - began)) "$limit" | tee -a "$out/steps.txt"
}

wanted() {
    local word
    [ -n "${ONLY:-}" ] || return 0
    for word in $ONLY; do case "$1" in *"$word"*) return 0 ;; esac; done
    return 1
}

here() {
    nvidia-smi
    ldconfig -p | grep -E 'libcuda|nvrtc|nccl'
    env | grep -E '^(CUDA|NCCL|LD_LIBRARY)'
    "$bin/cox" gpu
}

# Two ranks on one GPU, over TCP, as a launcher starts them.
two_ranks() {
    "$bin/cox" run configs/quickstart.yaml --device cuda --nproc-per-node 2 launch.collectives=ring \
        train.steps=20 run.output_dir="$scratch/two"
}

# Step time and peak memory of the 3B shape, beside the driver's own view of the GPU: shape_3b MICRO_BATCH STEPS.
shape_3b() {
    local watching code
    "$bin/cox" gpu --watch --json >"$out/3b-nvml.json" 2>&1 &
    watching=$!
    "$bin/cox" worker --config configs/qwen2.5-vl-3b.yaml --device cuda model.path="$model_3b" run.output_dir="$scratch/3b" \
        train.epochs= train.steps="$2" train.global_batch=8 train.micro_batch="$1" \
        data.path=configs/assets/metaworld-mini data.min_pixels=100352 data.max_pixels=100352
    code=$?
    kill "$watching"
    cp "$scratch/3b/summary.json" "$out/3b-summary-$1.json"
    cp "$scratch/3b/memory/rank-0000.jsonl" "$out/3b-memory-$1.jsonl"
    rm -rf "$scratch/3b"
    return "$code"
}

run() {
    local packed=$1
    out=$2 scratch=$(mktemp -d) bin=$scratch
    trap 'rm -rf "$scratch"' EXIT
    mkdir -p "$out"
    cd "$repository" || exit 1
    export COX_REPOSITORY=$repository
    for name in cox gpu operations; do
        if [ -f "$packed/$name.xz" ]; then xz -dc "$packed/$name.xz" >"$bin/$name"; else cp "$packed/$name" "$bin/$name"; fi || exit 1
        chmod +x "$bin/$name"
    done
    find_libraries
    # Outlives this call, as compiled kernels do: steps may be asked for in several.
    model_3b=${TMPDIR:-/tmp}/coxswain-3b
    export out scratch bin model_3b
    export -f here two_ranks shape_3b
    local test=(--nocapture --test-threads=1)
    step here 60 bash -c here
    step tests-operations 180 "$bin/operations" "${test[@]}"
    step tests-golden 180 "$bin/gpu" golden:: "${test[@]}"
    step tests-curve 180 "$bin/gpu" curve:: "${test[@]}"
    step tests-nccl 300 "$bin/gpu" worlds:: "${test[@]}"
    step selftest 180 "$bin/cox" selftest --device cuda
    step selftest-again 120 "$bin/cox" selftest --device cuda
    step two-ranks-ring 120 bash -c two_ranks
    step 3b-make 180 bash -c '[ -d "$model_3b" ] || "$bin/cox" data make-checkpoint --like configs/assets/qwen2.5-vl-3b \
        --tokenizer configs/assets/tiny-vla --out "$model_3b"'
    step 3b-compile 570 bash -c 'shape_3b 8 2'
    step 3b-batch-8 240 bash -c 'shape_3b 8 20'
    step 3b-batch-2 240 bash -c 'shape_3b 2 20'
    step products 300 env COXSWAIN_PRODUCTS=simple_cyclic,tma "$bin/gpu" products:: "${test[@]}"
    cat "$out/steps.txt"
}

case "${1:-}" in
    pack) pack "${2:-$repository/target/gpu}" ;;
    run) run "$(realpath "${2:-$repository/target/gpu}")" "$(realpath -m "${3:-gpu-results}")" ;;
    *) sed -n '2,8p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
