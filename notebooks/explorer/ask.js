// Predict, then reveal. A view that is opened by its bare name asks first; what answers the question stays
// covered until one has committed to a guess, or asks to see it. Questions are data, which
// explorer/questions.py makes of what the views show.
//
// Elsewhere: <iframe src="notebooks/explorer.html#ask"> shows the first question that is still open,
// #ask=ID a certain one. In a frame the page shows no navigation, only a link to itself. 520 pixels in
// height are enough for a question, its answer scrolls.
//
// A question is {id, view, ask, kind, because, see}; see: the fragment that shows the answer, because: why
// it is right. shows: the fragment of a picture that it is about (a view's sketch). And by kind
//   choice  options: [text, why it is wrong], null for the one that is right
//   marks   marks: [label, value, why it is not less, why it is not more]; right: within a factor of 2
//   ring    op, steps: what lab 1's own run takes; one sends for rank 0, all others do the same

const QUESTIONS = DATA.questions ?? [];
const KEPT_ANSWERS = "explorer answers";
const answers = stored(); // {id: whether it was right}
const free = {}; // views that ask no more
let question = null; // the one that is asked, if one is
let guess = null; // what has been chosen so far
let committed = false;
let given = false; // whether there was a guess
let goingOn = false; // to another question, which gets the focus: the button that led there is gone

function stored() {
  try {
    return JSON.parse(localStorage.getItem(KEPT_ANSWERS)) ?? {};
  } catch {
    return {}; // no storage here
  }
}

const questionsOf = (id) => QUESTIONS.filter(({ view }) => view === id);
const nextQuestion = (id) => (free[id] ? null : questionsOf(id).find((one) => !(one.id in answers)) ?? null);
const covered = () => question !== null && !committed;

// The question that a fragment names: #ask=ID, or the first that is open; null: the fragment is a view's
function askedBy(hash) {
  const [, id] = hash.match(/^#ask(?:=([\w-]+))?$/) ?? [];
  if (!hash.startsWith("#ask")) return null;
  return QUESTIONS.find((one) => one.id === id) ?? QUESTIONS.find((one) => !(one.id in answers)) ?? QUESTIONS[0];
}

function ask(next) {
  [question, committed] = [next, false];
  guess = !next ? null : { choice: null, marks: next.marks?.map(() => 0), ring: next.kind === "ring" ? ringStart(next) : null };
}

// What counts is the first guess
function keep(right) {
  if (!(question.id in answers)) answers[question.id] = right;
  store();
}

function store() {
  try {
    localStorage.setItem(KEPT_ANSWERS, JSON.stringify(answers));
  } catch {} // then it is kept as long as the page is
}

// right: whether the guess was; null: the answer was asked for
function commit(right) {
  [committed, given] = [true, right !== null];
  keep(right === true);
  [, state] = parse(`#${question.see}`);
  draw();
  writeNow();
  document.querySelector(".verdict, .because").focus();
}

// What an entry of the history holds of a question that was answered there, for a reload and the way back
const answered = () => (committed ? { id: question.id, guess, given } : null);

function restore(kept) {
  const found = QUESTIONS.find(({ id }) => id === kept?.id);
  if (found) [question, guess, given, committed] = [found, kept.guess, kept.given, true];
}

// What is yet to be written of the last state must not come after it
function leaveFor(fragment) {
  clearTimeout(written);
  goingOn = true;
  location.hash = fragment;
}

// Another one: of this view, else of the next view that has one
function goOn() {
  const ids = Object.keys(views);
  const order = [...ids.slice(ids.indexOf(current.id)), ...ids];
  const open = order.flatMap(questionsOf).find((one) => !(one.id in answers));
  leaveFor(open ? `#ask=${open.id}` : score());
}

function explore() {
  free[current.id] = true;
  ask(null);
  draw();
  write();
  document.querySelector(".again button, .controls :is(select, input)").focus();
}

const button = (words, onclick, attributes) => html("button", { type: "button", onclick, ...attributes }, words);

function questionPanel() {
  if (location.hash.startsWith("#score")) return scorePanel();
  const own = questionsOf(current.id);
  if (!question) {
    const left = own.filter(({ id }) => !(id in answers)).length;
    return left ? html("p", { class: "again" }, button(`Guess first: ${left} ${left > 1 ? "questions" : "question"} left here`, again)) : null;
  }
  const number = own.indexOf(question) + 1;
  const body = { choice: choicePanel, marks: marksPanel, ring: ringPanel }[question.kind];
  const shown = question.shows ? parse(`#${question.shows}`)[1] : null;
  const picture = shown && !committed ? views[question.view].sketch(shown) : null;
  return html("section", { class: "question", "data-key": question.id, "aria-labelledby": "ask" },
    html("p", { class: "kicker" }, `${views[question.view].title}, question ${number} of ${own.length}`,
      html("a", { href: score(), target: "_top" }, tally())),
    html("h2", { id: "ask", tabindex: -1 }, question.ask),
    picture, body(),
    committed ? html("p", { class: "because", tabindex: -1 }, question.because) : null,
    html("div", { class: "after" },
      committed ? button("Next question", goOn, { class: "main" }) : button("Show the answer", () => commit(null)),
      committed ? button("Close the question", explore) : button("Go to the view without a guess", explore),
      html("a", { class: "whole", href: `#ask=${question.id}`, target: "_blank" }, "Open the explorer")));
}

function again() {
  delete free[current.id];
  ask(nextQuestion(current.id));
  draw();
  scrollTo(0, 0);
  document.getElementById("ask").focus();
}

const verdict = (right, words) =>
  html("p", { class: `verdict ${right ? "right" : "wrong"}`, role: "status", tabindex: -1 }, html("b", {}, right ? "Right. " : "Not quite. "), words);

// Of several one is right
function choicePanel() {
  const right = question.options.findIndex(([, why]) => why === null);
  const rows = question.options.map(([text], i) => {
    const chosen = guess.choice === i;
    const look = committed && i === right ? " right" : committed && given && chosen ? " wrong" : "";
    const pick = () => {
      guess.choice = i;
      draw();
    };
    return html("label", { class: `option${look}` },
      html("input", { type: "radio", name: "guess", value: i, checked: chosen, disabled: committed, onchange: pick }),
      html("span", {}, text, committed && i === right ? html("b", {}, " ✓ right") : committed && given && chosen ? html("b", {}, " ✗ your guess") : ""));
  });
  const panel = html("fieldset", {}, html("legend", { class: "hidden" }, "Your guess"), rows);
  if (!committed) {
    const locked = guess.choice === null;
    return [panel, button("That is my guess", () => (locked ? null : commit(guess.choice === right)), { class: "main", "aria-disabled": locked ? "true" : null })];
  }
  if (!given) return panel;
  return [panel, verdict(guess.choice === right, guess.choice === right ? "" : question.options[guess.choice][1])];
}

// Values to be guessed with sliders, on a scale of powers of 2
const [LEAST, MOST] = [11, 22];
const valueAt = (part) => Math.round(2 ** (LEAST + part * (MOST - LEAST)) / 512) * 512;
const within = (value, wanted) => value <= 2 * wanted && wanted <= 2 * value;

function marksPanel() {
  const rows = question.marks.map(([label, value, more, less], i) => {
    const mine = valueAt(guess.marks[i]);
    const near = within(mine, value);
    const move = (event) => {
      guess.marks[i] = Number(event.target.value);
      draw();
    };
    const place = (Math.log2(value) - LEAST) / (MOST - LEAST);
    return html("div", { class: "mark" },
      html("label", {}, html("span", {}, label, ": ", html("output", {}, tokens(mine))),
        html("input", { type: "range", min: 0, max: 1, step: 1 / 88, value: guess.marks[i], disabled: committed, "aria-valuetext": tokens(mine), oninput: move })),
      committed ? html("div", { class: "scale", "aria-hidden": "true" }, html("i", { style: `left: ${100 * place}%` })) : null,
      committed ? html("p", { class: near || !given ? "right" : "wrong" }, html("b", {}, `${!given ? "" : near ? "✓ " : "✗ "}${tokens(value)}. `), near ? "" : mine < value ? more : less) : null);
  });
  const hits = question.marks.filter(([, value], i) => within(valueAt(guess.marks[i]), value)).length;
  const all = hits === rows.length;
  const told = `${hits} of ${rows.length} within a factor of 2.`;
  const locked = guess.marks.every((place) => place === 0); // nothing is guessed yet
  return [rows, committed ? (given ? verdict(all, told) : null) : button("These are my guesses", () => (locked ? null : commit(all)), { class: "main", "aria-disabled": locked ? "true" : null })];
}

// A ring: what rank 0 sends to rank 1 all others send to their next one, each of its own chunks
function ringStart({ op, P }) {
  const all = [...Array(P).keys()];
  const held = all.map((rank) => new Map((op === "all_gather" ? [rank] : all).map((chunk) => [chunk, 1 << rank])));
  return { held, sent: [], told: "" };
}

function ringDone({ held }, { op, P }) {
  const full = 2 ** P - 1;
  return held.every((chunks) => (op === "all_gather" ? chunks.size === P : [...chunks.values()].includes(full)));
}

// What the ranks hold once all have sent at the same time, or null if it is no more than before. A sum to
// which the same addend would come twice is left alone
function ringAfter(held, chunk, P) {
  const after = held.map((chunks) => new Map(chunks));
  let news = false;
  held.forEach((chunks, rank) => {
    const [which, to] = [(chunk + rank) % P, (rank + 1) % P];
    const [coming, there] = [chunks.get(which), held[to].get(which) ?? 0];
    if (coming & there) return;
    after[to].set(which, coming | there);
    news = true;
  });
  return news ? after : null;
}

function ringSend(chunk) {
  const { held, sent } = guess.ring;
  const { P, op } = question;
  const news = ringAfter(held, chunk, P);
  guess.ring.held = news ?? held;
  sent.push(chunk);
  guess.ring.told = news ? "" : op === "all_gather" ? "The next rank had that chunk: a step for nothing." : "That sum has the next rank's own addend already: a step for nothing.";
  if (ringDone(guess.ring, question)) commit(sent.length <= question.steps);
  else draw();
}

// From the start again: the first guess was wrong then
function ringAgain() {
  keep(false);
  guess.ring = ringStart(question);
  draw();
  document.querySelector(".question .chips button").focus();
}

function ringPanel() {
  const { held, sent, told } = guess.ring;
  const { P, op, steps, message } = question;
  const [cell, high, left] = [44, 34, 62];
  const rows = held.map((chunks, rank) => svg("g", {},
    svg("text", { x: 0, y: rank * high + 20, class: "rank" }, `rank ${rank}`),
    [...Array(P).keys()].map((chunk) => {
      const spot = { x: left + chunk * cell, y: rank * high + 4, w: cell - 4, h: 24 };
      const outline = svg("rect", { x: spot.x, y: spot.y, width: spot.w, height: spot.h, class: "outline" });
      return [outline, chunks.has(chunk) ? chunkBox([chunk, chunks.get(chunk)], spot) : null];
    })));
  const words = held.map((chunks, rank) => `rank ${rank} has ${[...chunks].map(chunkWords).join(", ")}`).join("; ");
  const board = svg("svg", { viewBox: `0 0 ${left + P * cell} ${P * high}`, class: "board", role: "img", "aria-label": words }, rows);
  const wire = `${sent.length} ${sent.length === 1 ? "step" : "steps"}, ${bytes((sent.length * message) / P)} sent by each rank`;
  const end = ringDone(guess.ring, question) && committed;
  const picks = committed ? null : html("div", { class: "chips", role: "group", "aria-label": "Rank 0 sends" }, "Rank 0 sends rank 1: ",
    [...Array(P).keys()].map((chunk) => {
      const has = held[0].has(chunk);
      const words = `chunk ${letter(chunk)}${has ? "" : ", which rank 0 does not have"}`;
      return button(letter(chunk), () => (has ? ringSend(chunk) : null), { "aria-label": words, title: words, "aria-disabled": has ? null : "true" });
    }), sent.length ? button("Again from the start", ringAgain) : null);
  const stuck = !committed && [...held[0].keys()].every((chunk) => !ringAfter(held, chunk, P));
  const best = `Lab 1's ${plain(op)} takes ${steps} steps, ${bytes((steps * message) / P)}.`;
  return [board, html("p", { role: "status" }, `${wire}. ${stuck ? "No send helps any more: each sum has some addend of the next rank's." : told}`), picks, end ? verdict(sent.length <= steps, best) : committed ? html("p", {}, best) : null];
}

// The score, as a link: #score&right=m1.m2&wrong=c1
// -------------------------------------------------------------------------------------------------

const isRight = ({ id }) => answers[id] === true;
const tally = () => `Score: ${QUESTIONS.filter(isRight).length} of ${QUESTIONS.length}`;

function score() {
  const ids = (right) => Object.keys(answers).filter((id) => answers[id] === right && QUESTIONS.some((one) => one.id === id)).join(".");
  return `#score&right=${ids(true)}&wrong=${ids(false)}`;
}

function scorePanel() {
  const read = (key) => (location.hash.match(new RegExp(`&${key}=([\\w.-]*)`)) ?? ["", ""])[1].split(".");
  const [right, wrong] = [read("right"), read("wrong")];
  const rows = Object.values(views).map(({ id, title }) => {
    const own = questionsOf(id);
    const marks = own.map((one) => {
      const look = right.includes(one.id) ? ["right", "✓", "right"] : wrong.includes(one.id) ? ["wrong", "✗", "not right"] : ["", "·", "open"];
      return html("a", { class: look[0], href: `#ask=${one.id}`, "aria-label": `${one.ask} ${look[2]}` }, look[1]);
    });
    return html("tr", {}, html("th", { scope: "row" }, title), html("td", {}, `${own.filter((one) => right.includes(one.id)).length} of ${own.length}`), html("td", { class: "dots" }, marks));
  });
  const got = QUESTIONS.filter((one) => right.includes(one.id)).length;
  const own = location.hash === score();
  const open = QUESTIONS.some((one) => !(one.id in answers));
  const copy = (event) => {
    const field = document.querySelector(".share");
    field.select();
    navigator.clipboard?.writeText(field.value);
    event.target.textContent = "Copied";
  };
  return html("section", { class: "question", "data-key": "score" },
    html("h2", { id: "ask", tabindex: -1 }, `${own ? "Predicted, then revealed" : "Somebody's score, from a link"}: ${got} of ${QUESTIONS.length} right`),
    html("p", {}, own ? "" : ["Not what was answered in this browser: ", html("a", { href: score() }, "your own score"), ". "], "First guesses count, and so does an answer that was shown, as not right."),
    html("table", {}, rows),
    html("label", { class: "control" }, own ? "Your score as a link" : "That score as a link", html("input", { class: "share", readonly: true, value: location.href })),
    html("div", { class: "after" }, button("Copy the link", copy),
      button(open ? "To the next question" : "To the views", goToOpen, { class: "main" }),
      Object.keys(answers).length ? button("Forget my answers", forget) : null));
}

function forget() {
  if (!confirm("Forget all your answers, and begin anew?")) return;
  for (const kept of [answers, free]) Object.keys(kept).forEach((key) => delete kept[key]);
  store();
  leaveFor(score());
}

function goToOpen() {
  const open = QUESTIONS.find((one) => !(one.id in answers));
  leaveFor(open ? `#ask=${open.id}` : `#${Object.keys(views)[0]}`);
}
