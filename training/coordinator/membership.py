"""Members and views of the ring."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Member:
    """A node that takes part in the training.

    Attributes:
        node: Node number.
        incarnation: Unique for each join: a node that rejoins has another.
        endpoints: Endpoints of its ranks' exchanges, by rank.
    """

    node: int
    incarnation: str
    endpoints: tuple[str, ...] = ()


@dataclass(frozen=True)
class View:
    """The members at one moment, by ascending node number.

    Attributes:
        number: Increases with every change.
        members: Members of the ring.
    """

    number: int = 0
    members: tuple[Member, ...] = ()

    @property
    def nodes(self) -> tuple[int, ...]:
        """The members' node numbers, ascending."""
        return tuple(member.node for member in self.members)

    def find(self, node: int) -> Member | None:
        """The member with that node number, or None."""
        return next((member for member in self.members if member.node == node), None)

    def without(self, node: int) -> "View":
        """This view without one node."""
        return View(self.number, tuple(member for member in self.members if member.node != node))

    def to_dict(self) -> dict[str, Any]:
        """JSON representation."""
        members = [[member.node, member.incarnation, list(member.endpoints)] for member in self.members]
        return {"number": self.number, "members": members}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "View":
        """Inverse of `to_dict`."""
        members = (Member(int(node), str(name), tuple(map(str, ends))) for node, name, ends in value["members"])
        return cls(int(value["number"]), tuple(sorted(members, key=lambda member: member.node)))


@dataclass
class MemberState:
    """A member and its reported state.

    Attributes:
        member: Number, incarnation, endpoints.
        ready: Whether it has weights that a newcomer may take.
        seq: Number of its last report.
        step: Number of its local steps.
        since: Number of closed epochs when it joined.
        begins: Whether it joined to begin with its own weights: others will take them.
        model: What it averages, as `AveragedModel.model_dump()`; None if the job says it.
    """

    member: Member
    ready: bool = False
    seq: int = 0
    step: int = 0
    since: int = 0
    begins: bool = False
    model: dict[str, Any] | None = None

    def to_list(self) -> list[Any]:
        """JSON representation."""
        member, state = self.member, [self.ready, self.seq, self.step, self.since, self.begins, self.model]
        return [member.node, member.incarnation, list(member.endpoints), *state]

    @classmethod
    def from_list(cls, value: list[Any]) -> "MemberState":
        """Inverse of `to_list`."""
        node, incarnation, endpoints, *rest = value
        return cls(Member(node, incarnation, tuple(endpoints)), *rest)
