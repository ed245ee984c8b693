// Pages opened as files may not start workers, which the search runs in. There, a hidden frame does a worker's job.
// The name keeps mkdocs-material's offline plugin from adding a script of the same kind from another server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #queue = [];
    #frame = document.createElement("iframe");
    #ready = false;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      (document.body ?? document.documentElement).append(this.#frame);
      const inside = this.#frame.contentWindow;
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => this.#load(each)), Promise.resolve());
      this.#load(url).then(() => {
        this.#ready = true;
        this.#queue.splice(0).forEach(data => this.postMessage(data));
      });
    }

    #load(url) {
      return new Promise((done, failed) => {
        const script = this.#frame.contentDocument.createElement("script");
        Object.assign(script, { src: String(url), onload: done, onerror: failed });
        this.#frame.contentDocument.body.append(script);
      });
    }

    postMessage(data) {
      if (this.#ready) this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      else this.#queue.push(data);
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
