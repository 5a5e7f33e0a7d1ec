#!/usr/bin/env python3
"""Compiles the kernels of one program to machine code, on a machine without a GPU.

    worker/cuda/kernels.py RECORDS OUT ARCHITECTURE.. --nvrtc DIR --include DIR

RECORDS is the folder that the program has filled while it ran on the software GPU, counting or executing (`GPU_CUBECL=none
software-gpu/run --count cox ...`: target/kernels/sm_90-nvrtc-13.0-PROGRAM). Its records name the text of each kernel; NVRTC of DIR compiles it as cubecl would,
with the headers of `--include`, for each architecture (sm_90), and OUT/ARCHITECTURE-PROGRAM gets the same records with machine code in
them: a driver loads that where it would have been given PTX. A file `compiled` there says by which CUDA, and how many. `COX_KERNELS=OUT`
has the program take them over; another program, by a byte, does not.

A kernel that NVRTC refuses is left out, with a line: it is compiled where it is used, and refused there. The records are cubecl 0.10's:
`ptx/chunk0.cbor`, a row of entries {key, value: {entrypoint_name, shared_mem_bytes, ptx}}, and a table of contents beside it.
"""
import argparse
import ctypes
import json
import pathlib
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

MARK = "software GPU: "


def decode(data, at):
    """One CBOR value and where the next begins."""
    kind, short = data[at] >> 5, data[at] & 31
    at += 1
    if short < 24:
        size = short
    else:
        bytes_of = 1 << (short - 24)
        size = int.from_bytes(data[at:at + bytes_of], "big")
        at += bytes_of
    if kind == 0:
        return size, at
    if kind == 1:
        return -1 - size, at
    if kind in (2, 3):
        value = data[at:at + size]
        return (value if kind == 2 else value.decode()), at + size
    if kind == 4:
        values = []
        for _ in range(size):
            value, at = decode(data, at)
            values.append(value)
        return values, at
    if kind == 5:
        values = {}
        for _ in range(size):
            key, at = decode(data, at)
            values[key], at = decode(data, at)
        return values, at
    if kind == 6 and size == 2:
        value, at = decode(data, at)
        return int.from_bytes(value, "big"), at
    raise ValueError(f"a CBOR value of kind {kind} at byte {at}")


def head(kind, size):
    for short, bytes_of in ((None, 0), (24, 1), (25, 2), (26, 4), (27, 8)):
        if short is None and size < 24:
            return bytes([kind << 5 | size])
        if short is not None and size < 1 << (8 * bytes_of):
            return bytes([kind << 5 | short]) + size.to_bytes(bytes_of, "big")
    raise ValueError(f"{size} is too large")


def encode(value):
    if isinstance(value, bool):
        raise ValueError("no entry has one")
    if isinstance(value, int):
        if value < 0:
            return head(1, -1 - value)
        if value < 1 << 64:
            return head(0, value)
        digits = value.to_bytes((value.bit_length() + 7) // 8, "big")
        return head(6, 2) + head(2, len(digits)) + digits
    if isinstance(value, str):
        return head(3, len(value.encode())) + value.encode()
    if isinstance(value, list):
        return head(4, len(value)) + b"".join(map(encode, value))
    return head(5, len(value)) + b"".join(encode(key) + encode(of) for key, of in value.items())


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
        # As cubecl asks: from capability 9.0 on, with what that architecture alone has.
        suffix = "a" if int(architecture[3:]) >= 90 else ""
        options = [f"--gpu-architecture={architecture}{suffix}", f"--include-path={include}", "-lineinfo"]
        if (pathlib.Path(include) / "cccl").is_dir():
            options.append(f"--include-path={include}/cccl")
        given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        code = self.library.nvrtcCompileProgram(program, len(options), given)
        if code:
            return None, self.log(program)
        size = ctypes.c_size_t()
        self.library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        self.library.nvrtcGetCUBIN(program, image)
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        return image.raw, ""


def entries_of(chunk):
    data, at, found = chunk.read_bytes(), 0, []
    while at < len(data):
        entry, at = decode(data, at)
        found.append(entry)
    return found


def signed(image):
    return list(struct.unpack(f"{len(image)}b", image))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("records")
    parser.add_argument("out")
    parser.add_argument("architectures", nargs="+")
    parser.add_argument("--nvrtc", required=True)
    parser.add_argument("--include", required=True)
    parser.add_argument("--threads", type=int, default=2)
    a = parser.parse_args()
    chunks = sorted(pathlib.Path(a.records).glob("cuda/*/ptx/chunk0.cbor"))
    if not chunks:
        sys.exit(f"kernels.py: no records of cubecl below {a.records}")
    records, nvrtc = chunks[0].parent, Nvrtc(a.nvrtc)
    program = pathlib.Path(a.records).resolve().name.rsplit("-", 1)[-1]
    found = entries_of(chunks[0])
    for architecture in a.architectures:
        def compiled(entry):
            text = bytes(byte & 255 for byte in entry["value"]["ptx"]).rstrip(b"\0").decode()
            # Counting it is the program's text; executing, what the host's compiler made of the text beside it.
            source = pathlib.Path(text.removeprefix(MARK)).with_suffix(".cu").read_bytes()
            return nvrtc.compile(source, architecture, a.include)

        folder = pathlib.Path(a.out) / f"{architecture}-{program}"
        into = folder / records.relative_to(a.records)
        into.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(a.threads) as pool:
            images = list(pool.map(compiled, found))
        table, right = [], 0
        with open(into / "chunk0.cbor", "wb") as out:
            for entry, (image, why) in zip(found, images):
                if image is None:
                    why = next((line for line in why.splitlines() if "error" in line), "")
                    print(f"{architecture}: {entry['value']['entrypoint_name']} is refused: {why[:200]}", file=sys.stderr)
                    continue
                entry = dict(entry, value=dict(entry["value"], ptx=signed(image)))
                out.write(encode(entry))
                table.append(json.dumps(dict(key=entry["key"], value="chunk0.cbor")))
                right += 1
        (into / "toc.json.log").write_text("".join(line + "\n" for line in table))
        (folder / "compiled").write_text(f"{nvrtc.version} {right}\n")
        print(f"{architecture}: {right} of {len(found)} kernels by NVRTC {nvrtc.version}")


if __name__ == "__main__":
    main()
