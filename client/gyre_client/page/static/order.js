// The order of a job: where its next thousand steps lie, how even the shuffle is, where it resumes.
import {
  Latest,
  bytes,
  colour,
  count,
  el,
  empty,
  facts,
  failure,
  isAborted,
  jobPicker,
  percent,
  shareBar,
  whole,
} from "./parts.js";

const QUALITY = [
  ["displacement", "Displacement", "how far samples are from their place in the dataset"],
  ["spread", "Spread", "from how many regions a batch comes"],
  ["mixing", "Mixing", "how far apart the samples of a batch are"],
];

export function orderView(root, page, values) {
  let job = values.job ?? null,
    found = null,
    isStarted = false;
  const latest = new Latest();
  const jobs = jobPicker((next) => load(next));
  const again = el("button", { on: { click: () => load(job) } }, "Look again");
  const body = el("div", { class: "stack" });
  root.append(el("div", { class: "row" }, el("label", {}, "Job ", jobs), again), body);

  async function load(next) {
    job = next;
    page.keep({ job });
    if (!found) body.replaceChildren(empty("Looking at the next thousand steps …"));
    body.classList.add("busy");
    try {
      found = await latest.run("order", { job });
      draw();
    } catch (error) {
      if (isAborted(error)) return;
      found = null;
      body.replaceChildren(failure(error));
    }
    body.classList.remove("busy");
  }

  function draw() {
    const order = found.order,
      resume = found.resume,
      its = page.state.jobs.find((each) => each.key === job);
    const map = el("canvas", {
      class: "map",
      role: "img",
      "aria-label": `${found.steps.length} of the next thousand steps, across, and the shards of the dataset, down; darker where a step takes more samples`,
    });
    const tip = el("p", { class: "small soft" }, "Point at the map to see steps and shards.");
    map.onmousemove = (event) => {
      const box = map.getBoundingClientRect(),
        column = Math.floor(((event.clientX - box.left) / box.width) * found.steps.length),
        band = Math.floor(((event.clientY - box.top) / box.height) * found.bands.length);
      const names = found.bands[band] ?? [],
        cell = found.cells[column]?.[band];
      if (cell !== undefined)
        tip.textContent = `Step ${whole(found.steps[column])}: ${count(cell, "sample")} from ${names.length ? names.join(" to ") : "this part of the dataset"}`;
    };
    const ends = found.bands.filter((each) => each.length);
    const first = ends[0]?.[0] ?? "",
      last = ends.at(-1)?.at(-1) ?? "";
    const box = el(
      "div",
      { class: "map-box" },
      el(
        "div",
        { class: "y" },
        el("span", { class: "cut", title: first }, first),
        el("span", { class: "cut", title: last }, last),
      ),
      map,
      el(
        "div",
        { class: "x" },
        el("span", {}, `step ${whole(found.steps[0])}`),
        el("span", {}, `step ${whole(found.steps.at(-1))}`),
      ),
    );
    const even = found.evenness;
    const sentence =
      even === null
        ? "A step has one sample, so it says nothing of the shuffle."
        : even > 0.98
          ? "Each step draws from all parts of the dataset, as even as chance."
          : even > 0.8
            ? "Each step draws from most of the dataset."
            : even > 0.3
              ? "A step draws from some parts of the dataset; the window moves on with the steps."
              : "A step draws from one place of the dataset: these samples are not shuffled.";
    const quality = its?.quality
      ? QUALITY.map(([name, title, words]) => meter(title, words, its.quality[name]))
      : [];
    const places = resume.places.map(
      (each) => `sample ${whole(each.sample_id)}: row ${whole(each.shard_row)} of ${each.shard}`,
    );
    const blocks =
      order.mode === "block"
        ? `, blocks of ${bytes(order.io_block_bytes)}, ${whole(order.window_blocks)} mixed`
        : "";
    body.replaceChildren(
      el(
        "section",
        { class: "card stack" },
        el(
          "div",
          { class: "row between" },
          el("h2", {}, "Where the next thousand steps lie"),
          el(
            "span",
            { class: "small soft" },
            `${count(found.num_shards_seen, "shard")} of ${whole(found.num_shards)} touched`,
          ),
        ),
        box,
        tip,
      ),
      el(
        "div",
        { class: "halves" },
        el(
          "section",
          { class: "card stack" },
          el("h2", {}, "How even the shuffle is"),
          el("p", {}, sentence),
          even === null ? null : meter("Evenness", "how evenly a step draws from the dataset", even),
          quality,
          quality.length
            ? el("p", { class: "small soft" }, "1.00 is a uniform shuffle, 0.00 the order of the files.")
            : null,
        ),
        el(
          "section",
          { class: "card stack" },
          el("h2", {}, "Where a resume would begin"),
          el(
            "p",
            {},
            `At step ${whole(resume.step)}, in epoch ${whole(resume.epoch)}, after ${count(resume.num_samples_before, "sample")}: on any number of ranks, with the same batches.`,
          ),
          facts([
            [
              "First samples",
              el(
                "div",
                { class: "stack tight" },
                places.map((text) => el("span", {}, text)),
              ),
            ],
            ["Order", `${order.mode}, seed ${order.seed}${blocks}`],
            ["Global batch", count(order.batch_size, "sample")],
            ["Dataset", count(found.num_samples, "sample")],
          ]),
        ),
      ),
    );
    paint();
  }

  function paint() {
    const map = body.querySelector("canvas");
    if (!map || !found) return;
    const columns = found.steps.length,
      bands = found.bands.length,
      context = map.getContext("2d");
    map.width = Math.max(columns, Math.round(map.clientWidth * devicePixelRatio));
    map.height = Math.round(map.clientHeight * devicePixelRatio);
    context.fillStyle = colour("card");
    context.fillRect(0, 0, map.width, map.height);
    const most = Math.max(1, ...found.cells.flat());
    context.fillStyle = colour("accent");
    found.cells.forEach((cells, column) =>
      cells.forEach((number, band) => {
        if (!number) return;
        const x = Math.round((column * map.width) / columns),
          y = Math.round((band * map.height) / bands);
        context.globalAlpha = 0.12 + (0.88 * number) / most;
        context.fillRect(
          x,
          y,
          Math.round(((column + 1) * map.width) / columns) - x,
          Math.round(((band + 1) * map.height) / bands) - y,
        );
      }),
    );
  }

  return {
    update(state) {
      jobs.set(state.jobs, job);
      if (isStarted) return;
      const chosen = job ?? state.jobs[0]?.key;
      if (!chosen)
        return body.replaceChildren(
          empty("No job reads now. The order of a dataset before any run: gyre plan --step."),
        );
      isStarted = true;
      jobs.set(state.jobs, chosen);
      load(chosen);
    },
    open(next) {
      if (next.job && next.job !== job) load(next.job);
    },
    paint,
  };
}

function meter(title, words, value) {
  const bar = shareBar(["accent"], "thin");
  bar.set([value], `${title}: ${percent(value)}`);
  return el(
    "div",
    { class: "meter", title: words },
    el("span", {}, title),
    bar,
    el("b", {}, value.toFixed(2)),
  );
}
