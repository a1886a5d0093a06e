// What each order costs on a dataset: sliders ask the daemon's estimate, at most four times a second.
import { Latest, ask, bytes, el, empty, failure, isAborted, shareBar, short, table, whole } from "./parts.js";

const PAUSE_MS = 250;
const powers = (from, to) => Array.from({ length: to - from + 1 }, (_, index) => 2 ** (from + index));
// Each slider has some values; 0 lets the daemon choose.
const SLIDERS = [
  ["batch_size", "Global batch", powers(0, 14), 256, (value) => `${whole(value)} samples`],
  ["epochs", "Epochs", [1, 2, 3, 5, 10, 20, 50, 100], 3, (value) => whole(value)],
  [
    "cache",
    "Node cache",
    [0, ...powers(28, 44)],
    0,
    (value) => (value ? bytes(value) : "the data's size"),
  ],
  ["io_block", "Block", [0, ...powers(16, 28)], 0, (value) => (value ? bytes(value) : "automatic")],
  ["window", "Blocks mixed", [0, ...powers(1, 14)], 0, (value) => (value ? whole(value) : "automatic")],
];

export function costView(root, page, values) {
  let datasets = [],
    timer = null,
    isStarted = false,
    daemon = "0";
  const latest = new Latest(),
    chosen = { ...Object.fromEntries(SLIDERS.map(([name, , , start]) => [name, start])), ...values };
  const names = el("datalist", { id: "datasets" });
  const dataset = el("input", {
    type: "search",
    list: "datasets",
    placeholder: "Dataset  ( / )",
    "aria-label": "Dataset",
    value: values.dataset ?? "",
    on: { change: ask_, input: () => datasets.some((each) => each.name === dataset.value) && ask_() },
  });
  const pick = el("select", {
    "aria-label": "Daemon",
    on: {
      change: () => {
        daemon = pick.value;
        start();
      },
    },
  });
  const sliders = SLIDERS.map(([name, title, steps, , words]) => {
    const says = el("output", {}, words(Number(chosen[name])));
    const range = el("input", {
      type: "range",
      min: 0,
      max: steps.length - 1,
      value: Math.max(0, steps.indexOf(Number(chosen[name]))),
      "aria-label": title,
      on: {
        input: () => {
          chosen[name] = steps[range.value];
          says.textContent = words(chosen[name]);
          range.setAttribute("aria-valuetext", says.textContent);
          ask_();
        },
      },
    });
    return el("label", { class: "slider" }, el("span", {}, title, says), range);
  });
  const body = el("div", { class: "stack" });
  root.append(
    el(
      "section",
      { class: "card stack" },
      el("div", { class: "row" }, el("h2", {}, "What reading costs, in each order"), pick),
      el(
        "div",
        { class: "row" },
        dataset,
        names,
      ),
      el("div", { class: "sliders" }, sliders),
    ),
    body,
  );

  function ask_() {
    clearTimeout(timer);
    timer = setTimeout(load, PAUSE_MS);
  }

  async function load() {
    if (!dataset.value)
      return body.replaceChildren(
        empty(datasets.length ? "Choose a dataset." : "This daemon serves no dataset by name."),
      );
    page.keep({ ...chosen, dataset: dataset.value });
    body.classList.add("busy");
    try {
      draw(
        await latest.run("cost", {
          ...chosen,
          daemon,
          dataset: dataset.value,
        }),
      );
    } catch (error) {
      if (isAborted(error)) return;
      body.replaceChildren(failure(error));
    }
    body.classList.remove("busy");
  }

  function draw(found) {
    const most = Math.max(...found.estimates.map((each) => each.num_bytes), 1),
      decodes = found.estimates.some((each) => each.num_chunks_decoded),
      opens = found.estimates.some((each) => each.num_opens);
    const best = /Take `([^`]*)`( with the cache)?/.exec(found.recommendation),
      name = best ? `${best[1]}${best[2] ?? ""}` : "";
    const rows = found.estimates.map((each) => {
      const bar = shareBar(["accent"], "thin");
      bar.set([each.num_bytes / most], bytes(each.num_bytes));
      return [
        el(
          "div",
          { class: "stack tight" },
          el("b", {}, each.order),
          each.window_blocks
            ? el(
                "span",
                { class: "small soft" },
                `${whole(each.window_blocks)} blocks of ${bytes(each.io_block_bytes)}`,
              )
            : null,
        ),
        whole(each.num_requests),
        ...(opens ? [whole(each.num_opens)] : []),
        el("div", { class: "stack tight" }, bytes(each.num_bytes), bar),
        ...(decodes ? [whole(each.num_chunks_decoded)] : []),
        `${short(each.amplification)} ×`,
        bytes(each.memory_bytes),
        each.quality.displacement.toFixed(2),
        each.quality.spread.toFixed(2),
        each.quality.mixing.toFixed(2),
      ];
    });
    const heads = [
      "Order",
      "#Requests",
      ...(opens ? ["#Files opened"] : []),
      "#Bytes read",
      ...(decodes ? ["#Chunks decoded"] : []),
      "#Read per byte",
      "#Memory",
      "#Displacement",
      "#Spread",
      "#Mixing",
    ];
    body.replaceChildren(
      el(
        "section",
        { class: "card stack" },
        el("p", {}, el("b", {}, found.recommendation.replaceAll("`", ""))),
        table(
          heads,
          rows,
          found.estimates.map((each) => (each.order === name ? "best" : null)),
        ),
        el(
          "p",
          { class: "small soft" },
          `${whole(found.num_samples)} samples, ${bytes(found.num_bytes_served)} served by all epochs together. Estimated from the index; no sample is read.`,
        ),
      ),
    );
  }

  async function start() {
    isStarted = true;
    try {
      datasets = await ask("datasets", { daemon });
      names.replaceChildren(...datasets.map((each) => el("option", { value: each.name }, each.uri)));
      if (!datasets.some((each) => each.name === dataset.value))
        dataset.value = (datasets.find((each) => each.open) ?? datasets[0])?.name ?? "";
      load();
    } catch (error) {
      body.replaceChildren(failure(error));
    }
  }

  return {
    update(state) {
      pick.hidden = state.daemons.length < 2;
      if (pick.options.length !== state.daemons.length)
        pick.replaceChildren(...state.daemons.map((each) => el("option", { value: each.number }, each.name)));
      if (!isStarted) start();
    },
    close: () => clearTimeout(timer),
  };
}
