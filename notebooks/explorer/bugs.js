// Break it: what each bug of labs/break_it.py leaves right, and which row of the report gives it away.
// Errors are those of two steps on 2 ranks in float64; explorer/bugs.py has run every bug.

const SCRIPT_NAMES = {
  tp: "tp.py", sp_megatron: "sp_megatron.py", sp_ulysses: "sp_ulysses.py", pp: "pp.py",
};
const ROW_NAMES = DATA.bugs.labels;
const [FLOOR, LIMIT, CEILING] = [-17, -10, 1.5]; // powers of 10
const bugWords = (bug) => bug.replaceAll("_", " ");

// 0.53 as 53%, 9.2e-3 as 0.92%
function share(error) {
  if (error < 1e-10) return "0, up to rounding";
  if (error >= 1e6) return "more than a million times";
  if (error >= 10) return `${Number(error.toPrecision(2))} times too much`;
  return `${Number((100 * error).toPrecision(2))}%`;
}

const lossWords = ({ rows }) => {
  const [, error] = rows.find(([name]) => name === "loss");
  return error < 1e-10 ? "loss right" : `loss off by ${share(error)}`;
};

// A bar a row, its length the order of magnitude of the error
function bugBars({ rows }) {
  const narrow = NARROW.matches;
  const [width, left, high, gap] = [columnWidths()[0], narrow ? 0 : 300, 18, narrow ? 26 : 10];
  const x = (power) => left + ((width - left - 12) * (Math.min(CEILING, Math.max(FLOOR, power)) - FLOOR)) / (CEILING - FLOOR);
  const bottom = rows.length * (high + gap) + (narrow ? 22 : 6);
  const drawn = rows.map(([name, error, wrong, of], i) => {
    const y = i * (high + gap) + (narrow ? 22 : 6);
    const power = Math.log10(error || 1e-17);
    const words = `${ROW_NAMES[name]}: largest error ${share(error)}, ${wrong} of ${of} wrong`;
    const label = narrow ? { x: 0, y: y - 5 } : { x: left - 10, y: y + 14, "text-anchor": "end" };
    const bar = { x: x(FLOOR), y, width: Math.max(2, x(power) - x(FLOOR)), height: high, class: wrong ? "wrongbar" : "rightbar" };
    return [svg("rect", { ...bar, ...tip(words, false) }),
      svg("text", { ...label, class: "above" }, `${ROW_NAMES[name]}${of > 1 ? `: ${wrong} of ${of} wrong` : ""}`)];
  });
  const marks = [-15, -10, -5, 0].map((power) => [
    svg("line", { x1: x(power), x2: x(power), y1: 0, y2: bottom, class: power === LIMIT ? "limit" : "grid" }),
    svg("text", { x: x(power), y: bottom + 16, "text-anchor": "middle", class: "small" }, power === 0 ? "1" : `1e${power}`)]);
  const words = rows.map(([name, error]) => `${ROW_NAMES[name]} ${share(error)}`).join("; ");
  return picture(width, bottom + 40, `Relative errors by row: ${words}`, marks[0], marks[2], marks[3], drawn.map(([bar]) => bar), marks[1], drawn.map(([, label]) => label),
    svg("text", { x: width - 8, y: bottom + 34, "text-anchor": "end", class: "small" }, "largest relative error; red line: the limit"));
}

view({
  id: "bugs",
  title: "Break it",
  aside: true, // Step through's "Find the bug" leads here
  lead: "What people really get wrong: each bug planted in a script, and what the proof on 2 ranks then found.",
  course: ["lab 3", "notebook 7"],
  bare: "script",
  state: { script: "sp_megatron", bug: "" },
  values: { script: Object.keys(SCRIPT_NAMES), bug: ["", ...new Set(Object.values(DATA.bugs.scripts).flatMap(Object.keys))] },
  draw(root, state, set) {
    const bugs = DATA.bugs.scripts[state.script];
    const names = Object.keys(bugs).filter((name) => name !== "none");
    const bug = names.includes(state.bug) ? state.bug : names[0];
    const own = bugs[bug];
    const wrong = own.rows.filter(([, , some]) => some > 0).map(([name]) => ROW_NAMES[name]);
    const found = wrong.length ? `Wrong: ${wrong.join(", ")}.` : "Every value is right.";
    const held = own.coverage === 1 ? "" : ` Coverage is ${own.coverage}, not 1: all ranks together hold a tensor ${own.coverage} times.`;
    const words = `${own.says} ${found}${held}`;
    say(words);
    root.append(
      html("div", { class: "controls" }, choice("Script", "script", SCRIPT_NAMES)),
      html("p", { class: "words" }, words),
      html("div", { class: "beside" },
        html("div", {}, html("h2", {}, `What the report finds with ${bugWords(bug)}`), bugBars(own)),
        html("div", {}, html("h2", {}, "Bugs of this script"),
          names.map((name) => html("button", { type: "button", class: "row", "aria-pressed": String(name === bug), onclick: () => set({ bug: name }) },
            html("span", {}, bugWords(name)), html("b", {}, question ? "" : lossWords(bugs[name])))))),
      html("div", { class: "figures" },
        figure(share(own.rows.find(([name]) => name === "loss")[1]), "error of the first step's loss"),
        figure(`${own.wrong} of ${own.of}`, "values wrong"),
        figure(String(own.coverage), "coverage: 1 is right")),
      html("p", { class: "note" }, "A run of ", html("code", {}, `torchrun --nproc_per_node=2 labs/break_it.py ${SCRIPT_NAMES[state.script]} ${bug}`),
        `. Without a bug the largest error of any row is ${Math.max(...bugs.none.rows.map(([, error]) => error)).toExponential(0)}.`));
  },
});
