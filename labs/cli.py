"""The command line that run.py and grade.py share: bad input is one line, files are whole."""

import argparse
import json
import math
import os
import signal
import sys
from pathlib import Path


class UsageError(Exception):
    """An argument that cannot work; its message says what would. Ends as `error: ...`, exit 2."""


# Copied from oom_search.py
class Parser(argparse.ArgumentParser):
    """argparse, with its complaint raised instead of printed with the usage."""

    def error(self, message):
        raise UsageError(message)


def positive(text):
    """A whole number of at least 1: a type for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def finite(text):
    """A number, neither infinite nor nan: a type for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} is not a number")
    return number


def check_platform():
    """Raise UsageError where ranks cannot be forked."""
    if sys.platform == "win32":
        raise UsageError("needs Linux or macOS; on Windows use WSL")


def end_with_the_pipe():
    """Let a reader that leaves early (`| head`) end this program, without a traceback."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def check_writable(path):
    """The path; raises UsageError where no file can be written to it. None is fine."""
    if path and (Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK)):
        raise UsageError(f"cannot write {path}: a directory, or in none that can be written")
    return path


def atomic_write(path, write):
    """Have write(another path) make the file, then rename it to path: whole or not at all."""
    draft = f"{path}.{os.getpid()}{Path(path).suffix}"
    try:
        write(draft)
        os.replace(draft, path)
    except (OSError, ValueError) as problem:  # a full disk; a picture that matplotlib cannot write
        raise UsageError(f"cannot write {path}: {problem}") from None
    finally:
        Path(draft).unlink(missing_ok=True)


def write_json(path, results):
    """Write results as JSON, whole or not at all."""
    text = json.dumps(results, indent=1) + "\n"
    atomic_write(path, lambda draft: Path(draft).write_text(text))
