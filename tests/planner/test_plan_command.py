"""`phasesplit plan`, called in process through `run`."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from phasesplit import cli
from phasesplit.console.options import COMPILING
from phasesplit.io.catalog import compare_sources
from phasesplit.io.cluster_file import load_served_cluster
from phasesplit.io.profile_schema import ProfileSpec
from phasesplit.io.profiles import write_machine_file, write_profile_file
from phasesplit.io.specs import load_machine, load_model, write_cluster
from phasesplit.planner import plan_view, provision, report
from phasesplit.planner.documents import cluster_spec
from phasesplit.planner.plan import Plan, PlanStep
from phasesplit.planner.problem_file import read_problem
from profile_contents import content
from refusals import assert_refused

SMALL = shlex.split(
    "--model llama-3.1-70b --machines dgx-h100 --workload azure-conversation"
    " --rate 4 --duration 20 --seeds 1 --workers 1"
)
TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(
    f"{i / 4},{300 + 40 * (i % 7)},{20 + i % 5}\n" for i in range(60)
)


@dataclass
class Outcome:
    code: int
    out: str
    err: str


Call = Callable[..., Outcome]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Return a function that runs `phasesplit` in an empty folder with a trace in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "trace.csv").write_text(TRACE)

    def run(*arguments: object) -> Outcome:
        code = cli.run([str(argument) for argument in arguments])
        written = capsys.readouterr()
        # Whether something ran here before is not the plan's doing.
        return Outcome(code, written.out, written.err.replace(f"{COMPILING}\n", ""))

    return run


def test_a_plan_is_printed_with_its_ranking_its_verdict_and_what_binds(call: Call) -> None:
    """A person would not see what to build, or why."""
    outcome = call("plan", *SMALL, "--machines", "dgx-h100,dgx-a100")
    assert outcome.code == 0
    first = outcome.out.splitlines()[0]
    assert first.startswith("planning llama-3.1-70b on dgx-h100, dgx-a100 (and 4 settings of them): azure-conversation")
    for text in (
        "unsplit, chunked prompts", "split, elastic", "split, static", "1 prefill dgx-h100 + 1 decode dgx-a100",
        "Do not split: ", "What breaks first above", "Scarcest", "With one more", "prompt:output ratio",
        "no better:", "phase times (dgx-h100, dgx-a100, reference of slowdowns): roofline", "simulations, seeds 0,",
    ):  # fmt: skip
        assert text in outcome.out, text
    assert max(len(line) for line in outcome.out.splitlines()[1:]) <= 100


def test_sources_of_phase_times_are_compared(call: Call) -> None:
    """A person would trust a plan whose source of phase times another one contradicts, or look for one in vain."""
    outcome = call("plan", *SMALL, "--quick", "--slo", "none", "--model", "llama2-70b")
    assert re.search(r"phase times, ms +iteration +measured +roofline +to roofline", outcome.out)
    printed = re.findall(r"(prefill of|decode, batch) ([\d,]+) +([\d,.]+) +([\d,.]+) +([\d.]+)", outcome.out)
    shown = [(what.partition(" ")[0].strip(","), int(size.replace(",", ""))) for what, size, *_ in printed]
    assert shown == [
        ("prefill", 512),
        ("prefill", 2048),
        ("prefill", 8192),
        ("decode", 1),
        ("decode", 16),
        ("decode", 64),
    ]
    compared = compare_sources(load_model("llama2-70b"), load_machine("dgx-h100"), source=None)
    rows = {(row.phase, row.size): row for row in compared}
    for (phase, size), (_, _, *cells) in zip(shown, printed, strict=True):
        measured_ms, roofline_ms, ratio = (float(cell.replace(",", "")) for cell in cells)
        row = rows[phase, size]
        assert measured_ms == pytest.approx(1e3 * row.seconds["measured"], rel=0.01)
        assert roofline_ms == pytest.approx(1e3 * row.seconds["roofline"], rel=0.01)
        assert ratio == pytest.approx(row.ratios["measured"], abs=0.006)
    outcome = call("plan", *SMALL, "--quick")
    assert "only the roofline has phase times on dgx-h100" in outcome.out
    assert "to roofline" not in outcome.out
    sources = json.loads(call("plan", *SMALL, "--quick", "--json").out)["sources"]
    assert [(one["machine"], one["used"]) for one in sources] == [("dgx-h100", "roofline")]


def test_not_to_split_is_a_normal_answer(call: Call) -> None:
    """A script would take the advice not to split for a failure."""
    outcome = call("plan", *SMALL, "--quick")
    assert "Do not split" in outcome.out
    assert outcome.code == 0


def test_quick_leaves_out_what_nobody_waits_for(call: Call) -> None:
    """A quick plan would take as long as a whole one."""
    outcome = call("plan", *SMALL, "--quick")
    assert "With one more" not in outcome.out
    assert "prompt:output ratio" not in outcome.out


def test_the_first_line_comes_before_anything_is_simulated(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person would look at nothing for seconds, and not know what is being planned."""

    def stop(*_: Any, **__: Any) -> Plan:
        raise KeyboardInterrupt

    monkeypatch.setattr(provision, "make_plan", stop)
    outcome = call("plan", *SMALL)
    assert outcome.out.startswith("planning llama-3.1-70b")
    assert outcome.code == 130


def test_json_is_all_that_is_printed(call: Call) -> None:
    """A script could not read the plan, or would miss what it needs of it."""
    outcome = call("plan", *SMALL, "--json", "--quick")
    summary = json.loads(outcome.out)
    assert outcome.code == 0
    best = summary["best"]
    assert {"design", "pools", "capacity_per_s", "cost_usd_per_hour", "provisioned_power_w", "slowdowns"} <= set(best)
    assert {"role", "machine", "count"} <= set(best["pools"][0])
    assert len(best["slowdowns"]) == 9
    assert {"verdict", "candidates", "seeds", "elapsed_s", "sensitivity", "gains", "bottlenecks", "pareto"} <= set(
        summary
    )
    assert summary["elapsed_s"] > 0


@pytest.mark.parametrize("source", ["azure-conversation", "trace.csv"])
def test_a_written_cluster_simulates_to_the_plans_own_figures(call: Call, tmp_path: Path, source: str) -> None:
    """The cluster file would stand for another cluster, or other rules, than the plan has compared."""
    values = {
        "model": "llama-3.1-70b", "machines": "dgx-h100/tp4,dgx-a100", "workload": {"source": source}, "rate": 9,
        "duration": 20, "seeds": 1, "rules": {"transfer": "serialized"}, "grid_intensity": 0.1,
    }  # fmt: skip
    asked = read_problem(None, values)
    made = provision.make_plan(asked, workers=1, thorough=False)
    holding = [entry for entry in made.entries if entry.found.holds]
    assert {str(entry.design.kind) for entry in holding} >= {"unsplit, chunked prompts", "split, static"}
    for entry in holding:
        write_cluster(cluster_spec(Plan(problem=made.problem, entries=[entry]), asked), tmp_path / "cluster.yaml")
        outcome = call(
            "simulate", "--cluster", "cluster.yaml", "--workload", source, "--rate", 9, "--duration", 20, "--seed", 0,
            "--grid-intensity", 0.1, "--json",
        )  # fmt: skip
        summary = json.loads(outcome.out)
        (answer,) = entry.found.answers
        assert tuple(finding["value"] for finding in summary["slo"]["findings"]) == answer.values, entry.design
        bill = summary["bill"]
        assert bill["energy_j_per_request"] * summary["rate_per_s"] == answer.energy_w
        assert bill["provisioned_w"] == pytest.approx(entry.taken["power"])  # type: ignore[index]


def test_the_command_that_is_offered_simulates_the_winner(call: Call, tmp_path: Path) -> None:
    """The line that a person copies would not run, or simulate something else."""
    outcome = call("plan", *SMALL, "--quick", "--slo", "ttft_p99<2s", "--set", "transfer=serialized", "--seeds", "3,5",
                   "--write", "cluster.yaml")  # fmt: skip
    command = next(line for line in outcome.out.splitlines() if line.startswith("simulate it: "))
    words = shlex.split(command.removeprefix("simulate it: phasesplit "))
    assert "serve it:" not in outcome.out  # nobody has a DGX-H100 here
    summary = json.loads(call(*words, "--json").out)
    plan = json.loads(call("plan", *SMALL, "--quick", "--slo", "ttft_p99<2s", "--set", "transfer=serialized",
                           "--seeds", "3,5", "--json").out)  # fmt: skip
    assert summary["slo"]["findings"][0]["value"] == plan["best"]["slo"][0]["values"][0]


def test_a_plan_for_workers_of_this_host_can_be_served(call: Call, tmp_path: Path) -> None:
    """What was planned for measured workers could be simulated, but not run."""
    profile = ProfileSpec(**content(model__name="tiny"))
    write_profile_file(profile, tmp_path / "this.json")
    write_machine_file(profile, tmp_path / "this.yaml", tmp_path / "this.json")
    question = ("plan", "--model", "this.json", "--existing", "this.yaml=2", "--workload", "trace.csv", "--quick",
                "--seeds", "1", "--duration", "20", "--workers", "1", "--slo", "ttft_p90<9s")  # fmt: skip
    outcome = call(*question, "--write", "cluster.yaml")
    assert "serve it: phasesplit serve cluster.yaml\n" in outcome.out
    served = load_served_cluster("cluster.yaml")
    assert (served.model, sum(served.pools.values()), served.kv_bytes) == ("tiny", 2, 347 * 32 * 46_080)
    write_profile_file(ProfileSpec(**content(model__name="my-own")), tmp_path / "this.json")
    outcome = call(*question, "--write", "cluster.yaml")
    assert "serve it: phasesplit serve cluster.yaml --model PATH\n" in outcome.out


def test_a_report_and_a_figure_are_written(call: Call, tmp_path: Path) -> None:
    """The options would be accepted and nothing come of them."""
    outcome = call("plan", *SMALL, "--quick", "--html", "plan.html", "--figure", "plan.png")
    assert outcome.code == 0
    assert "wrote plan.html\nwrote plan.png\n" in outcome.out
    assert "llama-3.1-70b" in (tmp_path / "plan.html").read_text()
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_files_are_all_written_or_none(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed report would leave a cluster file of a plan that was never printed."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write_plan_html", full)
    outcome = call("plan", *SMALL, "--quick", "--write", "cluster.yaml", "--html", "plan.html")
    assert (outcome.code, outcome.err) == (2, "phasesplit: plan.html: cannot be written (No space left on device)\n")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.csv"]


def test_an_slo_that_no_cluster_keeps_is_a_negative_answer_with_the_nearest_miss(call: Call) -> None:
    """A person would not learn how far off the wish is, or a script take silence for success."""
    impossible = ("plan", *SMALL, "--slo", "ttft_p50<1ms")
    outcome = call(*impossible)
    assert outcome.code == 1
    assert outcome.err.startswith("phasesplit: no design keeps the SLO ttft_p50<1ms at 4 requests/s; nearest is")
    assert outcome.err.endswith("times the limit\n")
    outcome = call(*impossible, "--json")
    assert outcome.code == 1
    assert json.loads(outcome.out)["best"] is None


def test_a_budget_that_is_too_small_is_named_with_what_is_needed(call: Call) -> None:
    """A person would not know whether the budget or the SLO is the problem."""
    outcome = call("plan", *SMALL, "--rate", "70", "--within", "machines=1")
    assert outcome.code == 1
    assert "times the machines there may be (1 servers)" in outcome.err


def test_an_interruption_prints_the_best_so_far_and_writes_nothing(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C would lose what had been found, or leave a file as if the plan were done."""

    def interrupt(_: Any, step: PlanStep) -> None:
        if step.best is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr(plan_view.PlanProgress, "__call__", interrupt)
    outcome = call("plan", *SMALL, "--write", "cluster.yaml", "--resume", "plan.journal")
    assert outcome.code == 130
    assert outcome.err.endswith(
        "phasesplit: not written, as the plan is not complete: cluster.yaml\nphasesplit: interrupted\n"
    )
    assert "interrupted: there may be better" in outcome.out
    assert "dgx-h100" in outcome.out.split("\n", 1)[1]
    assert not (tmp_path / "cluster.yaml").exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert call("plan", *SMALL, "--quick", "--resume", "plan.journal").code == 0


def test_a_baselines_throughput_is_shown(call: Call) -> None:
    """A person would not know which rate the plan is for."""
    words = ["--preset", "iso-throughput", "--baseline", "2:dgx-h100", "--quick"]
    small = [word for word in SMALL if word not in ("--rate", "4")]
    outcome = call("plan", *small, *words)
    assert outcome.code == 0
    assert "the baseline holds " in outcome.out


def test_machines_that_exist_are_divided(call: Call) -> None:
    """The plan would say what to buy to somebody who asked how to use what there is."""
    words = [word for word in SMALL if word not in ("--machines", "dgx-h100", "--rate", "4")]
    outcome = call("plan", *words, "--existing", "dgx-h100=3", "--json", "--quick")
    best = json.loads(outcome.out)["best"]
    assert sum(pool["count"] for pool in best["pools"]) == 3
    assert best["objective_unit"] == "requests/s"
    assert best["capacity_per_s"] > 0


DAY = [*SMALL, "--rate", "0.5", "--duration", "60", "--quick"]


def test_a_day_is_shown_for_both_designs_under_every_policy(call: Call) -> None:
    """A person would not learn what autoscaling saves, on which side, and at whose expense."""
    outcome = call("plan", *DAY, "--autoscale", "joint:target=300,startup=10", "--autoscale", "static:initial=1+1")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    for line in ("1 prefill dgx-h100 + 1 decode dgx-h100 (split", "1 unsplit dgx-h100 (unsplit"):
        assert any(one.startswith(f"A day of 28,800 requests with {line}") for one in lines), line
    for policy in ("static", "threshold", "joint", "schedule", "joint (1)"):
        assert sum(bool(re.match(rf" {re.escape(policy)} +\d", one)) for one in lines) == 2, policy
    text = " ".join(outcome.out.split())
    assert "static:initial=1+1 does not fit unsplit, " in text
    assert "Over the day the split takes " in text
    assert outcome.out.count("(1) joint:target=300,startup=10\n") == 2
    assert "not tuned" in text
    assert "fitted, as --autoscale of simulate takes them: threshold:" in text
    said = [line for line in outcome.err.splitlines() if line != COMPILING]
    assert said[0].startswith("11 days, 316,800 requests in all: expect about ")
    assert [line.partition(",")[0] for line in said[1:]] == [f"day {number} of 11" for number in range(1, 12)]


def test_no_day_is_simulated_unless_asked(call: Call) -> None:
    """Every plan would take a minute longer."""
    outcome = call("plan", *DAY, "--json")
    assert outcome.code == 0
    assert "requests in all" not in outcome.err
    summary = json.loads(outcome.out)
    assert (summary["days"], summary["day_verdict"], summary["days_complete"]) == ([], None, True)


def test_a_fitted_policy_can_be_simulated_as_it_is_written(call: Call) -> None:
    """The figures of a day could not be had again with the setting that stands next to them."""
    summary = json.loads(call("plan", *DAY, "--day", "--json").out)
    day = next(one for one in summary["days"] if one["policy"] == "threshold" and len(one["machines"]) == 1)
    again = json.loads(call(
        "simulate", "--model", "llama-3.1-70b", "--pool", "unsplit:1:dgx-h100", "--workload", "azure-conversation",
        "--rate", "0.3333333333333333", "--duration", "86400", "--arrivals", "diurnal:amplitude=0.5", "--summary-only",
        "--autoscale", day["autoscale"], "--json", "--seed", "0",
    ).out)  # fmt: skip
    assert again["requests"] == pytest.approx(day["requests"], rel=0.02)
    assert again["bill"]["usd"] == pytest.approx(day["usd"], rel=0.02)


def test_an_interrupted_day_leaves_the_plan(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while days run would throw the finished plan away, or hide that days are missing."""
    from phasesplit.planner.plan_view import DayProgress

    def interrupt(progress: DayProgress, day: Any) -> None:
        if day.policy.name == "threshold":
            raise KeyboardInterrupt

    monkeypatch.setattr(DayProgress, "__call__", interrupt)
    outcome = call("plan", *DAY, "--day", "--write", "cluster.yaml")
    assert outcome.code == 130
    assert "Do not split: " in outcome.out
    assert " static " in outcome.out
    assert " joint " not in outcome.out
    assert "interrupted, so days are missing" in outcome.out
    assert "wrote cluster.yaml" in outcome.out


def test_a_rate_that_is_looked_for_has_its_day_bounded_too(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for the highest rate would simulate a day without end."""
    monkeypatch.setattr("phasesplit.planner.days.MOST_REQUESTS_OF_A_DAY", 1_000)
    words = [word for word in SMALL if word not in ("--machines", "dgx-h100", "--rate", "4")]
    outcome = call("plan", *words, "--existing", "dgx-h100=2", "--quick", "--day")
    assert outcome.code == 0
    assert "allowed are at most 1,000" in outcome.out
    assert "A day of" not in outcome.out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--day --rules published --model llama2-70b", ["--day", "published rules"]),
        ("--autoscale static --rules published --model llama2-70b", ["--autoscale", "published rules"]),
        ("--day --arrivals diurnal:amplitude=0.3", ["--arrivals", "diurnal", "a day"]),
        ("--autoscale jiont:target=3", ["--autoscale", "'jiont'", "joint"]),
        ("--autoscale joint", ["--autoscale", "'joint'", "all settings", "joint:target="]),
        ("--day --rate 400", ["--day", "23,040,000", "20,000,000"]),
        ("--write x.txt", ["--write", "'x.txt'", ".yaml or .yml"]),
        ("--write no/x.yaml", ["there is no no"]),
        ("--workload trace.csv --resume trace.csv", ["--resume", "'trace.csv'", "nothing else"]),
        ("--html a.html --figure a.html", ["--figure", "'a.html'"]),
        ("--workers 0", ["--workers", "0", "1 or more"]),
        ("--ray nowhere", ["--ray", "'nowhere'", "HOST:PORT", "'auto' or 'local'"]),
        ("--rules publshed", ["--rules", "'publshed'", "published"]),
        ("--set speed", ["--set", "'speed'", "FIELD=VALUE"]),
        ("--set speed=1", ["--set", "speed", "'speed'"]),
        ("--minimize cots", ["--minimize", "'cots'", "'cost'"]),
        ("--within cost", ["--within", "'cost'", "NAME=VALUE"]),
        ("--model llama-3.1-7b", ["model", "'llama-3.1-7b'", "llama-3.1-70b"]),
        ("nothing.yaml", ["nothing.yaml", "cannot be read"]),
        ("--rate -1", ["--rate", "-1.0", "above 0"]),
        ("--slo fast", ["--slo", "'fast'"]),
    ],
)
def test_wrong_options_are_refused_in_one_line(call: Call, tmp_path: Path, words: str, named: list[str]) -> None:
    """A person would read a traceback, or wait for a plan that cannot be written."""
    outcome = call("plan", *SMALL, *words.split())
    assert_refused(outcome, *named)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.csv"]


def test_the_help_shows_an_example(call: Call) -> None:
    """A newcomer would not know where to begin."""
    outcome = call("plan", "--help")
    assert "phasesplit plan --model llama-3.1-70b --machines dgx-h100,dgx-a100" in outcome.out
