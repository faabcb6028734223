// Controls: each changes one key of the state. The player leads one of them through its steps, by buttons,
// by keys, or by itself.

function slider(label, key, values, format = String) {
  const nearest = (value) =>
    values.reduce((best, v, i) => (Math.abs(v - value) < Math.abs(values[best] - value) ? i : best), 0);
  const at = nearest(state[key]);
  const input = html("input", {
    type: "range", min: 0, max: values.length - 1, step: 1, value: at, "data-control": key,
    disabled: values.length < 2, "aria-valuetext": format(values[at]), "aria-label": label,
    oninput: (event) => set({ [key]: values[event.target.value] }),
  });
  return html("label", { class: "control" }, html("span", {}, label, ": ", html("output", {}, format(values[at]))), input);
}

// options: {value: text}; missing: {value: why it cannot be chosen now}
function choice(label, key, options, missing = {}) {
  const entries = Object.entries(options).map(([value, text]) => {
    const why = missing[value];
    const kind = { value, selected: value === String(state[key]), disabled: why !== undefined };
    return html("option", kind, why ? `${text} (${why})` : text);
  });
  const typed = (value) => (typeof current.state[key] === "number" ? Number(value) : value);
  const onchange = (event) => set({ [key]: typed(event.target.value) });
  return html("label", { class: "control" }, label, html("select", { onchange, "data-control": key }, entries));
}

// Steps 0 to steps - 1 of state[key]: buttons, a slider, arrow keys and space; period in ms.
function player(key, steps, period = 1800, format = (i) => `step ${i} of ${steps - 1}`) {
  playing = { key, steps, period };
  const at = Math.min(state[key], steps - 1);
  // At an end a button stays, so that the focus does
  const button = (words, label, onclick, attributes) =>
    html("button", { type: "button", "aria-label": label, title: label, onclick, ...attributes }, words);
  return html("div", { class: "player" },
    button(timer ? "Pause" : "Play", timer ? "Pause (space)" : "Play (space)", play, { class: "play" }),
    button("◀", "A step back (left arrow)", () => move(-1), { "aria-disabled": at === 0 ? "true" : null }),
    button("▶", "A step on (right arrow)", () => move(1), { "aria-disabled": at === steps - 1 ? "true" : null }),
    html("input", {
      type: "range", min: 0, max: steps - 1, step: 1, value: at, "aria-label": "step", "data-control": key,
      "aria-valuetext": format(at), oninput: (event) => set({ [key]: Number(event.target.value) }),
    }),
    html("output", {}, format(at)));
}

function move(by) {
  const at = Math.min(state[playing.key], playing.steps - 1);
  set({ [playing.key]: Math.max(0, Math.min(playing.steps - 1, at + by)) });
}

function stop() {
  clearTimeout(timer);
  timer = null;
}

const atEnd = () => state[playing.key] >= playing.steps - 1;

// Play on, from the beginning if at the end; or pause.
function play() {
  if (timer) stop();
  else {
    if (atEnd()) set({ [playing.key]: 0 });
    timer = setTimeout(tick, playing.period);
  }
  draw();
}

// The next step; how long it is shown is the view's to say, each time that it draws.
function tick() {
  move(1);
  if (atEnd()) stop();
  else timer = setTimeout(tick, playing.period);
  draw();
}

document.addEventListener("keydown", (event) => {
  const own = { INPUT: true, SELECT: true, BUTTON: event.key === " " }; // keys that they use themselves
  if (!playing || own[event.target.tagName] || event.altKey || event.ctrlKey || event.metaKey) return;
  const act = { ArrowRight: () => move(1), ArrowLeft: () => move(-1), " ": play }[event.key];
  if (act) [event.preventDefault(), act()];
});
