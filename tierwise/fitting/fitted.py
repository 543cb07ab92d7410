"""A model under a budget: plans are made when a step of a new shape begins, kept by shape, and run by the session."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .. import policies
from ..errors import BadInput, InfeasibleBudget, NotExecutable, OutOfHostMemory, OverCapacity, UnknownName
from ..execute.below import Below
from ..execute.device import Device
from ..execute.session import Plans, Session
from ..execute.states.gradients import Gradient
from ..execute.states.torch_compat import without_torch_function
from ..execute.states.torchs import is_piecewise
from ..ir import Machine, Menu, Placement, Program, Timeline, check_schedule, peak_bytes
from ..lower import Image, image, keeping_everything, with_budget
from ..lower.states import anew
from ..regions.elsewhere import Elsewhere
from ..simulate import simulate
from ..units import exact_bytes, format_bytes
from .feedback import NOTICED, TIMED_STEPS, WARM_STEPS, is_cpu_off, is_off
from .homes import homes_of, regions_of
from .keys import has_gradients, key_of, needs_backward
from .lasting import Lasting, words_of
from .least import least_seconds
from .losses import adopt_losses, give_back_losses
from .measured_here import host_rate, with_card, with_host
from .menus import PreparedMenu, RegionCode, as_keywords, prepare_menu
from .meter import Meter
from .plan import Plan
from .programs import program_for
from .returned import Returned
from .runnable import kept, region_plans, sent_bytes
from .saved import holds_output
from .settings import Settings, limited
from .sweeping import LOOKED, old_ones_rest, swept
from .trials import Trials
from .verify import verify_step

PLANNED_SHARE = 0.98  # of the budget: predictions of the peak are within 3%, mostly above
LEARNS_ON = {"cuda"}  # the null device's times are guesses, and nobody's concern
AGAIN_SECONDS = 3.0  # of planning in the middle of a training
WORTH_PLANNING = 0.01  # of the budget: what is gained by planning again
LEAST_TIGHTENING = 0.03  # of the budget: what a plan that ran out of memory is made tighter by, at least
FULL_STEPS, MOST_TIGHTENINGS = 3, 2  # steps one after the other in which the allocator gave memory back; and since memory is full of holes
_log = logging.getLogger("tierwise")


class Fitted:
    """What `fit` leaves with a model."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: Device,
        machine: Machine,
        settings: Settings,
        progress: Callable[[str], None],
        *,
        closes_device: bool = True,
        machine_is_given: bool = False,
    ) -> None:
        if settings.policy not in (known := ["auto", *policies.names()]):
            raise UnknownName("policy", settings.policy, known)
        self.model, self.optimizer, self.device, self.settings = model, optimizer, device, settings
        self.machine = limited(machine, settings)
        self.session = Session(model, device, self._before_pass)
        self.session.owner = self
        self.plans: dict[Any, Plan] = {}
        self.current: Plan | None = None
        self.below = Below(
            device,
            host_limit_bytes=settings.host_bytes,
            pinned_limit_bytes=settings.pinned_bytes,
            disk=settings.nvme,
            progress=progress,
        )
        self.lasting = Lasting(
            self.session, self.below, optimizer, settings.masters, settings.update, settings.budget_bytes, settings.weights, settings.compile
        )
        self.meter = Meter(self)
        self._returned = Returned()
        self.session.returned = self._returned.watch
        self._holds_output = settings.plan is None or holds_output(settings.plan)
        self._progress = progress
        self._tell = getattr(progress, "over", lambda sentence="": None)
        self._told: Plan | None = None
        self.set_aside: list[Callable[[], None]] = []  # called when all is given back, the last first
        self._closes_device, self._machine_is_given = closes_device, machine_is_given
        if optimizer is not None:
            self.set_aside.append(optimizer.register_step_post_hook(partial(_updated, weakref.ref(self.meter), weakref.ref(self._returned))).remove)
        self._modules, self._parameters = list(model.modules()), list(model.parameters())
        self._menus: dict[Any, PreparedMenu] = {}
        self._codes: dict[Any, RegionCode] = {}
        self._tightened_bytes = 0
        self._given_back = device.giving_back_count()
        self._steps_that_gave_back = 0  # one after the other
        self._tightenings = 0
        self._planned_again = False
        self._trials: dict[Any, Trials] = {}  # by shape
        self._has_plans_left_behind = False
        self._runs: dict[int, int] = {}  # steps by a plan
        self._refusals = device.out_of_memory_count()
        self._verified: set[Any] = set()
        self.session.install_root()
        self._losses = adopt_losses(model)
        self._modules = list(model.modules())

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        """The plan for calls of this shape, made now if there is none."""
        with swept():
            return self._prepared(self._key(args, kwargs), args, kwargs)

    def _prepared(self, key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        if key not in self.plans:
            cards = [self.device.torch_device] if self.device.torch_device.type == "cuda" else []
            anomalies = torch.autograd.set_detect_anomaly(False)
            # what is traced has no numbers to look at
            with torch.random.fork_rng(devices=cards), anomalies, self.lasting.unguarded(), Elsewhere() as elsewhere:
                made = self._made_for(key, args, kwargs, elsewhere)
                self.plans[key] = self._trials[key].choose(made) if key in self._trials else made
        self.current = self.plans[key]
        if self.lasting.differs(self.current.program):
            self._progress("moving parameters and optimizer state to where they live")
            try:
                self.lasting.place(self.current.program)
            except OutOfHostMemory as error:
                if self.lasting.states is None or (stays := self._stays(key)) is None:
                    raise
                _log.warning("the plan made again is not taken, since there is no room for it: %s", error)
                self.current = self.plans[key] = stays
        self.lasting.follow(self.current.program, self.current.menu.problem.budget_bytes)
        return self.current

    def _stays(self, key: Any) -> Plan | None:
        """The fastest plan so far, if state is where that has it; nothing is looked for any more."""
        if key not in self._trials or not self._trials[key].has_run:
            return None
        self._trials[key].settled = True
        return self._trials[key].fastest()[1] if self._runs_now(key) is not None else None

    def _runs_now(self, key: Any) -> Program | None:
        """The program of the fastest plan so far, if state is where that has it."""
        program = self._trials[key].fastest()[1].program
        return None if self.lasting.differs(program) else program

    def _made_for(self, key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], elsewhere: Elsewhere) -> Plan:
        corrects = key in self._trials and self._trials[key].corrections > 0
        again = self._planned_again or corrects
        is_quick = again and not (corrects and self.lasting.placements and self._fixed() is None)  # nothing that takes seconds to move may move
        seconds = min(self.settings.plan_seconds, AGAIN_SECONDS) if is_quick else self.settings.plan_seconds
        if key not in self._menus:
            self._menus[key] = self._menu(args, kwargs, elsewhere)
        try:
            return self._made(self._menus[key], seconds, may_move=not corrects, known=self._runs_now(key) if corrects else None)
        except InfeasibleBudget:
            if corrects:  # there is a plan that runs
                return self._trials[key].fastest()[1]
            if self._returned.held or not self._holds_output or self.settings.plan is not None:
                raise
            self._holds_output = False  # a loop that lets go of what the model returns may need less
            self._menus[key] = self._menu(args, kwargs, elsewhere)
            return self._made(self._menus[key], seconds)

    def record_next_step(self, *, reset_peak: bool = False) -> None:
        """Measure when everything runs in the next step; `measured` then has its Timeline.

        The allocator's peak is the user's: unless it may be reset, what a step held between the borders of regions is not known if
        an earlier step held more.
        """
        self.meter.record_next = True
        self.meter.reset_peak = reset_peak

    @property
    def measured(self) -> Timeline | None:
        """The last recorded step, once it is over."""
        return self.meter.timeline()

    def close(self) -> None:
        """Give everything back, whatever state a step was left in."""
        with contextlib.ExitStack() as stack:
            if self._closes_device:
                stack.callback(self.device.close)
            for give_back in self.set_aside:
                stack.callback(give_back)
            stack.callback(self.below.close)
            stack.callback(self.lasting.close)
            stack.callback(give_back_losses, self._losses)
            stack.callback(self.session.close)

    def _before_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plans | None:
        try:
            return self._plans(args, kwargs)
        finally:
            self.tell()

    def tell(self) -> None:
        """Whoever watches the work hears that it is done, and once what came of it."""
        new = self.current is not None and self.current is not self._told
        self._told = self.current
        self._tell(self.current.words()[0] if new and self.current is not None else "")

    def _plans(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plans | None:
        self._learn()
        self.meter.step_ends()
        self._look_at_what_is_held()
        self._compare()
        if not needs_backward(self._parameters, args, kwargs):
            return None
        plan = self.prepare(args, kwargs)
        self.below.provide(plan.host_slab_bytes, plan.disk_bytes)
        if self._has_plans_left_behind and self.is_settled:  # what they had in host memory was more than is needed now, maybe
            self.below.trim(max(plan.host_slab_bytes for plan in self.plans.values()))
            self._has_plans_left_behind = False
        self.session.copies = self.below.copies
        self._account(args, kwargs)
        if self.session.last is not None and self.session.last.waits_for_backward:
            self.session.say(
                "a forward begins before the backward of the one before it: plans are for one at a time, together they may exceed the budget"
            )
        if self.settings.verify and plan.program.states:
            raise BadInput(
                "verify=True runs the step twice with all gradients on the device, and this plan keeps some of the lasting state elsewhere; verify "
                "with a budget in which that fits, or leave verify out"
            )
        if self.settings.verify and (key := self._key(args, kwargs)) not in self._verified:
            self._progress("running the step twice, to compare it with plain checkpointing")
            verify_step(self, plan, args, kwargs)
            self._verified.add(key)
        self.meter.step_begins(plan)
        self._refusals = self.device.out_of_memory_count()
        return plan.plans

    def _look_at_what_is_held(self) -> None:
        """Plan again where what the model returns is in the way of a plan and the loop lets go of it, or holds what a plan counts on."""
        held, plan = self._returned.held, self.current
        if held is None or held == self._holds_output or plan is None or self.settings.policy != "auto" or self.settings.plan is not None:
            return
        if held or (plan.keep_all_bytes > plan.budget_bytes and self._returned.nbytes > WORTH_PLANNING * plan.budget_bytes):
            self._holds_output = held
            _log.info("the loop %s %s that the model returns: planned again", "holds" if held else "lets go of", format_bytes(self._returned.nbytes))
            self._planned_again = True
            self.plans.clear()
            self._menus.clear()
            self._trials.clear()

    @property
    def is_settled(self) -> bool:
        """Whether the plan of the last step is not looked at any more: its steps take what was predicted, or nothing better is known."""
        if self.current is None or self.device.torch_device.type not in LEARNS_ON or self.settings.policy != "auto":
            return self.current is not None
        key = next((key for key, known in self.plans.items() if known is self.current), None)
        return key in self._trials and self._trials[key].settled

    def _compare(self) -> None:
        """After a few steps by a plan, look at how one of them ran if they take something else than predicted: then that is what is known, and if the
        prediction was far off, plan again with it."""
        plan, device = self.current, self.device.torch_device.type
        if plan is None or device not in LEARNS_ON or self.settings.policy != "auto":
            return
        key = next((key for key, known in self.plans.items() if known is plan), None)
        if key is None:
            return
        trials = self._trials.setdefault(key, Trials(self.machine))
        if trials.settled:
            return
        run = self._runs[id(plan)] = self._runs.get(id(plan), 0) + 1
        looks_at = WARM_STEPS + TIMED_STEPS
        if run not in (looks_at, looks_at + 1) or (seconds := self.meter.step_seconds()) is None:
            return
        measured, on_cpu = self.measured if run > looks_at else None, self.meter.cpu_seconds()
        if measured is None and (is_off(plan.predicted, seconds, NOTICED) or is_cpu_off(plan.predicted, on_cpu)):
            self.meter.record_next = run == looks_at
            return
        del self.plans[key]
        self._has_plans_left_behind = True
        moves = self._fixed() is None
        least = self.least_seconds if moves and plan.program.states else None
        with swept(LOOKED):
            go_on = trials.look(plan, seconds, measured, lambda other: moves or not self.lasting.differs(other.program), on_cpu, least)
        if go_on is not None:
            self.plans[key] = go_on
        else:
            self._menus[key] = replace(self._menus[key], menu=trials.menu)

    def least_seconds(self, menu: Menu) -> float:
        """What no plan could beat, in the memory that plans have."""
        return least_seconds(menu, self.settings.update, self.machine, lambda states: (self.lasting.holes_bytes(states), 0))

    def _fixed(self) -> Mapping[str, Placement] | None:
        """Where lasting state has to stay. It moves only while no gradient waits, no plan of another shape counts on where it is, and its updates
        have the same bits wherever they run: torch's own have others on a card than on the CPU."""
        placed = self.lasting.placements
        has_bits_of_a_place = self.settings.masters is None and self.device.torch_device.type != "cpu"
        is_held = bool(self.plans) or has_bits_of_a_place or any(parameter.grad is not None for parameter in self._parameters)
        return placed if not placed or is_held else None

    def _learn(self) -> None:
        """After a step that ran out of memory although its plan fits, plan with less."""
        shortages, self.session.shortages = self.session.shortages, []
        given_back, before = self.device.giving_back_count(), self._given_back
        self._given_back, self._steps_that_gave_back = given_back, self._steps_that_gave_back + 1 if given_back > before else 0
        if self.current is None:
            return
        if self._steps_that_gave_back >= FULL_STEPS and not shortages and self._tightenings < MOST_TIGHTENINGS:
            self._tighten(int(LEAST_TIGHTENING * self.settings.budget_bytes))
            return
        if not (shortages or self.device.out_of_memory_count() > self._refusals):
            return
        # It does fit into what was allocated when no more was to be had, and in any case not into what was predicted.
        aside, least = self.current.aside_bytes, int(LEAST_TIGHTENING * self.settings.budget_bytes)
        room = min(self.current.peak_bytes - least, *(shortage.held_bytes for shortage in shortages), self.settings.budget_bytes) - aside
        self._tightened_bytes = int(self.settings.budget_bytes * PLANNED_SHARE) - aside - room
        self.plans.clear()
        self._trials.clear()
        _log.warning("a step ran out of memory although its plan fits; from now on steps are planned for %s", format_bytes(room + aside))

    def _tighten(self, nbytes: int) -> None:
        """Memory is too full of holes for this plan."""
        self._steps_that_gave_back = 0
        self._tightenings += 1
        self._tightened_bytes += nbytes
        self.plans.clear()
        self._trials.clear()
        _log.warning(
            "every step waits for memory to be given back, which is too full of holes: planned again with %s less",
            format_bytes(self._tightened_bytes),
        )

    def _account(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """What was made before this step is memory of the device, too; only a device that cannot see that itself has to be told."""
        if self.device.torch_device.type == "cuda":
            return
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        with without_torch_function():
            gradients = [parameter.grad for parameter in self._parameters]
            kept = [value for state in states for value in state.values()]
            for value in (*self._parameters, *self.model.buffers(), *gradients, *kept, *tree_leaves((args, dict(kwargs)))):
                if isinstance(value, torch.Tensor) and not isinstance(value, Gradient):
                    self.device.adopt(value)

    def _menu(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], elsewhere: Elsewhere) -> PreparedMenu:
        with self.session.suspended():
            found = prepare_menu(
                self.model,
                as_keywords(self.model, args, kwargs),
                self.optimizer,
                self.machine,
                self.device,
                compile=self.settings.compile,
                accumulation=has_gradients(self._parameters),
                masters=self.settings.masters,
                hold_output=self._holds_output,
                codes=self._codes,
                at_hand=self.lasting.at_hand,
                elsewhere=elsewhere,
                progress=self._progress,
            )
        card = self.device.torch_device
        if self._learns and card.type == "cuda" and self.settings.masters is None and self.optimizer is not None and is_piecewise(self.optimizer):
            found = replace(found, menu=with_card(found.menu, self.optimizer, card))
        graph, placed = found.menu.problem.graph, self.lasting.placements
        if has_gradients(self._parameters) and placed is None:  # they are in the way of whoever wants to move
            return found
        self.lasting.regions = regions_of(graph)
        homes = homes_of(
            self.model, graph, self.optimizer, masters=self.settings.masters, update=self.settings.update, disk=self.settings.nvme is not None,
            on_card=self.device.torch_device.type == "cuda",
        )  # fmt: skip
        graph = anew(graph, [path for path, place in (placed or {}).items() if place.gradients == "host"])
        return replace(found, menu=replace(found.menu, problem=replace(found.menu.problem, graph=graph), homes=homes))

    def _made(self, prepared: PreparedMenu, seconds: float, *, may_move: bool = True, known: Program | None = None) -> Plan:
        """`may_move`: also if lasting state that has to stay where it is leaves no plan. `known`: what runs now, which is to be beaten."""
        self._progress("planning")
        plan = self._planned(prepared, self._tightened_bytes, seconds, fixed=self._fixed(), may_move=may_move, known=known)
        for sentence in plan.words():
            _log.info("%s", sentence)
        calls = prepared.menu.problem.graph.calls
        self.session.install({calls[call].module: self.model.get_submodule(calls[call].module) for call in plan.program.calls})
        return plan

    def _planned(
        self, prepared: PreparedMenu, tightened_bytes: int, seconds: float, *, fixed: Mapping[str, Placement] | None, may_move: bool = True,
        room_for_holes: bool = True, known: Program | None = None,
    ) -> Plan:  # fmt: skip
        aside = self.machine.device.library_bytes + self._other_bytes(prepared)

        def takes(states: Mapping[str, Placement]) -> tuple[int, int]:
            passing, host = self.lasting.takes(states)
            return passing + (self.lasting.holes_bytes(states) if room_for_holes else 0), host

        room = int(self.settings.budget_bytes * PLANNED_SHARE) - aside - tightened_bytes
        menu = self._with_host(with_budget(prepared.menu, max(1, room)))
        tiers = tuple(tier for tier in ("dram", "nvme") if tier == "dram" or self.settings.nvme)
        try:
            with self.session.suspended(), self.lasting.counting(), old_ones_rest():
                prepared, program = program_for(
                    replace(prepared, menu=menu), self.settings.policy, tiers, self.model, self.device,
                    compile=self.settings.compile, update=self.settings.update, fixed=fixed, takes=takes, known=known,
                    saved=self.settings.plan if not self.plans and not tightened_bytes else None, plan_seconds=seconds,
                    progress=self._progress,
                )  # fmt: skip
            passing, state_host_bytes = self.lasting.takes(program.states) if program.states else (0, 0)
            aside, menu = aside + passing, with_budget(prepared.menu, max(1, room - passing))
        except InfeasibleBudget as error:
            if room_for_holes and (menu.homes or fixed):  # rather a plan with none to spare
                return self._planned(prepared, tightened_bytes, seconds, fixed=fixed, may_move=may_move, room_for_holes=False)
            if fixed is not None and not may_move:
                raise
            if fixed is not None:  # lasting state has to move again; plans of other shapes are made anew around it
                self.plans.clear()
                self._trials.clear()
                return self._planned(prepared, tightened_bytes, seconds, fixed=None)
            if tightened_bytes:  # as tight as it gets: better than to stop in the middle of a training
                least_tightened = int(self.settings.budget_bytes * PLANNED_SHARE) - aside - (error.least_bytes or 0)
                return self._planned(prepared, max(0, min(tightened_bytes - 1, least_tightened)), seconds, fixed=None)
            if error.least_bytes is None:
                raise
            least = int(((error.least_bytes or 0) + aside) / PLANNED_SHARE) + 1
            raise InfeasibleBudget(
                f"budget {format_bytes(self.settings.budget_bytes)} is too small for this step: with everything recomputed and sent away that can be "
                f"it needs {format_bytes(least)}; use budget={exact_bytes(least)!r} or more, a smaller batch, or shorter sequences",
                least_bytes=least,
            ) from None
        kept_seconds, kept_bytes = keeping_everything(menu)  # with what was measured meanwhile
        made = image(menu, program)
        program = made.program
        try:
            self._check(made, aside)
        except NotExecutable:
            if tightened_bytes:  # a policy that cannot do with less
                return self._planned(prepared, 0, seconds, fixed=fixed)
            raise
        return Plan(
            menu=menu,
            program=program,
            image=made,
            predicted=simulate(made.problem, made.schedule),
            held_bytes=peak_bytes(made.problem, made.schedule),
            sent_bytes=sent_bytes(menu, made),
            plans=region_plans(prepared, program),
            budget_bytes=self.settings.budget_bytes,
            aside_bytes=aside,
            leaving_bytes=self.lasting.leaving_bytes(program.states) if program.states else 0,
            keep_all_seconds=kept_seconds,
            keep_all_bytes=kept_bytes + aside,
            notes=(*words_of(program), *prepared.notes),
            kept=kept(prepared, program.calls),
            holds_output=self._holds_output,
            state_host_bytes=state_host_bytes,
        )

    @property
    def _learns(self) -> bool:
        """Whether costs are those of this machine."""
        return not self._machine_is_given and self.device.torch_device.type in LEARNS_ON

    def _with_host(self, menu: Menu) -> Menu:
        """With updates on the CPU as fast as they are here, if any may run there and not everything fits on the device anyway."""
        if not self._learns:
            return menu
        if not any(home.update == "cpu" for homes in menu.homes.values() for home in homes):
            return menu
        if keeping_everything(menu)[1] <= menu.problem.budget_bytes:
            return menu
        if self.lasting.host is None:
            self._progress("timing updates on the CPU")
            self.lasting.host = host_rate()
        return with_host(menu, self.lasting.host)

    def _check(self, made: Image, aside: int) -> None:
        try:
            check_schedule(made.problem, made.schedule)
        except OverCapacity as error:
            limits = {"dram": "host=", "nvme": "nvme="}
            needed = (error.needed_bytes + aside) / PLANNED_SHARE if error.tier not in limits else error.needed_bytes
            raise NotExecutable(
                f"{self.settings.policy} has a plan within {format_bytes(self.settings.budget_bytes)} op by op, but as calls of regions it needs "
                f"{format_bytes(needed)} of {error.tier}; raise {limits.get(error.tier, 'budget=')} to that, or use policy='auto'"
            ) from None

    def _other_bytes(self, prepared: PreparedMenu) -> int:
        """What the process keeps on the device that is none of the step's."""
        ours = [*self.model.parameters(), *self.model.buffers()]
        ours += [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        if self.optimizer is not None:
            ours += [value for state in self.optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        if self.lasting.states is not None:
            self.lasting.states.make_room()  # what is only on its way is nobody's
            ours += self.lasting.states.held_on_device()
        with without_torch_function():
            here = [tensor.untyped_storage() for tensor in ours if not isinstance(tensor, Gradient) and self.device.owns(tensor)]
        known = {storage.data_ptr(): storage.nbytes() for storage in here}
        return max(0, self.device.memory().allocated_bytes - sum(known.values())) if self.device.torch_device.type == "cuda" else 0

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return key_of(self._modules, self._parameters, self.device.torch_device.type, args, kwargs)


def _updated(meter: weakref.ref[Meter], returned: weakref.ref[Returned], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if (found := meter()) is not None:
        found.step_updated()
    if (output := returned()) is not None:
        output.look()
