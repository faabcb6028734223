// A transformer block on 1 to 8 ranks: what each holds before and after every step, and what is
// sent. Tensors, moments and bytes are those of a run of labs/four_layouts.py.

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

// What is alike on all ranks stands in the data once
for (const [i, run] of Object.values(DATA.layouts.runs).flatMap((runs) => [...runs.entries()])) {
  for (const tensor of run.tensors) {
    for (const k of [3, 4]) tensor[k] = [...Array(i + 1).keys()].map((rank) => tensor[k][rank] ?? tensor[k][0]);
  }
}

// How the ranks hold a tensor; keys and values that go round are not their own
const heldBy = ([, holds, , , , owners]) => (owners.every((owner, r) => owner === r) ? HOLDS[holds] : "others' tokens");

// Where the ranks' boxes stand: before and after, side by side on a narrow page, else one above the other.
function boxPlaces(P, narrow) {
  const width = pageWidth();
  if (narrow) {
    const high = Math.max(62, Math.min(92, 480 / P));
    const w = Math.min((width - 96) / 2, 300);
    const box = (x) => (r) => ({ x, y: 58 + r * high, w, h: high - 22 });
    return { width, height: 58 + P * high, before: box(58), after: box(width - w - 2) };
  }
  const wide = (width - 150) / P;
  const w = Math.min(wide - 14, 190);
  const box = (y) => (r) => ({ x: 150 + r * wide + (wide - w) / 2, y, w, h: 124 });
  return { width, height: 384, before: box(24), after: box(236) };
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

// One rank's box: the outline is the full tensor, filled is what the rank holds of it. A replica is in
// the stripes of all ranks, as places, those of tokens, has them; a partial sum is hatched in its rank's colour.
function holdingBox(tensor, r, box, tokens, look) {
  const [, holds, size, places, , owners] = tensor;
  const fills = { replicated: [...tokens[3].keys()].map((rank) => `var(--rank${rank})`), "partial sum": [`url(#partial${r})`] };
  const stripes = (fills[holds] ?? [`var(--rank${owners[r]})`]).map((fill, i) => {
    const [t0, t1] = tokens[3][i];
    const place = holds === "replicated" ? part([t0, t1, 0, 1], [tokens[2][0], 1], box) : part(places[r], size, box);
    return svg("rect", { ...place, fill, class: "held" });
  });
  return svg("g", { ...tip(holding(tensor, r)), onpointerenter: look, onfocus: look },
    svg("rect", { x: box.x, y: box.y, width: box.w, height: box.h, class: "outline" }), stripes);
}

// A tensor's shape under a rank's box: drawn last, nothing covers it
function shapeBelow([, , , , shapes], r, box) {
  return svg("text", { x: box.x + box.w / 2, y: box.y + box.h + 15, "text-anchor": "middle", class: "small above" }, `(${shapes[r].join(", ")})`);
}

// The pieces that are sent: each from its place in the sender's box to the same in the receiver's.
// Of very many only those of one rank.
const flightsOf = (moment) => (moment[7].match(/../g) ?? []).map((pair) => [...pair].map(Number));
const tooMany = (moment) => flightsOf(moment).length > 16;

function flights(moment, tensor, target, spots, P) {
  const drawn = flightsOf(moment).filter(([from]) => !tooMany(moment) || from === Math.min(state.from, P - 1));
  return drawn.map(([from, to]) => {
    const [held, wanted] = [tensor[3][from], target[3][to]];
    const place = held.map((end, i) => (i % 2 ? Math.min : Math.max)(end, wanted[i])); // what both have
    const start = part(place, tensor[2], spots.before(from));
    const end = part(place, tensor[2], spots.after(to));
    const [dx, dy] = [end.x - start.x, end.y - start.y];
    const [x, y] = [start.x + start.width / 2, start.y + start.height / 2];
    return [
      svg("line", { x1: x, y1: y, x2: x + dx, y2: y + dy, class: "way", stroke: `var(--rank${from})`, "marker-end": "url(#arrow)" }),
      svg("rect", { ...start, fill: `var(--rank${tensor[5][from]})`, class: "piece", style: `--dx:${dx}px;--dy:${dy}px` }),
    ];
  });
}

// The step of the block that a moment belongs to: forwards what it makes, backwards what it comes from.
function stationOf(run, i) {
  const [phase, before, after] = run.moments[i];
  const [a, b] = [run.tensors[before][0], run.tensors[after][0]];
  if (phase === "gradients") return phase;
  if (a.includes("keys and values")) return "keys and values";
  if (phase === "backward" && a === "sum") return stationOf(run, i - 1);
  if (phase === "backward" && a.startsWith("gradient of ")) return a.replace("gradient of ", "");
  return b === "sum" ? stationOf(run, i + 1) : b;
}

// The block in small: you are here. Dots are messages, above those of the forward; a click goes there.
function blockInSmall(run, step, set) {
  const width = pageWidth();
  const names = run.moments.map((_, i) => stationOf(run, i));
  const phase = step > 0 ? run.moments[step - 1][0] : "";
  const sends = (own, back) => run.moments.some((moment, i) => own.includes(names[i]) && moment[3] && (moment[0] === "backward") === back);
  const stations = STATIONS.filter(([, ...own]) => own.some((name) => names.includes(name))).map(([label, ...own]) => {
    const dots = [false, true].filter((back) => sends(own, back));
    const text = dots.length ? "" : label.replace("attention", width < 500 ? "attn" : "attention");
    return { own, dots, text, wide: text ? text.length + 1.2 : 2 };
  });
  const letter = width / sum(stations.map(({ wide }) => wide));
  let right = 0;
  const drawn = stations.map(({ own, dots, text, wide }) => {
    const [left, w] = [right, wide * letter];
    right += w;
    const middle = left + w / 2;
    const now = step > 0 && own.includes(names[step - 1]);
    const way = phase === "backward" ? -1 : 1;
    const near = run.moments.findIndex((moment, i) => own.includes(names[i]) && moment[0] === phase);
    const first = names.findIndex((name) => own.includes(name));
    const box = text ? svg("rect", { x: left + 1, y: 20, width: w - 2, height: 24, rx: 4 }) : svg("line", { x1: middle, x2: middle, y1: 20, y2: 44, class: "grid" });
    const end = middle > width / 2;
    const here = !now ? null : [
      svg("path", { d: `M${middle - 8} ${32 - 29 * way}h16l-8 ${11 * way}z`, class: "sends" }),
      svg("text", { x: middle + (end ? -12 : 12), y: way > 0 ? 12 : 61, style: `text-anchor: ${end ? "end" : "start"}` }, `you are here: ${phase}`)];
    return svg("g", { class: `station${now ? " now" : ""}`, onclick: () => set({ step: (near < 0 ? first : near) + 1 }) },
      svg("rect", { x: left, y: 0, width: w, height: 64, class: "nothing" }), box,
      svg("text", { x: middle, y: 36 }, text), dots.map((back) => svg("circle", { cx: middle, cy: back ? 44 : 20, r: 5, class: `sends${now && back === (way < 0) ? " this" : ""}` })), here);
  });
  return svg("svg", { viewBox: `0 0 ${width} 64`, class: "block", "aria-hidden": "true" }, drawn);
}

// What happens in a moment, and why.
function layoutWords(run, i, layout, P) {
  const [phase, before, , collective, , , wire, , k, of] = run.moments[i];
  const [name, station] = [run.tensors[before][0], stationOf(run, i)];
  const title = `${{ forward: "Forward", backward: "Backward", gradients: "End of the step" }[phase]}, ${collective ? plain(collective) : "no message"}`;
  let kind = station.replace(/ (attention|mlp|[12])$/, "");
  if (phase === "backward" && name.startsWith("gradients")) kind = name;
  if (phase === "backward" && /^norm/.test(name)) kind = "again";
  const known = WHY[phase][kind];
  const sharded = layout === "tp" || layout === "sp" ? "weights" : "tokens";
  const own = typeof known === "string" ? known : known[layout] ?? known[sharded] ?? known.all;
  const why = Array.isArray(own) ? own[k - 1] : own;
  const mlp = ["up", "silu", "down", "enter mlp", "leave mlp"].includes(station);
  const sent = P > 1 ? `A rank sends ${bytes(wire / P)}.` : "With 1 rank there is nobody to send to.";
  return `${title}${of > 1 ? ` (${k} of ${of})` : ""}: ${why.replace("{part}", mlp ? "features" : "heads")}${collective ? ` ${sent}` : ""}`;
}

// half: only what the step begins with, for a question about what comes of it
function layoutPicture(run, step, P, layout, words, set, half = false) {
  const narrow = NARROW.matches;
  const spots = boxPlaces(P, narrow);
  const moment = run.moments[Math.max(0, step - 1)];
  const [before, after] = [run.tensors[moment[1]], run.tensors[moment[2]]];
  const shown = step === 0 || half ? [[before, spots.before]] : [[before, spots.before], [after, spots.after]];
  const ranks = [...Array(P).keys()];
  const whole = ["", "", [1], [[0, 1]]]; // alone a rank has all tokens
  const tokens = P > 1 ? run.tensors.find(([, holds]) => holds === "tokens") : whole;
  const rankNames = ranks.map((r) => {
    const box = spots.before(r);
    const place = narrow ? { x: 0, y: box.y + box.h / 2 + 5 } : { x: box.x + box.w / 2, y: 15, "text-anchor": "middle" };
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
  const collective = step > 0 && !half && moment[3];
  const act = step === 0 || half ? "" : collective ? plain(collective) : "each by itself";
  const operation = narrow ? null : svg("text", { x: 0, y: 198, class: collective ? "act sends" : "act" }, act);
  const many = step > 0 && tooMany(moment);
  const look = (r) => (state.from === r ? null : set({ from: r }));
  const boxes = shown.map(([tensor, place], i) =>
    svg("g", { class: i && collective ? "arrives" : "", "data-key": `${layout} ${P} ${step} ${i}` },
      ranks.map((r) => holdingBox(tensor, r, place(r), tokens, many ? () => look(r) : null))));
  const shapes = shown.map(([tensor, place]) => ranks.map((r) => shapeBelow(tensor, r, place(r))));
  const alone = step > 0 && !half && !collective ? ranks.map((r) => arrowBetween(spots.before(r), spots.after(r), narrow)) : [];
  const sent = svg("g", { "data-key": `${layout} ${P} ${step} ${many ? state.from : ""}`, "aria-hidden": "true" }, step > 0 && !half ? flights(moment, before, after, spots, P) : []);
  const height = half && !narrow ? 168 : spots.height;
  return picture(spots.width, height, words, patterns(), rankNames, operation, alone, boxes, sent, names, shapes);
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
  const hatch = (r) => svg("pattern", { id: `partial${r}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" },
    svg("rect", { width: 8, height: 8, fill: "var(--paper)" }),
    svg("path", { d: "M0 0L8 8M8 0L0 8", stroke: `var(--rank${r})`, "stroke-width": 1.6 }));
  const stripes = [0, 1, 2, 3].map((r) => svg("rect", { y: 4 * r, width: 26, height: 4, fill: `var(--rank${r})` }));
  return svg("defs", {}, [...Array(8).keys()].map(hatch),
    svg("pattern", { id: "replicated", width: 26, height: 16, patternUnits: "userSpaceOnUse" }, stripes),
    svg("marker", { id: "arrow", viewBox: "0 0 6 6", refX: 5, refY: 3, markerWidth: 5, markerHeight: 5, orient: "auto" },
      svg("path", { d: "M0 0L6 3L0 6z", fill: "var(--grey)" })));
}

function layoutLegend() {
  return html("div", { class: "legend" },
    entry("var(--rank0)", "a rank's own shard", tip("tokens: a band from left to right; heads or features: from top to bottom")),
    entry("url(#replicated)", "replicated: every rank has all", tip("all of it, the same on every rank, in the colours of the ranks' tokens")),
    entry("url(#partial0)", "partial sum: only the sum over the ranks is right", tip("all of it, but only the sum over the ranks is right")));
}

view({
  id: "layouts",
  title: "Layouts",
  lead: "One transformer block: which part of each tensor every rank holds, and what has to be sent for the next step.",
  bare: "layout",
  course: ["lab 2", "lab 7"],
  state: { layout: "sp", P: 4, step: 2, from: 0 },
  values: { layout: Object.keys(LAYOUT_NAMES), P: [1, 2, 3, 4, 5, 6, 7, 8], from: [0, 1, 2, 3, 4, 5, 6, 7] },
  sketch({ layout, P, step }) {
    const run = DATA.layouts.runs[layout][P - 1];
    const [label, holds] = run.tensors[run.moments[step - 1][1]];
    return html("div", {}, layoutPicture(run, step, P, layout, `${label} on ${P} ranks: ${HOLDS[holds]}`, null, true), layoutLegend());
  },
  draw(root, { layout, P, step: asked }, set) {
    const run = DATA.layouts.runs[layout][P - 1];
    const step = Math.min(asked, run.moments.length);
    const moment = run.moments[Math.max(0, step - 1)];
    const told = run.moments.slice(0, step);
    const total = (column) => told.reduce((sum, moment) => sum + moment[column], 0);
    const { batch, seq, hidden, heads, ffn } = DATA.layouts.block;
    const first = run.tensors[run.moments[0][1]];
    const words = step > 0 ? layoutWords(run, step - 1, layout, P)
      : `x, the block's input, comes in: ${first[1] === "tokens" ? "each rank has its own tokens of it" : "every rank has all of it"}.`;
    const one = step > 0 && tooMany(moment) ? `Drawn: what rank ${Math.min(state.from, P - 1)} sends; point at another rank or tap it. ` : "";
    const colon = words.indexOf(":");
    say(words);
    root.append(
      html("div", { class: "controls dense" },
        choice("Layout", "layout", LAYOUT_NAMES), slider("Ranks", "P", [1, 2, 3, 4, 5, 6, 7, 8]),
        player("step", run.moments.length + 1, step > 0 && moment[3] ? 4200 : 1500)),
      html("p", { class: "words" }, html("b", {}, words.slice(0, colon)), words.slice(colon)),
      layoutPicture(run, step, P, layout, words, set),
      blockInSmall(run, step, set),
      layoutLegend(),
      html("div", { class: "figures" },
        figure(count(total(4)), "collectives so far"),
        figure(bytes(total(5) / P), "message bytes so far, a rank"),
        figure(bytes(total(6) / P), "wire bytes so far, a rank"),
        figure(bytes(run.weights[0]), "weights on rank 0"),
        figure(bytes(run.kept[0]), "kept by rank 0 for the backward")),
      html("p", { class: "note" },
        `${one}A block of b = ${batch}, s = ${seq}, h = ${hidden}, ${heads} heads, f = ${ffn}, in bfloat16; shapes are (b, s, h) and so on. A run of labs/four_layouts.py.`));
  },
});
