"""Small mixtures of experts of Hugging Face's, in float64, on one device: for lab 12."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from labs.kit.compare import close, drawn, expect_same, gradients, tried
from labs.kit.harness import Traffic, expect
from labs.kit.models import EXACT, Float64, random_model, relative_errors

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 31}
SIZES |= {"num_key_value_heads": 2, "head_dim": 4, "pad_token_id": None, "sliding_window": None}
FAMILIES = {  # the classes, and what they call the number of experts and the width of one
    "Qwen3-MoE": (Qwen3MoeConfig, Qwen3MoeForCausalLM, "num_experts", "moe_intermediate_size"),
    "Mixtral": (MixtralConfig, MixtralForCausalLM, "num_local_experts", "intermediate_size"),
}


def tiny(family, experts, k, seed, width=12, **changes):
    """A random_model() with so many experts."""
    config, causal, count_name, width_name = FAMILIES[family]
    sizes = SIZES | {count_name: experts, width_name: width, "num_experts_per_tok": k} | changes
    model = random_model(causal, config(**sizes), seed)
    model.set_experts_implementation("eager")  # the model's own lines, no kernel in their place
    return model


def one_device(model, ids, labels, coefficient):
    """(loss, {name: gradient}) of the untouched model on all ranks' sequences ids (b, s)."""
    with Float64():
        out = model(input_ids=ids, use_cache=False, output_router_logits=True)
        loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
        loss = loss + coefficient * out.aux_loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), grads


def own_share(name, right, held):
    """One device's gradient, of it the rows of this rank's experts; the name in our model."""
    ours = name.replace("gate.weight", "router")
    ours = ours.replace("experts.gate_up_proj", "gate_up").replace("experts.down_proj", "down")
    return ours, right[held] if ours.endswith(("gate_up", "down")) else right


def model_errors(lab, case, rank, world, parallel):
    """Relative errors of a train_step on this rank, {"loss", each parameter's name: error}.

    case: family, experts, k, seed, and rows: how many sequences of `length` tokens each rank has.
    """
    total = sum(case.rows)
    numbers = torch.Generator().manual_seed(case.seed + 1)
    shape = total, case.length
    ids, labels = (torch.randint(31, shape, generator=numbers) for _ in range(2))
    model = tiny(case.family, case.experts, case.k, case.seed)
    loss, right = one_device(model, ids, labels, case.coefficient)
    group, replicas = lab.make_groups(world, parallel)
    blocks = lab.parallelize(model, group)
    mine = slice(sum(case.rows[:rank]), sum(case.rows[: rank + 1]))
    call = model, blocks, ids[mine], labels[mine], case.coefficient, dist.group.WORLD, replicas
    with Float64():
        found = lab.train_step(*call)
    held = slice(*lab.split(case.experts, group.rank(), group.size()))
    grads = {name: p.grad for name, p in model.named_parameters()}
    right = dict(own_share(name, grad, held) for name, grad in right.items())
    return relative_errors(found, grads, loss, right)


def a_case(family, experts, k, seed, rows, length=5, coefficient=0.1):
    """What model_errors() runs."""
    sizes = {"family": family, "experts": experts, "k": k, "seed": seed, "rows": rows}
    return SimpleNamespace(**sizes, length=length, coefficient=coefficient)


def subgroups():
    """Groups of 2, 3 and 4 of four ranks; where this rank is in none, its size is -1."""
    return [dist.new_group(ranks) for ranks in ([1, 3], [0, 2, 3], [0, 1, 2, 3])]


def check_rows(lab, what, seed, weights, order):
    """TakeRows and WeightedSum against products with matrices of ones and zeros."""
    (n, k), rows = weights.shape, len(order)
    x, y = drawn(seed + 3, n, 4).requires_grad_(), drawn(seed + 4, rows, 4).requires_grad_()
    weights = weights.clone().requires_grad_()
    tokens = torch.zeros(rows, n, dtype=x.dtype)
    tokens[range(rows), order // k] = 1
    choices = torch.zeros(rows, n * k, dtype=x.dtype)
    choices[range(rows), order] = 1
    before = [t.detach().clone() for t in (x, y, weights)]
    mine, dy = lab.TakeRows.apply(x, order // k), drawn(seed + 5, rows, 4)
    close(f"{what}: TakeRows", mine, tokens @ x)
    hint = "dx (n, h) has grad's dtype: grad[i] is added to row source[i]; None for source"
    [dx] = tried(f"{what}: TakeRows' backward", hint, gradients, mine, dy, x)
    last = (tokens * (tokens.flip(0).cumsum(0).flip(0) == 1)).T  # a token's last row alone
    hints = {"a row that was taken k times has k gradients: add them (index_add)": last @ dy}
    close(f"{what}: TakeRows' gradient", dx, tokens.T @ dy, hints)
    hint = "order[i] // k is row i's token, weights.flatten()[order[i]] its weight"
    mine = tried(f"{what}: WeightedSum", hint, lab.WeightedSum.apply, y, weights, order)
    dy = drawn(seed + 6, n, 4)
    weighted = y * (choices @ weights.flatten())[:, None]
    right = tokens.T @ weighted
    hints = {"a token's rows add up (index_add); out[index] += has one of them": last @ weighted}
    hints |= {"times the weight of the choice that the row is for": tokens.T @ y}
    close(f"{what}: WeightedSum", mine, right, hints, hint)
    hint = "a weight's gradient: the product of its row with its token's, summed, at order[i]; "
    hint += "y's: times the weight of the row"
    call = gradients, mine, dy, (y, weights)
    found = tried(f"{what}: WeightedSum's backward", hint, *call)
    wanted = gradients(right, dy, (y, weights))
    hints = {"dy: of the weighted sum, so times the weight": tokens @ dy}
    for name, a, b in zip(("y", "weights"), found, wanted):
        close(f"{what}: WeightedSum's gradient of {name}", a, b, hints, hint)
    expect_same(f"{what}: x, y or weights", [x, y, weights], before)


class Dropping(nn.Module):
    """Hugging Face's block, where the weights of dropped choices are 0."""

    def __init__(self, block, factor):
        super().__init__()
        self.block, self.factor, self.lost = block, factor, None

    def forward(self, x):
        flat = x.flatten(0, 1)
        _, weights, experts = self.block.gate(flat)
        count = len(self.block.gate.weight)
        capacity = -(-experts.numel() * self.factor // count)
        kept = torch.tensor(kept_choices(weights, experts, count, int(capacity)))
        self.lost = ~kept.any(1)
        return self.block.experts(flat, experts, weights * kept).view_as(x)


def kept_choices(weights, experts, count, capacity, key=lambda weight, token: -weight):
    """[[whether a choice is kept]], by going through each expert's choices."""
    kept = [[False] * experts.shape[1] for _ in experts]
    for expert in range(count):
        mine = (experts == expert).nonzero().tolist()  # [token, place]
        mine.sort(key=lambda at: key(weights[at[0], at[1]].item(), at[0]))
        for t, j in mine[:capacity]:
            kept[t][j] = True
    return kept


def check_dropped_model(lab, group, seed):
    """A whole model with a capacity on two ranks; returns how many tokens lose all choices."""
    ids = torch.randint(31, (2, 2, 6), generator=torch.Generator().manual_seed(seed))[group.rank()]
    dy, right = drawn(seed, 2, 6, 31), tiny("Qwen3-MoE", 5, 1, seed)
    for layer in right.model.layers:
        layer.mlp = Dropping(layer.mlp, 0.5)
    ours = tiny("Qwen3-MoE", 5, 1, seed)
    lab.parallelize(ours, group, 0.5)
    with Float64():
        logits, mine = (model(input_ids=ids, use_cache=False).logits for model in (right, ours))
    what = "a model with capacity 0.5"
    hint = "a token that loses its choices gets 0 from the block: the layer adds its input to that"
    close(f"{what}: logits", mine.detach(), logits.detach(), None, hint)
    logits.backward(dy)
    mine.backward(dy)
    grads = {name: p.grad for name, p in ours.named_parameters()}
    norm = torch.stack([p.grad.norm() for p in right.parameters()]).norm()
    for name, p in right.named_parameters():
        if "experts" in name:  # they have the gradients of both ranks
            dist.all_reduce(p.grad, group=group)
        held = slice(*lab.split(5, group.rank(), 2))
        name, grad = own_share(name.replace("block.", ""), p.grad, held)
        error = (grads[name] - grad).norm() / torch.maximum(grad.norm(), norm / 1000)
        expect(error <= EXACT, f"{what}: the gradient of {name} is off by {error:.1e}")
    return sum(int(layer.mlp.lost.sum()) for layer in right.model.layers)


def follow_balance(lab, group, rank, tokens, layers, k, seed):
    """The balance losses of this rank's tokens, of so many layers, and their gradient."""
    count = 6  # none is k: a hint each
    mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    logits = [drawn(seed + i, sum(tokens), count).requires_grad_() for i in range(layers)]
    own = [part[mine].detach().requires_grad_() for part in logits]
    with Float64():
        right = load_balancing_loss_func(tuple(logits), count, k)
        alone = load_balancing_loss_func(tuple(own), count, k) if tokens[rank] else right * 0
    terms = [count * part.softmax(-1).sum(0) for part in own]
    with Traffic() as traffic, Float64():
        loss = lab.balance_losses(own, k, group)
    chosen = torch.cat(logits).topk(k, -1).indices.flatten().bincount(minlength=count)
    shares = chosen.double() / (layers * sum(tokens))
    wanted = (sum(terms) / layers * shares).sum()
    what = f"{layers} layers, {k} of {count} experts, {tokens[rank]} tokens: the balance losses"
    own_shares = "an expert's share is of all ranks' tokens: all-reduce the counts"
    hints = {own_shares: alone.detach() * tokens[rank]}
    a_sum = "the sum over this rank's tokens, not their mean"
    hints |= {a_sum: wanted / max(1, tokens[rank])}
    hints |= {"the mean over the layers": wanted * layers}
    hints |= {"share: choices over tokens, so that shares add up to k": wanted / k}
    hints |= {"E times the sum: even shares then give k": wanted / count}
    hints |= {"E times, once": wanted * count}
    hints = {hint: tensor.detach() for hint, tensor in hints.items()}
    counted = "sum of E p share; a share: choices of all layers and of the group's ranks, a token"
    otherwise = counted if loss.isfinite() else a_sum  # a mean of no tokens is not a number
    close(what, loss.detach(), wanted.detach(), hints, otherwise)
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    close(f"{what}, of all ranks", total / sum(tokens), right.detach())
    found = torch.autograd.grad(loss, own)
    hint = "the gradient comes by the probabilities; counts have none, whichever rank's"
    for a, b in zip(found, torch.autograd.grad(right * sum(tokens), logits)):
        close(f"{what}: the gradient", a, b[mine], None, hint)
    most = f"{traffic.ops}: use one all-reduce of {count} numbers"
    expect(traffic.bytes("all_reduce") <= 8 * count and len(traffic.ops) == 1, most)


def follow_averages(lab, seed, group, replicas, everyone, same_experts):
    """Random gradients of two parameters; everyone, same_experts: the ranks of the two groups."""
    rank, tokens = dist.get_rank(), [3, 0, 5, 2]
    every = {r: [drawn(seed + 10 * r + i, 3, 2) for i in range(2)] for r in everyone}
    parameters = [nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)) for _ in range(2)]
    for parameter, grad in zip(parameters, every[rank]):
        parameter.grad = grad.clone()
    lists = [[parameter] for parameter in parameters]
    with Float64():
        lab.average_gradients(*lists, tokens[rank], group, replicas)
    expect([len(x) for x in lists] == [1, 1], "the caller's lists are changed", "no pop()")
    dense, expert = parameters
    total = sum(tokens[r] for r in everyone)
    right = sum(every[r][0] for r in everyone) / total
    hints = {"the sum over all ranks": every[rank][0] / total}
    hints |= {"divide by the number of tokens": right * total}
    hints |= {"divide by tokens, not by ranks": right * total / len(everyone)}
    hint = "divide by all ranks' tokens, not by this rank's; over `everyone`, not the whole job"
    close("a gradient that all ranks have", dense.grad, right, hints, hint)
    right = sum(every[r][1] for r in same_experts)
    theirs = sum(tokens[r] for r in same_experts)
    hint = "divide by the tokens of all ranks: each replica has gradients from its whole group"
    hints = {"sum an expert's over the replicas: each has its own group's": every[rank][1] / total}
    hints |= {hint: right / theirs, f"{hint}. That is all": right / total / 2}
    mixed = sum(every[r][1] for r in everyone) / total
    hints |= {"other ranks have other experts: sum over the replicas alone": mixed}
    hints |= {"divide an expert's, too": right}
    hint = "the sum over the replicas, divided by the tokens of `everyone`"
    close("an expert's gradient", expert.grad, right / total, hints, hint)
