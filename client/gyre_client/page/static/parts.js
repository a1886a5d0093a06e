// What all views share: elements, numbers in words, questions to the server. Text of daemons and data is only ever set as text.

/** Returns an element. `props` are its properties or, with a dash, attributes; `on` has its listeners; null children are left out. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined) continue;
    if (name === "on")
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name.includes("-") || name === "role" || name === "for" || name === "list")
      node.setAttribute(name, value);
    else if (name === "class") node.className = value;
    else node[name] = value;
  }
  node.append(
    ...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false),
  );
  return node;
}

/** Makes `parent` have one child for each item, in their order; children of items that stay are kept. */
export function keyed(parent, items, keyOf, make, update) {
  const there = (parent.itsKeys ??= new Map());
  const wanted = new Set();
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    if (wanted.has(key)) continue;
    wanted.add(key);
    let child = there.get(key);
    if (!child) there.set(key, (child = make(item)));
    update(child, item);
    if (child === place) place = place.nextSibling;
    else parent.insertBefore(child, place);
  }
  for (const [key, child] of there) {
    if (!wanted.has(key)) {
      child.remove();
      there.delete(key);
    }
  }
}

/** Sets the text of an element where it has changed, so that a selection stays. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export async function ask(name, values, signal) {
  let response;
  try {
    response = await fetch(`api/${name}?${new URLSearchParams(values)}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("gyre page does not answer");
  }
  const found = await response.json().catch(() => ({ error: "this browser has no access any more" }));
  if (!response.ok) throw new Error(found.error ?? `the server answered ${response.status}`);
  return found;
}

/** Runs questions of which only the newest counts: `run` aborts the one before. */
export class Latest {
  async run(name, values) {
    this.before?.abort();
    const mine = (this.before = new AbortController());
    const found = await ask(name, values, mine.signal);
    if (mine.signal.aborted) throw new DOMException("", "AbortError");
    return found;
  }
}

export const isAborted = (error) => error.name === "AbortError";
export const failure = (error) => el("p", { class: "error", role: "alert" }, error.message);
export const empty = (...text) => el("p", { class: "empty" }, ...text);

export const whole = (number) => Math.round(number ?? 0).toLocaleString("en");
export const percent = (share) =>
  share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`;
export const count = (number, word) => `${whole(number)} ${word}${number === 1 ? "" : "s"}`;

export function short(number, digits = 3) {
  if (number === null || number === undefined) return "–";
  if (number >= 1e4) return whole(number);
  return Number(number.toPrecision(digits)).toLocaleString("en");
}

export function bytes(number) {
  let value = number ?? 0;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024)
      return unit === "B" ? `${whole(value)} B` : `${value < 10 ? value.toFixed(1) : whole(value)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1e-3) return `${whole(value * 1e6)} µs`;
  if (value < 1) return `${short(value * 1e3, 2)} ms`;
  if (value < 90) return `${short(value, 2)} s`;
  if (value < 5400) return `${whole(value / 60)} min`;
  if (value < 129600) return `${short(value / 3600, 2)} h`;
  return `${whole(value / 86400)} days`;
}

export const STALLS = [
  ["storage", "waiting for storage"],
  ["processor", "waiting for processors"],
  ["trainer", "batches wait for the trainer"],
];

/** Returns a bar of shares of 1; `set` changes them. */
export function shareBar(names, extra = "") {
  const parts = names.map((name) => el("i", { class: name }));
  const bar = el("div", { class: `bar ${extra}`, role: "img" }, parts);
  bar.set = (shares, label) => {
    parts.forEach((part, index) => {
      part.style.width = `${100 * (shares[index] ?? 0)}%`;
    });
    bar.setAttribute("aria-label", label);
    bar.title = label;
  };
  return bar;
}

export function tile(label) {
  const value = el("b", {}, "–"),
    words = el("span", {}, label);
  const node = el("div", { class: "tile" }, value, words);
  node.set = (text, its = label) => {
    say(value, text);
    say(words, its);
  };
  return node;
}

/** Returns a table; a head that begins with # is of numbers. */
export function table(heads, rows, classes = []) {
  const name = (head) => (head.startsWith("#") ? "num" : null);
  return el(
    "div",
    { class: "scroll", tabIndex: 0, role: "region", "aria-label": heads[0].replace("#", "") },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          heads.map((head) => el("th", { class: name(head), scope: "col" }, head.replace("#", ""))),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((row, index) =>
          el(
            "tr",
            { class: classes[index] ?? null },
            row.map((cell, column) => el("td", { class: name(heads[column]) }, cell)),
          ),
        ),
      ),
    ),
  );
}

export const facts = (pairs) =>
  el(
    "dl",
    { class: "facts" },
    pairs
      .filter((pair) => pair[1] !== null && pair[1] !== "")
      .map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
  );

/** Returns a picker of jobs; `set` gives it the jobs, and `value` is the chosen one's key. */
export function jobPicker(onChange) {
  const select = el("select", { "aria-label": "Job", on: { change: () => onChange(select.value) } });
  let before = "";
  select.set = (jobs, chosen) => {
    const named = jobs.map((job) => [job.key, `${job.job}  ·  ${job.dataset}`]);
    const now = JSON.stringify(named);
    if (now !== before)
      select.replaceChildren(...named.map(([key, text]) => el("option", { value: key }, text)));
    before = now;
    if (chosen && jobs.some((job) => job.key === chosen)) select.value = chosen;
  };
  return select;
}

/** Returns a colour of page.css as a canvas takes it: the one of light or of dark. */
export function colour(name) {
  document.head.style.color = `var(--${name})`;
  return getComputedStyle(document.head).color;
}
