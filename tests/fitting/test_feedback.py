"""A plan whose prediction was off is made again with what was measured, at most twice."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import pytest
import torch
from fitting.test_states import batch, model_and_optimizer, train, untouched
from fitting.training import equal, fitting, three_steps, tower, trained

from tierwise.errors import OutOfHostMemory
from tierwise.fitting import fitted, plan_of
from tierwise.fitting.feedback import calls_in, corrected, is_cpu_off, is_off, usual_seconds
from tierwise.fitting.least import least_seconds
from tierwise.fitting.meter import Meter
from tierwise.fitting.trials import Trials
from tierwise.ir import CallPlan, Compute, Copy, Phase, Placement, Span
from tierwise.lower import image
from tierwise.lower.states import moved_updates
from tierwise.simulate import simulate


@pytest.fixture(scope="module", name="plan")
def plan_with_placed_state():
    model, optimizer = model_and_optimizer()
    with fitting(model, optimizer=optimizer, budget="1500KiB") as found:
        return found.prepare((), batch(0))


def slowed(plan, regions: float, between: float, copies: float):
    """The predicted step as if it had been measured, with everything slower by these factors. A measurement has spans of regions and copies only."""
    graph, spans, seconds = plan.image.problem.graph, [], plan.predicted.seconds
    for span in plan.predicted.spans:
        step, taken = plan.image.schedule.steps[span.step], span.end - span.start
        if isinstance(step, Compute) and graph.ops[step.op].region not in plan.program.calls:
            seconds += (between - 1) * taken * (span.lane == "gpu")
            continue
        factor = regions if isinstance(step, Compute) else copies
        seconds += (factor - 1) * taken * isinstance(step, Compute)
        spans.append(Span(span.step, span.lane, span.start, span.start + factor * taken))
    return replace(plan.predicted, spans=tuple(spans), seconds=seconds, measured=True)


def test_times_of_choices_and_rates_of_links_are_those_measured(monkeypatch):
    monkeypatch.setattr("tierwise.fitting.feedback.LEAST_COPY_BYTES", 0)
    model = tower()
    with fitting(model, budget="800KiB") as found:
        plan = found.prepare((), {"x": torch.randn(512, 8), "target": torch.randn(512, 4)})
        copies = [step for step in plan.image.schedule.steps if isinstance(step, Copy)]
        assert copies and is_off(plan.predicted, slowed(plan, 3.0, 1.0, 1.0).seconds) and not is_off(plan.predicted, plan.predicted.seconds)
        measured = slowed(plan, 3.0, 1.5, 2.0)
        menu = corrected(plan, measured, measured.seconds)
    for region, choices in plan.menu.choices.items():
        for before, after in zip(choices, menu.choices[region], strict=True):  # those that did not run by the same factor
            assert abs(after.seconds / before.seconds - 3) < 1e-6
    costs, before = menu.problem.costs.op_seconds, plan.menu.problem.costs.op_seconds
    loss = next(op.id for op in plan.menu.problem.graph.ops if op.region not in plan.program.calls)
    assert abs(costs[loss, "gpu"] / before[loss, "gpu"] - 1.5) < 0.01
    out, slower = plan.menu.problem.machine.link("hbm", "dram").lanes["out"], menu.problem.machine.link("hbm", "dram").lanes["out"]
    assert 0.3 * out < slower < 0.55 * out  # a latency is part of each copy


def test_the_middle_one_of_the_calls_that_waited_for_no_copy_says_what_calls_take():
    """Of five that send one waited, and with only two that ran after a pause and send nothing the middle one of six is the least of the rest."""
    assert usual_seconds([0.9, 0.91], [1.0, 1.0, 1.01, 1.02, 1.6]) == 1.0
    assert usual_seconds([0.9, 0.91], [1.2, 1.3, 1.4]) == pytest.approx(0.905)  # all that send waited
    assert usual_seconds([], [0.9, 1.0, 1.01, 2.0]) == 1.0


def test_no_link_is_faster_than_alone(monkeypatch):
    """Copies took half as long as planned: nobody was beside them."""
    monkeypatch.setattr("tierwise.fitting.feedback.LEAST_COPY_BYTES", 0)
    with fitting(tower(), budget="800KiB") as found:
        plan = found.prepare((), {"x": torch.randn(512, 8), "target": torch.randn(512, 4)})
        measured = slowed(plan, 1.0, 1.0, 0.5)
        assert any(isinstance(plan.image.schedule.steps[span.step], Copy) for span in measured.spans)
        menu = corrected(plan, measured, measured.seconds)
    assert menu.problem.machine.links == plan.menu.problem.machine.links


def test_a_link_as_slow_beside_updates_as_planned_is_as_fast_alone_as_before(monkeypatch):
    """Copies took twice as long as alone, and that is what the plan had them take: half of the link is the updates'."""
    monkeypatch.setattr("tierwise.fitting.feedback.LEAST_COPY_BYTES", 1 << 15)
    with fitting(tower(), budget="800KiB") as found:
        plan = found.prepare((), {"x": torch.randn(512, 8), "target": torch.randn(512, 4)})
    measured, problem = slowed(plan, 1.0, 1.0, 2.0), plan.image.problem
    beside = replace(problem, machine=problem.machine.with_rates(lambda link, lane, rate: rate / 2))
    menu = corrected(replace(plan, image=replace(plan.image, problem=beside)), measured, measured.seconds)
    before, after = (machine.link("hbm", "dram").lanes["out"] for machine in (problem.machine, menu.problem.machine))
    assert 0.6 * before < after < 1.1 * before  # a latency is part of each copy
    blamed = corrected(plan, measured, measured.seconds).problem.machine.link("hbm", "dram").lanes["out"]
    assert after == pytest.approx(2 * blamed)


def test_what_others_take_from_calls_is_not_the_calls(plan):
    """A step that ran as planned, in which calls took longer than alone for the updates and the copies beside them, leaves them as they were."""
    machine = plan.menu.problem.machine
    machine = replace(machine, links=tuple(replace(link, compute_share=0.5) for link in machine.links))
    menu = replace(plan.menu, problem=replace(plan.menu.problem, machine=machine, costs=plan.menu.problem.costs.slowed(1e-6, "cpu")))
    made = image(menu, replace(plan.program, update="backward"))
    beside = replace(plan, menu=menu, image=made, program=made.program, predicted=simulate(made.problem, made.schedule))
    calls = [op for op in made.problem.graph.ops if op.region in made.program.calls and op.phase is Phase.BACKWARD]
    alone = {op.id: menu.choice(op.region, made.program.calls[op.region].choice).backward_seconds for op in calls}
    assert all(made.problem.device_seconds[op.id] > 1.1 * alone[op.id] for op in calls)
    measured = slowed(beside, 1.0, 1.0, 1.0)
    found = corrected(beside, measured, measured.seconds)
    for region, choices in menu.choices.items():
        assert [choice.seconds for choice in found.choices[region]] == pytest.approx([choice.seconds for choice in choices], rel=0.01)


def test_it_happens_by_itself_and_stops(monkeypatch, caplog):
    monkeypatch.setattr(fitted, "LEARNS_ON", {"cpu"})

    def many_steps(model, optimizer):
        for _ in range(4):
            yield from three_steps(model, optimizer)

    expected = trained(many_steps, tower())
    model = tower()
    with caplog.at_level(logging.WARNING, "tierwise"), fitting(model, budget="800KiB"):
        seen = trained(many_steps, model)
        assert plan_of(model).corrections >= 1
    said = [record.message for record in caplog.records if "planned again with what was measured" in record.message]
    assert 1 <= len(said) <= 2
    assert equal(seen, expected)


def test_a_plan_made_again_for_the_same_program_predicts_what_was_measured():
    model = tower()
    with fitting(model, budget="1MiB") as found:
        plan = found.prepare((), {"x": torch.randn(512, 8), "target": torch.randn(512, 4)})
        measured = slowed(plan, 1.3, 2.0, 1.0)
        made = image(corrected(plan, measured, measured.seconds), plan.program)
    assert abs(simulate(made.problem, made.schedule).seconds / measured.seconds - 1) < 0.02


@pytest.mark.parametrize(("calls", "factor"), [(1.0, 1.0), (1.1, 1.1), (4.0, None)])
def test_what_only_the_recorded_step_takes_longer_is_nobodys(calls, factor):
    """Recorded, the step took four times as long as those that nobody recorded, which took what was predicted. That was between its calls, which took
    as long as they do; unless they alone took longer than a step does, which they cannot."""
    with fitting(tower(), budget="1MiB") as found:
        plan = found.prepare((), {"x": torch.randn(512, 8), "target": torch.randn(512, 4)})
        seconds = plan.predicted.seconds
        recorded = replace(slowed(plan, calls, calls, 1.0), seconds=4 * seconds)
        menu = corrected(plan, recorded, seconds)
        within = sum(call.seconds for call in calls_in(plan, plan.predicted))
    assert 0.5 * seconds < within < 0.9 * seconds
    for region, choices in plan.menu.choices.items():
        expected = [(factor or seconds / within) * choice.seconds for choice in choices]
        assert [choice.seconds for choice in menu.choices[region]] == pytest.approx(expected)


def test_a_run_waits_where_the_simulated_device_runs_ahead():
    with fitting(tower(), budget="1MiB") as found:
        plan = found.prepare((), {"x": torch.randn(512, 8), "target": torch.randn(512, 4)})
    peaks = plan.predicted.peak_bytes
    ahead, behind = (
        replace(plan, predicted=replace(plan.predicted, peak_bytes={tier: factor * peak // 2 for tier, peak in peaks.items()})) for factor in (4, 1)
    )
    assert behind.predicted_bytes < plan.peak_bytes == ahead.predicted_bytes
    leaving = replace(behind, aside_bytes=behind.aside_bytes + 100, leaving_bytes=100)
    assert leaving.predicted_bytes == plan.peak_bytes + 30, "where gradients leave, that of the schedule's order counts"


def test_a_plan_must_promise_more_than_the_fastest_that_ran():
    with fitting(tower(), budget="1MiB") as found:
        plan = found.prepare((), {"x": torch.randn(512, 8), "target": torch.randn(512, 4)})
    slow, quick = (replace(plan, predicted=replace(plan.predicted, seconds=seconds)) for seconds in (0.99, 0.9))
    trials = Trials()
    assert trials.choose(slow).predicted.seconds == 0.99  # nothing ran yet
    trials.ran(plan, 1.0)
    trials.corrections = 1
    chosen = trials.choose(quick)
    assert (chosen.predicted.seconds, chosen.corrections, trials.settled) == (0.9, 1, False)
    chosen = trials.choose(slow)  # not worth a change
    assert (chosen.predicted, chosen.corrections, trials.settled) == (plan.predicted, 1, False)
    trials.corrections = 2
    assert trials.choose(slow).corrections == 2 and trials.settled
    doubled = {
        region: tuple(replace(one, forward_seconds=2 * one.forward_seconds, backward_seconds=2 * one.backward_seconds) for one in choices)
        for region, choices in plan.menu.choices.items()
    }
    chosen = trials.choose(replace(slow, menu=replace(plan.menu, choices=doubled)))  # the one that ran, and what was found out since
    assert chosen.program == plan.program and chosen.predicted.seconds > 1.2 * plan.predicted.seconds


@pytest.mark.parametrize(("before", "above", "again"), [(1.05, 1.12, True), (1.05, 1.07, False), (1.11, 1.12, False)])
def test_a_plan_far_from_what_no_plan_could_beat_is_made_again(plan, caplog, before, above, again):
    """A step takes three hundredths longer than predicted, which alone is no reason, and was looked at. Twice at most, and not where the plan was as
    far from that from the beginning."""
    measured = slowed(plan, 1.03, 1.03, 1.0)
    seconds, trials = 1.03 * plan.predicted.seconds, Trials(plan.menu.problem.machine)
    assert not is_off(plan.predicted, seconds)

    def least(menu):
        return plan.predicted.seconds / before if menu is plan.menu else seconds / above

    with caplog.at_level(logging.WARNING, "tierwise"):
        found = [trials.look(plan, seconds, measured, lambda _: True, least_seconds=least) for _ in range(3)]
    assert [one is None for one in found] == [again, again, False] and trials.corrections == 2 * again
    assert sum("12% more than no plan could beat" in record.message for record in caplog.records) == trials.corrections
    assert Trials().look(plan, seconds, measured, lambda _: True) is not None  # nothing is known of that


def test_no_plan_beats_what_no_plan_could(plan):
    """By what was measured, on the machine as it was alone: links learned to be twice as fast are not."""
    alone = plan.menu.problem.machine
    least = least_seconds(plan.menu, "backward", alone, lambda states: (0, 0))
    faster = replace(plan.menu, problem=replace(plan.menu.problem, machine=alone.with_rates(lambda link, lane, rate: 2 * rate)))
    assert least == least_seconds(faster, "backward", alone, lambda states: (0, 0)) and 0 < least <= plan.predicted.seconds
    assert least_seconds(faster, "backward", faster.problem.machine, lambda states: (0, 0)) < least


def test_plans_that_turn_out_slower_give_way_to_the_fastest(monkeypatch, caplog):
    """The first takes a second a step, those made with what was measured three and two."""
    took = [1.0, 3.0, 2.0]
    monkeypatch.setattr(fitted, "LEARNS_ON", {"cpu"})
    monkeypatch.setattr("tierwise.fitting.trials.PROMISE", 100.0)  # any plan may be tried
    seen = []

    def seconds(meter):
        if meter._fitted.current not in seen:
            seen.append(meter._fitted.current)
        return took[len(seen) - 1]

    monkeypatch.setattr(Meter, "step_seconds", seconds)
    monkeypatch.setattr(fitted.Fitted, "measured", property(lambda found: replace(found.current.predicted, spans=())))
    model = tower()
    with caplog.at_level(logging.WARNING, "tierwise"), fitting(model, budget="800KiB"):
        for _ in range(12):
            trained(three_steps, model)
        first, _, third = seen
        assert plan_of(model).program == first.program and plan_of(model).corrections == third.corrections == 2
    assert [record.message for record in caplog.records][-1] == "a step takes 2.00 s, and 1.00 s by an earlier plan: back to that"


@pytest.mark.parametrize("has_room", [True, False])
def test_state_moves_for_a_plan_made_again(monkeypatch, caplog, has_room):
    """The cpu takes fifty times as long as planned, as everything else does not: state that it updated passes through the device then, or stays
    there. The bits are those of a step that nobody planned. If host memory has no room for that the plan that runs stays."""
    monkeypatch.setattr(fitted, "LEARNS_ON", {"cpu"})
    monkeypatch.setattr("tierwise.fitting.trials.PROMISE", 100.0)
    model, optimizer = model_and_optimizer()
    losses, weights, state = untouched(steps=12)
    on_cpu = lambda plan: sum(place.update == "cpu" for place in plan.program.states.values())  # noqa: E731
    with caplog.at_level(logging.WARNING, "tierwise"), fitting(model, optimizer=optimizer, budget="1600KiB") as found:
        first = found.prepare((), batch(0))
        slow = 50 * first.predicted.busy_seconds()["cpu"]
        monkeypatch.setattr(
            Meter, "step_seconds", lambda meter: first.predicted.seconds if found.current is first else found.current.predicted.seconds
        )
        monkeypatch.setattr(Meter, "cpu_seconds", lambda meter: slow if found.current is first else None)
        monkeypatch.setattr(fitted.Fitted, "measured", property(lambda found: replace(found.current.predicted, measured=True)))
        monkeypatch.setattr("tierwise.fitting.trials.is_cpu_off", lambda predicted, seconds: seconds == slow)
        monkeypatch.setattr(fitted, "is_cpu_off", lambda predicted, seconds: seconds == slow)
        if not has_room:
            monkeypatch.setattr(found.lasting, "place", refuses)
        assert train(model, optimizer, steps=12) == losses
        now, placed = plan_of(model), found.lasting.states
        assert equal(dict(model.state_dict()), dict(weights)) and equal(optimizer.state_dict()["state"], state["state"])
        assert placed.is_installed and found.lasting.placements == dict(now.program.states)
        assert on_cpu(first) > 0 and now.corrections == has_room
        assert (on_cpu(now) < on_cpu(first)) if has_room else now.program == first.program
    assert equal(dict(model.state_dict()), dict(weights))
    said = [record.message for record in caplog.records]
    assert sum("planned again with what was measured" in sentence for sentence in said) == 1
    assert sum("is not taken, since there is no room for it: nothing left" in sentence for sentence in said) == (not has_room)


def refuses(program):
    raise OutOfHostMemory("nothing left")


def test_the_plan_that_runs_stays_if_no_other_can_be_made(monkeypatch):
    """Other tensors have come to the device meanwhile, so that a new plan has no room."""
    took, other = [1.0], []
    monkeypatch.setattr(fitted, "LEARNS_ON", {"cpu"})
    monkeypatch.setattr(Meter, "step_seconds", lambda meter: took[0])
    monkeypatch.setattr(fitted.Fitted, "measured", property(lambda found: replace(found.current.predicted, spans=(), seconds=1.0)))
    monkeypatch.setattr(fitted.Fitted, "_other_bytes", lambda found, prepared: sum(other))
    model, optimizer = model_and_optimizer()
    with fitting(model, optimizer=optimizer, budget="1600KiB") as found:
        for number in range(14):
            model(**batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                placed, program = found.lasting.states, plan_of(model).program
                other.append(1 << 20)
        assert found.lasting.states is placed is not None
        assert plan_of(model).program == program and plan_of(model).corrections == 1


def test_updates_that_run_elsewhere_say_nothing_about_what_is_between_regions(plan):
    """State is placed; all goes as predicted, only what is between regions takes twice as long: the loss, not the updates."""
    moved = moved_updates(plan.menu.problem.graph, plan.program.states)
    measured = slowed(plan, 1.0, 2.0, 1.0)
    menu = corrected(plan, measured, measured.seconds)
    before, after = plan.menu.problem.costs.op_seconds, menu.problem.costs.op_seconds
    between = [(op.id, "gpu") for op in plan.menu.problem.graph.ops if op.region not in plan.program.calls and op.id not in moved]
    assert moved and between and all(after[op] == pytest.approx(2 * before[op], rel=0.02) for op in between)
    assert all(after[op, "gpu"] == before[op, "gpu"] for op in moved)


def with_forward_behind(plan, seconds: float):
    """The predicted step as if it had been measured, with so much more time before each call in forward of modules whose state is elsewhere."""
    measured, graph, steps = slowed(plan, 1.0, 1.0, 1.0), plan.image.problem.graph, plan.image.schedule.steps
    waiting = [
        span.step
        for span in measured.spans
        if isinstance(steps[span.step], Compute)
        and graph.ops[steps[span.step].op].phase is Phase.FORWARD
        and graph.calls[graph.ops[steps[span.step].op].region].module in plan.program.states
    ]
    behind = {span.step: seconds * sum(number <= span.step for number in waiting) for span in measured.spans}
    spans = [span._replace(start=span.start + behind[span.step], end=span.end + behind[span.step]) for span in measured.spans]
    return replace(measured, spans=tuple(spans), seconds=measured.seconds + seconds * len(waiting))


def test_calls_that_wait_for_updates_elsewhere_say_that_these_are_slow(plan):
    """State is placed; each call in forward begins a millisecond later than planned, and all of that is lost. What is between regions is as it
    was, and the same program is now predicted to be as late."""
    late = with_forward_behind(plan, 0.001)
    moved = moved_updates(plan.menu.problem.graph, plan.program.states)
    menu = corrected(plan, late, late.seconds)
    again = image(menu, plan.program)
    before, after = plan.menu.problem.costs.op_seconds, menu.problem.costs.op_seconds
    assert moved and late.seconds > plan.predicted.seconds
    assert all(after[op.id, "gpu"] == pytest.approx(before[op.id, "gpu"], rel=0.05) for op in plan.menu.problem.graph.ops)
    assert all(after[op, "cpu"] > 2 * before[op, "cpu"] for op in moved)
    assert simulate(again.problem, again.schedule).seconds == pytest.approx(late.seconds, rel=0.05)


def test_what_only_the_recorded_step_waited_for_is_not_the_updates(plan):
    """Each call in forward begins a hundredth of a millisecond late in a step that was recorded; the others take what was predicted."""
    late = with_forward_behind(plan, 0.00001)
    menu = corrected(plan, late, plan.predicted.seconds)
    before, after = plan.menu.problem.costs.op_seconds, menu.problem.costs.op_seconds
    assert late.seconds > plan.predicted.seconds and all(after[op] == pytest.approx(before[op], rel=0.01) for op in before)


def test_calls_of_backward_that_wait_in_their_midst_say_that_updates_are_slow():
    """All state is updated by the cpu; the first of four calls that go back alike takes three milliseconds longer than the others, in which it waits
    for an update. The others say how long calls are; the same program is now predicted to be as late."""
    model, optimizer = model_and_optimizer()
    with fitting(model, optimizer=optimizer, budget="2MiB") as found:
        plan = found.prepare((), batch(0))
    program = replace(
        plan.program,
        calls={call: CallPlan("cheap") for call in plan.program.calls},
        states=dict.fromkeys(plan.menu.homes, Placement("host", "cpu", gradients="host")),
    )
    made = image(plan.menu, program)
    plan = replace(plan, program=program, image=made, predicted=simulate(made.problem, made.schedule))
    measured, graph, steps = slowed(plan, 1.0, 1.0, 1.0), plan.image.problem.graph, plan.image.schedule.steps
    stalled = next(s for s in measured.spans if isinstance(steps[s.step], Compute) and graph.ops[steps[s.step].op].phase is Phase.BACKWARD)
    spans = [
        span._replace(start=span.start + 0.003 * (span.start > stalled.start), end=span.end + 0.003 * (span.start >= stalled.start))
        for span in measured.spans
    ]
    late = replace(measured, spans=tuple(spans), seconds=measured.seconds + 0.003)
    menu = corrected(plan, late, late.seconds)
    again = image(menu, plan.program)
    for region, choices in plan.menu.choices.items():
        assert [after.seconds for after in menu.choices[region]] == pytest.approx([before.seconds for before in choices])
    assert simulate(again.problem, again.schedule).seconds == pytest.approx(late.seconds, rel=0.05)


def test_what_is_a_little_off_is_measured_and_kept(monkeypatch):
    """A step takes three hundredths longer than predicted: the plan stays, and its prediction is what was measured."""
    monkeypatch.setattr(fitted, "LEARNS_ON", {"cpu"})
    first = []

    def seconds(meter):
        first.append(meter._fitted.current)
        return 1.03 * first[0].predicted.seconds

    monkeypatch.setattr(Meter, "step_seconds", seconds)
    monkeypatch.setattr(fitted.Fitted, "measured", property(lambda found: slowed(first[0], 1.03, 1.03, 1.0)))
    model = tower()
    with fitting(model, budget="1MiB"):
        for _ in range(4):
            trained(three_steps, model)
        plan = plan_of(model)
    assert plan.program == first[0].program and plan.corrections == 0
    assert plan.predicted.seconds == pytest.approx(1.03 * first[0].predicted.seconds, rel=0.005)


def test_calls_that_wait_less_for_updates_elsewhere_say_that_these_are_fast(monkeypatch, plan):
    """State is placed, and the cpu was taken for a tenth slower than it is: calls begin when they would with a faster one. The same program is then
    predicted to be as early, and the cpu to be as fast."""
    monkeypatch.setattr("tierwise.fitting.feedback.EARLY", 0.0)
    moved = moved_updates(plan.menu.problem.graph, plan.program.states)
    costs = plan.menu.problem.costs.op_seconds
    slow = replace(plan.menu, problem=with_seconds(plan.menu.problem, {key: cost * 2000 for key, cost in costs.items() if key[1] == "cpu"}))
    made = image(slow, plan.program)
    late = replace(plan, menu=slow, image=made, predicted=simulate(made.problem, made.schedule))
    quick = image(
        replace(slow, problem=with_seconds(slow.problem, {key: cost * 1800 for key, cost in costs.items() if key[1] == "cpu"})), plan.program
    )
    ran = replace(simulate(quick.problem, quick.schedule), measured=True)
    measured = slowed(replace(late, predicted=ran), 1.0, 1.0, 1.0)
    menu = corrected(late, measured, measured.seconds)
    again = image(menu, plan.program)
    assert moved and late.predicted.seconds > 1.05 * measured.seconds
    assert simulate(again.problem, again.schedule).seconds == pytest.approx(measured.seconds, rel=0.02)
    assert all(menu.problem.costs.op_seconds[op, "cpu"] == pytest.approx(1800 * costs[op, "cpu"], rel=0.03) for op in moved)


def test_no_link_is_learned_to_be_much_faster_than_alone(plan):
    """The step takes what was predicted, and the cpu was three tenths longer at its updates, which are most of it: so long it cannot have been busy.
    Not links are taken to be as fast as that would ask for, but the cpu; and look after look links are faster by no more than a tenth in all."""
    costs = plan.menu.problem.costs.op_seconds
    slow = replace(plan.menu, problem=with_seconds(plan.menu.problem, {key: cost * 2000 for key, cost in costs.items() if key[1] == "cpu"}))
    alone = slow.problem.machine
    for _ in range(3):
        made = image(slow, plan.program)
        known = replace(plan, menu=slow, image=made, predicted=simulate(made.problem, made.schedule))
        measured = slowed(known, 1.0, 1.0, 1.0)
        busy = known.predicted.busy_seconds()["cpu"]
        assert busy > 0.9 * known.predicted.seconds
        slow = corrected(known, measured, measured.seconds, 1.3 * busy, alone)
        again = image(slow, plan.program)
        assert simulate(again.problem, again.schedule).seconds == pytest.approx(measured.seconds, rel=0.055)
        for way in (("hbm", "dram"), ("dram", "hbm")):
            assert slow.problem.machine.link(*way).bytes_per_second <= 1.1001 * alone.link(*way).bytes_per_second


def test_updates_on_the_cpu_take_what_they_took(plan):
    """The cpu took half as long again as planned and nothing waited for it. Then the next plan has such a cpu, and streams and links as they were."""
    measured = slowed(plan, 1.0, 1.0, 1.0)
    planned = plan.predicted.busy_seconds()["cpu"]
    menu = corrected(plan, measured, measured.seconds, 1.5 * planned)
    costs, before = menu.problem.costs.op_seconds, plan.menu.problem.costs.op_seconds
    on_cpu = [key for key in before if key[1] == "cpu"]
    assert on_cpu and all(costs[key] == pytest.approx(1.5 * before[key]) for key in on_cpu)
    assert all(costs[key] == pytest.approx(before[key], rel=0.01) for key in before if key[1] != "cpu")
    assert not is_cpu_off(plan.predicted, planned) and not is_cpu_off(plan.predicted, None)
    assert is_cpu_off(replace(plan.predicted, seconds=1.9 * planned), 1.06 * planned)
    assert not is_cpu_off(replace(plan.predicted, seconds=2.1 * planned), 1.06 * planned)  # it has time


def test_what_a_cpu_that_is_known_leaves_of_the_lateness_is_the_links(plan):
    """Each call in forward begins half a millisecond later than planned, and the cpu took what was planned: then the rest came so much later."""
    late = with_forward_behind(plan, 0.0005)
    menu = corrected(plan, late, late.seconds, plan.predicted.busy_seconds()["cpu"])
    again = image(menu, plan.program)
    rate, before = (one.problem.machine.link("dram", "hbm").bytes_per_second for one in (menu, plan.menu))
    costs, planned = menu.problem.costs.op_seconds, plan.menu.problem.costs.op_seconds
    assert rate < 0.5 * before
    assert all(costs[key] == pytest.approx(planned[key], rel=0.05) for key in planned)
    assert simulate(again.problem, again.schedule).seconds == pytest.approx(late.seconds, rel=0.05)


def test_what_is_between_regions_is_not_blamed_for_what_updates_hold_up(plan):
    """State is elsewhere; each call in forward begins a tenth of a millisecond later than planned, and the step takes half as long again as that
    explains: ops between regions count with a quarter more, and the rest is the link's."""
    late = with_forward_behind(plan, 0.0001)
    seconds = 1.5 * late.seconds
    menu = corrected(plan, replace(late, seconds=seconds), seconds, plan.predicted.busy_seconds()["cpu"])
    again = image(menu, plan.program)
    graph, moved = plan.menu.problem.graph, moved_updates(plan.menu.problem.graph, plan.program.states)
    outside = [op.id for op in graph.ops if op.region not in plan.program.calls and op.id not in moved]
    costs, planned = menu.problem.costs.op_seconds, plan.menu.problem.costs.op_seconds
    assert all(costs[op, "gpu"] == pytest.approx(1.25 * planned[op, "gpu"]) for op in outside if (op, "gpu") in planned)
    assert simulate(again.problem, again.schedule).seconds == pytest.approx(seconds, rel=0.05)


def test_the_cpu_says_how_long_it_is_at_updates():
    """Each step updates everything once; what the cpu is at in a step is less than the step, and more than nothing."""
    model, optimizer = model_and_optimizer()
    with fitting(model, optimizer=optimizer, budget="1600KiB") as found:
        found.prepare((), batch(0))
        assert found.meter.cpu_seconds() is None
        began = time.perf_counter()
        for step in range(6):
            model(**batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        states = found.lasting.states
        states.flush()
        taken = time.perf_counter() - began
        assert states.cpu_work.elements == 6 * states.cpu_elements > 0
        assert 0 < states.cpu_work.seconds < taken
        assert 0 < found.meter.cpu_seconds() < taken


def with_seconds(problem, seconds):
    return replace(problem, costs=replace(problem.costs, op_seconds={**problem.costs.op_seconds, **seconds}))


def test_a_call_that_waited_does_not_count():
    """Of three calls that send nothing one is held up; the middle one is what the next plan counts on."""
    model = tower()
    with fitting(model, budget="1GiB") as found:
        plan = found.prepare((), {"x": torch.randn(512, 8), "target": torch.randn(512, 4)})
        measured = slowed(plan, 1.0, 1.0, 1.0)
        late = measured.spans[0]
        measured = replace(measured, spans=(late._replace(end=late.end + 1.0), *measured.spans[1:]), seconds=measured.seconds + 1.0)
        menu = corrected(plan, measured, measured.seconds)
    for region, choices in plan.menu.choices.items():
        calls = sum(call.region == region for call in plan.menu.problem.graph.calls)
        if calls > 2:
            assert [after.seconds for after in menu.choices[region]] == pytest.approx([before.seconds for before in choices])


def test_host_memory_of_plans_left_behind_is_given_back():
    model, given = tower(), {"x": torch.randn(512, 8), "target": torch.randn(512, 4)}
    with fitting(model, budget="800KiB") as found:
        model(**given).backward()
        needed = found.below.host_bytes
        assert needed > 0
        found.below.provide(4 * needed, 0)  # as an earlier plan would have had it
        model(**given).backward()
        assert found.below.host_bytes == 4 * needed
        found._has_plans_left_behind = True
        model(**given).backward()
        assert found.below.host_bytes == needed
