#!/usr/bin/env python3
"""Compiles kernels to machine code, on a machine without a GPU.

    worker/cuda/gpu/kernels.py TEXTS OUT --nvrtc DIR --include DIR [--store DIR]

TEXTS is the folder that programs have filled while they ran on the software GPU, counting or executing (`GPU_CUBECL=none
software-gpu/run --count cox ...`: target/kernels/nvrtc-13.99). It has the text of each kernel, and each file's name begins with the
architecture: NVRTC of DIR compiles it as cubecl would, with the headers of `--include`. OUT gets the machine code under the same names,
and a file `compiled` that says by which CUDA and how many; `COX_KERNELS=OUT` has programs use it wherever they ask for the same text.

Machine code is kept in `--store`, by text, architecture and compiler: what was compiled before is not compiled again, whatever else of
the program was changed. A kernel that NVRTC refuses is left out, with a line: it is compiled where it is used, and refused there.
"""
import argparse
import ctypes
import pathlib
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor


class Nvrtc:
    def __init__(self, folder):
        names = sorted(pathlib.Path(folder).glob("libnvrtc.so*"))
        if not names:
            sys.exit(f"kernels.py: no libnvrtc.so in {folder}: unpack the wheel nvidia-cuda-nvrtc there")
        for builtins in pathlib.Path(folder).glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(names[-1]))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def log(self, program):
        size = ctypes.c_size_t()
        self.library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self.library.nvrtcGetProgramLog(program, text)
        return text.value.decode(errors="replace")

    def compile(self, source, architecture, include):
        """Machine code, or None and why not."""
        program = ctypes.c_void_p()
        self.library.nvrtcCreateProgram(ctypes.byref(program), source, None, 0, None, None)
        options = [f"--gpu-architecture={architecture}", f"--include-path={include}", "-lineinfo"]
        if (pathlib.Path(include) / "cccl").is_dir():
            options.append(f"--include-path={include}/cccl")
        given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        if self.library.nvrtcCompileProgram(program, len(options), given):
            return None, self.log(program)
        size = ctypes.c_size_t()
        self.library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        self.library.nvrtcGetCUBIN(program, image)
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        return image.raw, ""


def compiled(texts, out, nvrtc, include, store, threads=2):
    """How many there are in `out` now, and how many of them had to be compiled."""
    compiler = Nvrtc(nvrtc)
    store = pathlib.Path(store) / f"nvrtc-{compiler.version}"
    for folder in (store, out):
        folder.mkdir(parents=True, exist_ok=True)

    def one(text):
        """Whether it is there, and whether it was compiled now."""
        name = text.with_suffix(".cubin").name
        known = (store / name).exists()
        if not known:
            image, why = compiler.compile(text.read_bytes(), text.name.split("-")[0], include)
            if image is None:
                why = next((line for line in why.splitlines() if "error" in line), "")
                print(f"{text} is refused: {why[:200]}", file=sys.stderr)
                return False, False
            (store / f"{name}.new").write_bytes(image)
            (store / f"{name}.new").rename(store / name)
        shutil.copy(store / name, out / name)
        return True, not known

    with ThreadPoolExecutor(threads) as pool:
        outcomes = list(pool.map(one, sorted(texts.glob("*.cu"))))
    right, new = (sum(column) for column in zip(*outcomes)) if outcomes else (0, 0)
    (out / "compiled").write_text(f"{compiler.version} {len(list(out.glob('*.cubin')))}\n")
    print(f"{right} of {len(outcomes)} kernels by NVRTC {compiler.version}, {new} of them compiled now")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--nvrtc", required=True)
    parser.add_argument("--include", required=True)
    parser.add_argument("--store", default="target/gpu/compiled")
    parser.add_argument("--threads", type=int, default=2)
    a = parser.parse_args()
    compiled(a.texts, a.out, a.nvrtc, a.include, a.store, a.threads)


if __name__ == "__main__":
    main()
