// The samples of any step of a job or a run: what the model sees, and where it is stored.
import { Latest, count, el, empty, failure, isAborted, jobPicker, say, table, whole } from "./parts.js";

const ROWS = 8;

export function samplesView(root, page, values) {
  let asked = { ...values },
    found = null,
    isStarted = false;
  const latest = new Latest();
  const jobs = jobPicker((job) => load({ job, step: lastStep(job), first: 0, as: asked.as }));
  const step = el("input", {
    type: "number",
    min: 0,
    "aria-label": "Step",
    on: { change: () => load({ ...asked, step: step.value, first: 0 }) },
  });
  const before = el(
    "button",
    { title: "Previous step (←)", "aria-label": "Previous step", on: { click: () => move(-1) } },
    "←",
  );
  const after = el(
    "button",
    { title: "Next step (→)", "aria-label": "Next step", on: { click: () => move(1) } },
    "→",
  );
  const stored = el("button", { on: { click: () => load({ ...asked, as: "stored" }) } }, "As stored");
  const served = el(
    "button",
    { on: { click: () => load({ ...asked, as: "served" }) } },
    "As the model sees it",
  );
  const source = el("span", { class: "tag" }),
    body = el("div", { class: "stack" });
  root.append(
    el(
      "div",
      { class: "row" },
      el("label", {}, "Job ", jobs),
      source,
      el("label", {}, "Step ", step),
      el("div", { class: "chips" }, before, after),
      el("div", { class: "chips" }, stored, served),
    ),
    body,
  );

  const lastStep = (key) => Math.max(0, (page.state?.jobs.find((job) => job.key === key)?.step ?? 1) - 1);
  const move = (by) => load({ ...asked, step: Math.max(0, Number(asked.step) + by), first: 0 });

  async function load(next) {
    asked = { as: "stored", first: 0, ...next };
    if (asked.run === undefined) delete asked.run;
    page.keep(asked);
    step.value = asked.step;
    stored.setAttribute("aria-pressed", asked.as !== "served");
    served.setAttribute("aria-pressed", asked.as === "served");
    jobs.parentNode.hidden = asked.run !== undefined;
    source.hidden = asked.run === undefined;
    say(source, `run ${page.state?.runs[asked.run]?.name ?? asked.run ?? ""}`);
    body.classList.add("busy");
    try {
      found = await latest.run("samples", { ...asked, num: ROWS });
      draw();
    } catch (error) {
      if (isAborted(error)) return;
      body.replaceChildren(failure(error));
    }
    body.classList.remove("busy");
  }

  function draw() {
    if (found.skipped) return body.replaceChildren(empty(`The job leaves step ${whole(found.step)} out.`));
    const order =
      asked.run !== undefined && found.step !== found.batch
        ? `, step ${whole(found.step)} of the data's order`
        : "";
    const head = el(
      "div",
      { class: "row between" },
      el("h1", {}, `Step ${whole(asked.step)}`),
      el("span", { class: "soft" }, `${count(found.num_rows, "row")}, epoch ${whole(found.epoch)}${order}`),
    );
    const chips = el(
      "div",
      { class: "chips" },
      found.sources.map((each) =>
        el("span", { class: "chip", title: each.name }, `${each.name}  ${whole(each.count)}`),
      ),
    );
    const isWide = found.rows.some((row) =>
      row.fields.some(
        (field) => field.kind === "tokens" || (field.kind === "text" && field.text.length > 200),
      ),
    );
    const cards = el("div", { class: `samples${isWide ? " wide" : ""}` }, found.rows.map(sampleCard));
    const end = found.first + found.count;
    const pager = el(
      "div",
      { class: "row" },
      el(
        "button",
        { disabled: !found.first, on: { click: () => load({ ...asked, first: found.first - found.count }) } },
        "Rows before",
      ),
      el(
        "span",
        { class: "small soft" },
        `rows ${whole(found.first)} to ${whole(end - 1)} of ${whole(found.num_rows)}`,
      ),
      el(
        "button",
        { disabled: end >= found.num_rows, on: { click: () => load({ ...asked, first: end }) } },
        "Rows after",
      ),
    );
    const isPacked = found.places.some((each) => each.tokens),
      isMixed = found.places.some((each) => each.source);
    const heads = [
      "#Row",
      ...(isMixed ? ["Source"] : []),
      "#Sample",
      "Shard",
      "#Row in shard",
      "#Offset",
      "#Size",
      ...(isPacked ? ["#Tokens"] : []),
    ];
    const rows = found.places.map((each) => [
      whole(each.row),
      ...(isMixed ? [each.source] : []),
      whole(each.sample_id),
      el("span", { class: "wrap" }, each.shard),
      whole(each.shard_row),
      each.offset === null ? "–" : whole(each.offset),
      each.size,
      ...(isPacked ? [each.tokens ? `${whole(each.tokens[0])} to ${whole(each.tokens[1])}` : "–"] : []),
    ]);
    const stored = el(
      "details",
      { class: "card" },
      el("summary", {}, `Where the ${rows.length < found.num_rows ? "first " : ""}samples are stored`),
      table(heads, rows),
    );
    body.replaceChildren(
      head,
      el("section", { class: "stack tight" }, el("h3", { class: "soft" }, "Comes from"), chips),
      cards,
      pager,
      stored,
    );
  }

  function start() {
    const state = page.state,
      chosen = asked.job ?? (asked.run === undefined ? state.jobs[0]?.key : undefined);
    isStarted = true;
    if (asked.run !== undefined) return load(asked);
    if (!chosen) {
      isStarted = false;
      return body.replaceChildren(
        empty("No job reads now. Samples of a run of gyre-train are behind its losses, in Training."),
      );
    }
    jobs.set(state.jobs, chosen);
    return load({ ...asked, job: chosen, step: asked.step ?? lastStep(chosen) });
  }

  return {
    update(state) {
      jobs.set(state.jobs, asked.job);
      if (!isStarted) start();
    },
    open(next) {
      asked = { ...next };
      start();
    },
    key(event) {
      if (event.key === "ArrowLeft") move(-1);
      else if (event.key === "ArrowRight") move(1);
      else return false;
      return true;
    },
  };
}

function sampleCard(row) {
  const fields = row.fields.map((field) =>
    el(
      "div",
      { class: "stack tight" },
      el(
        "div",
        { class: "row between field-name" },
        el("span", {}, field.name),
        el("span", { class: "faint" }, field.type),
      ),
      shown(field),
    ),
  );
  return el(
    "article",
    { class: "card sample" },
    el(
      "div",
      { class: "row between" },
      el("h3", {}, `Row ${whole(row.row)}`),
      el("span", { class: "small soft" }, row.padding ? "padding" : `sample ${whole(row.sample_id)}`),
    ),
    fields,
  );
}

function shown(field) {
  if (field.kind === "image") {
    const image = el("img", { alt: `Image in ${field.name}`, src: field.source, title: field.text });
    image.onload = () => image.classList.toggle("tiny", image.naturalWidth < 120);
    return image;
  }
  if (field.kind === "audio")
    return el("audio", {
      controls: true,
      preload: "metadata",
      src: field.source,
      "aria-label": `Sound in ${field.name}`,
    });
  if (field.kind === "tokens") {
    const share =
      field.num_counted === null ? "" : `: ${whole(field.num_counted)} count for the loss, marked`;
    const spans = field.spans.map((each) =>
      el("span", { class: each.counted === null ? null : each.counted ? "counted" : "left-out" }, each.text),
    );
    return el(
      "div",
      { class: "stack tight tokens" },
      el("p", { class: "small soft" }, `${count(field.num, "token")}${share}`),
      el("pre", { tabIndex: 0 }, spans),
    );
  }
  if (field.kind === "text") return el("pre", field.text.length > 500 ? { tabIndex: 0 } : {}, field.text);
  return el("p", { class: "small wrap mono" }, field.text);
}
