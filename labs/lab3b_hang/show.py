"""What the finished lab 3b shows: four hangs, what their ranks leave behind, and their mends."""

import linecache
import time

import torch

from labs.kit.harness import on_ranks, table
from labs.kit.inputs import numbers
from labs.kit.pictures import BLUE, GREY, RED, picture
from labs.kit.tools import on_every_rank

RANKS = 2
PATIENCE = 2  # seconds till a call fails; the stack is dumped after half of it
ASKED = 7, {0: [2], 1: [1, 4]}  # batches, and of each rank those that are not finite
NAMES = "skipped_collective", "two_orders", "uneven_batches", "crossed_messages"


def arguments(name, rank, seed):
    """What the program of that name is given on a rank."""
    batches, weight = list(numbers(seed + rank, 4, 3, 4)), numbers(seed + 9, 4)
    if name == "skipped_collective":
        if rank == 1:
            batches[1][0, 0] = torch.nan
        return batches, weight
    if name == "uneven_batches":
        return batches[: 4 - rank], weight
    if name == "two_orders":
        tensors = {"gradient": torch.ones(4), "mean": torch.ones(4)}
        return ({key: tensors[key] for key in sorted(tensors, reverse=rank == 1)},)
    return (torch.full((4,), float(rank)),)


def run_both(group, lab, name, seed):
    """On this rank: {"wrong": all ranks' dumps, "right": all ranks' dumps, "seconds": of that}."""
    args, seen = arguments(name, group.rank(), seed), {}
    for kind in ("wrong", "right"):
        own = lab.group_with_timeout(list(range(group.size())), PATIENCE if kind == "wrong" else 30)
        program, begin = getattr(lab, f"{kind}_{name}"), time.perf_counter()
        dump = lab.watched(program, *args, group=own, seconds=PATIENCE / 2)
        seen["seconds"] = time.perf_counter() - begin
        del dump["result"]
        seen[kind] = on_every_rank(dump, group)
    return seen


def asked(group, lab, seed):
    """All ranks' flight records of skipped_collective as the question at the end has it."""
    count, skipped = ASKED
    batches = list(numbers(seed + group.rank(), count, 3, 4))
    for i in skipped[group.rank()]:
        batches[i][0, 0] = torch.nan
    own = lab.group_with_timeout(list(range(group.size())), PATIENCE)
    how = {"group": own, "seconds": PATIENCE}
    dump = lab.watched(lab.wrong_skipped_collective, batches, numbers(seed + 9, 4), **how)
    return on_every_rank(dump["record"], group)


def line_in(entry, file):
    """The line of the program's file that has made a recorded call."""
    return next((frame["line"] for frame in entry["frames"] if frame["filename"] == file), None)


def print_dumps(name, dumps, file):
    """What the ranks leave behind, unabridged; of an entry only what differs."""
    for rank, dump in enumerate(dumps):
        print(f"\n  {name}, rank {rank}: its stack\n")
        print(dump["stack"].rstrip() or "(none: it had returned)")
        print(f"\n  {name}, rank {rank}: its flight record")
        fields = "collective_seq_id", "profiling_name", "input_sizes"
        rows = [[entry[field] for field in fields] for entry in dump["record"]]
        lines = [line_in(entry, file) for entry in dump["record"]]
        table([*fields, "line"], *([*row, line] for row, line in zip(rows, lines)))


def what_they_say(lab, dumps):
    """{"calls", "difference", "frames"}: each rank's calls, where they part, where each waits."""
    return {
        "calls": [[lab.called(entry) for entry in dump["record"]] for dump in dumps],
        "difference": lab.first_difference([dump["record"] for dump in dumps]),
        "frames": [lab.own_frame(dump["stack"], lab.__file__) for dump in dumps],
    }


def experiment(lab, args):
    """{"programs": {name: what_they_say() of its dumps}, "asked": where ranks part, "failed"}."""
    programs, failed = {}, []
    stacks = [["stacks", "rank", "waits in", "line", "its text"]]
    records = [["records", "part at call", *(f"rank {rank}" for rank in range(RANKS)), "mended"]]
    for name in NAMES:
        seen = on_ranks(RANKS, run_both, lab, name, args.seed)[0]
        if args.dump == name:
            print_dumps(name, seen["wrong"], lab.__file__)
        programs[name] = said = what_they_say(lab, seen["wrong"])
        for rank, frame in enumerate(said["frames"]):
            waits, line = frame or ("(has returned)", 0)
            text = linecache.getline(lab.__file__, line).strip()
            stacks.append(["" if rank else name, rank, waits, line or "", text])
        number, calls = said["difference"] or ("none", [""] * RANKS)
        calls = [call if call is not None else "never came" for call in calls]
        records.append([name, number, *calls, f"{seen['seconds'] * 1e3:.0f} ms"])
        if not any(dump["hung"] for dump in seen["wrong"]):
            failed.append(f"{name}: the wrong way does not hang")
        if any(dump["hung"] for dump in seen["right"]):
            failed.append(f"{name}: the right way hangs")
    table(*stacks)
    table(*records)
    records = on_ranks(RANKS, asked, lab, args.seed)[0]
    return {"programs": programs, "asked": lab.first_difference(records)[0], "failed": failed}


def draw(results, path):
    """A row for each rank: its calls by number, an empty cell for one that never came."""
    from matplotlib.patches import Patch, Rectangle

    never = {"facecolor": "white", "edgecolor": GREY, "linestyle": "--"}
    with picture(path, [[name] for name in NAMES], (9, 1.7 * len(NAMES) + 0.5)) as axes:
        for name, said in results["programs"].items():
            axis, part = axes[name], (said["difference"] or [99])[0]
            longest = max(map(len, said["calls"]))
            for rank, calls in enumerate(said["calls"]):
                for i, call in enumerate(calls + ["never came"] * (longest - len(calls))):
                    look = {"facecolor": BLUE if i + 1 < part else RED, "edgecolor": "white"}
                    here = i < len(calls)
                    look, ink = (look, "white") if here else (never, GREY)
                    axis.add_patch(Rectangle((i + 0.02, -rank - 0.9), 0.96, 0.8, **look))
                    axis.text(i + 0.5, -rank - 0.5, call, color=ink, ha="center", va="center")
                frame = said["frames"][rank]
                state = f"waits in {frame[0]}" if frame else "has returned"
                axis.text(longest + 0.1, -rank - 0.5, state, color="0.35", va="center")
            axis.set(xlim=(0, 6.5), ylim=(-RANKS, 0), xticks=[], title=name.replace("_", " "))
            axis.set_yticks([-rank - 0.5 for rank in range(RANKS)], ["rank 0", "rank 1"])
            axis.spines[["left", "bottom"]].set_visible(False)
            axis.tick_params(length=0)
        boxes = [Patch(facecolor=BLUE), Patch(facecolor=RED), Patch(**never)]
        said = "the ranks agree", "they part: another call, or one that waits alone", "never came"
        axes[NAMES[0]].legend(boxes, said, loc="lower left", bbox_to_anchor=(0, 1.25), ncols=3)


PREDICT = (
    "each rank has 7 batches, then a barrier. Rank 0 skips its third, rank 1 its second and "
    "fifth, which are not finite: at which collective do the ranks' flight records part?",
    "rank 0 calls 6 all-reduces, rank 1 calls 5 and then the barrier; before that the calls "
    "look alike, whichever batches they are for",
    lambda results: results["asked"],
)


def add_options(parser):
    """The lab's own option."""
    parser.add_argument("--dump", metavar="NAME", choices=NAMES, help="print a program's dumps")
