"""The day that a plan is asked for: policies as a person writes them, and days that are refused before planning."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from phasesplit.domain.arrivals import Diurnal
from phasesplit.errors import SpecError
from phasesplit.files.policies import parse_policy
from phasesplit.planning.days import MOST_REQUESTS, too_many
from phasesplit.planning.drift import requests_of
from phasesplit.planning.problem import Problem
from phasesplit.scheduling.autoscaling import Policy

if TYPE_CHECKING:
    from phasesplit.files.plan_schema import PlanSpec

POLICY_FIELD = "day.policy"
"""How one of the policies in the field `day` is named to what tells a person the place."""


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
    if rate_known and requests > MOST_REQUESTS:
        raise SpecError(f"{where('day')}: {too_many(requests)}")
    return own
