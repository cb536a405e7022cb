// Layer x head and layer x step: density or error of every call; a click opens its mask.

const CELLS = { x: 46, y: 8, width: 268 };
const TALLEST = { row: 26, all: 190 }; // CSS pixels

class IndexView {
  constructor(viewer) {
    this.viewer = viewer;
    this.layers = viewer.facts.layers;
    this.steps = viewer.facts.steps;
    this.height = Math.min(TALLEST.all, TALLEST.row * Math.max(2, this.layers.length));
    this.canvas = makeCanvas(376, CELLS.y + this.height + 40, "index", "rv-index");
    this.quantity = this.choice("Quantity", ["density", "error"]);
    this.across = this.choice("Across", ["head", "step"]);
    this.text = element("div", { className: "rv-line" });
    const head = element("div", { className: "rv-row" }, [
      element("b", { textContent: "Index: click to open" }),
      this.quantity,
      this.across,
    ]);
    this.element = element("div", {}, [head, this.canvas, this.text]);
    const guarded = (act) => (event) => viewer.guard(() => act(event));
    this.canvas.addEventListener("click", guarded((event) => this.pick(event)));
    this.canvas.addEventListener("keydown", guarded((event) => this.key(event)));
  }

  choice(label, options) {
    const made = element("select", { title: label });
    made.setAttribute("aria-label", label);
    made.append(...options.map((name) => element("option", { value: name, textContent: name })));
    made.addEventListener("change", () => this.viewer.guard(() => this.draw()));
    return made;
  }

  /** What a cell stands for: [layer, step, head]. */
  place(row, column) {
    const { step, head } = this.viewer.place;
    return this.across.value === "head"
      ? [this.layers[row], step, column]
      : [this.layers[row], this.steps[column], head];
  }

  cellOf([layer, step, head]) {
    const row = this.layers.indexOf(layer) * this.steps.length + this.steps.indexOf(step);
    return row * this.viewer.facts.heads + head;
  }

  value(place) {
    return this.values[this.cellOf(place)];
  }

  get columns() {
    return this.across.value === "head" ? this.viewer.facts.heads : this.steps.length;
  }

  draw() {
    this.values = this.quantity.value === "error" ? this.table("errors") : this.densities();
    const { known, low, high } = this.range();
    const context = clear(this.canvas);
    for (let row = 0; row < this.layers.length; row++) {
      for (let column = 0; column < this.columns; column++) {
        this.cell(context, row, column, low, high);
      }
    }
    this.axes(context);
    this.outline(context);
    if (known) this.bar(context, low, high);
    this.describe(known);
  }

  /** Figures of all calls as the kernel sent them; none while a part is under way. */
  table(name, Kind = Float32Array) {
    const bytes = gather(this.viewer.model, name, null);
    return bytes ? new Kind(bytes.slice().buffer) : new Kind(0);
  }

  /**
   * Densities at the tau of the picture where they can be had: of every call from the curves, else
   * of the shown call from its scores. The others are of the masks as made.
   */
  densities() {
    const { viewer } = this;
    const { curved } = viewer.facts;
    const values = curved ? this.curvesAt(viewer.tau) : this.table("densities");
    this.follows = curved ? "all" : viewer.shownCurves ? "shown" : "none";
    if (this.follows !== "shown" || !values.length) return values;
    const { layer, step } = viewer.place;
    const { level } = levelOf(viewer.pairs.stops, viewer.tau);
    for (const [head, curve] of viewer.shownCurves) {
      values[this.cellOf([layer, step, head])] = curve[Math.min(level, curve.length - 1)];
    }
    return values;
  }

  /** Densities of every call at the first stop that is not below tau, from 1 / 65,535 steps. */
  curvesAt(tau) {
    const { curveStops, facts } = this.viewer;
    this.curves = this.viewer.kept("curves", this.viewer.indexNews, () => this.table("curves", Uint16Array));
    const count = curveStops.length;
    const level = Math.min(levelOf(curveStops, tau).level, count - 1);
    const values = new Float32Array(this.curves.length / count);
    for (let n = 0; n < values.length; n++) {
      const call = Math.floor(n / facts.heads);
      const [row, column] = [Math.floor(call / this.steps.length), call % this.steps.length];
      values[n] = this.viewer.isRecorded(row, column) ? this.curves[n * count + level] / 65535 : NaN;
    }
    return values;
  }

  /** How many figures are known, and between which they lie. */
  range() {
    let [known, low, high] = [0, Infinity, -Infinity];
    for (const value of this.values) {
      if (!Number.isFinite(value)) continue;
      known++;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    return known ? { known, low, high } : { known, low: 0, high: 1 };
  }

  get size() {
    return [CELLS.width / this.columns, this.height / this.layers.length];
  }

  cell(context, row, column, low, high) {
    const value = this.value(this.place(row, column));
    const [width, height] = this.size;
    const [x, y] = [CELLS.x + column * width, CELLS.y + row * height];
    const share = high > low ? (value - low) / (high - low) : 0.5;
    const from = 3 * Math.round(255 * share);
    const known = Number.isFinite(value);
    const colors = this.viewer.cividis.subarray(from, from + 3);
    context.fillStyle = known ? `rgb(${colors.join()})` : "#eceef1";
    const gap = Math.min(width, height) > 6 ? 1 : 0;
    context.fillRect(x, y, width - gap, height - gap);
    if (width < 34 || height < 14) return;
    const color = known && share < 0.55 ? "#ffffff" : INK;
    const text = known ? value.toFixed(3) : "–";
    write(context, text, x + width / 2, y + height / 2, { align: "center", color });
  }

  axes(context) {
    const [width, height] = this.size;
    const names = this.across.value === "head" ? null : this.steps;
    const rowStride = Math.ceil(14 / height);
    this.layers.forEach((layer, row) => {
      if (row % rowStride) return;
      const y = CELLS.y + (row + 0.5) * height;
      write(context, `${layer}`, CELLS.x - 6, y, { align: "right", color: MUTED });
    });
    const stride = Math.ceil(24 / width);
    const foot = CELLS.y + this.height;
    for (let column = 0; column < this.columns; column += stride) {
      const x = CELLS.x + (column + 0.5) * width;
      write(context, `${names ? names[column] : column}`, x, foot + 10, { align: "center", color: MUTED });
    }
    const { step, head } = this.viewer.place;
    const fixed = this.across.value === "head" ? `head (at step ${step})` : `step (head ${head})`;
    write(context, fixed, CELLS.x + CELLS.width / 2, foot + 27, { align: "center" });
    const turn = { align: "center", turn: -Math.PI / 2 };
    write(context, "layer", 12, CELLS.y + this.height / 2, turn);
  }

  outline(context) {
    const { layer, step, head } = this.viewer.place;
    const [width, height] = this.size;
    const column = this.across.value === "head" ? head : this.steps.indexOf(step);
    const corner = [CELLS.x + column * width, CELLS.y + this.layers.indexOf(layer) * height];
    for (const [color, pen] of [["#ffffff", 4], [this.viewer.facts.colors.query, 2]]) {
      context.strokeStyle = color;
      context.lineWidth = pen;
      context.strokeRect(...corner, width - 1, height - 1);
    }
  }

  bar(context, low, high) {
    const x = CELLS.x + CELLS.width + 10;
    for (let n = 0; n < this.height; n++) {
      const from = 3 * Math.round(255 * (1 - n / this.height));
      context.fillStyle = `rgb(${this.viewer.cividis.subarray(from, from + 3).join()})`;
      context.fillRect(x, CELLS.y + n, 10, 1.5);
    }
    write(context, high.toFixed(3), x + 13, CELLS.y + 6, { color: MUTED });
    write(context, low.toFixed(3), x + 13, CELLS.y + this.height - 6, { color: MUTED });
  }

  describe(known) {
    const text = indexText(this, known);
    this.text.textContent = text;
    this.canvas.setAttribute("aria-label", text);
  }

  pick(event) {
    const box = this.canvas.getBoundingClientRect();
    const [width, height] = this.size;
    const column = Math.floor((event.clientX - box.left - CELLS.x) / width);
    const row = Math.floor((event.clientY - box.top - CELLS.y) / height);
    this.open(row, column);
  }

  open(row, column) {
    if (row < 0 || row >= this.layers.length || column < 0 || column >= this.columns) return;
    const [layer, step, head] = this.place(row, column);
    this.viewer.open(layer, this.viewer.nearestStep(layer, step), head);
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    const { layer, step, head } = this.viewer.place;
    const column = this.across.value === "head" ? head : this.steps.indexOf(step);
    this.open(this.layers.indexOf(layer) + move[0], column + move[1]);
  }
}
