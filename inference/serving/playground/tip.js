// The description of the token, box or step below the pointer.

import { byId } from "./dom.js";

/** Shows a description of whatever element the pointer is over. */
export function installTips(describe) {
  const tip = byId("tip");
  document.addEventListener("pointerover", (event) => {
    const text = event.pointerType === "touch" ? null : describe(event.target);
    tip.hidden = !text;
    if (text) {
      tip.textContent = text;
      moveTo(tip, event);
    }
  });
  document.addEventListener("pointermove", (event) => {
    if (!tip.hidden) moveTo(tip, event);
  });
  document.addEventListener("scroll", () => (tip.hidden = true), { capture: true, passive: true });
}

function moveTo(tip, { clientX, clientY }) {
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(clientX - width / 2, 8), innerWidth - width - 8);
  const below = clientY + 20 + height > innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${below ? clientY - height - 12 : clientY + 20}px`;
}
