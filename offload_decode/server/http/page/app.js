// The page: a corpus is picked, questions are asked, and answers are shown as they are written.

import { Jobs } from "./jobs.js";
import { Spoken } from "./spoken.js";
import { Turn } from "./turn.js";
import { chat, keepKey, models, Refused } from "./wire.js";

const at = (id) => document.getElementById(id);
const spoken = new Spoken(at("spoken"));
const jobs = new Jobs(at("jobs"), made);
const number = new Intl.NumberFormat("en");

/** What an answer is told of beside its text. */
const TOLD = ["usage", "stats", "citations", "grounded", "checked", "warnings"];

let known = new Map();
let turns = [];
let running = null;

// Corpora

async function refresh() {
  try {
    show(await models());
    tell("");
    await jobs.look();
  } catch (error) {
    if (error.status === 401) unlock(at("unlock").dataset.given ? error.message : "");
    else tell(error.message);
  }
}

/** Some stores are made, or failed to be. */
async function made(error) {
  await refresh();
  if (error) tell(error.message);
}

function show(found) {
  const before = known.size ? at("corpus").value : linked();
  known = new Map(found.map((model) => [model.id, model]));
  const groups = [
    ["Corpora", found.filter((model) => model.parent)],
    ["Models without a corpus", found.filter((model) => !model.parent)],
  ].filter(([, held]) => held.length);
  at("corpus").replaceChildren(
    ...groups.map(([label, held]) => {
      const group = document.createElement("optgroup");
      group.label = label;
      group.append(...held.map((model) => new Option(model.id, model.id)));
      return group;
    }),
  );
  if (known.has(before)) at("corpus").value = before;
  at("corpus").disabled = !found.length;
  describe();
}

/** The name that the address ends in, which a link to a corpus has. */
function linked() {
  try {
    return decodeURIComponent(location.hash.slice(1)).normalize("NFC");
  } catch {
    return ""; // no name is spelled so
  }
}

addEventListener("hashchange", () => {
  if (!known.has(linked()) || linked() === at("corpus").value) return;
  at("corpus").value = linked();
  at("corpus").dispatchEvent(new Event("change"));
});

function describe() {
  const model = known.get(at("corpus").value);
  const parts = [];
  if (model?.parent) {
    parts.push(`${number.format(model.documents)} ${model.documents === 1 ? "document" : "documents"}`);
    parts.push(`${number.format(model.tokens)} tokens`, `answered by ${model.parent}`);
  } else if (model) {
    parts.push("answers from what the model knows, with nothing to cite");
  }
  at("about").textContent = known.size ? parts.join(" · ") : "Nothing is served yet: publish a store.";
  allow();
}

function allow() {
  const ready = known.has(at("corpus").value) && at("question").value.trim();
  at("send").textContent = running ? "Stop" : "Ask";
  at("send").disabled = !running && !ready;
}

function tell(problem) {
  at("notice").textContent = problem;
  at("notice").hidden = !problem;
}

// Questions

function asked(turn) {
  const earlier = turns.filter((one) => one !== turn && one.answer);
  const messages = earlier.flatMap((one) => [
    { role: "user", content: one.question },
    { role: "assistant", content: one.answer },
  ]);
  const wanted = { model: turn.model.id, messages: [...messages, { role: "user", content: turn.question }] };
  wanted.separate_reasoning = false;
  if (at("most").value) wanted.max_completion_tokens = Number(at("most").value);
  if (at("temperature").value) wanted.temperature = Number(at("temperature").value);
  if (at("budget").value && turn.model.parent) wanted.options = { budget: at("budget").value };
  if (at("check").checked && turn.model.parent && !turn.model.collection) wanted.check = true;
  return wanted;
}

async function ask(question) {
  const turn = new Turn(question, at("turns"));
  turn.model = known.get(at("corpus").value);
  turns.push(turn);
  running = new AbortController();
  begun(true);
  at("question").value = "";
  tell("");
  allow();
  turn.state("Waiting for the first token …");
  spoken.begin("The question is asked.");
  turn.element.scrollIntoView({ block: "start" });
  try {
    await answer(turn, running.signal);
  } catch (error) {
    fail(turn, error);
  } finally {
    running = null;
    allow();
  }
}

async function answer(turn, signal) {
  const last = {};
  let cut = false;
  for await (const chunk of patiently(turn, signal)) {
    const [choice] = chunk.choices;
    if (choice?.delta?.content) {
      turn.write(choice.delta.content);
      spoken.write(choice.delta.content);
    }
    cut ||= choice?.finish_reason === "length";
    for (const part of TOLD) last[part] = chunk[part] ?? last[part];
  }
  turn.element.classList.toggle("cut", cut);
  turn.end(cut ? "The answer was cut off at its most tokens: ask for more in the settings, or to go on." : turn.answer.trim() ? "" : "The answer is empty.");
  if (at("check").checked && turn.model.collection) {
    last.warnings = [...(last.warnings ?? []), "It was not checked: an answer of several documents is not."];
  }
  turn.tell(last, turn.model.parent);
  const first = last.citations?.[0];
  const most = first && turn.model.parent ? ` It attended most to ${first.name}.` : "";
  spoken.end(`The answer is ${cut ? "cut off" : "complete"}.${most}`);
}

/** The chunks of an answer; a server that is loading or busy is asked again when it said it would be ready. */
async function* patiently(turn, signal) {
  for (;;) {
    try {
      yield* chat(asked(turn), signal);
      return;
    } catch (error) {
      if (turn.answer || !(error.retrySeconds > 0)) throw error;
      turn.state(`${error.message} Asking again in ${error.retrySeconds} s …`);
      await pause(error.retrySeconds, signal);
      turn.state("Waiting for the first token …");
    }
  }
}

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}

function fail(turn, error) {
  if (error.name === "AbortError") {
    turn.end("Stopped.");
    spoken.end("Stopped.");
    return;
  }
  if (!(error instanceof Refused)) console.error(error);
  const said = error instanceof Refused ? error.message : "Something went wrong in this page.";
  turn.end(said, true);
  spoken.end(said);
  if (!turn.answer) at("question").value ||= turn.question;
  if (error.status === 401) unlock(error.message);
  if (error.status === 404) refresh();
}

function forget() {
  running?.abort();
  turns = [];
  at("turns").replaceChildren();
  begun(false);
  at("question").focus();
}

function begun(there) {
  at("welcome").hidden = there;
  at("fresh").hidden = !there;
}

// The key

function unlock(problem) {
  if (problem) at("locked-why").textContent = problem;
  if (!at("locked").open) at("locked").showModal();
  at("key").focus();
}

at("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(at("key").value);
  at("key").value = "";
  at("unlock").dataset.given = "yes";
  at("locked").close();
  at("question").focus();
  refresh();
});

at("later").addEventListener("click", () => {
  at("locked").close();
  tell("This server asks for a key: reload the page to give it.");
});

// What people do

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running && !at("send").disabled) ask(at("question").value.trim());
});

at("send").addEventListener("click", (event) => {
  if (!running) return;
  event.preventDefault(); // whatever the fields hold, an answer can be stopped
  running.abort();
});

at("question").addEventListener("input", allow);

at("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) at("ask").requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !at("locked").open) running.abort();
});

at("corpus").addEventListener("change", () => {
  history.replaceState(null, "", `#${encodeURIComponent(at("corpus").value)}`);
  forget();
  describe();
  at("corpus").focus();
});

at("fresh").addEventListener("click", forget);
window.addEventListener("focus", refresh);

await refresh();
if (!at("locked").open) at("question").focus();
