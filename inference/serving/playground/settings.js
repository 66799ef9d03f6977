// The settings of requests, which are read from the form and stored nowhere.

import { byId } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

/** The form with the settings. */
export class Settings {
  constructor(onClose) {
    this.dialog = byId("settings");
    this.form = byId("settings-form");
    this.form.reset(); // a browser may have kept the values of an earlier visit
    byId("open-settings").addEventListener("click", () => this.open());
    this.dialog.addEventListener("close", onClose);
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog && this.form.reportValidity()) this.dialog.close();
    });
  }

  /** Opens the form, and moves the focus to a field. */
  open(field = "system") {
    if (!this.dialog.open) this.dialog.showModal();
    this.form.elements[field].focus();
  }

  get key() {
    return this.form.elements.key.value.trim();
  }

  get system() {
    return this.form.elements.system.value.trim();
  }

  get drafts() {
    return this.form.elements.drafts.checked;
  }

  get compares() {
    return this.form.elements.compare.checked;
  }

  /** Returns the fields of a request that the user has set. */
  fields() {
    const found = {};
    for (const name of NUMBERS) {
      const { value, valueAsNumber } = this.form.elements[name];
      if (value !== "" && Number.isFinite(valueAsNumber)) found[name] = valueAsNumber;
    }
    return found;
  }
}
