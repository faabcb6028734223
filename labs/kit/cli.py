"""The command line that run.py and grade.py share.

Bad input ends in one line, code is read as Python reads it, files are written whole."""

import argparse
import json
import os
import signal
import sys
import tempfile
import tokenize
from contextlib import suppress
from pathlib import Path

TMPDIR = 70  # a socket in it has a name of 32 characters more; macOS allows 103
MOST = 2**31 - 1


class UsageError(Exception):
    """An argument that cannot work; its message says what to use. Ends as `error: ...`, exit 2."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message)


def documented(text):
    """A Parser with a text in front of the options."""
    return Parser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def whole(least, most):
    """A type for argparse: a whole number from least to most."""

    def parse(text):
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"use {least} to {most}, not {text}")
        return int(text)

    return parse


positive = whole(1, MOST)


def number(above, below):
    """A type for argparse: a number between two others."""

    def parse(text):
        with suppress(ValueError):
            if above < float(text) < below:
                return float(text)
        raise argparse.ArgumentTypeError(
            f"use a number above {above} and below {below}, not {text}"
        )

    return parse


def check_platform():
    """Raise UsageError where ranks cannot be forked."""
    if sys.platform == "win32":
        raise UsageError("needs Linux or macOS; on Windows use WSL")


def shorten_tempdir():
    """Use /tmp where TMPDIR is too long for sockets. UsageError, if no file can be written."""
    try:
        if len(os.fsencode(tempfile.gettempdir())) > TMPDIR:
            tempfile.tempdir = "/tmp"
        tempfile.TemporaryFile().close()
    except OSError as problem:
        how = f"a folder that can be written, with a name of at most {TMPDIR} characters"
        raise UsageError(f"no temporary files ({problem.strerror}): set TMPDIR to {how}") from None


def escape_output():
    """Print characters that the locale's encoding lacks as escapes."""
    if sys.stdout:
        sys.stdout.reconfigure(errors="backslashreplace")


def please_any_reader():
    """escape_output(); and end without a traceback where a reader leaves early (`| head`)."""
    escape_output()
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def read_code(path):
    """(text, encoding) of a Python file, by its byte order mark and coding line, as Python does.

    Its lines are text.split("\\n"): splitlines() ends lines at form feeds and U+2028, too. Raises
    UsageError for what Python does not read.
    """
    try:
        if b"\0" in Path(path).read_bytes():
            raise UsageError(f"{path} has null bytes, as UTF-16 has: save it as UTF-8")
        with tokenize.open(path) as file:
            return file.read(), file.encoding
    except OSError as problem:
        raise UsageError(f"cannot read {path}: {problem.strerror}") from None
    except (LookupError, SyntaxError, UnicodeError) as problem:
        raise UsageError(f"{problem}: save {path} as UTF-8") from None


def draft_of(path):
    """Where a file is written before it is renamed to path."""
    return f"{path}.{os.getpid()}{Path(path).suffix}"


def check_writable(path):
    """The path; raises UsageError where no file can be written to it. None is fine."""
    if path and os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"cannot write {path}: it is no file")
    if path:
        try:
            Path(draft_of(path)).touch()
            Path(draft_of(path)).unlink()
        except OSError as problem:
            raise UsageError(f"cannot write {path}: {problem.strerror}") from None
    return path


def atomic_write(path, write):
    """Have write(another path) make the file, then rename it to path, so that it is whole."""
    draft = draft_of(path)
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
    atomic_write(path, lambda draft: Path(draft).write_text(text, encoding="utf-8"))
