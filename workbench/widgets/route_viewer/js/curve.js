// Density of every head that is here against tau; a click or an arrow key sets tau.

const PLOT = { x: 46, y: 26, width: 318, height: 120 };

class CurveView {
  constructor(viewer) {
    this.viewer = viewer;
    const label = "Density against tau; left and right arrows move tau";
    this.element = makeCanvas(PLOT.x + PLOT.width + 14, PLOT.y + PLOT.height + 40, label, "rv-curve");
    const guarded = (act) => (event) => viewer.guard(() => act(event));
    this.element.addEventListener("click", guarded((event) => this.pick(event)));
    this.element.addEventListener("keydown", guarded((event) => this.key(event)));
  }

  x(tau) {
    const [low, high] = this.range;
    return PLOT.x + ((tau - low) / (high - low)) * PLOT.width;
  }

  y(density) {
    return PLOT.y + (1 - density) * PLOT.height;
  }

  /** curves: head -> density at every stop; null when the scores are not here. */
  draw(curves, stops, tau, head) {
    const context = clear(this.element);
    this.stops = stops;
    this.range = [stops[0], stops[stops.length - 1]];
    write(context, "Density against tau", 2, 10, { font: `600 ${FONT}` });
    this.axes(context);
    if (!curves) {
      const middle = PLOT.x + PLOT.width / 2;
      const text = "the scores of this head are not here";
      write(context, text, middle, PLOT.y + PLOT.height / 2, { align: "center", color: MUTED });
      return;
    }
    // The shown head comes last, on top of the others.
    for (const [own, density] of curves) if (own !== head) this.stroke(context, density, FAINT, 1);
    this.stroke(context, curves.get(head), this.viewer.facts.colors.accent, 2.2);
    this.marker(context, tau, curves.get(head));
  }

  stroke(context, density, color, width) {
    context.strokeStyle = color;
    context.lineWidth = width;
    context.beginPath();
    density.forEach((value, n) => context.lineTo(this.x(this.stops[n]), this.y(value)));
    context.stroke();
  }

  marker(context, tau, density) {
    const color = this.viewer.facts.colors.query;
    const { level } = levelOf(this.stops, tau);
    const value = density[Math.min(level, density.length - 1)];
    line(context, this.x(tau), PLOT.y, this.x(tau), PLOT.y + PLOT.height, color, 1);
    context.fillStyle = color;
    context.beginPath();
    context.arc(this.x(tau), this.y(value), 4.5, 0, 7);
    context.fill();
  }

  axes(context) {
    const foot = PLOT.y + PLOT.height;
    for (const density of [0, 0.25, 0.5, 0.75, 1]) {
      line(context, PLOT.x, this.y(density), PLOT.x + PLOT.width, this.y(density), "#e4e8ed");
      write(context, `${density}`, PLOT.x - 6, this.y(density), { align: "right", color: MUTED });
    }
    for (const tau of ticks(...this.range, 6)) {
      line(context, this.x(tau), foot, this.x(tau), foot + 4, MUTED);
      write(context, `${tau}`, this.x(tau), foot + 12, { align: "center", color: MUTED });
    }
    const middle = PLOT.x + PLOT.width / 2;
    write(context, "tau (standard deviations)", middle, foot + 29, { align: "center" });
  }

  pick(event) {
    const box = this.element.getBoundingClientRect();
    const share = (event.clientX - box.left - PLOT.x) / PLOT.width;
    const tau = this.range[0] + share * (this.range[1] - this.range[0]);
    this.viewer.setStop(levelOf(this.stops, tau).level);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    this.viewer.setStop(levelOf(this.stops, this.viewer.tau).level + step);
  }
}
