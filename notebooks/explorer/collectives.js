// Collectives from send and receive alone, as in lab 1: who sends which chunk to whom at each step,
// and what it costs. Steps, chunks and sums are those of a run of lab 1's functions.
//
// A run is a list of ranks; a rank is [cells of its result at the start, [to, cells sent, cells of
// its result afterwards], ...]; a cell is [chunk, bit mask of the ranks that are added up in it].

const OPERATION_NAMES = {
  reduce_scatter: "reduce-scatter, round a ring",
  all_gather: "all-gather, round a ring",
  all_reduce: "all-reduce, round a ring",
  all_to_all: "all-to-all",
  gather_and_add: "all-reduce: gather and add",
};
const FORMULAS = {
  reduce_scatter: "(P-1)/P n",
  all_gather: "(P-1)/P n",
  all_reduce: "2 (P-1)/P n",
  all_to_all: "(P-1)/P n",
  gather_and_add: "(P-1) n",
};
const RING = "Each step costs the latency a and the time of n/P bytes: (P-1) (a + b n/P).";
const TIMES = {
  reduce_scatter: RING,
  all_gather: RING,
  all_to_all: RING,
  all_reduce: "A reduce-scatter and an all-gather, P-1 steps each: 2 (P-1) (a + b n/P). Gather and add: (P-1) (a + b n).",
  gather_and_add: "P-1 steps, each with all n bytes: (P-1) (a + b n). The ring: 2 (P-1) (a + b n/P).",
};
const MEANINGS = {
  reduce_scatter: "Each chunk collects the addends of one rank after the other and ends as a sum on one rank.",
  all_gather: "Each rank sends on what it received last, and keeps what passes.",
  all_reduce: "A reduce-scatter, then an all-gather of the sums.",
  all_to_all: "Each rank sends to every other rank the chunk that is meant for it; nothing is added.",
  gather_and_add: "Each rank sends all that it has to every other rank, and adds up what it receives.",
};
const MESSAGES = [10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30].map((e) => 2 ** e);
const LATENCIES = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]; // microseconds
const BANDWIDTHS = [1, 2, 5, 10, 25, 50, 100, 200, 450, 900]; // GB/s
const letter = (chunk) => "abcdefgh"[chunk];
const inMask = (mask) => [...Array(8).keys()].filter((rank) => mask & (1 << rank));

// 1.5 ms
function duration(seconds) {
  const [unit, size] = seconds >= 1 ? ["s", 1] : seconds >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
  return `${Number((seconds * size).toPrecision(3))} ${unit}`;
}

const bytesOf = (run, steps, message) =>
  run[0].slice(1, steps + 1).reduce((sum, [, sent]) => sum + (sent.length / run.length) * message, 0);

// Seconds of so many steps: each costs the latency, and the time of its bytes (lab 1: a + b m).
const timeOf = (run, steps, message, latency, bandwidth) =>
  steps * latency * 1e-6 + bytesOf(run, steps, message) / (bandwidth * 1e9);

// Where a rank and its cells are: on an ellipse, or in rows on a narrow page.
function ringPlaces(P, narrow) {
  const width = columnWidths()[0];
  const cell = Math.min(narrow ? 80 : 40, narrow ? (width - 76) / P : (width / 760) * (136 / P + 4));
  const high = narrow ? 20 : 22;
  const height = narrow ? P * 72 : 452;
  const corner = (r) => {
    if (narrow) return { x: 66, y: 8 + r * 72 };
    const angle = (2 * Math.PI * r) / P - Math.PI / 2;
    const [x, y] = [width / 2 - (cell * P) / 2, 220];
    return { x: x + (x - 4) * Math.cos(angle), y: y + 174 * Math.sin(angle) - high };
  };
  // row 0: what the rank had at first, row 1: its result
  const at = (r, row, column) => ({ x: corner(r).x + column * cell, y: corner(r).y + row * (high + 4), w: cell - 2, h: high });
  return { width, height, narrow, at, corner };
}

// The column of a cell: its chunk; after an all-to-all, the rank that it comes from
const columnOf = (op, [chunk, mask]) => (op === "all_to_all" ? inMask(mask)[0] : chunk);

// Stripes in the colours of the ranks that are added up, and the chunk's letter.
function chunkBox([chunk, mask], spot, attributes = {}) {
  const ranks = inMask(mask);
  const stripes = ranks.map((rank, i) =>
    svg("rect", { x: spot.x + (i * spot.w) / ranks.length, y: spot.y, width: spot.w / ranks.length, height: spot.h, fill: `var(--rank${rank})` }));
  const [x, y] = [spot.x + spot.w / 2, spot.y + spot.h / 2];
  return svg("g", attributes, stripes,
    svg("circle", { cx: x, cy: y, r: 7.5, class: "paper" }),
    svg("text", { x, y: y + 4, "text-anchor": "middle", class: "letter" }, letter(chunk)));
}

function chunkWords([chunk, mask]) {
  const ranks = inMask(mask);
  return `chunk ${letter(chunk)} ${ranks.length > 1 ? "added up over ranks" : "of rank"} ${ranks.join(", ")}`;
}

const sameCell = (a) => (b) => a[0] === b[0] && a[1] === b[1];
const resultAt = (run, r, step) => (step === 0 ? run[r][0] : run[r][step][2]);

function rankBox(run, op, r, step, spots) {
  const P = run.length;
  const had = [...Array(P).keys()].filter((chunk) => op !== "all_gather" || chunk === r).map((chunk) => [chunk, 1 << r]);
  const result = resultAt(run, r, step);
  const words = `rank ${r}\nhad: ${had.map(([chunk]) => letter(chunk)).join(", ")}\nresult so far: ${result.map(chunkWords).join("; ") || "nothing yet"}`;
  const frame = [...Array(P).keys()].map((column) => {
    const spot = spots.at(r, 1, column);
    return svg("rect", { x: spot.x, y: spot.y, width: spot.w, height: spot.h, class: "outline" });
  });
  const name = spots.corner(r);
  const place = spots.narrow ? { x: 0, y: name.y + 27 } : { x: name.x, y: name.y - 6 };
  return svg("g", tip(words),
    svg("text", { ...place, class: "rank above" }, `rank ${r}`),
    had.map((cell) => chunkBox(cell, spots.at(r, 0, cell[0]), { class: "had" })),
    frame,
    result.map((cell) => {
      const old = step === 0 || resultAt(run, r, step - 1).some(sameCell(cell));
      return chunkBox(cell, spots.at(r, 1, columnOf(op, cell)), { class: old ? "" : "arrives", "data-key": `${op} ${P} ${step} ${cell}` });
    }));
}

// What flies in a step: from the sender's result, if it is there, else from what it had.
function chunkFlights(run, op, step, spots) {
  return run.flatMap((rank, r) => {
    const [to, sent] = rank[step];
    return sent.map((cell) => {
      const row = resultAt(run, r, step - 1).some(sameCell(cell)) ? 1 : 0;
      const start = spots.at(r, row, row ? columnOf(op, cell) : cell[0]);
      const end = spots.at(to, 1, columnOf(op, cell));
      const [dx, dy] = [end.x - start.x, end.y - start.y];
      const [x, y] = [start.x + start.w / 2, start.y + start.h / 2];
      const part = Math.max(0, 1 - 16 / Math.hypot(dx, dy)); // the arrow leaves the letter free
      return [
        svg("line", { x1: x, y1: y, x2: x + part * dx, y2: y + part * dy, class: "way", stroke: `var(--rank${r})`, "marker-end": "url(#arrow)" }),
        chunkBox(cell, start, { class: "piece", style: `--dx:${dx}px;--dy:${dy}px` }),
      ];
    });
  });
}

// What happens in a step, and why: told of rank 0.
function collectiveWords(run, op, step) {
  const P = run.length;
  if (step === 0) return MEANINGS[op];
  const [to, sent] = run[0][step];
  const what = sent.length > 1 ? "all its chunks" : `chunk ${letter(sent[0][0])}`;
  const added = inMask(sent[0][1]);
  const adds = `Rank 0 sends ${what}, ${added.length > 1 ? `the sum over ranks ${added.join(", ")}` : "its own"}, to rank ${to}, which adds its own to it: ` +
    `after ${P - 1} steps the chunk has passed all ranks.`;
  const passes = `Rank 0 sends ${what}${step === 1 ? "" : ", which came last,"} on to rank ${to}, which lacks it: after ${P - 1} steps it has passed all ranks.`;
  const why = {
    reduce_scatter: adds,
    all_gather: passes,
    all_reduce: step < P ? adds : passes.replace(what, `the sum of ${what}`).replace(", which came last,", step === P ? "" : ", which came last,"),
    all_to_all: `Rank 0 sends ${what}, which is meant for rank ${to}; in each step it has another partner, so no two send to the same rank.`,
    gather_and_add: `Rank 0 sends ${what} to rank ${to}, which adds them to its own; every other rank needs them too, so they are sent again in each step.`,
  };
  return `Step ${step}: ${why[op]} All ranks do this at the same time.`;
}

function collectivePicture(run, op, step, words) {
  const spots = ringPlaces(run.length, NARROW.matches);
  const key = `${op} ${run.length} ${step}`;
  const sent = step > 0 ? chunkFlights(run, op, step, spots) : [];
  return picture(spots.width, spots.height, words, patterns(),
    svg("g", {}, run.map((_, r) => rankBox(run, op, r, step, spots))),
    svg("g", { "data-key": key, "aria-hidden": "true" }, sent));
}

// Time against the size of the message, both on logarithmic axes.
function timeChart(curves, message) {
  const [width, height, left, bottom] = [columnWidths()[1], 270, 54, 228];
  const times = curves.flatMap(({ time }) => MESSAGES.map(time));
  const [low, high] = [Math.floor(Math.log10(Math.min(...times))), Math.ceil(Math.log10(Math.max(...times)))];
  const x = (n) => left + ((Math.log2(n) - 10) / 20) * (width - left - 28);
  const y = (seconds) => bottom - ((Math.log10(seconds) - low) / (high - low)) * (bottom - 12);
  const powers = [...Array(high - low + 1).keys()].map((i) => 10 ** (low + i));
  const words = curves.map(({ name, time }) => `${name} ${duration(time(message))}`).join(", ");
  return picture(width, height, `Time of a message of ${bytes(message)}: ${words}`,
    powers.map((t) => [
      svg("line", { x1: left, x2: width - 28, y1: y(t), y2: y(t), class: "grid" }),
      svg("text", { x: left - 6, y: y(t) + 4, "text-anchor": "end", class: "small" }, duration(t))]),
    [10, 15, 20, 25, 30].map((e) => svg("text", { x: x(2 ** e), y: bottom + 17, "text-anchor": "middle", class: "small" }, bytes(2 ** e))),
    svg("text", { x: (left + width) / 2, y: bottom + 32, "text-anchor": "middle", class: "small" }, "bytes of the message"),
    svg("line", { x1: x(message), x2: x(message), y1: 8, y2: bottom, class: "now" }),
    curves.map(({ name, look, time }) => [
      svg("polyline", { points: MESSAGES.map((n) => `${x(n)},${y(time(n))}`).join(" "), class: `curve ${look}` }),
      svg("circle", { cx: x(message), cy: y(time(message)), r: 5, class: `dot ${look}`, ...tip(`${name}: ${duration(time(message))}`) })]));
}

function timeWords(op, P, latency, bandwidth) {
  if (op !== "all_reduce" && op !== "gather_and_add") return TIMES[op];
  if (P === 2) return `${TIMES[op]} On 2 ranks gather and add sends no more, in half the steps.`;
  const equal = (latency * 1e-6 * bandwidth * 1e9) / (1 - 2 / P);
  return `${TIMES[op]} Equal at n = a / (b (1 - 2/P)) = ${bytes(equal)}: below it fewer steps win, above it fewer bytes.`;
}

view({
  id: "collectives",
  title: "Collectives",
  lead: "Collectives made of sends alone: which chunk goes to which rank at each step, and how long that takes.",
  course: ["lab 1"],
  bare: "op",
  state: { op: "reduce_scatter", P: 4, step: 1, n: 2 ** 20, latency: 10, bandwidth: 25 },
  values: {
    op: Object.keys(OPERATION_NAMES), P: [2, 3, 4, 5, 6, 7, 8],
    n: MESSAGES, latency: LATENCIES, bandwidth: BANDWIDTHS,
  },
  draw(root, { op, P, step: asked, n, latency, bandwidth }, set) {
    const run = DATA.collectives[op][P - 2];
    const steps = run[0].length - 1;
    const step = Math.min(asked, steps);
    const words = collectiveWords(run, op, step);
    const curve = (name, look, operation) => ({
      name, look,
      time: (size) => {
        const other = DATA.collectives[operation][P - 2];
        return timeOf(other, other[0].length - 1, size, latency, bandwidth);
      },
    });
    const two = op === "all_reduce" || op === "gather_and_add";
    const curves = two ? [curve("ring", "ring", "all_reduce"), curve("gather and add", "gather", "gather_and_add")] : [curve(plain(op), "ring", op)];
    say(words);
    root.append(
      html("div", { class: "controls dense" },
        choice("Operation", "op", OPERATION_NAMES), slider("Ranks", "P", [2, 3, 4, 5, 6, 7, 8]),
        player("step", steps + 1, 3000)),
      html("p", { class: "words" }, words),
      html("div", { class: "beside" },
        html("section", { "aria-label": "Steps" },
          collectivePicture(run, op, step, words),
          html("p", { class: "note" }, `${MEANINGS[op]} Of each rank, above: its chunks at the start; below: its result so far. Stripes: the ranks that are added up.`),
          html("div", { class: "figures" },
            figure(bytes(bytesOf(run, step, n)), "wire bytes so far, a rank"),
            figure(bytes(bytesOf(run, steps, n)), `in all: ${FORMULAS[op]}`),
            figure(duration(timeOf(run, step, n, latency, bandwidth)), "time so far"),
            figure(duration(timeOf(run, steps, n, latency, bandwidth)), "in all"))),
        html("section", { "aria-label": "Time" },
          html("h2", {}, two ? "How long: an all-reduce, two ways" : `How long: ${OPERATION_NAMES[op]}`),
          html("div", { class: "controls" },
            slider("Message n", "n", MESSAGES, bytes),
            slider("Latency a", "latency", LATENCIES, (us) => `${us} µs`),
            slider("Bandwidth 1/b", "bandwidth", BANDWIDTHS, (gb) => `${gb} GB/s`)),
          timeChart(curves, n),
          html("div", { class: "figures" },
            curves.map(({ name, look, time }) => figure(duration(time(n)), html("span", { class: `key ${look}` }, name)))),
          html("p", { class: "note" }, timeWords(op, P, latency, bandwidth)))));
  },
});
