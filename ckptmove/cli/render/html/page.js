// Start the page: draw the sections as they come into view, filter tables, copy commands.

const drawn = new Map();

/** Run after the page is painted. */
function afterPaint(work) {
  requestAnimationFrame(() => setTimeout(work));
}

/** Draw the table of a section, once, and its map after the page is painted: the map takes longer; its table. */
function drawSection(section) {
  if (drawn.has(section)) return drawn.get(section);
  const place = section.querySelector(".table");
  if (!place) return null;
  const data = readTable(place.dataset.source);
  const table = new Table(place, data);
  drawn.set(section, table);
  const map = section.querySelector(".treemap");
  if (map) afterPaint(() => new Treemap(map, data, (row) => table.reveal(row)));
  return table;
}

/** Copy a text; without the permission, by a selection. */
async function copy(button) {
  const source = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(source.textContent);
  } catch {
    getSelection().selectAllChildren(source);
    document.execCommand("copy");
    getSelection().removeAllRanges();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.matches(".copy")) copy(button);
  if (button?.dataset.filter) {
    const table = drawSection(button.closest("section"));
    table.filter(button.dataset.filter);
    table.view.scrollIntoView({ block: "center" });
    table.search.focus({ preventScroll: true });
  }
});

document.documentElement.classList.add("scripted");
const sections = document.querySelectorAll("section");
const observer = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting) drawSection(target);
}, { rootMargin: "400px" });
sections.forEach((section) => observer.observe(section));
if (sections.length) drawSection(sections[0]);
afterPaint(() => { document.documentElement.dataset.drawn = Math.round(performance.now()); });
