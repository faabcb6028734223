// Step through: a script's own training step, line by line, with what every rank holds after each line.

const WALK_SCRIPTS = { tp: "tp.py", sp_megatron: "sp_megatron.py", sp_ulysses: "sp_ulysses.py", pp: "pp.py" };
const RUN_NAMES = { none: "2 ranks, --recompute none", full: "2 ranks, --recompute full", shared: "attention on 4 ranks; two share a KV head" };
for (const schedule of ["1f1b", "zb"]) for (const how of ["none", "full"]) RUN_NAMES[`${schedule}-${how}`] = `--schedule ${schedule} --recompute ${how}`;
const BADGES = {
  "=": ["equal", "Every rank holds the tensor that one device holds here."],
  "+": ["partial sum", "No rank holds it yet: added up over the ranks, these are the tensor that one device holds here."],
  max: ["partial max", "The largest over the ranks is what one device holds here."],
  s: ["the same", "Equal on all ranks; one device's run has no such tensor."],
  x: ["own", "Each rank has its own; together they are no tensor of one device's run."],
  r: ["reordered shard", "Together the ranks hold the tensor that one device holds here, its rows in another order."],
  u: ["not yet filled", "Memory for what will come: nothing has been written to it."],
};
const ALONE = { "=": ["✓", "One device's run has this very tensor."], x: ["own", "One device's run has no such tensor."] };
const PHASES = { f: "forward", b: "backward", r: "recomputed", e: "after" };
const slug = (phase, words) => (phase === "b" || phase === "r" ? `${PHASES[phase]} ${words}` : words).toLowerCase().replaceAll("'s", "").replaceAll(" ", "-");

function shortNumber(n) {
  if (Math.abs(n) >= 9.95) return n.toFixed(0);
  if (Math.abs(n) >= 0.995) return n.toFixed(1);
  return n === 0 ? "0" : n.toFixed(Math.abs(n) < 0.005 ? 3 : 2).replace("0.", ".");
}

// Coloured cells: rows of the last dimension, a gap between blocks of the one before it. before: the value
// until now, from which changed cells are told apart; owner: (i, shape) -> the rank that holds a number
function cells(value, most, { before = null, owner = null, ...attributes } = {}) {
  const { shape, numbers } = unpack(value);
  const old = isTensor(before) && unpack(before).shape.join() === shape.join() ? unpack(before).numbers : null;
  const columns = shape.at(-1) ?? 1;
  const rows = shape.at(-2) ?? 1;
  const all = [...Array(shape.reduce((a, b) => a * b, 1)).keys()];
  const whole = numbers?.every(Number.isInteger);
  const cell = (i) => {
    const gap = shape.length > 2 && i >= columns && Math.floor(i / columns) % rows === 0 ? " gap" : "";
    if (!numbers) return html("i", { class: `unfilled${gap}` });
    const part = whole ? 0 : Math.round(70 * Math.min(1, Math.abs(numbers[i]) / (most || 1)));
    const paint = `background: color-mix(in srgb, var(--${numbers[i] < 0 ? "minus" : "plus"}) ${part}%, var(--paper))`;
    const mine = owner ? `; box-shadow: inset 0 -3px var(--rank${owner(i, shape)})` : "";
    const changed = old && old[i] !== numbers[i] ? " changed" : "";
    return html("i", { class: `${changed}${gap}`.trim(), style: paint + mine }, whole ? String(numbers[i]) : shortNumber(numbers[i]));
  };
  const { class: more = "", style = "", ...others } = attributes;
  return html("span", { class: `cells ${more}${columns > 6 ? " dense" : ""}`, style: `--columns: ${columns}; ${style}`, ...others }, all.map(cell));
}

// Of a shard: which rank holds a number of one device's tensor
function ownerOf({ badge }, P) {
  if (!/^d\d/.test(badge)) return null;
  const dim = Number(badge[1]);
  return (i, shape) => Math.floor((Math.floor(i / shape.slice(dim + 1).reduce((a, b) => a * b, 1)) % shape[dim]) * P / shape[dim]);
}

const most = (values) => Math.max(0, ...values.filter(isTensor).flatMap((value) => (unpack(value).numbers ?? []).map(Math.abs)));
const sizeOf = (value) => `(${unpack(value).shape.join(", ")}${unpack(value).shape.length === 1 ? "," : ""})`;

// What the ranks' tensors are together, in words and as a sign
function badgeOf(mark, alone, shape) {
  if (!mark) return null;
  const dim = mark.at(-1);
  const summands = mark.startsWith("+d");
  const joined = "Joined along this dimension, the ranks' tensors are the one that one device holds here.";
  const shard = summands ? ["partial sums of shards", "Two ranks that share a KV head add up to a shard of what one device holds."] : [`shard of dim ${dim}`, joined];
  const [words, why] = /d\d$/.test(mark) ? shard : (alone && ALONE[mark]) || BADGES[mark];
  const box = (x, y, width, height, rank) => svg("rect", { x, y, width, height, fill: `var(--rank${rank})` });
  const across = Number(dim) === shape.length - 1 && shape.length > 1;
  const plus = [box(0, 0, 9, 11, 0), svg("path", { d: "M10 5.5h6M13 2.5v6", stroke: "currentColor", "stroke-width": 1.6 }), box(17, 0, 9, 11, 1)];
  const twice = [box(0, 0, 11, 11, 0), box(15, 0, 11, 11, 1)];
  const cut = across ? [box(7, 0, 6, 11, 0), box(13, 0, 6, 11, 1)] : [box(7, 0, 12, 5.5, 0), box(7, 5.5, 12, 5.5, 1)];
  const sign = alone ? null : { "=": twice, s: twice, "+": plus, r: cut }[mark] ?? (summands ? plus : mark[0] === "d" ? cut : null);
  return html("span", { class: `badge ${mark[0] === "+" || mark === "max" ? "partial" : ""}`, ...tip(why) },
    sign ? svg("svg", { viewBox: "0 0 26 11", "aria-hidden": "true" }, sign) : null, words);
}

// ---- Code ---------------------------------------------------------------------------------------

// The calls from train_step to a call
function stack(calls, call) {
  const found = [];
  for (let at = call; at !== null; at = calls[at][1]) found.unshift(at);
  return found;
}

function codeLine(text, number, attributes, tag = "code") {
  const at = text.search(/(^|\s)#/); // no string of the lesson has one
  const parts = at < 0 ? [text] : [text.slice(0, at), html("em", {}, text.slice(at))];
  return html(tag, attributes, html("b", {}, number), html("span", {}, parts));
}

// What is no line of the script: Hugging Face's code, autograd
const foreign = (words, now) => html("code", { class: now ? "foreign now" : "foreign" }, html("b", {}, "⤷"), html("span", {}, words));

// The calls above, each of which shows its variables when pressed; and the function, with the line that has run
function codePanel(data, step, waits, marks, looked, set) {
  const { calls } = step;
  const open = stack(calls, step.call);
  const own = open.findLastIndex((at) => !calls[at][5]);
  const [name, , , module, phase] = calls[open[own]];
  const line = open.length > own + 1 ? calls[open[own + 1]][2] : step.line;
  const [first, last, from = 0, to = 0] = data.functions[name] ?? [line, line];
  const inside = open.slice(own + 1).map((at, i, all) => {
    const ends = i === all.length - 1;
    return foreign(`Hugging Face: ${calls[at][0]}${ends ? ` (${calls[at][3]})${step.kind === "hf exit" ? " returns" : ""}` : ""}`, ends);
  });
  if (step.kind === "gradient") inside.push(foreign(`autograd: the gradient of ${step.note} is there`, true));
  const above = [];
  open.slice(0, own).forEach((at, i) => {
    const [caller, , , , , hf] = calls[at];
    const called = calls[open[i + 1]];
    const press = { type: "button", class: "caller", "aria-pressed": String(looked === at), title: `the variables of ${caller}`, onclick: () => set({ look: looked === at ? -1 : at }) };
    if (hf) above.push(foreign(`Hugging Face: ${caller}`));
    else above.push(codeLine(data.lines[called[2]]?.trim() ?? "", called[2], press, "button"));
    if (called[4] !== "f" && calls[at][4] === "f") above.push(foreign(called[4] === "r" ? "autograd: the checkpoint runs its function again" : `autograd: backward of ${called[3] || "the loss"}`));
  });
  const lines = [];
  for (let n = first; n <= last; n++) {
    const now = n === line && !inside.length;
    const kinds = [now ? "now" : n === line || step.via.includes(n) ? "passed" : "", n >= from && n <= to ? "doc" : "", now && waits ? "waits" : ""];
    const here = marks.filter(([, of, at]) => of === name && at === n).map(([rank]) => html("u", { style: `background: var(--rank${rank})` }));
    lines.push(codeLine(data.lines[n] ?? "", [here, n], { class: kinds.join(" ").trim() }), n === line ? inside : []);
  }
  const title = html("p", { class: "where" }, html("b", {}, name), `${phase === "f" ? "" : ` ${PHASES[phase]}`}${module ? ` in ${module}` : ""}`);
  return html("section", { class: "code", "aria-label": "Code" }, html("div", { class: "stack" }, above), title, html("div", { class: "lines", tabindex: 0 }, lines));
}

// ---- Ranks --------------------------------------------------------------------------------------

const MEANING = {
  "reduce-scatter": "each rank receives its own part of every rank's tensor, and adds",
  "all-gather": "each rank receives every rank's tensor, and joins them",
  "all-to-all": "each rank receives from every rank the part that is meant for it",
  "all-reduce": "each rank receives what every rank has, and adds",
  max: "each rank receives what every rank has; the largest stays",
};

// What comes to a rank with a message, and from whom
function messageOf({ op, how, coming }, data, rank, key, scale) {
  const joins = { "reduce-scatter": "+", "all-reduce": how === "max" ? "max" : "+" }[op];
  const parts = coming.map(([from, a, b]) => (b === undefined ? [from, rank, a] : [from, a, b]));
  return html("div", { class: "parts" }, parts.map(([from, to, value], i) => {
    const words = op === "send" ? `to rank ${to}` : from === rank ? "own" : `from rank ${from}`;
    const style = `--rank: var(--rank${from}); --from: ${from < rank ? -1 : 1}`;
    return [i && joins ? html("span", { class: "join" }, joins) : null,
      html("span", { class: "part" }, html("small", {}, words), cells(data.pool[value], scale, { class: from === rank ? "" : "flies", style, "data-key": `${key} ${from}` }))];
  }));
}

function messageRow({ op, how, size }, key, parts) {
  const meaning = MEANING[how === "max" ? "max" : op];
  return [html("div", { class: "name sent", "data-key": key }, html("b", {}, how === "max" ? "all-reduce (max)" : op),
    html("span", { class: "size" }, `${bytes(size)}${meaning ? `: ${meaning}` : ""}`)), parts];
}

function rankHeads(data, places) {
  return places.map(([step, waits, i], rank) => {
    const next = waits ? stepOf(data, rank, i + 1) : step;
    const from = waits ? next.messages.find(({ op }) => op === "receive")?.coming[0][0] : null;
    const open = stack(next.calls, next.call);
    const own = open.findLastIndex((at) => !next.calls[at][5]);
    const line = open[own] === next.call ? next.line : next.calls[open[own + 1]][2];
    const words = waits ? `waits for rank ${from ?? 1 - rank}` : next.kind.startsWith("hf") ? `Hugging Face: ${next.calls[next.call][0]}` : next.calls[open[own]][0];
    if (!data.ends) return html("div", { class: "head", style: `--rank: var(--rank${rank})` }, html("b", {}, `rank ${rank}`));
    return html("button", { type: "button", class: "head", style: `--rank: var(--rank${rank})`, "aria-pressed": String(state.follow === rank), onclick: () => set({ follow: rank, look: -1 }), title: "show this rank's code" },
      html("b", {}, `rank ${rank}`), html("span", { class: waits ? "waiting" : "at" }, html("b", {}, words), ` ${line}: ${data.lines[line]?.trim() ?? ""}`));
  });
}

const plainValues = (found) => {
  const words = found.filter(({ name, value }) => !isTensor(value) && !name.startsWith("name of")).map(({ name, value, fresh }) => [html("span", { class: fresh ? "fresh" : "" }, `${name} = ${value}`), " "]);
  return words.length ? html("p", { class: "plain" }, words) : null;
};

const nameOf = ({ name, value, badge, fresh }, found, alone) =>
  html("div", { class: fresh ? "name fresh" : "name" }, html("b", {}, name),
    html("span", { class: "size" }, `${sizeOf(value)} ${found.find((one) => one.name === `name of ${name}`)?.value ?? ""}`),
    badgeOf(badge, alone, unpack(value).shape));

// Ranks that run the same lines: a row for each variable
function rowsTogether(data, at, call) {
  const ranks = [...Array(data.P).keys()];
  const found = ranks.map((rank) => variables(data, rank, at, call));
  const rows = stepOf(data, 0, at).messages.map((message, m) => {
    const of = ranks.map((rank) => stepOf(data, rank, at).messages[m]);
    const scale = most(of.flatMap(({ coming }) => coming.map(([, value]) => data.pool[value])));
    return messageRow(message, `${at} ${m}`, [of.map((one, rank) => messageOf(one, data, rank, `${at} ${m} ${rank}`, scale)), html("div", { class: "one" })]);
  });
  for (const variable of found[0].filter(({ value }) => isTensor(value))) {
    const same = found.map((of) => of.find(({ name }) => name === variable.name));
    const scale = most([...same.map((one) => one?.value), variable.one]);
    rows.push(nameOf(variable, found[0]), same.map((one) => html("div", { class: variable.fresh ? "held fresh" : "held" }, cells(one.value, scale, { before: one.before }))),
      html("div", { class: "held one" }, variable.one ? cells(variable.one, scale, { owner: ownerOf(variable, data.P) }) : null));
  }
  return [...rows, found.map(plainValues)];
}

// Ranks that run different lines: a column for each
function columnsApart(data, places, at, looked, follow) {
  return places.map(([step, , i], rank) => {
    const began = data.ends[rank][i] === at; // it has just done this step
    const found = variables(data, rank, i, rank === follow && looked >= 0 ? looked : step.call);
    return html("div", { class: "column" },
      began ? step.messages.map((message, m) => messageRow(message, `${at} ${m} ${rank}`,
        messageOf(message, data, rank, `${at} ${m} ${rank}`, most(message.coming.map((one) => data.pool[one.at(-1)]))))) : null,
      found.filter(({ value }) => isTensor(value)).map((variable) => [
        nameOf({ ...variable, fresh: variable.fresh && began }, found, true),
        html("div", { class: variable.fresh && began ? "held fresh" : "held" }, cells(variable.value, most([variable.value]), { before: began ? variable.before : null }))]),
      plainValues(found));
  });
}

// The schedule as pp.simulate() times it, what each rank is at in a frame; a press goes there
function strip(data, at) {
  const end = Math.max(...data.timeline.map((row) => row[3]));
  const width = pageWidth();
  const x = (time) => 54 + ((width - 60) * time) / end;
  const spans = data.spans.map(([rank, name, from, to]) => [rank, name, data.ends[rank][from], data.ends[rank][to]]);
  const nows = data.ends.map((_, rank) => spans.findLast(([of, , from]) => of === rank && from <= at));
  return picture(width, 62, "the schedule, in times of a rank's forward",
    data.ends.map((_, rank) => svg("text", { x: 0, y: 19 + 30 * rank, class: "rank" }, `rank ${rank}`)),
    data.timeline.map(([rank, name, from, to]) => {
      const span = spans.find(([of, named]) => of === rank && named === name);
      const now = nows[rank] && nows[rank][1] === name && at <= nows[rank][3];
      const fill = { F: "forward", B: "backward", W: "weights" }[name[0]];
      return svg("g", { onclick: () => (span ? set({ at: span[2], look: -1 }) : null), class: "station", ...tip(`${name} of rank ${rank}: go there`) },
        svg("rect", { x: x(from) + 1, y: 3 + 30 * rank, width: x(to) - x(from) - 2, height: 24, rx: 3, style: `fill: var(--${fill})${now ? "; stroke: var(--ink); stroke-width: 3" : ""}` }),
        svg("text", { x: (x(from) + x(to)) / 2, y: 20 + 30 * rank, "text-anchor": "middle", style: "fill: #000" }, name));
    }));
}

// ---- Going elsewhere ----------------------------------------------------------------------------

const depth = (data, at) => {
  const rank = data.ends ? state.follow : 0;
  const { calls, call } = stepOf(data, rank, placeOf(data, rank, at)[0]);
  return stack(calls, call).length;
};
const sends = (data, at) => [...Array(data.ends ? data.P : 1).keys()].some((rank) => {
  const [i] = placeOf(data, rank, at);
  return (!data.ends || data.ends[rank][i] === at) && stepOf(data, rank, i).messages.length > 0;
});

// The next moment, or the one before, for which a test holds
function seek(test, by = 1) {
  const data = walkRun();
  for (let at = state.at + by; at >= 0 && at < momentsOf(data); at += by) if (test(data, at)) return set({ at, look: -1 });
}
const over = () => seek((data, at) => depth(data, at) <= depth(data, state.at));
const out = () => seek((data, at) => depth(data, at) < depth(data, state.at));
const toMessage = (by) => seek(sends, by);
document.addEventListener("keydown", (event) => {
  if (current?.id !== "walk" || !playing || /INPUT|SELECT/.test(event.target.tagName) || event.altKey || event.ctrlKey || event.metaKey) return;
  ({ m: () => toMessage(1), M: () => toMessage(-1), o: over, u: out })[event.key]?.();
});

// What a step has done, in a sentence
function wordsOf(step) {
  const [name, parent, , module, phase, hf] = step.calls[step.call];
  const by = parent === null ? "" : step.calls[parent][5] ? `Hugging Face's ${step.calls[parent][0]}` : step.calls[parent][0];
  const kind = (badge) => (badge?.[0] === "+" ? ", a partial sum" : badge?.[0] === "d" ? `, a shard of dimension ${badge[1]}` : badge === "u" ? ", not yet filled" : "");
  const changed = step.changes.filter((one) => one.name !== "returns").map((one) => (one.name.startsWith("name of") ? `it is ${one.value}` : one.name + kind(one.badge)));
  const returned = step.changes.find((one) => one.name === "returns");
  if (step.kind === "gradient") return `Autograd has the gradient of ${step.note}.`;
  if (step.kind === "call") return `${phase === "b" && step.calls[parent][4] === "f" ? "Autograd" : by || "The script"} calls ${name}.`;
  if (hf) return `Hugging Face's ${name}${module ? ` (${module})` : ""} ${step.kind === "hf exit" ? "returns" : "runs; its lines are not shown"}.`;
  const sent = step.messages.map(({ op, size }) => `${op}, ${bytes(size)}`);
  const news = changed.length ? [`new: ${changed.join("; ")}`] : [];
  const result = returned ? [`it returns ${isTensor(returned.value) ? sizeOf(returned.value) : returned.value}${kind(returned.badge)}`] : [];
  return `Line ${step.line} has run${[...sent, ...news, ...result, ...(step.note ? [step.note] : [])].map((part, i) => (i ? "; " : ": ") + part).join("")}.`;
}

// Find the bug: what is said of a guess, and what it was
let blamed = null; // the moment that was blamed
function bugPanel(data, at, set) {
  const [wrong, rank, name, line, variable, expected, found] = data.bug.wrong;
  const button = (words, onclick) => html("button", { type: "button", onclick }, words);
  const solved = blamed !== null && blamed >= wrong && blamed <= wrong + 3;
  const said = blamed === null ? "One of break_it.py's bugs is in this run. At which line does a rank first hold, or send, what it should not?"
    : blamed < wrong ? "Not yet: so far all is as in the right run. Go on." : solved ? "Right." : "It goes wrong before this line. Go back.";
  return html("div", { class: "find" }, html("p", { role: "status" }, html("b", {}, said),
    solved ? [` Rank ${rank}, line ${line} in ${name}: ${variable} should be “${expected}”, and is “${found}”. ${data.bug.about}`] : null),
    solved ? null : button("It goes wrong here", () => { blamed = at; draw(); }),
    solved ? null : button("Show me", () => { blamed = wrong; set({ at: wrong, follow: data.ends ? rank : 0, look: -1 }); }));
}

view({
  id: "walk",
  title: "Step through",
  lead: "A training step of the script itself, line by line, with what every rank holds: recorded from a run.",
  course: ["lab 2", "the labs"],
  bare: "script",
  state: { script: "sp_megatron", run: "none", bug: 0, at: 0, go: "", follow: 0, look: -1 },
  values: { script: Object.keys(WALK_SCRIPTS), run: Object.keys(RUN_NAMES), follow: [0, 1] },
  draw(root, asked, set) {
    if (!walkData(asked.script)) return root.append(html("p", { class: "words" }, "The recording is being unpacked."));
    const data = walkRun();
    const landmark = data.marks.find(([, phase, words]) => slug(phase, words) === asked.go);
    if (asked.go) Object.assign(state, { go: "", at: landmark?.[0] ?? 0 });
    const at = Math.min(asked.at, momentsOf(data) - 1);
    const ranks = [...Array(data.P).keys()];
    const places = ranks.map((rank) => {
      const [i, waits] = placeOf(data, rank, at);
      return [stepOf(data, rank, i), waits, i];
    });
    const rank = data.ends ? asked.follow : 0;
    const [step, waits, i] = places[rank];
    const shown = waits ? stepOf(data, rank, i + 1) : step;
    const looked = stack(shown.calls, shown.call).includes(asked.look) ? asked.look : -1;
    const marks = data.ends ? places.map(([one, late, j], r) => {
      const next = late ? stepOf(data, r, j + 1) : one;
      return [r, next.calls[next.call][0], next.line];
    }) : [];
    const words = data.ends ? places.map(([one, late], r) => `Rank ${r}: ${late ? "waits for a message." : wordsOf(one)}`).join(" ") : wordsOf(step);
    const latest = data.marks.findLast(([begin]) => begin <= at)?.[0];
    const button = (text, title, onclick) => html("button", { type: "button", title, onclick }, text);
    const names = Object.fromEntries(Object.keys(data.runs).map((name) => [name, RUN_NAMES[name]]));
    const bugs = Object.fromEntries([[0, "no bug"], ...Object.keys(data.bugs).map((_, n) => [n + 1, `find bug ${n + 1}`])]);
    if (!data.bug) blamed = null;
    say(words);
    root.append(
      html("div", { class: "controls walking" }, choice("Script", "script", WALK_SCRIPTS), choice("Run", "run", names), choice("Find the bug", "bug", bugs),
        player("at", momentsOf(data), step.messages.length ? 3200 : 1500, (n) => `${n + 1} of ${momentsOf(data)}`),
        html("div", { class: "jumps" }, button("over", "The next line of this function or of its caller (o)", over),
          button("out", "To the caller (u)", out), button("◀ message", "The message before (M)", () => toMessage(-1)), button("message ▶", "The next message (m)", () => toMessage(1)))),
      ...(data.bug ? [bugPanel(data, at, set)] : []),
      ...(data.ends ? [strip(data, at)] : []),
      html("div", { class: "chips marks" }, data.marks.map(([begin, phase, text], n) => [
        phase === data.marks[n - 1]?.[1] ? null : html("small", {}, PHASES[phase]),
        html("button", { type: "button", class: phase, "aria-pressed": String(begin === latest), onclick: () => set({ at: begin, look: -1 }) }, text)])),
      html("p", { class: "words walked" }, words),
      html("div", { class: data.P > 2 ? "walk many" : "walk", style: `--ranks: ${data.P}` }, codePanel(data, shown, waits, marks, looked, set),
        html("section", { class: data.ends ? "ranks apart" : "ranks", "aria-label": "Ranks" }, rankHeads(data, places),
          data.ends ? null : html("div", { class: "head one", title: "what one device holds here, found at the same line of its run" }, "one device"),
          looked >= 0 ? html("p", { class: "note" }, `The variables of ${shown.calls[looked][0]}, which calls. `, button("Back to the line", "", () => set({ look: -1 }))) : null,
          data.ends ? columnsApart(data, places, at, looked, rank) : rowsTogether(data, at, looked >= 0 ? looked : step.call),
          html("p", { class: "note" }, data.ends ? "✓: one device's run has this very tensor. The ranks' lines come in the order in which they have run. " : "Badges: found by comparing with a run of one device, at the same line. ",
            "Green is positive, purple negative. Framed: what has just changed, with its changed cells underlined."))));
    requestAnimationFrame(() => {
      const panel = document.querySelector(".code .lines");
      const line = panel?.querySelector(".now");
      if (line) panel.scrollTop = line.offsetTop - panel.clientHeight / 2;
      const above = document.querySelector(".code .stack");
      if (above) above.scrollTop = above.scrollHeight;
    });
  },
});
