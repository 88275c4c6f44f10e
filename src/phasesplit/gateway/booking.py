"""What is booked for one attempt of a request."""

from phasesplit.gateway.members import Member


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
