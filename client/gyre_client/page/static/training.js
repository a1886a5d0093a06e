// Runs of gyre-train: losses, spikes and the steps behind them, and how each rank spends a step.
import {
  Latest,
  bytes,
  colour,
  count,
  el,
  empty,
  failure,
  isAborted,
  keyed,
  percent,
  say,
  seconds,
  shareBar,
  short,
  tile,
  whole,
} from "./parts.js";

export function trainingView(root, page, values) {
  let run = Number(values.run ?? 0),
    curve = null,
    plot = null,
    asked = -1;
  const latest = new Latest();
  const pick = el("select", {
    "aria-label": "Run",
    on: {
      change: () => {
        run = Number(pick.value);
        curve = null;
        asked = -1;
        page.keep({ run });
        update(page.state);
      },
    },
  });
  const title = el("h1", { class: "wrap" }),
    state = el("span", { class: "tag" }),
    folder = el("p", { class: "small soft wrap" });
  const tiles = ["step", "loss", "tokens a second", "peak memory of a rank", "waiting for data"].map(
    tile,
  );
  const chart = el("div", { class: "plot" }),
    spikes = el("div", { class: "stack" }),
    ranks = el("div", { class: "stack tight" });
  const legend = el(
    "div",
    { class: "keys" },
    el("span", { class: "key trainer" }, "computing"),
    el("span", { class: "key processor" }, "waiting for hops of the ring"),
    el("span", { class: "key storage" }, "waiting for data"),
  );
  const body = el(
    "div",
    { class: "stack" },
    el("div", { class: "row between" }, el("div", { class: "row" }, title, state), pick),
    folder,
    el("div", { class: "tiles" }, tiles),
    el(
      "section",
      { class: "card stack" },
      el(
        "div",
        { class: "row between" },
        el("h2", {}, "Loss"),
        el("span", { class: "small soft" }, "choose a point to see the samples of its step"),
      ),
      chart,
    ),
    el(
      "div",
      { class: "halves" },
      el("section", { class: "card stack" }, el("h2", {}, "Spikes"), spikes),
      el("section", { class: "card stack" }, el("h2", {}, "How ranks spend a step"), ranks, legend),
    ),
  );
  const none = empty("No run is shown. Give its folder: gyre page --run FOLDER, the run.out of gyre-train.");
  root.append(none, body);
  const watching = new ResizeObserver(() => plot?.setSize({ width: chart.clientWidth, height: 300 }));
  watching.observe(chart);

  function update(now) {
    const its = now.runs[run];
    none.hidden = Boolean(its);
    body.hidden = !its;
    if (!its) return;
    pick.hidden = now.runs.length < 2;
    if (pick.options.length !== now.runs.length)
      pick.replaceChildren(...now.runs.map((each) => el("option", { value: each.number }, each.name)));
    pick.value = run;
    say(title, its.name);
    say(state, its.state);
    say(folder, its.folder);
    const peak = Math.max(0, ...its.ranks.map((each) => each.memory_bytes)),
      spent = its.ranks.reduce((sum, each) => sum + each.step_s, 0),
      waited = its.ranks.reduce((sum, each) => sum + each.data_wait_s, 0);
    tiles[0].set(whole(its.step), its.steps ? `of ${whole(its.steps)} steps` : "steps");
    tiles[1].set(its.loss === null ? "not finite" : its.loss.toFixed(4));
    tiles[2].set(its.tokens_per_s === null ? "–" : whole(its.tokens_per_s));
    tiles[3].set(peak ? bytes(peak) : "–");
    tiles[4].set(spent ? percent(waited / spent) : "–", "of a step, waiting for data");
    keyed(
      ranks,
      its.ranks.slice(0, 64).map((each, rank) => ({ ...each, rank })),
      (each) => each.rank,
      rankRow,
      (row, each) => row.set(each),
    );
    if (!its.ranks.length) say(ranks, "The run has written no status.json.");
    if (asked !== its.num_recorded) load(its.num_recorded);
  }

  async function load(number) {
    asked = number;
    try {
      curve = await latest.run("run", { run });
      draw();
    } catch (error) {
      if (!isAborted(error)) chart.replaceChildren(failure(error));
    }
  }

  function draw() {
    const marks = new Map(curve.spikes.map((each) => [each.step, each]));
    spikes.replaceChildren(
      ...(curve.spikes.length
        ? curve.spikes.toReversed().map(spikeRow)
        : [
            el(
              "p",
              { class: "soft" },
              curve.step.length ? "No loss rises far above those before it." : "No step is recorded yet.",
            ),
          ]),
    );
    if (curve.step.length < 2) return;
    const data = [
      curve.step,
      curve.loss,
      smoothed(curve.loss),
      curve.step.map((step, index) => (marks.has(step) ? curve.loss[index] : null)),
    ];
    if (plot) plot.setData(data);
    else paint(data);
  }

  function paint(data) {
    const axis = {
      stroke: colour("soft"),
      grid: { stroke: colour("line"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
    };
    plot?.destroy();
    chart.replaceChildren();
    plot = new uPlot(
      {
        width: chart.clientWidth,
        height: 300,
        scales: { x: { time: false } },
        cursor: { points: { size: 7 }, drag: { x: true, y: false } },
        axes: [
          { ...axis, values: (_, ticks) => ticks.map(whole) },
          { ...axis, size: 54 },
        ],
        series: [
          { label: "step", value: (_, value) => (value === null ? "–" : whole(value)) },
          {
            label: "loss",
            stroke: colour("faint"),
            width: 1,
            points: { show: false },
            value: (_, value) => short(value, 5),
          },
          {
            label: "smoothed",
            stroke: colour("accent"),
            width: 2.2,
            points: { show: false },
            value: (_, value) => short(value, 5),
          },
          {
            label: "spike",
            stroke: colour("storage"),
            fill: colour("storage"),
            width: 0,
            paths: () => null,
            points: { show: true, size: 9, fill: colour("storage"), stroke: colour("storage") },
            value: (_, value) => (value === null ? "–" : short(value, 5)),
          },
        ],
      },
      data,
      chart,
    );
    plot.over.addEventListener("click", () => {
      const step = plot.data[0][plot.cursor.idx];
      if (step !== undefined && plot.select.width < 3) page.go("samples", { run, step });
    });
  }

  function spikeRow(spike) {
    const rise =
      spike.loss === null
        ? "not a finite number"
        : `${short(spike.loss, 4)}, usually ${short(spike.usual, 4)}`;
    return el(
      "div",
      { class: "row between" },
      el("div", {}, el("b", {}, `Step ${whole(spike.step)}`), el("span", { class: "soft" }, `  ${rise}`)),
      el(
        "div",
        { class: "chips" },
        el("button", { on: { click: () => page.go("samples", { run, step: spike.step }) } }, "Its samples"),
        el(
          "button",
          {
            disabled: !spike.step,
            title: "A loss is of the weights that the step before left",
            on: { click: () => page.go("samples", { run, step: spike.step - 1 }) },
          },
          "Those before",
        ),
      ),
    );
  }

  return {
    update,
    open(next) {
      if (next.run !== undefined && Number(next.run) !== run) {
        run = Number(next.run);
        curve = null;
        asked = -1;
        if (page.state) update(page.state);
      }
    },
    paint: () => {
      if (plot) paint(plot.data);
    },
    close: () => {
      watching.disconnect();
      plot?.destroy();
    },
  };
}

function rankRow() {
  const name = el("b", {}, ""),
    words = el("span", { class: "small soft" }),
    bar = shareBar(["trainer", "processor", "storage"]);
  const node = el("div", { class: "stack tight" }, el("div", { class: "row between" }, name, words), bar);
  node.set = (each) => {
    const whole_s = Math.max(each.step_s, 1e-9),
      shares = [
        Math.max(0, each.step_s - each.hop_wait_s - each.data_wait_s),
        each.hop_wait_s,
        each.data_wait_s,
      ].map((part) => part / whole_s);
    say(name, `Rank ${each.rank}`);
    say(
      words,
      `${seconds(each.step_s)} a step · hops ${seconds(each.hop_wait_s)} · data ${seconds(each.data_wait_s)} · ${bytes(each.memory_bytes)}`,
    );
    bar.set(
      shares,
      `${percent(shares[0])} computing, ${percent(shares[1])} waiting for hops, ${percent(shares[2])} waiting for data`,
    );
  };
  return node;
}

/** Returns a running mean without lag, over a fiftieth of the points. */
function smoothed(values) {
  const half = Math.max(2, Math.round(values.length / 100)),
    sums = [0],
    counts = [0];
  for (const value of values) {
    sums.push(sums.at(-1) + (value ?? 0));
    counts.push(counts.at(-1) + (value === null ? 0 : 1));
  }
  return values.map((_, index) => {
    const begin = Math.max(0, index - half),
      end = Math.min(values.length, index + half + 1),
      number = counts[end] - counts[begin];
    return number ? (sums[end] - sums[begin]) / number : null;
  });
}
