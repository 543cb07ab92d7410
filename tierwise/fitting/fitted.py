"""A model under a budget: plans are made when a step of a new shape begins, kept by shape, and run by the session."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from .. import policies
from ..errors import InfeasibleBudget, NotExecutable, OverCapacity, UnknownName
from ..execute.copies import Copies
from ..execute.device import Device
from ..execute.host_pool import HostPool
from ..execute.nvme import NvmeStore
from ..execute.offsets import round_up
from ..execute.passes import RegionPlan
from ..execute.session import Plans, Session
from ..ir import Machine, check_schedule, peak_bytes
from ..lower import Image, image, keep_everything, with_budget
from ..simulate import simulate
from ..units import exact_bytes, format_bytes
from .losses import adopt_losses, give_back_losses
from .menus import PreparedMenu, as_keywords, prepare_menu
from .plan import Plan
from .programs import program_for

PLANNED_SHARE = 0.98  # of the budget: predictions of the peak are within 3%, mostly above
POOL_SLACK_BYTES = 1 << 20  # rounding of parcels in the slab
_log = logging.getLogger("tierwise")


@dataclass(frozen=True, slots=True)
class Settings:
    budget_bytes: int
    host_bytes: int | None
    pinned_bytes: int | None
    nvme: tuple[Path, int] | None
    policy: str
    compile: bool


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
    ) -> None:
        if settings.policy not in (known := ["auto", *policies.names()]):
            raise UnknownName("policy", settings.policy, known)
        self.model, self.optimizer, self.device, self.settings = model, optimizer, device, settings
        self.machine = _limited(machine, settings)
        self.session = Session(model, device, self._before_pass)
        self.plans: dict[Any, Plan] = {}
        self.current: Plan | None = None
        self._progress = progress
        self._pool: HostPool | None = None
        self._store: NvmeStore | None = None
        self.session.install_root()
        self._losses = adopt_losses(model)

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        """The plan for calls of this shape, made now if there is none."""
        key = self._key(args, kwargs)
        if key not in self.plans:
            self.plans[key] = self._made(args, kwargs)
        self.current = self.plans[key]
        return self.current

    def close(self) -> None:
        self.session.close()
        give_back_losses(self._losses)
        if self._store is not None:
            self._store.close()
        if self._pool is not None:
            self._pool.close()
        self._store = self._pool = None
        self.device.close()

    def _before_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plans | None:
        plan = self.prepare(args, kwargs)
        if self.session.copies is None or plan.host_bytes > (self._pool.nbytes if self._pool else 0):
            self._provide(plan)
        return plan.plans

    def _made(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        with self.session.suspended():
            menu = prepare_menu(
                self.model,
                as_keywords(self.model, args, kwargs),
                self.optimizer,
                self.machine,
                self.device,
                compile=self.settings.compile,
                progress=self._progress,
            )
        self._progress("planning")
        plan = self._planned(menu)
        for sentence in plan.words():
            _log.info("%s", sentence)
        calls = menu.menu.problem.graph.calls
        self.session.install({calls[call].module: self.model.get_submodule(calls[call].module) for call in plan.program.calls})
        return plan

    def _planned(self, prepared: PreparedMenu) -> Plan:
        aside = self.machine.device.library_bytes + self._other_bytes(prepared)
        room = int(self.settings.budget_bytes * PLANNED_SHARE) - aside
        menu = with_budget(prepared.menu, max(1, room))
        tiers = tuple(tier for tier in ("dram", "nvme") if tier == "dram" or self.settings.nvme)
        kept = image(menu, keep_everything(menu))
        needed = peak_bytes(kept.problem, kept.schedule)[kept.problem.device_tier]
        kept_time = simulate(kept.problem.with_budget(max(needed, 1, room)), kept.schedule)
        try:
            with self.session.suspended():
                prepared, program = program_for(
                    replace(prepared, menu=menu), self.settings.policy, tiers, self.model, self.device,
                    compile=self.settings.compile, progress=self._progress,
                )  # fmt: skip
            menu = prepared.menu
        except InfeasibleBudget as error:
            least = int(((error.least_bytes or 0) + aside) / PLANNED_SHARE) + 1
            raise InfeasibleBudget(
                f"budget {format_bytes(self.settings.budget_bytes)} is too small for this step: with everything recomputed and sent away that can be "
                f"it needs {format_bytes(least)}; use budget={exact_bytes(least)!r} or more, a smaller batch, or shorter sequences",
                least_bytes=least,
            ) from None
        made = image(menu, program)
        self._check(made, aside)
        return Plan(
            menu=menu,
            program=program,
            image=made,
            predicted=simulate(made.problem, made.schedule),
            plans=_region_plans(prepared, program.calls),
            budget_bytes=self.settings.budget_bytes,
            aside_bytes=aside,
            keep_all_seconds=kept_time.seconds,
            keep_all_bytes=kept_time.peak_bytes[kept.problem.device_tier] + aside,
            notes=prepared.notes,
        )

    def _check(self, made: Image, aside: int) -> None:
        try:
            check_schedule(made.problem, made.schedule)
        except OverCapacity as error:
            raise NotExecutable(
                f"{self.settings.policy} has a plan within {format_bytes(self.settings.budget_bytes)} op by op, but as calls of regions it needs "
                f"{format_bytes((error.needed_bytes + aside) / PLANNED_SHARE)} of {error.tier}; raise the budget to that, or use policy='auto'"
            ) from None

    def _other_bytes(self, prepared: PreparedMenu) -> int:
        """What the process keeps on the device that is none of the step's."""
        ours = [*self.model.parameters(), *self.model.buffers()]
        ours += [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        if self.optimizer is not None:
            ours += [value for state in self.optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        known = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in ours if self.device.owns(tensor)}
        return max(0, self.device.memory().allocated_bytes - sum(known.values())) if self.device.torch_device.type == "cuda" else 0

    def _provide(self, plan: Plan) -> None:
        """Host memory of the plan's size, locked, and the disk's file."""
        if self.session.copies is not None:
            self.session.copies.drain()
        disk = bool(self.settings.nvme) and plan.predicted.peak_bytes.get("nvme", 0) > 0
        wanted = round_up(plan.host_bytes, 1 << 20) + POOL_SLACK_BYTES * bool(plan.host_bytes)
        pool = HostPool(
            max(wanted, 1), self.device, host_limit_bytes=self.settings.host_bytes, pinned_limit_bytes=self.settings.pinned_bytes,
            progress=lambda done, total: self._progress(f"locking host memory, {format_bytes(done)} of {format_bytes(total)}"),
        )  # fmt: skip
        if disk and self.settings.nvme:
            directory, nbytes = self.settings.nvme
            self._store = self._store or NvmeStore(directory, nbytes, pool)
        self._pool = pool
        self.session.copies = Copies(self.device, pool, self._store)

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls with equal keys run by one plan."""
        leaves, shape = tree_flatten((args, dict(kwargs)))
        kind = self.device.torch_device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        trained = hash(tuple(parameter.requires_grad for parameter in self.model.parameters()))
        return tuple(map(_leaf_key, leaves)), str(shape), cast, self.model.training, trained


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__


def _region_plans(prepared: PreparedMenu, calls: Mapping[int, Any]) -> dict[tuple[str, int], RegionPlan]:
    graph = prepared.menu.problem.graph
    times: dict[str, int] = {}
    found: dict[tuple[str, int], RegionPlan] = {}
    for call in graph.calls:
        if call.id not in calls:
            continue
        code = prepared.regions[call.region]
        plan = calls[call.id]
        saved = tuple(value.name for value in prepared.menu.choice(call.id, plan.choice).saved)
        found[call.module, times.get(call.module, 0)] = RegionPlan(code.code[plan.choice], plan, saved)
        times[call.module] = times.get(call.module, 0) + 1
    return found


def _limited(machine: Machine, settings: Settings) -> Machine:
    sizes: dict[str, int] = {}
    if settings.host_bytes is not None:
        sizes["dram"] = settings.host_bytes
    if settings.nvme is not None:
        sizes["nvme"] = settings.nvme[1]
    return replace(machine, tiers=tuple(replace(tier, capacity_bytes=sizes.get(tier.name, tier.capacity_bytes)) for tier in machine.tiers))


def log_level_from_environment() -> None:
    """TIERWISE_LOG=info or debug shows what is decided and what moves."""
    level = os.environ.get("TIERWISE_LOG", "")
    if level:
        number = logging.getLevelNamesMapping().get(level.upper())
        if number is None:
            raise UnknownName("TIERWISE_LOG level", level, [name.lower() for name in logging.getLevelNamesMapping()])
        _log.setLevel(number)
        if not _log.handlers:
            _log.addHandler(logging.StreamHandler())
