// Pipelines: what every rank does when, as pp.simulate() has timed it (make_explorer.py).

const SCHEDULE_NAMES = {
  afab: "all forward, all backward (GPipe)",
  "1f1b": "1F1B",
  interleaved: "interleaved 1F1B",
  zb: "Zero Bubble (ZB-H1)",
};
const ACTION_NAMES = { F: "forward", B: "backward", W: "gradients of weights" };
const END = 9999; // a clock beyond every end: all is done

// [{rank, kind, stage, microbatch, begin, end}] of the ranks' lines: "F0F1..B0", where a dot is a unit of idle
// time. With several stages a rank "F01F11.B01": the last digit is the rank's stage. time: of each kind
function rowsOf(lines, time) {
  return lines.flatMap((line, rank) => {
    let end = 0;
    return line.match(/\.|[FBW][0-9a-f]+/g).flatMap((name) => {
      const begin = end;
      end += name === "." ? 1 : time[name[0]];
      const [microbatch, own = 0] = [...name.slice(1)].map((digit) => parseInt(digit, 16));
      return name === "." ? [] : { rank, kind: name[0], stage: rank + lines.length * own, microbatch, begin, end };
    });
  });
}

// Of the costs F:B:W of a rank's layers; a schedule without W has it in B. In units of 1 / V.
function actionTimes(schedule, costs) {
  const [F, B, W] = costs.split(":").map(Number);
  return schedule === "zb" ? { F, B, W } : { F, B: B + W };
}

// What Python has of a setting, with its rows
function scheduled({ schedule, P, M, V, costs }) {
  const time = actionTimes(schedule, costs);
  const { in_flight: most, ...timed } = DATA.pipelines.schedules[`${schedule} ${P} ${M} ${V}`];
  const found = timed[Object.values(time).join(":")];
  const rows = rowsOf(found.lines, time);
  return { ...found, rows, time, most, total: Math.max(...rows.map((row) => row.end)), last: time.W ? "W" : "B" };
}

// (stage, microbatch) pairs of a rank whose activations it holds at that time
function inFlight(rows, rank, time, last) {
  const own = rows.filter((row) => row.rank === rank);
  const begun = own.filter((row) => row.kind === "F" && row.begin <= time).length;
  return begun - own.filter((row) => row.kind === last && row.end <= time).length;
}

// The closed form as people know it, where it holds
function formulaWords(schedule, P, M, V, costs) {
  const [F, B, W] = costs.split(":");
  if (schedule === "afab" || schedule === "1f1b") return `(P − 1) / (M + P − 1) = ${P - 1} / ${M + P - 1}`;
  if (schedule === "zb" && M < P) return "";
  if (schedule === "interleaved") return `(P − 1) / (V M + P − 1) = ${P - 1} / ${V * M + P - 1}`;
  return F === B && B === W ? `(P − 1) / (3 M + P − 1) = ${P - 1} / ${3 * M + P - 1}` : "";
}

const percent = (x) => (x === null ? "none" : `${(100 * x).toFixed(1)}%`);
const forwards = (time, unit) => `${+(time / unit).toFixed(2)}`;

function timelineKeys(kinds, V, drawn) {
  return html("div", { class: "legend" },
    kinds.map((kind) => entry(`url(#${kind})`, `${kind}: ${ACTION_NAMES[kind]}`)),
    entry("var(--pale)", "waits: the bubble"),
    V > 1 ? html("span", {}, "lighter: the rank's later stages") : null,
    drawn.querySelector(".cell text") ? html("span", {}, "a number: the microbatch") : null);
}

function actionPatterns() {
  const square = { width: 7, height: 7, patternUnits: "userSpaceOnUse" };
  const ground = (colour) => svg("rect", { width: 7, height: 7, fill: `var(--${colour})` });
  const stripe = svg("path", { d: "M-1 8L8 -1", class: "stripe" });
  return svg("defs", {},
    svg("pattern", { id: "F", ...square }, ground("forward")),
    svg("pattern", { id: "B", ...square }, ground("backward"), stripe),
    svg("pattern", { id: "W", ...square }, ground("weights")));
}

// The timeline: ranks downwards, time to the right, the clock as a line; without `most`, what a question hides
function timeline(rows, { P, M, V, clock, unit, follow, most, last, words, total }, set) {
  const narrow = NARROW.matches;
  const [left, right] = narrow ? [56, 6] : [70, 190];
  const width = narrow ? Math.max(pageWidth(), left + right + 6.5 * total) : pageWidth();
  const x = (time) => left + ((width - left - right) * time) / total;
  const high = Math.min(LOW.matches ? 40 : narrow ? 46 : 76, 340 / P);
  const bottom = 8 + P * high;
  const cells = rows.map((row) => {
    const { rank, kind, stage, microbatch, begin, end } = row;
    const box = { x: x(begin) + 0.5, y: 8 + rank * high + 3, width: x(end) - x(begin) - 1, height: high - 6 };
    const stageWords = V > 1 ? `, stage ${stage} of ${P * V}` : "";
    const explain = `rank ${rank}: ${ACTION_NAMES[kind]} of microbatch ${microbatch}${stageWords}\n` +
      `from ${forwards(begin, unit)} to ${forwards(end, unit)} forwards`;
    const state = begin >= clock ? "later" : end > clock ? "runs" : "done";
    const other = follow >= 0 && follow !== microbatch ? " other" : "";
    const size = Math.min(13, (box.width - 2.5) / (0.62 * String(M - 1).length)); // of a letter; none touches the next
    const lighter = (0.6 * Math.floor(stage / P)) / V;
    return svg("g", { class: `cell ${state}${other}`, ...tip(explain, false), onclick: () => set?.({ follow: follow === microbatch ? -1 : microbatch }) },
      svg("rect", { ...box, fill: `url(#${kind})` }), lighter ? svg("rect", { ...box, fill: "#ffffff", opacity: lighter }) : null,
      svg("rect", { ...box, class: "veil" }),
      size < 8.4 || other ? null : svg("text", { x: box.x + box.width / 2, y: box.y + box.height / 2 + 4.5, style: `font-size: ${size}px` }, microbatch));
  });
  const held = [...Array(P).keys()].map((rank) => inFlight(rows, rank, clock, last));
  const widest = Math.max(...(most ?? held));
  const ranks = [...Array(P).keys()].map((rank) => {
    const y = 8 + rank * high;
    const [now, full] = [held[rank], (most ?? held)[rank]];
    const told = `rank ${rank} holds the activations of ${now} now${most ? `, of ${full} at most` : ""}`;
    const label = !most ? now : clock < total ? `${now} of ${full}` : `${narrow ? "max" : "at most"} ${full}`;
    const bar = (n, kind) => svg("rect", { x: width - right + 14, y: y + high / 2 - 8, width: (90 * n) / widest, height: 16, class: kind });
    const flight = narrow
      ? svg("text", { x: 0, y: y + high / 2 + 15, class: "small" }, label)
      : svg("g", tip(told, false), bar(full, "outline"), bar(now, "flying"),
          svg("text", { x: width - right + 22 + (90 * full) / widest, y: y + high / 2 + 5, class: "small" }, label));
    const row = svg("rect", { x: left, y: y + 3, width: width - left - right, height: high - 6, class: "wait" });
    return svg("g", {}, row, svg("text", { x: 0, y: y + high / 2 + (narrow ? 0 : 5), class: "rank" }, `rank ${rank}`), flight);
  });
  const step = [1, 2, 5, 10, 20].find((n) => x(n * unit) - x(0) >= 40) ?? 50;
  const marks = [...Array(Math.floor(total / unit / step) + 1).keys()].map((i) =>
    svg("text", { x: x(i * step * unit), y: bottom + 16, class: "small", "text-anchor": "middle" }, i * step));
  const line = svg("line", { x1: x(clock), x2: x(clock), y1: 4, y2: bottom + 3, class: "now" });
  const axis = svg("text", { x: narrow ? left : x(total) + 14, y: bottom + (narrow ? 34 : 16), class: "small" },
    narrow ? "time in forwards of a rank's layers" : "in flight");
  const drawn = picture(width, bottom + (narrow ? 40 : 24), words, actionPatterns(), ranks, cells, clock < total ? line : null, marks, axis);
  if (narrow) drawn.setAttribute("style", `min-width: ${width}px`);
  return html("div", { class: "scroll" }, drawn);
}

// What the ranks do at that time, and what those wait for that wait: F for the rank before, B for the one after
function momentWords(rows, P, clock, total, unit) {
  if (clock >= total) return `All is done after ${forwards(total, unit)} forwards.`;
  const [work, wait, done] = [[], [], []];
  for (let rank = 0; rank < P; rank++) {
    const next = rows.find((row) => row.rank === rank && row.end > clock);
    if (!next) done.push(rank);
    else if (next.begin <= clock) work.push(`rank ${rank} computes ${next.kind}${next.microbatch}`);
    else if (next.kind === "F") wait.push(`rank ${rank} waits for rank ${(rank + P - 1) % P}'s activations of microbatch ${next.microbatch}`);
    else wait.push(`rank ${rank} waits for rank ${(rank + 1) % P}'s gradient of microbatch ${next.microbatch}`);
  }
  const more = wait.length > 2 ? [`${wait.length - 2} more ${wait.length > 3 ? "wait" : "waits"}`] : [];
  const finished = done.length ? [`done: ${done.map((rank) => `rank ${rank}`).join(", ")}`] : [];
  return `${clock === 0 ? "At the start" : `After ${forwards(clock, unit)} forwards`}: ${[...work, ...wait.slice(0, 2), ...more, ...finished].join(", ")}.`;
}

// Microbatches that a schedule can have: interleaved, multiples of the ranks
function microbatches(schedule, P) {
  if (schedule !== "interleaved") return DATA.pipelines.microbatches;
  return [...Array(Math.floor(16 / P)).keys()].map((i) => P * (i + 1));
}

// The number of them that is nearest to M
function fitting(schedule, P, M) {
  return microbatches(schedule, P).reduce((best, n) => (Math.abs(n - M) < Math.abs(best - M) ? n : best));
}

view({
  id: "pipelines",
  title: "Pipelines",
  lead: "Each rank holds some of the layers, and the batch comes in microbatches: who works on which of them when, and who waits.",
  course: ["lab 8", "notebook 5"],
  bare: "schedule",
  state: { schedule: "1f1b", P: 4, M: 8, V: 2, costs: "1:1:1", step: 0, follow: -1 },
  values: {
    schedule: Object.keys(SCHEDULE_NAMES), P: [2, 3, 4, 5, 6, 7, 8], M: [...Array(16).keys()].map((i) => i + 1), V: [2, 3, 4],
    costs: Object.keys(DATA.pipelines.costs), follow: [-1, ...Array(16).keys()],
  },
  // What has begun by the step's time
  sketch({ schedule, P, M: wanted, V: stages, costs, step }) {
    const M = fitting(schedule, P, wanted);
    const V = schedule === "interleaved" ? stages : 1;
    const { rows, time, total, last } = scheduled({ schedule, P, M, V, costs });
    const begun = rows.filter((row) => row.begin < step);
    const told = { P, M, V, clock: step, unit: V * time.F, follow: -1, last, total };
    const words = `What the ${P} ranks have begun: ${[...Array(P).keys()].map((rank) => `rank ${rank} ${begun.filter((row) => row.rank === rank).map((row) => row.kind + row.microbatch).join(" ") || "nothing"}`).join("; ")}`;
    const drawn = timeline(begun, { ...told, words }, null);
    return html("div", {}, drawn, timelineKeys(Object.keys(time), V, drawn));
  },
  draw(root, state, set) {
    const { schedule, P, costs } = state;
    const M = (state.M = fitting(schedule, P, state.M));
    const follow = state.follow < M ? state.follow : -1;
    const V = schedule === "interleaved" ? state.V : 1;
    const { rows, time, total, last, most, bubble: idle, formula } = scheduled({ schedule, P, M, V, costs });
    if (state.step >= total) state.step = END; // so that a longer timeline is done, too
    const [clock, unit] = [Math.min(state.step, total), V * time.F];
    const words = momentWords(rows, P, clock, total, unit);
    say(words);
    const costNames = Object.fromEntries(Object.entries(DATA.pipelines.costs).map(([ratio, why]) => [ratio, `${ratio} (${why})`]));
    const told = { P, M, V, clock, unit, follow, most, last, total };
    const drawn = timeline(rows, { ...told, words: `Timeline of ${SCHEDULE_NAMES[schedule]}, ${P} ranks, ${M} microbatches: bubble ${percent(idle)}. ${words}` }, set);
    root.append(
      html("div", { class: "controls dense" },
        choice("Schedule", "schedule", SCHEDULE_NAMES),
        slider("Ranks", "P", [2, 3, 4, 5, 6, 7, 8]),
        slider("Microbatches", "M", microbatches(schedule, P)),
        schedule === "interleaved" ? slider("Stages a rank", "V", [2, 3, 4]) : null,
        choice("Times F:B:W", "costs", costNames),
        choice("Follow", "follow", { "-1": "all microbatches", ...Object.fromEntries([...Array(M).keys()].map((m) => [m, `microbatch ${m}`])) }),
        player("step", total + 1, Math.max(60, 600 / unit), (i) => `${forwards(i, unit)} of ${forwards(total, unit)}${NARROW.matches ? "" : " forwards"}`)),
      html("p", { class: "words" }, words),
      drawn,
      timelineKeys(Object.keys(time), V, drawn),
      html("div", { class: "figures" },
        figure(percent(idle), "bubble: part of the time that a rank waits"),
        figure(percent(formula), formula === null ? `no closed form: ${M < P ? "fewer microbatches than ranks" : "W is the longest"}` : `by the formula ${formulaWords(schedule, P, M, V, costs)}`),
        figure(forwards(total, unit), "forwards, all in all"),
        figure(`${Math.max(...most)}${V > 1 ? ` × 1/${V}` : ""} of ${M}`, `microbatches in flight, at most${V > 1 ? `, in 1/${V} of a rank's layers` : ""}`)),
      html("p", { class: "note" },
        "In flight: microbatches whose activations a rank holds for their backward. Messages take no time here. ",
        `${schedule === "zb" ? "B is the gradient of the input, W those of the weights" : "This schedule runs W inside of B"}. `,
        "The same as text, with 1:1:1: ", html("code", {}, `python labs/schedules.py --schedule ${schedule} --ranks ${P} --microbatches ${M}${V > 1 ? ` --virtual-stages ${V}` : ""} --recompute none`)));
  },
});
