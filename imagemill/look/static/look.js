// Marks by keyboard and button, and movement in grids and between neighbours. Every page also works without this script.
"use strict";

const token = document.querySelector('meta[name="imagemill-token"]').content;
const cards = [...document.querySelectorAll(".card")];
const say = (text) => { document.getElementById("status").textContent = text; };
let anchor = -1;

const isMarked = (card) => card.classList.contains("marked");
const canBeMarked = (card) => Boolean(card?.querySelector(".mark"));
const focused = () => cards.findIndex((card) => card.contains(document.activeElement));
const focus = (number) => cards[number]?.querySelector("a, button")?.focus();

function show(card, marked) {
  card.classList.toggle("marked", marked);
  const button = card.querySelector(".mark");
  if (button) {
    button.setAttribute("aria-pressed", String(marked));
    button.textContent = marked ? "marked" : "mark";
  }
}

async function mark(wanted, marked) {
  const chosen = wanted.filter((card) => canBeMarked(card) && isMarked(card) !== marked);
  const form = new URLSearchParams({ token, on: marked ? "1" : "0" });
  chosen.forEach((card) => form.append("item", card.dataset.item));
  chosen.forEach((card) => show(card, marked));
  try {
    const answer = await fetch("marks", { method: "POST", body: form, headers: { Accept: "application/json" } });
    if (!answer.ok) throw new Error(String(answer.status));
    const { marked: number } = await answer.json();
    say(`${number} marked`);
  } catch (error) {
    chosen.forEach((card) => show(card, !marked));
    say(`The marks could not be changed (${error.message}). Reload the page.`);
  }
}

function toggle(number, range) {
  if (!token || !cards[number]) return;
  if (!canBeMarked(cards[number])) return say("This input is no image that was opened: it cannot be marked.");
  const marked = !isMarked(cards[number]);
  if (range && anchor >= 0) {
    const [first, last] = [Math.min(anchor, number), Math.max(anchor, number)];
    mark(cards.slice(first, last + 1), isMarked(cards[anchor]));
  } else {
    mark([cards[number]], marked);
    anchor = number;
  }
}

function below(number, step) {
  const { offsetTop, offsetLeft } = cards[number];
  const others = cards.map((card, n) => n).filter((n) => Math.sign(cards[n].offsetTop - offsetTop) === step);
  const row = step > 0 ? Math.min(...others.map((n) => cards[n].offsetTop)) : Math.max(...others.map((n) => cards[n].offsetTop));
  const inRow = others.filter((n) => cards[n].offsetTop === row);
  return inRow.sort((a, b) => Math.abs(cards[a].offsetLeft - offsetLeft) - Math.abs(cards[b].offsetLeft - offsetLeft))[0] ?? number;
}

document.addEventListener("click", (event) => {
  const button = event.target.closest(".mark");
  if (button) toggle(cards.findIndex((card) => card.contains(button)), event.shiftKey);
});

document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  const grid = document.querySelector("article.card") ? null : document.querySelector(".grid");
  const number = grid ? focused() : 0;
  const follow = (selector) => document.querySelector(selector)?.click();
  // A focused table or text scrolls with the arrows.
  if (event.target.matches(".scroll, pre") && event.key.startsWith("Arrow")) return;
  if (event.key === "x" || event.key === "X") toggle(number, event.shiftKey);
  else if (event.key === "Escape") follow(".up");
  else if (!grid && event.key === "ArrowLeft") follow('[rel="prev"]');
  else if (!grid && event.key === "ArrowRight") follow('[rel="next"]');
  else if (!grid || !event.key.startsWith("Arrow")) return;
  else if (number < 0) focus(0);
  else if (event.key === "ArrowLeft") focus(number - 1);
  else if (event.key === "ArrowRight") focus(number + 1);
  else focus(below(number, event.key === "ArrowDown" ? 1 : -1));
  event.preventDefault();
});

document.querySelectorAll("form.filters").forEach((form) => form.addEventListener("submit", () => {
  // Fields that are left empty stay out of the address.
  [...form.elements].filter((field) => field.name && field.value === "").forEach((field) => { field.disabled = true; });
}));

// A page that the browser kept may show old marks; a command that runs ends soon.
window.addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });
if (document.querySelector(".running")) setTimeout(() => location.reload(), 1000);
