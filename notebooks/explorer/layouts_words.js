// What the view of layouts says: names of the steps, what happens in each and why.

// The block, in order: what its boxes say, and the steps of four_layouts.py in each; no words where some
// layout sends a message
const STATIONS = [
  ["norm", "norm 1"], ["", "enter attention"], ["qkv", "qkv"], ["", "qkv of heads"], ["", "keys and values"],
  ["attention", "attention of heads"], ["attention", "attention"], ["o", "o"], ["", "leave attention"], ["+", "dropout 1", "residual"],
  ["norm", "norm 2"], ["", "enter mlp"], ["up", "up"], ["silu", "silu"], ["down", "down"], ["", "leave mlp"], ["+", "dropout 2", "y"],
  ["", "gradients"],
];
// What happens in a step and why, by phase and step. Where layouts differ, by layout, by what is sharded
// (weights: tp and sp; tokens alone: ulysses and cp), or of all others. Of two sentences the second is of
// an all-reduce's second half. {part}: heads or features.
const OWN_TOKENS = "works on one token at a time, so each rank does it for its own tokens and nothing is sent.";
const WHY = {
  forward: {
    norm: {
      tp: "Every rank normalizes all tokens: the same work on each, since each has all of them.",
      all: `A norm ${OWN_TOKENS}`,
    },
    enter: {
      tp: "Nothing is sent, since every rank already has all tokens, which its own {part} are computed from.",
      sp: "Each rank sends its tokens to all others, since every rank computes its own {part} from all tokens.",
    },
    qkv: {
      weights: "Each rank multiplies all tokens by its own columns of the weights, so it gets queries, keys and values of its own heads.",
      tokens: "Each rank computes queries, keys and values of its own tokens, for all heads, since it has all weights.",
    },
    "qkv of heads": "Each rank sends its tokens' queries, keys and values of some heads to the rank of those heads, since attention needs all tokens of a head in one place.",
    "attention of heads": "Each rank lets its own heads look at all tokens. Heads need nothing of one another, so nothing is sent.",
    "keys and values": "Each rank sends the keys and values that it has just used on to the next rank, since every token needs those of all tokens.",
    attention: {
      weights: "Each rank lets its own heads look at all tokens. Heads need nothing of one another, so nothing is sent.",
      ulysses: "Each rank sends every other rank that rank's tokens, since the next product needs all heads of a token in one place.",
      cp: "Each rank has met the keys and values of all ranks, so it has the attention of its own tokens to all tokens.",
    },
    o: {
      weights: "Each rank multiplies its heads by its own rows of the weight. That gives partial sums: only the sum over the ranks is right.",
      tokens: `This product ${OWN_TOKENS}`,
    },
    leave: {
      tp: [
        "Each rank sends every other rank some tokens of its partial sums and adds up what it receives, since only the sum over the ranks is right.",
        "Each rank sends the tokens that it has added up to all others, since every rank goes on with all tokens.",
      ],
      sp: "Each rank sends every other rank that rank's tokens of its partial sums and adds up what it receives: only the sum is right, and what follows needs a rank's own tokens only.",
    },
    dropout: {
      tp: "Every rank drops the same numbers of all tokens: replicas must stay equal, so all need the same random numbers.",
      all: `Dropout ${OWN_TOKENS}`,
    },
    residual: {
      tp: "Every rank adds what came in before the norm, to all tokens: the same work on each.",
      all: `Adding what came in before the norm ${OWN_TOKENS}`,
    },
    up: {
      weights: "Each rank multiplies all tokens by its own columns of the weight, so it gets its own features of every token.",
      tokens: `An MLP ${OWN_TOKENS}`,
    },
    silu: "SiLU works on one number at a time, so each rank applies it to the numbers that it has and nothing is sent.",
    down: {
      weights: "Each rank multiplies its features by its own rows of the weight. That gives partial sums: only the sum over the ranks is right.",
      tokens: `This product, too, ${OWN_TOKENS}`,
    },
    y: {
      tp: "Every rank adds what came in before the norm, to all tokens, so y, the input of the next block, is on every rank.",
      all: "Each rank adds what came in before the norm, to its own tokens: y is sharded as x was, so the next block can follow.",
    },
  },
  backward: {
    y: "A sum's gradient is that of both addends, so every rank passes it on as it is, to the MLP and past it.",
    dropout: "The gradient goes on where the forward dropped nothing; each rank knows what it dropped, so nothing is sent.",
    leave: {
      tp: "Nothing is sent, since the gradient of a sum is that of each addend, and every rank has it.",
      sp: "Each rank sends the gradients of its tokens to all others, since its own {part} had a share in all tokens. So a reduce-scatter's backward is an all-gather.",
    },
    down: {
      weights: "Each rank multiplies the gradients of all tokens by its own weights, so it gets those of its own features.",
      tokens: `The gradient of this product ${OWN_TOKENS}`,
    },
    silu: "SiLU works on one number at a time, and so does its gradient: nothing is sent.",
    again: "Each rank sends its tokens to all others once more: the weights' gradients need all tokens, and to save memory a rank has kept only its own.",
    up: {
      weights: "Each rank computes what its own features add to every token's gradient. That gives partial sums, since the others' features used the same tokens.",
      tokens: `The gradient of an MLP ${OWN_TOKENS}`,
    },
    enter: {
      tp: [
        "Each rank sends every other rank some tokens of its partial sums and adds up what it receives, since all ranks' {part} used the same input.",
        "Each rank sends the tokens that it has added up to all others, since every rank goes on with the gradients of all tokens.",
      ],
      sp: "Each rank sends every other rank that rank's tokens of its partial sums and adds up what it receives, since all ranks' {part} used them. So an all-gather's backward is a reduce-scatter.",
    },
    norm: "A norm's gradient needs one token at a time, so nothing is sent; the gradient that went past is added.",
    residual: "A sum's gradient is that of both addends, so every rank passes it on as it is, to attention and past it.",
    o: {
      weights: "Each rank multiplies the gradients of all tokens by its own weights, so it gets those of its own heads.",
      tokens: `The gradient of this product ${OWN_TOKENS}`,
    },
    attention: {
      weights: "Each rank computes the gradients of its own heads' queries, keys and values. Heads need nothing of one another, so nothing is sent.",
      ulysses: "Each rank sends its tokens' gradients of some heads to the rank of those heads, since their backward needs all tokens: an all-to-all's backward is an all-to-all.",
      cp: "Each rank now has all gradients of its own tokens' queries, keys and values, since those that went round came home with every rank's share.",
    },
    "attention of heads": "Each rank computes the gradients of its own heads' queries, keys and values. Heads need nothing of one another, so nothing is sent.",
    "keys and values": "Each rank sends keys and values on once more, since every rank's gradients need those of all tokens, and it kept its own only.",
    "gradients of keys and values": "Each rank adds its own share to the gradients of the keys and values that it has, and sends them on, since they belong to the rank whose tokens these are.",
    "qkv of heads": "Each rank sends every other rank that rank's tokens' gradients, since the product before needs all heads of a token in one place.",
    qkv: {
      weights: "Each rank computes what its own heads add to every token's gradient. That gives partial sums, since the others' heads used the same tokens.",
      tokens: `The gradient of this product ${OWN_TOKENS}`,
    },
  },
  gradients: {
    gradients: {
      sp: [
        "Each rank sends pieces of its gradients of the norms' weights and of the biases, and adds up what it receives: these weights are replicated, but each rank saw its own tokens only.",
        "Each rank sends its piece of the sum to all others, since replicated weights need the same gradient everywhere.",
      ],
      tokens: [
        "Each rank sends pieces of its gradients of all weights, and adds up what it receives: the weights are replicated, but each rank saw its own tokens only.",
        "Each rank sends its piece of the sum to all others, since replicated weights need the same gradient everywhere.",
      ],
    },
  },
};
