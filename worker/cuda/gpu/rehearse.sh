#!/usr/bin/env bash
# A call as the machine would have it, under the hardest terms, on a software GPU:
#
#   worker/cuda/gpu/rehearse.sh small PACK     every step of the call, executed, with a model of kilobytes
#   worker/cuda/gpu/rehearse.sh count PACK     three steps of the 3B shape, nothing computed, with the kernels that came compiled
#
# An empty folder with nothing but the tracked files and the pack, an empty output folder, no network, no Rust, on PATH nothing beyond
# Debian's base and Python; killed after LIMIT (300) seconds. Then what would come back is counted. The software GPU's compiler is the one
# thing more: it stands for the driver's machine code.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
mode=${1:-} pack=$(realpath "${2:?a pack, of pack.py}") limit=${LIMIT:-300}
terms=$(mktemp -d)
trap 'rm -rf "$terms"' EXIT
mkdir -p "$terms/tree/target/gpu" "$terms/out" "$terms/bin" "$terms/home"
(cd "$repository" && git ls-files -z | tar -c --null -T - | tar -x -C "$terms/tree")
cp "$pack" "$terms/tree/target/gpu/"
# What Debian calls essential, and Python.
for tool in bash sh cat chmod cp cut date dd df dirname du echo env expr false find grep gzip head ldconfig ln ls mkdir mktemp mv nproc od \
    ps pwd readlink realpath rm rmdir sed sleep sort tail tar tee test timeout touch tr true uname wc xargs; do
    if path=$(PATH=$PATH:/sbin:/usr/sbin type -P "$tool"); then ln -s "$path" "$terms/bin/$tool"; fi
done
ln -s "$(python3 -c 'import sys; print(sys.executable)')" "$terms/bin/python3"
for tool in g++ as ld; do ln -s "$(command -v "$tool")" "$terms/bin/$tool"; done
# The software GPU, built where there are tools for it, with what it has compiled before.
case $mode in
    small) software=(--capability 9.0) more=(--small) cubecl= ;;
    count) software=(--count) more=(--only facts 3b-full --steps 3) cubecl=none ;;
    *) sed -n '2,11p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
letter=${pack##*pack-}
began=$SECONDS code=0
# A process namespace of its own: at the limit everything in it goes, as it would there.
unshare --net --pid --fork --kill-child --mount-proc timeout --signal=KILL "$limit" \
    env -i HOME="$terms/home" TMPDIR="$terms" GPU_CUBECL="$cubecl" "$repository/worker/cuda/software-gpu/run" "${software[@]}" \
    env PATH="$terms/bin" python3 "$terms/tree/worker/cuda/gpu/call.py" "${letter%%.*}" "$terms/tree/target/gpu/$(basename "$pack")" \
    "$terms/out" --limit "$limit" "${more[@]}" >"$terms/said" 2>&1 || code=$?
cat "$terms/said"
echo "rehearsal: exit $code after $((SECONDS - began)) of $limit s"
(cd "$terms" && du -cb tree/target/gpu/*.tar.xz | tail -1 && du -sb --exclude=target tree) | sed 's/^/travelled: /'
find "$terms/out" -type f -printf 'came back: %f, %s bytes\n'
[ "$(find "$terms/out" -type f | wc -l)" -le 8 ] || { echo "more than 8 files would come back"; exit 1; }
[ -z "$(find "$terms/out" -type f -size +16M)" ] || { echo "a file of more than 16 MiB would not come back"; exit 1; }
if [ -n "${KEEP:-}" ]; then cp -r "$terms/out/." "$KEEP/"; fi
exit "$code"
