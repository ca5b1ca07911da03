// The live dashboard: the kernel sends the table of ranks as HTML, this sends what is pressed (see dashboard.py).

const LOOK_MS = 2000;
const STALE_MS = 6000; // the kernel looks each second
const UNHEARD_MS = 3000;
const SURE_MS = 5000;
const ACTIONS = {
  interrupt: "Interrupt what the ranks run",
  heal: "Replace dead ranks, rebuild process groups",
  restart: "Replace every rank; what they hold is lost",
};

export default {
  render({ model, el }) {
    const table = make("div", { class: "cmd-table" });
    const told = make("div", { class: "cmd-told", role: "status" });
    const buttons = Object.entries(ACTIONS).map(([action, title]) =>
      make("button", { type: "button", title, "data-action": action, onclick: () => press(action) }, action),
    );
    const bar = make("div", { class: "cmd-buttons", role: "group", "aria-label": "the mesh" }, ...buttons);
    const root = make("div", { class: "cellmesh cmd-root" }, bar, told, table);
    const unheard = later(UNHEARD_MS);
    let isSeen = false;
    let heardAt = Date.now();
    let sureUntil = 0;

    const say = (text, failed = false) => {
      told.textContent = text;
      told.classList.toggle("cmd-bad", failed);
    };
    const send = (message) => {
      try {
        model.send(message);
      } catch (error) {
        say(`the kernel cannot be reached: ${error.message}`, true);
      }
    };
    const press = (action) => {
      if (action === "restart" && Date.now() > sureUntil) {
        sureUntil = Date.now() + SURE_MS;
        say("restart replaces every rank, and what they hold is lost: press again to do it");
        return;
      }
      sureUntil = 0;
      say(`${action}: …`);
      unheard(() => say(`${action}: the kernel is busy, and does this after its cell; the notebook's stop button works at once`));
      send({ kind: "do", action });
    };
    const look = () => {
      const hasEnded = Boolean(model.get("ended"));
      const looks = isSeen && document.visibilityState === "visible" && !hasEnded;
      if (looks) send({ kind: "look" });
      else heardAt = Date.now();
      root.classList.toggle("cmd-stale", hasEnded || Date.now() - heardAt > STALE_MS);
    };
    const handlers = {
      "change:table": () => { table.innerHTML = model.get("table"); }, // the kernel has escaped what is a user's
      "change:looked_at": () => { heardAt = Date.now(); },
      "change:told": () => {
        const { action = "", text = "", failed = false, is_busy: isBusy = false } = model.get("told");
        unheard.cancel();
        say(action && action !== "look" ? `${action}: ${text}` : text, failed);
        for (const button of buttons) button.disabled = isBusy && button.dataset.action !== "interrupt";
      },
      "change:ended": () => {
        if (!model.get("ended")) return;
        say(model.get("ended"));
        for (const button of buttons) button.disabled = true;
        look();
      },
    };
    for (const [event, handler] of Object.entries(handlers)) {
      model.on(event, handler);
      handler();
    }
    el.append(root);
    const seeing = new IntersectionObserver((entries) => {
      isSeen = entries.at(-1).isIntersecting;
      look();
    });
    seeing.observe(root);
    document.addEventListener("visibilitychange", look);
    const timer = setInterval(look, LOOK_MS);
    return () => {
      clearInterval(timer);
      unheard.cancel();
      seeing.disconnect();
      document.removeEventListener("visibilitychange", look);
      for (const [event, handler] of Object.entries(handlers)) model.off(event, handler);
    };
  },
};
