#!/usr/bin/env python3
"""Writes small WebDataset shards under tests/fixtures/shards, and golden.json: what `webdataset` itself reads of them.

    python3 -m venv venv && venv/bin/pip install webdataset==1.0.2 && venv/bin/python tests/make_shards.py

`ustar-0000`, `gnu-0001` and `pax-0002` are Python's tarfile in its three formats, with folders, long names, links and
hidden files; `wds-0003` is webdataset's own writer.
"""
import io
import json
import pathlib
import tarfile
import warnings
import zlib

import webdataset

HERE = pathlib.Path(__file__).resolve().parent / "fixtures" / "shards"
LONG = "a-folder-with-a-long-name/" * 5
FORMATS = {"ustar-0000": tarfile.USTAR_FORMAT, "gnu-0001": tarfile.GNU_FORMAT, "pax-0002": tarfile.PAX_FORMAT}


def add(tar, name, content=b"", **changes):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in changes.items():
        setattr(info, key, value)
    tar.addfile(info, io.BytesIO(content))


def write(path, shard, form):
    with tarfile.open(path, "w", format=form) as tar:
        add(tar, "train", type=tarfile.DIRTYPE)
        for number in range(3):
            key = f"{'./' if number == 0 else ''}train/{shard}{number:04d}"
            add(tar, f"{key}.json", json.dumps({"number": number}).encode())
            add(tar, f"{key}.JPG", bytes(range(200 + number)) * 3)
            add(tar, f"{key}.seg.png", b"" if number == 1 else b"png" * 300)
        add(tar, "train/.hidden.txt", b"not of any sample")
        add(tar, "train/README", b"nor this")
        add(tar, "train/linked.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(tar, "train/v1.5/a.b.c", b"dots in folders and endings")
        if form != tarfile.USTAR_FORMAT:
            add(tar, f"{LONG}{shard}-last.txt", b"beyond a hundred bytes")
            add(tar, f"{LONG}übung.txt", "äöü".encode())


def main():
    HERE.mkdir(parents=True, exist_ok=True)
    for shard, (name, form) in enumerate(FORMATS.items()):
        write(HERE / f"{name}.tar", shard, form)
    with webdataset.TarWriter(str(HERE / "wds-0003.tar"), mtime=0) as writer:
        for number in range(2):
            writer.write({"__key__": f"{number:06d}", "json": {"number": number}, "left.bin": bytes([number]) * 700})
    golden = []
    warnings.simplefilter("ignore")
    for path in sorted(HERE.glob("*.tar")):
        data = webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False)
        for sample in data:
            members = {key: f"{zlib.crc32(value):08x}" for key, value in sample.items() if key[0] != "_"}
            golden.append({"shard": path.name, "key": sample["__key__"], "members": members})
    (HERE / "golden.json").write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
