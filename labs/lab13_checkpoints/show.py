"""What the finished lab 13 shows: every layout of the suite saved, and loaded in every other.

The first steps of a run in one layout, the others in another, against a run that nothing stopped;
what each rank writes and reads; PyTorch's distributed checkpoint beside it.
"""

import re
import tempfile
from pathlib import Path

import numpy as np

from labs.kit.harness import on_ranks, table
from labs.kit.pictures import GREY, PALE, RANKS, picture
from labs.lab13_checkpoints.dcp import load_both, plain_tensors, save_both
from labs.lab13_checkpoints.disk import counting
from labs.lab13_checkpoints.suite import (
    LAYOUTS,
    SOME,
    STEPS,
    load_and_train,
    one_device,
    train_and_save,
)

EXACT = 1e-12  # relative: of each loss, of each weight of each rank
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight"
SHOWN = [("tp 2", "tp 3"), ("tp 2", "zero3 3"), ("zero3 3", "tp 2"), ("ulysses 2", "pp 2")]


def apart(losses, right):
    """The largest relative difference of two lists of losses."""
    return max(abs(a / b - 1) for a, b in zip(losses, right))


def rank_of(file):
    """The rank that wrote a file save1-rank0.safetensors."""
    return int(re.search(r"rank(\d+)", file)[1])


def save_all(lab, args, names, folders, losses):
    """The first steps in each layout, and a save: [row of each]."""
    rows = []
    for name in names:
        world = LAYOUTS[name][1]
        ranks = on_ranks(world, train_and_save, lab, name, args.seed, folders[name])
        index, written = lab.read_index(folders[name]), [0] * world
        for saved in index["tensors"].values():
            size = lab.DTYPES[saved["dtype"]].itemsize
            for piece in saved["pieces"]:
                _, length, _, count = piece["runs"]
                written[rank_of(piece["file"])] += size * length * count
        row = {"layout": name, "held": [rank["held"] for rank in ranks], "written": written}
        row["files"] = [index["files"][f]["bytes"] for f in sorted(index["files"])]
        rows.append(row | {"error": max(apart(rank["losses"], losses[:STEPS]) for rank in ranks)})
    return rows


def load_all(lab, args, names, folders, losses, right):
    """From each checkpoint the last steps in each layout: [row of each pair]."""
    rows = []
    for name in names:
        how = lab, name, args.seed, folders, right
        ranks = on_ranks(LAYOUTS[name][1], load_and_train, *how, timeout=300)
        for source in folders:
            figures = [rank[source] for rank in ranks]
            error = max(max(f["error"], apart(f["losses"], losses[STEPS:])) for f in figures)
            row = {"saved": source, "loaded": name, "error": error}
            for key in "held", "peak":
                row[key] = [f[key] for f in figures]
            read = [{rank_of(file): size for file, size in f["read"].items()} for f in figures]
            rows.append(row | {"read": [[r.get(i, 0) for i in range(6)] for r in read]})
    return rows


def show_saved(rows):
    """The table of what ranks hold and write, and what is off."""
    total, off = sum(rows[0]["written"]), []
    print(
        "\nSaved after 3 steps: weights, exp_avg, exp_avg_sq (float64), step. Bytes, rank by rank"
    )
    lines = [["layout", "holds", "writes", "all / P"]]
    for row in rows:
        held, written = (" ".join(map(str, row[key])) for key in ("held", "written"))
        lines.append([row["layout"], held, written, str(total // len(row["held"]))])
        if sum(row["written"]) != total:
            off.append(f"{row['layout']} writes {sum(row['written'])} bytes, not {total}")
        if not row["error"] <= EXACT:
            off.append(f"{row['layout']}: losses are off by {row['error']:.0e}")
    table(*lines)
    return off


def show_pairs(rows, names):
    """The matrix of errors, what is read beside the ideal, and what is off."""
    error = {(row["saved"], row["loaded"]): row["error"] for row in rows}
    print("\n3 steps, saved as the row says, loaded as the column says, 3 steps more: the largest")
    print("relative error of a loss or of a rank's weight, against 6 steps on one device (float64)")
    lines = [[a, *(f"{error[a, b]:.0e}" for b in names)] for a in names]
    table(["saved by", *names], *lines)
    off = []
    for row in rows:
        pair = f"{row['saved']} to {row['loaded']}"
        if not row["error"] <= EXACT:
            off.append(f"{pair}: off by {row['error']:.0e}")
        if [sum(files) for files in row["read"]] != row["held"]:
            off.append(f"{pair}: bytes are read that the rank does not hold")
    print("\nRead by each rank, in bytes, from the files of rank 0, 1, ...; ideal: what it holds")
    lines = []
    for row in rows:
        if (row["saved"], row["loaded"]) in SHOWN:
            for rank, files in enumerate(row["read"]):
                files = " + ".join(map(str, filter(None, files)))
                pair = [row["saved"], row["loaded"], str(rank), files]
                lines.append([*pair, str(row["held"][rank]), str(row["peak"][rank])])
    table(["saved by", "loaded by", "rank", "reads", "holds", "alive beside"], *lines)
    print("\n  alive beside: the most of other tensors while it loads (names that ranks exchange)")
    return off


def show_dcp(lab, right, folder):
    """DCP and the lab, rows of 2 ranks to rows of 3; plain tensors; figures, and what is off."""
    for name in "dcp", "ours", "plain":
        Path(folder, name).mkdir()
    saved = on_ranks(2, save_both, lab, right, folder)
    loaded = on_ranks(3, load_both, lab, right, folder)
    columns = {OUTPUT: right[OUTPUT]}
    plain = on_ranks(2, plain_tensors, columns, str(Path(folder, "plain")))
    print("\nPyTorch's DCP: the weights, cut by rows, saved by 2 ranks and loaded by 3. In bytes:")
    print("each file (DCP's has a zip archive for each tensor); the numbers that a rank reads")
    rows = [["2 save", str(r), *map(str, sizes)] for r, sizes in enumerate(saved)]
    rows += [["3 read", str(r), *map(str, sizes[:3])] for r, sizes in enumerate(loaded)]
    table(["", "rank", "holds", "DCP", "this lab"], *rows)
    back = " and ".join(f"rank {r} {'yes' if same else 'no'}" for r, same in enumerate(plain))
    print("\n  A rank's columns of o_proj as plain tensors, saved and loaded by DCP in one layout:")
    print(f"  does a rank get back what it saved? {back}")
    off = [] if all(same for *_, same in loaded) else ["DCP and the lab do not load the same"]
    found = {"saved": saved, "loaded": [sizes[:3] for sizes in loaded], "plain": plain}
    return found, off


def from_rank1(lab, folder):
    """% of rank 0 of 2's rows of the embedding that it reads from rank 1's file of tp 3."""
    layout = {EMBEDDING: lab.cut((50, 24), 0, 0, 25)}
    tensors = {EMBEDDING: lab.torch.empty(25, 24, dtype=lab.torch.float64)}
    with counting() as read:
        lab.fill(folder, lab.read_index(folder), tensors, layout)
    return 100 * read["save1-rank1.safetensors"] / tensors[EMBEDDING].nbytes


def sources(lab, folder):
    """For the picture: {name: (shape, [(runs, rank of the file)])} of two matrices of tp 2."""
    index = lab.read_index(folder)
    found = {}
    for name in EMBEDDING, OUTPUT:
        saved = index["tensors"][name]
        pieces = [(piece["runs"], rank_of(piece["file"])) for piece in saved["pieces"]]
        found[name] = saved["shape"], pieces
    return found


def experiment(lab, args):
    """All of it: {"saves", "pairs", "dcp", "failed", ...}."""
    names = list(LAYOUTS)[: None if args.pairs == "all" else SOME]
    losses, right = one_device(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        folders = {name: f"{folder}/{name}" for name in names}
        for path in folders.values():
            Path(path).mkdir()
        saves = save_all(lab, args, names, folders, losses)
        off = show_saved(saves)
        pairs = load_all(lab, args, names, folders, losses, right)
        off += show_pairs(pairs, names)
        dcp, wrong = show_dcp(lab, right, folder)
        found = {"saves": saves, "pairs": pairs, "dcp": dcp, "failed": off + wrong}
        found["from_rank1"] = from_rank1(lab, folders["tp 3"])
        return found | {"sources": sources(lab, folders["tp 2"])}


def draw_sources(axis, results):
    """Two matrices, coloured by the file that has the numbers; black: where tp 3's ranks cut."""
    left = 0
    for (name, (shape, pieces)), dim in zip(results["sources"].items(), (0, 1)):
        height, width = shape
        grid = np.zeros(height * width, dtype=int)
        for (offset, length, stride, count), rank in pieces:
            for run in range(count):
                grid[offset + run * stride :][:length] = rank
        colours = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in RANKS])
        extent = left, left + width, height, 0
        axis.imshow(colours[grid.reshape(shape)], extent=extent, interpolation="nearest")
        for end in np.cumsum([shape[dim] // 3 + (r < shape[dim] % 3) for r in range(2)]):
            rows = [left, left + width], [end] * 2
            axis.plot(*([left + end] * 2, [0, height]) if dim else rows, color="black", lw=3)
        axis.text(left, -1, name.split(".")[-2], fontsize=9)
        left += width + 8
    axis.set(xlim=(-1, left), ylim=(52, -4), xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    axis.set_title("tp 2 saved (colour: the file)\ntp 3 loads (black: its cuts)", loc="left")


def draw(results, path):
    """Whose file has what; who reads what from whom; what each rank holds and writes."""
    total = sum(results["saves"][0]["written"])
    line = {"markersize": 20, "markeredgewidth": 2}
    with picture(path, [["cuts", "reads", "writes"]], (14, 5), width_ratios=[2, 3, 3]) as axes:
        cuts, reads, writes = axes.values()
        draw_sources(cuts, results)
        for row in results["pairs"]:
            for rank, files in enumerate(row["read"]):
                if (row["saved"], row["loaded"]) in SHOWN:
                    bar = f"{row['saved']} to {row['loaded']}, rank {rank}"
                    for file, size in enumerate(files):
                        reads.barh(bar, size, left=sum(files[:file]), color=RANKS[file])
                    reads.plot(row["held"][rank], bar, "|", color="black", **line)
        for row in results["saves"][:SOME]:
            for rank, (held, written) in enumerate(zip(row["held"], row["written"])):
                bar = f"{row['layout']}, rank {rank}"
                writes.barh(bar, held, color=PALE)
                writes.barh(bar, written, color=RANKS[rank], height=0.5)
                writes.plot(total / len(row["held"]), bar, "|", color=GREY, **line)
        reads.set_title("Who reads what", loc="left")
        reads.set(xlabel="kB; colour: whose file; black: what the rank holds")
        writes.set_title("Who saves what", loc="left")
        writes.set(xlabel="kB written; pale: held; line: all / P")
        for axis in reads, writes:
            axis.invert_yaxis()
            axis.tick_params("y", labelsize=8)
            axis.xaxis.set_major_formatter(lambda size, _: f"{size / 1e3:g}")


PREDICT = (
    "tp.py saved on 3 ranks, and 2 load. The embedding has 50 rows; if P does not divide 50, "
    "the first ranks have one more. What percentage of rank 0's rows is in rank 1's file?",
    "rank 0 of 2 has rows 0 to 24, rank 1 of 3 saved rows 17 to 33: 8 of 25",
    lambda results: results["from_rank1"],
)


def add_options(parser):
    """The option of this lab's own."""
    parser.add_argument("--pairs", choices=["some", "all"], default="some", help="layouts (some)")
