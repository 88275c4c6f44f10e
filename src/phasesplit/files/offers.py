"""The machines that a plan may use, each with the phase times of the model on it, and their other settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phasesplit.domain.machine import Machine
from phasesplit.domain.model import Model
from phasesplit.domain.profile import PhaseTimes
from phasesplit.domain.variants import fitting_degree, sliced, tensor_parallel_degrees
from phasesplit.errors import SpecError
from phasesplit.files.catalog import SLOW_LINKS, phase_times, with_room_for
from phasesplit.files.specs import load_machine

if TYPE_CHECKING:
    from phasesplit.planning.problem import Offer
    from phasesplit.scheduling.rules import Rules

_MEASURED = "measured"


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
        notes: What to tell, a sentence each: machines left out, times that are not to be trusted.
    """

    model: Model
    rules: "Rules"
    profile: str | None = None
    source: str = "auto"
    offers: "list[Offer]" = field(default_factory=list)
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
        from phasesplit.planning.problem import Offer

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
