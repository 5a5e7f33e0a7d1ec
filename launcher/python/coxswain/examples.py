"""Run files to begin with, and what they train on: ``python -m coxswain.examples [DIRECTORY]``.

Writes ``configs/`` as it lies in the repository: the quickstart with its small model and data set, the
reference of all keys, the files for Slurm and Kubernetes. Then, from that directory::

    cox run configs/quickstart.yaml
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path


def write(directory: str | Path = ".") -> Path:
    """Writes ``configs/`` below a directory and returns its path. One that is there already is left alone."""
    target = Path(directory) / "configs"
    shutil.copytree(Path(__file__).resolve().parent / "configs", target)
    return target


def main(arguments: list[str]) -> int:
    """The command; exits with 2 where there is a ``configs/`` already."""
    parser = argparse.ArgumentParser("python -m coxswain.examples", description="Writes configs/ below a directory.")
    parser.add_argument("directory", nargs="?", default=".")
    try:
        target = write(parser.parse_args(arguments).directory)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{target}: now run `cox run configs/quickstart.yaml` in {target.resolve().parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
