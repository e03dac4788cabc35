// The search of the site runs in a worker, which browsers do not start for pages that were opened as files.  There a
// hidden frame takes its place: the worker's script runs in it, and messages are handed over as events.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside = new Promise((started) => {
        const script = inside.document.createElement("script");
        script.src = new URL(url, location.href);
        script.onload = () => started(inside);
        inside.document.body.append(script);
      });
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
}
