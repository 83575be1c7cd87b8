// Stores that are being made, appended to or renewed, shown until none is any more.

import { jobs } from "./wire.js";

const PAUSE_MS = 2000;
const DOING = { prefill: "Making", append: "Appending to", renew: "Renewing" };
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 0 });

export class Jobs {
  #list;
  #ended;
  #watched = new Set();
  #timer = 0;

  /** `ended` is called when some have ended, with the sentences of those that failed. */
  constructor(list, ended) {
    this.#list = list;
    this.#ended = ended;
  }

  /** Look, and look again as long as there are any. */
  async look() {
    clearTimeout(this.#timer);
    const found = await jobs();
    const going = found.filter((job) => job.status === "queued" || job.status === "running");
    const over = found.filter((job) => this.#watched.has(job.id) && !going.includes(job));
    this.#watched = new Set(going.map((job) => job.id));
    this.#list.replaceChildren(...going.map(shown));
    this.#list.hidden = !going.length;
    if (going.length) this.#timer = setTimeout(() => this.look().catch(this.#ended), PAUSE_MS);
    if (over.length) this.#ended(over.find((job) => job.error)?.error);
  }
}

function shown(job) {
  const item = document.createElement("li");
  const label = document.createElement("label");
  const bar = document.createElement("progress");
  const parts = [`${DOING[job.kind]} ${job.store}`];
  if (job.progress?.total) {
    bar.max = job.progress.total;
    bar.value = job.progress.done;
    parts.push(`${job.progress.stage} ${percent.format(job.progress.done / job.progress.total)}`);
    if (job.progress.seconds_left !== null) parts.push(`${left(job.progress.seconds_left)} left`);
  } else if (job.status === "queued") {
    parts.push("waiting for its turn");
  }
  label.append(parts.join(" · "), bar);
  item.append(label);
  return item;
}

function left(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}
