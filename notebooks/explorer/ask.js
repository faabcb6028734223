// Predict, then reveal. A view that is opened by its bare name asks first; what answers the question stays
// covered until one has committed to a guess, or asks to see it. Questions are data, which
// explorer/questions.py makes of what the views show.
//
// Elsewhere: <iframe src="notebooks/explorer.html#ask"> shows the first question that is still open,
// #ask=ID a certain one. In a frame the page shows no navigation, only a link to itself. 520 pixels in
// height are enough for a question, its answer scrolls.
//
// A question is {id, view, ask, options, because, see}; options: [text, why it is wrong], null for the one
// that is right; see: the fragment that shows the answer; because: why it is right; shows: the fragment of
// a picture that it is about (a view's sketch); lab: of LINKS, what teaches it, if not the view's first.

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
  guess = next ? { choice: null } : null;
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

// What an entry of the history holds for the way back, and for a reload, in which a private window may lose its storage
const answered = () => (committed ? { id: question.id, guess, given, answers } : null);

function restore(kept) {
  const found = QUESTIONS.find(({ id }) => id === kept?.id);
  if (found) [question, guess, given, committed] = [found, kept.guess, kept.given, true];
  Object.assign(answers, { ...kept?.answers, ...answers });
}

function leaveFor(fragment) {
  goingOn = true;
  location.hash = fragment;
}

// Another one: of this view, else of the next view that has one
function goOn() {
  const ids = Object.keys(views);
  const order = [...ids.slice(ids.indexOf(current.id)), ...ids];
  const open = order.flatMap(questionsOf).find((one) => !(one.id in answers));
  leaveFor(open ? `#ask=${open.id}` : "#score");
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
  const picture = question.shows && !committed ? views[question.view].sketch(parse(`#${question.shows}`)[1]) : null;
  return html("section", { class: "question", "data-key": question.id, "aria-labelledby": "ask" },
    html("p", { class: "kicker" }, `${views[question.view].title}, question ${number} of ${own.length}`,
      html("a", { href: "#score", target: "_top" }, tally())),
    html("h2", { id: "ask", tabindex: -1 }, question.ask),
    picture, choicePanel(),
    committed ? html("p", { class: "because", tabindex: -1 }, question.because) : null,
    committed && !answers[question.id] ? html("p", {}, "You build this yourself in ", linkTo(question.lab ?? views[question.view].course[0]), ".") : null,
    html("div", { class: "after" },
      committed ? button("Next question", goOn, { class: "main" }) : button("Show the answer", () => commit(null)),
      button(committed ? "Close the question" : "Go to the view without a guess", explore, { class: "leave" }),
      html("a", { class: "whole", href: committed ? `#${question.see}` : `#ask=${question.id}`, target: "_blank" }, committed ? "See it in the explorer" : "Open the explorer")));
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

// ---- The score ----------------------------------------------------------------------------------

const isRight = ({ id }) => answers[id] === true;
const tally = () => `Score: ${QUESTIONS.filter(isRight).length} of ${QUESTIONS.length}`;

function scorePanel() {
  const rows = Object.values(views).map(({ id, title }) => {
    const own = questionsOf(id);
    const marks = own.map((one) => {
      const look = !(one.id in answers) ? ["", "·", "open"] : answers[one.id] ? ["right", "✓", "right"] : ["wrong", "✗", "not right"];
      return html("a", { class: look[0], href: `#ask=${one.id}`, "aria-label": `${one.ask} ${look[2]}` }, look[1]);
    });
    return html("tr", {}, html("th", { scope: "row" }, title), html("td", {}, `${own.filter(isRight).length} of ${own.length}`), html("td", { class: "dots" }, marks));
  });
  const open = QUESTIONS.some((one) => !(one.id in answers));
  return html("section", { class: "question", "data-key": "score" },
    html("h2", { id: "ask", tabindex: -1 }, `Predicted, then revealed: ${QUESTIONS.filter(isRight).length} of ${QUESTIONS.length} right`),
    html("p", {}, "First guesses count, and so does an answer that was shown, as not right."),
    html("table", {}, rows),
    html("div", { class: "after" }, button(open ? "To the next question" : "To the views", goToOpen, { class: "main" }),
      Object.keys(answers).length ? button("Forget my answers", forget) : null));
}

function forget() {
  if (!confirm("Forget all your answers, and begin anew?")) return;
  for (const kept of [answers, free]) Object.keys(kept).forEach((key) => delete kept[key]);
  store();
  draw();
  document.getElementById("ask").focus();
}

function goToOpen() {
  const open = QUESTIONS.find((one) => !(one.id in answers));
  leaveFor(open ? `#ask=${open.id}` : `#${Object.keys(views)[0]}`);
}
