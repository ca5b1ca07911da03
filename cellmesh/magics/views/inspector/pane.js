// A canvas on which a part of a matrix is seen: it is panned, zoomed and pointed at, by pointer, wheel and keys.

const MAX_HEIGHT = 420;
const SMALLEST = 2; // elements across at the deepest zoom

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

class Pane {
  // Who extends it has: cut (null: there is nothing to be seen), sizes(), redraw(), request() for what is seen anew,
  // point(row, col), and forget() that.
  constructor(root) {
    this.root = root;
    this.view = null; // [top, bottom, left, right], in elements, fractions too
    this.pointer = null; // [row, col]
    this.later = later(70);
    this.canvas = make("canvas", {
      class: "cmi-canvas", tabindex: 0, role: "img",
      onpointerdown: (event) => this.grab(event),
      onpointermove: (event) => this.move(event),
      onpointerup: (event) => this.release(event),
      onpointercancel: (event) => this.release(event),
      onpointerleave: () => this.leave(),
      onkeydown: (event) => this.press(event),
      onwheel: (event) => this.wheel(event),
      onblur: () => this.canvas.classList.remove("cmi-armed"),
    });
  }

  // ---- what is seen of it

  fit() {
    if (!this.cut) return;
    const [rows, cols] = this.sizes();
    this.view = [0, rows, 0, cols];
    this.resize();
    this.request();
  }

  zoom(factor, at = null) {
    if (!this.view) return;
    const [top, bottom, left, right] = this.view;
    const [y, x] = at ?? [(top + bottom) / 2, (left + right) / 2];
    const around = (begin, end, centre, size) => {
      const span = clamp((end - begin) * factor, Math.min(SMALLEST, size), size);
      const share = end > begin ? (centre - begin) / (end - begin) : 0.5;
      return [centre - share * span, centre + (1 - share) * span];
    };
    const [rows, cols] = this.sizes();
    this.view = [...around(top, bottom, y, rows), ...around(left, right, x, cols)];
    this.settle();
  }

  pan(rows, cols) {
    if (!this.view) return;
    this.view = [this.view[0] + rows, this.view[1] + rows, this.view[2] + cols, this.view[3] + cols];
    this.settle();
  }

  settle() {
    this.bound();
    this.redraw();
    this.later(() => this.request());
  }

  bound() {
    const [rows, cols] = this.sizes();
    const within = (begin, end, size) => {
      const span = Math.min(end - begin, size);
      const from = clamp(begin, 0, size - span);
      return [from, from + span];
    };
    this.view = [...within(this.view[0], this.view[1], rows), ...within(this.view[2], this.view[3], cols)];
  }

  resize() {
    if (!this.cut) return;
    const width = Math.floor(Math.min(this.root.clientWidth - 2, 720));
    if (width <= 0) return;
    const [rows, cols] = this.sizes();
    const natural = (width * rows) / Math.max(cols, 1);
    const height = Math.round(clamp(natural, Math.min(MAX_HEIGHT, 28 * Math.max(rows, 1)), MAX_HEIGHT));
    // A tall tensor is drawn narrow rather than stretched, as far as it can still be read.
    const narrow = Math.round(clamp((height * cols) / Math.max(rows, 1), Math.min(width, 260), width));
    const ratio = window.devicePixelRatio || 1;
    this.canvas.style.width = `${narrow}px`;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(narrow * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.isDark = isDark(this.root);
    this.redraw();
  }

  // ---- pointer, wheel, keys

  toScreen(row, col) {
    const [top, bottom, left, right] = this.view;
    return [((row - top) / (bottom - top)) * this.canvas.height, ((col - left) / (right - left)) * this.canvas.width];
  }

  toElement(event) {
    const box = this.canvas.getBoundingClientRect();
    const [top, bottom, left, right] = this.view;
    return [top + ((event.clientY - box.top) / box.height) * (bottom - top), left + ((event.clientX - box.left) / box.width) * (right - left)];
  }

  grab(event) {
    if (!this.view) return;
    this.grabbed = { at: this.toElement(event), view: [...this.view] };
    this.canvas.setPointerCapture(event.pointerId);
    this.canvas.classList.add("cmi-armed");
  }

  move(event) {
    if (!this.view) return;
    if (this.grabbed) {
      this.canvas.classList.add("cmi-dragging");
      const [row, col] = this.toElement(event);
      return this.pan(this.grabbed.at[0] - row, this.grabbed.at[1] - col);
    }
    this.point(...this.toElement(event));
  }

  release(event) {
    this.grabbed = null;
    this.canvas.classList.remove("cmi-dragging");
    if (this.view && event.type === "pointerup") this.point(...this.toElement(event));
  }

  leave() {
    if (this.grabbed || document.activeElement === this.canvas) return;
    this.forget();
    this.redraw();
  }

  wheel(event) {
    if (!this.view || !(document.activeElement === this.canvas || event.ctrlKey)) return;
    event.preventDefault();
    event.stopPropagation();
    this.zoom(Math.exp(clamp(event.deltaY, -200, 200) * 0.003), this.toElement(event));
  }

  press(event) {
    if (!this.view) return;
    const [top, bottom, left, right] = this.view;
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const step = steps[event.key];
    if (step && event.shiftKey) {
      const [row, col] = this.pointer ?? [Math.floor((top + bottom) / 2), Math.floor((left + right) / 2)];
      this.point(row + step[0] + 0.5, col + step[1] + 0.5);
    } else if (step) this.pan(step[0] * (bottom - top) * 0.15, step[1] * (right - left) * 0.15);
    else if (event.key === "+" || event.key === "=") this.zoom(1 / 1.6);
    else if (event.key === "-") this.zoom(1.6);
    else if (event.key === "0") this.fit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
