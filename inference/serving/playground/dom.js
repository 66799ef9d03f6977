// Small helpers for elements; text is always set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Returns the element with an id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Returns a new element with a class, a text and properties. */
export function make(tag, className = "", text = null, properties = {}) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== null) element.textContent = text;
  return Object.assign(element, properties);
}

/** Returns a new element of an SVG with attributes and a text. */
export function makeSvg(tag, attributes = {}, text = null) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  return element;
}

/** Returns a function that runs another one at most once per frame. */
export function oncePerFrame(work) {
  let isWaiting = false;
  return () => {
    if (isWaiting) return;
    isWaiting = true;
    requestAnimationFrame(() => {
      isWaiting = false;
      work();
    });
  };
}
