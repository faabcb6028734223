"""Lab 3b: Hangs. Four programs that wait for ever, what their ranks leave behind, the repair.

The question: a job prints nothing any more. No rank has raised, every GPU is busy waiting. Which
rank is at fault, and in which line? Each rank can be asked for two things:

    its stack          faulthandler (py-spy from outside): which function it waits in, and which
                       line of the program has called that
    its flight record  torch's own list of the collectives that this rank has called, numbered

One rank's answer says where it waits, and that rank is seldom the one at fault. The ranks' answers
laid beside each other say more: collective number n of a group has to be the same call on all of
its ranks.

    number         1                  2                  3
    rank 0         all_reduce [4]     all_reduce [4]     all_reduce [4]
    rank 1         all_reduce [4]     all_reduce [4]     barrier []
                                                         ^ here the ranks part

Two exercises read such dumps (own_frame, first_difference). In each of four pairs wrong_NAME hangs
and right_NAME, the exercise, does what was meant:

    skipped_collective    one rank leaves out a step
    two_orders            the ranks make the same calls in different orders
    uneven_batches        one rank has more to do than the others
    crossed_messages      all send, and nobody receives

Nothing hangs for long here: a group's timeout ends a collective after some seconds. In training it
is 10 minutes (NCCL) or 30 (gloo), which is how long a job like these would burn GPUs in silence.

    python labs/lab3b_hang/lesson.py                    # checks, then all four: dumps, cause, mend
    python labs/lab3b_hang/lesson.py --dump two_orders  # what its ranks leave behind, unabridged
    python labs/lab3b_hang/lesson.py --plot hangs.png   # each rank's calls, and where they part
    python labs/lab3b_hang/lesson.py --predict 2        # first your guess; see the end
    python labs/lab3b_hang/lesson.py --inject-bug list
    python labs/grade.py start lab3b                    # writes my_labs/lab3b_hang.py

Sources: PyTorch's tutorial "Flight Recorder for Debugging Stuck Jobs" and
torch/distributed/flight_recorder (torchfrtrace, which compares NCCL's dumps as first_difference
does); Python's faulthandler; "Join" in torch.distributed.algorithms; Horovod (arXiv 1802.05799),
whose coordinator exists because of two_orders.
"""

import faulthandler
import pickle
import re
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RATE = 0.01  # of learning


# --------------------------------------------------------------------------------------------------
# 1. What a rank leaves behind
# --------------------------------------------------------------------------------------------------


def group_with_timeout(ranks, seconds):
    """A group of these ranks; a call that has waited for so many seconds raises RuntimeError."""
    return dist.new_group(ranks, timeout=timedelta(seconds=seconds))


def flight_record(group):
    """The collectives that this rank has called in a group, oldest first, as torch records them.

    The recorder is on by default and keeps the newest 2,000 (TORCH_FR_BUFFER_SIZE). Of an entry's
    fields these matter here: "collective_seq_id", from 1; "profiling_name", such as
    gloo:all_reduce; "input_sizes", a shape for each tensor; "frames", the innermost first, each
    with "filename", "line", "name". gloo records no send and no recv, and its "state" stays
    "scheduled": an entry says that the rank came, not that it got any further. (NCCL's record has
    messages too, and says which call has started and which is done.) The JSON of
    torch._C._distributed_c10d._dump_fr_trace_json() has the same entries without their frames.
    """
    dump = torch._C._distributed_c10d._dump_fr_trace(includeStackTraces=True)
    entries = pickle.loads(dump).get("entries", [])
    return [entry for entry in entries if entry["process_group"][0] == group.group_name]


def watched(program, *args, group, seconds):
    """Run program(*args, group); returns what this rank leaves behind.

    {"result": what it returned, "hung": whether a call timed out,
     "stack": where it stood after so many seconds, "" if it had returned by then,
     "record": its flight record}
    """
    result, hung = None, False
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback_later(seconds, file=file)
        try:
            result = program(*args, group)
        except RuntimeError as problem:
            if "gloo" not in str(problem):
                raise
            hung = True
        finally:
            faulthandler.cancel_dump_traceback_later()
        file.seek(0)
        stack = file.read().decode("unicode_escape")  # of a path with an accent
    return {"result": result, "hung": hung, "stack": stack, "record": flight_record(group)}


# --------------------------------------------------------------------------------------------------
# 2. Reading it
# --------------------------------------------------------------------------------------------------


def own_frame(stack, file):
    """(the function that a rank waits in, the line of the program that has led there), or None.

    stack: faulthandler's text. Each thread has a block, which begins with a line "Thread 0x...",
    and a line for each call, the innermost first:

          File "/lib/torch/distributed/distributed_c10d.py", line 2753 in send
          File "/lib/torch/distributed/c10d_logger.py", line 83 in wrapper
          File "/home/me/train.py", line 31 in exchange
          File "/home/me/train.py", line 58 in <module>

    With file "/home/me/train.py" this is ("send", 31): the innermost of all calls, and the
    innermost line of the program's own file. The program runs in one thread; others (a data
    loader's) may come before it. None: no thread runs the program, which has returned.
    """
    # exercise: own_frame
    for thread in re.split(r"^Thread 0x", stack, flags=re.M):
        calls = re.findall(r'File "(.+)", line (\d+) in (.+)', thread)
        own = [int(line) for path, line, _ in calls if path == file]
        if own:
            return calls[0][2], own[0]
    return None
    # end exercise


def called(entry):
    """An entry's call in short: "all_reduce [[4]]"."""
    return f"{entry['profiling_name'].partition(':')[2]} {entry['input_sizes']}"


def first_difference(records):
    """(number, [each rank's call or None]) of the first collective at which ranks part, or None.

    records: each rank's flight record of one group. Calls are compared as called() gives them; the
    call of a rank that has never come to this number is None. The recorder keeps the newest
    entries only: nothing is known of numbers before the oldest that a rank still has. A rank
    whose record is empty has called nothing. None: the ranks agree as far as their records go.

    What lies before is not proven right: two ranks may have made the same call for different
    reasons. Source: torch/distributed/flight_recorder/components/builder.py.
    """
    # exercise: first_difference
    calls = [{entry["collective_seq_id"]: called(entry) for entry in record} for record in records]
    oldest = max(min(known, default=1) for known in calls)
    newest = max(max(known, default=0) for known in calls)
    for number in range(oldest, newest + 1):
        each = [known.get(number) for known in calls]
        if len(set(each)) > 1:
            return number, each
    return None
    # end exercise


def diagnosis(dumps, file):
    """The lines that say where the ranks' dumps part, and where in the program's file they wait."""
    difference = first_difference([dump["record"] for dump in dumps])
    lines = ["no collective at which the ranks part"]
    if difference:
        number, calls = difference
        each = [f"rank {rank} {call or 'never came'}" for rank, call in enumerate(calls)]
        lines = [f"collective {number}: {'; '.join(each)}"]
    for rank, dump in enumerate(dumps):
        frame = own_frame(dump["stack"], file)
        where = f"waits in {frame[0]}, line {frame[1]}" if frame else "has returned"
        lines.append(f"rank {rank} {where}")
    return lines


# --------------------------------------------------------------------------------------------------
# 3. Collectives
# --------------------------------------------------------------------------------------------------


def gradient_of(batch, weight):
    """Gradient (h) of sum((batch @ weight - 1)^2) / 2: batch (n, h), n 0 too; weight (h)."""
    return batch.T @ (batch @ weight - 1)


def wrong_skipped_collective(batches, weight, group):
    """Leaves out a step whose gradient is not finite.

    The rank leaves out its all-reduce, too. From then on it is one call ahead and sums its
    next batch with the others' last one. Nothing shows until a rank has no call left to match.
    """
    for batch in batches:
        grad = gradient_of(batch, weight)
        if not grad.isfinite().all():
            continue
        dist.all_reduce(grad, group=group)
        weight = weight - RATE * grad
    dist.barrier(group)  # before rank 0 writes a checkpoint
    return weight


def right_skipped_collective(batches, weight, group):
    """The weight (h) after one step of SGD for each of a rank's batches [(n, h)].

    A step's gradient is the sum over the ranks. If on any rank it is not finite (inf, nan), all
    ranks leave the step out. Source: found_inf in Megatron's optimizer/optimizer.py.
    """
    for batch in batches:
        grad = gradient_of(batch, weight)
        # exercise: skipped_collective
        bad = (~grad.isfinite()).any().float()
        dist.all_reduce(bad, dist.ReduceOp.MAX, group=group)
        if bad:
            continue
        dist.all_reduce(grad, dist.ReduceOp.SUM, group=group)
        weight = weight - grad * RATE
        # end exercise
    dist.barrier(group)
    return weight


def wrong_two_orders(ready, group):
    """Sends each tensor as soon as the rank has it."""
    for name, tensor in ready.items():
        if name.startswith("gradient"):
            dist.all_reduce(tensor, group=group)
        else:
            dist.broadcast(tensor, group_src=0, group=group)


def right_two_orders(ready, group):
    """Sums gradients over the ranks and takes statistics from the group's rank 0, in place.

    ready: {name: tensor}, the same names on all ranks, in the order in which this rank had
    them ready (ranks differ). Tensors of the same name have the same shape. Source:
    Horovod; DDP's buckets, whose order is fixed before the backward, whatever is ready first.
    """
    # exercise: two_orders
    for name in sorted(ready):
        if name.startswith("gradient"):
            dist.all_reduce(ready[name], group=group)
        else:
            dist.broadcast(ready[name], group_src=0, group=group)
    # end exercise


def wrong_uneven_batches(batches, weight, group):
    """A step for each of the rank's batches, of which ranks have different numbers."""
    for batch in batches:
        total = torch.cat([gradient_of(batch, weight), torch.tensor([float(len(batch))])])
        dist.all_reduce(total, group=group)
        weight = weight - RATE * total[:-1] / total[-1]
    return weight


def right_uneven_batches(batches, weight, group):
    """The weight (h) after as many steps of SGD as the rank with the most batches [(n, h)] has.

    A step's gradient is the mean over the sequences of all ranks that still have a batch; batches
    differ in length. Each sequence counts once, and all ranks return the same weight. Source:
    torch.distributed.algorithms.Join: a rank that is done goes on with zeros.
    """
    # exercise: uneven_batches
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, dist.ReduceOp.MAX, group=group)
    for i in range(int(steps)):
        mine = batches[i] if i < len(batches) else weight.new_zeros(0, len(weight))
        count = weight.new_tensor([len(mine)])
        summed = torch.cat([gradient_of(mine, weight), count])
        dist.all_reduce(summed, dist.ReduceOp.SUM, group=group)
        weight = weight - summed[:-1] / summed[-1] * RATE
    return weight
    # end exercise


# --------------------------------------------------------------------------------------------------
# 4. Messages
# --------------------------------------------------------------------------------------------------


def wrong_crossed_messages(x, group):
    """All send first. send() returns when the message is received, and no rank receives.

    With small messages it may work: a backend is free to buffer them (MPI does, gloo does not).
    """
    rank, world = group.rank(), group.size()
    received = torch.empty_like(x)
    dist.send(x, group_dst=(rank + 1) % world, group=group)
    dist.recv(received, group_src=(rank - 1) % world, group=group)
    return received


def right_crossed_messages(x, group):
    """Sends each rank's x to the next rank, the last one's to rank 0; returns what has come.

    All x have the same shape; there are at least 2 ranks, perhaps an odd number. Source:
    torch.distributed.batch_isend_irecv; _p2p_ops in Megatron's p2p_communication.py.
    """
    rank, world = group.rank(), group.size()
    received = torch.empty_like(x)
    # exercise: crossed_messages
    sending = dist.isend(x, group=group, group_dst=(rank + 1) % world)
    dist.recv(received, group=group, group_src=(rank - 1) % world)
    sending.wait()
    # end exercise
    return received


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
