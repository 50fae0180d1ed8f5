// Keeps the picker's numbers live. Without this file the form works the same with the numbers of when it was opened.
"use strict";
(() => {
  const picker = document.getElementById("mw-picker");
  if (!picker) return;
  const EVERY = 2000;
  const HELPED = ["not_in_quota"]; // options.py: HELPED_BY_PREEMPTIBLE
  const form = picker.closest("form");
  const live = document.getElementById("mw-live");
  const rows = () => [...picker.querySelectorAll(".mw-row")];
  const radio = (row) => row.querySelector("input[type=radio]");
  const box = (row) => row.querySelector("input[type=checkbox]");

  const helped = (offer) =>
    offer.code === "refused" && offer.reason !== null && HELPED.includes(offer.reason.code);

  const badge = (offer) => {
    if (offer.code === "ready_now") return "Ready now";
    if (offer.code === "ready_after_reclaim")
      return offer.seconds === null ? "Ready soon" : `Ready in ≤ ${offer.seconds} s`;
    if (offer.code === "waits") return "Would wait";
    return helped(offer) ? "Beyond quota" : "Not available";
  };

  const told = (offer) => (offer.message.replace(/\.$/, "") === badge(offer) ? "" : offer.message);

  const set = (node, text) => {
    if (node && node.textContent !== text) node.textContent = text;
  };

  function showOffer(row, offer) {
    const refused = offer === undefined || offer.code === "refused";
    const help = offer !== undefined && helped(offer);
    row.dataset.code = offer ? offer.code : "refused";
    set(row.querySelector(".mw-badge"), offer ? badge(offer) : "Not available");
    set(row.querySelector(".mw-message"), offer ? told(offer) : "This is no longer offered to you.");
    const label = row.querySelector(".mw-preemptible");
    label.hidden = !help;
    box(row).disabled = !help;
    if (!help) box(row).checked = false;
    disable(row, refused && !box(row).checked, help);
  }

  function disable(row, off, help) {
    radio(row).disabled = off;
    if (off) radio(row).checked = false;
    if (off && !help) row.setAttribute("aria-disabled", "true");
    else row.removeAttribute("aria-disabled");
  }

  function showTeam(team, usage) {
    const end = usage.limit ?? Math.max(usage.reserved, usage.used);
    const scale = end ? 100 / end : 0;
    const limit = usage.limit === null ? "no limit" : `limit ${usage.limit}`;
    const text = `${usage.used} in use · ${usage.reserved} reserved · ${limit}`;
    set(team.querySelector(".mw-team-text"), text);
    team.querySelector("svg").setAttribute("aria-label", text);
    let x = 0;
    for (const [name, gpus] of [
      ["guaranteed", usage.guaranteed],
      ["in-quota", usage.in_quota],
      ["borrowed", usage.borrowed],
    ]) {
      const part = team.querySelector(`.mw-${name}`);
      const width = Math.min(gpus * scale, 100 - x);
      part.setAttribute("x", x.toFixed(2));
      part.setAttribute("width", width.toFixed(2));
      x += width;
    }
  }

  function show(table) {
    const offers = new Map(table.offers.map((o) => [`${o.team ?? ""}/${o.profile}`, o]));
    for (const row of rows()) showOffer(row, offers.get(row.dataset.queue));
    for (const usage of table.usage) {
      for (const team of picker.querySelectorAll(".mw-team"))
        if (team.dataset.team === usage.team) showTeam(team, usage);
    }
    const known = new Set(rows().map((row) => row.dataset.queue));
    return [...offers.keys()].every((queue) => known.has(queue));
  }

  function say(text, stale) {
    if (!live) return;
    live.hidden = false;
    live.classList.toggle("stale", stale);
    set(live, text);
  }

  // -- a box that is ticked opens and chooses its row ---------------------------------------------------------
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

  // -- a choice that went away must not be sent ---------------------------------------------------------------
  if (form) {
    form.addEventListener("submit", (event) => {
      if (rows().some((row) => radio(row).checked && !radio(row).disabled)) return;
      event.preventDefault();
      event.stopImmediatePropagation();
      const first = rows().find((row) => !radio(row).disabled);
      if (first) radio(first).focus();
    }, true);
  }

  let url = picker.dataset.live;
  let misses = 0;

  async function update() {
    try {
      const answer = await fetch(url, { credentials: "omit", cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) {
        url = null;
        say("reload for live numbers", true);
        return;
      }
      if (!answer.ok) throw new Error(String(answer.status));
      const table = await answer.json();
      if (table.ticket) url = url.replace(/ticket=.*$/, `ticket=${encodeURIComponent(table.ticket)}`);
      misses = 0;
      say(show(table) ? "live" : "more is offered now: reload", false);
    } catch (_) {
      misses += 1;
      if (misses > 2) say("numbers may be old", true);
    }
  }

  async function follow() {
    while (url) {
      await new Promise((done) => setTimeout(done, EVERY));
      if (!document.hidden && url) await update();
    }
  }

  if (url) {
    say("live", false);
    follow();
  }
})();
