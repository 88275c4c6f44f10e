"""Where the verdict flips: the advantage of the split as one thing after another is bent."""

from collections.abc import Sequence
from math import isinf, isnan
from typing import Any

from phasesplit.figures import readable
from phasesplit.figures.plan_tables import factor
from phasesplit.figures.style import colour, note, title
from phasesplit.planning.plan import Plan
from phasesplit.planning.sensitivity import Axis, Point, changes, flips

AXIS_NAMES = {
    Axis.RATE: "Request rate",
    Axis.RATIO: "Prompt:output ratio",
    Axis.LINK: "Link speed",
    Axis.TIGHTNESS: "SLO limits (right: looser)",
}
_LEAST_REACH = 0.06


def points_of(plan: Plan, axis: Axis) -> list[Point]:
    """Return the points of one axis, by rising factor."""
    return sorted((point for point in plan.points if point.axis == axis), key=lambda point: point.factor)


def draw_crossover(axes: Any, plan: Plan, axis: Axis) -> None:
    """Draw the advantage of the split over the factor on one thing; above the line, split."""
    title(axes, AXIS_NAMES[axis])
    points = points_of(plan, axis)
    if not points:
        note(axes, _nothing(plan, axis))
        return
    known = [point.advantage for point in points if not isnan(point.advantage)]
    low, high = min(-_LEAST_REACH, *known, 0.0), max(_LEAST_REACH, *known, 0.0)
    reach = high - low
    low, high = low - 0.22 * reach, high + 0.22 * reach
    axes.axhspan(0, high, color=colour("keeps-near"), linewidth=0)
    axes.axhline(0, color=colour("ink"), linewidth=1.0)
    axes.plot(
        [point.factor for point in points], [point.advantage for point in points], "-o", color=colour("transfer"),
        markersize=4,
    )  # fmt: skip
    for point in points:
        if isnan(point.advantage):
            _say_why(axes, point, low, high)
    for (before, _), (left, right) in zip(changes(points), flips(points), strict=True):
        _mark_flip(axes, left, right, (low, high), rising=before.lead <= 0)
    factors = [point.factor for point in points]
    span = factors[-1] / factors[0]
    axes.set(xscale="log", xlim=(factors[0] / span**0.12, factors[-1] * span**0.12), ylim=(low, high))
    axes.set_xticks(factors, labels=[factor(one) for one in factors])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:+.0f} %" if share else "even")
    axes.set(xlabel="times what was asked", ylabel="advantage of the split")
    centre = (factors[0] * factors[-1]) ** 0.5
    is_free = all(right > centre for _, right in flips(points))
    for text, height, up in (("split is better", 0.97, "top"), ("unsplit is better", 0.03, "bottom")):
        place, across = (0.015, "left") if is_free else (0.985, "right")
        axes.text(place, height, text, transform=axes.transAxes, ha=across, va=up, color=colour("faint"), fontsize=6.5)


def _say_why(axes: Any, point: Point, low: float, high: float) -> None:
    at, text = {1: (0.75 * high, "only\nsplit"), -1: (0.6 * low, "only\nunsplit"), 0: (0.0, "neither")}[point.lead]
    axes.text(
        point.factor, at, text, ha="center", va="center", color=colour("alarm"), fontweight="bold", fontsize=6.5,
        linespacing=1.0,
    )  # fmt: skip


def _mark_flip(axes: Any, left: float, right: float, ends: tuple[float, float], *, rising: bool) -> None:
    low, high = ends
    if left == right:
        axes.axvline(left, color=colour("alarm"), linewidth=1.0, linestyle="dashed")
    else:
        axes.axvspan(left, right, color=colour("breaks-near"), alpha=0.6, linewidth=0)
    middle = (left * right) ** 0.5
    text = f"flips at {readable.number(middle)}" if left == right else "flips between"
    is_above = high > -low
    # On the side of the line where the curve is in the other half.
    shift, across = ((-2, 0), "right") if rising == is_above else ((2, 0), "left")
    axes.annotate(
        text, (middle, high - 0.12 * (high - low) if is_above else low + 0.12 * (high - low)), xytext=shift,
        textcoords="offset points", rotation=90, ha=across, va="top" if is_above else "bottom",
        color=colour("alarm"), fontsize=6.5,
    )  # fmt: skip


def _nothing(plan: Plan, axis: Axis) -> str:
    if axis == Axis.RATE and plan.problem.objective is None:
        return "The rate is what is searched for."
    if plan.problem.machines_exist:
        return "Not looked at for machines\nthat exist."
    if plan.best_split is None or plan.best_unsplit is None:
        return "Needs a split and an unsplit design\nthat keep the SLO."
    return "Not looked at."


def crossover_line(plan: Plan, axis: Axis) -> str:
    """Return where the lead changes along one axis, in words."""
    points = points_of(plan, axis)
    if not points:
        return _nothing(plan, axis).replace("\n", " ")
    parts = [_flip_line(left, right) for left, right in flips(points)]
    if not parts:
        leads = {point.lead for point in points}
        parts = ["split stays ahead throughout" if leads == {1} else "no flip in this range"]
    return f"{AXIS_NAMES[axis].partition(' (')[0]}: {'; '.join(parts)}{_alone(points)}."


def _flip_line(left: float, right: float) -> str:
    if left == right:
        return f"the lead changes at {readable.number(left)} times what was asked"
    return f"the lead changes between {factor(left)} and {factor(right)} times what was asked"


def _alone(points: Sequence[Point]) -> str:
    unsplit = [factor(one.factor) for one in points if isinf(one.split) and not isinf(one.unsplit)]
    split = [factor(one.factor) for one in points if isinf(one.unsplit) and not isinf(one.split)]
    neither = [factor(one.factor) for one in points if isinf(one.unsplit) and isinf(one.split)]
    named = {"only unsplit": unsplit, "only split": split, "neither": neither}
    return "".join(f"; {who} keeps the SLO at {', '.join(at)}" for who, at in named.items() if at)
