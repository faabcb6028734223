"""Ranks on NCCL, without a GPU: none waits for another that waits for it. nccl.py has the rules."""

import json
from itertools import product

import nccl
import pytest
from conftest import changed
from forks import MODELS, SMALL

NARROW = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 16}
NARROW |= {"num_key_value_heads": 1}
SHORT = "--length 2 --dtype float32 --loss full --recompute none --bench-iters 1"
CHANGED = {  # fewer steps than 20; and the silent peers send no loss
    "for step in range(20)": "for step in range(2)",
    "ours[-1].item() / ours[0].item()": "ours[-1].item() / (ours[0].item() or 1)",
}
TIMED = {  # as on a GPU; and the silent peers send no timeline
    'if self.device.type == "cuda"': "if True",
    "P * V, seconds.get)": "P * V, lambda action: 1)",
}
SCHEDULES = ["afab", "1f1b", "zb", "interleaved"]
HOW = ["lazy", "eager", "lazy, items", "eager, items"]
NONE = dict.fromkeys(HOW, [])


@pytest.fixture
def found(ranks, tmp_path):
    """found(world, "tp.py --mode all", put, layers) -> what nccl.report() finds."""

    def find(world, command, put=None, layers=2):
        config = SMALL | NARROW | {"num_hidden_layers": layers}
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(config))
        words = f"{command} {SHORT}".split()
        script, *argv = (f"{ranks.folder}/{word}" if word in MODELS else word for word in words)
        argv += [] if "--model" in argv else ["--model", str(model)]
        source = changed(script, (TIMED if "schedules" in script else CHANGED) | (put or {}))
        file = tmp_path / "found.json"
        codes, output = ranks.live(1, nccl.report, script, source, argv, world, str(file))
        assert codes == [0], output
        return json.loads(file.read_text())

    return find


def pipeline(found, schedule, P, M, V=1, mode="all", put=None):
    script = "labs/schedules.py" if mode == "bubble" else "pp.py"
    options = f"--mode {mode} --microbatches {M} --schedule {schedule} --virtual-stages {V}"
    return found(P, f"{script} {options}", put, layers=P * V)


def cycles(what):
    return {how: what[how] for how in HOW}


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("mode", ["all", "bubble"])
@pytest.mark.parametrize(
    "size", [("afab", 3, 2, 1), ("1f1b", 2, 1, 1), ("zb", 3, 4, 1), ("interleaved", 2, 4, 2)]
)
def test_a_pipeline_does_not_hang(found, size, mode):
    what = pipeline(found, *size, mode=mode)
    assert cycles(what) == NONE
    assert mode == "bubble" or "PASS benchmark" in what["output"], "what it sends is recorded"


@pytest.mark.slow
@pytest.mark.parametrize("P", range(2, 7))
@pytest.mark.parametrize(
    "schedule,V", [(s, 1) for s in SCHEDULES] + [("interleaved", 2), ("interleaved", 3)]
)
def test_no_pipeline_hangs(found, schedule, P, V):
    for M, mode in product(range(1, 14), ("all", "bubble")):
        if schedule == "interleaved" and M % P:
            continue  # refused
        assert cycles(pipeline(found, schedule, P, M, V, mode)) == NONE, (M, mode)


SEND = "dist.send(torch.zeros(1, device=args.device), receiver, channel)"
RECV = SEND.replace("send", "recv").replace("receiver", "sender")
CHANNEL = "channel = dist.new_group([sender, receiver], args.timeout)"
MEMBER = "if ranks[group.rank()] in (sender, receiver): "
SYNC = "torch.cuda.current_stream().synchronize()"
POST = "                incoming = self.start_receiving(next_action, batch)"
SENT = "self.send(result, action.kind)\n"
LATE = {  # a rank waits for its message to leave, and then posts its next receive
    "self.wait(self.sending.get(kind))": "pass",
    "self.sending[kind] = dist.isend(tensor, *self.send_channels[kind]), tensor": (
        "dist.isend(tensor, *self.send_channels[kind]).wait()"
    ),
    f"{POST}  # it can arrive meanwhile\n": "",
    SENT: f"{SENT}{POST}\n",
}
HANGS = [  # what makes a pipeline hang; schedule, P, M, V, mode; where; what stands in the cycle
    ({SYNC: "torch.cuda.synchronize()"}, ("1f1b", 2, 4, 1, "bubble"), HOW, "host, sync"),
    ({SEND: "pass", RECV: "pass"}, ("1f1b", 2, 1, 1, "learning"), HOW[::2], "making of"),
    ({CHANNEL: f'if kind == "F": {CHANNEL}'}, ("1f1b", 2, 4, 1, "learning"), HOW, "message"),
    (LATE, ("1f1b", 2, 4, 1, "learning"), HOW, "message"),
    ({CHANNEL: f"{MEMBER}{CHANNEL}"}, ("afab", 3, 2, 1, "learning"), HOW, "new group [0, 1]"),
]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("put,size,where,part", HANGS)
def test_a_pipeline_that_hangs_is_found(found, put, size, where, part):
    what = pipeline(found, *size, put)
    assert [how for how in HOW if what[how]] == where
    for how in where:
        print(how, *what[how], sep="\n  ")
        assert part in " ".join(what[how])


COLLECTIVES = [  # ranks, command, the sizes of the groups that it uses
    (2, "tp.py --model even --dtensor", [2]),
    (4, "tp.py --model two_kv", [2, 4]),
    (3, "sp_megatron.py --model six_kv", [3]),
    (4, "sp_megatron.py --model two_kv", [2, 4]),
    (3, "sp_ulysses.py --model six_kv", [3]),
    (4, "sp_ulysses.py --model two_kv --shard-weights", [4]),
]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("world,command,sizes", COLLECTIVES)
def test_all_ranks_call_the_same_collectives_in_the_same_order(found, world, command, sizes):
    what = found(world, f"{command} --mode all")
    assert cycles(what) == NONE
    assert sorted({len(call[1][1]) for call in what["calls"] if call[1]}) == sizes
    assert "PASS benchmark" in what["output"], "what it sends is recorded"


SUM = "dist.all_reduce(parameter.grad, group=parameter.sum_over)"
EACH = "for parameter in model.parameters():\n        if parameter.sum_over"
ORDER = "list(model.parameters())[:: 1 - 2 * (dist.get_rank() == 1)]"
SKIPPED = {SUM: f"dist.get_rank() == 1 or {SUM}"}, "[0, 1] have to come, there come {0"
SWAPPED = {EACH: EACH.replace("model.parameters()", ORDER)}, "rank 1's stream, waiting in call"


@pytest.mark.parametrize("put,part", [SKIPPED, SWAPPED])
def test_a_rank_that_skips_or_swaps_collectives_is_found(found, put, part):
    what = found(4, "sp_megatron.py --model two_kv --mode learning", put)
    assert all(part in " ".join(what[how]) for how in HOW)
