"""Questions of plans, from values as on the command line and from YAML files."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from phasesplit.errors import SpecError
from phasesplit.io.specs import load_machine
from phasesplit.planner.journal import problem_digest
from phasesplit.planner.problem import Measure, Problem
from phasesplit.planner.problem_file import read_problem
from phasesplit.planner.question import Asked
from phasesplit.scheduler.rules import Transfer
from refusals import assert_refused

BASE = {"model": "llama-3.1-70b", "machines": "dgx-h100,dgx-a100", "workload": {"source": "azure-conversation"}}
PERCENTILES = {"prompt": "p50=1020,p90=2734", "output": "p50=129,p90=345"}
YAML = """
model: llama-3.1-70b
machines: [dgx-h100, dgx-a100]
workload:
  prompt: {p50: 1020, 90: 2734}
  output: {p50: 129, p90: 345}
rate: 10
slo: ttft_p99<2s,itl_p99<100ms
minimize: power
within: {cost: 1500 USD/h, machines: 20}
seeds: [3, 4]
tensor-parallel: [8, 4]
power-caps: [0.5]
rules: {transfer: serialized}
"""
TRACE = "arrival_s,prompt_tokens,output_tokens\n0.5,1000,20\n0.75,20,3\n2.5,3000,30\n9.5,40,100\n"


def asked(**values: Any) -> Asked:
    return read_problem(None, {**BASE, **values})


def refused(**values: Any) -> str:
    with pytest.raises(SpecError) as caught:
        read_problem(None, {**BASE, **values})
    return str(caught.value)


def without(*fields: str, **values: Any) -> dict[str, Any]:
    return {**{name: value for name, value in BASE.items() if name not in fields}, **values}


def names(problem: Problem) -> list[str]:
    return [offer.machine.name for offer in problem.offers]


def test_the_defaults_ask_for_the_least_cost_at_the_workloads_own_rate() -> None:
    """A plan without options would answer another question than the one that is documented."""
    problem = asked().problem
    assert problem.objective == Measure.COST
    assert problem.slo.name == "splitwise"
    assert problem.seeds == (0, 1, 2)
    assert problem.traffic.rate_per_s == pytest.approx(5.53, rel=0.01)
    assert problem.traffic.duration_s == pytest.approx(10_000 / problem.traffic.rate_per_s)


@pytest.mark.parametrize(("rate", "seconds"), [(10, 1000), (70, 10_000 / 70), (500, 120)])
def test_a_simulation_lasts_ten_thousand_requests_but_at_least_two_minutes(rate: float, seconds: float) -> None:
    """Tails would rest on too few requests, or bursts on too short a time."""
    assert asked(rate=rate).problem.traffic.duration_s == pytest.approx(seconds)
    assert asked(rate=rate, duration="5 min").problem.traffic.duration_s == 300


def test_a_file_and_options_ask_the_same(tmp_path: Path) -> None:
    """What is written in a file would be planned otherwise than typed."""
    file = tmp_path / "plan.yaml"
    file.write_text(YAML)
    written = read_problem(file, {})
    typed = read_problem(
        None,
        {
            "model": "llama-3.1-70b", "machines": "dgx-h100, dgx-a100", "workload": PERCENTILES, "rate": "10",
            "slo": "ttft_p99<2s,itl_p99<100ms", "minimize": "power", "within": "cost=1500,machines=20",
            "seeds": "3,4", "tensor_parallel": "8,4", "power_caps": "50%", "rules": {"transfer": "serialized"},
        },
    )  # fmt: skip
    assert problem_digest(written.problem) == problem_digest(typed.problem)
    for problem in (written.problem, typed.problem):
        assert problem.budgets == {Measure.COST: 1500, Measure.MACHINES: 20}
        assert problem.seeds == (3, 4)
        assert problem.objective == Measure.POWER
        assert problem.rules.transfer == Transfer.SERIALIZED


def test_options_override_a_file_field_by_field(tmp_path: Path) -> None:
    """One would have to edit the file to ask a little differently, or would lose what it says."""
    file = tmp_path / "plan.yaml"
    file.write_text(YAML)
    values = {"rate": 20, "rules": {"batch_requests": "64"}, "workload": {"source": "azure-coding"}}
    problem = read_problem(file, values).problem
    assert problem.traffic.rate_per_s == 20
    assert (problem.rules.transfer, problem.rules.batch_requests) == (Transfer.SERIALIZED, 64)
    assert problem.traffic.name == "azure-coding"
    assert problem.seeds == (3, 4)


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    """A plan could only be asked for from one folder."""
    folder = tmp_path / "plans"
    folder.mkdir()
    (folder / "trace.csv").write_text(TRACE)
    (folder / "plan.yaml").write_text("model: llama-3.1-70b\nmachines: dgx-h100/tp4\nworkload: trace.csv\nrate: 5\n")
    found = read_problem(folder / "plan.yaml", {})
    assert found.source == str(folder / "trace.csv")
    assert found.problem.traffic.name == "trace"
    assert names(found.problem) == ["dgx-h100/tp4"]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("model: 3", ["line 2", "model"]),
        ("machines: []", ["line 3", "machines"]),
        ("rate: fast", ["line 7", "rate", "'fast'", "above 0"]),
        ("slo: quick", ["line 8", "slo", "'quick'"]),
        ("minimize: cots", ["line 9", "minimize", "'cots'", "'cost'", "'power'"]),
        ("within: {kost: 3}", ["line 10", "within"]),
        ("within: {cost: 3 kW}", ["'kW' is a unit of w"]),
        ("seeds: [3, 3]", ["line 11", "seeds"]),
        ("power-caps: [70]", ["line 13", "power_caps"]),
        ("within:\n  cost: 900\n  power: 3 USD", ["line 12", "within.power", "'3 USD'"]),
        ("within:\n  machines: 20\n  cost: 3", ["line 12", "within.cost", "3 USD/h", "one server"]),
        ("machines:\n  - dgx-h100\n  - dgx-h10", ["line 5", "machines[1]", "'dgx-h10'"]),
        ("machines:\n  - dgx-h100\n  - dgx-h100", ["line 5", "machines[1]", "'dgx-h100'", "each machine once"]),
        (
            "workload:\n  source: azure-conversation\n  columns: a=b",
            ["line 6", "workload.columns", "only for a trace file"],
        ),
        ("workload:\n  output: {p50: 9}\n  prompt:\n    p50: many", ["line 7", "workload.prompt.p50", "'many'"]),
        ("workload:\n  source: azure-conversation\n  formt: x", ["line 6", "workload.formt", "unknown field"]),
        ("rules:\n  transfer: serialized\n  batch-requests: 0", ["line 16", "rules.batch_requests", "got 0"]),
        (
            "rules:\n  transfer: serialized\n  elastic: true",
            ["line 16", "rules.elastic", "every design sets it itself"],
        ),
        ("rules: {speed: 1}", ["line 14", "rules.speed", "'speed'"]),
    ],
)
def test_a_wrong_field_of_a_file_is_named_with_its_line(tmp_path: Path, wrong: str, named: list[str]) -> None:
    """A person would have to search a file for what is wrong with it."""
    field = wrong.split(":")[0]
    lines = [wrong if line.startswith(f"{field}:") else line for line in YAML.split("\n")]
    if wrong.startswith("workload:"):
        lines = [line for line in lines if line not in YAML.split("\n")[4:6]]
    file = tmp_path / "plan.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(SpecError) as caught:
        read_problem(file, {})
    assert_refused(caught.value, *named)


def test_machines_that_exist_are_named_with_their_own_line(tmp_path: Path) -> None:
    """A person would look for the wrong count in the line above the machines."""
    lines = [
        line for line in YAML.split("\n") if not line.startswith(("machines", "minimize", "within", "tensor", "power"))
    ]
    (tmp_path / "plan.yaml").write_text("\n".join([*lines, "existing:", "  dgx-h100: 3", "  dgx-a100: none"]))
    with pytest.raises(SpecError) as caught:
        read_problem(tmp_path / "plan.yaml", {})
    assert_refused(caught.value, "line 13", "existing.dgx-a100", "'none'", "MACHINE=COUNT")


def test_what_an_option_leaves_to_the_file_is_the_files_mistake(tmp_path: Path) -> None:
    """A person would look for a field among the options that stands in the file."""
    file = tmp_path / "plan.yaml"
    file.write_text(YAML.replace("{transfer: serialized}", "{transfer: fast}"))
    with pytest.raises(SpecError) as caught:
        read_problem(file, {"rules": {"batch_requests": "64"}})
    assert_refused(caught.value, "plan.yaml", "line 14", "rules.transfer", "'fast'")
    with pytest.raises(SpecError) as caught:
        read_problem(file, {"rules": {"batch_requests": "-1", "transfer": "auto"}})
    assert_refused(caught.value, "--set", "batch_requests", "got -1")


def test_a_misspelt_field_of_the_workload_is_compared_with_the_workloads_fields(tmp_path: Path) -> None:
    """The message would offer fields that are not allowed there."""
    file = tmp_path / "plan.yaml"
    file.write_text(YAML.replace("prompt:", "promt:"))
    with pytest.raises(SpecError) as caught:
        read_problem(file, {})
    assert_refused(caught.value, "workload.promt", "unknown", "prompt")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"minimize": "cost", "maximize": "throughput"}, "--minimize and --maximize: give one of the two"),
        ({"maximize": "throughput"}, "--maximize: needs a budget"),
        ({"existing": "dgx-h100=3"}, "--existing and --machines"),
        *(
            ({"existing": f"dgx-h100={count}"}, "allowed is MACHINE=COUNT with a whole number of servers from 1 to")
            for count in ("0", "-2", "abc", "1e9", "1.5", "nan", "inf")
        ),
        ({"preset": "iso-power"}, "--preset: needs --baseline"),
        ({"baseline": "4:dgx-h100"}, "--baseline: needs --preset"),
        ({"preset": "iso-cost", "baseline": "4:dgx-h100", "minimize": "cost"}, "leave out the objective"),
        ({"preset": "iso-cost", "baseline": "dgx-h100"}, "allowed is SERVERS:MACHINE"),
        ({"maximize": "throughput", "within": "cost=900", "rate": 5}, "--rate: is what the plan looks for"),
        ({"within": "cost=5"}, "--within cost: 5 USD/h is less than one server takes, dgx-a100 takes"),
        ({"within": "machines=0.5"}, "is less than one server takes"),
        ({"machines": "dgx-h100,h100"}, "dgx-h100 is there twice"),
        ({"machines": "dgxh100"}, "--machines: unknown name 'dgxh100', did you mean dgx-h100"),
        ({"workload": {"source": "azure-codng"}}, "did you mean azure-coding"),
        ({"workload": {"source": "azure-coding", "columns": "a=b"}}, "--columns: only for a trace file"),
        ({"workload": {"source": "azure-coding", **PERCENTILES}}, "not both"),
        ({"workload": {"prompt": "p50=10"}}, "--output-percentiles: missing, next to --prompt-percentiles"),
        ({"workload": PERCENTILES}, "--rate: missing"),
        ({"workload": {**PERCENTILES, "prompt": "p50"}}, "--prompt-percentiles: got 'p50'"),
        ({"workload": {**PERCENTILES, "prompt": ""}}, "--prompt-percentiles"),
        ({"workload": {**PERCENTILES, "prompt": "p50=many"}}, "--prompt-percentiles"),
        ({"workload": {**PERCENTILES, "prompt": "p50=nan"}, "rate": 5}, "p50: got nan"),
        ({"workload": {**PERCENTILES, "prompt": "p50=10,p50=20"}}, "--prompt-percentiles"),
        ({"rules": {"elastic": "false"}}, "every design sets it itself"),
        ({"arrivals": "diurnal:amplitude=0.5"}, "--arrivals diurnal:amplitude=0.5: a trace shorter than the period"),
        ({"times": "oracle"}, "source of phase times: unknown name 'oracle'"),
        ({"times": "roofline", "profile": "x.csv"}, "allowed is auto where the published rules, a profile"),
        ({"power_caps": "10%"}, "power cap: got '10%'"),
        ({"tensor_parallel": "3"}, "tensor parallelism: got 3"),
        ({"grid_intensity": -1}, "0 to 10 kg of CO2 per kWh"),
        ({"model": "bloom-176b", "reference": "dgx-h100/tp2"}, "--reference: model bloom-176b does not fit on"),
    ],
)
def test_what_contradicts_or_is_not_allowed_is_refused(values: dict[str, Any], message: str) -> None:
    """A plan would answer another question than the person believes to have asked."""
    found = refused(**values)
    assert message in found
    assert "\n" not in found


def test_a_model_that_fits_nowhere_says_what_is_missing_and_what_fits() -> None:
    """A person would not learn which machine to ask for instead."""
    message = refused(machines="dgx-h100/tp1")
    assert "141.1 GB are 55.2 GB more than its memory of 85.9 GB" in message
    assert "enough have dgx-h100 with tensor parallelism 2" in message


def test_a_model_that_fits_only_without_a_cache_is_refused_too() -> None:
    """The search would go on to thousands of servers, none of which can hold a request."""
    message = refused(machines="dgx-h100/tp2", rules={"hbm_share": "0.8"})
    assert "more than the 80% of its memory that may be filled" in message


def test_a_machine_that_is_too_small_is_left_out_next_to_one_that_is_not() -> None:
    """One machine of a list that does not do would end the plan."""
    found = asked(machines="dgx-h100/tp1,dgx-h100")
    assert "dgx-h100/tp1" not in names(found.problem)
    assert "dgx-h100/tp1" in found.notes[0]
    assert found.notes[0].endswith("left out")


def test_slices_are_looked_at_where_times_come_from_the_same_source() -> None:
    """A measured server would be compared with slices that nobody measured, or slices left out for no reason."""
    assert names(asked(machines="dgx-h100").problem) == ["dgx-h100", "dgx-h100/tp2", "dgx-h100/tp4"]
    for offer in asked(model="llama2-70b", machines="dgx-h100").problem.offers:
        assert offer.times.source.startswith("measured")
    assert names(asked(model="llama2-70b", machines="dgx-h100", rules="published").problem) == ["dgx-h100"]
    assert names(asked(machines="dgx-h100/tp4").problem) == ["dgx-h100/tp4"]


def test_degrees_that_are_asked_for_are_all_there_is() -> None:
    """Tensor parallelism could not be fixed."""
    problem = asked(machines="dgx-h100", tensor_parallel="2,4").problem
    assert [(offer.machine.name, offer.variant_of) for offer in problem.offers] == [
        ("dgx-h100/tp4", ""),
        ("dgx-h100/tp2", "dgx-h100/tp4"),
    ]


@pytest.mark.parametrize(
    ("values", "capped"),
    [
        ({}, False),
        ({"minimize": "power"}, True),
        ({"minimize": "carbon"}, True),
        ({"within": "power=400kW"}, True),
        ({"within": "cost=1500"}, False),
        ({"minimize": "power", "power_caps": "none"}, False),
        ({"power_caps": "60%"}, True),
    ],
)
def test_power_caps_are_looked_at_where_power_matters(values: dict[str, Any], capped: bool) -> None:
    """Plans for cost would take three times as long, or plans for power miss what helps most."""
    assert any("@" in name for name in names(asked(**values).problem)) == capped


def test_equal_power_and_equal_cost_take_the_baselines_budget() -> None:
    """The paper's comparisons would be at another size than the baseline's."""
    machine = load_machine("dgx-h100")
    by_power = asked(preset="iso-power", baseline="40:dgx-h100").problem
    assert by_power.objective is None
    assert by_power.budgets == {Measure.POWER: 40 * machine.provisioned_w}
    by_cost = asked(preset="iso-cost", baseline="80:dgx-h100/tp4", within="machines=50").problem
    assert by_cost.budgets[Measure.COST] == pytest.approx(80 * machine.price_usd_per_hour)
    assert by_cost.budgets[Measure.MACHINES] == 50


def test_equal_throughput_first_asks_for_the_baselines() -> None:
    """The plan would be for a rate that nobody asked for."""
    found = asked(preset="iso-throughput", baseline="4:dgx-h100", minimize="power")
    assert found.problem.objective == Measure.POWER
    assert found.baseline is not None
    assert [(offer.machine.name, offer.existing) for offer in found.baseline.offers] == [("dgx-h100", 4)]
    assert found.at(33.0).traffic.rate_per_s == 33.0
    assert found.at(33.0).traffic.duration_s == found.baseline.traffic.duration_s


def test_machines_that_exist_are_all_there_is() -> None:
    """The plan would buy machines, or use others."""
    found = read_problem(None, without("machines", existing="dgx-h100=10,dgx-a100=6")).problem
    assert found.objective is None
    assert [(offer.machine.name, offer.existing) for offer in found.offers] == [("dgx-h100", 10), ("dgx-a100", 6)]


def test_dropped_rows_of_a_trace_are_shown(tmp_path: Path) -> None:
    """A plan would rest on a part of the trace and not say so."""
    (tmp_path / "trace.csv").write_text(f"{TRACE}11,-5,3\n")
    found = asked(workload={"source": str(tmp_path / "trace.csv"), "skip_bad": True})
    assert "trace.csv" in found.notes[0]
    assert len(found.notes) == 1
    assert found.problem.traffic.rate_per_s == pytest.approx(1 / 3)


def test_percentiles_make_lengths_with_these_percentiles() -> None:
    """A plan for typed-in percentiles would be for other lengths."""
    lengths = asked(workload=PERCENTILES, rate=5).problem.traffic.lengths
    order = lengths.prompt_tokens.argsort()
    share = lengths.requests[order].cumsum() / lengths.requests.sum()
    assert lengths.prompt_tokens[order][share.searchsorted(0.5)] == pytest.approx(1020, rel=0.01)
    assert lengths.prompt_tokens[order][share.searchsorted(0.9)] == pytest.approx(2734, rel=0.01)


def test_the_example_of_the_guide_is_allowed(repository: Path, tmp_path: Path) -> None:
    """A newcomer would begin with a file that is refused."""
    text = (repository / "docs" / "planning.md").read_text(encoding="utf-8")
    block = text.split("    # question.yaml", 1)[1].split("\n\n", 1)[0].split("\n", 1)[1]
    file = tmp_path / "question.yaml"
    file.write_text(textwrap.dedent(block))
    problem = read_problem(file, {}).problem
    assert problem.objective == Measure.POWER
    assert problem.budgets == {Measure.COST: 1500, Measure.MACHINES: 60}


@pytest.mark.usefixtures("fake_tables")
def test_times_come_from_the_source_that_is_asked_for() -> None:
    """A plan would rest on other phase times than those that were asked for."""
    for offer in asked(machines="dgx-h100", times="aiconfigurator").problem.offers:
        assert "aiconfigurator" in offer.times.source
    for offer in asked(model="llama2-70b", machines="dgx-h100", times="roofline").problem.offers:
        assert offer.times.source.startswith("roofline")


@pytest.mark.usefixtures("no_tables")
def test_a_source_that_is_not_installed_says_how_to_install_it() -> None:
    """A person would read that their machine is unknown."""
    assert "pip install 'phasesplit[aiconfigurator]'" in refused(times="aiconfigurator")


@pytest.mark.parametrize(
    ("written", "bare_flag", "expected"),
    [
        ("day: true", False, []),
        ("day: false", False, None),
        ("day: true", True, []),
        ("day:\n  - joint:target=9000,ratio=3\n  - static", False, ["joint:target=9000,ratio=3", "static"]),
        ("day:\n  - joint:target=9000,ratio=3", True, ["joint:target=9000,ratio=3"]),
        ("day: static", False, ["static"]),
        ("slo: splitwise", False, None),
    ],
)
def test_a_day_is_asked_for_in_a_file(
    tmp_path: Path, written: str, bare_flag: bool, expected: list[str] | None
) -> None:
    """A day would be simulated for nobody, not at all, or without a person's own policies."""
    file = tmp_path / "question.yaml"
    file.write_text(f"model: llama-3.1-70b\nmachines: [dgx-h100]\nworkload: azure-conversation\nrate: 5\n{written}\n")
    found = read_problem(file, {"day": True} if bare_flag else {}).day
    assert (None if found is None else list(found)) == expected


def test_a_wrong_policy_in_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    """A person would look for the mistake in the wrong place."""
    file = tmp_path / "question.yaml"
    file.write_text("model: llama-3.1-70b\nmachines: [dgx-h100]\nworkload: azure-conversation\nday: [jiont:target=9]\n")
    with pytest.raises(SpecError) as caught:
        read_problem(file, {})
    assert_refused(caught.value, "question.yaml", "line 4", "day.policy", "'jiont'", "joint")
    file.write_text("model: llama-3.1-70b\nmachines: [dgx-h100]\nworkload: azure-conversation\nday: {a: 1}\n")
    with pytest.raises(SpecError) as caught:
        read_problem(file, {})
    assert_refused(caught.value, "question.yaml", "line 4", "day", "true", "list of policies")
