"""The court: every policy, found by its file, on every odd problem and on graphs nobody made by hand.

Legal (plan() runs the judge; the interpreter agrees on values), deterministic, within the budget or refused with a budget that works, and
never faster than the bound.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from graphs import training_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreter import run_program, run_schedule
from problems import ODD_PROBLEMS, machine
from toy_blocks import menu

from tierwise import policies
from tierwise.errors import InfeasibleBudget
from tierwise.ir import check_graph, peak_bytes
from tierwise.ir.judge import choice_faults
from tierwise.ir.serial import dumps, loads
from tierwise.lower import image, keep_everything
from tierwise.policies import keep_all, plan
from tierwise.simulate import lower_bound_seconds, simulate


def compiled_blocks(on=None):
    """Four blocks of one op forward and one op backward: what the steps of transformers are in the table of all policies."""
    question = menu(4, 1000)
    return replace(image(question, keep_everything(question)).problem, machine=on or machine())


PROBLEMS = {**ODD_PROBLEMS, "compiled blocks": compiled_blocks}
BUDGET_SHARES = (1.0, 0.8, 0.6, 0.45)
GRAPHS_PER_POLICY = 12


@pytest.fixture(autouse=True, scope="module")
def files_looked_up_once():
    """A plan looks up its policy among the files each time, which takes as long as many a plan; while these tests run no file comes or goes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "_files", cache(policies._files))
        yield


@cache
def is_lossy(name: str) -> bool:
    """By the card, which is read from the policy's source anew each time."""
    return policies.card(name).exactness.startswith("lossy")


def in_court(problem, name: str):
    """Plan, and hold the plan against everything every plan must satisfy. Returns the schedule, or the refusal."""
    given = problem
    try:
        problem, schedule = policies.planned(given, name)
    except InfeasibleBudget as refusal:
        assert plan_again_fails_the_same_way(problem, name, refusal)
        return refusal
    assert (problem, schedule) == policies.planned(given, name), "not deterministic"
    check_graph(problem.graph)
    assert not list(choice_faults(problem))
    lossy = is_lossy(name)
    periods = 3 if problem.cyclic else 1
    # What says it is exact may not round; a step of the policy's own making is held against itself.
    assert run_schedule(problem, schedule, periods, rounded=lossy) == run_program(problem.graph, periods)
    timeline = simulate(problem, schedule)
    assert timeline.seconds >= lower_bound_seconds(problem, lossy=lossy) * (1 - 1e-9)
    in_list_order = peak_bytes(problem, schedule)
    for tier in problem.machine.tiers:
        # In time a tier may hold more than in list order, where it has room: bytes on their way out are held until they are gone.
        assert max(timeline.peak_bytes[tier.name], in_list_order[tier.name]) <= tier.capacity_bytes
    return schedule


def plan_again_fails_the_same_way(problem, name: str, refusal: InfeasibleBudget) -> bool:
    with pytest.raises(InfeasibleBudget) as again:
        policies.planned(problem, name)
    return str(again.value) == str(refusal)


@pytest.mark.parametrize("which", PROBLEMS)
@pytest.mark.parametrize("name", policies.names())
def test_policy_on_odd_graphs(name, which):
    problem = PROBLEMS[which]()
    check_graph(problem.graph)
    whole = peak_bytes(problem, keep_all.plan(problem))["hbm"]
    named = set()
    for share in BUDGET_SHARES:
        outcome = in_court(problem.with_budget(int(whole * share)), name)
        if isinstance(outcome, InfeasibleBudget) and outcome.least_bytes is not None:
            assert outcome.least_bytes > int(whole * share)
            named.add(outcome.least_bytes)  # most refusals of one problem name the same
    for least_bytes in named:
        policies.planned(problem.with_budget(least_bytes), name)  # the budget it names works


@pytest.mark.parametrize("name", policies.names())
def test_policy_with_ample_memory(name):
    """With room for everything no policy may fail; what it does with the room is its own affair."""
    for make in PROBLEMS.values():
        assert not isinstance(in_court(make(machine(hbm=100_000)), name), InfeasibleBudget)


@pytest.mark.parametrize("name", policies.names())
@settings(max_examples=GRAPHS_PER_POLICY, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(problem=training_steps(), share=st.sampled_from((1.0, 0.7, 0.5)))
def test_policy_on_made_graphs(name, problem, share):
    whole = peak_bytes(problem, keep_all.plan(problem))["hbm"]
    in_court(problem.with_budget(max(1, int(whole * share))), name)


@pytest.mark.parametrize("name", policies.names())
def test_a_plan_survives_the_way_through_a_file(name):
    problem, schedule = policies.planned(ODD_PROBLEMS["chain with weights"](), name)
    assert loads(dumps(schedule, graph=problem.graph), type(schedule), graph=problem.graph) == schedule


@pytest.mark.parametrize("name", policies.names())
def test_card(name):
    card = policies.card(name)
    assert card.summary.endswith(".")
    for part in (card.paper, card.idea, card.rule, card.differs, card.decides):
        assert part, f"{name} does not say all of Paper, Idea, Rule, Differs and DECIDES"
    assert card.fidelity in policies.FIDELITIES, f"{name} does not say FIDELITY"
    assert card.executable is True or str(card.executable).startswith(policies.SIMULATED_ONLY), f"{name} does not say EXECUTABLE"
    assert card.paper.startswith("none") or (card.year and card.venue), f"{name} has no 'Venue 20xx' in its Paper line, nor YEAR and VENUE"


def test_cards_read_venue_and_year_from_the_paper_line():
    found = {name: (policies.card(name).venue, policies.card(name).year) for name in ("capuchin", "chen", "flashneuron", "keep_all")}
    assert found == {"capuchin": ("ASPLOS", 2020), "chen": ("arXiv", 2016), "flashneuron": ("USENIX FAST", 2021), "keep_all": ("", None)}


def test_papers_are_cited_by_their_first_author():
    found = {name: policies.card(name).authors for name in ("chen", "dtr", "unsloth")}
    assert found == {"chen": "T. Chen et al.", "dtr": "Kirisame et al.", "unsloth": ""}
    assert {absent.name: absent.authors for absent in policies.ABSENT} == {"flexgen": "Sheng et al.", "gtbm": "", "tmof": "Lin et al."}


def test_what_is_absent_has_no_file():
    assert {absent.name: absent.status for absent in policies.ABSENT} == {
        "flexgen": "not applicable yet", "gtbm": "unknown", "tmof": "not applicable yet"
    }  # fmt: skip
    assert not {absent.name for absent in policies.ABSENT} & set(policies.names())


def test_a_storage_larger_than_the_budget_is_named_in_bytes():
    problem = ODD_PROBLEMS["one large storage"]().with_budget(300)
    with pytest.raises(InfeasibleBudget, match=r"budget 300 B is below 525 B, the smallest keep_all can do") as caught:
        plan(problem, "keep_all")
    assert caught.value.least_bytes == 525  # small, large and 20 of workspace
