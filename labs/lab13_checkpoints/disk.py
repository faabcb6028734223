"""A disk that stops at any moment, ranks that take turns, files that count what is read: lab 13's.

Disk stands in the place of open() and of os.fsync, os.replace and their like while a checkpoint is
saved. It stops everything at a chosen event, as a kill does: what a program has not written yet
never comes. A power failure takes more: what is not on the disk. That is the contents of a file
until os.fsync of it, and a new name, or a name that now means another file, until os.fsync of its
folder. A disk may be lucky; this one never is, and removes a file at once.
"""

import builtins
import copy
import io
import os
import stat
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from labs.kit.harness import Wrong

REAL_OPEN = io.open


class Killed(BaseException):
    """The process ends here; no `except Exception` gets to see it."""


class Disk:
    """stop: the number of the event at which all ends, None: never. events: how many there were."""

    def __init__(self, stop=None):
        self.stop, self.events, self.dead, self.log = stop, 0, False, []
        self.unsynced = set()  # files whose contents are not on the disk
        self.names = []  # (path, what it was before: its bytes or None) of names that are not
        self.files = {}  # {descriptor: path}

    def event(self, what):
        if self.dead or self.events == self.stop:
            self.dead = True
            raise Killed
        self.events += 1
        self.log.append(what)

    def open(self, path, mode="r", *args, **kwargs):
        if not set("wax") & set(mode):
            return REAL_OPEN(path, mode, *args, **kwargs)
        self.event(f"{Path(path).name} is opened")
        if not Path(path).exists():
            self.names.append((str(path), None))
        return Written(self, str(path), mode)

    def fsync(self, descriptor):
        self.event("os.fsync")
        if not isinstance(descriptor, int):
            descriptor = descriptor.fileno()
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            self.names.clear()
        else:
            self.unsynced.discard(self.files.get(descriptor))

    def replace(self, source, target, replace=os.replace):  # the real one: inside(), os has ours
        source, target = str(source), str(target)
        self.event(f"{Path(target).name} is replaced")
        before = Path(target).read_bytes() if Path(target).exists() else None
        replace(source, target)
        self.names.append((target, before))
        if source in self.unsynced:
            self.unsynced.remove(source)
            self.unsynced.add(target)

    def remove(self, path, remove=os.remove):
        self.event(f"{Path(path).name} is removed")
        remove(path)

    def lose_power(self):
        """Leave what a power failure leaves."""
        for path in self.unsynced:
            if Path(path).exists():
                Path(path).write_bytes(b"")
        for path, before in reversed(self.names):
            if before is None:
                Path(path).unlink(missing_ok=True)
            else:
                Path(path).write_bytes(before)

    @contextmanager
    def inside(self):
        """In this context files are this disk's."""
        with ExitStack() as stack:
            for module in builtins, io:
                stack.enter_context(mock.patch.object(module, "open", self.open))
            stack.enter_context(mock.patch.object(os, "fsync", self.fsync))
            for name in "replace", "rename":
                stack.enter_context(mock.patch.object(os, name, self.replace))
            for name in "remove", "unlink":
                stack.enter_context(mock.patch.object(os, name, self.remove))
            yield


class Written:
    """A file that is written to, buffered as Python's are; each write takes two events."""

    def __init__(self, disk, path, mode):
        self.disk, self.name, self.waiting = disk, path, bytearray()
        self.file = REAL_OPEN(path, mode.replace("t", "").replace("b", "") + "b", buffering=0)
        disk.files[self.file.fileno()] = path
        disk.unsynced.add(path)

    def fileno(self):
        return self.file.fileno()

    def write(self, data):
        self.waiting += data.encode() if isinstance(data, str) else data
        if len(self.waiting) > io.DEFAULT_BUFFER_SIZE:
            self.flush()
        return len(data)

    def flush(self):
        half = len(self.waiting) // 2
        for part in self.waiting[:half], self.waiting[half:]:
            if part:
                self.disk.event(f"{Path(self.name).name} is written to")
                self.disk.unsynced.add(self.name)
                self.file.write(part)
        self.waiting.clear()

    def close(self):
        if not self.disk.dead and not self.file.closed:
            self.flush()
        self.file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Counted(io.FileIO):
    """A file that is read. Of all: bytes in `total` and `by_file`, most at once in `most`."""

    total, most, by_file = 0, 0, Counter()

    def count(self, size):
        Counted.total += size
        Counted.by_file[Path(self.name).name] += size
        Counted.most = max(Counted.most, size)

    def readinto(self, view):
        size = super().readinto(view)
        self.count(size)
        return size

    def read(self, size=-1):
        data = super().read(size)
        self.count(len(data))
        return data

    def readall(self):
        data = super().readall()
        self.count(len(data))
        return data


@contextmanager
def counting():
    """In this context files that are opened for reading bytes are Counted, from 0 on."""

    def opened(path, mode="r", *args, **kwargs):
        return Counted(path) if mode == "rb" else REAL_OPEN(path, mode, *args, **kwargs)

    Counted.total, Counted.most, Counted.by_file = 0, 0, Counter()
    with mock.patch.object(builtins, "open", opened), mock.patch.object(io, "open", opened):
        yield Counted


class Turns:
    """Ranks as threads of this process, one at a time: rank 0 runs until it waits, then rank 1, ...

    So rank 0 is as far ahead of the others as it can get; backwards: the last rank is. gather() is
    what they wait in.
    """

    def __init__(self, world, backwards):
        self.world, self.given, self.values = world, {}, []
        self.order = list(range(world))[:: -1 if backwards else 1]
        self.go = [threading.Semaphore(0) for _ in range(world)]
        self.back = threading.Semaphore(0)
        self.results, self.problem, self.done = [None] * world, None, set()

    def gather(self, value, group):
        self.given[group.rank()] = value
        self.back.release()
        self.go[group.rank()].acquire()
        if self.problem:
            raise Killed
        return copy.deepcopy(self.values)

    def rank_main(self, rank, function):
        self.go[rank].acquire()
        group = SimpleNamespace(rank=lambda: rank, size=lambda: self.world)
        try:
            if not self.problem:
                self.results[rank] = function(group)
        except BaseException as problem:  # whatever a learner's code raises
            self.problem = self.problem or problem
        self.done.add(rank)
        self.back.release()

    def run(self, function):
        """[function(group) of each rank]; raises what the first of them raises."""
        how = [(rank, function) for rank in range(self.world)]
        threads = [threading.Thread(target=self.rank_main, args=args, daemon=True) for args in how]
        for thread in threads:
            thread.start()
        while len(self.done) < self.world and not self.problem:
            self.given = {}
            for rank in self.order:
                if rank not in self.done and not self.problem:
                    self.go[rank].release()
                    self.back.acquire()
            if self.given and len(self.given) < self.world and not self.problem:
                found = f"rank {min(self.given)} waits in gather_objects, rank {min(self.done)} not"
                self.problem = Wrong(found, "every rank calls it equally often")
            self.values = [self.given.get(rank) for rank in range(self.world)]
        for rank in set(range(self.world)) - self.done:
            self.go[rank].release()
        for thread in threads:
            thread.join()
        if self.problem:
            raise self.problem
        return self.results


def on_turns(lab, world, function, backwards=False):
    """[function(group) of each rank], whose gather_objects in the lab is Turns'."""
    turns = Turns(world, backwards)
    with mock.patch.object(lab, "gather_objects", turns.gather):
        return turns.run(function)
