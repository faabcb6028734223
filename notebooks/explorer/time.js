// Time: what fills a training step, by lab 11's model, and the runs that the model is held against.

const TIME_COLOURS = { // of DATA.time.parts
  matmul: "part0", attention: "part6", memory: "part3", communication: "part1", host: "part4",
  bubble: "part2", gradients: "part5", optimizer: "part7", other: "part8",
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

// The setting of the view Memory that a strategy is here: AdamW, whole layers recomputed
function memoryOf({ model, gpu, P, count }, strategy) {
  const [name, shard] = DATA.time.memory[strategy];
  const usual = { recompute: "full", loss: "chunked", optimizer: "adamw", microbatches: count };
  return settingOf({ model, gpu, P, strategy: name, shard: shard === "--shard-weights" ? "yes" : "no", ...usual });
}

// Seconds of each part of a step, or null where a strategy cannot be split so
function secondsOf({ model, gpu, P, network, length, count }, strategy) {
  const { lengths, steps, parts, once, gpus, networks } = DATA.time;
  const row = (gpu, network) => steps[`${model} ${P} ${gpu} ${network} ${strategy}`][lengths.indexOf(length)]?.split(",");
  const [own, first] = [row(gpu, network), row(gpus[0], networks[0])];
  return own ? parts.map((part, i) => Number(own[i] || first[i]) * (once.includes(part) ? 1 : count)) : null;
}

// The steps of all strategies in a setting, {strategy, parts, total, peak, room, fits}: those that fit, the
// fastest first; then those that do not, the nearest to it first; then what cannot be split over the ranks
function stepsOf(state) {
  const found = Object.keys(DATA.time.strategies).map((strategy) => {
    const parts = secondsOf(state, strategy);
    const setting = memoryOf(state, strategy);
    if (!parts || !setting.runs) return { strategy, parts: null, total: Infinity, fits: false, order: 2 };
    const [peak, room] = [peakOf(setting, state.length).peak, roomOf(setting)];
    return { strategy, parts, total: sum(parts), peak, room, fits: peak <= room, order: peak <= room ? 0 : 1 };
  });
  const last = (step) => (step.order === 1 ? step.peak - step.room : step.total);
  return found.sort((a, b) => a.order - b.order || (a.order < 2 ? last(a) - last(b) : 0));
}

const fitWords = ({ fits, peak, room, parts }) =>
  !parts ? "cannot be split so" : fits ? `fits: ${gib(peak)} of ${gib(room)}` : `does not fit: ${gib(peak)} of ${gib(room)}`;

// A bar for each strategy; a click chooses it, as the control does
function stepBars(found, state, set) {
  const narrow = NARROW.matches;
  const [width, left, high, gap] = narrow ? [pageWidth(), 0, 26, 40] : [columnWidths()[0], 190, 30, 24];
  const shown = found.some(({ fits }) => fits) ? found.filter(({ fits }) => fits) : found;
  const most = Math.max(...shown.map(({ total }) => (total < Infinity ? total : 0)), 1e-9);
  const scale = (width - left - (narrow ? 58 : 70)) / most;
  const rows = found.map((step, i) => {
    const { strategy, parts, total, fits } = step;
    const top = i * (high + gap) + (narrow ? 20 : 0);
    const chosen = strategy === state.strategy;
    const place = narrow ? { x: 0, y: top - 5 } : { x: left - 10, y: top + high / 2 + 5, "text-anchor": "end" };
    const name = svg("text", { ...place, class: chosen ? "name" : "" }, DATA.time.strategies[strategy]);
    const under = { x: left, y: top + high + 14, class: fits ? "small" : "small no" };
    const fit = svg("text", under, parts && !fits ? `${fitWords(step)}; it would take ${seconds(total)}` : fitWords(step));
    if (!fits) return svg("g", { onclick: () => set({ strategy }), class: "cell-row" }, name, fit, parts ? svg("rect", { x: left, y: top, width: Math.min(total, most) * scale, height: high, class: "unfit" }) : null);
    let from = left;
    const drawn = parts.map((part, j) => {
      const label = DATA.time.parts[j];
      const wide = part * scale;
      const x = from;
      from += wide;
      const told = `${label}: ${seconds(part)}, ${(100 * part / total).toFixed(0)}%`;
      return wide < 0.5 ? null : svg("g", tip(told, false),
        svg("rect", { x, y: top, width: wide, height: high, fill: `var(--${TIME_COLOURS[label]})`, class: "held" }),
        wide > 10 * label.length ? svg("text", { x: x + wide / 2, y: top + high / 2 + 5, class: "onpart" }, label) : null);
    });
    const end = svg("text", { x: from + 6, y: top + high / 2 + 5, class: "small" }, seconds(total));
    return svg("g", { onclick: () => set({ strategy }), class: "cell-row" }, name, drawn, end, fit);
  });
  const words = found.map((step) =>
    `${DATA.time.strategies[step.strategy]} ${step.parts ? `${seconds(step.total)}, ` : ""}${fitWords(step)}`);
  return picture(width, found.length * (high + gap) + (narrow ? 8 : 0), `Seconds a step: ${words.join("; ")}`, rows);
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
  state: { strategy: "sp", model: "llama-3.1-8b", gpu: "h100", P: 16, network: "measured", length: 131072, count: 16 },
  values: {
    strategy: Object.keys(DATA.time.strategies), model: DATA.time.models, gpu: DATA.time.gpus, P: DATA.time.ranks,
    network: DATA.time.networks, length: DATA.time.lengths, count: DATA.time.counts,
  },
  draw(root, state, set) {
    const { models, gpus, ranks, networks, lengths, counts, strategies, parts, score, flops, peak } = DATA.time;
    const named = (keys, names = {}) => Object.fromEntries(keys.map((key) => [key, names[key] ?? key]));
    const found = stepsOf(state);
    const chosen = found.find(({ strategy }) => strategy === state.strategy);
    const { total, parts: own } = chosen;
    const [P, tokensOf] = [state.P, state.count * state.length];
    const used = (tokensOf * flops[state.model][lengths.indexOf(state.length)]) / (total * P * peak);
    const percent = (value, digits = 0) => `${(100 * value).toFixed(digits)}%`;
    const runs = total < Infinity;
    const longest = runs ? own.indexOf(Math.max(...own)) : 0;
    const what = strategies[state.strategy];
    const on = `${P} ${P > 1 ? "GPUs" : "GPU"}`;
    const needs = `It needs about ${gib(chosen.peak)} of the ${gib(chosen.room)} that a GPU's allocator has, interpolated between oom_search.py's predictions`;
    const words = !runs ? `${what} cannot be split over ${on}.`
      : `${what} takes ${seconds(total)} for ${tokens(tokensOf)} on ${on}. ` +
        `The largest part, ${percent(own[longest] / total)}, is ${parts[longest]}, ${TIME_REASONS[parts[longest]]}. ` +
        (chosen.fits ? `${needs}: it fits.` : `But ${needs[0].toLowerCase()}${needs.slice(1)}: it does not fit.`);
    const none = found.some(({ fits }) => fits) ? "" : ` Nothing fits on ${on}: more GPUs, or a shorter sequence, would help.`;
    say(words);
    root.append(
      html("div", { class: "controls dense" },
        choice("Model", "model", named(models, DATA.memory.models)),
        choice("GPU", "gpu", named(gpus, GPU_NAMES)),
        slider("GPUs", "P", ranks, (n) => (n > 8 ? `${n}, ${n / 8} nodes` : n)),
        choice("Network", "network", named(networks, NETWORK_NAMES)),
        choice("Strategy", "strategy", strategies),
        slider("Sequence length", "length", lengths, count),
        slider("Sequences a step", "count", counts)),
      html("p", { class: `words ${chosen.fits ? "" : "over"}` }, words, none),
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
        `Layers recomputed, bf16, AdamW, FlashAttention-2; messages as the scripts send them, and nothing hides them. MFU counts attention over all positions, masked ones too. What fits comes first; GiB are the view Memory's, interpolated (lab 11's --plan runs oom_search.py itself). There PP has one microbatch; here 1F1B keeps the layers' inputs of all that are in flight. ` +
        `Where runs could check the model (dp x tp of 4,096 tokens, grey: within 10%) half were off by ${percent(score.median, 1)} or less, ` +
        `${percent(1 - score.within_20)} by over 20%. Nobody has checked all-to-all, or GPUs other than H100 and H200, here; lab 11's page compares the one long run that was published, and a rank on an H200.`));
  },
});
