// What one query block attends exactly, painted on the latent frames of the video.

const SHOWN = 24; // frames; of more an even choice is shown
const PANELS = { columns: 8, gap: 8, caption: 17, width: 936 };
const TINT = "rgba(26, 87, 204, 0.5)";
const WASH = "rgba(244, 245, 247, 0.76)";

/** How many common pieces a query block and a key block hold. */
function unitsOf([query, key]) {
  const common = (a, b) => (b ? common(b, a % b) : a);
  return [query / common(query, key), key / common(query, key)];
}

class FramesView {
  constructor(viewer) {
    this.viewer = viewer;
    this.element = makeCanvas(PANELS.width, 10, "frames", "rv-frames");
    this.element.tabIndex = -1;
  }

  /**
   * decisions: of the row of the query block; units: of every token in raster order, its place in
   * pieces of the sequence that divide query blocks and key blocks alike.
   */
  draw(decisions, query, units) {
    const [frames, height, width] = this.viewer.facts.grid;
    const own = new Uint8Array(units.length);
    const keys = new Uint8Array(units.length);
    const [queryUnits, keyUnits] = unitsOf(this.viewer.facts.block);
    for (let n = 0; n < units.length; n++) {
      own[n] = Math.floor(units[n] / queryUnits) === query;
      const code = decisions[Math.floor(units[n] / keyUnits)];
      keys[n] = code !== APPROXIMATE && code !== UNDECIDED;
    }
    const chosen = this.choose(frames, own);
    const place = this.arrange(chosen.length, height / width);
    resize(this.element, PANELS.width, place.total);
    const context = clear(this.element);
    chosen.forEach((t, index) => {
      const area = height * width;
      const part = (mask) => mask.subarray(t * area, (t + 1) * area);
      this.panel(context, place, index, t, part(keys), part(own));
    });
    const line = framesText(keys, own, this.viewer.facts);
    this.element.setAttribute("aria-label", line);
    return line;
  }

  choose(frames, own) {
    const all = Array.from({ length: Math.min(frames, SHOWN) }, (_, n) => n);
    if (frames <= SHOWN) return all;
    const chosen = all.map((n) => Math.round((n * (frames - 1)) / (SHOWN - 1)));
    const home = Math.floor(own.indexOf(1) / (own.length / frames));
    if (home >= 0 && !chosen.includes(home)) {
      const gaps = chosen.map((t) => Math.abs(t - home));
      chosen[gaps.indexOf(Math.min(...gaps))] = home;
    }
    return chosen;
  }

  arrange(count, ratio) {
    const columns = Math.min(PANELS.columns, count);
    const width = Math.min(220, (PANELS.width - (columns - 1) * PANELS.gap) / columns);
    const height = width * ratio;
    const rows = Math.ceil(count / columns);
    return { columns, width, height, total: rows * (height + PANELS.caption + PANELS.gap) };
  }

  panel(context, place, index, t, keys, own) {
    const [, height, width] = this.viewer.facts.grid;
    const x = (index % place.columns) * (place.width + PANELS.gap);
    const row = Math.floor(index / place.columns);
    const y = row * (place.height + PANELS.caption + PANELS.gap) + PANELS.caption;
    const home = own.includes(1);
    const { query, accent } = this.viewer.facts.colors;
    context.imageSmoothingEnabled = true;
    context.drawImage(this.ground(t), x, y, place.width, place.height);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.veil(keys), x, y, place.width, place.height);
    const scale = [place.width / width, place.height / height];
    this.outline(context, keys, width, height, x, y, scale, accent, 1.2);
    if (home) this.outline(context, own, width, height, x, y, scale, "#ffffff", 5);
    if (home) this.outline(context, own, width, height, x, y, scale, query, 2.4);
    context.strokeStyle = home ? query : FAINT;
    context.lineWidth = home ? 1.6 : 0.8;
    context.strokeRect(x + 0.5, y + 0.5, place.width - 1, place.height - 1);
    const share = keys.reduce((sum, on) => sum + on, 0) / keys.length;
    const text = `${home ? "▸ " : ""}t ${t} · ${Math.round(100 * share)} % exact`;
    const color = home ? query : share ? INK : MUTED;
    const font = home ? `600 ${SMALL}` : SMALL;
    write(context, text, x + place.width / 2, y - 8, { align: "center", color, font });
  }

  ground(t) {
    const [, height, width] = this.viewer.facts.ground;
    const grey = this.viewer.ground;
    const start = t * height * width;
    this.grounds ??= new Map();
    if (!this.grounds.has(t) && grey.length) {
      const table = Uint8Array.from({ length: 768 }, (_, n) => Math.floor(n / 3));
      this.grounds.set(t, imageOf(height, width, table, (n) => grey[start + n]));
    }
    return this.grounds.get(t) ?? new OffscreenCanvas(1, 1);
  }

  /** Exact keys tinted, the rest washed out: one pixel a token. */
  veil(keys) {
    const [, height, width] = this.viewer.facts.grid;
    const made = new OffscreenCanvas(width, height);
    const pen = made.getContext("2d");
    pen.fillStyle = WASH;
    pen.fillRect(0, 0, width, height);
    const image = pen.getImageData(0, 0, width, height);
    const tint = TINT.match(/[\d.]+/g).map(Number);
    for (let n = 0; n < keys.length; n++) {
      if (keys[n]) image.data.set([tint[0], tint[1], tint[2], Math.round(255 * tint[3])], 4 * n);
    }
    pen.putImageData(image, 0, 0);
    return made;
  }

  /** Edges between marked tokens and others, a straight run at a time: runs draw far faster. */
  outline(context, mask, width, height, x, y, [across, down], color, pen) {
    context.strokeStyle = color;
    context.lineWidth = pen;
    context.lineCap = "square";
    context.beginPath();
    const at = (h, w) => (h < 0 || w < 0 || h >= height || w >= width ? 0 : mask[h * width + w]);
    for (let h = 0; h <= height; h++) {
      this.runs(width, (w) => at(h, w) !== at(h - 1, w), (from, to) => {
        context.moveTo(x + from * across, y + h * down);
        context.lineTo(x + to * across, y + h * down);
      });
    }
    for (let w = 0; w <= width; w++) {
      this.runs(height, (h) => at(h, w) !== at(h, w - 1), (from, to) => {
        context.moveTo(x + w * across, y + from * down);
        context.lineTo(x + w * across, y + to * down);
      });
    }
    context.stroke();
  }

  /** Calls `draw(from, to)` for every longest stretch below `count` on which `edge` holds. */
  runs(count, edge, draw) {
    let from = -1;
    for (let n = 0; n <= count; n++) {
      const on = n < count && edge(n);
      if (on && from < 0) from = n;
      if (!on && from >= 0) {
        draw(from, n);
        from = -1;
      }
    }
  }
}
