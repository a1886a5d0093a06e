// The frame of the page: views by the address's hash, events of the server, keys, light and dark.
import { el, keyed, say } from "./parts.js";
import { jobsView } from "./jobs.js";
import { costView } from "./costs.js";
import { orderView } from "./order.js";
import { samplesView } from "./step_samples.js";
import { storageView } from "./storage.js";
import { trainingView } from "./training.js";

const VIEWS = [
  ["jobs", "Jobs", jobsView],
  ["samples", "Samples", samplesView],
  ["order", "Order", orderView],
  ["cost", "Cost", costView],
  ["storage", "Storage", storageView],
  ["training", "Training", trainingView],
];
const KEYS = [
  ["1 – 6", "the views, from Jobs to Training"],
  ["/", "filter"],
  ["j  k", "next and previous job"],
  ["Enter", "open the job, or close it"],
  ["← →", "previous and next step of the samples, or in the strip"],
  ["t", "light or dark"],
  ["?", "these keys"],
];
const main = document.getElementById("view"),
  tabs = document.getElementById("tabs"),
  link = document.getElementById("link");
const lost = document.getElementById("lost"),
  help = document.getElementById("help"),
  theme = document.getElementById("theme");

/** What the views know of the page: the last state, and how to go elsewhere. */
const page = {
  state: null,
  go(view, values = {}) {
    const query = new URLSearchParams(values).toString();
    location.hash = query ? `${view}?${query}` : view;
  },
  /** Keeps values in the address without a new entry in the history. */
  keep(values) {
    const query = new URLSearchParams(values).toString();
    history.replaceState(null, "", `#${page.name}?${query}`);
  },
};
let view = null;

function show() {
  const [name, query] = location.hash.slice(1).split("?");
  const found = VIEWS.find((each) => each[0] === name) ?? VIEWS[0];
  const values = Object.fromEntries(new URLSearchParams(query ?? ""));
  if (page.name === found[0] && view?.open) return view.open(values);
  page.name = found[0];
  view?.close?.();
  main.replaceChildren();
  document.title = `${found[1]} · Gyre`;
  keyed(
    tabs,
    VIEWS,
    (each) => each[0],
    (each) => el("a", { href: `#${each[0]}` }, each[1]),
    (tab, each) => {
      if (each === found) tab.setAttribute("aria-current", "page");
      else tab.removeAttribute("aria-current");
    },
  );
  view = found[2](main, page, values);
  if (page.state) view.update(page.state);
}

function listen() {
  const events = new EventSource("events");
  events.onmessage = (event) => {
    page.state = JSON.parse(event.data);
    lost.hidden = true;
    const away = page.state.daemons.filter((each) => each.error).length;
    link.className = away ? "link off" : "link live";
    say(
      link,
      away
        ? `${away} of ${page.state.daemons.length} daemons silent`
        : page.state.daemons.length > 1
          ? `live · ${page.state.daemons.length} daemons`
          : "live",
    );
    view.update(page.state);
  };
  events.onerror = () => {
    link.className = "link off";
    say(link, "no connection");
    lost.hidden = false;
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
  };
}

const isDark = () =>
  (document.documentElement.dataset.theme ??
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const sayTheme = () => say(theme, isDark() ? "☀" : "☾");

function switchTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
  sayTheme();
  view.paint?.();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  const typing = event.target.matches("input:not([type=range]), select, textarea");
  if (typing && event.key === "Escape") event.target.blur();
  if (typing) return;
  const number = Number(event.key);
  if (number >= 1 && number <= VIEWS.length) page.go(VIEWS[number - 1][0]);
  else if (event.key === "?") help.showModal();
  else if (event.key === "t") switchTheme();
  else if (event.key === "/") main.querySelector("input")?.focus();
  else if (!view.key?.(event)) return;
  event.preventDefault();
});
document
  .getElementById("keys")
  .append(...KEYS.flatMap(([key, what]) => [el("dt", {}, key), el("dd", {}, what)]));
theme.addEventListener("click", switchTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  sayTheme();
  view.paint?.();
});
addEventListener("hashchange", show);
sayTheme();
show();
listen();
