"""What lab 13 sees of files, and ranks that take turns.

Disk knows what a kill or a power failure would leave of a folder after each step of a save.
counting() counts what is read. on_turns() runs ranks as threads of this process, one at a time.
"""

import builtins
import copy
import io
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Semaphore
from types import SimpleNamespace
from unittest import mock


def files_of(folder):
    """{name: bytes} of a folder's files."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


class Disk:
    """left {(how it ends, ((name, bytes that are left), ..)): the step after which}.

    A power failure takes what came to a file after os.fsync of it. New names, and names that
    now mean another file, it takes before os.fsync of their folder, or not. A file that is
    removed is gone at once. A disk may be lucky, this one never is.
    """

    def __init__(self, folder):
        self.folder, self.steps, self.left = Path(folder), [], {}
        self.contents = files_of(folder)  # {name: which of its bytes are on the disk}
        self.before = {}  # {name: what it still means on the disk: bytes, or None}

    def power_failure(self):
        """{name: bytes} that it leaves if it takes all new names."""
        old = {name: data for name, data in self.before.items() if data is not None}
        return {n: data for n, data in self.contents.items() if n not in self.before} | old

    def note(self):
        ways = [("a kill", files_of(self.folder)), ("a power failure", self.power_failure())]
        for way, files in [*ways, ("a power failure", self.contents)]:
            key = way, tuple(sorted(files.items()))
            self.left.setdefault(key, self.steps[-1] if self.steps else "nothing")

    @contextmanager
    def step(self, what):
        """Note what is left before a step and after it."""
        self.note()
        yield
        self.steps.append(what)
        self.note()

    def open(self, real, path, mode="r", *args, **kwargs):
        """open(), or os.open(), whose mode is a number."""
        if isinstance(mode, str):
            writes, empties = set("wax+") & set(mode), "w" in mode
        else:
            writes, empties = mode & (os.O_WRONLY | os.O_RDWR), mode & os.O_TRUNC
        if not writes or isinstance(path, int) or Path(path).parent != self.folder:
            return real(path, mode, *args, **kwargs)
        name = Path(path).name
        with self.step(f"{name} is opened"):
            file = real(path, mode, *args, **kwargs)
            if name not in self.contents:
                self.before.setdefault(name, None)
            if name not in self.contents or empties:
                self.contents[name] = b""
        return file

    def fsync(self, real, file):
        which = os.fstat(file if isinstance(file, int) else file.fileno())
        paths = [self.folder, *self.folder.iterdir()]
        path = next((path for path in paths if os.path.samestat(path.stat(), which)), None)
        if path is None:  # of some other folder
            return real(file)
        with self.step(f"os.fsync of {path.name}"):
            real(file)
            if path == self.folder:
                self.before.clear()
            else:
                self.contents[path.name] = path.read_bytes()

    def rename(self, real, source, target):
        old, new = Path(source).name, Path(target).name
        with self.step(f"{new} is replaced"):
            real(source, target)
            for name in old, new:
                self.before.setdefault(name, self.contents.get(name))
            self.contents[new] = self.contents.pop(old, b"")

    def remove(self, real, path):
        name = Path(path).name
        with self.step(f"{name} is removed"):
            real(path)
            self.contents.pop(name, None)
            self.before.pop(name, None)

    @contextmanager
    def watching(self):
        """In this context the disk sees what is done by open() and by functions of os."""
        ways = [(module, "open", self.open) for module in (builtins, io, os)]
        ways += [(os, name, self.rename) for name in ("rename", "replace")]
        ways += [(os, name, self.remove) for name in ("remove", "unlink")]
        with ExitStack() as stack:
            for module, name, way in [*ways, (os, "fsync", self.fsync)]:
                seen = partial(way, getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, seen))
            yield
        self.note()


@contextmanager
def counting():
    """{file: bytes that are read of it} inside, of files that are opened by "rb".

    These are the system's: a file that has a buffer reads more than what is used.
    """
    sizes, real = Counter(), open

    class Counted(io.FileIO):
        read, readall = io.RawIOBase.read, io.RawIOBase.readall  # by readinto()

        def readinto(self, view):
            size = super().readinto(view)
            sizes[Path(self.name).name] += size
            return size

    def opened(path, mode="r", buffering=-1, *args, **kwargs):
        if mode != "rb":
            return real(path, mode, buffering, *args, **kwargs)
        return io.BufferedReader(Counted(path)) if buffering else Counted(path)

    with mock.patch.object(builtins, "open", opened), mock.patch.object(io, "open", opened):
        yield sizes


def on_turns(lab, world, function, backwards=False):
    """[function(group) of each rank], how often all have met; raises what the first raises.

    A rank runs until it waits in the lab's gather_objects(), then the next one does. So rank 0
    is as far ahead of the others as it can get; backwards: the last rank is.
    """
    order = [*range(world)][:: -1 if backwards else 1]
    after = dict(zip(order, order[1:] + order[:1]))
    go = [Semaphore(0) for _ in order]
    meetings, results, problems, done = [{}], [None] * world, [], set()

    def pass_on(rank):
        """The next rank's turn; come back when it has come round."""
        go[after[rank]].release()
        go[rank].acquire()

    def gather(value, group):
        rank, given = group.rank(), meetings[-1]
        given[rank] = copy.deepcopy(value)
        if len(given) == world:
            meetings.append({})
        pass_on(rank)
        if len(given) < world:
            raise RuntimeError(f"only ranks {sorted(given)} wait in gather_objects")
        return [copy.deepcopy(given[rank]) for rank in range(world)]

    def main(rank):
        go[rank].acquire()
        try:
            if not problems:
                group = SimpleNamespace(rank=lambda: rank, size=lambda: world)
                results[rank] = function(group)
        except BaseException as problem:  # whatever a learner's code raises
            problems.append(problem)
        done.add(rank)
        while len(done) < world:
            pass_on(rank)
        go[after[rank]].release()

    with mock.patch.object(lab, "gather_objects", gather), ThreadPoolExecutor(world) as pool:
        go[order[0]].release()
        pool.map(main, order)
    if problems:
        raise problems[0]
    return results, len(meetings) - 1
