"""What a reader should know before trusting a result's figures."""

from phasesplit.scheduling.rules import Rules

_RARELY = 0.001


def warnings_of(rules: Rules, *, oracle: bool, statuses: dict[str, int], counts: dict[str, int]) -> tuple[str, ...]:
    """Return the warnings, a sentence each.

    Args:
        rules: By which rules.
        oracle: Whether the trace gave the rules true output lengths.
        statuses: Requests by status.
        counts: Counts of the run.
    """
    found = []
    if rules.published:
        found.append(
            "published rules: token time ignores the batch size, links never contend, and whole outputs are reserved"
            " by their true length; figures are for comparison with the published simulator only"
        )
    elif oracle:
        found.append("the rules saw the true output length of every request (an oracle)")
    if statuses["refused"]:
        found.append(
            f"{statuses['refused']:,} of the requests were refused: longer than the model's context, or than the KV"
            " memory of the smallest machine"
        )
    if statuses["unfinished"]:
        found.append(f"{statuses['unfinished']:,} requests never finished: stuck by the published rules")
    for count, what in (("steps_beyond_requests", "batch sizes"), ("steps_beyond_prompt", "prompt sizes")):
        share = counts[count] / max(counts["steps"], 1)
        if share > _RARELY and not rules.published:
            found.append(f"{share:.1%} of the steps used {what} beyond the measured ones: their times are extrapolated")
    if counts["refilled"]:
        found.append(f"{counts['refilled']:,} prompts were computed again because their KV never found room")
    return tuple(found)
