// Keeps a page of Makeway in step with the service, over one event stream for all visible tabs of a login: one tab
// leads and has the stream, the others get its messages over a BroadcastChannel whose name only they know. The leader is
// found by messages alone, because Web Locks exist on HTTPS only. A hidden or frozen tab has no stream and leads nothing.
// What a page shows is said to be stale after two heartbeats that did not come.
"use strict";
window.Makeway = (() => {
  const meta = (name) => document.querySelector(`meta[name="makeway-${name}"]`)?.content ?? "";
  const prefix = meta("prefix");
  const xsrf = meta("xsrf");
  const live = document.getElementById("live");
  const pill = document.getElementById("mw-live");
  const { part = "", topic = "", source = "" } = live?.dataset ?? {};

  const STALE = 11000; // two heartbeats of 5 s that did not come, and a second
  const LEAD = 2000; // the leader says so as often, and the others say what they show
  const LOST = 5000; // without a word from the leader, another tab leads
  const QUIET = 700; // from one reading of a topic to the next
  const POLL = 10000; // without a stream that speaks, the page is read as often
  const AGAIN = 5000; // a page that shows the progress of a job is read as often
  const MAX_PAUSE = 30000;
  const SHORTEST = 3000;
  const soon = (most) => Math.random() * most;

  // -- what is shown, and since when ----------------------------------------------------------------------------
  let shownAt = Number(document.getElementById("mw-current")?.dataset.at ?? pill?.dataset.at ?? 0); // seconds, theirs
  let heard = Date.now();
  let stale = false;
  let broken = false;
  let polled = false;
  const clock = (seconds) =>
    new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
  const say = (state, words) => {
    if (!pill) return;
    pill.dataset.state = state;
    if (pill.textContent !== words) pill.textContent = words;
    document.body.classList.toggle("mw-stale", state === "stale");
  };
  const told = () => { // the last heartbeat was told so long ago; a clock that was set back starts anew
    if (Date.now() < heard) heard = Date.now();
    return Date.now() - heard;
  };
  const look = () => {
    if (!prefix || !pill) return;
    stale = told() > STALE;
    if (stale && polled) say("slow", `updated every ${POLL / 1000} s, as of ${clock(shownAt)}`);
    else if (stale) say("stale", `stale: as of ${clock(shownAt)}`);
    else if (broken) say("off", "reconnecting");
    else if (greeted && live) say("on", "live");
    else if (greeted) say("list", `as of ${clock(shownAt)}`);
  };
  let greeted = false;
  const alive = (at) => {
    heard = Date.now();
    greeted = true;
    broken = polled = false;
    if (at && live) shownAt = at;
    look();
  };

  // -- reading a part ---------------------------------------------------------------------------------------------
  const held = new Map(); // parts as the stream knows them: their version and lines, of all tabs where this one leads
  const CURRENT = /<div id="mw-current"[^>]*><\/div>\n?/;
  let draw = () => {};
  let after = Number(document.getElementById("mw-current")?.dataset.after ?? 0);
  let reading = null;
  let due = null;
  let last = 0;
  const read = async () => {
    last = Date.now();
    const answer = await fetch(`${prefix}live/${source}`, {
      headers: { "X-XSRFToken": xsrf, "HX-Request": "true", Accept: "text/html" },
    });
    if (answer.headers.get("HX-Refresh")) location.reload();
    if (answer.status === 403 || answer.status === 404) { gone(); return; }
    if (answer.status !== 200) throw new Error(`${answer.status}`);
    const text = await answer.text();
    const current = text.match(/data-after="(\d+)" data-at="([\d.]+)"/);
    if (current) shownAt = Number(current[2]);
    const body = text.replace(CURRENT, "");
    if (part) keep({ part, version: answer.headers.get("X-Makeway-Version"), text: body });
    draw(body);
  };
  const refresh = () => {
    if (!live || due !== null || document.hidden) return;
    due = setTimeout(async () => {
      due = null;
      if (reading) { refresh(); return; }
      reading = read().then(() => { polled = stale; }, () => { polled = false; });
      await reading;
      reading = null;
      look();
    }, Math.max(0, QUIET - (Date.now() - last)));
  };
  let left = false;
  const gone = () => { // a job that was removed, a team that the reader left: the page says so itself
    if (left) return;
    left = true;
    location.reload();
  };

  const keep = ({ part: name, version, base, text, edits }) => {
    if (text !== undefined) held.set(name, { version, lines: text.split("\n") });
    else {
      const known = held.get(name);
      if (known?.version !== base) return false;
      const lines = edits.flatMap((edit) => (typeof edit === "string" ? edit.split("\n") : known.lines.slice(edit[0], edit[0] + edit[1])));
      held.set(name, { version, lines });
    }
    return true;
  };

  // -- the messages of the stream, in every tab ---------------------------------------------------------------------
  const take = (kind, data) => {
    if (kind === "part") {
      const known = held.get(data.part)?.version === data.version || keep(data);
      if (data.part === part) {
        if (!known) post("want", { part });
        else if (!document.hidden) {
          shownAt = data.at;
          draw(held.get(part).lines.join("\n"));
        }
      }
    } else if (kind === "gone") {
      if (data.part === part) gone();
    } else if (kind === "changed") {
      if (data.after) after = Math.max(after, data.after);
      if (topic && data.topics.includes(topic)) refresh();
    }
    alive(kind === "beat" ? data.at : 0);
  };

  // -- one stream for all tabs ----------------------------------------------------------------------------------------
  const me = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
  // the page's token without what hides it in this page: two readers of the same login find the same
  const unmasked = (token) => {
    const [mask, hidden] = token.split(".").map((half) => atob((half ?? "").replace(/-/g, "+").replace(/_/g, "/")));
    return hidden ? [...hidden].map((char, at) => String.fromCharCode(char.charCodeAt(0) ^ mask.charCodeAt(at))).join("") : token;
  };
  let channel = null;
  const post = (kind, data = {}) => channel?.postMessage({ kind, from: me, ...data });
  const others = new Map(); // the other visible tabs: what they show, and when they last said so
  let leader = null;
  let leads = 0; // when the leader was last heard of
  let stream = null;
  let again = null;
  let failures = 0;
  let asked = "";

  const wanted = () => {
    const tabs = [{ part, topic, after }, ...others.values()];
    const of = (name) => [...new Set(tabs.map((tab) => tab[name]).filter(Boolean))].sort();
    return { parts: of("part"), topics: of("topic"), after: Math.min(...tabs.map((tab) => tab.after || Infinity)) };
  };
  const close = () => {
    clearTimeout(again);
    again = null;
    stream?.close();
    stream = null;
    asked = "";
  };
  const retry = () => {
    close();
    broken = true;
    look();
    const most = Math.min(MAX_PAUSE, SHORTEST * 2 ** Math.min(failures++, 10));
    again = setTimeout(open, 500 + soon(most)); // a hundred pages do not come back in the same moment
  };
  const open = () => {
    close();
    const { parts, topics, after: from } = wanted();
    asked = JSON.stringify([parts, topics]);
    const known = parts.map((name) => (held.get(name)?.version ? `${name}@${held.get(name).version}` : name));
    const query = new URLSearchParams({ _xsrf: xsrf, topics: topics.join(","), parts: known.join(",") });
    if (Number.isFinite(from) && from) query.set("after", from);
    const mine = (stream = new EventSource(`${prefix}api/v1/events?${query}`));
    let spoke = Date.now();
    const watch = setInterval(() => { // a proxy that keeps the stream back, or a network that went away
      if (stream !== mine) clearInterval(watch);
      else if (Math.abs(Date.now() - spoke) > STALE) retry();
    }, 1000);
    for (const kind of ["beat", "part", "changed", "gone"]) {
      mine.addEventListener(kind, (event) => {
        if (stream !== mine) return;
        spoke = Date.now();
        failures = 0;
        const data = JSON.parse(event.data);
        post("news", { news: kind, data });
        take(kind, data);
      });
    }
    mine.onerror = () => { if (stream === mine) retry(); };
  };
  let adjusting = null;
  const adjust = () => { // another tab came or went: the stream carries what all of them show
    if (leader !== me || adjusting !== null) return;
    adjusting = setTimeout(() => {
      adjusting = null;
      const { parts, topics } = wanted();
      if (leader === me && stream && asked !== JSON.stringify([parts, topics])) open();
    }, 100);
  };
  const lead = () => {
    if (!running) return;
    leader = me;
    leads = Date.now();
    post("lead");
    open();
  };
  const followed = (from) => {
    if (leader === me && from > me) { post("lead"); return; } // both lead: the one that came first stays
    if (leader === me) {
      close();
      broken = false;
    }
    if (leader !== from) hello();
    leader = from;
    leads = Date.now();
  };
  const hello = () => post("hello", { part, topic, after });
  const hear = ({ data: { kind, from, ...data } }) => {
    if (kind === "hello") {
      others.set(from, { ...data, heard: Date.now() });
      if (leader === me) { post("lead"); adjust(); }
    } else if (kind === "bye") {
      others.delete(from);
      if (from === leader) {
        leader = null;
        setTimeout(() => { if (leader === null) lead(); }, soon(200));
      } else adjust();
    } else if (kind === "lead") followed(from);
    else if (kind === "news" && from === leader) {
      leads = Date.now();
      take(data.news, data.data);
    } else if (kind === "want" && leader === me) {
      const known = held.get(data.part);
      if (known) post("news", { news: "part", data: { part: data.part, version: known.version, text: known.lines.join("\n"), at: shownAt } });
    }
  };

  let running = false;
  let ticking = null;
  const tick = () => {
    const now = Date.now();
    for (const [id, tab] of others) if (Math.abs(now - tab.heard) > 3 * LEAD) { others.delete(id); adjust(); }
    if (leader === me) post("lead");
    else {
      hello();
      if (Math.abs(now - leads) > LOST) { leader = null; setTimeout(() => { if (leader === null) lead(); }, soon(1000)); }
    }
  };
  const start = () => {
    if (running || !prefix || !pill || document.hidden) return;
    running = true;
    if (window.BroadcastChannel) {
      channel = new BroadcastChannel(`makeway ${unmasked(xsrf)}`);
      channel.onmessage = hear;
    }
    leader = null;
    leads = Date.now();
    hello();
    setTimeout(() => { if (leader === null) lead(); }, channel ? 40 + soon(80) : 0);
    ticking = setInterval(tick, LEAD);
    if (topic && greeted) refresh();
  };
  const stop = () => {
    if (!running) return;
    running = false;
    clearInterval(ticking);
    close();
    post("bye");
    channel?.close();
    channel = leader = null;
    others.clear();
    say("paused", `paused: as of ${clock(shownAt)}`); // what a frozen tab says, however long
  };
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
  document.addEventListener("freeze", stop);
  document.addEventListener("resume", start);
  addEventListener("pagehide", stop);
  addEventListener("pageshow", start);
  setInterval(() => { if (running) look(); }, 1000);
  setInterval(() => { if (running && stale) refresh(); }, POLL + soon(1000));
  if (prefix && pill) {
    if (!live) say("list", `as of ${clock(shownAt)}`);
    start();
  }
  // -- what changes without an event: how far a job is --------------------------------------------------------------
  setInterval(() => { if (live?.querySelector("[data-again]")) refresh(); }, AGAIN);

  return { meta, prefix, xsrf, live, onDraw: (drawer) => { draw = drawer; } };
})();
