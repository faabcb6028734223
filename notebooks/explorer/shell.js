// What all views share: elements, controls, the URL's fragment, and drawing again.
//
// A view is registered with view({id, title, lead, course, state, values, bare, draw}):
//   course  the LINKS to where the course explains it
//   state   the defaults; the fragment holds what differs from them: #memory&P=8
//   values  {key: [what it may be]}; anything else in a fragment is passed over
//   bare    the key whose value stands in the fragment by itself: #layouts&sp
//   sketch  (state): what a question shows of it, if some question does
//   draw    (root, state, set): fills the empty root; set({P: 8}) changes the state and draws again
// draw makes everything anew each time, and morph() changes what is on the page into that, so that
// a slider that is being dragged, the focus and CSS transitions stay. So handlers have to be given
// as attributes, html("button", {onclick: ...}), never by addEventListener.

const DATA = JSON.parse(document.getElementById("data").textContent);
const NARROW = matchMedia("(max-width: 1000px)");
const LOW = matchMedia("(min-width: 600px) and (max-height: 500px)"); // a phone on its side: two columns
const DARK = matchMedia("(prefers-color-scheme: dark)");
// Of another page, such as the site's first: alone a question, no navigation
document.documentElement.classList.toggle("embedded", self !== top);
// All links out of this page stand here, so that a build of the site can rewrite them.
const LINKS = {
  home: "../README.md",
  "lab 1": "../labs/lab1_collectives/README.md",
  "lab 2": "../labs/lab2_megatron_layers/README.md",
  "lab 3": "../labs/lab3_pitfalls/README.md",
  "lab 7": "../labs/lab7_ring_attention/README.md",
  "lab 8": "../labs/lab8_3d/README.md",
  "lab 10": "../labs/lab10_long_sequences/README.md",
  "lab 11": "../labs/lab11_time/README.md",
  "the labs": "../labs/README.md",
  "notebook 5": "../notebooks/5_pipeline.ipynb",
  glossary: "../labs/notes/glossary.md",
};
const RANK = "One of the processes that train together, usually one on each GPU, numbered from 0. Each has memory of its own; " +
  "what it needs of another rank's has to be sent. In Layouts and Collectives a colour stands for a rank.";
const views = {};
let current = null; // the view that is shown
let state = {}; // its state
const last = {}; // {view: its fragment when it was left}
let playing = null; // {key, steps, period} of the player in the view, if it has one
let timer = null; // runs while it plays

// ---- Elements -----------------------------------------------------------------------------------

function fill(element, attributes, children) {
  element.handlers = {};
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.handlers[name] = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  Object.assign(element, element.handlers);
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

// html("p", {class: "note"}, "words", element, [more]); an attribute that is null or false is left out
function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

// A picture with its text alternative. What is inside may have tips: see below.
function picture(width, height, words, ...children) {
  const size = { viewBox: `0 0 ${width} ${height}`, class: "picture", role: "group", "aria-label": words, tabindex: 0 };
  return svg("svg", size, ...children);
}

// A picture's width: the page's in pixels, so that no text shrinks; a projector's larger page scales it up.
function pageWidth() {
  const width = Math.max(300, Math.min(1240, document.querySelector("main").clientWidth)); // 0: not yet laid out
  return LOW.matches && !covered() ? 0.6 * (width - 12) : width;
}

// The same of the left and of the right column, where there are two
function columnWidths() {
  const width = pageWidth();
  return NARROW.matches ? [width, width] : [(1.7 / 2.7) * (width - 32), (width - 32) / 2.7];
}

// Attributes of what explains itself when pointed at, touched or focused.
function tip(words, focusable = true) {
  const focus = focusable ? { tabindex: 0, role: "img", "aria-label": words } : {};
  return { "data-tip": words, ...focus };
}

// Change an element into another; a data-key that differs makes it a new one, animations begin again.
function morph(old, fresh) {
  const same = old.nodeName === fresh.nodeName && old.dataset?.key === fresh.dataset?.key;
  if (!same) return old.replaceWith(fresh);
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name); // what a reader opened stays open
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const name of Object.keys(old.handlers ?? {})) old[name] = null;
  old.handlers = fresh.handlers;
  Object.assign(old, fresh.handlers);
  const before = [...old.childNodes];
  const after = [...fresh.childNodes];
  after.forEach((child, i) => (before[i] ? morph(before[i], child) : old.append(child)));
  before.slice(after.length).forEach((child) => child.remove());
  if ("value" in fresh && old.value !== fresh.value) old.value = fresh.value; // after min, max, options
}

// ---- Numbers and words --------------------------------------------------------------------------

const count = (n) => Math.round(n).toLocaleString("en-US"); // 1,234
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

// 1.5 GiB; bytes below 1 KiB are counted
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) [n, i] = [n / 1024, i + 1];
  return (i === 0 ? count(n) : Number(n.toPrecision(n < 1000 ? 3 : 4))) + "\u00a0" + units[i];
}

// Words for those who listen; a live region, so only what changed with the last step.
function say(words) {
  const live = document.getElementById("live");
  if (live.textContent !== words) live.textContent = words;
}

// figure("2 KiB", "message bytes"): a number with what it is
const figure = (number, words) => html("div", { class: "figure" }, html("b", {}, number), words);

// A legend's entry: a box of what fills it, and its meaning
function entry(fill, words, attributes = {}) {
  const box = svg("rect", { width: 26, height: 16, fill, class: "held" });
  return html("span", attributes, svg("svg", { viewBox: "0 0 26 16", "aria-hidden": "true" }, box), words);
}

// ---- The state, the fragment and the page -------------------------------------------------------

function view(definition) {
  views[definition.id] = definition;
}

// The view and the state that a fragment names; whatever is none gives way to the default.
function parse(fragment) {
  const [id, ...words] = fragment.replace(/^#/, "").split("&");
  const found = Object.hasOwn(views, id) ? views[id] : Object.values(views)[0];
  const read = { ...found.state };
  if (!Object.hasOwn(views, id)) return [found, read];
  for (const word of words) {
    const [key, text] = word.includes("=") ? word.split("=", 2) : [found.bare, word];
    if (!Object.hasOwn(read, key ?? "")) continue;
    const number = typeof found.state[key] === "number";
    const value = number ? Number(text) : text;
    const allowed = found.values?.[key];
    const fits = allowed ? allowed.includes(value) : !number || (Number.isInteger(value) && value >= 0);
    if (fits && text !== "") read[key] = value;
  }
  return [found, read];
}

function fragment() {
  const differs = Object.entries(state).filter(([key, value]) => value !== current.state[key]);
  const words = differs.map(([key, value]) => (key === current.bare ? value : `${key}=${value}`));
  return "#" + [current.id, ...words].join("&");
}

let address = ""; // of what is shown: where the page's is another one, show() is yet to hear of a link just followed
function writeNow() {
  if (location.hash !== address) return;
  history.replaceState(answered(), "", fragment());
  address = location.hash;
}

let written = null; // browsers limit how often a page may change its address
function write() {
  clearTimeout(written);
  written = setTimeout(writeNow, 150);
}

function set(changes) {
  Object.assign(state, changes);
  draw();
  write();
}

// On the site, whose build has rewritten LINKS, notebooks are pages
const onSite = (link) => (LINKS.home.endsWith(".html") ? link.replace(".ipynb", ".html") : link);
const linkTo = (name) => html("a", { href: onSite(LINKS[name]), target: "_top" }, name);

// The page: what the view is about, a question or what it has come to, and what answers it, unless that
// is still covered. On a phone on its side controls and words stand at the left, pictures at the right.
function draw() {
  if (!current) return;
  playing = null;
  const root = html("main", { "data-key": current.id });
  const course = current.course.map((name, i) => [i ? ", " : " In the course: ", linkTo(name)]);
  const lead = html("div", { class: "lead" }, html("p", {}, current.lead, course, "."),
    html("details", {}, html("summary", {}, "What is a rank?"), RANK, " More words: ", linkTo("glossary"), "."));
  const asked = questionPanel();
  const scored = asked?.dataset.key === "score";
  if (!scored && !NARROW.matches) root.append(lead);
  if (asked) root.append(asked);
  if (!covered() && !scored) {
    const drawn = html("div");
    current.draw(drawn, state, set);
    const [side, stage] = [html("div", { class: "side" }), html("div", { class: "stage" })];
    for (const child of [...drawn.childNodes]) (child.matches(".controls, .words") ? side : stage).append(child);
    root.append(side, stage);
  }
  if (!scored && NARROW.matches) root.append(lead); // below what is asked and shown, for the keyboard too
  morph(document.querySelector("main"), root);
  document.body.classList.toggle("plays", playing !== null);
  const bar = playing && NARROW.matches ? document.querySelector(".player") : null; // it lies over the page's end
  document.body.style.paddingBottom = bar ? `${bar.offsetHeight + 8}px` : "";
  if (!playing) stop();
  followStep();
}

// What is wider than the page scrolls to where the step has moved to
function followStep() {
  for (const one of document.querySelectorAll(".scroll line.now, .chips [aria-pressed='true']")) {
    const strip = one.closest(".scroll, .chips");
    const place = one.getAttribute("x1") ?? one.textContent;
    if (strip.place !== place) {
      const [a, b] = [one.getBoundingClientRect(), strip.getBoundingClientRect()];
      strip.scrollLeft += a.left + a.width / 2 - b.left - b.width / 2;
    }
    strip.place = place; // from here a reader may scroll elsewhere
  }
}

function show() {
  clearTimeout(written); // what is yet to be written of the last state
  stop();
  hideTip();
  if (current) last[current.id] = fragment();
  address = location.hash;
  const asked = askedBy(location.hash);
  [current, state] = parse(asked ? `#${asked.view}` : location.hash);
  ask(asked ?? (location.hash.includes("&") ? null : nextQuestion(current.id)));
  restore(history.state);
  const links = Object.values(views).map(({ id, title }) =>
    html("a", { href: last[id] ?? `#${id}`, "aria-current": id === current.id && !location.hash.startsWith("#score") ? "page" : null }, title));
  const nav = document.querySelector("nav");
  const within = nav.contains(document.activeElement); // its links are made anew: the focus stays on the one
  nav.replaceChildren(...links);
  const code = document.querySelector("meta[name=code]").content;
  document.querySelector("#out").replaceChildren(
    html("a", { href: LINKS.home, target: "_top" }, "Home"), code ? html("a", { href: code, target: "_top" }, "Code") : "");
  draw();
  if (within) nav.querySelector("[aria-current]")?.focus();
  if (goingOn || location.hash.startsWith("#score")) document.getElementById("ask")?.focus();
  goingOn = false;
}

// Dark or light, as was chosen on the site, whose setting stands in localStorage; else as the system is
function paint() {
  let chosen = null;
  try {
    chosen = localStorage.getItem("mode");
  } catch {} // no storage here
  document.documentElement.dataset.theme = ["dark", "light"].includes(chosen) ? chosen : DARK.matches ? "dark" : "light";
}

paint();
DARK.addEventListener("change", paint);
addEventListener("storage", paint);
addEventListener("hashchange", show);
addEventListener("resize", () => draw());

// ---- Tips: beside what they explain; on a narrow page at its other edge. A tap shows one, a tap elsewhere hides it. 

// What a press gives the focus it has pointed at before: the picture around it has nothing to say then.
function showTip(event) {
  if (event.type === "focusin" && !event.target.matches(":focus-visible")) return;
  const target = event.target.closest?.("[data-tip]");
  if (!target) return hideTip();
  const box = document.getElementById("tip");
  const place = target.getBoundingClientRect();
  box.textContent = target.dataset.tip;
  box.hidden = false;
  const free = place.right + 8 + box.offsetWidth < innerWidth;
  const left = free ? place.right + 8 : Math.max(8, place.left - box.offsetWidth - 8);
  const top = Math.max(8, Math.min(place.top, innerHeight - box.offsetHeight - 8));
  const edge = place.top + place.bottom > innerHeight ? "top: 8px" : "bottom: 8px";
  box.style = NARROW.matches ? edge : `left: ${left}px; top: ${top}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}

for (const kind of ["pointerover", "focusin", "pointerdown"]) document.addEventListener(kind, showTip);
document.addEventListener("keydown", (event) => (event.key === "Escape" ? hideTip() : null));
addEventListener("scroll", hideTip, { passive: true });
addEventListener("DOMContentLoaded", show); // when all views are registered
