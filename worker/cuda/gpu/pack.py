#!/usr/bin/env python3
"""Packs what a machine with a GPU is lent for a few minutes: everything is built and compiled here, where there is no GPU.

    worker/cuda/gpu/pack.py [a|b ..] [--architectures sm_90 ..] [--profile release] [--out target/gpu]

    a   `cox` with CUDA, its compiled kernels (of the 3B step, `selftest` and the quickstart), CUDA's headers
    b   the test programs, and their compiled kernels

The repository's tracked files travel with a pack, and call.py beside this file unpacks it there. Both together have at most 60 MiB, or
nothing is packed and a line says what takes the room. A pack is a tar file that Python 3.12 unpacks. What NVRTC compiled for an earlier
pack is not compiled again (kernels.py). Needed here: Rust, g++ (the software GPU), strip, and PyPI for NVIDIA's wheels, whose headers go
into pack A under the licence that lies beside them; the packs are for machines of whoever packs.
"""
import argparse
import json
import lzma
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import kernels
import shape

ROOT = pathlib.Path(__file__).resolve().parents[3]
MOST_MIB = 60
# What compiles is what the machines lent have: drivers for CUDA 13 load it. Where each wheel's headers lie differs, so all are looked for.
HEADERS = ["nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*", "nvidia-cuda-cccl==13.0.*"]
COMPILER = "nvidia-cuda-nvrtc==13.0.*"
PLATFORMS = ["manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux2010_x86_64"]
# The capability at which the software GPU is asked for an architecture's kernels.
CAPABILITIES = {"sm_80": "8.0", "sm_90": "9.0"}


def built(arguments, *names):
    """The programs of these names that cargo has built."""
    said = subprocess.run(["cargo", *arguments, "--locked", "--message-format=json"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    programs = [json.loads(line).get("executable") for line in said.stdout.splitlines() if line.startswith(b"{")]
    found = [next((p for p in programs if p and pathlib.Path(p).name.split("-")[0] == name), None) for name in names]
    if None in found:
        sys.exit(f"pack.py: cargo {' '.join(arguments)} has built no {names[found.index(None)]}")
    return found


def placed(programs, folder):
    """Copies without symbols: {name there: program}."""
    folder.mkdir(parents=True)
    for name, program in programs.items():
        subprocess.run(["strip", "-o", folder / name, program], check=True)


def wheels(folder, *requirements):
    """Wheels of PyPI, unpacked; once."""
    if not folder.exists():
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        unpacked = folder.with_suffix(".new")
        shutil.rmtree(unpacked, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", *platforms, "--dest",
                        unpacked, *requirements], check=True)
        for wheel in unpacked.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(unpacked)
            wheel.unlink()
        unpacked.rename(folder)
    return folder


def headers(kept, into):
    """One include folder, with the licence, without what nobody here includes and most of the size."""
    for include in wheels(kept / "headers", *HEADERS).rglob("include"):
        if "nvvm" not in include.parts:
            shutil.copytree(include, into / "include", dirs_exist_ok=True, ignore=shutil.ignore_patterns("cub", "thrust"))
    shutil.copy(next(path for path in (kept / "headers").rglob("*") if path.name.lower() == "license.txt"), into / "LICENSE.txt")


def model_of_two_layers(work):
    """Two layers have the kernels of all: a checkpoint of the 3B widths."""
    path = work / "configs/assets/qwen2.5-vl-3b/config.json"
    settings = json.loads(path.read_text())
    settings["num_hidden_layers"] = 2
    settings["vision_config"].update(depth=2, fullatt_block_indexes=[1])
    path.write_text(json.dumps(settings))


def asked(stage, letter, capability, work):
    """The texts of all kernels that the programs of a pack ask for on the software GPU. What fails there is asked for less."""
    work.mkdir()
    shutil.copy(ROOT / "Cargo.toml", work)
    shutil.copytree(ROOT / "configs", work / "configs")
    model_of_two_layers(work)
    run, binaries = ROOT / "worker/cuda/software-gpu/run", stage / "bin"
    counted, executed = [run, "--count", "--capability", capability], [run, "--capability", capability]
    environment = dict(os.environ, GPU_CUBECL="none", COX_REPOSITORY=str(ROOT))

    def ask(*command, **more):
        with open(work / "log", "a") as log:
            print("$", *command, file=log, flush=True)
            code = subprocess.run(command, cwd=work, env=environment | more, stdout=log, stderr=log).returncode
        count = len(list((work / "target/kernels").rglob("*.cu")))
        print(f"  {count:4} kernels after {' '.join(map(str, command[3:]))[-100:]}{'' if code == 0 else f' (exit {code})'}", flush=True)

    if letter == "a":
        cox, model = binaries / "cox", work / "model"
        ask(cox, "data", "make-checkpoint", "--like", "configs/assets/qwen2.5-vl-3b", "--tokenizer", "configs/assets/tiny-vla", "--out", model)
        for batch, more in ((8, []), (8, ["train.recompute=none"]), (32, []), (2, [])):
            # Another batch in the same directory would be another run, and refused; other steps have other samples, and shapes.
            ask(*counted, *shape.worker(cox, model, work / f"run-{batch}", batch, shape.STEPS, more))
        ask(*counted, cox, "selftest", "--device", "cuda")
    else:
        tests = ["--test-threads", "1"]
        ask(*executed, binaries / "operations", *tests)
        ask(*executed, binaries / "gpu", *tests, "first::", "golden::", "products::library")
        ask(*counted, binaries / "gpu", *tests, "curve::")
        ask(*counted, binaries / "gpu", *tests, "products::products", COXSWAIN_PRODUCTS="simple_cyclic,tma")
    return next(iter((work / "target/kernels").glob("nvrtc-*")), work)


def tracked_bytes():
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout.decode().split("\0")
    return sum((ROOT / name).lstat().st_size for name in names if name)


def written(stage, file):
    """The pack as one file, refused where it could not travel."""
    # The programs are of the same crates: a window that holds all of them finds what comes twice. It takes 3 GB of memory here, and
    # 256 MiB to unpack.
    filters = [dict(id=lzma.FILTER_LZMA2, preset=6, dict_size=256 << 20)]
    new = file.with_suffix(".new")
    with lzma.open(new, "wb", filters=filters) as compressed, tarfile.open(fileobj=compressed, mode="w|") as tar:
        tar.add(stage, ".")
    pack, tree = new.stat().st_size / 2**20, tracked_bytes() / 2**20
    parts = {part.name: sum(file.stat().st_size for file in part.rglob("*")) / 2**20 for part in sorted(stage.iterdir())}
    parts = ", ".join(f"{name} {mib:.1f}" for name, mib in parts.items())
    sizes = f"{file.name} {pack:.1f} MiB (unpacked: {parts}) + tracked files {tree:.1f} MiB = {pack + tree:.1f} of {MOST_MIB} MiB"
    if pack + tree > MOST_MIB:
        new.unlink()
        sys.exit(f"pack.py: refused: {sizes}")
    new.rename(file)
    print(sizes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", nargs="*", default=["a", "b"])
    parser.add_argument("--architectures", nargs="+", default=["sm_90"], choices=sorted(CAPABILITIES))
    parser.add_argument("--profile", default="release")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "target/gpu")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    nvrtc = next(wheels(a.out / "nvrtc", COMPILER).rglob("libnvrtc.so*")).parent
    for letter in a.packs:
        with tempfile.TemporaryDirectory() as scratch:
            stage = pathlib.Path(scratch) / "stage"
            if letter == "a":
                [cox] = built(["build", "--profile", a.profile, "-p", "coxswain", "--features", "cuda"], "cox")
                placed(dict(cox=cox), stage / "bin")
            else:
                tests = built(["test", "--workspace", "--no-run"], "coxswain_cuda", "gpu")
                placed(dict(zip(("operations", "gpu"), tests)), stage / "bin")
            include = pathlib.Path(scratch) / "cuda-13"
            headers(a.out, include)
            for architecture in a.architectures:
                texts = asked(stage, letter, CAPABILITIES[architecture], pathlib.Path(scratch) / architecture)
                kernels.compiled(texts, stage / "kernels", nvrtc, include / "include", a.out / "compiled")
            if letter == "a":
                shutil.move(include, stage / "cuda-13")
            written(stage, a.out / f"pack-{letter}.tar.xz")


if __name__ == "__main__":
    main()
