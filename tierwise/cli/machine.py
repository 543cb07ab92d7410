"""tierwise machine: the machines that ship, or one of them in full or as a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ._inputs import JsonOption

if TYPE_CHECKING:
    from ..ir import Machine


def machine(
    name: Annotated[str | None, typer.Option("--name", metavar="M", help="A shipped machine or a machine file.", show_default=False)] = None,
    everything: Annotated[bool, typer.Option("--list", help="List the machines that ship; so does no option at all.")] = False,
    probe: Annotated[bool, typer.Option("--probe", help="Measure the machine this runs on, with a GPU or without.")] = False,
    disk: Annotated[str, typer.Option("--disk", metavar="DIR", help="With --probe: a folder on the disk to measure.")] = ".",
    out: Annotated[str | None, typer.Option("-o", "--out", metavar="FILE", help="Write the machine to a file.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Show machines as planning sees them: tiers, links, processors."""
    import json

    from .. import machines
    from ..errors import BadInput
    from ..ir import serial
    from . import _terminal as terminal
    from ._inputs import check_writable

    check_writable(out)
    if probe and (name is not None or everything):
        raise BadInput("--probe measures this machine; leave --name and --list out")
    if not probe and (name is None or everything):
        if name is not None or out is not None:
            raise BadInput("a list has no --name and no --out; leave --list out, or name one machine to write")
        found = [machines.load(known) for known in machines.names()]
        if as_json:
            return terminal.print_json([json.loads(serial.dumps(one)) for one in found])
        _list(found)
        return terminal.say_next("tierwise", "machine", "--name", "h200")
    one = _probed(disk) if probe else machines.load(name or "")
    if out is not None:
        serial.save(one, out)
    if as_json:
        terminal.print_json(json.loads(serial.dumps(one)))
    elif out is None:
        _show(one)
    if out is not None:
        terminal.say(f"Wrote {out}.")
    terminal.say_next("tierwise", "compare", "examples/gpt-small.step.json", "--machine", out or name or "machine.json", "--budget", "6GiB")


def _probed(disk: str) -> Machine:
    from pathlib import Path

    from ..errors import BadInput
    from ..profile.probe import probe
    from . import _terminal as terminal

    if not Path(disk).is_dir():
        raise BadInput(f"--disk {disk} is not a folder; name one on the disk to measure")
    with terminal.progress(5) as begin:
        try:
            return probe(Path(disk), begin)
        except OSError as error:
            raise BadInput(
                f"cannot measure the disk of {disk}: {error.strerror or error}; name a folder that can be written and has 1 GiB free"
            ) from None


def _list(found: list[Machine]) -> None:
    from ..units import format_bytes
    from . import _terminal as terminal

    numbers = ("hbm", "dram", "nvme", "bf16\nTFLOP/s", "hbm\nGB/s", "link\nGB/s")
    columns = (terminal.Column("machine", right=False), *map(terminal.Column, numbers), terminal.Column("source", right=False))
    lines = []
    for one in found:
        device = one.device
        cells = (
            one.name,
            *(format_bytes(one.capacity(tier)) for tier in ("hbm", "dram", "nvme")),
            f"{device.flops_per_second['bf16'] / 1e12:.0f}",
            f"{device.bytes_per_second / 1e9:.0f}",
            f"{one.link('dram', 'hbm').bytes_per_second / 1e9:.1f}",
            "measured" if one.source.startswith("measured") else "data sheet",
        )
        lines.append(terminal.Line(cells))
    terminal.print_table(columns, lines)


def _show(one: Machine) -> None:
    from ..units import format_bytes, format_seconds
    from . import _terminal as terminal

    left = terminal.Column("", right=False)
    tiers = [
        terminal.Line((f"tier {tier.name}", format_bytes(tier.capacity_bytes) + (f" within {tier.within}" if tier.within else "")))
        for tier in one.tiers
    ]
    links = []
    for link in one.links:
        text = f"{link.bytes_per_second / 1e9:.1f} GB/s, {format_seconds(link.latency_seconds)} a copy, over {' and '.join(link.lanes)}"
        if link.staging_bytes:
            text += f", {format_bytes(link.staging_bytes)} of {link.staging_tier} as bounce buffer"
        links.append(terminal.Line((f"link {link.src} -> {link.dst}", text)))
    processors = []
    for processor in one.processors:
        text = f"works in {processor.tier}, {processor.bytes_per_second / 1e9:.0f} GB/s, {format_seconds(processor.launch_seconds)} a launch"
        if processor.flops_per_second:
            text += ", " + ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in processor.flops_per_second.items()) + " TFLOP/s"
        processors.append(terminal.Line((f"processor {processor.name}",), rest=text))
    terminal.print_table(
        (terminal.Column(one.name, right=False), left),
        [*tiers, *links, *processors, terminal.Line(("source",), rest=one.source)],
    )
