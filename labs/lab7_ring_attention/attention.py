"""One attention layer, parallel in four ways: SP, Ulysses, a ring, all-gather of K and V."""

from functools import partial

import torch
import torch.nn.functional as F

from labs.kit.collectives import Exchange, all_gather, all_to_all, reduce_scatter
from labs.lab7_ring_attention.lesson import ZIGZAG

TOKENS, HEAD = 256, 16  # tokens, numbers a head
SP, ULYSSES, RING, GATHER = "SP", "Ulysses", "CP, ring", "CP, all-gather"


causal = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)


def project(x, *weights):
    """x (b, n, h) by each weight (heads * HEAD, h): [(b, heads, n, HEAD)]."""
    return [F.linear(x, w).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in weights]


def attention_layer(lab, way, x, weights, heads, kv_heads, group):
    """An attention layer on this rank's tokens, x (b, n, h) -> (b, n, h), parallel in a way.

    weights: those of q, k, v (out, h) and of the output (h, out), whole; SP reads its heads' rows.
    Raises ValueError where a way that cuts the heads cannot give each rank as many.
    """
    rank, P = group.rank(), group.size()
    if way in (SP, ULYSSES) and kv_heads % P:
        raise ValueError(f"{heads} heads, {kv_heads} of K and V, cannot be dealt to {P} ranks")
    gather, scatter = (partial(f, dim=-2, group=group) for f in (all_gather, reduce_scatter))
    wq, wk, wv, wo = weights
    if way == SP:
        x = Exchange.apply(x, gather, scatter)  # (b, s, h)
        wq, wk, wv, wo = *(w.chunk(P)[rank] for w in (wq, wk, wv)), wo.chunk(P, 1)[rank]
    q, k, v = project(x, wq, wk, wv)
    if way == SP:
        out = causal(q, k, v)  # (b, heads/P, s, d)
    elif way == ULYSSES:
        to_heads = partial(all_to_all, cut=1, join=2, group=group)
        to_tokens = partial(all_to_all, cut=2, join=1, group=group)
        q, k, v = (Exchange.apply(t, to_heads, to_tokens) for t in (q, k, v))
        out = causal(q, k, v)  # (b, heads/P, s, d)
        out = Exchange.apply(out, to_tokens, to_heads)
    elif way == RING:
        out = lab.ring_attention(q, k, v, TOKENS, ZIGZAG, group)  # (b, heads, s/P, d)
    else:  # Llama 3: K and V of all tokens for the rank's queries
        k, v = Exchange.apply(torch.stack([k, v]), gather, scatter)  # (b, kv, s, d)
        held = [lab.positions(TOKENS, other, P, ZIGZAG) for other in range(P)]
        seen = torch.cat(held) <= held[rank][:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    out = F.linear(out.transpose(1, 2).flatten(2), wo)
    return Exchange.apply(out, scatter, gather) if way == SP else out


def expected_wire(way, heads, kv_heads, P):
    """Bytes that a rank puts on the wire in attention_layer(): (forward, backward), float64."""
    token, own = 8 * HEAD, TOKENS / P  # bytes of one head of one token
    if way == SP:  # all-gather of x, reduce-scatter of the output
        return (2 * heads * token * own * (P - 1),) * 2
    if way == ULYSSES:  # q, k, v and the output, of which 1/P stays
        return (2 * (heads + kv_heads) * token * own * (P - 1) / P,) * 2
    kv = 2 * kv_heads * token * own  # K and V of a rank
    return kv * (P - 1), kv * (P - 1 if way == GATHER else 2 * P - 1)
