"""What is legal: the one place that says so. A policy never grades itself, and nothing here knows any policy.

A schedule is played in list order. Every storage has a current version (graph.py) and every tier holds some version of it:

- a Compute needs the version of each input that program order gives it, in a tier its processor reaches; so an op cannot run before its
  inputs, nor again after the optimizer overwrote one of them. It may run again otherwise, unless it mutates or is not replayable.
- a recomputed output that is still there is made twice: the second copy is scratch for the duration of the op.
- a Copy needs the current version at its source; onto an older version of the same storage it reuses those bytes.
- what is encoded is a copy of its own in its tier: no op reads it but a variant that says so. Within a tier, the processor that works there must
  know the codec; between tiers bytes go as they are, unless the link has an engine for it. No codec follows on another.
- a variant of an op reads what it says, in the versions program order gives the op, and takes the workspace it says.
- bytes are held from the step that makes them to the Free that names them, in list order; workspace during its op; the bounce buffer of a
  link for the whole step. A tier within another is charged to both. With addresses, no two live ranges of the device's tier may overlap.
- a cyclic schedule is played twice: what the first period leaves must be exactly what the second leaves, one step later. Lasting storages
  must be home, up to date and nowhere else; everything else that stays must be picked up by the next period (iteration = -1).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NoReturn

from ..errors import InvalidGraph, InvalidSchedule, OverCapacity
from ..units import format_bytes
from .graph import Graph, Op, Role
from .problem import Problem, Variant
from .schedule import AT_START, WORKSPACE, Compute, Copy, Free, Schedule, Step, held_as

ALWAYS_LASTING = (Role.PARAM, Role.BUFFER, Role.OPTIMIZER_STATE)


def check_schedule(problem: Problem, schedule: Schedule) -> None:
    """Raise InvalidSchedule with the step, the storage and the reason, or return."""
    game = _play(problem, schedule)
    for tier in problem.machine.tiers:
        if game.peak[tier.name] > tier.capacity_bytes:
            step = game.first_over[tier.name]
            raise OverCapacity(
                step,
                f"{tier.name} needs {format_bytes(game.peak[tier.name])} and has {format_bytes(tier.capacity_bytes)}; "
                f"it first overflows at {_describe(problem.graph, schedule, step)}",
                tier=tier.name,
                needed_bytes=game.peak[tier.name],
            )


def peak_bytes(problem: Problem, schedule: Schedule) -> dict[str, int]:
    """The most bytes each tier holds in list order. Raises InvalidSchedule for everything but capacity."""
    game = _Game(problem, schedule)
    game.play_period(0)
    if any(step.iteration for step in schedule.steps):
        game.play_period(1)
    return dict(game.peak)


def _play(problem: Problem, schedule: Schedule) -> _Game:
    game = _Game(problem, schedule)
    game.play_period(0)
    if problem.cyclic:
        first = game.state(0)
        game.play_period(1)
        game.check_same(first, game.state(1))
    game.check_every_op_ran()
    return game


class _Game:
    """The state of a schedule as it is played in list order."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem, self.schedule = problem, schedule
        self.graph, self.machine = problem.graph, problem.machine
        self.needs = self.graph.versions_needed
        self.lasting = [storage.lasting for storage in self.graph.storages]
        self.reach = {processor.name: self.machine.reachable(processor.name) for processor in self.machine.processors}
        self.device_tier = problem.device_tier
        self.addressed = bool(schedule.addresses)
        self.present: dict[tuple[int, int, str], int] = {}  # (storage, iteration or 0 if lasting, place) -> version
        self.current: dict[tuple[int, int], int] = {}
        self.address: dict[tuple[int, int, str], int] = {}  # of what is in the device's tier, by place
        self.ranges: list[tuple[int, int]] = []  # live (start, end) of the device's tier, sorted
        self.ran: dict[tuple[int, int], int] = {}  # (op, iteration) -> times
        self.held = {tier.name: 0 for tier in self.machine.tiers}
        self.peak = dict(self.held)
        self.first_over: dict[str, int] = {}
        self.period = 0
        self.step = -1
        forms = {form for s in schedule.steps if isinstance(s, Copy) and (form := s.dst_form)}
        self.places = [*self.machine.tier_named, *(held_as(tier, form) for tier in self.machine.tier_named for form in sorted(forms))]
        self._check_home()
        for link in {(s.src, s.dst) for s in schedule.steps if isinstance(s, Copy)}:
            if (used := self.machine.link_between.get(link)) and used.staging_bytes:
                self._charge(used.staging_tier, used.staging_bytes)
        for storage in self.graph.storages:
            if storage.lasting and self.graph.is_there_at_start(storage.id):
                for tier in schedule.home[storage.id]:
                    self._put(storage.id, 0, tier, 0)

    # -- the period ---------------------------------------------------------------------------------------------------------------

    def play_period(self, period: int) -> None:
        self.period, self.step = period, -1
        for storage in self.graph.storages:
            if storage.role is Role.INPUT:
                for tier in self.schedule.home[storage.id]:
                    self._put(storage.id, period, tier, 0)
        for place, step in enumerate(self.schedule.steps):
            self.step = place
            if step.iteration not in (0, -1):
                self._refuse(f"iteration {step.iteration}; a period holds work of this step (0) and of the one before (-1)")
            if step.iteration == -1 and not self.problem.cyclic:
                self._refuse("a single cold step has no step before it; iteration -1 needs Problem.cyclic")
            if period + step.iteration < 0:
                continue  # before the first step there was nothing
            if isinstance(step, Compute):
                self._compute(step)
            elif isinstance(step, Copy):
                self._copy(step)
            else:
                self._free(step)
        self.step = len(self.schedule.steps)
        self._check_all_home()

    def _compute(self, step: Compute) -> None:
        if not 0 <= step.op < len(self.graph.ops):
            self._refuse(f"there is no op {step.op}; the graph has {len(self.graph.ops)}")
        op, iteration = self.graph.ops[step.op], self.period + step.iteration
        if step.on not in self.machine.processor_named:
            self._refuse(f"{op.name} runs on {step.on!r}; the machine has {', '.join(self.machine.processor_named)}")
        if not step.variant and (op.id, step.on) not in self.problem.costs.op_seconds:
            self._refuse(f"{op.name} has no cost on {step.on}: it cannot run there")
        times = self.ran.get((op.id, iteration), 0)
        if times and op.mutates:
            self._refuse(f"{op.name} runs a second time, but it overwrites {self._name(op.mutates[0])} in place")
        if times and not op.replayable:
            self._refuse(f"{op.name} runs a second time, but it cannot be replayed")
        self.ran[op.id, iteration] = times + 1
        tier = self.machine.processor_named[step.on].tier
        scratch = op.workspace_bytes
        if step.variant:
            variant = self._variant(op, step)
            scratch = variant.workspace_bytes
            self._require_for(variant, op, iteration, step.on)
        else:
            for storage, version in self.needs[op.id]:
                self._require(op.name, storage, iteration, step.on, version)
        taken_over = {new: old for old, new in op.in_place}
        transient: list[tuple[int, int]] = []
        if scratch and self.addressed and tier == self.device_tier:
            transient.append(self._claim(WORKSPACE, scratch))
        for storage in op.writes:
            instance = self._instance(storage, iteration)
            version = self._version_made(op.id, storage, iteration)
            where = self._where(storage, instance, step.on)
            if storage in taken_over:
                self._hand_over(taken_over[storage], storage, iteration, tier, where is not None)
            elif where is not None and not self.graph.storages[storage].lasting:
                scratch += self.graph.storages[storage].nbytes  # made twice: the second copy is dropped after the op
                if self.addressed and tier == self.device_tier:
                    transient.append(self._claim(storage, self.graph.storages[storage].nbytes))
            elif where is None:
                self._put(storage, instance, tier, version)
            self.current[storage, instance] = version
            self.present[storage, instance, where or tier] = version
        for storage in op.mutates:
            instance = self._instance(storage, iteration)
            version = self._version_made(op.id, storage, iteration)
            where = self._where(storage, instance, step.on)
            assert where is not None  # _require has seen it
            self.current[storage, instance] = version
            self.present[storage, instance, where] = version
        if scratch:
            self._charge(tier, scratch)
            self._charge(tier, -scratch)
        for span in transient:
            self.ranges.remove(span)

    def _variant(self, op: Op, step: Compute) -> Variant:
        variant = self.problem.costs.variant_of.get((op.id, step.variant))
        if variant is None:
            known = [name for other, name in self.problem.costs.variant_of if other == op.id]
            self._refuse(f"{op.name} runs by {step.variant!r}; it has {', '.join(known) or 'no variants'}")
        if step.on not in variant.seconds:
            self._refuse(f"{op.name} by {variant.name} has no cost on {step.on}: it cannot run there")
        if variant.reads is not None and any(old not in variant.reads or old in variant.forms for old, _ in op.in_place):
            self._refuse(f"{op.name} takes over bytes that {variant.name} does not read")
        return variant

    def _require_for(self, variant: Variant, op: Op, iteration: int, on: str) -> None:
        reads = op.reads if variant.reads is None else variant.reads
        for storage in dict.fromkeys(reads + op.mutates):
            version = bisect.bisect_left(self.graph.writers[storage], op.id)
            self._require(f"{op.name} by {variant.name}", storage, iteration, on, version, variant.forms.get(storage, ""))

    def _copy(self, step: Copy) -> None:
        storage = self._known(step.storage)
        self._check_way(step)
        src, dst = held_as(step.src, step.src_form), held_as(step.dst, step.dst_form)
        instance = self._instance(storage, self.period + step.iteration)
        held = self.present.get((storage, instance, src))
        if held is None:
            self._refuse(f"copy of {self._name(storage)} from {src}, where it is not")
        if held != self.current[storage, instance]:
            self._refuse(f"copy of {self._name(storage)} from {src}, where it is out of date")
        there = self.present.get((storage, instance, dst))
        if there == held:
            self._refuse(f"copy of {self._name(storage)} to {dst}, where it already is")
        if there is None:
            self._put(storage, instance, step.dst, held, step.dst_form)
        self.present[storage, instance, dst] = held  # onto an old version: its bytes are reused

    def _check_way(self, step: Copy) -> None:
        """Whether bytes can get from the one place to the other."""
        codec = step.src_form or step.dst_form
        if not codec and step.src != step.dst and (step.src, step.dst) in self.machine.link_between:
            return  # as most do
        name = self._name(step.storage)
        if step.src == step.dst and step.src not in self.machine.tier_named:
            self._refuse(f"there is no tier {step.src!r} to encode or decode {name} in")
        if step.src != step.dst and (step.src, step.dst) not in self.machine.link_between:
            self._refuse(f"there is no link from {step.src!r} to {step.dst!r} to copy {name} over")
        if not codec:
            self._refuse(f"copy of {name} to {step.dst}, where it already is")
        if codec not in self.problem.costs.codec_named:
            self._refuse(f"there is no codec {codec!r}; the problem has {', '.join(self.problem.costs.codec_named) or 'none'}")
        if step.storage not in self.problem.costs.codec_named[codec].encoded_bytes:
            self._refuse(f"{name} has no form {codec}")
        if step.fault:
            self._refuse(f"{name} cannot be faulted in as {codec}: pages are what ops read")
        if step.src == step.dst:
            self._check_coding(step, codec)
        elif step.src_form != step.dst_form:
            if step.src_form and step.dst_form:
                self._refuse(f"{name} goes from {step.src_form} to {step.dst_form}; decode it first")
            if codec not in self.machine.link_between[step.src, step.dst].codecs:
                self._refuse(f"the link from {step.src} to {step.dst} has no engine for {codec}; encode or decode {name} at one of its ends")

    def _check_coding(self, step: Copy, codec: str) -> None:
        """Whether a processor that works in this tier can encode or decode."""
        if bool(step.src_form) == bool(step.dst_form):
            self._refuse(f"{self._name(step.storage)} goes from {step.src_form} to {step.dst_form} in {step.src}; one of them must be plain")
        known = self.problem.costs.codec_named[codec]
        rates = known.decode_bytes_per_second if step.src_form else known.encode_bytes_per_second
        processor = self.machine.works_in(step.src)
        if processor is None or processor not in rates:
            does = "decode" if step.src_form else "encode"
            self._refuse(f"no processor that works in {step.src} can {does} {codec}; {', '.join(rates) or 'none'} can")

    def _free(self, step: Free) -> None:
        storage = self._known(step.storage)
        instance = self._instance(storage, self.period + step.iteration)
        if (storage, instance, held_as(step.tier, step.form)) not in self.present:
            self._refuse(f"free of {self._name(storage)} in {held_as(step.tier, step.form)}, where it is not")
        self._drop(storage, instance, step.tier, step.form)

    # -- what is where ------------------------------------------------------------------------------------------------------------

    def _instance(self, storage: int, iteration: int) -> int:
        """A lasting storage is one; any other is a new one in each step."""
        return 0 if self.lasting[storage] else iteration

    def _version_made(self, op: int, storage: int, iteration: int) -> int:
        writers = self.graph.writers[storage]
        ordinal = writers.index(op) + 1
        return iteration * len(writers) + ordinal if self.graph.storages[storage].lasting else ordinal

    def _where(self, storage: int, instance: int, processor: str) -> str | None:
        for tier in self.reach[processor]:
            if (storage, instance, tier) in self.present:
                return tier
        return None

    def _require(self, reader: str, storage: int, iteration: int, processor: str, version: int, form: str = "") -> None:
        instance = iteration
        if self.lasting[storage]:
            instance, version = 0, version + iteration * len(self.graph.writers[storage])
        places = [held_as(tier, form) for tier in self.reach[processor]] if form else self.reach[processor]
        held = [self.present[key] for where in places if (key := (storage, instance, where)) in self.present]
        if version in held:
            return
        reach = " or ".join(places)
        if held:
            now = max(held)
            why = "has not been written yet" if now < version else "was overwritten since"
            self._refuse(f"{reader} needs {self._name(storage)} as it was after write {version}, but in {reach} it is as after write {now}: it {why}")
        elsewhere = [tier for (s, i, tier), _ in self.present.items() if s == storage and i == instance]
        if elsewhere:
            self._refuse(f"{reader} runs on {processor} and reads {self._name(storage)}, which is in {' and '.join(elsewhere)}, not in {reach}")
        if (storage, instance) in self.current:
            self._refuse(f"{reader} reads {self._name(storage)} after it was freed")
        self._refuse(f"{reader} reads {self._name(storage)} before it is written")

    def _put(self, storage: int, instance: int, tier: str, version: int, form: str = "") -> None:
        nbytes = self.problem.form_bytes(storage, form)
        self.present[storage, instance, held_as(tier, form)] = version
        self.current.setdefault((storage, instance), version)
        self._charge(tier, nbytes)
        if self.addressed and tier == self.device_tier:
            self.address[storage, instance, held_as(tier, form)] = self._claim(storage, nbytes)[0]

    def _drop(self, storage: int, instance: int, tier: str, form: str = "") -> None:
        nbytes = self.problem.form_bytes(storage, form)
        del self.present[storage, instance, held_as(tier, form)]
        self._charge(tier, -nbytes)
        if self.addressed and tier == self.device_tier:
            start = self.address.pop((storage, instance, held_as(tier, form)))
            if nbytes:
                self.ranges.remove((start, start + nbytes))

    def _hand_over(self, old: int, new: int, iteration: int, tier: str, already_there: bool) -> None:
        """An in-place op: the bytes of `old` become `new`."""
        before, after = self._instance(old, iteration), self._instance(new, iteration)
        start = self.address.get((old, before, tier))
        self._drop(old, before, tier)
        if already_there:
            return
        nbytes = self.graph.storages[new].nbytes
        self.present[new, after, tier] = 0
        self._charge(tier, nbytes)
        if start is not None:
            self.address[new, after, tier] = start
            if nbytes:
                bisect.insort(self.ranges, (start, start + nbytes))

    def _claim(self, storage: int, nbytes: int) -> tuple[int, int]:
        """Take the range the schedule gives this allocation in the device's tier."""
        what = "workspace" if storage == WORKSPACE else self._name(storage)
        start = self.schedule.addresses.get((self.step if self.step >= 0 else AT_START, storage))
        if start is None:
            self._refuse(f"{what} has no address, though the schedule gives addresses")
        end = start + nbytes
        if start < 0 or end > self.machine.capacity(self.device_tier):
            self._refuse(f"{what} at address {start} ends at {end}, outside {self.device_tier}")
        if nbytes:
            at = bisect.bisect(self.ranges, (start, end))
            for other in self.ranges[max(0, at - 1) : at + 1]:
                if other[0] < end and start < other[1]:
                    self._refuse(f"{what} at addresses {start} to {end} overlaps the live range {other[0]} to {other[1]}")
            self.ranges.insert(at, (start, end))
        return start, end

    def _charge(self, tier: str, nbytes: int) -> None:
        for name in self.machine.enclosing[tier]:
            self.held[name] += nbytes
            if self.held[name] > self.peak[name]:
                self.peak[name] = self.held[name]
                if self.held[name] > self.machine.capacity(name):
                    self.first_over.setdefault(name, self.step)

    # -- both ends of the period --------------------------------------------------------------------------------------------------

    def _check_home(self) -> None:
        for storage in self.graph.storages:
            if not (storage.lasting or storage.role is Role.INPUT):
                continue
            home = self.schedule.home.get(storage.id, ())
            if not home:
                self._refuse(f"{self._name(storage.id)} has no home")
            for tier in home:
                if tier not in self.machine.tier_named:
                    self._refuse(f"the home of {self._name(storage.id)} is {tier!r}; the machine has {', '.join(self.machine.tier_named)}")

    def _check_all_home(self) -> None:
        for storage in self.graph.storages:
            if not storage.lasting or (storage.id, 0) not in self.current:
                continue
            current = self.current[storage.id, 0]
            for tier in self.schedule.home[storage.id]:
                held = self.present.get((storage.id, 0, tier))
                if held is None:
                    self._refuse(f"{self._name(storage.id)} is not home in {tier} at the end")
                if held != current:
                    self._refuse(f"{self._name(storage.id)} is home in {tier} at the end, but out of date")
            begins, ends = self.schedule.addresses.get((AT_START, storage.id)), self.address.get((storage.id, 0, self.device_tier))
            if begins is not None and ends != begins and self.problem.cyclic:
                self._refuse(f"{self._name(storage.id)} is at address {ends} in {self.device_tier} at the end, not at {begins} where the step begins")
            for where in self.places:
                if where not in self.schedule.home[storage.id] and (storage.id, 0, where) in self.present:
                    self._refuse(f"{self._name(storage.id)} is still in {where} at the end, away from home")

    def state(self, period: int) -> dict[tuple[int, int, str], tuple[int, int]]:
        """What is where, and at which address, with versions and instances counted from this period."""
        seen = {}
        for (storage, instance, where), version in self.present.items():
            lasting = self.graph.storages[storage].lasting
            behind = version - period * len(self.graph.writers[storage]) if lasting else version
            address = self.address.get((storage, instance, where), 0)
            seen[storage, 0 if lasting else instance - period, where] = (behind, address)
        return seen

    def check_same(self, first: dict[tuple[int, int, str], tuple[int, int]], second: dict[tuple[int, int, str], tuple[int, int]]) -> None:
        for key in sorted(first.keys() ^ second.keys() | {k for k in first.keys() & second.keys() if first[k] != second[k]}):
            storage, instance, tier = key
            name = self._name(storage)
            if instance < 0:
                self._refuse(f"{name} of an earlier step is still in {tier}: every step would leave more behind")
            if key in first and key in second and first[key][1] != second[key][1]:
                self._refuse(f"{name} is at another address in {tier} after each step: {first[key][1]}, then {second[key][1]}")
            self._refuse(f"{name} in {tier} is not in the same state at both ends of the period")

    def check_every_op_ran(self) -> None:
        for op in self.graph.ops:
            if (op.id, 0) not in self.ran:
                self._refuse(f"{op.name} is never computed")

    # -- words --------------------------------------------------------------------------------------------------------------------

    def _known(self, storage: int) -> int:
        if not 0 <= storage < len(self.graph.storages):
            self._refuse(f"there is no storage {storage}; the graph has {len(self.graph.storages)}")
        return storage

    def _name(self, storage: int) -> str:
        found = self.graph.storages[storage]
        return f"{found.name} ({format_bytes(found.nbytes)})"

    def _refuse(self, reason: str) -> NoReturn:
        raise InvalidSchedule(self.step, reason)


def _describe(graph: Graph, schedule: Schedule, step: int) -> str:
    if not 0 <= step < len(schedule.steps):
        return "the start"
    what: Step = schedule.steps[step]
    if isinstance(what, Compute):
        return f"step {step}, {graph.ops[what.op].name}"
    return f"step {step}, {'copy' if isinstance(what, Copy) else 'free'} of {graph.storages[what.storage].name}"


def check_graph(graph: Graph) -> None:
    """Raise InvalidGraph with the op or storage and the reason, or return."""
    for problem in _graph_faults(graph):
        raise InvalidGraph(problem)


def _graph_faults(graph: Graph) -> Iterator[str]:
    count = len(graph.storages)
    for place, storage in enumerate(graph.storages):
        if storage.id != place:
            yield f"storage {storage.name} has id {storage.id} and stands at place {place}; they must be equal"
        if storage.nbytes < 0:
            yield f"storage {storage.name} has {storage.nbytes} bytes"
        if storage.role in ALWAYS_LASTING and not storage.lasting:
            yield f"storage {storage.name} is a {storage.role} and must be lasting"
        if storage.role is Role.INPUT and storage.lasting:
            yield f"storage {storage.name} is an input, which comes anew with each step, and cannot be lasting"
    regions = {region.id for region in graph.regions}
    calls = {call.id for call in graph.calls}
    for call in graph.calls:
        if call.region not in regions:
            yield f"region call {call.module} names region {call.region}, which does not exist"
    made: set[int] = set()
    gone: dict[int, str] = {}
    for place, op in enumerate(graph.ops):
        if op.id != place:
            yield f"op {op.name} has id {op.id} and stands at place {place}; they must be equal"
        if op.region != -1 and op.region not in calls:
            yield f"op {op.name} belongs to region call {op.region}, which does not exist"
        if op.workspace_bytes < 0:
            yield f"op {op.name} has {op.workspace_bytes} bytes of workspace"
        for storage_id in op.reads + op.writes + op.mutates:
            if not 0 <= storage_id < count:
                yield f"op {op.name} touches storage {storage_id}; there are {count}"
                return
            if storage_id in gone:
                yield f"op {op.name} touches {graph.storages[storage_id].name}, whose bytes {gone[storage_id]} took over"
        for storage_id in op.reads + op.mutates:
            found = graph.storages[storage_id]
            if not found.lasting and found.role is not Role.INPUT and storage_id not in made:
                yield f"op {op.name} reads {found.name} before any op writes it"
        for storage_id in op.writes:
            found = graph.storages[storage_id]
            if storage_id in op.reads or storage_id in op.mutates:
                yield f"op {op.name} both reads and writes {found.name}; what is overwritten in place belongs in mutates"
            if found.role is Role.INPUT:
                yield f"op {op.name} writes {found.name}, an input"
            if not found.lasting and storage_id in made:
                yield f"op {op.name} writes {found.name} again; a second write belongs in mutates"
            made.add(storage_id)
        for old, new in op.in_place:
            if old not in op.reads or new not in op.writes:
                yield f"op {op.name} hands the bytes of storage {old} to {new}; the first must be read and the second written by it"
            elif graph.storages[old].lasting or graph.storages[new].lasting:
                yield f"op {op.name} works in place on a lasting storage; that belongs in mutates"
            gone[old] = op.name


def choice_faults(problem: Problem) -> Iterator[str]:
    """What is wrong with the codecs and variants a problem offers."""
    graph, costs = problem.graph, problem.costs
    if len(costs.codec_named) < len(costs.codecs):
        yield "two codecs have the same name"
    if len(costs.variant_of) < len(costs.variants):
        yield "two variants of an op have the same name"
    for codec in costs.codecs:
        if not codec.name:
            yield "a codec has no name"
        if strangers := [s for s in codec.encoded_bytes if not 0 <= s < len(graph.storages)]:
            yield f"codec {codec.name} names storage {strangers[0]}; there are {len(graph.storages)}"
    for variant in costs.variants:
        if not 0 <= variant.op < len(graph.ops) or not variant.name:
            yield f"variant {variant.name!r} is of op {variant.op}; it needs a name, and there are {len(graph.ops)} ops"
            return
        op = graph.ops[variant.op]
        reads = op.reads if variant.reads is None else variant.reads
        if strangers := [s for s in reads if not 0 <= s < len(graph.storages)]:
            yield f"variant {variant.name} of {op.name} reads storage {strangers[0]}; there are {len(graph.storages)}"
        for storage, form in variant.forms.items():
            if storage not in reads or form not in costs.codec_named:
                yield f"variant {variant.name} of {op.name} takes storage {storage} as {form!r}; it must read it, and the codec must exist"
        if min([*variant.seconds.values(), variant.workspace_bytes], default=0) < 0:
            yield f"variant {variant.name} of {op.name} takes less than 0 seconds or bytes"
