// Jobs with one verdict each; an open one has its ranks, its last reads, and why a step took long.
import {
  Latest,
  STALLS,
  bytes,
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
  table,
  tile,
  whole,
} from "./parts.js";

const KINDS = {
  storage: "storage",
  processor: "processors",
  trainer: "at the trainer's pace",
  client: "waits",
  idle: "idle",
  new: "new",
};
const FILTERS = [
  ["all", "All"],
  ["storage", "Wait for storage"],
  ["processor", "Wait for processors"],
  ["trainer", "Wait for nothing"],
];
const MOST = 40;
// A read counts as slow where it failed, or took this many times the median.
const SLOW = 2;

export function jobsView(root, page, values) {
  let kind = "all",
    open = values.job ?? null,
    most = MOST,
    shown = [];
  const tiles = ["jobs", "batches a second", "data a second", "memory of batches"].map(tile);
  const filter = el("input", {
    type: "search",
    placeholder: "Filter jobs  ( / )",
    "aria-label": "Filter jobs",
    on: { input: () => draw() },
  });
  const chips = FILTERS.map(([name, text]) =>
    el(
      "button",
      {
        on: {
          click: () => {
            kind = name;
            draw();
          },
        },
      },
      text,
    ),
  );
  const list = el("div", { class: "stack" }),
    none = empty("");
  const more = el("button", {
    on: {
      click: () => {
        most = Infinity;
        draw();
      },
    },
  });
  const legend = el(
    "div",
    { class: "keys" },
    STALLS.map(([name, words]) => el("span", { class: `key ${name}` }, words)),
    el("span", { class: "key" }, "neither waits"),
  );
  const silent = el("div", { class: "stack" });
  root.append(
    silent,
    el("div", { class: "tiles" }, tiles),
    el("div", { class: "row" }, filter, el("div", { class: "chips" }, chips)),
    legend,
    list,
    none,
    more,
  );

  function matches(job) {
    const text = `${job.job} ${job.dataset} ${job.user} ${job.where}`.toLowerCase();
    const its = ["new", "idle", "client"].includes(job.verdict.kind) ? "other" : job.verdict.kind;
    return (
      (kind === "all" || kind === its) &&
      filter.value
        .toLowerCase()
        .split(" ")
        .every((word) => text.includes(word))
    );
  }

  function draw() {
    const state = page.state;
    if (!state) return;
    const several = state.daemons.length > 1,
      found = state.jobs.filter(matches);
    const sum = (name) => state.jobs.reduce((total, job) => total + job[name], 0);
    const total = (name) => state.daemons.reduce((all, each) => all + each[name], 0);
    const ranks = sum("num_ranks"),
      hidden = total("num_hidden");
    tiles[0].set(
      whole(state.jobs.length),
      `${state.jobs.length === 1 ? "job" : "jobs"}, ${count(ranks, "rank")}${hidden ? `; ${count(hidden, "session")} of other users` : ""}`,
    );
    tiles[1].set(short(sum("batches_per_s")));
    tiles[2].set(bytes(sum("bytes_per_s")));
    tiles[3].set(bytes(total("reserved_bytes")), `memory reserved, of ${bytes(total("budget_bytes"))}`);
    chips.forEach((chip, index) => chip.setAttribute("aria-pressed", kind === FILTERS[index][0]));
    shown = found.slice(0, most);
    keyed(
      list,
      shown,
      (job) => job.key,
      (job) => jobCard(job, page, () => toggle(job.key)),
      (card, job) => card.set(job, job.key === open, several ? state.daemons[job.daemon].name : ""),
    );
    none.hidden = found.length > 0;
    say(
      none,
      state.jobs.length
        ? "No job matches."
        : state.daemons.every((each) => each.error)
          ? ""
          : "No job reads now. Its first batch makes it appear here.",
    );
    more.hidden = found.length <= most;
    say(more, `Show all ${found.length} jobs`);
    keyed(
      silent,
      state.daemons.filter((each) => each.error),
      (each) => each.number,
      () => el("p", { class: "error", role: "alert" }),
      (node, each) => say(node, each.error),
    );
  }

  function toggle(key) {
    open = open === key ? null : key;
    page.keep(open ? { job: open } : {});
    draw();
  }

  return {
    update: draw,
    open(next) {
      open = next.job ?? null;
      draw();
    },
    key(event) {
      const buttons = shown.map((job) => list.itsKeys.get(job.key).button);
      const at = buttons.indexOf(document.activeElement);
      if (event.key === "j" && buttons.length) buttons[Math.min(at + 1, buttons.length - 1)].focus();
      else if (event.key === "k" && buttons.length) buttons[Math.max(at - 1, 0)].focus();
      else return false;
      return true;
    },
  };
}

function jobCard(job, page, toggle) {
  const name = el("button", { class: "text job-name", on: { click: toggle } }, job.job);
  const about = el("p", { class: "small soft wrap" }),
    tag = el("span", { class: "tag" }),
    words = el("p", { class: "wrap" });
  const bar = shareBar(["storage", "processor", "trainer"]),
    rate = el("b"),
    rest = el("div", { class: "small soft" });
  const card = el(
    "article",
    { class: "card job" },
    el(
      "div",
      { class: "job-head" },
      el("div", { class: "stack tight" }, name, about),
      el(
        "div",
        { class: "stack tight job-verdict" },
        el("div", { class: "row" }, tag, el("div", { class: "grow" }, words)),
        bar,
      ),
      el("div", { class: "job-rate" }, rate, rest),
    ),
  );
  card.button = name;
  let detail = null;
  card.set = (now, isOpen, where) => {
    say(about, [now.dataset, count(now.num_ranks, "rank"), now.user, where].filter(Boolean).join(" · "));
    tag.className = `tag ${now.verdict.kind}`;
    say(tag, KINDS[now.verdict.kind]);
    say(words, now.verdict.text);
    const shares = STALLS.map(([kind]) => now.shares[kind]);
    bar.set(shares, STALLS.map(([, text], index) => `${percent(shares[index])} ${text}`).join(", "));
    say(rate, `${short(now.batches_per_s)} batches/s`);
    say(rest, `${bytes(now.bytes_per_s)}/s · step ${whole(now.step)}`);
    name.setAttribute("aria-expanded", isOpen);
    card.classList.toggle("open", isOpen);
    if (isOpen && !detail) card.append((detail = jobDetail(page)));
    if (!isOpen && detail) {
      detail.remove();
      detail = null;
    }
    detail?.set(now);
  };
  return card;
}

function jobDetail(page) {
  const advice = el("p", { class: "soft" }),
    ranks = el("div"),
    places = el("div", { class: "row" });
  const strip = readStrip(page);
  const toSamples = el("button", {}, "Samples of the last step"),
    toOrder = el("button", {}, "Order, and where it resumes");
  const node = el(
    "div",
    { class: "detail" },
    advice,
    strip,
    ranks,
    places,
    el("div", { class: "row" }, toSamples, toOrder),
  );
  let before = "";
  node.set = (job) => {
    advice.hidden = !job.verdict.advice;
    say(advice, job.verdict.advice);
    toSamples.onclick = () => page.go("samples", { job: job.key, step: Math.max(0, job.step - 1) });
    toOrder.onclick = () => page.go("order", { job: job.key });
    strip.set(job);
    const rows = job.ranks.map((each) => [
      el(
        "span",
        { class: "nowrap" },
        `${each.rank} of ${job.world_size}${each.peer === null || ranksOf(job) === job.num_ranks ? "" : `, peer ${each.peer}`}`,
      ),
      `${each.ready} of ${each.window}`,
      whole(each.in_flight),
      whole(each.held),
      percent(each.starved),
      whole(each.step),
      `${bytes(each.memory_bytes)} of ${bytes(each.memory_limit_bytes)}`,
      each.shared_memory ? "shared memory" : "gRPC",
    ]);
    const now = JSON.stringify(job.ranks);
    if (now !== before)
      ranks.replaceChildren(
        table(["Rank", "#Window ready", "#In flight", "#Held", "#Starved", "#Step", "#Memory", "By"], rows),
      );
    before = now;
    const chips = [
      job.where,
      ...job.transforms.map((each) => `transform ${each}`),
      job.filled === null ? "" : `${percent(job.filled)} of the sequences filled`,
      job.num_substitutes ? `${count(job.num_substitutes, "corrupt sample")} replaced` : "",
    ].filter(Boolean);
    keyed(
      places,
      chips,
      (text) => text,
      (text) => el("span", { class: "chip", title: text }, text),
      () => {},
    );
  };
  return node;
}

const ranksOf = (job) => new Set(job.ranks.map((each) => each.rank)).size;

/** Returns the strip of a job's last reads: a bar each, high where it took long; a bar says why. */
function readStrip(page) {
  const bars = el("div", {
    class: "strip",
    role: "group",
    "aria-label": "Last reads, the newest at the right",
  });
  const words = el("p", { class: "small soft" }),
    reason = el("div", { class: "stack" });
  const node = el(
    "section",
    { class: "stack" },
    el("div", { class: "row between" }, el("h3", {}, "Last reads"), words),
    bars,
    reason,
  );
  const latest = new Latest(),
    reading = new Latest();
  let busy = false,
    chosen = null,
    key = "";

  async function why(read) {
    chosen = `${read.first_step}`;
    mark();
    try {
      const found = await latest.run("why", { job: key, step: read.first_step });
      reason.replaceChildren(...found.slice(0, 4).map((timing) => whyText(timing, page, key)));
    } catch (error) {
      if (!isAborted(error)) reason.replaceChildren(failure(error));
    }
  }

  const mark = () => {
    for (const bar of bars.children) bar.setAttribute("aria-pressed", bar.dataset.step === chosen);
  };

  bars.addEventListener("keydown", (event) => {
    const next =
      event.key === "ArrowLeft"
        ? "previousElementSibling"
        : event.key === "ArrowRight"
          ? "nextElementSibling"
          : null;
    if (!next || !event.target[next]) return;
    event.target[next].focus();
    event.preventDefault();
    event.stopPropagation();
  });

  node.set = async (job) => {
    key = job.key;
    if (busy) return;
    busy = true;
    try {
      const found = await reading.run("reads", { job: job.key }),
        most = Math.max(8, Math.floor(bars.clientWidth / 10));
      const reads = found.slice(-most),
        sorted = reads.map((each) => each.total_s).sort((a, b) => a - b);
      const median = sorted[sorted.length >> 1] ?? 0,
        top = Math.max(sorted.at(-1) ?? 0, 3 * median, 1e-6);
      const isSlow = (read) => read.failed || read.total_s > SLOW * median;
      keyed(
        bars,
        reads,
        (read) => `${read.first_step}:${read.stop_step}`,
        (read) => el("button", { on: { click: () => why(read) } }),
        (bar, read) => {
          bar.className = `${read.bound}${isSlow(read) ? " slow" : ""}`;
          bar.dataset.step = read.first_step;
          bar.style.height = `${Math.max(4, 100 * Math.sqrt(read.total_s / top))}%`;
          const steps =
            read.stop_step - read.first_step > 1
              ? `steps ${whole(read.first_step)} to ${whole(read.stop_step - 1)}`
              : `step ${whole(read.first_step)}`;
          bar.title = `${steps}: ${seconds(read.total_s)}, most of it ${read.bound}${read.awaited ? "; the trainer waited" : ""}`;
          bar.setAttribute("aria-label", bar.title);
          bar.tabIndex = read === reads.at(-1) ? 0 : -1;
        },
      );
      mark();
      const slow = reads.filter(isSlow).length,
        waited = reads.filter((each) => each.awaited).length;
      say(
        words,
        reads.length
          ? `median ${seconds(median)} · ${slow} slow · the trainer waited for ${waited} of ${reads.length} · choose a bar to see why`
          : "none is recorded yet",
      );
    } catch (error) {
      say(words, error.message);
    } finally {
      busy = false;
    }
  };
  return node;
}

function whyText(timing, page, key) {
  const copying = Math.max(0, timing.read_s - timing.storage_s),
    rest = Math.max(0, timing.total_s - timing.read_s - timing.finish_s);
  const parts = [
    ["storage", "waiting for storage", timing.storage_s],
    ["processor", "copying", copying],
    ["accent", "checks and decoding", timing.finish_s],
    ["client", "other waits", rest],
  ];
  const bar = shareBar(
    parts.map((each) => each[0]),
    "thin",
  );
  bar.set(
    parts.map((each) => each[2] / Math.max(timing.total_s, 1e-9)),
    parts.map((each) => `${each[1]} ${seconds(each[2])}`).join(", "),
  );
  const steps =
    timing.stop_step - timing.first_step > 1
      ? `Steps ${whole(timing.first_step)} to ${whole(timing.stop_step - 1)}, read together`
      : `Step ${whole(timing.first_step)}`;
  const slowest = timing.slowest,
    sorts = [
      ["joined", "shared with another read"],
      ["refused", "refused"],
      ["retries", "sent again"],
      ["hedges", "sent twice for being late"],
    ];
  const requests = timing.num_requests
    ? [
        `${whole(timing.num_requests)}, ${bytes(timing.num_bytes)} in all`,
        ...sorts
          .filter(([name]) => timing[`num_${name}`])
          .map(([name, text]) => `${whole(timing[`num_${name}`])} ${text}`),
      ].join("; ")
    : null;
  const pairs = [
    [
      "Took",
      `${seconds(timing.total_s)}, ${seconds(timing.ago_s)} ago; ${timing.awaited ? "the trainer waited for it" : "no trainer waited for it"}`,
    ],
    ["Requests", requests],
  ];
  if (slowest)
    pairs.push([
      "Slowest",
      `${slowest.shard}, bytes ${whole(slowest.start)} to ${whole(slowest.stop)}: ${[
        [slowest.queue_s, "in the queue"],
        [slowest.tried_s, "in failed tries"],
        [slowest.first_byte_s, "to the first byte"],
        [slowest.body_s, "for the body"],
      ]
        .filter(([value]) => value >= 1e-6)
        .map(([value, text]) => `${seconds(value)} ${text}`)
        .join(", ")}`,
    ]);
  if (timing.error) pairs.push(["Failed", timing.error]);
  const list = el(
    "dl",
    { class: "facts" },
    pairs.filter((pair) => pair[1]).map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]),
  );
  const samples = el(
    "button",
    { on: { click: () => page.go("samples", { job: key, step: timing.first_step }) } },
    "Its samples",
  );
  return el(
    "div",
    { class: "stack card" },
    el(
      "div",
      { class: "row between" },
      el("h3", {}, `${steps}, rank ${timing.rank} of ${timing.world_size}`),
      samples,
    ),
    bar,
    el(
      "div",
      { class: "keys" },
      parts.map(([name, text, value]) => el("span", { class: `key ${name}` }, `${text} ${seconds(value)}`)),
    ),
    list,
  );
}
