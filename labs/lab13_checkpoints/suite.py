"""The suite's layouts for lab 13: each script as it trains, with what its ranks hold as Shards."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from labs.kit.alive import Alive
from labs.kit.harness import LABS, load
from labs.lab13_checkpoints.disk import counting

LAYOUTS = {  # name: (script, ranks)
    "one device": ("tp.py", 1),
    "tp 2": ("tp.py", 2),
    "tp 3": ("tp.py", 3),
    "sp 2": ("sp_megatron.py", 2),
    "ulysses 2": ("sp_ulysses.py", 2),
    "zero3 3": ("labs/lab9_zero/lesson.py", 3),
    "pp 2": ("pp.py", 2),
    # with --pairs all
    "tp 6": ("tp.py", 6),  # more ranks than KV heads
    "sp 3": ("sp_megatron.py", 3),
    "ulysses 3": ("sp_ulysses.py", 3),
    "zero3 2": ("labs/lab9_zero/lesson.py", 2),
    "fsdp 2": ("sp_ulysses.py", 2),  # with --shard-weights
    "fsdp 3": ("sp_ulysses.py", 3),
    "pp 3": ("pp.py", 3),
}
SOME = 7  # of them, without --pairs all
STEPS, BATCH, LENGTH = 3, 6, 13  # steps before the save, and as many after it
# No number of ranks above 1 divides vocabulary, layers and all KV heads
CONFIG = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 5, "vocab_size": 50}
CONFIG |= {"num_attention_heads": 6, "num_key_value_heads": 3, "initializer_range": 0.2}
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


def local(tensor):
    """What this rank has of a DTensor, in the same memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Scripted:
    """A rank of one of the four scripts: its model, its optimizer, its layout."""

    def __init__(self, lab, name, group, seed):
        path, _ = LAYOUTS[name]
        self.script, self.group, self.seed = load(LABS.parent / path), group, seed
        model = build(seed)
        self.full = {name: p.shape for name, p in model.named_parameters()}
        device = torch.device("cpu")
        how = {
            "config": model.config,
            "recompute": "none",
            "loss": "full",
            "attn_implementation": "sdpa",
        }
        how |= {"attn": "sdpa", "timeout": 60}
        how |= {"batch": BATCH, "length": LENGTH, "dtensor": False, "device": device}
        how |= {"schedule": "1f1b", "virtual_stages": 1, "microbatches": 3}
        self.args = SimpleNamespace(**how, shard_weights=name.startswith("fsdp"))
        self.model = self.script.parallelize(model, group, self.args)
        self.optimizer = adamw(self.model.parameters())
        self.layout = {}
        for name, p in self.model.named_parameters():
            shard = self.shard_of(p)
            if shard is None:
                self.layout[name] = lab.whole(self.full[name])
            elif shard[1] < shard[2]:
                self.layout[name] = lab.cut(tuple(self.full[name]), *shard)

    def shard_of(self, p):
        """(dim, start, end) of the full tensor; None: all of it. fully_shard cuts rows."""
        if not isinstance(p, DTensor):
            return getattr(p, "shard", None)
        rows = -(-len(p) // self.group.size())
        start = min(self.group.rank() * rows, len(p))
        return 0, start, min(start + rows, len(p))

    def state(self, lab):
        """{name: tensor} of this rank, for lab.state_layout(self.layout)."""
        found = lab.training_state(self.model, self.optimizer)
        return {n: local(x) for n, x in found.items() if n.partition("/")[0] in self.layout}

    def step(self, ids):
        """A step of AdamW; the loss, the same on every rank."""
        loss = self.script.forward_backward(self.model, ids, ids, self.group, self.args)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def errors(self, right):
        """The relative error of this rank's part of each weight."""
        for name, p in self.model.named_parameters():
            shard, want = self.shard_of(p), right[name]
            if shard is not None:
                dim, start, end = shard
                want = want.narrow(dim, start, end - start)
            yield ((local(p.data) - want).norm() / want.norm().clamp(min=1e-30)).item()


class Zero3:
    """A rank of lab 9's ZeRO-3: a shard of a flat vector for each unit; each has own sequences."""

    def __init__(self, lab, name, group, seed):
        self.script, self.group, self.seed = load(LABS / "lab9_zero" / "lesson.py"), group, seed
        model, world = build(seed), group.size()
        names = {id(p): name for name, p in model.named_parameters()}
        shapes = {id(p): tuple(p.shape) for p in model.parameters()}
        self.model, self.units = model, self.script.make_units(model, group, 3)
        self.masters = nn.ParameterDict({str(i): u.master for i, u in enumerate(self.units)})
        self.optimizer = adamw(self.masters.parameters())
        self.layout, self.places, self.flat = {}, {}, []
        for i, unit in enumerate(self.units):
            self.flat.append([names[id(p)] for p in unit.params])
            cuts = lab.flat_cut([shapes[id(p)] for p in unit.params], group.rank(), world)
            for p, (shard, at) in zip(unit.params, cuts):
                if shard:
                    self.layout[names[id(p)]] = shard
                    self.places[names[id(p)]] = i, at, at + shard.length

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

    def errors(self, right):
        for unit, names in zip(self.units, self.flat):
            flat = torch.cat([right[name].flatten() for name in names])
            start, *_ = self.script.held(len(flat), self.group.rank(), self.group.size())
            want = flat[start : start + unit.own]
            yield ((unit.master.data - want).norm() / want.norm()).item()


def make(lab, name, group, seed):
    kind = Zero3 if name.startswith("zero3") else Scripted
    return kind(lab, name, group, seed)


def train(side, first):
    """STEPS steps from number `first`; their losses."""
    with TP.upcasts_in_float64(FLOAT64):
        return [side.step(batch(side.seed, first + i)) for i in range(STEPS)]


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
    losses, state = train(side, 0), side.state(lab)
    lab.save(folder, state, lab.state_layout(side.layout), group)
    return {"losses": losses, "held": sum(x.nbytes for x in state.values())}


def load_and_train(group, lab, name, seed, folders, right):
    """From each checkpoint {name: folder} STEPS more steps on this rank: {name: figures}.

    losses; error: the largest of this rank's weights; read {file: bytes}; held: the rank's own
    bytes; peak: bytes of tensors alive beside them while it loads.
    """
    side, rows = make(lab, name, group, seed + 1), {}  # other weights than the saved ones
    side.seed = seed
    layout = lab.state_layout(side.layout)
    for source, folder in folders.items():
        state = side.state(lab)
        with Alive() as alive:
            lab.load(folder, state, layout, group)
        with counting() as read:
            lab.fill(folder, lab.read_index(folder), state, layout)
        files = {name: size for name, size in read.by_file.items() if name != "index.json"}
        row = {"read": files, "peak": alive.peak, "losses": train(side, STEPS)}
        row |= {"held": sum(x.nbytes for x in state.values())}
        rows[source] = row | {"error": max(side.errors(right), default=0.0)}
    return rows
