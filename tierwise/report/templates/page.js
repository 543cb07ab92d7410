// Colours, tabs, and everything set up.
const remembered = { get() { try { return localStorage.getItem("tierwise-theme"); } catch { return null; } }, set(value) { try { localStorage.setItem("tierwise-theme", value); } catch { /* a file without storage forgets */ } } };
const stages = [];

function repaint() {
  readColours();
  for (const stage of stages) stage.view.changed();
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  for (const button of document.querySelectorAll("[data-theme-choice]")) button.setAttribute("aria-pressed", button.dataset.themeChoice === theme);
  repaint();
}

function setTabs(list) {
  const tabs = [...list.querySelectorAll("[role=tab]")], panel = (tab) => document.getElementById(tab.getAttribute("aria-controls"));
  const choose = (tab) => {
    for (const other of tabs) {
      other.setAttribute("aria-selected", other === tab);
      other.tabIndex = other === tab ? 0 : -1;
      panel(other).hidden = other !== tab;
    }
    repaint();
  };
  list.hidden = false;
  list.addEventListener("click", (event) => { const tab = event.target.closest("[role=tab]"); if (tab) choose(tab); });
  list.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const next = tabs[(tabs.indexOf(event.target) + by + tabs.length) % tabs.length];
    choose(next);
    next.focus();
    event.preventDefault();
  });
  choose(tabs[0]);
}

const themes = document.querySelector("[data-themes]");
themes.hidden = false;
choose(themes, (button) => { setTheme(button.dataset.themeChoice); remembered.set(button.dataset.themeChoice); });
setTheme(["light", "dark"].includes(remembered.get()) ? remembered.get() : "auto");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
for (const element of document.querySelectorAll("[data-stage]")) stages.push(new Stage(element));
for (const element of document.querySelectorAll("[data-tabs]")) setTabs(element);
for (const element of document.querySelectorAll("[data-silhouettes]")) drawSilhouettes(element);
for (const element of document.querySelectorAll("[data-losses]")) drawLosses(element);
for (const element of document.querySelectorAll("[data-pareto]")) drawPareto(element);
for (const element of document.querySelectorAll("[data-tree]")) growTree(element);
addEventListener("scroll", hideTip, { passive: true });
document.documentElement.dataset.ready = "yes";
