"""What is booked for the attempts of requests: in the scheduling ledger, the leases and the rates, at one instant."""

from collections.abc import Iterator

from phasesplit.domain.kv import blocks_for
from phasesplit.gateway.decisions import Decisions, Placed
from phasesplit.gateway.leases import Leases, Purpose, Reason
from phasesplit.gateway.members import Member
from phasesplit.gateway.roster import Roster
from phasesplit.gateway.verdicts import Lost


class Booking:
    """A request that has a pair.

    Attributes:
        key: Its name.
        slot: Its slot in the ledger.
        prompt: The machine of its prompt phase.
        token: The machine of its token phase.
        computing: Prompt tokens that wait or run; 0 from the first token on.
        started: Its prompt phase has begun to run.
        landed: All its KV is on the token machine.
        prompt_lease: Number of its lease on the prompt machine; 0 where that is the token machine, or once it ended.
        token_lease: Number of its lease on the token machine; 0 once it ended.
    """

    __slots__ = ("computing", "key", "landed", "prompt", "prompt_lease", "slot", "started", "token", "token_lease")

    def __init__(self, key: str, slot: int, prompt: Member, token: Member, prompt_tokens: int) -> None:
        self.key = key
        self.slot = slot
        self.prompt = prompt
        self.token = token
        self.computing = prompt_tokens
        self.started = False
        self.landed = False
        self.prompt_lease = 0
        self.token_lease = 0

    def needs(self, member: Member) -> bool:
        """Return whether it cannot go on without a machine."""
        return self.token is member or (self.prompt is member and self.prompt_lease > 0)


class Bookings:
    """All requests that have a pair; what changes for one of them changes in all books together.

    Args:
        decisions: The scheduling ledger.
        roster: The machines.
        block_tokens: Tokens of a KV block.
        lease_s: How long a lease lives without a heartbeat.

    Attributes:
        leases: Who holds KV blocks where.
        pending_prompt_tokens: Tokens of prompts that wait or run.
    """

    def __init__(self, decisions: Decisions, roster: Roster, *, block_tokens: int, lease_s: float) -> None:
        self.leases = Leases()
        self.pending_prompt_tokens = 0
        self._decisions, self._roster = decisions, roster
        self._block_tokens, self._lease_s = block_tokens, lease_s
        self._live: dict[str, Booking] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Booking]:
        return iter(self._live.values())

    def get(self, key: str) -> Booking | None:
        """Return what is booked for a request, None where it has no pair (any more)."""
        return self._live.get(key)

    def book(self, key: str, placed: Placed, prompt_tokens: int, expected_tokens: int, now_s: float) -> Booking:
        """Book a request that the ledger has placed.

        What the ledger commits is leased: the prompt and one token there, the prompt and the expected output here.

        Args:
            key: Its name.
            placed: Its slot and its machines.
            prompt_tokens: Tokens of its prompt, >= 1.
            expected_tokens: Output tokens that rules count on, >= 1.
            now_s: The instant.
        """
        members = self._roster.members
        live = Booking(
            key, placed.slot, members.at(placed.prompt_machine), members.at(placed.token_machine), prompt_tokens
        )
        self._live[key] = live
        if live.prompt is not live.token:
            live.prompt_lease = self._lease(live.prompt, key, prompt_tokens + 1, Purpose.PROMPT, now_s)
        live.token_lease = self._lease(live.token, key, prompt_tokens + expected_tokens, Purpose.TOKEN, now_s)
        self.pending_prompt_tokens += prompt_tokens
        live.prompt.rate.begin(now_s)
        return live

    def begin_prompt(self, live: Booking, now_s: float) -> None:
        """Book that a prompt phase has begun to run."""
        live.started = True
        self._decisions.begin_prompt(live.slot, now_s)

    def end_prompt_phase(self, live: Booking, now_s: float) -> None:
        """Book a first token."""
        live.started = True
        self._computed(live, live.computing, now_s)
        self._decisions.end_prompt_phase(live.slot, now_s)
        self._roster.report_moves()

    def leave_prompt_machine(self, live: Booking, now_s: float) -> None:
        """Book that a request's KV is off its prompt machine, if that is not its token machine too."""
        if live.prompt_lease:
            self._decisions.end_transfer(live.slot, now_s)
            self.leases.release(live.prompt_lease, Reason.COMPLETED)
            live.prompt_lease = 0

    def end(self, live: Booking, reason: Reason, now_s: float) -> None:
        """Take a request out of all books."""
        del self._live[live.key]
        if live.computing:
            self._computed(live, 0, now_s)
        self._decisions.end_request(live.slot, now_s)
        self._roster.report_moves()
        for number in (live.prompt_lease, live.token_lease):
            if number:
                self.leases.release(number, reason)
        for member in (live.prompt, live.token):
            if member.probe == live.key:
                self._roster.probe_ended(member, now_s)

    def lose(self, member: Member, now_s: float) -> tuple[Lost, ...]:
        """End the requests that cannot go on without a machine that is gone, and return them."""
        needed = [live for live in self if live.needs(member)]
        for live in needed:
            self.end(live, Reason.WORKER_LOST, now_s)
        return tuple(Lost(live.key, "token" if live.token is member else "prompt") for live in needed)

    def expire(self, now_s: float) -> tuple[Lost, ...]:
        """End the requests of which a lease has expired, and return them."""
        expired: dict[str, Lost] = {}
        for lease in self.leases.expire(now_s):
            live = self._live[lease.request]
            if lease.purpose is Purpose.PROMPT:
                live.prompt_lease = 0
            else:
                live.token_lease = 0
            expired.setdefault(live.key, Lost(live.key, str(lease.purpose)))
        for key in expired:
            self.end(self._live[key], Reason.EXPIRED, now_s)
        return tuple(expired.values())

    def _lease(self, member: Member, key: str, tokens: int, purpose: Purpose, now_s: float) -> int:
        """Reserve blocks for so many tokens, and return the number of the lease."""
        blocks = blocks_for(tokens, self._block_tokens)
        return self.leases.reserve(
            member.name, key, blocks, purpose, now_s=now_s, deadline_s=now_s + self._lease_s
        ).number

    def _computed(self, live: Booking, tokens: int, now_s: float) -> None:
        """Take a prompt off the pending ones, of which so many tokens have been computed."""
        self.pending_prompt_tokens -= live.computing
        live.computing = 0
        live.prompt.rate.end(tokens, now_s)
