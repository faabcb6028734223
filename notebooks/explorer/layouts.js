// A transformer block on 1 to 8 ranks: what each holds before and after every step, and what is
// sent. Tensors, moments and bytes are those of a run of sp_layout_sim.py.

const LAYOUT_NAMES = {
  tp: "TP: tensor parallelism",
  sp: "SP: Megatron's sequence parallelism",
  ulysses: "Ulysses: tokens, heads inside attention",
  cp: "CP: context parallelism, a ring",
};
const HOLDS = {
  tokens: "own tokens",
  heads: "own heads",
  features: "own features",
  shard: "own shard",
  replicated: "replicated",
  "partial sum": "partial sum",
};
const plain = (name) => name.replaceAll("_", "-"); // all-gather, as people write it

// How the ranks hold a tensor; keys and values that go round are not their own
const heldBy = ([, holds, , , , owners]) => (owners.every((owner, r) => owner === r) ? HOLDS[holds] : "others' tokens");

// Where the ranks' boxes stand: before and after, side by side on a phone, else one above the other.
function boxPlaces(P, narrow) {
  if (narrow) {
    const high = Math.min(92, 480 / P);
    const box = (x) => (r) => ({ x, y: 54 + r * high, w: 132, h: high - 20 });
    return { width: 360, height: 54 + P * high, before: box(58), after: box(226) };
  }
  const wide = 1090 / P;
  const w = Math.min(wide - 14, 190);
  const box = (y) => (r) => ({ x: 150 + r * wide + (wide - w) / 2, y, w, h: 142 });
  return { width: 1240, height: 436, before: box(24), after: box(268) };
}

// The part of a box that [token, end, feature, end] of a tensor of that size is.
function part([t0, t1, f0, f1], [tokens, features], box) {
  return {
    x: box.x + (box.w * f0) / features,
    y: box.y + (box.h * t0) / tokens,
    width: (box.w * (f1 - f0)) / features,
    height: (box.h * (t1 - t0)) / tokens,
  };
}

function holding([label, holds, , places, shapes, owners], r) {
  const size = 2 * shapes[r].reduce((a, b) => a * b);
  const [t0, t1, f0, f1] = places[r];
  const [a, b] = holds === "tokens" ? [t0, t1] : [f0, f1];
  const range = holds in { tokens: 0, heads: 0, features: 0 } ? `${holds} ${a} to ${b - 1}` : HOLDS[holds];
  const whose = owners[r] === r ? "" : `, of rank ${owners[r]}`;
  return `rank ${r}: ${label}\n${range}${whose}\n(${shapes[r].join(", ")}), ${count(size)} bytes`;
}

// One rank's box: the outline is the full tensor, filled is what the rank holds of it.
function holdingBox(tensor, r, box, narrow) {
  const [, holds, size, places, shapes, owners] = tensor;
  const all = holds === "replicated" || holds === "partial sum";
  const fill = all ? (holds === "replicated" ? "url(#replicated)" : "url(#partial)") : `var(--rank${owners[r]})`;
  const shape = `(${shapes[r].join(", ")})`;
  return svg("g", tip(holding(tensor, r)),
    svg("rect", { x: box.x, y: box.y, width: box.w, height: box.h, class: "outline" }),
    svg("rect", { ...part(places[r], size, box), fill, class: "held" }),
    svg("text", { x: box.x + box.w / 2, y: box.y + box.h + (narrow ? 13 : 16), "text-anchor": "middle", class: "small" }, shape));
}

// The pieces that are sent: each from its place in the sender's box to the same in the receiver's.
function flights(moment, tensor, spots) {
  return moment[7].map(([from, to, ...place]) => {
    const start = part(place, tensor[2], spots.before(from));
    const end = part(place, tensor[2], spots.after(to));
    const [dx, dy] = [end.x - start.x, end.y - start.y];
    const [x, y] = [start.x + start.width / 2, start.y + start.height / 2];
    return [
      svg("line", { x1: x, y1: y, x2: x + dx, y2: y + dy, class: "way", stroke: `var(--rank${from})`, "marker-end": "url(#arrow)" }),
      svg("rect", { ...start, fill: `var(--rank${from})`, class: "piece", style: `--dx:${dx}px;--dy:${dy}px` }),
    ];
  });
}

// The path through the block: a mark for each step, a tall one where something is sent.
function pathOf(moments, step, set) {
  const wide = 1240 / moments.length;
  const marks = moments.map(([phase, , , collective], i) => {
    const size = collective ? { y: 0, height: 18 } : { y: 9, height: 9 };
    const kind = `mark ${collective ? "sends" : phase}${i + 1 === step ? " now" : ""}`;
    const onclick = () => set({ step: i + 1 });
    const words = `step ${i + 1}, ${phase}: ${collective ? plain(collective) : "no message"}`;
    return svg("rect", { x: i * wide + 1, width: wide - 2, ...size, class: kind, onclick, ...tip(words, false) });
  });
  const phases = ["forward", "backward", "gradients"].map((phase) => {
    const first = moments.findIndex((moment) => moment[0] === phase);
    return first < 0 || phase === "gradients" ? null : svg("text", { x: first * wide + 2, y: 34, class: "small" }, phase);
  });
  return svg("svg", { viewBox: "0 0 1240 40", class: "path", preserveAspectRatio: "none", "aria-hidden": "true" }, marks, NARROW.matches ? null : phases);
}

// What happens in a moment, in words.
function layoutWords(moment, tensors, P) {
  const [phase, before, after, collective, , , wire, , k, of] = moment;
  const [a, b] = [tensors[before], tensors[after]];
  if (!collective) return `${a[0]} to ${b[0]}: each rank by itself, nothing is sent.`;
  const turn = of > 1 ? ` (${k} of ${of})` : "";
  const what = `${a[0]}, ${HOLDS[a[1]]}, becomes ${a[0] === b[0] ? "" : `${b[0]}, `}${HOLDS[b[1]]}`;
  const moved = collective === "send" ? `${a[0]} move on to the next rank` : what;
  return `${plain(collective)}${turn}: ${moved}. A rank sends ${bytes(wire / P)}.`;
}

function layoutPicture(run, step, P, layout, words) {
  const narrow = NARROW.matches;
  const spots = boxPlaces(P, narrow);
  const moment = run.moments[Math.max(0, step - 1)];
  const [before, after] = [run.tensors[moment[1]], run.tensors[moment[2]]];
  const shown = step === 0 ? [[before, spots.before]] : [[before, spots.before], [after, spots.after]];
  const ranks = [...Array(P).keys()];
  const rankNames = ranks.map((r) => {
    const box = spots.before(r);
    const place = narrow ? { x: 4, y: box.y + box.h / 2 + 5 } : { x: box.x + box.w / 2, y: 15, "text-anchor": "middle" };
    return svg("text", { ...place, class: "rank" }, `rank ${r}`);
  });
  const names = shown.map(([tensor, place]) => {
    const box = place(0);
    const at = narrow ? { x: box.x + box.w / 2, "text-anchor": "middle" } : { x: 0 };
    const lines = wrapped(tensor[0], 16);
    const top = narrow ? 14 : box.y + box.h / 2 - 6;
    const line = (words, i) => svg("text", { ...at, y: top + 17 * i, class: i < lines.length ? "name" : "small" }, words);
    return [...lines, heldBy(tensor)].map(line);
  });
  const collective = step > 0 && moment[3];
  const act = step === 0 ? "" : collective ? plain(collective) : "each by itself";
  const operation = narrow ? null : svg("text", { x: 0, y: 230, class: collective ? "act sends" : "act" }, act);
  const boxes = shown.map(([tensor, place], i) =>
    svg("g", { class: i && collective ? "arrives" : "", "data-key": `${layout} ${P} ${step} ${i}` },
      ranks.map((r) => holdingBox(tensor, r, place(r), narrow))));
  const alone = step > 0 && !collective ? ranks.map((r) => arrowBetween(spots.before(r), spots.after(r), narrow)) : [];
  const sent = svg("g", { "data-key": `${layout} ${P} ${step}`, "aria-hidden": "true" }, step > 0 ? flights(moment, before, spots) : []);
  return picture(spots.width, spots.height, words, patterns(), rankNames, names, operation, alone, boxes, sent);
}

// From a rank's box to its next one: nobody else is needed
function arrowBetween(a, b, narrow) {
  const ends = narrow
    ? { x1: a.x + a.w + 8, y1: a.y + a.h / 2, x2: b.x - 8, y2: b.y + b.h / 2 }
    : { x1: a.x + a.w / 2, y1: a.y + a.h + 30, x2: b.x + b.w / 2, y2: b.y - 12 };
  return svg("line", { ...ends, class: "way", stroke: "var(--grey)", "marker-end": "url(#arrow)" });
}

// A long name in lines of so many letters at most
function wrapped(name, most) {
  const lines = [""];
  for (const word of name.split(" ")) {
    const last = lines.at(-1);
    if (last && last.length + word.length >= most) lines.push(word);
    else lines[lines.length - 1] = last ? `${last} ${word}` : word;
  }
  return lines;
}

function patterns() {
  const square = { width: 8, height: 8, patternUnits: "userSpaceOnUse" };
  const ground = () => svg("rect", { width: 8, height: 8, fill: "var(--pale)" });
  const hatch = svg("path", { d: "M0 0L8 8M8 0L0 8", stroke: "var(--grey)", "stroke-width": 1 });
  const tip = svg("path", { d: "M0 0L6 3L0 6z", fill: "var(--grey)" });
  return svg("defs", {},
    svg("pattern", { id: "replicated", ...square }, ground()),
    svg("pattern", { id: "partial", ...square }, ground(), hatch),
    svg("marker", { id: "arrow", viewBox: "0 0 6 6", refX: 5, refY: 3, markerWidth: 5, markerHeight: 5, orient: "auto" }, tip));
}

function layoutLegend() {
  return html("div", { class: "legend" },
    entry("var(--rank0)", "a rank's own shard", tip("tokens: a band from left to right; heads or features: from top to bottom")),
    entry("url(#replicated)", "replicated", tip("all of it, the same on every rank")),
    entry("url(#partial)", "partial sum", tip("all of it, but only the sum over the ranks is right")));
}

view({
  id: "layouts",
  title: "Layouts",
  lead: "One transformer block: which part of each tensor every rank holds, and what has to be sent for the next step.",
  bare: "layout",
  state: { layout: "sp", P: 4, step: 2 },
  values: { layout: Object.keys(LAYOUT_NAMES), P: [1, 2, 3, 4, 5, 6, 7, 8] },
  draw(root, { layout, P, step: asked }, set) {
    const run = DATA.layouts.runs[layout][P - 1];
    const step = Math.min(asked, run.moments.length);
    const moment = run.moments[Math.max(0, step - 1)];
    const told = run.moments.slice(0, step);
    const total = (column) => told.reduce((sum, moment) => sum + moment[column], 0);
    const phase = step === 0 ? "" : { forward: "Forward", backward: "Backward", gradients: "End of the step" }[moment[0]];
    const { batch, seq, hidden, heads, ffn } = DATA.layouts.block;
    const first = run.tensors[run.moments[0][1]];
    const words = step === 0 ? `x comes in, ${HOLDS[first[1]]}.` : `${phase}, ${layoutWords(moment, run.tensors, P)}`;
    say(words);
    root.append(
      html("div", { class: "controls" },
        choice("Layout", "layout", LAYOUT_NAMES), slider("Ranks", "P", [1, 2, 3, 4, 5, 6, 7, 8]),
        player("step", run.moments.length + 1, step > 0 && moment[3] ? 4200 : 1500)),
      pathOf(run.moments, step, set),
      html("p", { class: "words" }, words),
      layoutPicture(run, step, P, layout, words),
      layoutLegend(),
      html("div", { class: "figures" },
        figure(count(total(4)), "collectives so far"),
        figure(bytes(total(5) / P), "message bytes so far, a rank"),
        figure(bytes(total(6) / P), "wire bytes so far, a rank"),
        figure(bytes(run.weights[0]), "weights on rank 0"),
        figure(bytes(run.kept[0]), "kept by rank 0 for the backward")),
      html("p", { class: "note" },
        `A block of b = ${batch}, s = ${seq}, h = ${hidden}, ${heads} heads, f = ${ffn}, in bfloat16; shapes are (b, s, h) and so on. A run of sp_layout_sim.py.`));
  },
});
