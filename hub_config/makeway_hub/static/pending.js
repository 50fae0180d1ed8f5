// Follows a pending start (phase with its clock, message, deadline) and stops exactly the server of this page.
// All times are seconds that the server tells: the browser's clock may be wrong.
import { duration } from "./formats.js";

const page = document.getElementById("mw-pending");
const bar = document.getElementById("progress-bar");
const message = document.getElementById("progress-message");
const until = document.getElementById("mw-until");
const log = document.getElementById("progress-log");
const stop = document.getElementById("stop-server-btn");
const again = document.getElementById("mw-again");
const phases = [...page.querySelectorAll(".mw-phases li")];
const { base, user, server, xsrf } = page.dataset;
const seen = new Set();
let deadline = null;
let earliest = null; // while the phase has no deadline: when its next step comes at the soonest
let wait = "";
let over = false;
let clocks = {};
let clocksAt = 0;

function showClocks() {
  // Only the present phase's clock runs on; while the page reads on from the beginning, it is the last one that does.
  const current = phases.find((item) => item.classList.contains("now"));
  const passed = over ? 0 : (performance.now() - clocksAt) / 1000;
  for (const item of phases) {
    const spent = clocks[item.dataset.phase];
    const shown = item.querySelector(".mw-phase-clock");
    shown.textContent = spent === undefined ? "" : duration(spent + (item === current ? passed : 0));
  }
}

function showProgress(percent) {
  bar.style.width = `${percent}%`;
  bar.parentElement.setAttribute("aria-valuenow", String(percent));
}

function showPhase(name, state = "now") {
  const at = phases.findIndex((item) => item.dataset.phase === name);
  if (at < 0) return;
  seen.add(name);
  phases.forEach((item, i) => {
    const before = seen.has(item.dataset.phase) ? "done" : "skipped";
    item.className = i < at ? before : i === at ? state : "";
    if (i === at) item.setAttribute("aria-current", "step");
    else item.removeAttribute("aria-current");
  });
}

function write(event) {
  const line = document.createElement("div");
  const time = document.createElement("time");
  if (event.after !== undefined) time.textContent = `after ${duration(event.after)}`;
  line.append(time, event.message || "");
  log.append(line);
}

function countDown() {
  const moment = deadline ?? earliest;
  if (moment === null || over) {
    until.hidden = true;
    return;
  }
  const seconds = Math.ceil((moment - performance.now()) / 1000);
  const words = deadline === null ? wait : "at the latest in";
  until.hidden = false;
  until.textContent = seconds > 0 ? `${words} ${duration(seconds)}` : "any moment now";
}

function end(text) {
  showClocks();
  over = true;
  source.close();
  countDown();
  stop.hidden = true;
  again.hidden = false;
  message.textContent = text;
}

function fail(event) {
  const current = phases.find((item) => item.classList.contains("now"));
  if (current) current.className = "failed";
  bar.classList.add("bg-danger");
  document.getElementById("mw-heading").textContent = "No notebook was started";
  end((event.message || "The start failed.").replace(/^Spawn failed: /, ""));
}

function onEvent(e) {
  const event = JSON.parse(e.data);
  if (over) return;
  if (event.ready) {
    showProgress(100);
    phases.forEach((item) => (item.className = seen.has(item.dataset.phase) ? "done" : "skipped"));
    message.textContent = "Ready. Opening it …";
    over = true;
    source.close();
    window.location.reload();
    return;
  }
  if (event.message) write(event);
  if (event.failed) {
    fail(event);
    return;
  }
  if (event.progress !== undefined) showProgress(event.progress);
  if (event.clocks) {
    clocks = event.clocks;
    clocksAt = performance.now();
  }
  if (event.phase) {
    showPhase(event.phase);
    deadline = event.within === undefined ? null : performance.now() + event.within * 1000;
    earliest = event.earliest === undefined ? null : performance.now() + event.earliest * 1000;
    wait = event.wait || "";
    countDown();
    showClocks();
  }
  if (event.message) message.textContent = event.message;
}

async function stopServer() {
  over = true; // later events belong to a start that is being stopped
  stop.disabled = true;
  stop.textContent = "Stopping …";
  message.textContent = "Stopping and releasing the reserved GPUs …";
  countDown();
  const path = server ? `servers/${encodeURIComponent(server)}` : "server";
  try {
    const answer = await fetch(`${base}api/users/${encodeURIComponent(user)}/${path}`, {
      method: "DELETE",
      headers: { "X-XSRFToken": xsrf, Accept: "application/json" },
    });
    if (!answer.ok) {
      const problem = await answer.json().catch(() => ({}));
      throw new Error(problem.message || `the Hub answered ${answer.status}`);
    }
    phases.forEach((item) => (item.className = ""));
    showProgress(0);
    document.getElementById("mw-heading").textContent = "Stopped";
    write({ message: "Stopped." });
    end(
      answer.status === 202
        ? "The server is stopping; its GPUs are free once it has ended."
        : "Nothing was started, and no GPUs are reserved for you.",
    );
  } catch (error) {
    over = false;
    stop.disabled = false;
    stop.textContent = "Stop";
    message.textContent = `The start could not be stopped: ${error.message}. Try again, or stop it on the home page.`;
  }
}

const source = new EventSource(page.dataset.progress);
source.onmessage = onEvent;
source.onerror = () => {
  if (over) return;
  if (source.readyState === EventSource.CLOSED) setTimeout(() => window.location.reload(), 2000);
};
stop.addEventListener("click", stopServer);
setInterval(() => {
  countDown();
  if (!over) showClocks();
}, 500);
window._jupyterhub_page_loaded = true;
