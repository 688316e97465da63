// Follows the stream of the page: what new rows change goes into charts, heading and tiles at once; a page drawn
// anew is fetched and put in place of this one, where it differs. What the reader has opened, chosen or scrolled stays.
const {events, position} = document.body.dataset;
const address = new URL(events, location), note = document.createElement("p");
let version = position.split(".")[0], work = Promise.resolve();
const PARTS = ["header", "#before", ".plots", "#after"];  // of the page, which are exchanged where they differ
address.searchParams.set("from", position);
note.className = "note";
note.setAttribute("aria-live", "polite");
document.querySelector("footer").before(note);
const charts = document.getElementById("charts") ? import("./draw.js") : null;

const source = new EventSource(address);
const soon = action => event => { work = work.then(() => action(event)).catch(error => { note.textContent = String(error); }); };

source.addEventListener("rows", soon(async event => {
  if (event.lastEventId.split(".")[0] !== version) return;
  const {points, end, html} = JSON.parse(event.data);
  for (const [id, inner] of Object.entries(html)) {
    const before = document.getElementById(id), after = before.cloneNode();
    after.innerHTML = inner;
    renew(before, after);
  }
  if (charts) await (await charts).add(points, end);
}));

source.addEventListener("again", soon(async event => {
  if (event.lastEventId.split(".")[0] === version) return;
  const answer = await fetch(location.href);
  if (!answer.ok) throw new Error("The page can't be drawn at the moment: load it again.");
  const next = new DOMParser().parseFromString(await answer.text(), "text/html");
  const ids = (page, those) => [...page.querySelectorAll(those)].map(one => one.id).join();
  const scripts = page => [...page.querySelectorAll("script[src]")].map(one => one.getAttribute("src")).join();
  if (scripts(next) !== scripts(document)) return location.reload();  // others are needed, or the server has new ones
  const others = ids(next, ".chart") !== ids(document, ".chart");
  version = next.body.dataset.position.split(".")[0];
  const data = document.getElementById("charts"), before = data?.textContent;
  if (others) document.querySelector(".plots").replaceWith(next.querySelector(".plots"));
  for (const part of PARTS) renew(document.querySelector(part), next.querySelector(part));
  const table = page => page.getElementById("data-of-experiments")?.textContent;
  if (table(next) !== table(document)) note.textContent = "The table has new results: load the page again.";
  const drawn = next.getElementById("charts");
  if (drawn) data.textContent = drawn.textContent;
  if (drawn && drawn.textContent !== before) await (await charts).renew(others);
}));

source.addEventListener("open", () => { note.textContent = ""; });
source.addEventListener("error", () => {
  note.textContent = source.readyState === EventSource.CLOSED
    ? "This page is not followed: the server refused its stream of events, or has ended. Load it again."
    : "The server does not answer; this page goes on when it does.";
});

// Makes `before` equal to `after`, piece by piece: what is equal stays. So do charts, and the table of a sweep.
function renew(before, after) {
  if (!before || !after || before.isEqualNode(after)) return;
  if (before.matches(".chart, #experiments, #chosen, #data-of-experiments")) return;
  const own = [...before.children], other = [...after.children];
  const texts = node => [...node.childNodes].some(child => child.nodeType === Node.TEXT_NODE && child.data.trim());
  if (own.length && own.length === other.length && own.every((child, n) => child.tagName === other[n].tagName)
      && !texts(before) && !texts(after)) return own.forEach((child, n) => renew(child, other[n]));
  const chosen = new Set([...before.querySelectorAll("input:checked")].map(input => input.value));
  before.replaceWith(after);
  for (const input of after.querySelectorAll("input[type=checkbox]")) input.checked = chosen.has(input.value);
}
