// The window on the mask and the chosen pair: zoom, pan, steps of the keyboard.

class Moving extends Held {
  zoom(factor, [i, j] = this.center()) {
    const [top, bottom, left, right] = this.window();
    const [rows, columns] = this.facts.blocks;
    const span = (low, high, at, most) => {
      const size = Math.max(Math.min(8, most), Math.min(most, Math.round((high - low) * factor)));
      const share = (at + 0.5 - low) / (high - low);
      const start = Math.round(at + 0.5 - share * size);
      const first = Math.max(0, Math.min(most - size, start));
      return [first, first + size];
    };
    this.set({ window: [...span(top, bottom, i, rows), ...span(left, right, j, columns)] });
  }

  pan(down, across, [top, bottom, left, right]) {
    const shift = (low, high, by, most) => {
      const moved = Math.max(0, Math.min(most - (high - low), Math.round(low + by)));
      return [moved, moved + high - low];
    };
    const [rows, columns] = this.facts.blocks;
    this.set({ window: [...shift(top, bottom, down, rows), ...shift(left, right, across, columns)] });
  }

  whole() {
    const [rows, columns] = this.facts.blocks;
    this.set({ window: [0, rows, 0, columns] });
  }

  step(down, across) {
    const [rows, columns] = this.facts.blocks;
    const move = (value, by, count) => Math.max(0, Math.min(count - 1, value + by));
    this.set({
      query_block: move(this.model.get("query_block"), down, rows),
      key_block: move(this.model.get("key_block"), across, columns),
    });
  }

  /** The chosen pair if it is on the screen, else the middle of the window. */
  center() {
    const [top, bottom, left, right] = this.window();
    const [i, j] = [this.model.get("query_block"), this.model.get("key_block")];
    const inside = i >= top && i < bottom && j >= left && j < right;
    return inside ? [i, j] : [Math.floor((top + bottom) / 2), Math.floor((left + right) / 2)];
  }

  window() {
    const window = this.model.get("window");
    const [rows, columns] = this.facts.blocks;
    const [top, bottom, left, right] = window;
    const fits = 0 <= top && top < bottom && bottom <= rows;
    if (window.length !== 4 || !fits || !(0 <= left && left < right && right <= columns)) {
      throw new Error(
        `window=[${window}]: expected [top, bottom, left, right] with ` +
          `0 <= top < bottom <= ${rows} and 0 <= left < right <= ${columns}`,
      );
    }
    return window;
  }
}
