"""The question of a plan: a problem made out of a checked spec, or the reason why the spec is refused.

1. `Reader.asked` refuses fields that contradict one another, and loads model, rules, SLO and reference.
2. `Offers` has the machines, each with the phase times of the model on it, and their slices and power caps.
3. `Reader` adds the traffic: its source, its rate, the length of its traces.
4. `read_day` adds the policies of the day, if one is asked for.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from phasesplit.domain.arrivals import ArrivalModel, Diurnal, parse_arrivals
from phasesplit.domain.machine import Machine, fitting_degree, sliced, tensor_parallel_degrees
from phasesplit.domain.model import Model
from phasesplit.domain.profile import PhaseTimes
from phasesplit.domain.request import Trace
from phasesplit.domain.slo import parse_slo
from phasesplit.domain.workload import Workload, workload_from_percentiles
from phasesplit.errors import SpecError
from phasesplit.io.catalog import SLOW_LINKS, phase_times, reference_times, with_room_for
from phasesplit.io.policies import parse_policy
from phasesplit.io.specs import load_machine, load_model
from phasesplit.io.text import Where, inside
from phasesplit.planner.days import MOST_REQUESTS_OF_A_DAY, too_many
from phasesplit.planner.designs import designs_of, divisions_of
from phasesplit.planner.drift import requests_of
from phasesplit.planner.lower_bounds import LowerBounds
from phasesplit.planner.problem import UNITS, Measure, Offer, Problem, Traffic, of_one
from phasesplit.planner.search import RateSearch
from phasesplit.scheduler.autoscaling import Policy
from phasesplit.scheduler.rules import Rules

if TYPE_CHECKING:
    from phasesplit.planner.plan_schema import PlanSpec, WorkloadSpec

LEAST_DURATION_S = 120.0
REQUESTS = 10_000
"""Each simulated trace lasts LEAST_DURATION_S, or longer until so many requests have come."""
MOST_REQUESTS = 1_000_000
"""A plan simulates hundreds of traces; one of this length takes about a second."""
POLICY_FIELD = "day.policy"
"""How one of the policies in the field `day` is named to what tells a person the place."""
_POWER_CAPS = (0.7, 0.5)
_POWERED = (Measure.POWER, Measure.ENERGY, Measure.CARBON)
_SET_BY_DESIGNS = ("elastic", "unsplit_batching")
_MEASURED = "measured"
_BUDGETS_OF_PRESETS = {"iso-power": Measure.POWER, "iso-cost": Measure.COST}
_CONTRADICTIONS = (
    ("minimize", "maximize", "give one of the two"),
    ("existing", "machines", "the machines that exist are all there are, leave out one of the two"),
    ("existing", "minimize", "what exists is paid for; leave out one of the two"),
    ("existing", "within", "all that exists is used, there is nothing to keep within a budget"),
    ("existing", "preset", "give one of the two"),
    ("existing", "tensor_parallel", "say it in the machine's name: dgx-h100/tp4=10"),
    ("existing", "power_caps", "say it in the machine's name: dgx-h100@50%=10"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A plan's question, and what its answer needs to name files by.

    Attributes:
        problem: The problem; its rate stands for one where `baseline` has to be found first.
        baseline: The problem whose machines, all unsplit, hold the rate that the plan is for; None: the rate is known.
        written: Name of a machine to how it was written.
        model: How the model was written.
        source: How the trace or workload was written, "" where percentiles were typed in.
        options: Options with which `phasesplit simulate` has the same requests, times and prices.
        times: Source of phase times, as for `catalog.phase_times`.
        notes: Sentences for the person.
        day: Policies of one's own for a day, by how they were written, next to those fitted; None: no day.
    """

    problem: Problem
    baseline: Problem | None
    written: Mapping[str, str]
    model: str
    source: str
    options: tuple[str, ...]
    times: str
    notes: tuple[str, ...]
    day: Mapping[str, Policy] | None = None

    def at(self, rate_per_s: float) -> Problem:
        """Return the problem at another rate, the length of its traces unchanged."""
        return replace(self.problem, traffic=replace(self.problem.traffic, rate_per_s=rate_per_s))


@dataclass(slots=True, kw_only=True)
class Offers:
    """Machines on offer for one model, added one after the other.

    Attributes:
        model: The model.
        rules: The scheduler's settings: whether times are looked up as published, and how much memory may be filled.
        profile: CSV file of phase times of one's own, None for none.
        source: Where phase times come from, as for `phase_times`.
        offers: What was added.
        written: Name of a machine to how it was written, with which files name it.
        notes: Sentences for the person: machines left out, times that are not to be trusted.
    """

    model: Model
    rules: Rules
    profile: str | None = None
    source: str = "auto"
    offers: list[Offer] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(
        self,
        names: Sequence[str],
        places: Sequence[str],
        *,
        existing: Mapping[str, int] | None = None,
        degrees: Sequence[int] | None = None,
        caps: Sequence[float] = (),
    ) -> None:
        """Add machines and their variants; those on which the model does not fit are left out.

        Args:
            names: Names or paths.
            places: How the person knows the place of each.
            existing: How many servers there are of each; then there are no variants.
            degrees: Tensor-parallel degrees to look at, the largest first choice; None: the whole server, and the
                powers of two for which phase times are known as they are for the whole server.
            caps: Power caps to look at besides none.

        Raises:
            SpecError: A name is unknown or there twice, no machine holds the model, or phase times are missing.
        """
        refusals: list[tuple[float, SpecError]] = []
        for name, where in zip(names, places, strict=True):
            text = name if not degrees else f"{name}/tp{max(degrees)}"
            machine = load_machine(text, where=where)
            if machine.name in self.written:
                raise SpecError.bad(where, name, f"each machine once, and {machine.name} is there twice")
            refusal = self._too_small(machine)
            if refusal is not None:
                refusals.append((machine.hbm_bytes, refusal))
                continue
            self._append(machine, text, existing=existing[name] if existing else None)
            if existing is None:
                self._add_variants(machine, name, text, degrees, caps)
        if len(refusals) == len(names):
            raise max(refusals, key=lambda one: one[0])[1]
        self.notes += [f"{refusal}; left out" for _, refusal in refusals]

    def times(self, machine: Machine) -> PhaseTimes:
        """Return the phase times of the model on a machine from the source that was asked for.

        Raises:
            SpecError: The source does not know the pair.
        """
        return phase_times(
            self.model, machine, published=self.rules.published, profile=self.profile, source=self.source
        )

    def _append(self, machine: Machine, text: str, *, variant_of: str = "", existing: int | None = None) -> None:
        times = self.times(machine)
        if times.source.endswith(SLOW_LINKS) and not variant_of:
            self.notes.append(f"{machine.name}: {SLOW_LINKS} as planned with; measure it, or plan with aiconfigurator")
        self.offers.append(Offer(machine=machine, times=times, variant_of=variant_of, existing=existing))
        self.written[machine.name] = text

    def _add_variants(
        self, base: Machine, name: str, text: str, degrees: Sequence[int] | None, caps: Sequence[float]
    ) -> None:
        """Add the other settings of a machine: fewer accelerators for an instance, less power, and both."""
        slices = self._known_degrees(base) if degrees is None else [one for one in degrees if one != max(degrees)]
        for part in [text, *(f"{name}/tp{degree}" for degree in slices)]:
            for ending in ["", *(f"@{100 * cap:g}%" for cap in caps if cap < 1)]:
                if ending and (not base.accelerators_limit_w or "@" in base.name):
                    continue
                machine = load_machine(part + ending)
                if machine.name not in self.written and self._too_small(machine) is None:
                    self._append(machine, part + ending, variant_of=base.name)

    def _known_degrees(self, base: Machine) -> list[int]:
        """Return the powers of two below a whole server's degree that have times from the same source as the server."""
        if base.server or self.rules.published or self.profile is not None:
            return []
        least = fitting_degree(self.model, base)
        degrees = [one for one in tensor_parallel_degrees(base)[:-1] if one & (one - 1) == 0 and one >= (least or 0)]
        measured = self.times(base).source.startswith(_MEASURED)
        return [degree for degree in degrees if self._is_known(sliced(base, degree), measured=measured)]

    def _is_known(self, machine: Machine, *, measured: bool) -> bool:
        """Return whether a slice has phase times, measured ones if the whole server has."""
        try:
            return self.times(machine).source.startswith(_MEASURED) or not measured
        except SpecError:
            return False

    def _too_small(self, machine: Machine) -> SpecError | None:
        """Return why the model does not fit on a machine, None if it does."""
        if self.model.weights_bytes >= machine.hbm_bytes:
            try:
                phase_times(self.model, machine)
            except SpecError as problem:
                return problem
        weights_bytes, usable_bytes = self.model.weights_bytes, self.rules.hbm_share * machine.hbm_bytes
        if weights_bytes < usable_bytes:
            return None
        return SpecError(
            f"model {self.model.name} on machine {machine.name}: weights of {weights_bytes / 1e9:,.1f} GB are"
            f" {(weights_bytes - usable_bytes) / 1e9:,.1f} GB more than the {self.rules.hbm_share:.0%} of its memory"
            f" that may be filled, enough have {with_room_for(self.model, machine)}"
        )


class Reader:
    """Makes a question out of a spec.

    Args:
        spec: The spec.
        where: From a field to how the person knows its place.
    """

    def __init__(self, spec: "PlanSpec", where: Where) -> None:
        self.spec = spec
        self.where = where

    def asked(self) -> Asked:
        """Return the question.

        Raises:
            SpecError: Something is missing, unknown, not allowed or contradictory.
        """
        spec, where = self.spec, self.where
        self._refuse_contradictions()
        rules = self._rules()
        model = load_model(spec.model, where=where("model"))
        machine = load_machine(spec.reference, where=where("reference"))
        slo = parse_slo(spec.slo, where("slo"))
        reference = reference_times(model, machine, published=rules.published, source=spec.times)
        if reference is None and slo.needs_reference:
            raise SpecError(
                f"{where('reference')}: model {model.name} does not fit on {machine.name}, which the slowdowns of the"
                f" SLO compare with; name another reference, or an SLO of times such as ttft_p99<2s"
            )
        budgets = dict(spec.within)
        baseline = self._baseline(Offers(model=model, rules=rules, profile=spec.profile, source=spec.times))
        objective: Measure | None = spec.minimize or Measure.COST
        if spec.maximize or spec.existing or spec.preset in _BUDGETS_OF_PRESETS:
            objective = None
        if baseline is not None and spec.preset in _BUDGETS_OF_PRESETS:
            measure = _BUDGETS_OF_PRESETS[spec.preset]
            budgets[measure] = min(budgets.get(measure, float("inf")), self._taken(baseline, measure))
        offers = self._offers(
            Offers(model=model, rules=rules, profile=spec.profile, source=spec.times), objective, budgets
        )
        source, notes = self._source()
        problem = Problem(
            model=model,
            offers=tuple(offers.offers),
            traffic=Traffic(
                source=source, rate_per_s=spec.rate or 1.0, duration_s=LEAST_DURATION_S, arrivals=self._arrivals()
            ),
            slo=slo,
            objective=objective,
            budgets=budgets,
            reference=reference,
            seeds=spec.seeds,
            rules=rules,
            most_servers=spec.most_servers,
            **({} if spec.grid_intensity is None else {"grid_kg_per_kwh": spec.grid_intensity}),
        )
        self._refuse_unknown_figures(problem)
        self._refuse_what_no_machine_fits(problem)
        return self._timed(problem, baseline, offers, notes)

    def _timed(self, problem: Problem, baseline: Offer | None, offers: Offers, notes: list[str]) -> Asked:
        """Return the question with a rate and a length of its traces."""
        spec = self.spec
        held = None
        if spec.preset == "iso-throughput":
            assert baseline is not None  # noqa: S101 - presets have one
            held = replace(problem, offers=(baseline,), objective=None, budgets={})
        if problem.objective is None or held is not None:
            rate = _expected_rate_per_s(held or problem)
        else:
            rate = spec.rate or self._own_rate(problem.traffic.source)
        duration_s = spec.duration or self._own_duration_s(problem.traffic.source, rate)
        if rate * duration_s > MOST_REQUESTS:
            where = self.where("duration")
            raise SpecError(
                f"{where}: {rate:,.6g} requests/s over {duration_s:,.6g} s are {rate * duration_s:,.0f} a trace,"
                f" allowed are {MOST_REQUESTS:,} at most: give a shorter {where}"
            )
        traffic = replace(problem.traffic, rate_per_s=rate, duration_s=duration_s)
        problem = replace(problem, traffic=traffic)
        return Asked(
            problem=problem,
            baseline=None if held is None else replace(held, traffic=traffic),
            written=offers.written,
            model=spec.model,
            source=spec.workload.source or "",
            options=self._options(),
            times=spec.times,
            notes=(*offers.notes, *notes),
            day=read_day(spec, self.where, problem, rate_known=problem.objective is not None and held is None),
        )

    def _options(self) -> tuple[str, ...]:
        """Return what `phasesplit simulate` needs in addition to the cluster, the rate and the duration."""
        spec, workload = self.spec, self.spec.workload
        given = {
            "--arrivals": spec.arrivals,
            "--format": workload.format,
            "--columns": workload.columns,
            "--time-unit": workload.time_unit,
            "--slo": spec.slo,
            "--reference": spec.reference,
            "--profile": spec.profile,
            "--times": None if spec.times == "auto" else spec.times,
            "--grid-intensity": None if spec.grid_intensity is None else repr(spec.grid_intensity),
        }
        words = [word for option, value in given.items() if value is not None for word in (option, value)]
        flags = {"--skip-bad": workload.skip_bad, "--sort": workload.sort}
        return (*words, *(flag for flag, on in flags.items() if on))

    def _refuse_contradictions(self) -> None:
        spec, where = self.spec, self.where
        for one, other, why in _CONTRADICTIONS:
            if getattr(spec, one) and getattr(spec, other):
                raise SpecError(f"{where(one)} and {where(other)}: {why}")
        if not (spec.machines or spec.existing):
            raise SpecError(f"{where('machines')}: missing, say which machines there are to choose from")
        if spec.maximize and not (spec.within or spec.existing):
            raise SpecError(f"{where('maximize')}: needs a budget, such as {where('within')} cost=1500")
        if bool(spec.preset) != bool(spec.baseline):
            asked, missing = ("preset", "baseline") if spec.preset else ("baseline", "preset")
            raise SpecError(f"{where(asked)}: needs {where(missing)} as well")
        if spec.preset and (spec.maximize or (spec.minimize and spec.preset in _BUDGETS_OF_PRESETS)):
            raise SpecError(f"{where('preset')} {spec.preset}: says itself what to look for, leave out the objective")
        if spec.rate and (spec.maximize or spec.existing or spec.preset):
            raise SpecError(f"{where('rate')}: is what the plan looks for here, leave it out")
        if spec.workload.source and (spec.workload.prompt or spec.workload.output):
            raise SpecError(f"{where('workload')}: a trace or workload, or percentiles of lengths, not both")

    def _rules(self) -> Rules:
        from phasesplit.io.rule_settings import rules_from

        settings, where = self.spec.rules, inside(self.where, "rules")
        for name in settings:
            if name.replace("-", "_") in _SET_BY_DESIGNS:
                raise SpecError(f"{where(name)}: every design sets it itself, leave it out")
        published = {name: value for name, value in settings.items() if name == "published"}
        return rules_from(settings, where, rules_from(published, where))

    def _offers(self, offers: Offers, objective: Measure | None, budgets: Mapping[Measure, float]) -> Offers:
        spec, where = self.spec, self.where
        caps = spec.power_caps
        if caps is None:
            powered = not offers.rules.published and any(one in _POWERED for one in (objective, *budgets))
            caps = _POWER_CAPS if powered else ()
        if spec.existing:
            offers.add(
                tuple(spec.existing), [where(f"existing.{name}") for name in spec.existing], existing=spec.existing
            )
        else:
            names = spec.machines or ()
            places = [where(f"machines[{number}]") for number in range(len(names))]
            offers.add(names, places, degrees=spec.tensor_parallel, caps=caps)
        return offers

    def _baseline(self, offers: Offers) -> Offer | None:
        """Return the machines that a preset compares with."""
        if self.spec.baseline is None:
            return None
        servers, name = self.spec.baseline
        offers.add([name], [self.where("baseline")], existing={name: servers})
        return offers.offers[0]

    def _taken(self, baseline: Offer, measure: Measure) -> float:
        """Return what the baseline takes of a measure, of what it provisions and rents."""
        machine = baseline.machine
        return (baseline.existing or 0) * machine.instances_per_server * of_one(measure, machine, 0.0)

    def _refuse_unknown_figures(self, problem: Problem) -> None:
        """Refuse to compare by a price or power of 0: in a machine file it stands for one that nobody knows."""
        compared = {problem.objective, *problem.budgets}
        for measure in (one for one in (Measure.COST, *_POWERED) if one in compared):
            field = "price_usd_per_hour" if measure == Measure.COST else "provisioned_w"
            for machine in (offer.machine for offer in problem.offers):
                if getattr(machine, field) == 0:
                    raise SpecError(
                        f"machine {machine.name}, {field}: is 0, which stands for unknown; write it into the machine's"
                        f" file, or ask for {self.where('minimize')} machines"
                    )

    def _refuse_what_no_machine_fits(self, problem: Problem) -> None:
        for measure, most in problem.budgets.items():
            least = {
                offer.machine.name: of_one(measure, offer.machine, problem.grid_kg_per_kwh)
                * offer.machine.instances_per_server
                for offer in problem.offers
            }
            name = min(least, key=lambda one: least[one])
            if least[name] > most:
                raise SpecError(
                    f"{self.where(f'within.{measure}')}: {most:,.6g} {UNITS[measure]} is less than one server takes,"
                    f" {name} takes {least[name]:,.6g}"
                )

    def _arrivals(self) -> ArrivalModel | None:
        text, where = self.spec.arrivals, self.where("arrivals")
        model = None if text is None else parse_arrivals(text, where)
        short = isinstance(model, Diurnal) and (self.spec.duration or LEAST_DURATION_S) < model.period_s
        if short and self.spec.day is None:
            raise SpecError(
                f"{where} {text}: a trace shorter than the period sees neither its peak nor its mean; leave it out and"
                f" give the peak's rate, with {self.where('day')} for how the day goes"
            )
        return model

    def _source(self) -> tuple[Workload | Trace, list[str]]:
        """Return the workload or the trace, and a note on rows that were dropped."""
        spec, where = self.spec.workload, self.where
        if spec.source is None:
            return self._from_percentiles(spec), []
        if spec.source == "-" or Path(spec.source).exists() or set(spec.source) & set("./\\"):
            from phasesplit.io.traces import read_trace

            trace, count = read_trace(
                spec.source,
                format=spec.format,
                columns=spec.columns,
                time_unit=spec.time_unit,
                skip_bad=spec.skip_bad,
                sort=spec.sort,
            )
            return trace, [f"{spec.source}: {count}"] if count.dropped else []
        from phasesplit.io.workloads import load_workload, workload_names

        if spec.source not in workload_names():
            raise SpecError.unknown(f"{where('workload.source')} (no such file)", spec.source, workload_names())
        for option in ("format", "columns", "time_unit", "skip_bad", "sort"):
            if getattr(spec, option):
                raise SpecError(
                    f"{where(f'workload.{option}')}: only for a trace file, and {spec.source} is a shipped workload"
                )
        return load_workload(spec.source), []

    def _from_percentiles(self, spec: "WorkloadSpec") -> Workload:
        for given, missing in (("prompt", "output"), ("output", "prompt")):
            if not getattr(spec, missing):
                there = f", next to {self.where(f'workload.{given}')}" if getattr(spec, given) else ""
                raise SpecError(f"{self.where(f'workload.{missing}')}: missing{there}")
        if not (self.spec.rate or self.spec.maximize or self.spec.existing or self.spec.preset):
            raise SpecError(f"{self.where('rate')}: missing, percentiles of lengths say nothing of it")
        assert spec.prompt is not None and spec.output is not None  # noqa: S101, PT018 - checked above
        return workload_from_percentiles(spec.prompt, spec.output, self.spec.rate or 1.0, arrivals=self._arrivals())

    def _own_duration_s(self, source: Workload | Trace, rate_per_s: float) -> float:
        """Return how long traces last: a recorded one is played whole, since its head need not be like the rest."""
        if isinstance(source, Trace):
            rounds = max(1, math.ceil(LEAST_DURATION_S * rate_per_s / len(source)))
            return rounds * len(source) / rate_per_s
        return min(max(LEAST_DURATION_S, REQUESTS / rate_per_s), 1e7)

    def _own_rate(self, source: Workload | Trace) -> float:
        if not source.rate_per_s:
            raise SpecError(f"{self.where('rate')}: missing, all requests of {source.name} arrive at one instant")
        return source.rate_per_s


def _expected_rate_per_s(problem: Problem) -> float:
    """Return about the rate that a plan will find: half of what no unsplit design can exceed."""
    lower_bounds = LowerBounds(problem)
    given = any(offer.existing is not None for offer in problem.offers)
    rates = [1e-3]
    for design in divisions_of(problem) if given else designs_of(problem):
        if not design.kind.is_split:
            search = RateSearch(problem=problem, lower_bounds=lower_bounds, design=design, seeds=problem.seeds)
            rates += [lower_bounds.rate_per_s(design, counts) for counts in search.cells()]
    return max(rates) / 2


def read_day(
    spec: "PlanSpec", where: Callable[[str], str], problem: Problem, *, rate_known: bool
) -> dict[str, Policy] | None:
    """Return the policies of one's own by how they were written; None where no day is asked for.

    Args:
        spec: What was asked.
        where: From a field to how the person knows its place.
        problem: The problem.
        rate_known: Whether its rate is asked for, not still to be found.

    Raises:
        SpecError: A policy is not allowed, the day has too many requests, the rules know no policies, or the arrivals
            are those of a day already.
    """
    if spec.day is None:
        return None
    place = where(POLICY_FIELD if spec.day else "day")
    if problem.rules.published:
        raise SpecError(f"{place}: not with the published rules, which know no machines that come and go")
    if isinstance(problem.traffic.arrivals, Diurnal):
        # Short traces of it would size the clusters for the hour in which they happen to lie.
        raise SpecError(f"{where('arrivals')}: got diurnal, allowed with a day are others: the day swings by itself")
    own = {text: parse_policy(text, place) for text in spec.day}
    requests = requests_of(problem.traffic)
    if rate_known and requests > MOST_REQUESTS_OF_A_DAY:
        raise SpecError(f"{where('day')}: {too_many(requests)}")
    return own
