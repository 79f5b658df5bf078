"""Who trains together at a moment: the members of the ring, as the coordinator last told."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Member:
    """A node that takes part.

    Attributes:
        node: Its number.
        incarnation: Unique to one joining: a node that rejoins has another.
        endpoints: Where its ranks' exchanges answer, in the order of the ranks.
    """

    node: int
    incarnation: str
    endpoints: tuple[str, ...] = ()


@dataclass(frozen=True)
class View:
    """The members at a moment, by ascending node number.

    Attributes:
        number: Grows with every change.
        members: Whoever is in the ring.
    """

    number: int = 0
    members: tuple[Member, ...] = ()

    @property
    def nodes(self) -> tuple[int, ...]:
        """The members' numbers, ascending."""
        return tuple(member.node for member in self.members)

    def find(self, node: int) -> Member | None:
        """The member of that number, or None."""
        return next((member for member in self.members if member.node == node), None)

    def without(self, node: int) -> "View":
        """The same view as if one node had left."""
        return View(self.number, tuple(member for member in self.members if member.node != node))

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        members = [[member.node, member.incarnation, list(member.endpoints)] for member in self.members]
        return {"number": self.number, "members": members}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "View":
        """From what `to_dict` gave."""
        members = (Member(int(node), str(name), tuple(map(str, ends))) for node, name, ends in value["members"])
        return cls(int(value["number"]), tuple(sorted(members, key=lambda member: member.node)))
