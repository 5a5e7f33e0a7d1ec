#!/usr/bin/env bash
# Everything that a machine with an NVIDIA GPU is asked, by one command; docs/gpu.md has the questions and the answers.
#
#   worker/cuda/gpu.sh pack [FILE]     here: build what travels, and put all of it into one file (default target/gpu/coxswain-gpu.tar)
#   worker/cuda/gpu.sh run [OUT]       there, below where the file was unpacked: every step with a time limit; what each printed in
#                                      OUT/NN-name.txt, how it ended in OUT/steps.txt, and all of it in OUT.tar.xz after every step
#
# ONLY="tests 3b" runs steps whose names contain one of these words; SECONDS_LEFT=600 is what all steps may take together: a step that
# would begin later is left out, with a line. A step that fails or hangs does not keep the next one from running. Nothing is downloaded
# there. SHAPE=small rehearses every step with a small model, on a software GPU, say; on a machine without a GPU each step ends with the
# line that says what is missing. PROFILE=dev packs what `cargo build` makes.
set -uo pipefail
# Kernels come compiled for these GPUs; ARCHITECTURES= for none.
ARCHITECTURES=${ARCHITECTURES-sm_80 sm_89 sm_90}
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# One image of 128 tokens a sample.
readonly SHAPE_3B="data.min_pixels=100352 data.max_pixels=100352"
# What shape() runs cox with: nothing, or the software GPU that counts.
counting=()

# ---- Here

# NVIDIA's headers, for machines that have none: wheels of PyPI, under the licence that lies in each (CUDA's EULA), which is packed with
# them. They travel to machines of whoever packs; the pack is not for others. Of each: where it is from, and where its headers lie.
readonly HEADERS_12="nvidia-cuda-runtime-cu12==12.8.* nvidia-cuda-nvcc-cu12==12.8.* nvidia-cuda-cccl-cu12==12.8.*"
readonly HEADERS_13="nvidia-cuda-runtime==13.0.* nvidia-cuda-crt==13.0.* nvidia-cuda-cccl==13.0.*"
# The compiler: kernels are compiled by it here, and with NVRTC=yes it travels, too (30 MB packed). What CUDA 12's has made, drivers of 12
# and 13 load.
readonly COMPILER="nvidia-cuda-nvrtc-cu12==12.8.*"

die() { printf 'gpu.sh: %s\n' "$*" >&2; exit 1; }

# wheels DIR REQUIREMENTS..: downloaded and unpacked below DIR.
wheels() {
    local dir=$1 wheel
    shift
    mkdir -p "$dir/wheels"
    python3 -m pip download --quiet --no-deps --only-binary :all: --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --dest "$dir/wheels" "$@" || return 1
    for wheel in "$dir"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$dir"; done
}

# headers DIR MAJOR REQUIREMENTS..: one include folder, with the licence.
headers() {
    local into=$1/cuda-$2 from
    from=$(mktemp -d)
    shift 2
    # shellcheck disable=SC2086
    if wheels "$from" "$@"; then
        mkdir -p "$into/include"
        find "$from/nvidia" -type d -name include ! -path '*/nvvm/*' -exec cp -r {}/. "$into/include" \;
        cp "$(find "$from" -iname 'license*.txt' | head -1)" "$into/LICENSE.txt"
        # What nobody here includes, and most of the size.
        rm -rf "$into"/include/{,cccl/}{cub,thrust}
    else
        echo "gpu.sh: no headers of CUDA ${into##*-}: a machine without them cannot compile kernels" >&2
    fi
    rm -rf "$from"
}

compiler() {
    local from
    from=$(mktemp -d)
    # shellcheck disable=SC2086
    if wheels "$from" $COMPILER; then
        mkdir -p "$1"
        find "$from/nvidia" -name 'libnvrtc*.so*' ! -name '*.alt.*' -exec cp {} "$1" \;
        cp "$(find "$from" -iname 'license*.txt' | head -1)" "$1/LICENSE.txt"
    fi
    rm -rf "$from"
}

# kernels STAGE NVRTC: what the programs of the pack ask for on the software GPU, compiled for the GPUs of ARCHITECTURES. Two layers of a
# model have the kernels of all.
kernels() {
    local stage=$1 nvrtc=$2 asked work software=$repository/worker/cuda/software-gpu/run records
    asked=$(mktemp -d)
    work=$asked/work
    mkdir "$work"
    cp Cargo.toml "$work/"
    cp -r configs "$work/"
    python3 - "$work/configs/assets/qwen2.5-vl-3b/config.json" <<'PYTHON'
import json, sys
settings = json.load(open(sys.argv[1]))
settings["num_hidden_layers"] = 2
settings["vision_config"].update(depth=2, fullatt_block_indexes=[1])
json.dump(settings, open(sys.argv[1], "w"))
PYTHON
    (
        # What fails here is asked for less, and compiled there.
        set +e
        cd "$work" || exit
        export GPU_CUBECL=none COX_REPOSITORY=$repository out=$asked scratch=$asked bin=$stage/bin model=$asked/model
        shape_overrides=$SHAPE_3B counting=("$software" --count)
        "$bin/cox" data make-checkpoint --like configs/assets/qwen2.5-vl-3b --tokenizer configs/assets/tiny-vla --out "$model"
        for COX_MATMUL in library named; do
            export COX_MATMUL
            shape counted 8 2
            shape counted 2 2
            "$software" --capability 9.0 "$bin/operations" --test-threads 1
            "$software" --capability 9.0 "$bin/gpu" --test-threads 1 first:: golden::
        done
    ) >"$asked/log" 2>&1 || true
    for records in "$work"/target/kernels/*/; do
        [ -d "$records" ] || { echo "gpu.sh: no kernels come compiled: $(tail -1 "$asked/log")" >&2; break; }
        # shellcheck disable=SC2086
        python3 "$repository/worker/cuda/kernels.py" "$records" "$stage/kernels" $ARCHITECTURES --nvrtc "$nvrtc" \
            --include "$stage/cuda/cuda-12/include"
    done
    rm -rf "$asked"
}

pack() {
    set -e
    local profile=${PROFILE:-release} tests stage name
    local file=$1
    cd "$repository"
    mkdir -p "$(dirname "$file")"
    stage=$(mktemp -d)/coxswain
    mkdir -p "$stage/bin"
    # The path of the binary whose message has this in it.
    built() { sed -n "s/.*\"executable\":\"\([^\"]*$1[^\"]*\)\".*/\1/p" | tail -1; }
    # All of the workspace's: what `cargo test` has built is not built again with other features.
    tests=$(cargo test --locked --workspace --no-run --message-format=json)
    install -m 755 "$(built '\/coxswain_cuda-' <<<"$tests")" "$stage/bin/operations"
    install -m 755 "$(built '\/gpu-' <<<"$tests")" "$stage/bin/gpu"
    name=$(cargo build --profile "$profile" --locked -p coxswain --features cuda --message-format=json | built '\/cox')
    install -m 755 "$name" "$stage/bin/cox"
    strip "$stage"/bin/*
    # What tests and steps read, where they look for it: below a folder with a Cargo.toml, which is where cubecl keeps what it compiles.
    mkdir -p "$stage/worker/cuda" "$stage/integration-tests"
    cp Cargo.toml LICENSE "$stage/"
    cp worker/cuda/{gpu.sh,peer.py} "$stage/worker/cuda/"
    cp -r configs "$stage/"
    cp -r integration-tests/{fixtures,bench} "$stage/integration-tests/"
    # shellcheck disable=SC2086
    headers "$stage/cuda" 12 $HEADERS_12
    # shellcheck disable=SC2086
    headers "$stage/cuda" 13 $HEADERS_13
    compiler "$stage/cuda/nvrtc"
    if [ -n "$ARCHITECTURES" ]; then kernels "$stage" "$stage/cuda/nvrtc"; fi
    if [ "${NVRTC:-}" != yes ]; then rm -rf "$stage/cuda/nvrtc"; fi
    # The programs are of the same crates: a window that holds all of them finds the third of it that comes twice. It takes 3 GB of
    # memory here, and 256 MiB to unpack.
    tar -C "$(dirname "$stage")" -c "$(basename "$stage")" | xz --lzma2=preset=6,dict=256MiB >"$file.xz"
    rm -rf "$(dirname "$stage")"
    ls -l "$file.xz"
    [ "$(stat -c %s "$file.xz")" -le $((60 << 20)) ] || die "more than 60 MiB: what has grown?"
    echo "there: tar xf $(basename "$file.xz") && coxswain/worker/cuda/gpu.sh run"
}

# ---- There

# Libraries of a Python environment with PyTorch, where the system has none of its own; headers of the pack, where nobody has any.
find_libraries() {
    local site name version
    if [ -n "${GPU_MODE:-}" ]; then return; fi # The software GPU has its own.
    export CUDA_PATH=${CUDA_PATH:-/usr/local/cuda}
    site=$(python3 -c 'import site; print(site.getsitepackages()[0])' 2>/dev/null)/nvidia
    for name in libnvrtc libnccl libcublasLt; do
        if ldconfig -p | grep -q "$name" || [ ! -d "$site" ]; then continue; fi
        LD_LIBRARY_PATH=$(find "$site" -name "$name.so*" -printf '%h\n' | sort -u | paste -sd:):${LD_LIBRARY_PATH:-}
    done
    if [ -d "$repository/cuda/nvrtc" ]; then LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}:$repository/cuda/nvrtc; fi
    export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}
    # Headers go with the compiler that will be loaded.
    if [ -f "$CUDA_PATH/include/crt/mma.h" ] && [ -f "$CUDA_PATH/include/cuda_runtime.h" ]; then return; fi
    version=$(python3 - <<'PYTHON' 2>/dev/null
import ctypes
for name in ("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"):
    try:
        library = ctypes.CDLL(name)
    except OSError:
        continue
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    print(major.value)
    break
PYTHON
    )
    if [ -d "$repository/cuda/cuda-${version:-12}" ]; then export CUDA_PATH=$repository/cuda/cuda-${version:-12}; fi
}

# step NAME SECONDS COMMAND..: runs it, keeps what it says, and goes on.
number=0
step() {
    local name=$1 limit=$2 began code file left
    shift 2
    number=$((number + 1))
    wanted "$name" || return 0
    left=$((SECONDS_LEFT - SECONDS))
    if [ "$left" -lt 10 ]; then
        printf '%2d %-18s left out: of %d s nothing is left; ONLY=%s runs it\n' "$number" "$name" "$SECONDS_LEFT" "$name" |
            tee -a "$out/steps.txt"
        return 0
    fi
    if [ "$limit" -gt "$left" ]; then limit=$left; fi
    file=$(printf '%s/%02d-%s.txt' "$out" "$number" "$name")
    began=$SECONDS
    timeout --kill-after=10 "$limit" "$@" >"$file" 2>&1 </dev/null
    code=$?
    printf '%2d %-18s exit %3d %5d s of %d%s\n' "$number" "$name" "$code" $((SECONDS - began)) "$limit" "$(skips "$file")" |
        tee -a "$out/steps.txt"
    if [ "$code" != 0 ]; then tail -n 10 "$file" | cut -c 1-200 | sed 's/^/       /' | tee -a "$out/steps.txt"; fi
    keep
}

# A test that finds no GPU passes: that has to show.
skips() {
    local why
    why=$(grep -m1 -o 'skipped: .*' "$1") && printf ', %s' "${why:0:150}"
}

wanted() {
    local word
    [ -n "${ONLY:-}" ] || return 0
    for word in $ONLY; do case "$1" in *"$word"*) return 0 ;; esac; done
    return 1
}

# All that is known so far as one file, whole or absent: results, and what was compiled and tuned.
keep() {
    local kept=() place
    for place in target/kernels target/autotune target/cuda; do
        if [ -d "$repository/$place" ]; then kept+=(-C "$repository" "$place"); fi
    done
    tar -c -C "$(dirname "$out")" "$(basename "$out")" "${kept[@]}" 2>/dev/null | xz -T0 -1 >"$out.tar.xz.new" &&
        mv "$out.tar.xz.new" "$out.tar.xz"
}

here() {
    uname -sr
    nproc
    free -g | head -2
    nvidia-smi || echo "no nvidia-smi"
    ldconfig -p | grep -E 'libcuda|nvrtc|nccl|cublasLt'
    env | grep -E '^(CUDA|NCCL|LD_LIBRARY|COX)'
    command -v nsys ncu
    python3 -c 'import torch; print("PyTorch", torch.__version__, torch.version.cuda, torch.cuda.is_available())' || true
    "$bin/cox" --version
    "$bin/cox" gpu
}

# Two ranks on one GPU, over TCP, as a launcher starts them.
two_ranks() {
    "$bin/cox" run configs/quickstart.yaml --device cuda --nproc-per-node 2 launch.collectives=ring \
        train.steps="${1:-20}" run.output_dir="$scratch/two"
}

# Step time and peak memory of the shape, beside the driver's own view of the GPU: shape NAME BATCH STEPS [OVERRIDES..].
shape() {
    local name=$1 batch=$2 steps=$3 watching code
    shift 3
    [ -d "$model" ] || { echo "no model: step 3b-make has not made $model"; return 1; }
    "$bin/cox" gpu --watch --json >"$out/$name-nvml.json" 2>&1 &
    watching=$!
    "${counting[@]}" "$bin/cox" worker --config configs/qwen2.5-vl-3b.yaml --device cuda model.path="$model" run.output_dir="$scratch/$name" \
        train.epochs= train.steps="$steps" train.global_batch="$batch" train.micro_batch="$batch" \
        data.path=configs/assets/metaworld-mini $shape_overrides "$@"
    code=$?
    kill "$watching" 2>/dev/null
    cp "$scratch/$name/summary.json" "$out/$name-summary.json" 2>/dev/null
    cp "$scratch/$name/memory/rank-0000.jsonl" "$out/$name-memory.jsonl" 2>/dev/null
    rm -rf "${scratch:?}/$name"
    return "$code"
}

# By kernel, where NVIDIA's tools are; otherwise how long each phase took.
profile() {
    if command -v nsys >/dev/null; then
        export -f shape
        nsys profile --stats=true --force-overwrite=true -o "$out/profile" bash -c "shape profile $1 6"
    else
        echo "no nsys here: phases of a step instead"
        shape profile "$1" 6 --log debug
    fi
}

run() {
    out=$1 scratch=$(mktemp -d)
    local name test=(--nocapture --test-threads=1)
    SECONDS_LEFT=${SECONDS_LEFT:-600}
    trap 'rm -rf "$scratch"' EXIT
    mkdir -p "$out"
    cd "$repository" || exit 1
    bin=$repository/bin
    for name in cox gpu operations; do [ -x "$bin/$name" ] || die "$bin/$name is missing: unpack what gpu.sh pack has made"; done
    export COX_REPOSITORY=$repository
    if [ -d "$repository/kernels" ]; then export COX_KERNELS=$repository/kernels; fi
    find_libraries
    like=configs/assets/qwen2.5-vl-3b batch=8 more=32 steps=20 peer=() shape_overrides=$SHAPE_3B
    if [ "${SHAPE:-}" = small ]; then
        # A model of kilobytes, two samples: every line of this script, not a figure.
        like=configs/assets/tiny-vla batch=2 more=4 steps=2 peer=(--small)
        shape_overrides="data.min_pixels=3136 data.max_pixels=3136 expert.width=32 expert.layers=2 expert.heads=2 lora.rank=8"
    fi
    # Outlives this call, as compiled kernels do: steps may be asked for in several.
    model=${TMPDIR:-/tmp}/coxswain-${SHAPE:-3b}
    export out scratch bin like model shape_overrides batch
    export -f here two_ranks shape profile

    step here 60 bash -c here
    # The denominator stands even if ours fails.
    step peer-eager 150 python3 worker/cuda/peer.py "${peer[@]}" --out "$out/peer-eager.json"
    step peer-no-hooks 90 python3 worker/cuda/peer.py "${peer[@]}" --no-hooks --out "$out/peer-no-hooks.json"
    step peer-compiled 240 python3 worker/cuda/peer.py "${peer[@]}" --no-hooks --compile --out "$out/peer-compiled.json"
    # One of each, in processes of their own: what faults takes its process along.
    step first-kernel 60 "$bin/gpu" first::an_elementwise_kernel "${test[@]}"
    step first-named 60 env COX_MATMUL=named "$bin/gpu" first::a_product "${test[@]}"
    step first-library 60 env COX_MATMUL=library "$bin/gpu" first::a_product "${test[@]}"
    step library 90 "$bin/gpu" products::library "${test[@]}"
    step operations 180 "$bin/operations" "${test[@]}"
    step golden 180 "$bin/gpu" golden:: "${test[@]}"
    step 3b-make 180 bash -c '[ -d "$model" ] || "$bin/cox" data make-checkpoint --like "$like" \
        --tokenizer configs/assets/tiny-vla --out "$model"'
    step 3b-library 400 bash -c "COX_MATMUL=library shape 3b-library $batch $steps"
    step 3b-named 300 bash -c "COX_MATMUL=named shape 3b-named $batch $steps"
    step 3b-tuned 570 bash -c "COX_MATMUL=tuned shape 3b-tuned $batch $steps"
    step 3b-profile 200 bash -c "profile $batch"
    step 3b-larger 240 bash -c "shape 3b-larger $more $steps"
    step 3b-smaller 240 bash -c "shape 3b-smaller 2 $steps"
    step selftest 180 "$bin/cox" selftest --device cuda
    step two-ranks-ring 120 bash -c "two_ranks $steps"
    step curve 180 "$bin/gpu" curve:: "${test[@]}"
    step products 300 env COXSWAIN_PRODUCTS=simple_cyclic,tma "$bin/gpu" products::products_are_right "${test[@]}"
    step nccl 300 "$bin/gpu" worlds:: "${test[@]}"
    keep
    cat "$out/steps.txt"
    echo "all of it: $out.tar.xz"
}

case "${1:-}" in
    pack) pack "$(realpath -m "${2:-$repository/target/gpu/coxswain-gpu.tar}")" ;;
    run) run "$(realpath -m "${2:-gpu-results}")" ;;
    *) sed -n '2,15p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
