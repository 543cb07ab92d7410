"""How near to what no plan could beat plans of activations and lasting state come, without a card: the six budgets of cases/states.py, simulated.

Calls take what they took on an H200, where a plan that was made for one ran; all else is what the profile of that machine says. The bound is that of
`fit`, in the memory that plans have. "State alone" is placed by hand, every block checkpointed, as in cases/states.py.

    python -m benchmarks.cases.joint --seconds 60 [--rows "8 GB" "24 GiB"] [--dry]
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import results
from benchmarks.cases.states import LARGE, SHAPE, Way, _model, _with_loss, placements, ways

NEEDS = ""
NAME, BASELINE = "auto", "state alone"
MACHINE = "h200"
MODELS = ("compiled", "7b")  # parts of cases/states.py
ROOM = 0.98  # of the budget, as fit plans
HOST_BYTES = 120 << 30
SECONDS = 60.0
# Of a block's forward, and of its backward with everything made again: alone, on an H200 (results/h200/2026-11-19d-states-compiled.json and
# 2026-11-18i-states-7b.json, from `waits` by the number of calls). Other choices are scaled as these are.
CALL_SECONDS = {"compiled": (6.4e-3, 18.1e-3), "7b": (7.1e-3, 20.7e-3)}


@dataclass(frozen=True)
class Question:
    """What a row asks for: a menu within a budget, what updates take of it, and what no plan could beat."""

    menu: Any
    takes: Any
    counting: Any  # while the planner asks what updates take
    bound_seconds: float


class Steps:
    """One model, without values, and its menu on the machine."""

    def __init__(self, part: str) -> None:
        import torch

        from tierwise import machines
        from tierwise.execute.below import Below
        from tierwise.execute.null_device import NullDevice
        from tierwise.execute.session import Session
        from tierwise.fitting.homes import homes_of, regions_of
        from tierwise.fitting.menus import prepare_menu

        shape = LARGE if part == "7b" else SHAPE
        llama = _model(shape, "meta", compiled=False).to(torch.bfloat16)
        llama.gradient_checkpointing_disable()

        self.part, self.model, self.compiled = part, _with_loss(llama), part == "compiled"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.machine, self.device = machines.load(MACHINE), NullDevice(1 << 40)
        self.session, self.below = Session(self.model, self.device, lambda args, kwargs: None), Below(self.device, host_limit_bytes=HOST_BYTES)
        tokens = torch.zeros(shape["batch"], shape["seq"], dtype=torch.long)
        with self.session.suspended():
            prepared = prepare_menu(
                self.model, {"tokens": tokens}, self.optimizer, self.machine, self.device, compile=self.compiled, masters="fp32",
                at_hand=self._lasting(1).at_hand,
            )  # fmt: skip
        graph = prepared.menu.problem.graph
        self.regions = regions_of(graph)
        homes = homes_of(self.model, graph, self.optimizer, masters="fp32", update="backward", disk=False, on_card=True)
        self.menu = replace(prepared.menu, homes=homes, choices={r: self._as_measured(c) for r, c in prepared.menu.choices.items()})

    def _lasting(self, budget_bytes: int) -> Any:
        from tierwise.fitting.lasting import Lasting

        return Lasting(self.session, self.below, self.optimizer, "fp32", "backward", budget_bytes, compiled=self.compiled)

    def _as_measured(self, choices: Sequence[Any]) -> tuple[Any, ...]:
        """Those of the blocks; a norm takes what it takes."""
        forward, backward = CALL_SECONDS[self.part]
        least = choices[-1]
        if least.forward_seconds < forward / 4:
            return tuple(choices)
        there, back = forward / least.forward_seconds, backward / least.backward_seconds
        return tuple(replace(c, forward_seconds=there * c.forward_seconds, backward_seconds=back * c.backward_seconds) for c in choices)

    def within(self, budget_bytes: int) -> Question:
        """As fit asks it."""
        from tierwise.fitting.least import least_seconds
        from tierwise.lower import with_budget

        lasting = self._lasting(budget_bytes)
        lasting.regions = self.regions
        menu = with_budget(self.menu, int(ROOM * budget_bytes) - self.machine.device.library_bytes)

        def takes(states: Any) -> tuple[int, int]:
            device_bytes, host_bytes = lasting.takes(states)
            return device_bytes + lasting.holes_bytes(states), host_bytes

        bound = least_seconds(menu, "backward", self.machine, lambda states: (lasting.holes_bytes(states), 0))
        return Question(menu, takes, lasting.counting, bound)


def run(seconds: float = SECONDS, only: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    for part in MODELS:
        wanted = [way for way in ways() if way.part == part and way.fitted and (only is None or way.name.removeprefix("fit, ") in only)]
        steps = Steps(part) if wanted else None
        for way in wanted:
            assert steps is not None and way.budget_bytes is not None
            question, budget = steps.within(way.budget_bytes), way.name.removeprefix("fit, ")
            case = f"{way.case.split(',')[0]} in {budget}"
            about = {"case": case, "budget_bytes": way.budget_bytes, "bound_seconds": question.bound_seconds}
            by_hand = next((other for other in ways() if other.part == part and other.name == f"{BASELINE}, {budget}"), None)
            for found in (planned(question, seconds), *([alone(question, by_hand, steps)] if by_hand is not None else [])):
                yield about | found | {"times_bound": found["seconds"] / question.bound_seconds}


def planned(question: Question, seconds: float) -> dict[str, Any]:
    from tierwise.ir.program import MIN_SENT_BYTES
    from tierwise.lower import choose_jointly

    began = time.perf_counter()
    with question.counting():
        chosen = choose_jointly(
            question.menu, tiers=("dram",), update="backward", takes=question.takes, min_sent_bytes=MIN_SENT_BYTES, seconds=seconds, explained=False
        )
    planning_seconds = time.perf_counter() - began
    return {"way": NAME, "seconds": chosen.seconds, "peak_bytes": chosen.peak_bytes, "planning_seconds": planning_seconds}


def alone(question: Question, way: Way, steps: Steps) -> dict[str, Any]:
    """What is placed by hand, wherever it fits: simulated in as much memory as it takes."""
    from tierwise.lower import image, with_budget
    from tierwise.lower.choose import predicted, recompute_everything

    layers = sum(module.endswith("self_attn") for module, _ in steps.model.named_modules())
    states = {f"llama.{path}": place for path, place in placements(way, layers, way.cpu_share).items()}
    ample = with_budget(question.menu, 1 << 40)
    made = image(ample, replace(recompute_everything(ample), states=states, update="backward"))
    found = predicted(made, 1 << 40)
    return {"way": BASELINE, "seconds": found.seconds, "peak_bytes": found.peak_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cases.joint", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of planning, for each row")
    parser.add_argument("--rows", nargs="*", help='only these budgets, such as "8 GB"')
    parser.add_argument("--dry", action="store_true", help="print and keep nothing")
    given = parser.parse_args()
    found = []
    for row in run(given.seconds, given.rows):
        found.append(row)
        print(json.dumps(row), flush=True)
    if not given.dry:
        command = shlex.join(["python", "-m", "benchmarks.cases.joint", *sys.argv[1:]])
        print("wrote", results.write("joint", found, machine="simulated", command=command, baseline=BASELINE))
        (results.HERE / "RESULTS.md").write_text(results.page(), encoding="utf-8")


if __name__ == "__main__":
    main()
