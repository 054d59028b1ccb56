// A map of the bytes by module: area is size, color is device, a red outline is a finding.
// The state of an optimizer is in the tile of its parameter.

/** Pixels of a tile that is divided, has a title, has a label, and is large enough for an outline of its own. */
const DIVIDED = 120;
const TITLED = { width: 56, height: 40 };
const LABELED = { width: 30, height: 15 };
const SEEN = 7;
const TITLE = 17;

/** The modules of a table, as nodes with their children, the largest first. */
function moduleTree(data) {
  const [name, device, bytes] = ["name", "device", "bytes"].map((title) => data.column(title));
  const { grave, at: found } = data.column("findings");
  const root = module("all", null);
  const heads = new Map([["", root]]);
  const nodes = [root];
  const at = (path) => {
    let node = heads.get(path);
    if (node) return node;
    const missing = [];
    let rest = path;
    for (; !node; node = heads.get(rest)) {
      const dot = rest.lastIndexOf(".");
      missing.push([rest, rest.slice(dot + 1)]);
      rest = dot < 0 ? "" : rest.slice(0, dot);
    }
    for (const [whole, label] of missing.reverse()) {
      const child = module(label, node);
      node.children.push(child);
      nodes.push(child);
      heads.set(whole, child);
      node = child;
    }
    return node;
  };
  const tied = new Set(data.tied);
  for (let row = 0; row < data.rows; row++) {
    const owner = data.owners[row];
    const tail = name.tails.words[name.tails.at[row]];
    const leaf = { label: tail, row, bytes: tied.has(row) ? 0 : bytes.values[row], grave: Number(grave[found[row]] !== ""), tensors: 1 };
    leaf.device = device.at[row];
    leaf.home = at(name.text(owner < 0 ? row : owner));
    leaf.home.children.push(leaf);
  }
  // Children come after their parents.
  for (const node of nodes.reverse()) settle(node, device.words.length);
  return root;
}

function module(label, parent) {
  return { label, parent, children: [], bytes: 0, grave: 0, tensors: 0 };
}

/** Sum the children of a node, and join a module with its only child. */
function settle(node, devices) {
  node.children = node.children.map((child) => (child.only ? child.only : child));
  node.shares = new Float64Array(devices);
  for (const child of node.children) {
    child.parent = node;
    node.bytes += child.bytes;
    node.grave += child.grave;
    node.tensors += child.tensors;
    if (child.children) child.shares.forEach((share, device) => { node.shares[device] += share; });
    else node.shares[child.device] += child.bytes;
  }
  node.device = node.shares.indexOf(Math.max(...node.shares));
  node.children.sort((a, b) => b.bytes - a.bytes);
  const [only, ...others] = node.children;
  if (!others.length && only && node.parent) {
    if (only.home !== node || only.label !== node.label) only.label = `${node.label}.${only.label}`;
    node.only = only;
  }
}

class Treemap {
  constructor(place, data, reveal) {
    this.data = data;
    this.reveal = reveal;
    this.focus = moduleTree(data);
    this.trail = make("div", { class: "trail" });
    this.canvas = make("canvas", {
      tabindex: "0",
      role: "application",
      "aria-label": "Tensors by module. Arrow keys move: down into a module, up out of it. Enter opens, Escape closes.",
    });
    this.cursor = make("div", { class: "cursor", hidden: "" });
    this.tip = make("div", { class: "tip", role: "status", hidden: "" });
    this.frame = make("div", { class: "frame" }, this.canvas, this.cursor, this.tip);
    place.append(this.trail, this.frame);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.select(null));
    this.canvas.addEventListener("click", (event) => this.enter(this.tileAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => this.select(null));
    new ResizeObserver(() => this.resize()).observe(this.frame);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.resize();
  }

  resize() {
    const width = this.frame.clientWidth;
    const height = this.frame.clientHeight;
    if (width === this.width && height === this.height) return;
    Object.assign(this, { width, height });
    this.lay();
  }

  /** Lay out the module in focus. Tiles that are too small to be seen are not divided. */
  lay() {
    const scale = (this.width * this.height) / (this.focus.bytes || 1);
    this.tiles = d3.hierarchy(this.focus, (node) =>
      (node.children && node.bytes * scale > DIVIDED ? node.children.filter((child) => child.bytes) : null));
    this.tiles.each((tile) => { tile.value = tile.data.bytes; });
    d3.treemap().size([this.width, this.height]).round(true).paddingInner(1)
      .paddingTop((tile) => (isTitled(tile) ? TITLE : edge(tile)))
      .paddingRight(edge).paddingBottom(edge).paddingLeft(edge)(this.tiles);
    this.select(null);
    this.drawTrail();
    this.draw();
  }

  drawTrail() {
    const nodes = [];
    for (let node = this.focus; node; node = node.parent) nodes.unshift(node);
    this.trail.replaceChildren(...nodes.map((node) => {
      const button = make("button", { type: "button", class: "link" }, node.label);
      button.disabled = node === this.focus;
      button.addEventListener("click", () => this.zoom(node));
      return button;
    }));
    this.trail.append(make("span", {}, `${amount(this.focus.tensors, "tensor")}, ${size(this.focus.bytes)}`));
  }

  draw() {
    const ratio = devicePixelRatio || 1;
    this.canvas.width = this.width * ratio;
    this.canvas.height = this.height * ratio;
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const colors = this.data.column("device").slots.map((slot) => color(`--${slot}`));
    const inks = colors.map(inkOn);
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.textBaseline = "middle";
    const font = style.getPropertyValue("--sans").trim();
    const [surface, raised, line, ink] = ["--surface", "--raised", "--line", "--ink"].map(color);
    for (const tile of this.tiles.descendants()) {
      const { x0, y0 } = tile;
      const [width, height] = [tile.x1 - x0, tile.y1 - y0];
      if (width <= 0 || height <= 0) continue;
      pen.fillStyle = tile.children ? (tile.depth % 2 ? raised : surface) : colors[tile.data.device];
      pen.fillRect(x0, y0, width, height);
      if (tile.children && tile.depth) {
        pen.strokeStyle = line;
        pen.lineWidth = 1;
        pen.strokeRect(x0 + 0.5, y0 + 0.5, width - 1, height - 1);
      }
      const titled = tile.children && tile.depth && isTitled(tile);
      if (titled || (!tile.children && width > LABELED.width && height > LABELED.height)) {
        pen.fillStyle = titled ? ink : inks[tile.data.device];
        pen.font = `${titled ? 600 : 400} 11px ${font}`;
        write(pen, tile.data.label, x0 + 5, y0 + (titled ? TITLE / 2 + 1 : 9), width - 9);
        const bytes = size(tile.data.bytes);
        if (!titled && height > 30 && pen.measureText(bytes).width < width - 9) {
          pen.globalAlpha = 0.75;
          pen.fillText(bytes, x0 + 5, y0 + 23);
          pen.globalAlpha = 1;
        }
      }
    }
    pen.lineWidth = 2;
    pen.strokeStyle = color("--grave");
    for (const tile of markedTiles(this.tiles.descendants())) {
      pen.strokeRect(tile.x0 + 1, tile.y0 + 1, tile.x1 - tile.x0 - 2, tile.y1 - tile.y0 - 2);
    }
  }

  tileAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const contains = (tile) => tile.x0 <= x && x < tile.x1 && tile.y0 <= y && y < tile.y1;
    let tile = this.tiles;
    for (let next = tile; next; next = tile.children?.find(contains)) tile = next;
    return tile;
  }

  point(event) {
    const tile = this.tileAt(event);
    if (tile !== this.tile) this.select(tile);
  }

  /** Outline a tile and describe it. */
  select(tile) {
    this.tile = tile;
    this.cursor.hidden = this.tip.hidden = !tile;
    if (!tile) return;
    place(this.cursor, tile.x0, tile.y0);
    this.cursor.style.width = `${tile.x1 - tile.x0}px`;
    this.cursor.style.height = `${tile.y1 - tile.y0}px`;
    this.tip.replaceChildren(...this.describe(tile.data));
    const { offsetWidth, offsetHeight } = this.tip;
    const left = Math.max(4, Math.min(tile.x0 + 8, this.width - offsetWidth - 4));
    const below = tile.y1 + 6 + offsetHeight < this.height;
    place(this.tip, left, below ? tile.y1 + 6 : Math.max(4, Math.min(tile.y0 + 22, this.height - offsetHeight - 4)));
  }

  describe(node) {
    const cell = (title) => this.data.column(title).text(node.row);
    if (!node.children) {
      const facts = ["role", "device", "dtype", "shape", "bytes"].map(cell).join(" · ");
      return [make("b", {}, cell("name")), make("span", {}, facts), make("em", {}, cell("findings"))];
    }
    const devices = this.data.column("device").words.filter((_, device) => node.shares[device]).join(", ");
    const facts = [amount(node.tensors, "tensor"), size(node.bytes), devices].join(" · ");
    const found = node.grave ? `${amount(node.grave, "tensor")} with an error or a warning` : "";
    return [make("b", {}, pathOf(node)), make("span", {}, facts), make("em", {}, found)];
  }

  /** Open the module of a tile, one level below the one in focus; show a tensor in the table. */
  enter(tile) {
    let inner = tile;
    while (inner.depth > 1) inner = inner.parent;
    if (inner.depth && inner.data.children) this.zoom(inner.data);
    else if (!tile.data.children) this.reveal(tile.data.row);
  }

  zoom(node) {
    this.focus = node;
    this.lay();
  }

  key(event) {
    const tile = this.tile ?? this.tiles;
    const row = tile.parent?.children ?? [tile];
    const sibling = (step) => row[(row.indexOf(tile) + step + row.length) % row.length];
    const actions = {
      ArrowRight: () => this.select(tile.depth ? sibling(1) : tile.children?.[0] ?? tile),
      ArrowLeft: () => this.select(tile.depth ? sibling(-1) : tile),
      ArrowDown: () => this.select(tile.children?.[0] ?? tile),
      ArrowUp: () => this.select(tile.parent ?? tile),
      Enter: () => (tile.data.children ? this.zoom(tile.data) : this.reveal(tile.data.row)),
      Escape: () => this.zoom(this.focus.parent ?? this.focus),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }
}

function isTitled(tile) {
  return tile.depth > 0 && tile.x1 - tile.x0 > TITLED.width && tile.y1 - tile.y0 > TITLED.height;
}

/** The width of the frame of a module; the smallest modules have none. */
function edge(tile) {
  return tile.depth && Math.min(tile.x1 - tile.x0, tile.y1 - tile.y0) > 14 ? 2 : 0;
}

function isSeen(tile) {
  return Math.min(tile.x1 - tile.x0, tile.y1 - tile.y0) >= SEEN;
}

/** The smallest tiles that are seen and have a finding. */
function markedTiles(tiles) {
  const marked = new Set();
  const inside = new Set();
  // Children come after their parents.
  for (const tile of tiles.reverse()) {
    if (!tile.data.grave || !isSeen(tile)) continue;
    if (!inside.has(tile)) marked.add(tile);
    inside.add(tile.parent);
  }
  return marked;
}

function pathOf(node) {
  const labels = [];
  for (let one = node; one.parent; one = one.parent) labels.unshift(one.label);
  return labels.join(".") || node.label;
}

/** Black or white, whichever is easier to read on a color like #0072b2. */
function inkOn(color) {
  const [red, green, blue] = [1, 3, 5].map((start) => parseInt(color.slice(start, start + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#000" : "#fff";
}

/** Write a text, shortened to a width; nothing if only its first letters fit. */
function write(pen, text, x, y, width) {
  let fits = Math.min(text.length, 200);
  if (pen.measureText(text).width > width) {
    let low = 0;
    while (low < fits) {
      const middle = (low + fits + 1) >> 1;
      if (pen.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle;
      else fits = middle - 1;
    }
  }
  if (fits === text.length) pen.fillText(text, x, y);
  else if (fits > 2) pen.fillText(`${text.slice(0, fits)}…`, x, y);
}

function place(element, x, y) {
  element.style.transform = `translate(${x}px, ${y}px)`;
}
