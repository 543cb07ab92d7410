"""Write docs/reference/: the table of policies from their docstrings, the table of machines from their files. Nothing there is typed in."""

from __future__ import annotations

from pathlib import Path

from tierwise import machines, policies
from tierwise.units import format_bytes

REFERENCE = Path(__file__).parent / "reference"


def policies_page() -> str:
    cards = [policies.card(name) for name in policies.names()]
    parts = ["# Policies\n\nMade from the docstrings in `tierwise/policies/` by `make docs`.\n"]
    parts.append("| policy | year | venue | decides | fidelity | runs | needs | exactness |\n|---|---|---|---|---|---|---|---|")
    for c in cards:
        cells = (f"[{c.name}](#{c.name})", str(c.year or "-"), c.venue or "-", c.decides, c.fidelity)
        runs = "simulated" if c.simulated_only_because else "yes"
        parts.append("| " + " | ".join((*cells, runs, ", ".join(c.requires) or "-", c.exactness)) + " |")
    parts += [f"| {a.name} | {a.year} | {a.venue} | {a.status}: {a.reason} | | | | |" for a in policies.ABSENT]
    for card in cards:
        parts.append(f"\n## {card.name}\n\n{card.summary}\n")
        facts = {"Paper": card.paper, "Idea": card.idea, "Rule": card.rule, "Differs": card.differs}
        if card.simulated_only_because:
            facts["Simulated only"] = card.simulated_only_because
        parts += [f"- **{title}**: {text}" for title, text in facts.items()]
    return "\n".join(parts) + "\n"


def machines_page() -> str:
    parts = ["# Machines\n\nMade from the files in `tierwise/machines/` by `make docs`.\n"]
    parts.append("| machine | hbm | dram | nvme | bf16 / fp16 / tf32 / fp32 TFLOP/s | hbm GB/s | link GB/s |\n|---|---|---|---|---|---|---|")
    found = [machines.load(name) for name in machines.names()]
    for one in found:
        sizes = " | ".join(format_bytes(one.capacity(tier)) for tier in ("hbm", "dram", "nvme"))
        rates = " / ".join(f"{one.device.flops_per_second[precision] / 1e12:.0f}" for precision in ("bf16", "fp16", "tf32", "fp32"))
        link = one.link("dram", "hbm").bytes_per_second / 1e9
        parts.append(f"| {one.name} | {sizes} | {rates} | {one.device.bytes_per_second / 1e9:.0f} | {link:.1f} |")
    parts.append("")
    parts += [f"- **{one.name}**: {one.source}" for one in found]
    return "\n".join(parts) + "\n"


def main() -> None:
    REFERENCE.mkdir(exist_ok=True)
    for name, page in (("policies.md", policies_page()), ("machines.md", machines_page())):
        (REFERENCE / name).write_text(page, encoding="utf-8")
        print("wrote", REFERENCE / name)


if __name__ == "__main__":
    main()
