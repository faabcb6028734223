"""Lab 18: Schedules. In which order the ranks of a pipeline work, and what that order costs.

P ranks hold the stages of a model; a batch is cut into M microbatches. A schedule is the order
in which a rank runs its actions. F is the forward of a microbatch through a stage. B computes
the gradient of the stage's input, for which another rank waits; W computes the gradients of
the weights, for which none waits. Without W, B does both and takes twice as long. Here P = 2,
M = 4; a line is a rank, a dot idle time. zbv has two stages a rank, in columns of half the time:

    afab          F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 --
                  .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .
    1f1b          F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --
                  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .
    zb (ZB-H1)    F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
                  .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3
    zbv (ZB-V)    F0 F1 F2 f0 b0 w0 f1 b1 w1 F3 B0 W0 f2 b2 w2 B1 W1 f3 b3 w3 B2 W2 B3 W3
                  .  F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 F3 B1 W1 f3 b2 w2 B2 b3 B3 W2 w3 W3

    stages, P = 4        rank 0   rank 1   rank 2   rank 3
    one a rank              0        1        2        3
    interleaved, V = 2     0 4      1 5      2 6      3 7      stage 3 sends to rank 0
    in a V                 0 7      1 6      2 5      3 4      stage 3 hands over to stage 4

    python labs/lab18_schedules/lesson.py                  # the checks, then the run
    python labs/lab18_schedules/lesson.py --predict 5      # first your guess
    python labs/grade.py start lab18                       # the exercises, to fill in
"""

import copy
import sys
from collections import defaultdict, deque, namedtuple
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

IGNORE = -100  # the label of a token that is no target
TAG = {"F": 1, "B": 2}  # of messages: those of one tag are received in the order of sending
# A unit of a rank's work: kind F, B or W, of a microbatch in a stage
Action = namedtuple("Action", "kind stage microbatch")


def dependencies(action, stage_count):
    """The actions that have to end before an action can begin: a list, in any order.

    F needs F of the stage before, whose hidden states it receives (the first stage starts from
    ids). B needs B of the stage after, whose gradient it receives (the last starts from the
    loss), and F of its own stage. W needs B of its own stage. All are of the same microbatch.
    """
    # exercise: dependencies
    kind, stage, m = action
    needs = {"F": [("F", stage - 1)], "B": [("B", stage + 1), ("F", stage)], "W": [("B", stage)]}
    return [Action(k, s, m) for k, s in needs[kind] if 0 <= s < stage_count]
    # end exercise


def producer(action, stage_count):
    """The action of another stage whose result an action receives, or None."""
    found = dependencies(action, stage_count)
    return next((each for each in found if each.stage != action.stage), None)


def simulate(schedules, stage_count, cost):
    """When each action would run: [(rank, action, begin, end)], in any order.

    schedules[rank]: the rank's actions in its order; cost(action): its time. A rank begins an
    action when the one before it and all its dependencies have ended, or at 0. Messages
    take no time. Actions that never begin, because ranks wait for each other, are left out.
    """
    # exercise: simulate
    rows, ended, free = [], {}, [0.0] * len(schedules)
    waiting, progress = [deque(actions) for actions in schedules], True
    while progress:
        progress = False
        for rank, actions in enumerate(waiting):
            needs = dependencies(actions[0], stage_count) if actions else [None]
            if all(each in ended for each in needs):
                action = actions.popleft()
                begin = max([free[rank], *(ended[each] for each in needs)])
                free[rank] = ended[action] = begin + cost(action)
                rows.append((rank, action, begin, ended[action]))
                progress = True
    return rows
    # end exercise


def bubble_formula(P, M, V, forward, backward, weights=0.0):
    """The bubble: the part of the time in which ranks are idle, if stages take equally long.

    V: stages of a rank; forward, backward, weights: times of F, B, W in a stage (0: no W). A
    rank is busy for V M of each. The last rank is idle for P - 1 F before its first F, and for
    P - 1 B after its last B, until the first rank's last B ends; but P - 1 of its W fit there.
    All are idle equally long. P = 2, M = 4, F = B = W = 1: 1 of 13 (V = 1), 1 of 25 (in a V).
    With W this holds only if they fit, else return None: with V = 1, M is at least P, and W no
    longer than F and no longer than B; in a V (V = 2), M is at least 2 P - 1, and F = B = W.
    """
    # exercise: bubble_formula
    if weights and V == 1 and (M < P or weights > min(forward, backward)):
        return None
    if weights and V == 2 and (M < 2 * P - 1 or not forward == backward == weights):
        return None
    idle = (P - 1) * (forward + backward - weights)
    return idle / (V * M * (forward + backward + weights) + idle)
    # end exercise


def afab(rank, P, M, V=1):
    """All forward, all backward (GPipe, arXiv 1811.06965): the actions. Stage: the rank."""
    # exercise: one_f_one_b
    return [Action(kind, rank, m) for kind in "FB" for m in range(M)]
    # end exercise


def in_turn(forwards, backwards, warmup):
    """`warmup` forwards; then a forward and a backward in turn; then what is left."""
    # exercise: one_f_one_b
    pairs = zip(forwards[warmup:], backwards)
    rest = backwards[len(forwards) - warmup :]
    return [*forwards[:warmup], *(action for pair in pairs for action in pair), *rest]
    # end exercise


def one_f_one_b(rank, P, M, V=1):
    """One forward, one backward (arXiv 2006.09503): in_turn(). Stage: the rank.

    The last rank's warmup is 0; each other's is one more than that of the rank after it, but
    at most M. P = 4, M = 4, rank 2: F0 F1 B0 F2 B1 F3 B2 B3.
    """
    # exercise: one_f_one_b
    forwards, backwards = ([Action(kind, rank, m) for m in range(M)] for kind in "FB")
    return in_turn(forwards, backwards, min(P - 1 - rank, M))
    # end exercise


def interleaved(rank, P, M, V):
    """Interleaved 1F1B (arXiv 2104.04473), where P divides M. Its V stages: rank, rank + P, ...

    Forwards: P microbatches go through the first stage, then the second, ...; then the next P.
    Backwards: also P at a time, from the last stage to the first. Both in_turn(). Warmup: P
    for each stage of the rank but its last, plus 2 for each rank after it, at most all
    forwards. P = 2, M = 4, V = 2, rank 1 (small letters: stage 3, its second):
        F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3
    """
    # exercise: interleaved
    stages = range(rank, V * P, P)
    groups = [range(m, m + P) for m in range(0, M, P)]
    forwards = [Action("F", stage, m) for g in groups for stage in stages for m in g]
    backwards = [Action("B", stage, m) for g in groups for stage in stages[::-1] for m in g]
    return in_turn(forwards, backwards, min((V - 1) * P + 2 * (P - 1 - rank), V * M))
    # end exercise


def zero_bubble(rank, P, M, V=1):
    """ZB-H1 (arXiv 2401.10241): 1F1B; on rank r, r microbatches wait for W. Stage: the rank.

    Right after B of microbatch m comes W of microbatch m - r, if m is at least r; after the
    last B come the W that are left. P = 2, M = 3, rank 1: F0 B0 F1 B1 W0 F2 B2 W1 W2.
    """
    # exercise: zero_bubble
    actions = []
    for action in one_f_one_b(rank, P, M):
        actions.append(action)
        if action.kind == "B" and action.microbatch >= rank:
            actions.append(Action("W", rank, action.microbatch - rank))
    return actions + [Action("W", rank, m) for m in range(max(M - rank, 0), M)]
    # end exercise


def zero_bubble_v(rank, P, M, V=2):
    """ZB-V (arXiv 2401.10241, 2405.15362). Capitals: the first stage; small: the second.

    Each letter's microbatches go in order, so the letters suffice, if M is at least 2 P - 1:
        (F) 2 (P - r) - 1 times; (f F) r times; (f b w) P - r times;
        (F B W f b w) until all F are done; (B W f b w) until all f are done;
        (B b) r times; (B W) P - r times; the w that are left; the W that are left
    Fewer microbatches take the order of 2 P - 1, without those that do not exist.
    P = 2, M = 3, rank 1: F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2 W2.
    """
    # exercise: zero_bubble_v
    full = max(M, 2 * P - 1) - (2 * P - 1 - rank)
    order = "F" * (2 * (P - rank) - 1) + "fF" * rank + "fbw" * (P - rank)
    order += "FBWfbw" * full + "BWfbw" * (P - 1 - rank)
    order += "Bb" * rank + "BW" * (P - rank) + "w" * rank + "W" * rank
    stages = {letter: rank if letter.isupper() else 2 * P - 1 - rank for letter in "FBWfbw"}
    numbered = [(letter, order[:i].count(letter)) for i, letter in enumerate(order)]
    return [Action(letter.upper(), stages[letter], m) for letter, m in numbered if m < M]
    # end exercise


SCHEDULES = {"afab": (afab, 1), "1f1b": (one_f_one_b, 1), "zb": (zero_bubble, 1)}
SCHEDULES |= {"interleaved": (interleaved, 2), "zbv": (zero_bubble_v, 2)}  # stages a rank: 2


def all_schedules(name, P, M):
    """Every rank's list of actions."""
    schedule, V = SCHEDULES[name]
    return [list(schedule(rank, P, M, V)) for rank in range(P)]


def kept_bytes(model, run, x, alive):
    """What a microbatch keeps: {"F": bytes from its F to its B, "B": from its B to its W}.

    Run a stage, out = run(x), and its backward, from torch.ones_like(out), in `with alive:`,
    where alive.now() is the bytes of all tensors made inside that still exist. "F" includes
    the output, and x, which was made before (integer ids do not count). "B": what
    DeferredLinears have in `pending`; the output and all gradients do not count.
    """
    # exercise: kept_bytes
    with alive:
        out = run(x)
        kept = {"F": alive.now() + x.nbytes * x.is_floating_point()}
        out.backward(torch.ones_like(out))
        out = x.grad = None
        model.zero_grad()
        return kept | {"B": alive.now()}
    # end exercise


def peak_kept(actions, kept):
    """The most that a rank keeps at once, looked at after each of its actions.

    kept["F", stage]: what a microbatch keeps there from its F to its B; kept["B", stage]: from
    its B to its W (0: there is none). 5, 0: F0 F1 B0 F2 keep 10. 5, 8: F0 B0 F1 B1 keep 16.
    """
    # exercise: peak_kept
    now = most = 0
    for kind, stage, _ in actions:
        forward, backward = kept["F", stage], kept["B", stage]
        now += {"F": forward, "B": backward - forward, "W": -backward}[kind]
        most = max(most, now)
    return most
    # end exercise


def deadlock(first, second, slots):
    """Where two ranks wait for ever: (place in first, place in second). None: both end.

    first, second: the ranks' messages in their order, ("send" or "receive", the action whose
    result it is), one after the other. A channel for each sender and kind of action has `slots`
    places for what is not yet received. A send into a free place ends at once, else it waits.
    With no slots (rendezvous: large messages of NCCL) it ends when the other rank is at the
    receive of this action. A receive takes its channel's oldest; it waits until there is one,
    and for ever if the oldest is another action's. The place of a rank that has ended: its
    length. first: send a, receive b; second: send b, receive a. No slots: (0, 0); one: None.
    """
    # exercise: deadlock
    left, channels, progress = [deque(first), deque(second)], defaultdict(deque), True
    while progress:
        progress = False
        for me, other in (0, 1), (1, 0):
            op, action = left[me][0] if left[me] else ("end", Action("", 0, 0))
            channel = channels[me if op == "send" else other, action.kind]
            meets = slots == 0 and left[other] and left[other][0] == ("receive", action)
            if op == "send" and (len(channel) < slots or meets):
                channel.append(action)
            elif op == "receive" and channel and channel[0] == action:
                channel.popleft()
            else:
                continue
            left[me].popleft()
            progress = True
    return (len(first) - len(left[0]), len(second) - len(left[1])) if any(left) else None
    # end exercise


class LinearWithDeferredWeightGrad(torch.autograd.Function):
    """F.linear, whose backward computes dx alone and leaves x and dy in pending, for W."""

    @staticmethod
    def forward(ctx, x, weight, bias, pending):
        ctx.save_for_backward(x, weight)
        ctx.pending = pending
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        """dy (b, s, out) -> dx and no other; adds (x, dy) to pending, without their graph."""
        # exercise: deferred_linear
        x, weight = ctx.saved_tensors
        ctx.pending.append((x.detach(), dy))
        return dy @ weight, None, None, None
        # end exercise


class DeferredLinear(nn.Module):
    """Takes an nn.Linear's place. pending: (x, dy) of each microbatch that waits for its W."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias, self.pending = linear.weight, linear.bias, deque()

    def forward(self, x):  # (b, s, in) -> (b, s, out)
        return LinearWithDeferredWeightGrad.apply(x, self.weight, self.bias, self.pending)

    def add_weight_gradient(self):
        """W of the microbatch that has waited longest, which then waits no longer.

        Adds dy^T x (out, in), over all its tokens, to weight.grad, and dy's sum to bias.grad
        (bias may be None). A .grad may be None before.
        """
        # exercise: deferred_linear
        x, dy = (tensor.flatten(0, -2) for tensor in self.pending.popleft())
        self.weight.backward(dy.T @ x)  # backward() of a leaf adds to its .grad
        if self.bias is not None:
            self.bias.backward(dy.sum(0))
        # end exercise


def make_stage(model, stage, stage_count):
    """HF's decoder with a stage's layers, which takes input_ids or inputs_embeds (b, s, h)."""
    count = len(model.model.layers)
    layers = slice(stage * count // stage_count, (stage + 1) * count // stage_count)
    decoder = copy.copy(model.model)  # it shares the modules
    decoder._modules = model.model._modules | {"layers": model.model.layers[layers]}
    if stage < stage_count - 1:
        decoder.norm = nn.Identity()
    decoder.config = copy.copy(model.config)
    if getattr(model.config, "layer_types", None):  # HF looks up a layer's type by its index
        decoder.config.layer_types = model.config.layer_types[layers]
    return decoder


def microbatch_loss(logits, targets, count):
    """A microbatch's share of the mean loss over the batch's `count` targets.

    logits (b, s, v), targets (b, s); IGNORE is no target. The microbatches' shares add up to
    the mean over all targets, although the microbatches differ in how many they have.
    """
    # exercise: loss
    how = {"ignore_index": IGNORE, "reduction": "sum"}
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **how) / count
    # end exercise


def sum_tied_gradient(weight, ends, group):
    """Completes a tied embedding's weight.grad on the ranks that have it, in place.

    ends: the ranks of the first stage (its .grad is the embedding's part) and of the last (the
    head's). Each sends its part (dist.isend) to the other, receives the other's
    (dist.recv, with group=, group_src=) and adds it; what is being sent must not change. In a
    V both are one rank, where autograd has added the parts: send nothing. Others do nothing.
    """
    # exercise: loss
    if ends[0] == ends[1] or group.rank() not in ends:
        return
    other, theirs = sum(ends) - group.rank(), torch.empty_like(weight.grad)
    sending = dist.isend(weight.grad, group=group, group_dst=other)
    dist.recv(theirs, group=group, group_src=other)
    sending.wait()
    weight.grad += theirs
    # end exercise


class Pipeline:
    """The engine. HF's model stays whole on each rank; pp.py drops the other ranks' layers."""

    def __init__(self, model, name, M, group, recompute=False):
        self.model, self.group, self.M, self.saved = model, group, M, {}
        schedules = all_schedules(name, group.size(), M)
        self.actions = schedules[group.rank()]
        self.rank_of = {a.stage: r for r, actions in enumerate(schedules) for a in actions}
        self.stage_count = len(self.rank_of)
        for layer in model.model.layers:
            layer.gradient_checkpointing = recompute  # keep its input, run it again in its B
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
            for path, module in list(layer.named_modules()) if name in ("zb", "zbv") else ():
                if isinstance(module, nn.Linear):
                    layer.set_submodule(path, DeferredLinear(module))
        own = {action.stage for action in self.actions}
        self.stages = {s: make_stage(model, s, self.stage_count) for s in own}

    def run(self, ids, targets, count):
        """Run self.actions on microbatches ids[m], targets[m] (b, s): receive, compute, send.

        compute[kind](action, received) returns what another stage needs, or None. received is
        the result of the action's producer(), or None. self.rank_of[stage]: where a stage is.
        Between stages of one rank a result is handed over as it is. From another rank it comes
        by dist.recv(tensor, group=, group_src=, tag=TAG[kind]), into a new (b, s, hidden_size)
        of the model's dtype. F's result goes to the stage after, B's to the stage before, by
        dist.isend(tensor, group=, group_dst=, tag=), which only starts: keep the tensor until
        work.wait(). Keep at most 2 P: before more wait for the oldest, at the end for all.
        """
        self.ids, self.targets, self.count, self.losses = ids, targets, count, []
        compute = {"F": self.forward, "B": self.backward, "W": self.add_weight_gradients}
        # exercise: engine
        handed_over, sending = {}, deque()
        for action in self.actions:
            source, received = producer(action, self.stage_count), None
            how = {"group": self.group, "tag": TAG.get(action.kind)}
            if source in handed_over:
                received = handed_over.pop(source)
            elif source is not None:
                shape = *ids[action.microbatch].shape, self.model.config.hidden_size
                received = torch.empty(shape, dtype=self.model.dtype)
                dist.recv(received, group_src=self.rank_of[source.stage], **how)
            result = compute[action.kind](action, received)
            if result is not None:
                to = self.rank_of[action.stage + (1 if action.kind == "F" else -1)]
                if to == self.group.rank():
                    handed_over[action] = result
                else:
                    if len(sending) == 2 * self.group.size():
                        sending.popleft()[0].wait()
                    sending.append((dist.isend(result, group_dst=to, **how), result))
        for work, _ in sending:
            work.wait()
        # end exercise

    def forward(self, action, received):
        """F: from ids, or hidden states received, to hidden states; in the last stage None."""
        m, is_last = action.microbatch, action.stage == self.stage_count - 1
        x = self.ids[m] if received is None else received.requires_grad_()
        name = "input_ids" if received is None else "inputs_embeds"
        out = self.stages[action.stage](**{name: x}, use_cache=False).last_hidden_state
        if is_last:
            out = microbatch_loss(self.model.lm_head(out), self.targets[m], self.count)
            self.losses.append(out.detach())
        self.saved[action.stage, m] = x, out
        return None if is_last else out.detach()

    def backward(self, action, received):
        """B: from the output's gradient (None for a loss) to the input's (None for ids)."""
        x, out = self.saved.pop((action.stage, action.microbatch))
        torch.autograd.backward(out, received)
        return x.grad

    def add_weight_gradients(self, action, received):
        """W: in the action's stage alone."""
        for module in self.stages[action.stage].modules():
            if isinstance(module, DeferredLinear):
                module.add_weight_gradient()

    def train_step(self, ids, targets):
        """The loss of ids, targets (b, s), 0 without the last stage; sets every .grad."""
        count = (targets != IGNORE).sum()
        self.run(ids.tensor_split(self.M), targets.tensor_split(self.M), count)
        ends, weight = (0, self.stage_count - 1), self.model.lm_head.weight
        if weight is self.model.model.embed_tokens.weight:  # tied
            sum_tied_gradient(weight, [self.rank_of[stage] for stage in ends], self.group)
        return sum(self.losses)


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
