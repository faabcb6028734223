"""Which line of a learner's file raised, crashed or waits, and what usually causes that."""

import faulthandler
import re
import signal
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from labs.kit.cli import UsageError, read_code

MESSAGES = "all_|broadcast|reduce|gather|scatter|barrier|i?send|i?recv|__init__"  # P2POp's
# what torch says of calls that differ: operation and shape are enough
CALL = r"CollectiveFingerPrint\(.*?OpType=_?(\w+)(?:, TensorShape=(\[.*?\]))?.*?\)\)\)"
WORLD = r"get_(rank|world_size)\(\)|dist\.group\.WORLD"
HINTS = {  # {a part of what is said: the cause}
    "in the default group": "pass group=group: without it torch takes all ranks of the job",
    "not part of group": "group_src, group_dst, group_peer count in the group; take them % P",
    "invalid tensor size at": "each tensor of the list has the shape of this rank's own: pad parts",
    "ProcessGroupGloo::": "all_gather fills P times a rank's input, reduce_scatter 1/P of it",
    "non-empty list of Tensors": "there may be no tensor, and then nothing to do",
    "has to be contiguous": "send and receive into contiguous tensors: x.contiguous()",
    "Pair is not connected": "sent to itself? group_src, group_dst, group_peer count in the group",
    "Wait timeout": "a rank that does not call what the others call, or that the group does not "
    "have: its ranks are 0 to P - 1, so take % P",
    "gloo/transport": "all wait, or one died; start both (isend, irecv), then wait for both",
    "has no attribute 'wait'": "only async_op=True returns a handle",
    "between instances of 'str'": "a file has text: turn it into a number by int() or float()",
    "a gradient different than None": "return None where ctx.needs_input_grad is False",
    "incorrect number of gradients": "one for each argument of forward; None for one that has none",
    "SIGKILL": "out of memory?",
    "SIGSEGV": "a rank that the group does not have? its ranks are 0 to P - 1, so take % P",
    "SIGABRT": "calls differ: in kind, in number, or in sizes or dtypes sent and received",
}


def hint_at(text):
    """What usually causes an error with this text, or ""."""
    return next((hint for part, hint in HINTS.items() if part in text), "")


def default_group_refused():
    """A context in which no message goes without a group; to ask for rank or size is allowed."""
    default = dist.distributed_c10d._get_default_group

    def refusing():
        frame = sys._getframe(1)
        if frame.f_code.co_name == "_group_or_default_group":
            frame = frame.f_back
        name = frame.f_code.co_name
        if re.match(MESSAGES, name):
            name = "P2POp" if name == "__init__" else name
            raise ValueError(f"{name} in the default group, which has more ranks than this one")
        return default()

    return mock.patch.object(dist.distributed_c10d, "_get_default_group", refusing)


def in_short(wrong, file, apart):
    """(what was found, a hint) of a Wrong; apart: the file must not ask the default group."""
    found = re.sub(CALL, r"\1 \2", wrong.found).partition(".Collectives differ")[0]
    asked = re.search(WORLD, re.sub("#.*", "", read_code(file)[0])) if apart else None
    world = f"{asked[0]} is the job's: use group, group.rank(), group.size()" if asked else ""
    return found, "; ".join(filter(None, (world, wrong.hint)))


def no_network(problem):
    """The UsageError for ranks that gloo cannot connect."""
    reason = str(problem).partition("\n")[0].rpartition("] ")[2]
    how = "set an interface up (ip link set lo up), and unset GLOO_SOCKET_IFNAME"
    return UsageError(f"no network between ranks ({reason}): {how}")


def listen(path):
    """Have this process write its stack to a file when it crashes, or at SIGUSR1."""
    file = open(path, "w")  # noqa: SIM115 - as long as the process lives
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file)


def own_line(frames, file, exercise):
    """The line of a learner's file that a rank was in, for a message: 'in "x += y": ', or "".

    frames [(file, line number)], the innermost last. Lines of the exercise go before others.
    """
    numbers = [number for name, number in frames if name == file]
    if not numbers:
        return ""
    lines = read_code(file)[0].split("\n")
    markers = r"# (?:end )?exercise(?:: \w+)?"
    before = {n: re.findall(markers, "\n".join(lines[:n])) for n in numbers}
    inside = [n for n in numbers if before[n][-1:] == [f"# exercise: {exercise}"]]
    number = (inside or numbers)[-1]
    return f'in "{lines[number - 1].strip()}": '


def last_line(folder, file, exercise, rank):
    """own_line() of the stack that a rank has written."""
    stack = Path(folder, str(rank)).read_bytes().decode("unicode_escape")  # of faulthandler
    frames = re.findall(r'File "(.+)", line (\d+) in', stack)
    return own_line([(name, int(number)) for name, number in frames[::-1]], file, exercise)


def death(process):
    """(what a process died of, what usually causes that)"""
    process.join()
    if process.exitcode >= 0:
        return f"died, exit code {process.exitcode}", "your code ended the whole process"
    name = signal.Signals(-process.exitcode).name
    return f"died of {name}", hint_at(name)
