// The map of one head: rows are query blocks, columns key blocks. Zoom, pan, hover, choice of a pair.

const AREA = { x: 58, y: 24, width: 470, height: 470 };
const FRAME = "rgba(93, 104, 118, 0.4)";
const UNSURE = { name: "undecided", face: "#ffffff", edge: "#b3261e", hatch: "x" };

class MapView {
  constructor(viewer) {
    this.viewer = viewer;
    this.canvas = makeCanvas(AREA.x + AREA.width + 18, AREA.y + AREA.height + 44, "mask", "rv-map");
    this.tip = element("div", { className: "rv-tip", hidden: true });
    this.legend = element("div", { className: "rv-legend" });
    this.element = element("div", { className: "rv-mapbox" }, [this.canvas, this.tip]);
    this.looks = [...viewer.facts.looks, UNSURE];
    this.faces = new Uint8Array(this.looks.flatMap((look) => rgbOf(look.face)));
    this.ramp = rampOf(this.looks[0].face, this.looks[1].face);
    this.listen();
  }

  draw(picture, total, window, query, key) {
    const context = clear(this.canvas);
    this.window = window;
    context.save();
    context.beginPath();
    context.rect(AREA.x, AREA.y, AREA.width, AREA.height);
    context.clip();
    this.paint(context, picture);
    this.frames(context);
    this.mark(context, query, key);
    context.restore();
    this.axes(context);
    this.explain(picture, total);
  }

  /** Size of a block pair on the screen. */
  get cell() {
    const [top, bottom, left, right] = this.window;
    return [AREA.width / (right - left), AREA.height / (bottom - top)];
  }

  x(column) {
    return AREA.x + (column - this.window[2]) * this.cell[0];
  }

  y(row) {
    return AREA.y + (row - this.window[0]) * this.cell[1];
  }

  paint(context, picture) {
    const { rows, columns, factor, density, classes } = picture;
    const image = classes
      ? imageOf(rows, columns, this.faces, (n) => classes[n])
      : imageOf(rows, columns, this.ramp, (n) => Math.round(255 * density[n]));
    const [width, height] = this.cell;
    // Edges of pixels stay sharp; the last pixel may hang over and is cut off.
    context.imageSmoothingEnabled = false;
    const size = [columns * factor[1] * width, rows * factor[0] * height];
    context.drawImage(image, AREA.x, AREA.y, ...size);
    if (classes && Math.min(width, height) >= 3) this.hatch(context, picture);
    if (classes && Math.min(width, height) >= 9) this.separate(context);
  }

  hatch(context, { rows, columns, classes }) {
    const [width, height] = this.cell;
    this.patterns ??= this.looks.map((look) => (look.hatch ? hatchOf(context, look) : null));
    const { patterns } = this;
    for (let n = 0; n < rows * columns; n++) {
      if (!patterns[classes[n]]) continue;
      context.fillStyle = patterns[classes[n]];
      const [row, column] = [Math.floor(n / columns), n % columns];
      context.fillRect(AREA.x + column * width, AREA.y + row * height, width, height);
    }
  }

  /** Thin white lines that make single pairs countable. */
  separate(context) {
    const [top, bottom, left, right] = this.window;
    for (let i = top + 1; i < bottom; i++) {
      line(context, AREA.x, this.y(i), AREA.x + AREA.width, this.y(i), "#ffffff");
    }
    for (let j = left + 1; j < right; j++) {
      line(context, this.x(j), AREA.y, this.x(j), AREA.y + AREA.height, "#ffffff");
    }
  }

  /** Lines where latent frames begin, unless they would lie closer than one can see. */
  frames(context) {
    const edges = this.viewer.facts.frames;
    if (edges.length < 3 || (edges[2] - edges[1]) * this.cell[1] < 24) return;
    for (const edge of edges.slice(1, -1)) {
      line(context, AREA.x, this.y(edge), AREA.x + AREA.width, this.y(edge), FRAME, 0.8);
      line(context, this.x(edge), AREA.y, this.x(edge), AREA.y + AREA.height, FRAME, 0.8);
    }
  }

  mark(context, query, key) {
    const color = this.viewer.facts.colors.query;
    const [width, height] = this.cell;
    const thick = Math.max(height, 3);
    context.strokeStyle = color;
    context.lineWidth = 1.2;
    context.strokeRect(AREA.x + 0.5, this.y(query + 0.5) - thick / 2, AREA.width - 1, thick);
    const size = [Math.max(width, 9), Math.max(height, 9)];
    const corner = [this.x(key + 0.5) - size[0] / 2, this.y(query + 0.5) - size[1] / 2];
    for (const [shade, pen] of [["#ffffff", 4], [color, 2]]) {
      context.strokeStyle = shade;
      context.lineWidth = pen;
      context.strokeRect(...corner, ...size);
    }
  }

  axes(context) {
    const [top, bottom, left, right] = this.window;
    const [queryTokens, keyTokens] = this.viewer.facts.block;
    context.strokeStyle = MUTED;
    context.lineWidth = 1;
    context.strokeRect(AREA.x, AREA.y, AREA.width, AREA.height);
    const foot = AREA.y + AREA.height;
    for (const j of ticks(left, right - 1, 8, true)) {
      line(context, this.x(j + 0.5), foot, this.x(j + 0.5), foot + 4, MUTED);
      write(context, `${j}`, this.x(j + 0.5), foot + 12, { align: "center", color: MUTED });
    }
    for (const i of ticks(top, bottom - 1, 8, true)) {
      line(context, AREA.x - 4, this.y(i + 0.5), AREA.x, this.y(i + 0.5), MUTED);
      write(context, `${i}`, AREA.x - 7, this.y(i + 0.5), { align: "right", color: MUTED });
    }
    const middle = AREA.x + AREA.width / 2;
    const across = `key block (${keyTokens} tokens each)`;
    write(context, across, middle, foot + 30, { align: "center", font: FONT });
    const upright = { align: "center", font: FONT, turn: -Math.PI / 2 };
    const down = `query block (${queryTokens} tokens each)`;
    write(context, down, 12, AREA.y + AREA.height / 2, upright);
    this.frameNames(context);
  }

  frameNames(context) {
    const edges = this.viewer.facts.frames;
    let free = AREA.x;
    for (let t = 0; t + 1 < edges.length; t++) {
      const x = this.x((edges[t] + edges[t + 1]) / 2);
      if (x < free || x > AREA.x + AREA.width) continue;
      write(context, `t ${t}`, x, AREA.y - 9, { align: "center", color: MUTED });
      free = x + 34;
    }
  }

  /** The legend with the shares of the head, and the rule by which pairs became pixels. */
  explain({ factor, classes }, { counts, total }) {
    const names = decisionNames(this.viewer.facts);
    const rule = classes
      ? "1 cell = 1 block pair"
      : `1 pixel = mean of ${factor[0]} × ${factor[1]} pairs (query × key)` +
        (counts[UNDECIDED] ? ", undecided ones count half" : "");
    const used = classes ? [0, 1, 2, 3, 4].filter((code) => counts[code]) : [];
    const key = [rule, ...used].join();
    if (this.explained !== key) {
      this.explained = key;
      this.entries = used.map((code) => this.swatch(this.looks[code]));
      const shades = classes ? [] : [0, 0.5, 1].map((share) => this.shade(share));
      const text = element("span", { className: "rv-rule", textContent: rule });
      this.legend.replaceChildren(...this.entries, ...shades, text);
    }
    used.forEach((code, n) => {
      this.entries[n].lastChild.textContent = `${names[code]} ${percent(counts[code] / total)}`;
    });
  }

  swatch(look) {
    const made = element("canvas", { width: 26, height: 15 });
    const context = made.getContext("2d");
    for (const fill of [look.face, look.hatch ? hatchOf(context, look) : null]) {
      if (!fill) continue;
      context.fillStyle = fill;
      context.fillRect(0, 0, 26, 15);
    }
    context.strokeStyle = look.edge;
    context.strokeRect(0.5, 0.5, 25, 14);
    return element("span", {}, [made, element("span")]);
  }

  shade(share) {
    const color = this.ramp.slice(3 * Math.round(255 * share)).subarray(0, 3);
    const made = element("i", { className: "rv-shade" });
    made.style.background = `rgb(${color.join()})`;
    return element("span", {}, [made, share ? `${share}` : "density 0"]);
  }

  /** Block pair under a pointer event, or null beside the map. */
  pairAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const [top, bottom, left, right] = this.window;
    const i = Math.floor(top + (event.clientY - box.top - AREA.y) / this.cell[1]);
    const j = Math.floor(left + (event.clientX - box.left - AREA.x) / this.cell[0]);
    return i >= top && i < bottom && j >= left && j < right ? [i, j] : null;
  }

  listen() {
    const { canvas, viewer } = this;
    const on = (name, act, options) => {
      canvas.addEventListener(name, (event) => viewer.guard(() => act(event)), options);
    };
    on("pointerdown", (event) => this.press(event));
    on("pointermove", (event) => (this.held ? this.drag(event) : this.hover(event)));
    on("pointerup", (event) => this.release(event));
    on("pointerleave", () => (this.tip.hidden = true));
    on("dblclick", (event) => this.pairAt(event) && viewer.zoom(0.5, this.pairAt(event)));
    // The page scrolls as usual until the map has been clicked or Ctrl is held.
    on("wheel", (event) => this.wheel(event), { passive: false });
    on("keydown", (event) => this.key(event));
  }

  press(event) {
    if (!this.window || !this.pairAt(event)) return;
    this.held = { x: event.clientX, y: event.clientY, window: this.window, moved: false };
    this.canvas.setPointerCapture(event.pointerId);
  }

  drag(event) {
    const down = (this.held.y - event.clientY) / this.cell[1];
    const across = (this.held.x - event.clientX) / this.cell[0];
    const far = Math.hypot(this.held.x - event.clientX, this.held.y - event.clientY) > 4;
    this.held.moved = this.held.moved || far;
    this.tip.hidden = true;
    if (this.held.moved) this.viewer.pan(down, across, this.held.window);
  }

  release(event) {
    const pair = this.held && !this.held.moved && this.pairAt(event);
    this.held = null;
    if (pair) this.viewer.set({ query_block: pair[0], key_block: pair[1] });
  }

  hover(event) {
    const pair = this.window && this.pairAt(event);
    this.tip.hidden = !pair;
    if (!pair) return;
    const texts = this.viewer.pairTexts(...pair);
    this.tip.replaceChildren(...texts.map((text) => element("div", { textContent: text })));
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const [width, height] = [this.tip.offsetWidth, this.tip.offsetHeight];
    this.tip.style.left = `${x > 0.55 * box.width ? Math.max(0, x - width - 14) : x + 16}px`;
    this.tip.style.top = `${y + height + 18 > box.height ? y - height - 10 : y + 16}px`;
  }

  wheel(event) {
    if (!event.ctrlKey && document.activeElement !== this.canvas) return;
    const pair = this.pairAt(event);
    if (!pair) return;
    event.preventDefault();
    this.viewer.zoom(event.deltaY > 0 ? 1.25 : 0.8, pair);
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const zooms = { "+": 0.5, "=": 0.5, "-": 2 };
    const move = moves[event.key];
    if (move && event.shiftKey) {
      const [top, bottom, left, right] = this.window;
      this.viewer.pan((move[0] * (bottom - top)) / 8, (move[1] * (right - left)) / 8, this.window);
    } else if (move) this.viewer.step(...move);
    else if (event.key in zooms) this.viewer.zoom(zooms[event.key]);
    else if (event.key === "0") this.viewer.whole();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
