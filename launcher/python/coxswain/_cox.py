"""The ``cox`` command: where it is, and how it is asked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Generator
from pathlib import Path
from typing import Any


class CoxError(Exception):
    """``cox`` refused or failed; the message is its own."""

    exit_code: int | None
    """What it exited with (``cox --help`` lists the codes); ``None`` if it could not be started."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def binary() -> str:
    """The file of ``COX_BINARY``, the one that was installed with this module, or the first in ``PATH``."""
    named = os.environ.get("COX_BINARY")
    if named:
        return named
    # An environment's scripts, those of `pip install --user`, those of `pip install --target`.
    beside = str(Path(__file__).resolve().parent.parent / "bin")
    places = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", "posix_user"), beside]
    installed = shutil.which("cox", path=os.pathsep.join(places)) or shutil.which("cox")
    if installed is None:
        raise CoxError("no `cox` command is here: install the package again, or name the file in COX_BINARY")
    return installed


def ask(*arguments: str) -> Any:
    """What ``cox`` answers. An answer counts, whatever the exit code: that of a plan says whether it fits."""
    with _start(arguments) as child:
        printed, message = child.communicate()
    try:
        return json.loads(printed)
    except ValueError:
        raise _error(arguments, message, child.returncode) from None


def follow(*arguments: str) -> Generator[Any, None, None]:
    """What ``cox`` prints, line by line. Closing the generator ends the command."""
    with _start(arguments) as child:
        assert child.stdout is not None and child.stderr is not None
        try:
            for line in child.stdout:
                yield json.loads(line)
        except BaseException:
            child.terminate()
            raise
        message = child.stderr.read()
    if child.returncode != 0:
        raise _error(arguments, message, child.returncode)


def _start(arguments: tuple[str, ...]) -> subprocess.Popen[str]:
    # Standard error then holds nothing but the reason of a failure.
    command = [binary(), "--log-format=text", "--log=off", *arguments]
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
    except OSError as error:
        raise CoxError(f"{command[0]} cannot be run: {error}") from error


def _error(arguments: tuple[str, ...], message: str, code: int) -> CoxError:
    message = message.strip()
    if message.startswith("error: "):
        message = message[len("error: ") :]
    return CoxError(message or f"`cox {arguments[0]}` ended with exit code {code}", code)
