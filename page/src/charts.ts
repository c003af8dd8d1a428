// Charts over time, by uPlot.

import uPlot from "uplot";
import { make } from "./dom";

export interface Series {
  label: string;
  color: string; // a CSS variable
}

export interface ChartOptions {
  title: string; // with the unit
  series: Series[];
  most?: number; // the end of the axis, if it is fixed
  text: (value: number) => string;
}

const HEIGHT = 150;
const MIN_S = 60; // the shortest span of the time axis
const STEPS = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((one) => one * 10 ** power)).flat(); // between the marks of the value axis
const FONT = "12px system-ui, sans-serif";

// Returns a color as canvases take it.
function resolved(place: HTMLElement, variable: string): string {
  const probe = make("span");
  probe.style.color = `var(${variable})`;
  place.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

function timeOf(seconds: number, step: number): string {
  const options: Intl.DateTimeFormatOptions = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  return new Date(seconds * 1000).toLocaleTimeString("en", step < 60 ? { ...options, second: "2-digit" } : options);
}

// Returns the smallest of 1, 2, 5, 10, 20, ... that is not below a value.
function ceiling(value: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return power * ([1, 2, 5].find((one) => value <= one * power) ?? 10);
}

// Writes the value under the cursor; without a cursor, the latest one.
const latest = (text: ChartOptions["text"]) => (plot: uPlot, value: number | null, at: number): string => text(value ?? plot.data[at]!.at(-1)!);

// A figure that holds a chart; `data` has the times in seconds since 1970, then the values of each series.
export class Chart {
  readonly figure = make("figure", { class: "chart" });
  #place = make("div", { role: "img" });
  #plot: uPlot | null = null;
  #data: number[][] = [];

  constructor(readonly options: ChartOptions) {
    this.figure.append(make("figcaption", {}, options.title), this.#place);
    new ResizeObserver(() => this.#plot?.setSize({ width: this.#width(), height: HEIGHT })).observe(this.#place);
  }

  #width = (): number => Math.max(200, this.#place.clientWidth);

  show(data: number[][]): void {
    this.#data = data;
    const words = this.options.series.map(({ label }, at) => `${label} ${this.options.text(data[at + 1]?.at(-1) ?? 0)}, peak ${this.options.text(Math.max(0, ...(data[at + 1] ?? [])))}`);
    this.#place.setAttribute("aria-label", `${this.options.title}: ${words.join("; ")}`);
    if (!this.figure.isConnected) return;
    if (this.#plot) this.#plot.setData(data as uPlot.AlignedData);
    else this.#make();
  }

  // Draws the chart again, in the colors of the current theme.
  redraw(): void {
    this.#plot?.destroy();
    this.#plot = null;
    if (this.#data.length && this.figure.isConnected) this.#make();
  }

  #make(): void {
    const { series, most, text } = this.options;
    const [ink, line] = [resolved(this.#place, "--dim"), resolved(this.#place, "--line")];
    const axis = { stroke: ink, font: FONT, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 } };
    const options: uPlot.Options = {
      width: this.#width(),
      height: HEIGHT,
      padding: [8, 30, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      legend: { markers: { width: 2 } },
      scales: {
        x: { range: (_, low, high) => [Math.min(low, high - MIN_S), high] },
        y: { range: (_, __, high) => [0, most ?? ceiling(high)] },
      },
      axes: [
        { ...axis, space: 80, size: 28, values: (_, at, __, ___, step) => at.map((one) => timeOf(one, step)) },
        { ...axis, size: 48, space: 30, incrs: STEPS, values: (_, at) => at.map(text) },
      ],
      series: [
        { label: "Time", value: (plot, at) => timeOf(at ?? plot.data[0].at(-1)!, 1) },
        ...series.map(({ label, color }) => ({ label, stroke: resolved(this.#place, color), width: 1.5, points: { show: false }, value: latest(text) })),
      ],
    };
    this.#plot = new uPlot(options, this.#data as uPlot.AlignedData, this.#place);
  }
}
