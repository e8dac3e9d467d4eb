"""Which data group a waiting request goes to.

Every group is priced in tokens, and the cheapest one with room takes the request:

      tokens that are to be computed there before its own (in this step, and what the prompts in progress have left)
    + ROW_TOKENS x sequences that run there, or wait to (each goes on, a token a step, for who knows how long)
    + 2 x its own tokens that would be computed there (they delay it, and everybody after it)

Its own tokens are fewer where the prefix cache has some, or where a leader is computing them (`shared_prefixes.py`). So
requests that share a prefix gather in one group until that is so much busier than another that computing the prefix
once more there is cheaper. At the same price the group with the most free pages is taken: the prefix caches of an idle
engine fill up evenly.
"""

from dataclasses import dataclass

from serving.engine.group import Group
from serving.engine.sequence import Sequence
from serving.engine.shared_prefixes import Leaders
from serving.kv.cache import Match

ROW_TOKENS = 256  # tokens that a running sequence is taken to have ahead of it: a usual length of an answer


@dataclass(frozen=True, slots=True)
class Place:
    """What one group has to offer to one sequence, valid until anything changes in the group."""

    group: Group
    match: Match | None
    num_own: int  # tokens of the sequence that would be computed
    leader: Sequence | None  # has `leader_pages` in progress that the sequence would wait for
    leader_pages: int
    price: tuple[int, int, int]

    @property
    def has_room(self) -> bool:
        num_cached = len(self.match.pages) if self.match else 0
        return self.group.has_room(self.match, self.num_own + num_cached * self.group.kv.page_size)


def find_places(seq: Sequence, groups: list[Group], leaders: Leaders) -> list[Place]:
    """Of all `groups`, cheapest first."""
    return sorted((_place(seq, group, leaders) for group in groups), key=lambda place: place.price)


def choose(places: list[Place], step_tokens: int) -> Place | None:
    """The cheapest of the places with room. If it can begin only in a later step, for the group has no tokens left in
    this one, it must spare more than the `step_tokens` of a step against the cheapest that can begin now."""
    places = [place for place in places if place.has_room]
    if not places:
        return None
    now = next((place for place in places if place.group.share.budget or place.leader), None)
    if now is None or now.num_own - places[0].num_own > step_tokens:
        return places[0]
    return now


def _place(seq: Sequence, group: Group, leaders: Leaders) -> Place:
    match = group.match(seq)
    num_own, leader, leader_pages = seq.num_tokens, None, 0
    if match is not None:
        num_own -= len(match.pages) * group.kv.page_size
        if not seq.wants_prompt_logprobs:
            leader, num_gained = leaders.find(seq, match)
            num_own -= num_gained * group.kv.page_size
            leader_pages = len(match.pages) + num_gained
    tokens = group.num_outstanding + ROW_TOKENS * (len(group.running) + group.num_expected) + 2 * num_own
    return Place(group, match, num_own, leader, leader_pages, (tokens, -group.kv.pool.num_free, group.index))
