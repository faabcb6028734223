// Memory: what fills it during a training step, by length. All points are predictions of
// oom_search.py; between two lengths lies a straight line, and so it does beyond the last.

const STRATEGY_NAMES = {
  plain: "plain: one GPU",
  tp: "TP: tensor parallelism",
  sp_megatron: "SP: Megatron's",
  sp_ulysses: "SP: Ulysses",
  pp: "PP: pipeline parallelism",
};
const RECOMPUTE_NAMES = {
  none: "nothing: all is kept",
  selective: "selective",
  full: "whole layers",
  offload: "whole layers, inputs on the host",
};
const KEPT = {
  none: "All activations are kept.",
  selective: "Selective recomputation keeps what is slow to compute: attention, q, k, v, gate and up.",
  full: "Of each layer only the input is kept; the backward computes the layer again.",
  offload: "Of each layer only the input is kept, in the host's memory; the backward computes the layer again.",
};
const LOSS_NAMES = { chunked: "chunked logits", full: "full logits" };
const OPTIMIZER_NAMES = { none: "no optimizer", adamw: "AdamW", "adamw-host": "AdamW on the host" };
// When a peak comes: in a few words, and in a sentence
const MOMENTS = {
  early: ["forward, early backward", "in the forward or early in the backward, when most gradients are not there yet"],
  late: ["late backward", "late in the backward, when most gradients are there"],
  step: ["optimizer's step", "in the optimizer's step, which takes as much however long the sequence is"],
};
const SHARD_NAMES = { no: "replicated", yes: "sharded" };
const GPU_NAMES = { rtx4090: "RTX 4090", "a100-40": "A100 40 GB", "a100-80": "A100 80 GB", h100: "H100", h200: "H200" };
const partColour = (i) => `var(--part${i})`; // no rank's colours: the parts are those of one GPU
const [GRADIENTS, STATE, SAVED] = ["gradients", "optimizer state", "saved activations"].map((name) => DATA.memory.parts.indexOf(name));
const LENGTHS = [...Array(89).keys()].map((i) => Math.round(2 ** (11 + i / 8) / 512) * 512);
const SHORTEST = LENGTHS[0];
const MICROBATCHES = [1, 2, 4, 8, 16, 32];
const gib = (mib) => `${(mib / 1024).toFixed(mib < 10240 ? 2 : 1)} GiB`;

// The setting that the state comes to: some strategies leave no choice, and of some models and numbers of
// ranks only the usual way is predicted, or the optimizer's step alone where that is too much for any GPU.
// runs: whether the model can be split so. several: whether furtherOf() will do for a pipeline, where layers
// are recomputed; without AdamW's state short sequences would take more
function settingOf(state) {
  const { strategy } = state;
  const P = strategy === "plain" ? 1 : state.P;
  const shard = strategy === "sp_ulysses" ? state.shard : "no";
  const who = P === 1 && strategy !== "plain" ? "tp" : strategy; // on one rank all are the same
  const key = `${state.model} ${who}${shard === "yes" && who !== "tp" ? " --shard-weights" : ""} ${P}`;
  const waysWith = (loss) => Object.keys(RECOMPUTE_NAMES).filter((way) => `${key} ${way} ${loss}` in DATA.memory.curves);
  const loss = strategy === "plain" ? "full" : waysWith(state.loss).length ? state.loss : "chunked";
  const ways = waysWith(loss);
  const recompute = ways.includes(state.recompute) ? state.recompute : "full";
  const several = strategy === "pp" && recompute === "full" && state.optimizer === "adamw";
  const microbatches = several ? state.microbatches : 1;
  return { ...state, P, loss, shard, recompute, several, microbatches, ways, key, runs: key in DATA.memory.steps };
}

const ranksOf = (model) => [1, 2, 4, 8, 16, 32].filter((P) => `${model} tp ${P} full chunked` in DATA.memory.curves);

// MiB that the allocator has: of a card it has less where there are peers
function roomOf({ gpu, strategy, P }) {
  const kind = P === 1 ? "one rank" : strategy === "sp_ulysses" ? "all-to-all" : "several";
  return (DATA.memory.gpus[gpu] - DATA.memory.outside[kind]) * 1024;
}

// The parts at a length, from [[length, ...parts], ...]
function along(curve, length) {
  const after = curve.findIndex(([at]) => at >= length);
  const i = after < 0 ? curve.length - 1 : Math.max(1, after);
  const [[a, ...below], [b, ...above]] = [curve[i - 1], curve[i]];
  const parts = below.map((part, j) => part + ((above[j] - part) * (length - a)) / (b - a));
  const some = parts.map((part) => Math.max(0, part)); // far beyond the last length one may be below 0
  return some.map((part) => (part * sum(parts)) / sum(some));
}

// MiB that a pipeline's rank keeps of further microbatches. 1F1B has up to P - rank of them in flight; of
// each it keeps the inputs of its layers and of its stage, and one more is on its way
function furtherOf({ model, strategy, P, microbatches }, rank, length) {
  const flight = Math.min(microbatches, P - rank);
  if (strategy !== "pp" || flight < 2) return 0;
  const [layers, hidden] = DATA.memory.sizes[model];
  const own = Math.floor(layers / P) + (rank < layers % P ? 1 : 0);
  return (((flight - 1) * (own + 1) + 1) * 2 * hidden * length) / 2 ** 20;
}

// The peaks of a step's two halves, forward with backward and the optimizer's step, each of the rank
// that needs most in it: [{moment, parts: MiB of each, peak}]
function peaksOf(setting, length) {
  const { key, recompute, loss, optimizer, P } = setting;
  const steps = DATA.memory.steps[key];
  const ranks = steps.length > 2 ? [0, Math.floor(P / 2), P - 1] : [0, P - 1]; // of a pipeline those that may need most
  const first = (DATA.memory.curves[`${key} ${recompute} ${loss}`] ?? []).map((curve, rank) => {
    const parts = along(curve, length);
    const moment = parts[GRADIENTS] > steps[rank][GRADIENTS] / 2 ? "late" : "early";
    if (optimizer === "adamw") parts[STATE] = steps[rank][STATE];
    parts[SAVED] += furtherOf(setting, ranks[rank], length);
    return { moment, parts, peak: sum(parts) };
  });
  const second = optimizer === "adamw" ? steps.map((parts) => ({ moment: "step", parts, peak: sum(parts) })) : [];
  return [first, second].filter((half) => half.length).map((half) => half.reduce(higher));
}

const higher = (a, b) => (b.peak > a.peak ? b : a);
const peakOf = (setting, length) => peaksOf(setting, length).reduce(higher);

// What a length beyond the last one that is predicted is called, of the rank whose line ends first
const extrapolated = ({ key, recompute, loss }, length) =>
  (DATA.memory.curves[`${key} ${recompute} ${loss}`] ?? []).some((curve) => length > curve.at(-1)[0]) ? " (extrapolated)" : "";

// The longest length that fits, a multiple of 512 tokens; 0: not even the shortest
function longestOf(setting) {
  if (!setting.ways.length) return 0;
  const fits = (length) => peakOf(setting, length).peak <= roomOf(setting);
  let [low, high] = [SHORTEST / 512, 2 ** 16];
  if (!fits(SHORTEST)) return 0;
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    [low, high] = fits(middle * 512) ? [middle, high] : [low, middle];
  }
  return low * 512;
}

const tokens = (n) => (n ? `${count(n)} tokens` : `not even ${count(SHORTEST)} tokens`);

// Memory over the step: what fills it at the peak of each half, and the limit
function memoryBars(setting, peaks) {
  const [width, high, apart, top] = [pageWidth(), 40, 66, 42];
  const most = peaks.reduce(higher);
  const [room, card] = [roomOf(setting), DATA.memory.gpus[setting.gpu] * 1024];
  const x = (mib) => (mib / Math.max(1.12 * card, 1.02 * most.peak)) * width;
  const bottom = top + apart * (peaks.length - 1) + high;
  const bars = peaks.map(({ moment, parts, peak }, row) => {
    const y = top + row * apart;
    const labels = [];
    let from = 0;
    const filled = parts.map((part, i) => {
      const [begin, end] = [x(from), x((from += part))];
      const name = DATA.memory.parts[i];
      const place = { x: (begin + end) / 2, y: y + high / 2 + 5, class: "onpart above", style: `stroke: ${partColour(i)}` };
      labels.push(end - begin > 8.2 * name.length ? svg("text", place, name) : null);
      return svg("rect", { x: begin, y, width: end - begin, height: high, fill: partColour(i), class: "held", ...tip(`${name}: ${gib(part)}`, false) });
    });
    const space = room - peak;
    const end = svg("text", { x: (x(peak) + x(room)) / 2, y: y + high / 2 + 5, "text-anchor": "middle", class: "small" }, x(space) > 90 ? `${gib(space)} free` : "");
    const name = `${MOMENTS[moment][0]}: ${gib(peak)}${peaks.length > 1 && peak === most.peak ? " (peak)" : ""}`;
    labels.push(svg("text", { x: 2, y: y - 6, class: peak === most.peak ? "name above" : "above" }, name));
    return [[svg("rect", { x: 0, y, width: x(room), height: high, class: "outline" }), end, filled], labels];
  });
  const explain = `${gib(card - room)} of the GPU's ${gib(card)} are for what lies outside the allocator: the CUDA context, cuBLAS, NCCL`;
  const outside = svg("rect", { x: x(room), y: top, width: x(card) - x(room), height: bottom - top, class: "outside", ...tip(explain, false) });
  const limit = [
    svg("line", { x1: x(room), x2: x(room), y1: 16, y2: bottom + 4, class: "limit" }),
    svg("text", { x: x(room), y: 12, "text-anchor": x(room) > width - 60 ? "end" : "middle", class: "small" }, `limit ${gib(room)}`)];
  const words = peaks.map(({ moment, parts, peak }) => `${MOMENTS[moment][0]} ${gib(peak)} of ${gib(room)}: ` + parts.map((part, i) => `${DATA.memory.parts[i]} ${gib(part)}`).join(", "));
  return picture(width, bottom + 6, words.join("; "), outside, bars.map(([bar]) => bar), limit, bars.map(([, labels]) => labels));
}

// Peak against length, as areas of what fills it; the present length as a line
function memoryChart(setting, found, longest, set) {
  const narrow = NARROW.matches;
  const [width, height, left, bottom] = [columnWidths()[0], narrow ? 280 : 300, 40, 42];
  const room = roomOf(setting);
  const most = Math.max(1.3 * longest, 1.08 * setting.length, 16384);
  const top = Math.max(1.2 * room, 1.12 * found.peak);
  const x = (length) => left + ((width - left - 8) * length) / most;
  const y = (mib) => 24 + (height - bottom - 24) * (1 - mib / top);
  const curves = DATA.memory.curves[`${setting.key} ${setting.recompute} ${setting.loss}`];
  const knees = curves.flatMap((curve) => curve.map(([length]) => length)).filter((length) => length < most);
  const grid = [...Array(61).keys()].map((i) => SHORTEST + ((most - SHORTEST) * i) / 60);
  const lengths = [...new Set([...knees, ...grid])].sort((a, b) => a - b);
  const peaks = lengths.map((length) => peakOf(setting, length));
  const stacks = peaks.map(({ parts }) => {
    let height = 0;
    return [0, ...parts.map((part) => (height += part))];
  });
  const turns = peaks.flatMap(({ moment }, i) => (i === 0 || moment !== peaks[i - 1].moment ? [i] : []));
  const moments = turns.map((from, i) => {
    const [begin, end] = [x(lengths[from]), x(lengths[turns[i + 1] ?? lengths.length - 1])];
    const [words, sentence] = MOMENTS[peaks[from].moment];
    const text = [`${i + 1} ${words}`, i + 1].find((text) => 6.6 * String(text).length < end - begin);
    return svg("g", tip(`The peak comes ${sentence}.`, false),
      svg("rect", { x: begin, y: 2, width: end - begin, height: 18, class: "outline" }),
      svg("line", { x1: begin, x2: begin, y1: 2, y2: height - bottom, class: "turn" }),
      svg("text", { x: (begin + end) / 2, y: 15, "text-anchor": "middle", class: "small" }, text));
  });
  const told = turns.map((from, i) => `${i + 1} ${MOMENTS[peaks[from].moment][0]}`);
  const areas = DATA.memory.parts.map((name, i) => {
    const line = (level) => lengths.map((length, k) => `${x(length).toFixed(1)} ${y(stacks[k][level]).toFixed(1)}`);
    return svg("path", { d: `M${line(i + 1).join("L")}L${line(i).reverse().join("L")}Z`, fill: partColour(i), ...tip(name, false) });
  });
  const round = [1, 2, 5].flatMap((n) => [...Array(8).keys()].map((e) => n * 10 ** e)).sort((a, b) => a - b);
  const unit = round.find((n) => (n * 1024) / top > 0.17);
  const levels = [...Array(Math.floor(top / 1024 / unit) + 1).keys()].map((i) => [
    svg("line", { x1: left, x2: width - 8, y1: y(i * unit * 1024), y2: y(i * unit * 1024), class: "grid" }),
    svg("text", { x: left - 6, y: y(i * unit * 1024) + 4, "text-anchor": "end", class: "small" }, i * unit)]);
  const stride = round.find((n) => (n * 1024) / most > (narrow ? 0.24 : 0.12));
  const marks = [...Array(Math.floor(most / 1024 / stride) + 1).keys()].map((i) => {
    const at = x(i * stride * 1024);
    const anchor = at > width - 40 ? "end" : "middle"; // the last one stays inside
    return svg("text", { x: at, y: height - bottom + 16, "text-anchor": anchor, class: "small" }, i ? `${count(i * stride)} Ki` : "0");
  });
  const limit = svg("line", { x1: left, x2: width - 8, y1: y(room), y2: y(room), class: "limit" });
  const here = svg("line", { x1: x(setting.length), x2: x(setting.length), y1: 22, y2: height - bottom, class: "now" });
  const dot = svg("circle", { cx: x(setting.length), cy: y(found.peak), r: 6, class: "here" });
  const far = longest ? svg("circle", { cx: x(longest), cy: y(room), r: 5, class: "far", ...tip(`the longest that fits: ${tokens(longest)}`, false) }) : null;
  const axis = svg("text", { x: width - 8, y: height - 6, "text-anchor": "end", class: "small" }, `tokens in the sequence (1 Ki = 1,024); GiB`);
  const onclick = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const asked = ((event.clientX - box.left) / box.width * width - left) / (width - left - 8) * most;
    set({ length: Math.max(SHORTEST, Math.min(LENGTHS.at(-1), Math.round(asked / 512) * 512)) });
  };
  const words = `Peak memory against the length: at ${tokens(setting.length)} ${gib(found.peak)}; the limit of ${gib(room)} is met at ${tokens(longest)}.`;
  const drawn = picture(width, height, words, levels, areas, moments, limit, far, here, dot, marks, axis);
  return [fill(drawn, { onclick }, []), html("p", { class: "note" }, `When the peak comes: ${told.join("; ")}. Where it moves, what fills it changes.`)];
}

// The longest length that fits, of all strategies in this setting
function contest(state, set) {
  const rows = Object.keys(STRATEGY_NAMES).flatMap((strategy) =>
    (strategy === "sp_ulysses" ? ["no", "yes"] : ["no"]).map((shard) => {
      const setting = settingOf({ ...state, strategy, shard });
      return { strategy, shard, setting, longest: longestOf(setting) };
    }));
  const most = Math.max(1, ...rows.map((row) => row.longest));
  const short = { plain: "plain, 1 GPU", tp: "TP", sp_megatron: "SP", sp_ulysses: "Ulysses", pp: `PP, ${state.microbatches > 1 ? `${state.microbatches} microbatches` : "1 microbatch"}` };
  const chosen = settingOf(state);
  return html("div", {},
    html("h2", {}, `The longest that fits on ${state.P} ranks`),
    rows.map(({ strategy, shard, setting, longest }) =>
      html("button", {
        type: "button", class: "row", onclick: () => set({ strategy, ...(strategy === "sp_ulysses" ? { shard } : {}) }),
        "aria-pressed": strategy === state.strategy && shard === chosen.shard ? "true" : "false",
      },
        html("span", {}, `${short[strategy]}${shard === "yes" ? ", sharded weights" : ""}${setting.recompute === chosen.recompute ? "" : `, recomputed: ${RECOMPUTE_NAMES[setting.recompute]}`}`),
        html("b", {}, longest ? count(longest) + extrapolated(setting, longest) : setting.runs ? "does not fit" : "cannot run"),
        html("i", { style: `width: ${(100 * longest) / most}%` }))));
}

function partKeys(found) {
  return html("div", { class: "legend" }, DATA.memory.parts.map((name, i) =>
    found.parts[i] < 6 ? null : entry(partColour(i), `${name} ${gib(found.parts[i])}`)));
}

view({
  id: "memory",
  title: "Memory",
  lead: "What fills a GPU's memory at the peak of a training step, and how long a sequence it can take.",
  course: ["lab 10"],
  bare: "strategy",
  state: {
    strategy: "sp_megatron", model: "llama-3.1-8b", gpu: "h100", P: 4, length: 131072, recompute: "full",
    loss: "chunked", optimizer: "adamw", shard: "no", microbatches: 1,
  },
  values: {
    strategy: Object.keys(STRATEGY_NAMES), model: Object.keys(DATA.memory.models), gpu: Object.keys(DATA.memory.gpus),
    P: [1, 2, 4, 8, 16, 32], recompute: Object.keys(RECOMPUTE_NAMES), loss: Object.keys(LOSS_NAMES),
    optimizer: Object.keys(OPTIMIZER_NAMES), shard: Object.keys(SHARD_NAMES), microbatches: MICROBATCHES,
  },
  draw(root, state, set) {
    state.length = Math.min(LENGTHS.at(-1), Math.max(SHORTEST, state.length));
    const choices = ranksOf(state.model);
    if (!choices.includes(state.P)) state.P = choices.at(-1);
    if (!settingOf(state).ways.length) state.strategy = "tp"; // such as a pipeline of more stages than layers
    const setting = settingOf(state);
    const peaks = peaksOf(setting, state.length);
    const found = peaks.reduce(higher);
    const [room, longest, plain] = [roomOf(setting), longestOf(setting), state.strategy === "plain"];
    const fits = found.peak <= room;
    const largest = found.parts.indexOf(Math.max(...found.parts));
    // What was chosen may be missing here
    [state.recompute, state.loss] = [setting.recompute, plain ? state.loss : setting.loss];
    if (state.strategy === "pp") state.microbatches = setting.microbatches;
    const missing = Object.fromEntries(Object.keys(RECOMPUTE_NAMES).filter((way) => !setting.ways.includes(way))
      .map((way) => [way, plain ? "not with plain" : "not predicted here"]));
    const full = `${setting.key} ${setting.recompute} full` in DATA.memory.curves ? {} : { full: "not predicted here" };
    const gpus = Object.entries(DATA.memory.gpus).map(([name, size]) => [name, `${GPU_NAMES[name] ?? name}: ${size} GiB`]);
    const several = setting.microbatches > 1 ? `${setting.microbatches} microbatches of ` : "";
    const words = `${several}${tokens(state.length)} take ${gib(found.peak)}${extrapolated(setting, state.length)} of the allocator's ${gib(room)}: ` +
      `${fits ? "fits" : `${gib(found.peak - room)} too many`}. The peak comes ${MOMENTS[found.moment][1]}; ` +
      `the largest part is ${DATA.memory.parts[largest]}, ${gib(found.parts[largest])}.`;
    const why = [
      KEPT[setting.recompute],
      plain ? "Plain is Hugging Face's own model and loss on one GPU: all logits at once." : null,
      "One sequence, with PP one in each microbatch: by 1F1B a rank has at most P of them in flight, and keeps the layers' inputs of each (several: with layers recomputed and AdamW here).",
      "bfloat16, flash attention, of the rank that needs most; the T4 has no flash attention and is not among these GPUs. Lengths between predictions lie on straight lines,",
      `which are off by ${100 * DATA.memory.exact}% at most where they were checked, and by more where they are extrapolated, beyond the last prediction; of 70B, and of 1, 16 and 32 ranks, only six lengths are predicted: short sequences between them may be off by up to 40%.`,
      "Other batches, dtypes, models and numbers of ranks: with the options of",
    ];
    const [script, nproc] = [state.strategy, setting.P];
    const command = `python oom_search.py --how predicted --at ${state.length} --strategy ${script} --nproc ${nproc} --model ${state.model} --gpu ${state.gpu} ` +
      `--recompute ${setting.recompute} --loss ${setting.loss} --optimizer ${state.optimizer}${setting.shard === "yes" ? " --shard-weights" : ""}` +
      (setting.microbatches > 1 ? ` --batch ${setting.microbatches} --microbatches ${setting.microbatches}` : "");
    say(words);
    root.append(
      html("div", { class: "controls dense" },
        choice("Model", "model", DATA.memory.models),
        choice("GPU", "gpu", Object.fromEntries(gpus)),
        choice("Strategy", "strategy", STRATEGY_NAMES),
        plain ? null : slider("Ranks", "P", choices),
        state.strategy === "sp_ulysses" ? choice("Weights", "shard", SHARD_NAMES) : null,
        choice("Recomputed", "recompute", RECOMPUTE_NAMES, missing),
        state.strategy === "pp" ? slider("Microbatches", "microbatches", setting.several ? MICROBATCHES : [1]) : null,
        plain ? null : choice("Loss", "loss", LOSS_NAMES, full),
        choice("Optimizer", "optimizer", OPTIMIZER_NAMES),
        html("div", { class: "long" }, slider("Sequence length", "length", LENGTHS, () => tokens(state.length)))),
      html("p", { class: `words ${fits ? "" : "over"}` }, words),
      memoryBars(setting, peaks),
      partKeys(found),
      html("div", { class: "beside" },
        html("div", {}, html("h2", {}, `Longest that fits: ${tokens(longest)}${extrapolated(setting, longest)}`), memoryChart(setting, found, longest, set)),
        contest(state, set)),
      html("p", { class: "note" }, why.filter(Boolean).join(" "), " ", html("code", {}, command)));
  },
});
