// One question with its answer, and what this attended to. Text goes in as text, never as HTML.

const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 0 });
const whole = new Intl.NumberFormat("en");

export class Turn {
  constructor(question, list) {
    this.question = question;
    this.answer = "";
    this.whole = false;
    this.element = copy("turn");
    this.find(".asked").textContent = question;
    list.append(this.element);
    this.#began = performance.now();
    this.element.classList.add("writing");
  }

  #began;
  #first = 0;
  #last = 0;

  find(selector) {
    return this.element.querySelector(selector);
  }

  /** More of the answer. */
  write(text) {
    this.#last = performance.now();
    this.#first ||= this.#last;
    this.answer += text;
    this.find(".text").textContent = this.answer.trimStart();
    this.state("");
  }

  /** A sentence about how the answer goes. */
  state(text) {
    this.find(".state").textContent = text;
  }

  /** Nothing more is written. */
  end(state = "", failed = false) {
    this.element.classList.remove("writing");
    this.element.classList.toggle("failed", failed);
    this.state(state);
  }

  /** The last chunk: what the answer cost, and what it attended to. */
  tell({ usage, stats, citations, grounded, checked, warnings = [] }, corpus) {
    const figures = [];
    const seconds = (this.#last - this.#first) / 1000;
    if (usage?.completion_tokens > 1 && seconds > 0) {
      figures.push(["tokens a second", ((usage.completion_tokens - 1) / seconds).toPrecision(3)]);
    }
    if (this.#first) figures.push(["to the first token", duration(this.#first - this.#began)]);
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      figures.push(["prompt tokens cached", `${whole.format(cached)} of ${whole.format(usage.prompt_tokens)}`]);
    }
    if (stats && corpus) figures.push(["keys and values read", bytes(stats.bytes_moved)]);
    if (grounded !== undefined) figures.push(["grounded", grounded.toFixed(2)]);
    if (checked) figures.push(["tokens that stay the likeliest", `${checked.same} of ${checked.tokens}`]);
    const list = this.find(".figures");
    list.replaceChildren(...figures.map(figure));
    list.hidden = !figures.length;
    const notes = this.find(".warnings");
    notes.replaceChildren(...warnings.map(noted));
    notes.hidden = !warnings.length;
    if (corpus && citations) this.#cite(citations);
  }

  #cite(citations) {
    const most = Math.max(0, ...citations.flatMap((cited) => cited.spans.map((span) => span.share)));
    const documents = citations.map((cited, place) => shown(cited, most, place === 0));
    this.find(".documents").replaceChildren(...documents);
    this.find(".none").hidden = documents.length > 0;
    this.find(".evidence").hidden = false;
  }
}

function noted(warning) {
  const item = document.createElement("li");
  item.textContent = warning;
  return item;
}

function shown(cited, most, open) {
  const item = copy("document");
  item.querySelector(".name").textContent = cited.name;
  item.querySelector(".name").title = cited.name;
  item.querySelector(".share").textContent = percent.format(cited.share);
  item.querySelector(".bar").style.setProperty("--share", cited.share);
  if (!cited.spans.length) {
    const bare = document.createElement("div");
    bare.className = "bare";
    bare.append(...item.querySelector("summary").childNodes);
    item.replaceChildren(bare);
    return item;
  }
  item.querySelector("details").open = open;
  item.querySelector(".passages").append(...cited.spans.map((span) => passage(span, most)));
  return item;
}

function passage(span, most) {
  const item = copy("passage");
  item.querySelector("mark").textContent = unwrapped(span.text);
  item.querySelector("mark").style.setProperty("--strength", most ? span.share / most : 0);
  item.querySelector(".share").textContent = percent.format(span.share);
  return item;
}

/** Prose that was broken into lines, as one; short lines and indented ones, as of code, stay. */
function unwrapped(text) {
  return text.replace(/(.{45,})\n(?=\S)/g, "$1 ");
}

function figure([name, value]) {
  const pair = document.createElement("div");
  const term = document.createElement("dt");
  const told = document.createElement("dd");
  term.textContent = name;
  told.textContent = value;
  pair.append(term, told);
  return pair;
}

function duration(milliseconds) {
  return milliseconds < 1000 ? `${milliseconds.toFixed(0)} ms` : `${(milliseconds / 1000).toPrecision(3)} s`;
}

function bytes(amount) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, amount < 1000 ? 0 : Math.floor(Math.log10(amount) / 3));
  return `${power ? (amount / 1000 ** power).toPrecision(3) : amount} ${units[power]}`;
}

function copy(name) {
  return document.getElementById(name).content.firstElementChild.cloneNode(true);
}
