"""One forward pass and its backward: which region call runs, what it saved for backward, what of that has left the device and when it comes back.

    forward   a call saves tensors (pack); when it is over, those the plan names start to leave; some calls later their bytes are let go
    backward  a call asks for its tensors (unpack); that starts the way back of what calls ahead will ask for

Nothing here outlives the graph: autograd's nodes hold what they saved, and when a graph is thrown away, after backward or without one, what it
had sent away is given back with it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ..errors import ChangedInPlace, OutOfHostMemory, StorageFull
from ..ir import INPUTS, CallPlan
from ..ir.program import EVERYTHING, MIN_OUTSIDE_BYTES, MIN_SENT_BYTES
from .copies import Copies, Pending, Ticket
from .layout import copyable
from .recording import Recording
from .torch_compat import version_of

MAX_AHEAD = 16  # calls of regions that a copy back may start before its own


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """How a call of a region runs: in place of the module's forward, and what of its saved tensors leaves."""

    forward: Callable[..., Any]  # forward(module, *args, **kwargs)
    call: CallPlan
    saved: tuple[str, ...] = ()  # names of the values it saves, in the order it saves them, without inputs, parameters and results
    id: int = -1  # of the region call in the plan's graph
    sends_all: bool = False  # everything that is worth it


class Trouble:
    """What a pass tells of when the device or a tier below it is full: it can make room, and it says so."""

    def make_room(self, where: str, error: torch.OutOfMemoryError) -> None: ...

    def say(self, sentence: str) -> None: ...


class Saved:
    """A tensor in the hands of autograd: here, or away."""

    __slots__ = ("__weakref__", "is_spoiled", "pending", "tensor", "ticket", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = version_of(tensor)
        self.ticket: Ticket | None = None
        self.pending: Pending | None = None
        self.is_spoiled = False  # written to while its bytes were being copied


class Departure(NamedTuple):
    """What left together. The tensors are held as long as their bytes are, to see whether somebody writes to them meanwhile."""

    tickets: list[Ticket]
    tensors: list[torch.Tensor]
    saved: list[weakref.ref[Saved]]

    def look_back(self) -> None:
        for tensor, reference in zip(self.tensors, self.saved, strict=True):
            saved = reference()
            if saved is not None and saved.version != version_of(tensor):
                saved.is_spoiled = True


class RegionRun:
    """One call of a region in one pass."""

    def __init__(self, in_pass: Pass, module: str, place: int, plan: RegionPlan) -> None:
        self.module, self.place, self.plan = module, place, plan
        self._pass = in_pass
        self._saved: list[weakref.ref[Saved]] = []  # weak: what backward is done with is gone
        self.is_turned = False

    def pack(self, tensor: torch.Tensor) -> Any:
        saved = Saved(tensor)
        if self.plan.call.sent:
            self._saved.append(weakref.ref(saved))
        return saved

    def unpack(self, saved: Any) -> torch.Tensor:
        try:
            return self._unpacked(saved)
        except BaseException:
            self._pass.copies.settle()  # an interrupted backward frees what copies may still be writing to
            raise

    def _unpacked(self, saved: Any) -> torch.Tensor:
        if not self.is_turned:
            self.is_turned = True
            self._pass.turned(self)
        tensor = saved.tensor
        if saved.is_spoiled or (tensor is not None and saved.version != version_of(tensor)):
            raise ChangedInPlace(
                f"a tensor that {self.module} needs for its backward was written to in place after its forward; without Tierwise this is an error "
                "too: replace the in-place operation, or clone its input"
            )
        if tensor is not None:
            if self._pass.bring is not None:
                self._pass.bring(tensor)
            return tensor  # type: ignore[no-any-return]
        pending, saved.pending = saved.pending or self._pass.fetched(saved.ticket, self.module), None
        return self._pass.copies.wait(pending)

    def forget(self) -> None:
        """The call failed: what it saved is nobody's."""
        self._saved.clear()

    def send(self, inputs: Any, outputs: Any, recording: Recording | None) -> Departure | None:
        """Start the way out of what the plan names."""
        waiting = [saved for reference in self._saved if (saved := reference()) is not None]
        if not waiting:
            return None
        chosen = [(name, saved) for name, saved in self._chosen(waiting, inputs, outputs) if saved.tensor is not None]
        tensors = [saved.tensor for _, saved in chosen if saved.tensor is not None]
        try:
            tickets = self._pass.copies.send_all(tensors, to=self.plan.call.tier)
        except (OutOfHostMemory, StorageFull) as error:  # before anything was written
            self._pass.trouble.say(f"what {self.module} was to send away stays on the device, which may then exceed the budget: {error}")
            return None
        for (name, saved), tensor, ticket in zip(chosen, tensors, tickets, strict=True):
            saved.ticket, saved.tensor = ticket, None
            if recording is not None and ticket.parcel is not None:
                recording.was_sent(self.plan.id, name, tensor.untyped_storage().nbytes(), ticket.parcel.number)
        return Departure(tickets, tensors, [weakref.ref(saved) for _, saved in chosen])

    def fetch(self) -> None:
        """Start the way back of everything that is away."""
        for reference in self._saved:
            saved = reference()
            if saved is not None and saved.ticket is not None and saved.pending is None:
                saved.pending = self._pass.copies.fetch(saved.ticket)

    def call_off(self) -> None:
        for reference in self._saved:
            saved = reference()
            if saved is not None:
                saved.pending = None

    def _chosen(self, waiting: Sequence[Saved], inputs: Any, outputs: Any) -> Iterator[tuple[str, Saved]]:
        """What the plan sends, by name. Parameters stay, and so do results: they are the next call's input."""
        plan, lasting = self.plan, self._pass.lasting
        given, results = _storages(inputs), _storages(outputs)
        activations = _storages(inputs, only_trained=True)  # positions, masks and tables are shared by all layers
        own: list[Saved] = []
        for saved in waiting:
            tensor = saved.tensor
            if tensor is None or not copyable(tensor) or id(tensor.untyped_storage()) in lasting:
                continue
            storage = id(tensor.untyped_storage())
            if storage in given:
                if INPUTS in plan.call.sent and storage in activations and _is_worth_it(tensor):
                    yield INPUTS, saved
            elif storage not in results:
                own.append(saved)
        names: Sequence[str] = plan.saved
        if len(names) != len(own):  # an eager call, or a compiler that saves in its own way: everything goes, or nothing
            names = ["*"] * len(own)
        for saved, name in zip(own, names, strict=True):
            if (name in plan.call.sent or plan.sends_all) and saved.tensor is not None and _is_worth_it(saved.tensor):
                yield name, saved


class OutsideRun(RegionRun):
    """What ops between two calls of regions save; it leaves when the next call begins."""

    def pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage.nbytes() < MIN_OUTSIDE_BYTES or not copyable(tensor) or id(storage) in self._pass.lasting or id(storage) in self._pass.given:
            return tensor
        saved = OutsideSaved(tensor, self)
        self._saved.append(weakref.ref(saved))
        return saved

    def _chosen(self, waiting: Sequence[Saved], inputs: Any, outputs: Any) -> Iterator[tuple[str, Saved]]:
        yield from ((EVERYTHING, saved) for saved in waiting)


class OutsideSaved(Saved):
    """It knows whose it is, since the hooks outside of regions are the same for all of them."""

    __slots__ = ("run",)

    def __init__(self, tensor: torch.Tensor, run: OutsideRun) -> None:
        super().__init__(tensor)
        self.run = run


class Pass:
    """One forward of the model, from the call of the root to its return, and whatever backward comes of it."""

    def __init__(
        self,
        copies: Copies,
        plans: Mapping[tuple[str, int], RegionPlan],
        trouble: Trouble,
        *,
        lasting: Collection[int] = frozenset(),
        given: Collection[int] = frozenset(),
        recording: Recording | None = None,
        bring: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.copies, self.trouble, self.recording = copies, trouble, recording
        self.bring = bring  # parameters may be away when backward reads them
        self.lasting = lasting  # storages that stay whatever becomes of the step, by id
        self.given = given  # storages of the batch, which the loop holds anyway
        self.sends_outside = any(not module for module, _ in plans)
        self._outside: dict[int, weakref.ref[OutsideRun]] = {}  # by how many calls came before
        self._planned_calls = sum(bool(module) for module, _ in plans)
        self.moves = any(plan.call.sent for plan in plans.values())
        self._plans = plans
        self._runs: list[weakref.ref[RegionRun]] = []  # autograd's nodes hold them
        self._times: dict[str, int] = {}
        self._leaving: deque[tuple[int, Departure]] = deque()  # with the place after whose forward it is let go

    @property
    def waits_for_backward(self) -> bool:
        return any(run() is not None for run in self._runs)

    def enter(self, module: str) -> RegionRun | None:
        """The next call of a region; None where the plan knows nothing of it."""
        times = self._times[module] = self._times.get(module, 0) + 1
        plan = self._plans.get((module, times - 1))
        if plan is None:
            return None
        self._send_outside()
        run = RegionRun(self, module, len(self._runs), plan)
        self._runs.append(weakref.ref(run))
        return run

    def leave(self, run: RegionRun, inputs: Any, outputs: Any) -> None:
        departure = run.send(inputs, outputs, self.recording)
        if departure is not None:
            self._leaving.append((run.place + run.plan.call.release, departure))
        while self._leaving and (self._leaving[0][0] <= run.place or run.place + 1 >= self._planned_calls):
            departure = self._leaving.popleft()[1]
            departure.look_back()
            self.copies.release_sent(departure.tickets)

    def pack_outside(self, tensor: torch.Tensor) -> Any:
        """Ops outside of regions save a tensor."""
        gap = len(self._runs)
        plan = self._plans.get(("", gap))
        if plan is None or gap >= self._planned_calls:
            return tensor
        run = self._outside[gap]() if gap in self._outside else None
        if run is None:
            run = OutsideRun(self, "an op outside of regions", gap, plan)
            self._outside[gap] = weakref.ref(run)
        return run.pack(tensor)

    def unpack_outside(self, saved: Any) -> torch.Tensor:
        return saved if isinstance(saved, torch.Tensor) else saved.run.unpack(saved)

    def _send_outside(self) -> None:
        gap = len(self._runs)
        run = self._outside[gap]() if gap in self._outside else None
        if run is not None and (departure := run.send((), (), self.recording)):
            self._leaving.append((gap + run.plan.call.release - 1, departure))

    def over(self) -> None:
        """The forward has returned: nothing that left is still held here."""
        for _, departure in self._leaving:
            departure.look_back()
        tickets = [ticket for _, departure in self._leaving for ticket in departure.tickets]
        self._leaving.clear()
        self.copies.release_sent(tickets)

    def abandon(self) -> None:
        """The forward has failed: let go once nothing moves any more."""
        self.copies.settle()
        try:
            self.over()
            self.copies.release_sent()  # also what was interrupted before it had a ticket
        except Exception as error:  # a copy that failed too; the failure of the forward is what the user hears
            self.trouble.say(f"a copy failed as well: {error}")

    def turned(self, run: RegionRun) -> None:
        """The backward of a call begins: start the way back of those that count on it."""
        for place in range(run.place - 1, max(-1, run.place - 1 - MAX_AHEAD), -1):
            other = self._runs[place]()
            if other is not None and place + other.plan.call.fetch >= run.place:
                try:
                    other.fetch()
                except torch.OutOfMemoryError as error:
                    self._call_off()
                    self.trouble.make_room(f"the way back of what {other.module} saved", error)
                    return  # it is fetched when it is asked for

    def fetched(self, ticket: Ticket, module: str) -> Pending:
        try:
            return self.copies.fetch(ticket)
        except torch.OutOfMemoryError as error:
            self._call_off()
            self.trouble.make_room(f"the backward of {module}", error)
        return self.copies.fetch(ticket)

    def _call_off(self) -> None:
        """Give back the memory of what is on its way and not yet needed; it is still where it was."""
        for reference in self._runs:
            run = reference()
            if run is not None:
                run.call_off()
        self.copies.settle()


def _storages(value: Any, *, only_trained: bool = False) -> set[int]:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return {id(tensor.untyped_storage()) for tensor in tensors if tensor.requires_grad or not only_trained}


def _is_worth_it(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= MIN_SENT_BYTES
