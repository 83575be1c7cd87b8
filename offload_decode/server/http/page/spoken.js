// Tells screen readers the answer sentence by sentence: token by token it could not be followed.

const ENDS = /[.!?。！？]["'”’)\]]*\s|\n/g;

export class Spoken {
  #element;
  #rest = "";

  constructor(element) {
    this.#element = element;
  }

  /** A new answer begins. */
  begin(text) {
    this.#rest = "";
    this.#element.replaceChildren();
    this.say(text);
  }

  /** More of it. */
  write(text) {
    this.#rest += text;
    const ends = [...this.#rest.matchAll(ENDS)];
    if (!ends.length) return;
    const end = ends.at(-1).index + ends.at(-1)[0].length;
    this.say(this.#rest.slice(0, end));
    this.#rest = this.#rest.slice(end);
  }

  /** What is left of it, and how it ended. */
  end(text) {
    this.say(this.#rest);
    this.#rest = "";
    this.say(text);
  }

  say(text) {
    if (!text.trim()) return;
    const line = document.createElement("p");
    line.textContent = text.trim();
    this.#element.append(line);
  }
}
