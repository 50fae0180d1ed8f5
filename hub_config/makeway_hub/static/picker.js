// Keeps the picker's numbers live. Without this file the form works the same with the numbers of when it was opened.
import { duration, number } from "./formats.js";

const EVERY = 2000;
const PREEMPTIBLE_HELPS = ["not_in_quota"]; // options.py: PREEMPTIBLE_HELPS
const KINDS = ["guaranteed", "in_quota", "borrowed", "lent", "free"]; // makeway_api/bars.py: KINDS
const SVG = "http://www.w3.org/2000/svg";
const picker = document.getElementById("mw-picker");
const form = picker.closest("form");
const live = document.getElementById("mw-live");
const rows = () => [...picker.querySelectorAll(".mw-row")];
const radio = (row) => row.querySelector("input[type=radio]");
const box = (row) => row.querySelector("input[type=checkbox]");

const preemptibleHelps = (offer) =>
  offer.code === "refused" && offer.reason !== null && PREEMPTIBLE_HELPS.includes(offer.reason.code);

function badge(offer) {
  if (offer.code === "ready_now") return "Ready now";
  if (offer.code === "ready_after_reclaim")
    return offer.seconds === null ? "Ready soon" : `Ready in ≤ ${duration(offer.seconds)}`;
  if (offer.code === "ready_after_launch")
    return offer.seconds === null ? "Starts a machine" : `Ready in about ${duration(offer.seconds)}`;
  if (offer.code === "waits") return "Would wait";
  return preemptibleHelps(offer) ? "Over quota" : "Not available";
}

const details = (offer) => (offer.message.replace(/\.$/, "") === badge(offer) ? "" : offer.message);

function set(node, text) {
  if (node && node.textContent !== text) node.textContent = text;
}

function showOffer(row, offer) {
  if ("final" in row.dataset) return; // the spawner itself refuses it, whatever the service offers
  const refused = offer === undefined || offer.code === "refused";
  const helps = offer !== undefined && preemptibleHelps(offer);
  row.dataset.code = offer ? offer.code : "refused";
  set(row.querySelector(".mw-badge"), offer ? badge(offer) : "Not available");
  set(row.querySelector(".mw-message"), offer ? details(offer) : "It is no longer offered to you.");
  row.querySelector(".mw-preemptible").hidden = !helps;
  box(row).disabled = !helps;
  if (!helps) box(row).checked = false;
  disable(row, refused && !box(row).checked, helps);
}

function disable(row, off, helps) {
  radio(row).disabled = off;
  if (off) radio(row).checked = false;
  row.toggleAttribute("data-disabled", off && !helps);
}

// The geometry of makeway_api/bars.py: parts in order on one scale for all teams.
const endOf = (usage) =>
  Math.max(usage.limit ?? 0, usage.reserved, KINDS.reduce((sum, kind) => sum + usage[kind], 0));

function showTeam(team, usage, scale) {
  const limit = usage.limit === null ? "no limit" : `limit ${number(usage.limit)}`;
  const text = `${number(usage.used)} in use · ${number(usage.reserved)} reserved · ${limit}`;
  const svg = team.querySelector("svg");
  set(team.querySelector(".mw-team-text"), text);
  svg.setAttribute("aria-label", text);
  svg.querySelector(".mw-track").setAttribute("width", (endOf(usage) * scale).toFixed(2));
  for (const part of svg.querySelectorAll(".mw-part")) part.remove();
  const tick = svg.querySelector(".mw-tick");
  if (tick) tick.setAttribute("x", (usage.reserved * scale - 0.3).toFixed(2));
  let x = 0;
  for (const kind of KINDS.filter((name) => usage[name] > 0)) {
    const part = document.createElementNS(SVG, "rect");
    const values = { class: `mw-part mw-${kind.replace("_", "-")}`, x, width: usage[kind] * scale, height: 8 };
    for (const [name, value] of Object.entries(values))
      part.setAttribute(name, typeof value === "number" ? value.toFixed(2) : value);
    svg.insertBefore(part, tick);
    x += usage[kind] * scale;
  }
}

function showProblem(sentence) {
  const alert = document.getElementById("mw-problem");
  set(alert, sentence ?? "");
  alert.hidden = !sentence;
}

function show(table) {
  showProblem(table.problem);
  const offers = new Map(table.offers.map((o) => [`${o.team ?? ""}/${o.profile}`, o]));
  for (const row of rows()) showOffer(row, offers.get(row.dataset.queue));
  const teams = [...picker.querySelectorAll(".mw-team")];
  const usages = new Map(table.usage.map((usage) => [usage.team, usage]));
  const shown = teams.map((team) => usages.get(team.dataset.team)).filter((usage) => usage);
  const longest = Math.max(0, ...shown.map(endOf));
  for (const team of teams) {
    const usage = usages.get(team.dataset.team);
    if (usage) showTeam(team, usage, longest ? 100 / longest : 0);
  }
  const known = new Set(rows().map((row) => row.dataset.queue));
  return [...offers.keys()].every((queue) => known.has(queue));
}

function status(text, stale) {
  if (!live) return;
  live.hidden = false;
  live.classList.toggle("stale", stale);
  set(live, text);
}

// -- a ticked box opens and chooses its row ---------------------------------------------------------------------
for (const row of rows()) {
  if (row.dataset.code === "refused" && !box(row).checked) disable(row, true, !box(row).disabled);
  box(row).addEventListener("change", () => {
    const on = box(row).checked;
    disable(row, !on && row.dataset.code === "refused", true);
    radio(row).checked = on;
  });
  radio(row).addEventListener("change", () => {
    for (const other of rows()) {
      if (other === row || !box(other).checked) continue;
      box(other).checked = false;
      disable(other, other.dataset.code === "refused", !box(other).disabled);
    }
  });
}

// -- a choice that is no longer offered is not sent -------------------------------------------------------------
if (form) {
  form.addEventListener(
    "submit",
    (event) => {
      if (rows().some((row) => radio(row).checked && !radio(row).disabled)) return;
      event.preventDefault();
      event.stopImmediatePropagation();
      const first = rows().find((row) => !radio(row).disabled);
      if (first) radio(first).focus();
    },
    true,
  );
}

let url = picker.dataset.live;
let misses = 0;

async function update() {
  try {
    const answer = await fetch(url, { credentials: "omit", cache: "no-store" });
    if (answer.status === 401 || answer.status === 403) {
      url = null;
      status("reload for live numbers", true);
      return;
    }
    if (!answer.ok) throw new Error(String(answer.status));
    const table = await answer.json();
    if (table.ticket) url = url.replace(/ticket=.*$/, `ticket=${encodeURIComponent(table.ticket)}`);
    misses = 0;
    status(show(table) ? "live" : "more profiles are offered now: reload", false);
  } catch (_) {
    misses += 1;
    if (misses > 2) status("numbers may be old", true);
  }
}

async function follow() {
  while (url) {
    await new Promise((done) => setTimeout(done, EVERY));
    if (!document.hidden && url) await update();
  }
}

if (url) {
  status("live", false);
  follow();
}
