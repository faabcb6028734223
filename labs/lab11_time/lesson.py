"""Lab 11: Time. How long does a step take, and what fills it? A model, held against measured runs.

A step of one GPU, from the first microbatch to the optimizer:

    | microbatch | microbatch |  ...  | microbatch | bubble | gradients | optimizer | other |
     \\________/
      forward: a third of the device's work      backward: two thirds
      device   | matmul | attention | memory | communication that nothing hides |
      host     | Python, and a launch for each kernel        |
      in the forward and in the backward the longer of the two counts

Each part gets a formula from what the hardware can do: floating point operations over FLOP/s, bytes
over bytes/s, messages over a ring. That gives the seconds of a step for any model, any cluster and
any split into data, pipeline and tensor parallelism (dp, pp, tp). Then comes what such formulas
seldom get: a test. published_runs.csv (in this folder) has 838 runs, measured with nanotron on
1 to 64 nodes of 8 H100. Most of what the formulas need is published. Five numbers are not; one
half of 183 runs without a pipeline gives them, and the other half is the judge.

What nanotron does in these runs: bf16, 4096 tokens, 256 sequences a step, gradients accumulated in
float32, sequence parallelism with tp, inputs gathered again for the backward but no other
recomputation, 1F1B, AdamW; ranks are numbered along tp first, then dp, then pp. Its linear layers
hide some of their messages:

    column parallel   forward   all-gather of x beside the rank's own 1/tp of the matmul
                      backward  all-gather of x again, beside dx; reduce-scatter of dx, beside dW
    row parallel      forward   reduce-scatter of y: nothing hides it
                      backward  all-gather of dy beside the rank's own 1/tp of dx

    python labs/lab11_time/lesson.py                     # checks; the model against the runs
    python labs/lab11_time/lesson.py --plot lab11.png --json lab11.json
    python labs/lab11_time/lesson.py --split 8B:2:4x1x4  # one split: model, nodes, dp x pp x tp
    python labs/lab11_time/lesson.py --plan --model llama-3.1-8b --nodes 2 --length 131072
    python labs/grade.py start lab11                     # writes my_labs/lab11_time.py

Sources: Ultra-Scale Playbook (Hugging Face), whose runs these are. Roofline: Williams et al., CACM
2009. MFU: PaLM, arXiv 2204.02311, appendix B. FLOPs and 1F1B: Megatron-LM, arXiv 2104.04473.
FlashAttention-2, arXiv 2307.08691. Rates of matmul and memory: Bekman, ml-engineering. Other such
models, judged by their authors' own runs: Calculon (SC 2023), vTrain (arXiv 2312.12391).
"""

import dataclasses
import itertools
import math
import statistics
import sys
from pathlib import Path

import numpy as np

BF16, FP32 = 2, 4  # bytes

# --------------------------------------------------------------------------------------------------
# What is trained, and on what
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Model:
    """A LLaMA; `tied`: the head's matrix is the embedding's."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool

    @property
    def linear(self):
        """A layer's linear layers: [(how it is sharded, input features, output features)]."""
        h, qkv = self.hidden, self.hidden * (self.heads + 2 * self.kv_heads) // self.heads
        attention, mlp = [("column", h, qkv), ("row", h, h)], ("column", h, 2 * self.ffn)
        return [*attention, mlp, ("row", self.ffn, h)]

    @property
    def layer_weights(self):
        return sum(inputs * outputs for _, inputs, outputs in self.linear)

    @property
    def head_weights(self):
        return self.vocab * self.hidden


MODELS = {  # the first four are the published runs'
    "1B": Model(16, 2048, 32, 32, 8192, 131072, True),
    "3B": Model(28, 3072, 32, 32, 8192, 131072, True),
    "8B": Model(32, 4096, 32, 32, 14336, 131072, False),
    "80B": Model(80, 8192, 64, 64, 28672, 131072, False),
    "llama-3.2-1b": Model(16, 2048, 32, 8, 8192, 128256, True),
    "llama-3.1-8b": Model(32, 4096, 32, 8, 14336, 128256, False),
    "llama-3.1-70b": Model(80, 8192, 64, 8, 28672, 128256, False),
}


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs. FLOP/s and bytes/s (in one direction) are those of one GPU."""

    # published
    peak: float = 989e12  # H100's dense bf16, as its data sheet says
    attention: tuple = ((64, 240e12), (128, 300e12))  # FlashAttention-2, causal: by head size
    memory: float = 2.9e12  # copying; the data sheet says 3.35e12
    nvlink: float = 361e9  # bus bandwidth of all-gather and reduce-scatter in a node
    node: int = 8  # GPUs in a node
    spread: float = 0.42e-12  # seconds a byte for each further node: the Playbook's all-reduce has
    # 362 GB/s on 2 nodes and 65 on 32, and (1 / 65e9 - 1 / 362e9) / 30 is this
    # read off one half of the runs, see fit() in runs.py
    matmul: float = 446e12  # sustained, of a large matmul; the best that was seen is 794e12
    network: float = 36.7e9  # out of the node; the line rate is 50e9
    hop: float = 44.1e-6  # seconds a step of a ring that leaves the node
    host: float = 4.59e-3  # seconds a layer and microbatch: Python and launches
    other: float = 0.0690  # seconds a step that no formula here explains


READ_OFF = "matmul", "network", "hop", "host", "other"
H100 = Cluster()

# --------------------------------------------------------------------------------------------------
# Operations
# --------------------------------------------------------------------------------------------------


def flops_per_token(model, length):
    """Floating point operations that training needs for a token: (layers, attention, head).

    Forward and backward, nothing recomputed. A matmul of (n, k) and (k, m) takes 2 n k m; a weight
    has one matmul in the forward, two in the backward. Norms, rotary and the embedding, which
    is a lookup, count nothing. attention: q k^T and the product with v, for each token over
    all `length` positions, masked ones included (PaLM's convention, and these runs').
    """
    # exercise: flops
    layers = 6 * model.layers * model.layer_weights
    attention = 3 * model.layers * 2 * (2 * length * model.hidden)
    return layers, attention, 6 * model.head_weights
    # end exercise


def mfu(model, length, tokens_per_second, gpus, peak):
    """Model FLOPs utilization: operations needed over what `gpus` GPUs of `peak` FLOP/s could do.

    tokens_per_second: of all GPUs together.
    """
    # exercise: mfu
    return tokens_per_second * sum(flops_per_token(model, length)) / (gpus * peak)
    # end exercise


# --------------------------------------------------------------------------------------------------
# Kernels and messages
# --------------------------------------------------------------------------------------------------


def matmul_seconds(rows, inputs, outputs, cluster):
    """A bf16 matmul (rows, inputs) x (inputs, outputs): a roofline.

    The slower of two limits decides: cluster.matmul FLOP/s for its operations, cluster.memory
    bytes/s to read both factors and to write the result.
    """
    # exercise: roofline
    compute = 2 * rows * inputs * outputs / cluster.matmul
    numbers = rows * inputs + inputs * outputs + rows * outputs
    return max(compute, BF16 * numbers / cluster.memory)
    # end exercise


def ring_seconds(message, ranks, in_node, cluster):
    """An all-gather or reduce-scatter of `message` bytes (the full tensor) over a ring of ranks.

    in_node: how many of its ranks share a node. A ring takes ranks - 1 steps; in each of them every
    rank sends one of the message's `ranks` pieces. Inside one node they send at cluster.nvlink
    bytes/s, and a step costs nothing else. Over several nodes each of the in_node GPUs has a
    network adapter of its own, so the ring leaves a node at in_node * cluster.network
    bytes/s; each step costs cluster.hop seconds besides; and each byte that a rank sends takes
    cluster.spread seconds longer for each node after the first. One rank sends nothing.
    """
    # exercise: ring
    sent = message * (ranks - 1) / ranks
    nodes = ranks / in_node
    if nodes <= 1:
        return sent / cluster.nvlink
    per_byte = 1 / (in_node * cluster.network) + (nodes - 1) * cluster.spread
    return (ranks - 1) * cluster.hop + sent * per_byte
    # end exercise


def exposed_seconds(way, message, matmul, tp):
    """Seconds of a linear layer's messages that nothing hides, forward and backward together.

    way: "column" or "row". message: seconds of one all-gather or reduce-scatter, which take
    equally long. matmul: seconds of each matmul, the forward's, dx's and dW's. The
    table above says what runs beside what. A message is exposed by the seconds that it takes
    longer than what it runs beside.
    """
    # exercise: overlap
    beside_own = max(0.0, message - matmul / tp)
    if way == "row":
        return message + beside_own
    return beside_own + 2 * max(0.0, message - matmul)
    # end exercise


# --------------------------------------------------------------------------------------------------
# A microbatch, and a step
# --------------------------------------------------------------------------------------------------


def add_up(*parts):
    """{name: seconds}, the sum of several of them."""
    total = {}
    for part in parts:
        for name, seconds in part.items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def linear_parts(way, inputs, outputs, tokens, tp, cluster):
    """Matmuls and exposed messages of a linear layer, forward and backward."""
    if way == "column":
        matmul, features = matmul_seconds(tokens, inputs, outputs // tp, cluster), inputs
    else:
        matmul, features = matmul_seconds(tokens, inputs // tp, outputs, cluster), outputs
    message = ring_seconds(BF16 * tokens * features, tp, min(tp, cluster.node), cluster)
    exposed = exposed_seconds(way, message, matmul, tp)
    return {"matmul": 3 * matmul, "communication": exposed}


def layer_parts(model, tokens, length, tp, cluster):
    """{part: device seconds} of a layer, forward and backward of `tokens`, on each of tp ranks.

    attention: two matmuls of 2 x tokens x length x hidden, of which the mask leaves half; 2.5 times
    that in the backward, which computes the scores again. memory counts passes over tensors: norms
    and residual sums take 10 forward and 12 backward, over tokens / tp; q, k, v and attention's
    output are each read and written once more, both ways (rotary, transposes); silu(gate) * up
    takes 3 and 5. Each microbatch's bf16 gradient is added to a float32 one: 10 bytes a weight.
    """
    linear = [linear_parts(*shape, tokens, tp, cluster) for shape in model.linear]
    rate = float(np.interp(model.hidden / model.heads, *zip(*cluster.attention)))
    attention = 3.5 * 2 * tokens * length * model.hidden / tp / rate
    heads = 4 * (2 + 2 * model.kv_heads / model.heads)  # passes over (tokens, hidden / tp)
    passes = (22 + heads) * model.hidden + 8 * model.ffn
    moved = (BF16 * passes * tokens + 10 * model.layer_weights) / tp
    return add_up(*linear, {"attention": attention, "memory": moved / cluster.memory})


def head_parts(model, tokens, tp, cluster):
    """{part: device seconds} of head and loss: ten passes over the logits in float32."""
    linear = linear_parts("column", model.hidden, model.vocab, tokens, tp, cluster)
    moved = (10 * FP32 * tokens * model.vocab + 10 * model.head_weights) / tp
    return add_up(linear, {"memory": moved / cluster.memory})


def host_gap(device, host):
    """Seconds that the device waits for the host's launches, in a microbatch.

    device, host: seconds that each works on it. The forward has a third of the device's work
    and half of the host's; the backward has the rest. In each, the slower of the two decides.
    """
    # exercise: host
    forward = max(0.0, host / 2 - device / 3)
    backward = max(0.0, host / 2 - device * 2 / 3)
    return forward + backward
    # end exercise


def stage_parts(model, layers, head, tp, tokens, length, cluster):
    """{part: seconds} of a microbatch of `tokens` on a stage of so many layers (and the head)."""
    layer = layer_parts(model, tokens, length, tp, cluster)
    parts = {name: layers * seconds for name, seconds in layer.items()}
    if head:
        parts = add_up(parts, head_parts(model, tokens, tp, cluster))
    return parts | {"host": host_gap(sum(parts.values()), layers * cluster.host)}


def stage_layers(model, pp):
    """(most layers of a stage before the last, layers of the last, which has the head as well)."""
    head = model.head_weights / model.layer_weights if pp > 1 else 0  # in layers of equal cost
    most = math.ceil((model.layers + head) / pp)
    return most, max(0, model.layers - most * (pp - 1))


def pipeline_seconds(slowest, stages, microbatches):
    """(work, bubble) of 1F1B: seconds that the slowest stage computes, and seconds that it waits.

    slowest: seconds of its forward and backward of one microbatch. In all it waits, at start
    and end, for the other stages - 1, which each need as long as it for one microbatch.
    """
    # exercise: bubble
    return microbatches * slowest, (stages - 1) * slowest
    # end exercise


def gradient_seconds(weights, dp, tp, zero, last_backward, cluster):
    """Seconds that data parallelism adds to a step, on a rank with `weights` weights.

    tp ranks of a node are one replica's, so a ring over dp replicas has node / tp ranks in
    each node, at least 1, at most dp. Gradients are float32. zero 0: an all-reduce, which is a
    reduce-scatter and an all-gather; it starts bucket by bucket in the last microbatch's backward,
    which hides up to last_backward seconds of it. zero 1: a reduce-scatter and, after the
    optimizer, an all-gather of the weights in bf16; these runs show nothing that hides them.
    """
    # exercise: gradients
    in_node = min(dp, max(1, cluster.node // tp))
    ring = ring_seconds(FP32 * weights, dp, in_node, cluster)
    if zero == 0:
        return max(0.0, 2 * ring - last_backward)
    return ring + ring_seconds(BF16 * weights, dp, in_node, cluster)
    # end exercise


def optimizer_seconds(weights, dp, zero, cluster):
    """AdamW and clipping: 38 bytes for a weight that the rank updates, 8 for each gradient."""
    updated = weights / dp if zero else weights
    return (38 * updated + 8 * weights) / cluster.memory


def step_parts(model, cluster, dp, pp, tp, microbatch, microbatches=1, length=4096, zero=0):
    """{part: seconds} of a training step on dp x pp x tp GPUs. The parts add up to the step.

    microbatch: sequences in one; microbatches: how many a replica has in a step. A send
    between pipeline stages is short beside what the stages compute, and is left out.
    """
    most, last = stage_layers(model, pp)
    stages = [(last, True), (most, False)] if pp > 1 else [(last, True)]
    tokens = microbatch * length
    works = {stage: stage_parts(model, *stage, tp, tokens, length, cluster) for stage in stages}
    layers, head = slowest = max(works, key=lambda stage: sum(works[stage].values()))
    seconds = sum(works[slowest].values())
    work, bubble = pipeline_seconds(seconds, pp, microbatches)
    parts = {name: part * work / seconds for name, part in works[slowest].items()}
    tables = int(head) + int(pp == 1 and not model.tied)  # the head and the embedding
    weights = (layers * model.layer_weights + tables * model.head_weights) / tp
    gradients = gradient_seconds(weights, dp, tp, zero, seconds * 2 / 3, cluster)
    optimizer = optimizer_seconds(weights, dp, zero, cluster)
    rest = {"bubble": bubble, "gradients": gradients, "optimizer": optimizer}
    return parts | rest | {"other": cluster.other}


def predict(*split, **options):
    """Seconds of a training step; the arguments are those of step_parts()."""
    return sum(step_parts(*split, **options).values())


def predict_run(row, cluster=H100):
    """Tokens a second a GPU of a run: {column of published_runs.csv: its text}.

    mbs: sequences a microbatch; gradacc: microbatches a step, on each of dp replicas. If these
    three do not make the gbs sequences that the row claims, count what they make.
    """
    # exercise: predict_run
    names = "dp", "pp", "tp", "mbs", "gradacc", "zero"
    dp, pp, tp, mbs, gradacc, zero = (int(row[name]) for name in names)
    seconds = predict(MODELS[row["model"]], cluster, dp, pp, tp, mbs, gradacc, zero=zero)
    return dp * mbs * gradacc * 4096 / seconds / (dp * pp * tp)
    # end exercise


# --------------------------------------------------------------------------------------------------
# The judge
# --------------------------------------------------------------------------------------------------


def score(runs):
    """How good predictions are: runs [(case, predicted, measured)], in tokens a second a GPU.

    Returns {"median": of |predicted / measured - 1|; "within_10": the fraction of runs where that
    is at most 0.1; "within_20"; "ordered": of all pairs of runs of one case, the fraction whose
    faster run was predicted to be the faster; "picks": of the cases with two runs or more, the
    fraction where the run that was predicted to be the fastest takes at most 1.05 times as long as
    the one that was}.
    """
    # exercise: score
    errors = [abs(predicted / measured - 1) for _, predicted, measured in runs]
    cases = {}
    for case, predicted, measured in runs:
        cases.setdefault(case, []).append((predicted, measured))
    cases = [case for case in cases.values() if len(case) > 1]
    pairs = [pair for case in cases for pair in itertools.combinations(case, 2)]
    picks = [max(case)[1] * 1.05 >= max(measured for _, measured in case) for case in cases]
    return {
        "median": statistics.median(errors),
        "within_10": statistics.mean(error <= 0.1 for error in errors),
        "within_20": statistics.mean(error <= 0.2 for error in errors),
        "ordered": statistics.mean((a[0] > b[0]) == (a[1] > b[1]) for a, b in pairs),
        "picks": statistics.mean(picks),
    }
    # end exercise


def waiting(runs):
    """What pipelines waited for: runs [(microbatches, stages, measured - predicted seconds)].

    Returns (a, b), the least squares solution of: seconds = a x microbatches + b x (stages - 1).
    """
    # exercise: waiting
    counts = np.array([[microbatches, stages - 1] for microbatches, stages, _ in runs], float)
    seconds = np.array([residual for *_, residual in runs])
    return tuple(map(float, np.linalg.lstsq(counts, seconds, rcond=None)[0]))
    # end exercise


# --------------------------------------------------------------------------------------------------
# This project's own strategies
# --------------------------------------------------------------------------------------------------


def strategy_messages(model, strategy, ranks, length):
    """What a rank sends for one sequence of `length` tokens, in bf16: [(op, calls, message bytes)].

    Bytes are those of all calls together; an all_to_all counts the rank's own input. tp.py,
    sp_megatron.py, sp_ulysses.py (--shard-weights) and pp.py run with their defaults: they
    recompute a layer up to its last matmul, and the head once. Messages that hardly count (the
    loss, gradients of norms) are left out. H is a (length, hidden) tensor:

    tp       all_reduce H: a layer 2 forward, 2 backward, 1 recomputed; embedding 1; head 1
    sp       all_gather H: a layer 2, 2, 2; embedding 1; head 1 forward, 1 recomputed
             reduce_scatter H: a layer 2, 2, 1; embedding 1; head 1
    ulysses  all_to_all of q, k, v and attention's output, one call each, for the rank's own
             length / ranks tokens: forward, recomputed, and the gradients
             all_reduce of all gradients, a call for each of the `tensors`
    ulysses_sharded  the same all_to_all; all_gather of all weights: forward, backward;
             reduce_scatter of all gradients: a call a layer and one for the rest, each time
    pp       send H: 1 forward, 1 backward
    """
    hidden, layers = BF16 * length * model.hidden, model.layers
    tables, tensors = (1, 9 * layers + 2) if model.tied else (2, 9 * layers + 3)
    weights = BF16 * (layers * model.layer_weights + tables * model.head_weights)
    # exercise: strategies
    if strategy == "tp":
        return [("all_reduce", 5 * layers + 2, (5 * layers + 2) * hidden)]
    if strategy == "sp":
        gathers = ("all_gather", 6 * layers + 3, (6 * layers + 3) * hidden)
        return [gathers, ("reduce_scatter", 5 * layers + 2, (5 * layers + 2) * hidden)]
    if strategy == "pp":
        return [("send", 2, 2 * hidden)]
    local = hidden / ranks * (2 + 2 * model.kv_heads / model.heads)  # q, output; k, v
    swaps = ("all_to_all", 12 * layers, 3 * layers * local)
    if strategy == "ulysses":
        return [swaps, ("all_reduce", tensors, weights)]
    units = layers + 1
    return [swaps, ("all_gather", 2 * units, 2 * weights), ("reduce_scatter", units, weights)]
    # end exercise


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
