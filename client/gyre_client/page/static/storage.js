// Storage, cache and memory of each daemon: how fast the first byte came, and who has how much.
import {
  bytes,
  count,
  el,
  empty,
  facts,
  keyed,
  percent,
  say,
  seconds,
  shareBar,
  table,
  whole,
} from "./parts.js";

// The heat map's steps, in seconds: a local disk, a near server, object storage, a slow one.
const STEPS = [0.002, 0.02, 0.1, 0.5];
const SCALE = ["under 2 ms", "2 – 20 ms", "20 – 100 ms", "100 – 500 ms", "500 ms and more"];
const MOST_ROWS = 12;

export function storageView(root, page) {
  const filter = el("input", {
    type: "search",
    placeholder: "Filter endpoints and mounts  ( / )",
    "aria-label": "Filter endpoints and mounts",
    on: { input: () => page.state && update(page.state) },
  });
  const list = el("div", { class: "stack" });
  root.append(filter, list);

  function update(state) {
    keyed(
      list,
      state.daemons,
      (each) => each.number,
      daemonPart,
      (node, each) => node.set(each, filter.value.toLowerCase()),
    );
  }
  return { update };
}

function daemonPart() {
  const title = el("h1", { class: "wrap" }),
    state = el("p", { class: "soft" }),
    heat = el("div", { class: "heat" }),
    none = el("p", { class: "soft" });
  const scale = el(
    "div",
    { class: "scale" },
    SCALE.map((text, index) => el("span", {}, el("i", { class: `h${index}` }), text)),
    el("span", {}, el("i", { class: "none" }), "nothing asked"),
  );
  const endpoints = el("div"),
    cache = el("div", { class: "stack" }),
    memory = el("div", { class: "stack" });
  const more = el("p", { class: "small soft" });
  const node = el(
    "div",
    { class: "stack" },
    el("div", { class: "stack tight" }, title, state),
    el(
      "section",
      { class: "card stack" },
      el(
        "div",
        { class: "row between" },
        el("h2", {}, "Time to the first byte, the last five minutes"),
        el("span", { class: "small soft" }, "the newest at the right"),
      ),
      heat,
      none,
      more,
      scale,
      endpoints,
    ),
    el(
      "div",
      { class: "halves" },
      el("section", { class: "card stack" }, el("h2", {}, "Memory and windows by user"), memory),
      el("section", { class: "card stack" }, el("h2", {}, "Node cache"), cache),
    ),
  );
  const once = changed();
  node.set = (daemon, words) => {
    say(title, daemon.name);
    say(
      state,
      daemon.error ||
        `gyred ${daemon.version}, up ${seconds(daemon.uptime_s)}${daemon.draining ? ", draining" : ""}; ${count(daemon.num_datasets, "dataset")}${daemon.measuring.length ? `; measuring ${daemon.measuring.join("; ")}` : ""}`,
    );
    const rows = daemon.latency.rows.filter((row) => row.name.toLowerCase().includes(words));
    keyed(
      heat,
      rows.slice(0, MOST_ROWS),
      (row) => row.name,
      heatRow,
      (row, each) => row.set(each, daemon.latency),
    );
    none.hidden = rows.length > 0;
    say(
      none,
      daemon.num_hidden || !daemon.latency.rows.length
        ? "No endpoint or mount is shown: none was read lately, or this user may not read every dataset."
        : "None matches.",
    );
    say(more, rows.length > MOST_ROWS ? `and ${rows.length - MOST_ROWS} more: use the filter` : "");
    once(endpoints, [daemon.endpoints, daemon.mounts, words], () => endpointTables(daemon, words));
    once(cache, daemon.cache, () => cacheParts(daemon.cache));
    once(memory, [daemon.users, daemon.reserved_bytes, daemon.abandoned_bytes], () => memoryParts(daemon));
  };
  return node;
}

/** Returns a function that draws into a node only where its data has changed. */
function changed() {
  const before = new Map();
  return (node, data, draw) => {
    const now = JSON.stringify(data);
    if (before.get(node) !== now) node.replaceChildren(...[draw()].flat());
    before.set(node, now);
  };
}

function heatRow(row) {
  const cells = el("div", { class: "cells", role: "img" }),
    now = el("span", { class: "num heat-now" });
  const node = el(
    "div",
    { class: "heat-row" },
    el("span", { class: "cut", title: `${row.name}: ${row.kind}` }, row.name),
    cells,
    now,
  );
  node.set = (each, latency) => {
    const missing = latency.num_columns - each.cells.length,
      values = [...Array(missing).fill(null), ...each.cells];
    while (cells.children.length < values.length) cells.append(el("i"));
    values.forEach((value, index) => {
      const cell = cells.children[index],
        step = STEPS.findIndex((bound) => value < bound);
      cell.className = value === null ? "" : `h${step < 0 ? STEPS.length : step}`;
      cell.title =
        value === null
          ? ""
          : `${seconds(value)}, ${seconds((values.length - 1 - index) * latency.column_s)} ago`;
    });
    const last = each.cells.findLast((value) => value !== null);
    say(now, last === undefined ? "–" : seconds(last));
    cells.setAttribute(
      "aria-label",
      `${each.name}: ${last === undefined ? "nothing asked" : `${seconds(last)} to the first byte`}`,
    );
  };
  return node;
}

function endpointTables(daemon, words) {
  const parts = [],
    endpoints = daemon.endpoints
      .filter((each) => each.name.toLowerCase().includes(words))
      .slice(0, MOST_ROWS),
    mounts = daemon.mounts.filter((each) => each.path.toLowerCase().includes(words)).slice(0, MOST_ROWS);
  if (endpoints.length)
    parts.push(
      table(
        ["Endpoint", "#In flight", "#Limit", "#Waiting", "#Retries left"],
        endpoints.map((each) => [
          el("span", { class: "wrap" }, each.name),
          whole(each.num_in_flight),
          whole(each.limit),
          whole(each.num_waiting),
          whole(each.num_retries_left),
        ]),
      ),
    );
  if (mounts.length)
    parts.push(
      table(
        ["Mount", "File system", "Now", "#Median read"],
        mounts.map((each) => [
          el("span", { class: "wrap" }, each.path),
          each.file_system,
          each.hangs_since_s === null
            ? each.slow
              ? "slow"
              : "fast"
            : `no answer for ${seconds(each.hangs_since_s)}`,
          seconds(each.read_s),
        ]),
      ),
    );
  return parts;
}

function cacheParts(cache) {
  if (!cache) return empty("This daemon has no node cache, or this user may not see it.");
  const reads = Math.max(1, cache.num_hits + cache.num_joined + cache.num_misses);
  const bar = shareBar(["trainer", "processor", "storage"]),
    shares = [cache.num_hits / reads, cache.num_joined / reads, cache.num_misses / reads];
  bar.set(shares, `${percent(shares[0])} hits, ${percent(shares[1])} joined, ${percent(shares[2])} missed`);
  return [
    bar,
    el(
      "div",
      { class: "keys" },
      el("span", { class: "key trainer" }, `${percent(shares[0])} found in the cache`),
      el("span", { class: "key processor" }, `${percent(shares[1])} joined another request`),
      el("span", { class: "key storage" }, `${percent(shares[2])} asked of the storage`),
    ),
    facts([
      ["In memory", bytes(cache.memory_bytes)],
      ["On disk", bytes(cache.disk_bytes)],
      ["Fetched", `${bytes(cache.num_bytes_fetched)} in ${count(cache.num_blocks_fetched, "block")}`],
      ["Evicted", count(cache.num_evicted, "block")],
      ["Past the cache", count(cache.num_past, "read")],
      ["Damaged", cache.num_corrupt ? count(cache.num_corrupt, "block") : ""],
    ]),
  ];
}

function memoryParts(daemon) {
  if (!daemon.users.length) return empty("No session is open.");
  const parts = daemon.users.slice(0, MOST_ROWS).map((user) => {
    const bar = shareBar(["accent"], "thin");
    bar.set(
      [user.memory_bytes / Math.max(daemon.budget_bytes, 1)],
      `${bytes(user.memory_bytes)} of ${bytes(daemon.budget_bytes)}`,
    );
    return el(
      "div",
      { class: "stack tight" },
      el(
        "div",
        { class: "row between" },
        el("b", {}, user.user),
        el(
          "span",
          { class: "small soft" },
          `${bytes(user.memory_bytes)} · ${count(user.num_sessions, "session")} · ${whole(user.ready)} of ${whole(user.window)} batches ready`,
        ),
      ),
      bar,
    );
  });
  const abandoned = daemon.abandoned_bytes
    ? `; ${bytes(daemon.abandoned_bytes)} kept by clients whose sessions are over`
    : "";
  return [
    ...parts,
    el(
      "p",
      { class: "small soft" },
      `${bytes(daemon.reserved_bytes)} of the budget of ${bytes(daemon.budget_bytes)} is reserved${abandoned}.`,
    ),
  ];
}
