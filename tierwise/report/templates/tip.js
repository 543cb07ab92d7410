// The one box that follows the pointer, and the one place that speaks to screen readers.
const tip = document.querySelector(".tip"), status = document.querySelector(".status");
const escape = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

function showTip(html, x, y) {
  tip.innerHTML = html;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 16 + width > innerWidth ? x - 16 - width : x + 16;
  const top = y + 18 + height > innerHeight ? y - 12 - height : y + 18;
  tip.style.left = `${Math.max(6, Math.min(left, innerWidth - width - 6))}px`;
  tip.style.top = `${Math.max(6, top)}px`;
}

function hideTip() { tip.hidden = true; }

const factsHtml = (facts) => `<b>${escape(facts[0][1])}</b><br><span class="muted">${escape(facts[1][1])}</span><dl>${facts.slice(2)
  .map(([name, value]) => `<dt>${escape(name)}</dt><dd>${escape(value)}</dd>`).join("")}</dl>`;
const factsText = (facts) => facts.map(([name, value]) => (name ? `${name} ${value}` : value)).join(", ");
function say(text) { status.textContent = text; }
