// The search runs in a worker, and browsers start no worker for a page that was opened as a file.  There it runs in a
// hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.frame = frame;
      const start = document.createElement("script");
      start.textContent =
        "var IFrameWorker = true;" +
        "function postMessage(data) { parent.postMessage(data, '*'); }" +
        "function importScripts(...urls) {" +
        "  return urls.reduce((before, url) => before.then(() => new Promise((done) => {" +
        "    const script = document.createElement('script');" +
        "    script.src = url; script.onload = done; document.body.appendChild(script);" +
        "  })), Promise.resolve());" +
        "}";
      const body = document.createElement("script");
      body.src = new URL(url, location.href).href;
      frame.srcdoc = `<!doctype html><body>${start.outerHTML}${body.outerHTML}</body>`;
      document.body.appendChild(frame);
      window.addEventListener("message", (event) => {
        if (event.source !== frame.contentWindow) return;
        const copy = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(copy);
        if (this.onmessage) this.onmessage(copy);
      });
      this.ready = new Promise((done) => frame.addEventListener("load", done));
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
