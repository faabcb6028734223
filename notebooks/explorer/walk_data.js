// Step through's recordings. DATA.walk[script] is gzipped, and unpacked when it is first shown. explorer/walk.py
// makes it of real runs:
//   calls   [name, its caller, the line that calls, module, phase f, b or r, whether it is Hugging Face's]
//   tracks  steps [kind, call, line, lines before it that changed nothing, changes, messages, note]
//           a change: [variable, value or one for each rank, badge, what one device holds]
//           a message: [collective, sum or max, bytes, [[from, what comes], ...] of each rank]
// Ranks that run the same lines share a track, and a moment is a step. Those of pp.py have a track each, and
// `ends` has the moment of each step: at a moment one rank runs a line.

const unpacked = {}; // {script: its data, or a promise of it}

// A script's data; null while they are being unpacked, after which the page is drawn again
function walkData(script) {
  if (unpacked[script] instanceof Promise) return null;
  if (unpacked[script]) return unpacked[script];
  const packed = Uint8Array.from(atob(DATA.walk[script]), (one) => one.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  unpacked[script] = new Response(stream).json().then((data) => {
    unpacked[script] = data;
    for (const bug of Object.values(data.bugs)) { // its first steps are the right run's
      const right = data.runs[script === "pp" ? "1f1b-none" : "none"];
      bug.calls ??= right.calls;
      bug.tracks = bug.tracks.map((steps, i) => [...right.tracks[i].slice(0, bug.same[i]), ...steps]);
    }
    if (current?.id === "walk") draw();
  });
  return null;
}

// What is shown: the run of the state, with the script's pools
function walkRun() {
  const data = walkData(state.script);
  const [first] = Object.keys(data.runs);
  const bug = Object.values(data.bugs)[state.bug - 1];
  return { ...data, ...(bug ?? data.runs[state.run] ?? data.runs[first]), bug };
}

const momentsOf = (data) => (data.ends ? Math.max(...data.ends.map((ends) => ends.at(-1))) + 1 : data.tracks[0].length);
const trackOf = (data, rank) => (data.ends ? rank : 0);

// A step by names, of a rank
function stepOf(data, rank, i) {
  const track = trackOf(data, rank);
  const [kind, call, line, via = [], changes = [], messages = [], note = ""] = data.tracks[track][i];
  const pick = (value) => (typeof value === "number" ? value : value[rank]);
  return {
    kind: data.kinds[kind], call, line, via, note, calls: data.calls[track],
    changes: changes.map(([name, value, badge, one]) => ({ name: data.names[name], value: data.pool[pick(value)], badge, one: data.pool[one] })),
    messages: messages.map(([op, how, size, coming]) => ({ op, how, size, coming: coming[data.ends ? 0 : rank] })),
  };
}

// Where a rank is at a moment: [its last step, whether it waits for a message in the next]
function placeOf(data, rank, at) {
  if (!data.ends) return [at, false];
  const ends = data.ends[rank];
  const i = Math.max(0, ends.findLastIndex((end) => end <= at));
  const messages = data.tracks[rank][i + 1]?.[5] ?? [];
  return [i, at > ends[i] && messages.some(([op]) => op !== "send")];
}

// The variables of a call as of a step, what changed last first; before: what it held until then
function variables(data, rank, i, call) {
  const now = stepOf(data, rank, i);
  const track = data.tracks[trackOf(data, rank)];
  const found = new Map();
  if (now.kind === "gradient" && call === now.call) return now.changes.map((change) => ({ ...change, fresh: true }));
  for (let j = 0; j <= i; j++) {
    if (track[j][1] !== call || data.kinds[track[j][0]] === "gradient") continue;
    for (const change of stepOf(data, rank, j).changes) {
      found.set(change.name, { ...change, when: j, fresh: j === i, before: j === i ? found.get(change.name)?.value : null });
    }
  }
  return [...found.values()].sort((a, b) => b.when - a.when);
}

const isTensor = (value) => value?.startsWith("#");

// "#1x2x4|.1 .2": its shape and numbers
function unpack(value) {
  const [shape, numbers] = value.slice(1).split("|");
  return { shape: shape ? shape.split("x").map(Number) : [], numbers: numbers ? numbers.split(" ").map(Number) : null };
}
