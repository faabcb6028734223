// Time: what fills a training step, by lab 11's model, and the runs that the model is held against.

const TIME_COLOURS = { // of DATA.time.parts
  matmul: "part0", attention: "part6", memory: "part3", communication: "part1", host: "part4",
  bubble: "part2", gradients: "part5", optimizer: "part7", other: "grey",
};
// What each of DATA.time.parts is, and why it takes time
const TIME_REASONS = {
  matmul: "the products with the weights, which every token goes through",
  attention: "which grows with the square of the length",
  memory: "norms, residuals and the like, which wait for memory, not for arithmetic",
  communication: "messages between the ranks, which nothing hides here",
  host: "Python and the launches of kernels, which take as long however few tokens there are",
  bubble: "the pipeline's bubble, since there are too few sequences to keep all stages at work",
  gradients: "summing gradients over replicas, once a step",
  optimizer: "AdamW's step, once however few tokens there are",
  other: "what happens once a step beside that",
};
const NETWORK_NAMES = { measured: "as the runs show", ideal: "line rate, no latency" };
const TP_COLOURS = { 1: "rank0", 2: "rank4", 4: "rank2", 8: "rank3", 16: "rank1", 32: "rank5" };
const seconds = (s) => (s < 1 ? `${Number((1000 * s).toPrecision(3))} ms` : `${Number(s.toPrecision(3))} s`);

// The steps of all strategies in a setting, the fastest first: {strategy, parts, total}; no parts
// where a strategy cannot run
function stepsOf({ model, gpu, nodes, network, length, count }) {
  const { lengths, counts, strategies, steps } = DATA.time;
  const found = Object.keys(strategies).map((strategy) => {
    const rows = steps[`${model} ${gpu} ${nodes} ${network} ${strategy}`];
    const parts = rows.length ? rows[lengths.indexOf(length)][counts.indexOf(count)] : null;
    return { strategy, parts, total: parts ? sum(parts) : Infinity };
  });
  return found.sort((a, b) => a.total - b.total);
}

// A bar for each strategy; a click chooses it
function stepBars(found, state, set) {
  const narrow = NARROW.matches;
  const [width, left, high, gap] = narrow ? [pageWidth(), 0, 26, 24] : [columnWidths()[0], 190, 30, 12];
  const most = Math.max(...found.map(({ total }) => (total < Infinity ? total : 0)));
  const scale = (width - left - (narrow ? 58 : 70)) / most;
  const rows = found.map(({ strategy, parts, total }, i) => {
    const top = i * (high + gap) + (narrow ? 20 : 0);
    const chosen = strategy === state.strategy;
    const place = narrow ? { x: 0, y: top - 5 } : { x: left - 10, y: top + high / 2 + 5, "text-anchor": "end" };
    const name = svg("text", { ...place, class: chosen ? "name" : "" }, DATA.time.strategies[strategy]);
    let from = left;
    const drawn = (parts ?? []).map((part, j) => {
      const label = DATA.time.parts[j];
      const wide = part * scale;
      const x = from;
      from += wide;
      const share = `${label}: ${seconds(part)}, ${(100 * part / total).toFixed(0)}%`;
      return wide < 0.5 ? null : svg("g", tip(share, false),
        svg("rect", { x, y: top, width: wide, height: high, fill: `var(--${TIME_COLOURS[label]})`, class: "held" }),
        wide > 10 * label.length ? svg("text", { x: x + wide / 2, y: top + high / 2 + 5, class: "onpart" }, label) : null);
    });
    const says = parts ? seconds(total) : "cannot be split over so many GPUs";
    const end = svg("text", { x: from + 6, y: top + high / 2 + 5, class: "small" }, says);
    return svg("g", { onclick: () => set({ strategy }), class: "cell-row" }, name, drawn, end);
  });
  const words = found.map(({ strategy, total }) =>
    `${DATA.time.strategies[strategy]} ${total < Infinity ? seconds(total) : "cannot run"}`);
  return picture(width, found.length * (high + gap) + (narrow ? 8 : 0), `Seconds a step: ${words.join(", ")}`, rows);
}

// Predicted against measured, both in tokens a second a GPU, on logarithmic axes
function runsChart() {
  const [width, height, left, bottom] = [columnWidths()[1], 320, 52, 42];
  const [low, high] = [60, 60000];
  const at = (value) => Math.log(value / low) / Math.log(high / low);
  const x = (value) => left + (width - left - 8) * at(value);
  const y = (value) => 8 + (height - bottom - 8) * (1 - at(value));
  const lines = [100, 1000, 10000].map((value) => [
    svg("line", { x1: left, x2: width - 8, y1: y(value), y2: y(value), class: "grid" }),
    svg("line", { x1: x(value), x2: x(value), y1: 8, y2: height - bottom, class: "grid" }),
    svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", class: "small" }, count(value)),
    svg("text", { x: x(value), y: height - bottom + 16, "text-anchor": "middle", class: "small" }, count(value))]);
  const band = [[low, 0.9], [high, 0.9], [high, 1.1], [low, 1.1]].map(([value, f]) => `${x(value).toFixed(1)} ${y(value * f).toFixed(1)}`);
  const within = svg("path", { d: `M${band.join("L")}Z`, class: "wait" });
  const dots = DATA.time.runs.map(([told, tp, predicted, measured]) => {
    const words = `${told}\npredicted ${count(predicted)}, measured ${count(measured)} tokens/s a GPU`;
    return svg("circle", { cx: x(predicted), cy: y(measured), r: 4.5, fill: `var(--${TP_COLOURS[tp]})`, class: "held", ...tip(words, false) });
  });
  const axis = svg("text", { x: width - 8, y: height - 6, "text-anchor": "end", class: "small" }, "predicted; upwards: measured (tokens/s a GPU)");
  const words = `Predicted against measured tokens a second a GPU, ${dots.length} runs; half are off by ${(100 * DATA.time.score.median).toFixed(1)}% or less.`;
  return picture(width, height, words, lines, within, dots, axis);
}

view({
  id: "time",
  title: "Time",
  lead: "How long a training step takes and what fills it, by lab 11's model, and how far such predictions were off where others measured.",
  course: ["lab 11"],
  bare: "strategy",
  state: { strategy: "sp", model: "llama-3.1-8b", gpu: "h100", nodes: 2, network: "measured", length: 131072, count: 16 },
  values: {
    strategy: Object.keys(DATA.time.strategies), model: DATA.time.models, gpu: DATA.time.gpus, nodes: DATA.time.nodes,
    network: DATA.time.networks, length: DATA.time.lengths, count: DATA.time.counts,
  },
  draw(root, state, set) {
    const { models, gpus, nodes, networks, lengths, counts, strategies, parts, score, flops, peak } = DATA.time;
    const named = (keys, names = {}) => Object.fromEntries(keys.map((key) => [key, names[key] ?? key]));
    const found = stepsOf(state);
    const { total, parts: own } = found.find(({ strategy }) => strategy === state.strategy);
    const [ranks, tokensOf] = [8 * state.nodes, state.count * state.length];
    const used = (tokensOf * flops[state.model][lengths.indexOf(state.length)]) / (total * ranks * peak);
    const percent = (value, digits = 0) => `${(100 * value).toFixed(digits)}%`;
    const runs = total < Infinity;
    const longest = runs ? own.indexOf(Math.max(...own)) : 0;
    const words = runs ? `${strategies[state.strategy]} takes ${seconds(total)} for ${tokens(tokensOf)} on ${ranks} GPUs. ` +
      `The largest part, ${percent(own[longest] / total)}, is ${parts[longest]}, ${TIME_REASONS[parts[longest]]}.`
      : `${strategies[state.strategy]} cannot be split over ${ranks} GPUs.`;
    say(words);
    root.append(
      html("div", { class: "controls dense" },
        choice("Model", "model", named(models, DATA.memory.models)),
        choice("GPU", "gpu", named(gpus, GPU_NAMES)),
        choice("Nodes of 8", "nodes", named(nodes)),
        choice("Network", "network", named(networks, NETWORK_NAMES)),
        choice("Strategy", "strategy", strategies),
        slider("Sequence length", "length", lengths, count),
        slider("Sequences a step", "count", counts)),
      html("p", { class: "words" }, words),
      html("div", { class: "figures" },
        figure(runs ? seconds(total) : "none", "a step"),
        figure(runs ? percent(used, 1) : "none", "MFU"),
        figure(runs ? count(tokensOf / total) : "none", "tokens a second")),
      html("div", { class: "beside" },
        html("div", {}, html("h2", {}, "What fills a step"), stepBars(found, state, set),
          html("div", { class: "legend" }, parts.filter((part) => found.some((step) => step.parts?.[parts.indexOf(part)] > 0))
            .map((part) => entry(`var(--${TIME_COLOURS[part]})`, part)))),
        html("div", {}, html("h2", {}, "Runs that nothing was fitted to"), runsChart(),
          html("div", { class: "legend" }, Object.entries(TP_COLOURS).map(([tp, colour]) => entry(`var(--${colour})`, `tp ${tp}`))))),
      html("p", { class: "note" },
        `Layers recomputed, bf16, AdamW; messages as the scripts send them, and nothing hides them. Whether it fits: the view Memory. ` +
        `Where runs could check the model (dp x tp of 4,096 tokens, grey: within 10%) half were off by ${percent(score.median, 1)} or less, ` +
        `${percent(1 - score.within_20)} by over 20%. Nobody has checked all-to-all, recomputation, long sequences or an H200 here.`));
  },
});
