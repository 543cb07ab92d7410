"""The table of policies from their docstrings, the table of machines from their files. Nothing there is typed in."""

from __future__ import annotations

from tierwise import machines, policies
from tierwise.units import format_bytes


def policies_page() -> str:
    """What each decides, and where it comes from; its own page has the rest."""
    parts = [
        "# Policies\n\nMade from the docstrings in `tierwise/policies/` when the site is built. *Simulated*: its plans are judged and timed, but "
        "cannot run at the borders of blocks. *Like*: the paper's rule was not to be had in full, and the page says what was inferred.\n",
        "| policy | year | venue | decides | fidelity | runs | needs | exactness |\n|---|---|---|---|---|---|---|---|",
    ]
    for card in map(policies.card, policies.names()):
        runs = "simulated" if card.simulated_only_because else "yes"
        cells = (f"[{card.name}]({card.name}.md)", str(card.year or "-"), card.venue or "-", card.decides, card.fidelity, runs)
        parts.append("| " + " | ".join((*cells, ", ".join(card.requires) or "-", card.exactness)) + " |")
    parts.append("\n## Published, and not here\n\n| system | year | venue | why |\n|---|---|---|---|")
    parts += [f"| {absent.name} | {absent.year} | {absent.venue} | {absent.status}: {absent.reason} |" for absent in policies.ABSENT]
    return "\n".join(parts) + "\n"


def machines_page() -> str:
    parts = ["# Machines\n\nMade from the files in `tierwise/machines/` when the site is built.\n"]
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
