"""published_runs.csv: the runs that judge lab 11's model, and a fit to the others."""

import csv
import dataclasses
import hashlib
import math
import statistics

from labs.kit.harness import LABS

FIRST_GUESS = {"matmul": 7e14, "network": 5e10, "hop": 1e-5, "host": 1e-3}
FIRST_GUESS |= {"other": 0.01}  # from where a fit can start


def read_runs():
    """The rows of published_runs.csv, dicts of texts."""
    with open(LABS / "lab11_time" / "published_runs.csv", newline="") as file:
        return list(csv.DictReader(file))


def consistent(row):
    """Whether dp, mbs and gradacc make the sequences that the row claims."""
    return int(row["dp"]) * int(row["mbs"]) * int(row["gradacc"]) == int(row["gbs"])


def judged(row):
    """Whether the model is held to a run: no pipeline, at most 32 nodes, no contradiction."""
    return row["pp"] == "1" and int(row["nodes"]) <= 32 and consistent(row)


def half(row):
    """0: a run that the constants are fitted to; 1: one that judges them. By a hash of the row."""
    names = "model", "nodes", "dp", "pp", "tp", "mbs", "gradacc", "zero"
    key = ",".join(row[name] for name in names)
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % 2


def measured(row):
    return float(row["tok_s_gpu"])


def error(lab, rows, cluster):
    """Mean |log(predicted / measured)|; a run counts for at most 0.5, whatever went wrong in it."""
    off = [abs(math.log(lab.predict_run(row, cluster) / measured(row))) for row in rows]
    return statistics.mean(min(0.5, one) for one in off)


def fit(lab, rows, cluster):
    """The cluster with READ_OFF's constants fitted to runs: each in turn is tried up and down."""
    factors, best = dict.fromkeys(lab.READ_OFF, 4.0), error(lab, rows, cluster)
    while max(factors.values()) > 1.003:
        for name, factor in factors.items():
            value = getattr(cluster, name)
            for changed in (value * factor, value / factor):
                other = dataclasses.replace(cluster, **{name: changed})
                found = error(lab, rows, other)
                if found < best:
                    cluster, best = other, found
                    break
            else:
                factors[name] **= 0.6
    return cluster


def scored(lab, rows, cluster):
    """score() of the runs' predictions, a case being a model on so many nodes."""
    return lab.score(
        [((r["model"], r["nodes"]), lab.predict_run(r, cluster), measured(r)) for r in rows]
    )
