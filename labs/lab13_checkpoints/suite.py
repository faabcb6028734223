"""The suite's layouts for lab 13: each script as it trains, with what its ranks hold as Shards."""

from datetime import timedelta
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from labs.kit.alive import Alive
from labs.kit.harness import LABS, load, relative_error
from labs.lab13_checkpoints.check import part_of
from labs.lab13_checkpoints.disk import counting

ZERO3 = "labs/lab9_zero/lesson.py"
LAYOUTS = {  # name: (script, ranks)
    "one device": ("tp.py", 1),
    "tp 2": ("tp.py", 2),
    "tp 3": ("tp.py", 3),
    "sp 2": ("sp_megatron.py", 2),
    "ulysses 2": ("sp_ulysses.py", 2),
    "zero3 3": (ZERO3, 3),
    "pp 2": ("pp.py", 2),
    # with --pairs all
    "tp 6": ("tp.py", 6),  # more ranks than KV heads
    "sp 3": ("sp_megatron.py", 3),
    "ulysses 3": ("sp_ulysses.py", 3),
    "zero3 2": (ZERO3, 2),
    "fsdp 2": ("sp_ulysses.py", 2),  # with --shard-weights
    "fsdp 3": ("sp_ulysses.py", 3),
    "pp 3": ("pp.py", 3),
}
SOME = 7  # of them, without --pairs all
STEPS, BATCH, LENGTH = 3, 6, 13  # steps before the save, and as many after it
# No number of ranks above 1 divides vocabulary, layers and all KV heads
CONFIG = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 5, "vocab_size": 50}
CONFIG |= {"num_attention_heads": 6, "num_key_value_heads": 3, "initializer_range": 0.2}
OPTIONS = {"recompute": "none", "loss": "full", "attn_implementation": "sdpa", "attn": "sdpa"}
OPTIONS |= {"batch": BATCH, "length": LENGTH, "timeout": timedelta(seconds=60)}
OPTIONS |= {"schedule": "1f1b", "virtual_stages": 1, "microbatches": 3}
TP = load(LABS.parent / "tp.py")  # for its upcasts_in_float64, and the reference's loss
FLOAT64 = SimpleNamespace(dtype="float64", config=LlamaConfig())


def build(seed):
    """HF's LLaMA, tied, in float64; the same on every rank."""
    torch.manual_seed(seed)
    config = LlamaConfig(**CONFIG, tie_word_embeddings=True, attn_implementation="sdpa")
    return LlamaForCausalLM(config).double().train()


def batch(seed, step):
    """Token ids (b, s) of a step."""
    numbers = torch.Generator().manual_seed(seed + 1000 * step)
    return torch.randint(CONFIG["vocab_size"], (BATCH, LENGTH), generator=numbers)


def adamw(parameters):
    # eps: with torch's 1e-8 a gradient that is nothing but rounding becomes a visible step
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, foreach=False)


class Scripted:
    """A rank of one of the four scripts: its model, its optimizer, its layout."""

    def __init__(self, lab, name, group, seed):
        self.script, self.group = load(LABS.parent / LAYOUTS[name][0]), group
        model, self.layout = build(seed), {}
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        how = {"config": model.config, "device": torch.device("cpu")}
        self.args = SimpleNamespace(**OPTIONS, **how, shard_weights=name.startswith("fsdp"))
        self.model = self.script.parallelize(model, group, self.args)
        self.optimizer = adamw(self.model.parameters())
        for name, p in self.model.named_parameters():
            shard = getattr(p, "shard", None)  # (dim, start, end)
            if shard is None:
                self.layout[name] = lab.whole(shapes[name])
            elif shard[1] < shard[2]:
                self.layout[name] = lab.cut(shapes[name], *shard)

    def state(self, lab):
        """{name: tensor} of this rank, for lab.state_layout(self.layout)."""
        found = lab.training_state(self.model, self.optimizer)
        found = {n: x for n, x in found.items() if n.partition("/")[0] in self.layout}
        return {n: x.to_local() if isinstance(x, DTensor) else x for n, x in found.items()}

    def step(self, ids):
        """A step of AdamW; the loss, the same on every rank."""
        loss = self.script.forward_backward(self.model, ids, ids, self.group, self.args)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Zero3:
    """A rank of lab 9's ZeRO-3: a shard of a flat vector for each unit; each has own sequences."""

    def __init__(self, lab, name, group, seed):
        self.script, self.group, self.model = load(LABS.parent / ZERO3), group, build(seed)
        names = {id(p): (name, tuple(p.shape)) for name, p in self.model.named_parameters()}
        self.units = self.script.make_units(self.model, group, 3)
        self.masters = nn.ParameterDict({str(i): u.master for i, u in enumerate(self.units)})
        self.optimizer, self.layout, self.places = adamw(self.masters.parameters()), {}, {}
        for i, unit in enumerate(self.units):
            full = [names[id(p)] for p in unit.params]
            cuts = lab.flat_cut([shape for _, shape in full], group.rank(), group.size())
            for (name, _), (shard, at) in zip(full, cuts):
                if shard:
                    self.layout[name] = shard
                    self.places[name] = i, at, at + shard.length

    def state(self, lab):
        found, all_units = {}, lab.training_state(self.masters, self.optimizer)
        for name, (i, start, end) in self.places.items():
            for key in ("", "/exp_avg", "/exp_avg_sq"):
                found[name + key] = all_units[f"{i}{key}"][start:end]
            found[f"{name}/step"] = all_units[f"{i}/step"]  # one for the unit's parameters
        return found

    def step(self, ids):
        rank, world = self.group.rank(), self.group.size()
        own = ids[rank::world].split(1)
        loss = self.script.train_step(self.model, self.units, self.optimizer, own)
        return TP.all_reduce(loss, self.group).item() / world


def make(lab, name, group, seed):
    kind = Zero3 if name.startswith("zero3") else Scripted
    return kind(lab, name, group, seed)


def train(side, seed, first):
    """STEPS steps from number `first`; their losses."""
    with TP.upcasts_in_float64(FLOAT64):
        return [side.step(batch(seed, first + i)) for i in range(STEPS)]


def one_device(seed):
    """(losses, {name: weight}) of twice STEPS steps of HF's own model, never interrupted."""
    model = build(seed)
    optimizer, losses = adamw(model.parameters()), []
    with TP.upcasts_in_float64(FLOAT64):
        for step in range(2 * STEPS):
            ids = batch(seed, step)
            losses.append(TP.reference_step(model, ids, ids)[1].item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: p.data for name, p in model.named_parameters()}


def train_and_save(group, lab, name, seed, folder):
    """STEPS steps on this rank, then a save: its losses, and the bytes that it holds."""
    side = make(lab, name, group, seed)
    losses, state = train(side, seed, 0), side.state(lab)
    lab.save(folder, state, lab.state_layout(side.layout), group)
    return {"losses": losses, "held": sum(x.nbytes for x in state.values())}


def load_and_train(group, lab, name, seed, folders, right):
    """From each checkpoint {name: folder} STEPS more steps on this rank: {name: figures}.

    losses; error: the largest of this rank's weights; read {file: bytes}; held: the rank's own
    bytes; peak: bytes of tensors alive beside them while it loads.
    """
    side, rows = make(lab, name, group, seed + 1), {}  # other weights than the saved ones
    layout = lab.state_layout(side.layout)
    for source, folder in folders.items():
        state = side.state(lab)
        with Alive() as alive:
            lab.load(folder, state, layout, group)
        with counting() as read:
            lab.fill(folder, lab.read_index(folder), state, layout)
        read.pop("index.json")
        held, errors = sum(x.nbytes for x in state.values()), [0.0]
        row = {"read": read, "peak": alive.peak, "held": held}
        row["losses"] = train(side, seed, STEPS)
        state = side.state(lab)
        for weight, shard in side.layout.items():
            want = part_of(right[weight], shard)
            errors.append(relative_error(state[weight].flatten(), want))
        rows[source] = row | {"error": max(errors)}
    return rows
